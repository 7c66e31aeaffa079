//! Hits of a prompt on the GPU and in the tiers below it, and what loading from these costs.
use crate::kv::tier::Tier;
use crate::router::state::State;
use crate::wide::lesser;
use multiversion::multiversion;

impl State {
    /// Returns the seconds to load a token from a tier of a slot divided by the seconds to compute
    /// it: learned from loads, before the first load as configured.
    pub fn tier_load_ratio(&self, slot: usize, tier: Tier) -> f64 {
        let prior = self.config.tiers.load_ratio;
        self.ledger.loads(slot).of(tier).map_or(prior, |loads| loads.cost.ratio(prior))
    }
}

/// Returns whole tokens, so that the ledger's numbers stay integers. Converts through i32, which
/// processors vectorize; an index never holds 2^31 blocks of a prompt.
#[inline(always)]
pub(super) fn hit(blocks: u32, per_block: f64, most: f64) -> f64 {
    lesser(f64::from(blocks as i32) * per_block, most).floor()
}

/// Writes the tokens that each slot can load from a lower tier to `tier`, and its cached tokens to
/// `out`.
#[multiversion(targets("x86_64+avx2"))]
pub(super) fn tier_hits(
    blocks: &[u32],
    tier_blocks: &[u32],
    per_block: f64,
    most: f64,
    out: &mut [f64],
    tier: &mut [f64],
) {
    for (((out, tier), blocks), more) in out.iter_mut().zip(tier).zip(blocks).zip(tier_blocks) {
        let gpu = hit(*blocks, per_block, most);
        *tier = hit(*blocks + *more, per_block, most) - gpu;
        *out = gpu + *tier;
    }
}
