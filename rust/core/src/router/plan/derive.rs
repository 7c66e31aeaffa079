//! Computes indicators that depend on the request or on the time, if they are read.
use super::fetch::FETCH;
use super::tiers::{hit, tier_hits};
use crate::estimate::{DecodeCost, StepTime};
use crate::fleet::Role;
use crate::ids::{InstanceId, Seconds};
use crate::indicators::{Columns, DeclaredId, Indicator, IndicatorSet};
use crate::request::{Request, text_number};
use crate::router::context::DecisionContext;
use crate::router::ledger::AHEAD;
use crate::router::state::State;
use crate::wide::greater;
use multiversion::multiversion;

/// Returns the maximum number of prompt tokens that a cache can save. Every engine computes the
/// last token, and caches hold whole blocks unless engines keep `partial` last blocks.
#[inline]
fn max_hit_tokens(request: &Request<'_>, partial: bool) -> f64 {
    if request.tokens_per_block <= 0.0 || request.prompt_tokens == 0 {
        return 0.0;
    }
    let most = f64::from(request.prompt_tokens - 1);
    if partial { most } else { (most / request.tokens_per_block).floor() * request.tokens_per_block }
}

const BLOCKS: IndicatorSet = IndicatorSet::of(&[Indicator::IndexBlocks]);
const WINDOWS: IndicatorSet =
    IndicatorSet::of(&[Indicator::WindowPrefillTokens, Indicator::WindowOutputTokens]);
const FACTS: IndicatorSet = IndicatorSet::of(&[
    Indicator::LoraName,
    Indicator::Tenant,
    Indicator::LengthClass,
    Indicator::Priority,
    Indicator::LoraBs,
    Indicator::LoraLoaded,
    Indicator::TenantBs,
]);
const QUEUED: IndicatorSet = IndicatorSet::of(&[
    Indicator::QueuedPrefillTokens,
    Indicator::PToken,
    Indicator::PSeconds,
    Indicator::PredictedTtftSeconds,
]);
const P: IndicatorSet = IndicatorSet::of(&[Indicator::PToken, Indicator::PSeconds]);
const TIER: IndicatorSet = IndicatorSet::of(&[Indicator::TierHitTokens]);
const HITS: IndicatorSet = IndicatorSet::of(&[
    Indicator::HitTokens,
    Indicator::KvHit,
    Indicator::NewTokens,
    Indicator::PredictedTtftSeconds,
    Indicator::FetchTokens,
    Indicator::FetchCostTokens,
]);

/// Maximum relative error of a learned step-time model that predicts the time to first token.
const MAX_STEP_ERROR: f64 = 1.0 / 3.0;

/// The source of a prediction of the time to first token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TtftSource {
    /// The step-time model of the configured profile.
    Profile,
    /// The step-time model learned from this router's streams on the instance.
    LearnedStepTime,
    /// The prefill rate learned from this router's first tokens on the instance.
    LearnedRate,
    /// The mean of the rates learned on other instances.
    PoolRate,
    /// The assumed rate of the configuration.
    Prior,
}

impl TtftSource {
    /// All values, with their names in metrics.
    pub const NAMES: [(&'static str, TtftSource); 5] = [
        ("profile", TtftSource::Profile),
        ("learned_step_time", TtftSource::LearnedStepTime),
        ("learned_rate", TtftSource::LearnedRate),
        ("pool_rate", TtftSource::PoolRate),
        ("prior", TtftSource::Prior),
    ];

    /// Returns the name.
    pub fn name(self) -> &'static str {
        TtftSource::NAMES.iter().find(|(_, source)| *source == self).expect("every source has a name").0
    }
}

