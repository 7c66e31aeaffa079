//! Predicted load at the time when a request starts to decode. Kept only if a policy needs it.
//!
//! The ledger's events feed the predictions: bound requests with their expected start, decoding
//! requests with their progress, and decode rates. The curve of answer lengths is an argument.
use super::counts::{Entry, Stage};
use crate::estimate::survival::BUCKET_TOKENS;
use crate::estimate::{DecodeCost, DecodeLoad, DecodeWeights, Outlook, Progress, Survival, WeightsOf};
use crate::ids::Seconds;
use crate::indicators::{Columns, Indicator, IndicatorSet};
use std::ops::Range;
use std::ptr::fn_addr_eq;

/// Indicators that the predictions provide.
pub const AHEAD: IndicatorSet = IndicatorSet::of(&[
    Indicator::HandoffRunningTokens,
    Indicator::HandoffArrivedTokens,
    Indicator::HandoffComingTokens,
    Indicator::DecodeTokensPerSecond,
    Indicator::DecodePressure,
]);

/// Indicators of SIBYL.
pub const PROJECTED: IndicatorSet = IndicatorSet::of(&[
    Indicator::HandoffRunningTokens,
    Indicator::HandoffArrivedTokens,
    Indicator::HandoffComingTokens,
]);

/// Time constant of the learned decode rates, in seconds.
const PACE_SECONDS: f64 = 10.0;
/// Weight of the latest handoff in the mean handoff time.
const LAG_WEIGHT: f64 = 0.05;

/// Outputs that must end before the first computation of the weights; minimum seconds between two
/// computations.
const MIN_ENDED: u64 = 16;
const REFRESH_SECONDS: f64 = 1.0;
/// Weight of the latest prompt in the mean prompt length.
const PROMPT_WEIGHT: f64 = 0.01;

/// Recent decode rate: tokens over request-seconds, both with exponential decay.
#[derive(Clone, Copy, Debug, Default)]
struct Pace {
    tokens: f64,
    request_seconds: f64,
    requests: f64,
    at: Seconds,
}

impl Pace {
    fn pass(&mut self, now: Seconds) {
        if now == self.at {
            return; // several tokens at one time
        }
        let seconds = (now - self.at).max(0.0);
        let kept = (-seconds / PACE_SECONDS).exp();
        self.tokens *= kept;
        self.request_seconds = self.request_seconds * kept + self.requests * seconds;
        self.at = now;
    }

    fn rate(&self) -> Option<f64> {
        (self.tokens > 0.0 && self.request_seconds > 0.0).then(|| self.tokens / self.request_seconds)
    }
}

/// Decoding and bound requests of all instances, by slot.
#[derive(Debug, Default)]
pub struct Ahead {
    loads: Vec<DecodeLoad>,
    paces: Vec<Pace>,
    /// Decode rate over all instances.
    pace: Pace,
    /// Tokens between two boundaries of the curve of answer lengths.
    bucket_tokens: f64,
    /// Mean seconds from the end of a first segment to the first token of the second.
    lag: Seconds,
    lag_known: bool,
    /// Weights and their source, if a policy brings them; the number of ended outputs behind them
    /// and the time of their computation.
    weights: Option<(WeightsOf, Box<dyn DecodeWeights>)>,
    weighed: (u64, Seconds),
    mean_prompt_tokens: f64,
}

impl Ahead {
    /// Creates empty predictions for `slots` slots, with a curve of this width. `weights_of`: the
    /// source of the weights; `None`: no policy brings weights.
    pub fn new(slots: usize, bucket_tokens: f64, weights_of: Option<WeightsOf>) -> Ahead {
        let weights = weights_of.map(|of| (of, of()));
        let mut ahead = Ahead { weights, bucket_tokens, ..Ahead::default() };
        ahead.resize(slots);
        ahead
    }

    fn weights_of(&self) -> Option<WeightsOf> {
        self.weights.as_ref().map(|(of, _)| *of)
    }

    /// Returns whether the predictions have these weights.
    pub fn suits(&self, weights_of: Option<WeightsOf>) -> bool {
        weights_of.is_none_or(|new| self.weights_of().is_some_and(|old| fn_addr_eq(old, new)))
    }

