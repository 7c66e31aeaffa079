//! Kernels of the indicators that depend on the request or on the time.
use super::fetch::FETCH;
use super::tiers::{hit, tier_hits};
use crate::expr::text_number;
use crate::ids::{Seconds, Slot};
use crate::indicators::{Columns, DeclaredId, Indicator, IndicatorSet, Kernels};
use crate::request::Request;
use crate::router::caches::PrefixMatch;
use crate::router::context::DecisionContext;
use crate::router::fetch_cost::Fetches;
use crate::router::ledger::{AHEAD, Drains};
use crate::router::state::State;
use crate::wide::greater;
use multiversion::multiversion;
use std::ops::Range;

const BLOCKS: IndicatorSet = IndicatorSet::of(&[Indicator::IndexBlocks, Indicator::CacheFreeTokens]);
const WINDOWS: IndicatorSet =
    IndicatorSet::of(&[Indicator::WindowPrefillTokens, Indicator::WindowOutputTokens]);
const FACTS: IndicatorSet =
    IndicatorSet::of(&[Indicator::LoraName, Indicator::Tenant, Indicator::LengthClass, Indicator::Priority]);
const OWNERS: IndicatorSet =
    IndicatorSet::of(&[Indicator::LoraBs, Indicator::LoraLoaded, Indicator::TenantBs]);
const QUEUED: IndicatorSet =
    IndicatorSet::of(&[Indicator::QueuedPrefillTokens, Indicator::PredictedTtftSeconds]);
const P_TOKEN: IndicatorSet = IndicatorSet::of(&[Indicator::PToken]);
const P: IndicatorSet = IndicatorSet::of(&[Indicator::PToken, Indicator::PSeconds]);
const NEW_TOKENS: IndicatorSet = IndicatorSet::of(&[Indicator::NewTokens]);
/// Indicators that the matched blocks and the queue alone give.
const OF_BLOCKS: IndicatorSet =
    IndicatorSet::of(&[Indicator::PToken, Indicator::QueuedPrefillTokens, Indicator::NewTokens]);
const TIER: IndicatorSet = IndicatorSet::of(&[Indicator::TierHitTokens]);
const HITS: IndicatorSet = IndicatorSet::of(&[
    Indicator::HitTokens,
    Indicator::KvHit,
    Indicator::NewTokens,
    Indicator::PredictedTtftSeconds,
    Indicator::FetchTokens,
    Indicator::FetchCostTokens,
]);

/// Kernels of a request at one time.
pub struct RequestKernels<'a> {
    state: &'a State,
    request: &'a Request<'a>,
    matched: &'a PrefixMatch,
    /// Expected seconds until a follow-up segment starts to decode; `None` for a first segment.
    handoff: Option<Seconds>,
    now: Seconds,
    /// Prompt tokens, and the largest number of them that a cache can save.
    prompt: f64,
    most: f64,
    /// Longest prefix that an instance could fetch, in tokens, and the cost of fetches; `None` if
    /// no fetch indicator is read or there is no such prefix.
    fetches: Option<(f64, Fetches)>,
}