impl State {
    /// Computes the indicators `reads` for `request` at `now`, except the ledger's own. `able`:
    /// number of instances that can take the segment. `handoff`: expected seconds until a follow-up
    /// segment starts to decode; `None` for a first segment.
    pub fn derive(
        &self,
        context: &mut DecisionContext,
        request: &Request<'_>,
        reads: IndicatorSet,
        able: usize,
        handoff: Option<Seconds>,
        now: Seconds,
    ) {
        let DecisionContext { hit_blocks, tier_blocks, tiers, derived: columns, .. } = context;
        let prompt = f64::from(request.prompt_tokens);
        if columns.slots() == 0 {
            return;
        }
        columns.get_mut(Indicator::PromptTokens)[0] = prompt;
        columns.get_mut(Indicator::ExpectedOutputTokens)[0] =
            request.expected_output_tokens.map_or(f64::NAN, f64::from);
        columns.get_mut(Indicator::Instances)[0] = able as f64;
        columns.get_mut(Indicator::RecomputeRatio)[0] = self.recompute_ratio;
        columns.get_mut(Indicator::HandoffSeconds)[0] = handoff.unwrap_or(f64::NAN);
        if let Some(ahead) = self.ledger.ahead().filter(|_| reads.intersects(AHEAD)) {
            ahead.derive(reads, now, now + handoff.unwrap_or(0.0), columns);
        }
        if reads.intersects(FACTS) {
            self.derive_facts(columns, request);
        }
        if reads.intersects(QUEUED) {
            self.ledger.queued_prefill(now, columns.get_mut(Indicator::QueuedPrefillTokens));
        }
        let (per_block, most) =
            (request.tokens_per_block, max_hit_tokens(request, self.config.partial_blocks));
        let tiered = !tier_blocks.is_empty() && reads.intersects(P.union(HITS).union(TIER));
        if tiered {
            let [out, tier] = columns.several_mut([Indicator::HitTokens, Indicator::TierHitTokens]);
            tier_hits(hit_blocks, tier_blocks, per_block, most, out, tier);
            for (slot, (out, tokens)) in out.iter_mut().zip(&*tier).enumerate() {
                if *tokens > 0.0 {
                    *out -= tokens * self.tier_load_ratio(slot, tiers[slot]);
                }
            }
        } else if reads.intersects(TIER) {
            columns.get_mut(Indicator::TierHitTokens).fill(0.0);
        }
        if reads.intersects(P) && tiered {
            let [out, queued, hits] = columns.several_mut([
                Indicator::PToken,
                Indicator::QueuedPrefillTokens,
                Indicator::HitTokens,
            ]);
            p_token_of_hits(queued, hits, prompt, out);
        } else if reads.intersects(P) {
            let [out, queued] = columns.several_mut([Indicator::PToken, Indicator::QueuedPrefillTokens]);
            p_token(queued, hit_blocks, per_block, most, prompt, out);
        }
        if reads.contains(Indicator::PSeconds) {
            let (rates, mean) =
                (self.ledger.get(Indicator::PrefillTokensPerSecond), self.mean_prefill_rate());
            let [out, tokens] = columns.several_mut([Indicator::PSeconds, Indicator::PToken]);
            for ((out, tokens), rate) in out.iter_mut().zip(tokens).zip(rates) {
                *out = *tokens / if rate.is_nan() { mean } else { *rate };
            }
        }
        if reads.intersects(HITS) {
            if !tiered {
                hits(hit_blocks, per_block, most, columns.get_mut(Indicator::HitTokens));
            }
            let share = if prompt > 0.0 { 1.0 / prompt } else { 0.0 };
            let [out, hits] = columns.several_mut([Indicator::KvHit, Indicator::HitTokens]);
            scaled(hits, share, 0.0, out);
            let [out, hits] = columns.several_mut([Indicator::NewTokens, Indicator::HitTokens]);
            scaled(hits, -1.0, prompt, out);
        }
        if reads.intersects(WINDOWS) {
            let [prefill, output] =
                columns.several_mut([Indicator::WindowPrefillTokens, Indicator::WindowOutputTokens]);
            self.ledger.windows(now, prefill, output);
        }
        if reads.intersects(BLOCKS) {
            let column = columns.get_mut(Indicator::IndexBlocks);
            for (slot, out) in column.iter_mut().enumerate() {
                *out = f64::from(self.index.blocks(InstanceId(slot as u32)));
            }
        }
        if reads.contains(Indicator::CacheFreeTokens) {
            let column = columns.get_mut(Indicator::CacheFreeTokens);
            for (slot, (out, instance)) in column.iter_mut().zip(&self.instances).enumerate() {
                let held = self.index.blocks(InstanceId(slot as u32));
                let free = |capacity: u32| f64::from(capacity.saturating_sub(held)) * per_block;
                *out = instance.cache_blocks.map_or(f64::NAN, free);
            }
        }
        if reads.contains(Indicator::ReportAgeSeconds) {
            for (slot, out) in columns.get_mut(Indicator::ReportAgeSeconds).iter_mut().enumerate() {
                *out = self.ledger.reported_at(slot).map_or(f64::NAN, |at| now - at);
            }
        }
        if reads.intersects(FETCH) {
            self.derive_fetches(context, request, handoff.is_none());
        }
        if reads.contains(Indicator::PredictedTtftSeconds) {
            self.predict_ttft(&mut context.derived);
        }
        for (id, joining) in [(Indicator::StepSeconds, None), (Indicator::PredictedTpotSeconds, Some(prompt))]
        {
            if reads.contains(id) {
                self.predict_step(&mut context.derived, id, joining);
            }
        }
    }