    /// Returns predictions with a curve of this width and these weights. Learned values stay; the
    /// result contains no requests yet.
    pub fn widened(&self, bucket_tokens: f64, weights_of: Option<WeightsOf>) -> Ahead {
        let idle = |pace: &Pace| Pace { requests: 0.0, ..*pace };
        // Weights need buckets of this width. With others, no policy reads them.
        let kept = self.weights_of().filter(|_| bucket_tokens == BUCKET_TOKENS);
        let empty = Ahead::new(self.loads.len(), bucket_tokens, weights_of.or(kept));
        Ahead {
            paces: self.paces.iter().map(idle).collect(),
            pace: idle(&self.pace),
            lag: self.lag,
            lag_known: self.lag_known,
            mean_prompt_tokens: self.mean_prompt_tokens,
            ..empty
        }
    }

    /// Adds a decoding segment that started to decode before the predictions were kept.
    pub fn resume(&mut self, slot: usize, key: (u32, u32), entry: &Entry, now: Seconds) {
        self.loads[slot].enter(entry.prompt_tokens, entry.output_tokens);
        self.follow(slot, key, Some(entry));
        for pace in [&mut self.paces[slot], &mut self.pace] {
            pace.pass(now);
            pace.requests += 1.0;
        }
    }

    /// Makes room for `slots` slots.
    pub fn resize(&mut self, slots: usize) {
        self.loads.resize_with(slots, || DecodeLoad::new(self.bucket_tokens));
        self.paces.resize_with(slots, Pace::default);
    }

    /// Clears a slot whose instance was removed.
    pub fn clear(&mut self, slot: usize) {
        self.pace.requests -= self.paces[slot].requests;
        (self.loads[slot], self.paces[slot]) = (DecodeLoad::new(self.bucket_tokens), Pace::default());
        self.weights.iter_mut().for_each(|(_, weights)| weights.clear(slot));
    }

    /// Reports the progress of a segment to the weights; `None`: it left the slot.
    fn follow(&mut self, slot: usize, key: (u32, u32), entry: Option<&Entry>) {
        if let Some((_, weights)) = &mut self.weights {
            let progress = |entry: &Entry| Progress {
                prompt_tokens: entry.prompt_tokens,
                output_tokens: entry.output_tokens,
                expected_output_tokens: entry.expected_output_tokens,
                decodes: entry.stage == Stage::Decoding,
            };
            weights.follow(slot, key, entry.map(progress));
        }
    }

    /// Returns the decoding and bound requests of a slot.
    pub fn load(&self, slot: usize) -> &DecodeLoad {
        &self.loads[slot]
    }

    /// Returns the mean seconds from the end of a first segment to the second segment's first
    /// token; 0 if unknown.
    pub fn lag(&self) -> Seconds {
        self.lag
    }

    /// Binds a segment to a slot, with its expected start of decoding. `key`: see
    /// `PlacedSegment::key`.
    pub fn bind(&mut self, slot: usize, key: (u32, u32), entry: &Entry, start: Seconds) {
        let prompt_tokens = entry.prompt_tokens;
        let weight = if self.mean_prompt_tokens == 0.0 { 1.0 } else { PROMPT_WEIGHT };
        self.mean_prompt_tokens += weight * (prompt_tokens - self.mean_prompt_tokens);
        self.loads[slot].bind(key, prompt_tokens, start);
        self.follow(slot, key, Some(entry));
    }

    /// Records the first token of a bound segment, which `entry` counts. `lag`: seconds since the
    /// end of the previous segment.
    pub fn start(&mut self, slot: usize, key: (u32, u32), entry: &Entry, now: Seconds, lag: Option<Seconds>) {
        self.loads[slot].unbind(key);
        self.loads[slot].enter(entry.prompt_tokens, entry.output_tokens);
        self.follow(slot, key, Some(entry));
        for pace in [&mut self.paces[slot], &mut self.pace] {
            pace.pass(now);
            pace.requests += 1.0;
        }
        if let Some(lag) = lag {
            let weight = if self.lag_known { LAG_WEIGHT } else { 1.0 };
            self.lag += weight * (lag - self.lag);
            self.lag_known = true;
        }
    }

    /// Records `tokens` further output tokens of a decoding segment.
    pub fn grow(&mut self, slot: usize, key: (u32, u32), entry: &Entry, tokens: f64, now: Seconds) {
        let (prompt_tokens, generated) = (entry.prompt_tokens, entry.output_tokens);
        self.loads[slot].grow(prompt_tokens, generated, tokens);
        self.follow(slot, key, Some(&Entry { output_tokens: generated + tokens, ..*entry }));
        for pace in [&mut self.paces[slot], &mut self.pace] {
            pace.pass(now);
            pace.tokens += tokens;
        }
    }

