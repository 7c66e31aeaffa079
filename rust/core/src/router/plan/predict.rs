//! Predictions of the time to first token and of step times, by profiles or by what was learned.
use crate::estimate::{DecodeCost, Queued, StepTime};
use crate::fleet::Role;
use crate::ids::{Seconds, Slot};
use crate::indicators::{Columns, Indicator};
use crate::router::state::State;
use std::ops::Range;

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
    /// Returns the decode cost per sequence and per context token: from a profile, else from a
    /// learned step-time model. The fallback assumes that a request costs as much as a thousand
    /// context tokens.
    pub fn decode_cost(&self) -> DecodeCost {
        let decodes = |slot: &usize| self.fleet.role(Slot(*slot as u32)) != Role::Prefill;
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

    /// Predicts the seconds to the first token on `slots` into the entries `part` of the columns.
    pub(super) fn predict_ttft(
        &self,
        slots: Range<usize>,
        part: Range<usize>,
        now: Seconds,
        derived: &mut Columns,
    ) {
        let (decoding, context) = (self.ledger.get(Indicator::RBs), self.ledger.get(Indicator::DecodeTokens));
        let mean = self.mean_prefill_rate();
        let ids = [
            Indicator::PredictedTtftSeconds,
            Indicator::QueuedPrefillTokens,
            Indicator::HitTokens,
            Indicator::NewTokens,
        ];
        let [out, queued, hit, new] = derived.several_mut(ids, part);
        for (i, (out, slot)) in out.iter_mut().zip(slots).enumerate() {
            let queued = Queued { tokens: queued[i], pairs: self.ledger.queued_pairs_on(slot, now) };
            *out = self.ttft(slot, queued, hit[i], new[i], decoding[slot], context[slot], mean);
        }
    }

    /// Returns the mean of the learned prefill rates in tokens/s. An instance without a learned
    /// rate counts as average, so that it gets requests.
    pub fn mean_prefill_rate(&self) -> f64 {
        self.ledger.mean_prefill_rate().unwrap_or(self.config.prior_prefill_tokens_per_second)
    }

    /// Returns the predicted seconds to the first token on a slot. The prompt has `hit` cached and
    /// `new` uncached tokens; the `queued` prefills go first; `decoding` sequences with `context`
    /// tokens run beside it.
    #[allow(clippy::too_many_arguments)]
    pub fn ttft(
        &self,
        slot: usize,
        queued: Queued,
        hit: f64,
        new: f64,
        decoding: f64,
        context: f64,
        mean_rate: f64,
    ) -> Seconds {
        let rate = self.ledger.get(Indicator::PrefillTokensPerSecond)[slot];
        match self.step_time_of(slot) {
            Some(model) => model.ttft(queued, hit, new, decoding, context),
            None => (queued.tokens + new).max(1.0) / if rate.is_nan() { mean_rate } else { rate },
        }
    }

    /// Predicts the decode step time of each slot. Without `joining`: the present batch, by learned
    /// models. With `joining`: the batch with a request of that many prompt tokens, by the profile
    /// if there is one.
    pub(super) fn predict_step(&self, slots: Range<usize>, out: &mut [f64], joining: Option<f64>) {
        let (decoding, context) =
            (self.ledger.get(Indicator::DecodeBs), self.ledger.get(Indicator::DecodeTokens));
        let (more, tokens) = joining.map_or((0.0, 0.0), |prompt| (1.0, prompt));
        for (out, slot) in out.iter_mut().zip(slots) {
            let profile = joining.and_then(|_| self.profiled(slot));
            let model = profile.or_else(|| self.ledger.step_fit(slot).step_time());
            *out = model.map_or(f64::NAN, |model| model.step(decoding[slot] + more, context[slot] + tokens));
        }
    }
}