    /// Computes the indicators about the request's properties and about related requests on each
    /// instance.
    fn derive_facts(&self, columns: &mut Columns, request: &Request<'_>) {
        let (lora, tenant) = (request.lora.unwrap_or(0), request.tenant.id);
        let number = |name: u64| if name == 0 { f64::NAN } else { text_number(name) };
        columns.get_mut(Indicator::LoraName)[0] = number(lora);
        columns.get_mut(Indicator::Tenant)[0] = number(tenant);
        columns.get_mut(Indicator::LengthClass)[0] = number(request.length_class.unwrap_or(0));
        columns.get_mut(Indicator::Priority)[0] = request.priority.unwrap_or(f64::NAN);
        let loaded = columns.get_mut(Indicator::LoraLoaded).iter_mut();
        loaded.zip(self.ledger.owners()).for_each(|(out, owners)| *out = owners.lora_loaded(lora));
        let [of_lora, of_tenant] = columns.several_mut([Indicator::LoraBs, Indicator::TenantBs]);
        of_lora.iter_mut().zip(self.ledger.owners()).for_each(|(out, owners)| *out = owners.lora(lora));
        of_tenant.iter_mut().zip(self.ledger.owners()).for_each(|(out, owners)| *out = owners.tenant(tenant));
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
        let most = max_hit_tokens(request, self.config.partial_blocks);
        hit(blocks, request.tokens_per_block, most)
    }

    /// Returns the prompt tokens saved by the GPU's blocks and a lower tier's blocks behind them,
    /// and how many of the tokens come from the tier.
    #[inline]
    pub fn reusable_tokens(&self, request: &Request<'_>, (gpu, tier): (u32, u32)) -> (f64, f64) {
        let all = self.saved_tokens(request, gpu + tier);
        (all, if tier == 0 { 0.0 } else { all - self.saved_tokens(request, gpu) })
    }

    /// Returns the maximum number of whole blocks of the prompt that a cache can save.
    pub fn max_hit_blocks(&self, request: &Request<'_>) -> u32 {
        let most = max_hit_tokens(request, self.config.partial_blocks);
        if request.tokens_per_block > 0.0 { (most / request.tokens_per_block) as u32 } else { 0 }
    }

    /// Converts matched blocks to hit tokens, rounded down.
    pub fn whole_hits(&self, request: &Request<'_>, blocks: &mut [u32]) {
        let most = max_hit_tokens(request, self.config.partial_blocks);
        blocks_to_tokens(blocks, request.tokens_per_block, most);
    }

    /// Returns the decode cost per sequence and per context token: from a profile, else from a
    /// learned step-time model. The fallback assumes that a request costs as much as a thousand
    /// context tokens.
    pub fn decode_cost(&self) -> DecodeCost {
        let decodes = |slot: &usize| self.fleet.role(InstanceId(*slot as u32)) != Role::Prefill;
        let profiled =
            || (0..self.fleet.slots()).filter(decodes).find_map(|slot| self.instances[slot].step_time);
        let learned = || {
            (0..self.fleet.slots()).filter_map(|slot| self.ledger.step_fit(slot).step_time()).find(|model| {
                model.decode_seconds_per_sequence > 0.0 || model.decode_seconds_per_context_token > 0.0
            })
        };
        match profiled().or(self.config.step_time).or_else(learned) {
            Some(model) => DecodeCost {
                sequence_seconds: model.decode_seconds_per_sequence,
                context_token_seconds: model.decode_seconds_per_context_token,
            },
            None => DecodeCost { sequence_seconds: 1.0, context_token_seconds: 1e-3 },
        }
    }

    /// Returns the source of TTFT predictions on a slot. `pool_rate`: whether any instance has a
    /// learned rate.
    pub fn ttft_source(&self, slot: usize, pool_rate: bool) -> TtftSource {
        match () {
            () if self.profiled(slot).is_some() => TtftSource::Profile,
            () if self.learned(slot).is_some() => TtftSource::LearnedStepTime,
            () if !self.ledger.get(Indicator::PrefillTokensPerSecond)[slot].is_nan() => {
                TtftSource::LearnedRate
            }
            () if pool_rate => TtftSource::PoolRate,
            () => TtftSource::Prior,
        }
    }

    /// Returns the step-time model learned on a slot, if it is accurate enough for prefill
    /// predictions.
    fn learned(&self, slot: usize) -> Option<StepTime> {
        let fit = self.ledger.step_fit(slot);
        let good = fit.knows_prefill() && fit.relative_error().is_some_and(|error| error < MAX_STEP_ERROR);
        if good { fit.step_time() } else { None }
    }