    /// Removes a segment from the slot.
    pub fn end(&mut self, slot: usize, key: (u32, u32), entry: &Entry, now: Seconds) {
        self.follow(slot, key, None);
        if entry.stage != Stage::Decoding {
            return self.loads[slot].unbind(key);
        }
        self.loads[slot].leave(entry.prompt_tokens, entry.output_tokens);
        for pace in [&mut self.paces[slot], &mut self.pace] {
            pace.pass(now);
            pace.requests -= 1.0;
        }
    }

    /// Returns whether the weights are due after `ended` answers: see [`Ahead::renew_weights`].
    pub fn weights_due(&self, ended: u64, now: Seconds) -> bool {
        let (last, at) = self.weighed;
        let due = ended >= last + MIN_ENDED && (last == 0 || now >= at + REFRESH_SECONDS);
        due && self.weights.is_some()
    }

    /// Computes the weights again. `cost`: known cost of a decode step.
    pub fn renew_weights(&mut self, curve: &Survival, cost: DecodeCost, now: Seconds) {
        if let Some((_, weights)) = &mut self.weights {
            self.weighed = (curve.seen(), now);
            weights.renew(&curve.product_limit(), cost, self.mean_prompt_tokens);
        }
    }

    /// Writes the predictions of `slots` for a request that starts to decode at `then` to `part` of
    /// the columns.
    pub fn derive(
        &self,
        reads: IndicatorSet,
        slots: Range<usize>,
        part: Range<usize>,
        (now, then): (Seconds, Seconds),
        curve: &Survival,
        columns: &mut Columns,
    ) {
        let mean_rate = self.pace.rate().unwrap_or(0.0);
        let outlook = Outlook { now, then, rate: mean_rate };
        if reads.contains(Indicator::DecodePressure) {
            let pressure = &mut columns.get_mut(Indicator::DecodePressure)[part.clone()];
            match &self.weights {
                Some((_, weights)) => weights.weigh(outlook, &self.loads, slots.clone(), pressure),
                None => pressure.fill(f64::NAN),
            }
        }
        let of = self.loads[slots.clone()].iter().zip(&self.paces[slots]);
        for (place, (load, pace)) in part.zip(of) {
            let rate = pace.rate();
            columns.get_mut(Indicator::DecodeTokensPerSecond)[place] = rate.unwrap_or(f64::NAN);
            if reads.intersects(PROJECTED) {
                let p = load.project(curve, now, then, rate.unwrap_or(mean_rate), mean_rate);
                for (id, value) in [
                    (Indicator::HandoffRunningTokens, p.running),
                    (Indicator::HandoffArrivedTokens, p.arrived),
                    (Indicator::HandoffComingTokens, p.coming),
                ] {
                    columns.get_mut(id)[place] = value;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::estimate::learned_weights;
    use crate::estimate::survival::CurveSettings;

    /// rust 7.20: the cost of a decode step, which walks through the instances, is needed once in
    /// [`REFRESH_SECONDS`], not for each output that ends.
    #[test]
    fn weights_are_due_after_some_outputs_and_some_time() {
        let cost = DecodeCost { sequence_seconds: 1.0, context_token_seconds: 1e-3 };
        let new = |weights_of| Ahead::new(2, BUCKET_TOKENS, weights_of);
        let due_of = |ahead: &mut Ahead, steps: u32| {
            let mut curve = Survival::default();
            let due = (0..steps).filter(|step| {
                let now = f64::from(*step) / 100.0;
                curve.observe(50, false);
                let due = ahead.weights_due(curve.seen(), now);
                if due {
                    ahead.renew_weights(&curve, cost, now);
                }
                due
            });
            due.collect::<Vec<_>>()
        };
        assert_eq!(due_of(&mut new(Some(learned_weights)), 250), [15, 115, 215]);
        assert_eq!(due_of(&mut new(None), 250), []);
    }

    /// The policy that reads the weights is gone, and the next one learns a curve of other buckets.
    #[test]
    fn weights_do_not_outlive_the_buckets_of_their_curve() {
        let cost = DecodeCost { sequence_seconds: 1.0, context_token_seconds: 1e-3 };
        let wide = CurveSettings { bucket_tokens: 256.0, ..CurveSettings::default() };
        let mut curve = Survival::new(wide);
        (0..40).for_each(|_| curve.observe(50, false));
        let mut ahead = Ahead::new(1, BUCKET_TOKENS, Some(learned_weights)).widened(wide.bucket_tokens, None);
        assert!(!ahead.weights_due(curve.seen(), 0.0));
        ahead.renew_weights(&curve, cost, 0.0); // with the weights, it panicked
    }
}