impl Kernels for RequestKernels<'_> {
    fn fill(&self, reads: IndicatorSet, slots: Range<usize>, to: usize, columns: &mut Columns) {
        let RequestKernels { state, request, matched, handoff, now, prompt, most, .. } = *self;
        let part = to..to + slots.len();
        let per_block = request.tokens_per_block;
        let hit_blocks = &matched.hit_blocks[slots.clone()];
        if reads == P_TOKEN && matched.tier_blocks.is_empty() {
            let out = &mut columns.get_mut(Indicator::PToken)[part];
            p_token(state.ledger.drains(slots), now, hit_blocks, per_block, most, prompt, out);
            return;
        }
        if reads == NEW_TOKENS && matched.tier_blocks.is_empty() {
            let out = &mut columns.get_mut(Indicator::NewTokens)[part];
            new_tokens(hit_blocks, per_block, most, prompt, out);
            return;
        }
        if reads.intersects(AHEAD) {
            state.derive_ahead(reads, slots.clone(), part.clone(), now, handoff, columns);
        }
        if reads.intersects(OWNERS) {
            self.derive_owners(slots.clone(), part.clone(), columns);
        }
        if reads.intersects(QUEUED) {
            let out = &mut columns.get_mut(Indicator::QueuedPrefillTokens)[part.clone()];
            state.ledger.drains(slots.clone()).write(now, out);
        }
        let tiered = !matched.tier_blocks.is_empty() && reads.intersects(P.union(HITS).union(TIER));
        if tiered {
            let ids = [Indicator::HitTokens, Indicator::TierHitTokens];
            let [out, tier] = columns.several_mut(ids, part.clone());
            tier_hits(hit_blocks, &matched.tier_blocks[slots.clone()], per_block, most, out, tier);
            for (slot, (out, tokens)) in slots.clone().zip(out.iter_mut().zip(&*tier)) {
                if *tokens > 0.0 {
                    *out -= tokens * state.tier_load_ratio(slot, matched.tiers[slot]);
                }
            }
        } else if reads.intersects(TIER) {
            columns.get_mut(Indicator::TierHitTokens)[part.clone()].fill(0.0);
        }
        if reads.intersects(P) && tiered {
            let [out, hits] = columns.several_mut([Indicator::PToken, Indicator::HitTokens], part.clone());
            p_token_of_hits(state.ledger.drains(slots.clone()), now, hits, prompt, out);
        } else if reads.intersects(P) {
            let out = &mut columns.get_mut(Indicator::PToken)[part.clone()];
            p_token(state.ledger.drains(slots.clone()), now, hit_blocks, per_block, most, prompt, out);
        }
        if reads.contains(Indicator::PSeconds) {
            let rates = &state.ledger.get(Indicator::PrefillTokensPerSecond)[slots.clone()];
            let mean = state.mean_prefill_rate();
            let [out, tokens] = columns.several_mut([Indicator::PSeconds, Indicator::PToken], part.clone());
            for ((out, tokens), rate) in out.iter_mut().zip(tokens).zip(rates) {
                *out = *tokens / if rate.is_nan() { mean } else { *rate };
            }
        }
        if reads.and(HITS) == NEW_TOKENS && !tiered {
            let out = &mut columns.get_mut(Indicator::NewTokens)[part.clone()];
            new_tokens(hit_blocks, per_block, most, prompt, out);
        } else if reads.intersects(HITS) {
            if !tiered {
                hits(hit_blocks, per_block, most, &mut columns.get_mut(Indicator::HitTokens)[part.clone()]);
            }
            let share = if prompt > 0.0 { 1.0 / prompt } else { 0.0 };
            let [out, hits] = columns.several_mut([Indicator::KvHit, Indicator::HitTokens], part.clone());
            scaled(hits, share, 0.0, out);
            let [out, hits] = columns.several_mut([Indicator::NewTokens, Indicator::HitTokens], part.clone());
            scaled(hits, -1.0, prompt, out);
        }
        if reads.intersects(WINDOWS) {
            let ids = [Indicator::WindowPrefillTokens, Indicator::WindowOutputTokens];
            let [prefill, output] = columns.several_mut(ids, part.clone());
            state.ledger.windows(now, slots.clone(), prefill, output);
        }
        if reads.intersects(BLOCKS) {
            self.derive_blocks(reads, slots.clone(), part.clone(), columns);
        }
        if reads.contains(Indicator::ReportAgeSeconds) {
            let out = columns.get_mut(Indicator::ReportAgeSeconds)[part.clone()].iter_mut();
            for (out, slot) in out.zip(slots.clone()) {
                *out = state.ledger.reported_at(slot).map_or(f64::NAN, |at| now - at);
            }
        }
        if reads.intersects(FETCH) {
            state.derive_fetches(request, matched, self.fetches, slots.clone(), part.clone(), columns);
        }
        if reads.contains(Indicator::PredictedTtftSeconds) {
            state.predict_ttft(slots.clone(), part.clone(), now, columns);
        }
        for (id, joining) in [(Indicator::StepSeconds, None), (Indicator::PredictedTpotSeconds, Some(prompt))]
        {
            if reads.contains(id) {
                let out = &mut columns.get_mut(id)[part.clone()];
                state.predict_step(slots.clone(), out, joining);
            }
        }
    }
}