    /// Returns the step-time model of a slot, if a profile or enough measurements exist.
    pub fn step_time_of(&self, slot: usize) -> Option<StepTime> {
        self.profiled(slot).or_else(|| self.learned(slot))
    }

    /// Returns the step-time model of a slot's own profile, else of the common profile.
    fn profiled(&self, slot: usize) -> Option<StepTime> {
        self.instances[slot].step_time.or(self.config.step_time)
    }

    fn predict_ttft(&self, derived: &mut Columns) {
        let (decoding, context) = (self.ledger.get(Indicator::RBs), self.ledger.get(Indicator::DecodeTokens));
        let mean = self.mean_prefill_rate();
        let [out, queued, hit, new] = derived.several_mut([
            Indicator::PredictedTtftSeconds,
            Indicator::QueuedPrefillTokens,
            Indicator::HitTokens,
            Indicator::NewTokens,
        ]);
        for (i, out) in out.iter_mut().enumerate() {
            *out = self.ttft(i, queued[i], hit[i], new[i], decoding[i], context[i], mean);
        }
    }

    /// Returns the mean of the learned prefill rates in tokens/s. An instance without a learned
    /// rate counts as average, so that it gets requests.
    pub fn mean_prefill_rate(&self) -> f64 {
        self.ledger.mean_prefill_rate().unwrap_or(self.config.prior_prefill_tokens_per_second)
    }

    /// Returns the predicted seconds to the first token on a slot. The prompt has `hit` cached and
    /// `new` uncached tokens; `queued` prefill tokens go first; `decoding` sequences with `context`
    /// tokens run beside it.
    #[allow(clippy::too_many_arguments)]
    pub fn ttft(
        &self,
        slot: usize,
        queued: f64,
        hit: f64,
        new: f64,
        decoding: f64,
        context: f64,
        mean_rate: f64,
    ) -> Seconds {
        let rate = self.ledger.get(Indicator::PrefillTokensPerSecond)[slot];
        match self.step_time_of(slot) {
            Some(model) => model.ttft(queued, hit, new, decoding, context),
            None => (queued + new).max(1.0) / if rate.is_nan() { mean_rate } else { rate },
        }
    }

    /// Predicts the decode step time of each slot. Without `joining`: the present batch, by learned
    /// models. With `joining`: the batch with a request of that many prompt tokens, by the profile
    /// if there is one.
    fn predict_step(&self, derived: &mut Columns, id: Indicator, joining: Option<f64>) {
        let (decoding, context) =
            (self.ledger.get(Indicator::DecodeBs), self.ledger.get(Indicator::DecodeTokens));
        let (more, tokens) = joining.map_or((0.0, 0.0), |prompt| (1.0, prompt));
        for (i, out) in derived.get_mut(id).iter_mut().enumerate() {
            let profile = joining.and_then(|_| self.profiled(i));
            let model = profile.or_else(|| self.ledger.step_fit(i).step_time());
            *out = model.map_or(f64::NAN, |model| model.step(decoding[i] + more, context[i] + tokens));
        }
    }
}

#[multiversion(targets("x86_64+avx2"))]
fn hits(blocks: &[u32], per_block: f64, most: f64, out: &mut [f64]) {
    for (out, blocks) in out.iter_mut().zip(blocks) {
        *out = hit(*blocks, per_block, most);
    }
}

#[multiversion(targets("x86_64+avx2"))]
fn scaled(values: &[f64], factor: f64, offset: f64, out: &mut [f64]) {
    for (out, value) in out.iter_mut().zip(values) {
        *out = value * factor + offset;
    }
}

#[multiversion(targets("x86_64+avx2"))]
fn p_token(queued: &[f64], blocks: &[u32], per_block: f64, most: f64, prompt: f64, out: &mut [f64]) {
    for ((out, queued), blocks) in out.iter_mut().zip(queued).zip(blocks) {
        *out = greater(queued + (prompt - hit(*blocks, per_block, most)), 1.0);
    }
}

#[multiversion(targets("x86_64+avx2"))]
fn p_token_of_hits(queued: &[f64], hits: &[f64], prompt: f64, out: &mut [f64]) {
    for ((out, queued), hits) in out.iter_mut().zip(queued).zip(hits) {
        *out = greater(queued + (prompt - hits), 1.0);
    }
}

#[multiversion(targets("x86_64+avx2"))]
fn blocks_to_tokens(blocks: &mut [u32], per_block: f64, most: f64) {
    for blocks in blocks {
        *blocks = hit(*blocks, per_block, most) as i32 as u32;
    }
}
