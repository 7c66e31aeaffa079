//! Loads from the tiers below the GPU: their learned cost, and the tokens that they saved.
use super::backlog::Ended;
use super::counts::Entry;
use crate::estimate::TierLoad;
use crate::kv::tier::Tier;

/// Loads of an instance from one lower tier.
#[derive(Clone, Copy, Debug, Default)]
pub struct LoadsOfTier {
    /// Learned cost.
    pub cost: TierLoad,
    /// Prompt tokens loaded, as predicted and not contradicted by the engine.
    pub hit_tokens: f64,
}

/// Loads of an instance from the lower tiers.
#[derive(Clone, Copy, Debug, Default)]
pub struct TierLoads([LoadsOfTier; Tier::LOWER.len()]);

/// Position of a lower tier.
fn place(tier: Tier) -> Option<usize> {
    Tier::LOWER.iter().position(|lower| *lower == tier)
}

impl TierLoads {
    /// Returns the loads from a lower tier.
    pub fn of(&self, tier: Tier) -> Option<&LoadsOfTier> {
        Some(&self.0[place(tier)?])
    }

    /// Notes a prefill that a first token ended. Returns whether it loaded tokens: its time then
    /// teaches the cost of loads when its request ends, instead of the prefill rate.
    pub(super) fn prefilled(&mut self, ended: &Ended, entry: &mut Entry) -> bool {
        if !ended.single {
            return false;
        }
        let loads = entry.tier_tokens > 0.0;
        if loads {
            entry.load_seconds = Some(ended.seconds);
        } else {
            // Loads are compared with prefills that load nothing.
            self.0.iter_mut().for_each(|each| each.cost.observe(ended.tokens, 0.0, ended.seconds));
        }
        loads
    }

    /// Records the load of a request that ended without a contradiction of its predicted hits.
    pub fn ended(&mut self, entry: &Entry) {
        let Some(place) = place(entry.tier) else { return };
        let loads = &mut self.0[place];
        loads.hit_tokens += entry.tier_tokens;
        if let Some(seconds) = entry.load_seconds {
            loads.cost.observe(entry.new_tokens, entry.tier_tokens, seconds);
        }
    }
}