impl RequestKernels<'_> {
    /// Writes the indicators `reads` of some slots, to an entry for each.
    pub fn fill_each(&self, reads: IndicatorSet, slots: impl Iterator<Item = usize>, columns: &mut Columns) {
        let RequestKernels { state, request, matched, now, prompt, most, .. } = *self;
        if reads.without(OF_BLOCKS) != IndicatorSet::EMPTY || !matched.tier_blocks.is_empty() {
            slots.enumerate().for_each(|(place, slot)| self.fill(reads, slot..slot + 1, place, columns));
            return;
        }
        // A call of `fill` for each slot takes more time than its numbers.
        let drains = state.ledger.drains(0..matched.hit_blocks.len());
        for (place, slot) in slots.enumerate() {
            let queued = drains.tokens(slot, now);
            let new = prompt - hit(matched.hit_blocks[slot], request.tokens_per_block, most);
            columns.get_mut(Indicator::QueuedPrefillTokens)[place] = queued;
            columns.get_mut(Indicator::NewTokens)[place] = new;
            columns.get_mut(Indicator::PToken)[place] = greater(queued + new, 1.0);
        }
    }

    /// Writes the indicators of the request to slot 0 of their columns. `able`: number of instances
    /// that can take the segment.
    pub fn write_request(&self, reads: IndicatorSet, able: usize, columns: &mut Columns) {
        let request = self.request;
        let number = |name: u64| if name == 0 { f64::NAN } else { text_number(name) };
        let mut write = |id: Indicator, value: f64| columns.get_mut(id)[0] = value;
        write(Indicator::PromptTokens, self.prompt);
        write(Indicator::ExpectedOutputTokens, request.expected_output_tokens.map_or(f64::NAN, f64::from));
        write(Indicator::Instances, able as f64);
        write(Indicator::RecomputeRatio, self.state.recompute_ratio);
        write(Indicator::HandoffSeconds, self.handoff.unwrap_or(f64::NAN));
        if reads.intersects(FACTS) {
            write(Indicator::LoraName, number(request.lora.unwrap_or(0)));
            write(Indicator::Tenant, number(request.tenant.id));
            write(Indicator::LengthClass, number(request.length_class.unwrap_or(0)));
            write(Indicator::Priority, request.priority.unwrap_or(f64::NAN));
        }
    }

    /// Computes the indicators about the blocks in each cache.
    fn derive_blocks(
        &self,
        reads: IndicatorSet,
        slots: Range<usize>,
        part: Range<usize>,
        columns: &mut Columns,
    ) {
        let caches = self.state.caches.read();
        let blocks_on = |slot: usize| caches.gpu().blocks(Slot(slot as u32));
        if reads.contains(Indicator::IndexBlocks) {
            let out = &mut columns.get_mut(Indicator::IndexBlocks)[part.clone()];
            out.iter_mut().zip(slots.clone()).for_each(|(out, slot)| *out = f64::from(blocks_on(slot)));
        }
        if reads.contains(Indicator::CacheFreeTokens) {
            let out = columns.get_mut(Indicator::CacheFreeTokens)[part].iter_mut();
            for (out, slot) in out.zip(slots) {
                let held = blocks_on(slot);
                let per_block = self.request.tokens_per_block;
                let free = |capacity: u32| f64::from(capacity.saturating_sub(held)) * per_block;
                *out = self.state.instances[slot].cache_blocks.map_or(f64::NAN, free);
            }
        }
    }

    /// Computes the indicators about related requests on each instance.
    fn derive_owners(&self, slots: Range<usize>, part: Range<usize>, columns: &mut Columns) {
        let (lora, tenant) = (self.request.lora.unwrap_or(0), self.request.tenant.id);
        let owners = &self.state.ledger.owners()[slots];
        let loaded = columns.get_mut(Indicator::LoraLoaded)[part.clone()].iter_mut();
        loaded.zip(owners).for_each(|(out, owners)| *out = owners.lora_loaded(lora));
        let [of_lora, of_tenant] = columns.several_mut([Indicator::LoraBs, Indicator::TenantBs], part);
        of_lora.iter_mut().zip(owners).for_each(|(out, owners)| *out = owners.lora(lora));
        of_tenant.iter_mut().zip(owners).for_each(|(out, owners)| *out = owners.tenant(tenant));
    }
}

impl State {
    /// Returns the kernels of a request at `now`. `handoff`: expected seconds until a follow-up
    /// segment starts to decode; `None` for a first segment. `failed`: slots that failed it.
    pub fn kernels<'a>(
        &'a self,
        matched: &'a PrefixMatch,
        request: &'a Request<'a>,
        reads: IndicatorSet,
        handoff: Option<Seconds>,
        failed: &[u32],
        now: Seconds,
    ) -> RequestKernels<'a> {
        let fetches = self.fetches.filter(|_| reads.intersects(FETCH) && handoff.is_none());
        let fetches = fetches.and_then(|fetches| {
            let reach = self.reach(&matched.hit_blocks, request, failed);
            (reach > 0.0).then(|| (reach, fetches.at(now)))
        });
        RequestKernels {
            state: self,
            request,
            matched,
            handoff,
            now,
            prompt: f64::from(request.prompt_tokens),
            most: request.max_hit_tokens(self.config.partial_blocks),
            fetches,
        }
    }

    /// Computes the columns of the indicators `reads` for `request` at `now`, except the ledger's
    /// own, and the request's own indicators. `able`: number of instances that can take the
    /// segment.
    pub fn derive(
        &self,
        context: &mut DecisionContext,
        request: &Request<'_>,
        reads: IndicatorSet,
        able: usize,
        handoff: Option<Seconds>,
        now: Seconds,
    ) {
        let DecisionContext { matched, derived, .. } = context;
        let slots = derived.slots();
        if slots > 0 {
            let kernels = self.kernels(matched, request, reads, handoff, &[], now);
            kernels.write_request(reads, able, derived);
            kernels.fill(reads, 0..slots, 0, derived);
        }
    }

    /// Computes the predicted loads; without predictions, they are 0 and decode rates are absent.
    fn derive_ahead(
        &self,
        reads: IndicatorSet,
        slots: Range<usize>,
        part: Range<usize>,
        now: Seconds,
        handoff: Option<Seconds>,
        columns: &mut Columns,
    ) {
        let times = (now, now + handoff.unwrap_or(0.0));
        match (self.ledger.ahead(), self.ledger.answers.curve()) {
            (Some(ahead), Some(curve)) => ahead.derive(reads, slots, part, times, curve, columns),
            _ => AHEAD.iter().for_each(|id| {
                let rate = id == Indicator::DecodeTokensPerSecond;
                columns.get_mut(id)[part.clone()].fill(if rate { f64::NAN } else { 0.0 });
            }),
        }
    }

    /// Reads the declared indicators `ids` at `now`.
    pub fn derive_declared(&self, context: &mut DecisionContext, ids: &[DeclaredId], now: Seconds) {
        for id in ids {
            if context.declared.len() <= id.index() {
                context.declared.resize(id.index() + 1, Vec::new());
            }
            self.ledger.declared().read(*id, now, &mut context.declared[id.index()]);
        }
    }

    /// Returns the prompt tokens saved by `blocks` matched blocks.
    #[inline]
    pub fn saved_tokens(&self, request: &Request<'_>, blocks: u32) -> f64 {
        let most = request.max_hit_tokens(self.config.partial_blocks);
        hit(blocks, request.tokens_per_block, most)
    }

    /// Returns the prompt tokens saved by the GPU's blocks and a lower tier's blocks behind them,
    /// and how many of the tokens come from the tier.
    #[inline]
    pub fn reusable_tokens(&self, request: &Request<'_>, (gpu, tier): (u32, u32)) -> (f64, f64) {
        let all = self.saved_tokens(request, gpu + tier);
        (all, if tier == 0 { 0.0 } else { all - self.saved_tokens(request, gpu) })
    }

    /// Converts matched blocks to hit tokens, rounded down.
    pub fn whole_hits(&self, request: &Request<'_>, blocks: &mut [u32]) {
        let most = request.max_hit_tokens(self.config.partial_blocks);
        blocks_to_tokens(blocks, request.tokens_per_block, most);
    }
}

#[multiversion(targets("x86_64+avx2"))]
fn hits(blocks: &[u32], per_block: f64, most: f64, out: &mut [f64]) {
    for (out, blocks) in out.iter_mut().zip(blocks) {
        *out = hit(*blocks, per_block, most);
    }
}

#[multiversion(targets("x86_64+avx2"))]
fn new_tokens(blocks: &[u32], per_block: f64, most: f64, prompt: f64, out: &mut [f64]) {
    for (out, blocks) in out.iter_mut().zip(blocks) {
        *out = prompt - hit(*blocks, per_block, most);
    }
}

#[multiversion(targets("x86_64+avx2"))]
fn scaled(values: &[f64], factor: f64, offset: f64, out: &mut [f64]) {
    for (out, value) in out.iter_mut().zip(values) {
        *out = value * factor + offset;
    }
}

#[multiversion(targets("x86_64+avx2"))]
fn p_token(
    drains: Drains<'_>,
    now: Seconds,
    blocks: &[u32],
    per_block: f64,
    most: f64,
    prompt: f64,
    out: &mut [f64],
) {
    // Equal lengths: the loop needs no check for each slot.
    let (drains, blocks) = (drains.first(out.len()), &blocks[..out.len()]);
    for (i, (out, blocks)) in out.iter_mut().zip(blocks).enumerate() {
        *out = greater(drains.tokens(i, now) + (prompt - hit(*blocks, per_block, most)), 1.0);
    }
}

#[multiversion(targets("x86_64+avx2"))]
fn p_token_of_hits(drains: Drains<'_>, now: Seconds, hits: &[f64], prompt: f64, out: &mut [f64]) {
    let drains = drains.first(out.len());
    for (i, (out, hits)) in out.iter_mut().zip(hits).enumerate() {
        *out = greater(drains.tokens(i, now) + (prompt - hits), 1.0);
    }
}

#[multiversion(targets("x86_64+avx2"))]
fn blocks_to_tokens(blocks: &mut [u32], per_block: f64, most: f64) {
    for blocks in blocks {
        *blocks = hit(*blocks, per_block, most) as i32 as u32;
    }
}
