//! `sibyl_plus` with `expected_output_tokens` as the exact answer length, which simulations know. A
//! request without `expected_output_tokens` is assumed to run on.
use super::*;
use lmetric_core::estimate::survival::BUCKET_TOKENS;
use lmetric_core::estimate::{
    DecodeCost, DecodeLoad, DecodeWeights, Histogram, LagWeights, Outlook, Progress, Survival, weigh_equally,
};
use lmetric_core::policy::{Prefer, expression};
use std::collections::HashMap;
use std::ops::Range;

pub static SPEC: PolicySpec = PolicySpec::new(
    "sibyl_known",
    "decode_pressure of known lengths + others' requests, lowest",
    "ours, an oracle: sibyl_plus that knows lengths",
    &[],
)
.for_studies();

pub fn build(knobs: &Knobs) -> Result<Box<dyn Policy>, CoreError> {
    let score = "decode_pressure + (bs - decode_bs - bound_bs)";
    let policy = expression(&SPEC, knobs, score, Prefer::Min, &[])?;
    Ok(Box::new(policy.with_decode_weights(known_weights)))
}

fn known_weights() -> Box<dyn DecodeWeights> {
    Box::<KnownWeights>::default()
}

/// Weights for known lengths.
#[derive(Debug, Default)]
struct KnownWeights {
    by_length: Option<ByLength>,
    slots: Vec<Slot>,
}

/// Requests of an instance.
#[derive(Debug, Default)]
struct Slot {
    requests: HashMap<(u32, u32), Progress>,
    /// The decoding requests, by the tokens that they will still make.
    decoding: Histogram,
}

/// Returns the output tokens that a request will still make; infinite if unknown.
fn left(progress: &Progress) -> f64 {
    progress.expected_output_tokens.map_or(f64::INFINITY, |e| (e - progress.output_tokens).max(0.0))
}

impl DecodeWeights for KnownWeights {
    fn renew(&mut self, survival: &Survival, cost: DecodeCost, prompt_tokens: f64) {
        self.by_length = Some(ByLength::new(survival, cost, prompt_tokens));
    }

    fn weigh(&self, outlook: Outlook, loads: &[DecodeLoad], slots: Range<usize>, weights: &mut [f64]) {
        let Some(by_length) = &self.by_length else { return weigh_equally(&loads[slots], weights) };
        let idle = Slot::default();
        for (weight, slot) in weights.iter_mut().zip(slots) {
            *weight = by_length.of(self.slots.get(slot).unwrap_or(&idle), &loads[slot], outlook);
        }
    }

    fn follow(&mut self, slot: usize, key: (u32, u32), progress: Option<Progress>) {
        if slot >= self.slots.len() {
            self.slots.resize_with(slot + 1, Slot::default);
        }
        let Slot { requests, decoding } = &mut self.slots[slot];
        let before = match progress {
            Some(progress) => requests.insert(key, progress),
            None => requests.remove(&key),
        };
        let context = |p: &Progress| p.prompt_tokens + p.output_tokens;
        if let Some(p) = progress.filter(|p| p.decodes) {
            decoding.put(left(&p), context(&p));
        }
        if let Some(p) = before.filter(|p| p.decodes) {
            decoding.take(left(&p), context(&p));
        }
    }

    fn clear(&mut self, slot: usize) {
        self.slots.get_mut(slot).into_iter().for_each(|slot| *slot = Slot::default());
    }
}

/// Weights of requests of known length, in units of requests without a prompt.
#[derive(Debug)]
struct ByLength {
    /// Cost of a request and of a token of its context.
    cost: DecodeCost,
    /// Sums over the first lags of their weights and of weights times lags, at lags
    /// `sample_tokens` apart.
    sums: Vec<(f64, f64)>,
    sample_tokens: f64,
}

impl ByLength {
    fn new(survival: &Survival, cost: DecodeCost, prompt_tokens: f64) -> ByLength {
        let lags = LagWeights::new(survival, cost, prompt_tokens);
        let mut sums = vec![(0.0, 0.0)];
        for (i, weight) in lags.weights.iter().enumerate() {
            let (ones, later) = sums[i];
            sums.push((ones + weight, later + weight * lags.lag(i)));
        }
        let cost = DecodeCost {
            sequence_seconds: cost.sequence_seconds * lags.scale,
            context_token_seconds: cost.context_token_seconds * lags.scale,
        };
        ByLength { cost, sums, sample_tokens: lags.sample_tokens }
    }

    /// Returns the weight of a request that starts `wait` tokens later with `context` tokens and
    /// makes `left` more.
    fn of_request(&self, context: f64, wait: f64, left: f64) -> f64 {
        let at = |tokens: f64| {
            let last = self.sums.len() - 1;
            let place = (tokens / self.sample_tokens).clamp(0.0, last as f64);
            let low = (place as usize).min(last - 1);
            let part = place - low as f64;
            let ((a, b), (c, d)) = (self.sums[low], self.sums[low + 1]);
            (a * (1.0 - part) + c * part, b * (1.0 - part) + d * part)
        };
        let ((ones, lags), (ones_before, lags_before)) = (at(wait + left), at(wait));
        let first = self.cost.sequence_seconds + self.cost.context_token_seconds * (context - wait);
        first * (ones - ones_before) + self.cost.context_token_seconds * (lags - lags_before)
    }

    /// Returns the weight of the requests that decode on an instance or are bound to it.
    fn of(&self, slot: &Slot, load: &DecodeLoad, outlook: Outlook) -> f64 {
        let (requests, context) = slot.decoding.buckets();
        let further = outlook.further();
        let running = requests.iter().zip(context).enumerate().map(|(bucket, (requests, context))| {
            let left = (bucket as f64 + 0.5) * BUCKET_TOKENS - further;
            if *requests == 0.0 || left <= 0.0 {
                return 0.0;
            }
            let each = context / requests + further;
            requests * self.of_request(each, 0.0, left)
        });
        let bound = load.pending().map(|p| {
            let age = outlook.age(p.start);
            let left = left(&slot.requests[&p.key]) - age.max(0.0);
            if left <= 0.0 {
                0.0
            } else {
                self.of_request(p.prompt_tokens + age.max(0.0), (-age).max(0.0), left)
            }
        });
        running.sum::<f64>() + bound.sum::<f64>()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fleet::{Fleet, policy};
    use lmetric_core::estimate::learned_weights;
    use lmetric_core::indicators::Indicator::*;

    #[test]
    fn others_requests_count_one_each() {
        let fleet = Fleet::new(2)
            .set(DecodePressure, &[1.0, 2.0])
            .set(Bs, &[4.0, 6.0])
            .set(DecodeBs, &[3.0, 2.0])
            .set(BoundBs, &[1.0, 1.0]);
        assert_eq!(fleet.score(&*policy("sibyl_known", &[])), [1.0, 5.0]);
    }

    const HERE: Outlook = Outlook { now: 0.0, then: 0.0, rate: 0.0 };
    const LATER: Outlook = Outlook { now: 0.0, then: 10.0, rate: 32.0 };
    const COST: DecodeCost = DecodeCost { sequence_seconds: 7e-5, context_token_seconds: 8.2e-8 };
    const PROMPT: f64 = 500.0;
    const KEY: (u32, u32) = (1, 0);

    fn weight(weights: &dyn DecodeWeights, load: DecodeLoad, outlook: Outlook) -> f64 {
        let mut weight = [f64::NAN];
        weights.weigh(outlook, &[load], 0..1, &mut weight);
        weight[0]
    }

    fn request(length: f64, output_tokens: f64, decodes: bool) -> Progress {
        Progress { prompt_tokens: PROMPT, output_tokens, expected_output_tokens: Some(length), decodes }
    }

    #[test]
    fn a_known_length_weighs_what_is_left_of_it() {
        // All answers have 1,000 tokens: known lengths add no information.
        let mut survival = Survival::default();
        (0..2000).for_each(|_| survival.observe(1000, false));
        let (mut known, mut learned) = (known_weights(), learned_weights());
        for weights in [&mut known, &mut learned] {
            weights.renew(&survival, COST, PROMPT);
        }
        let mut of = |length: f64, generated: f64, outlook: Outlook| {
            known.follow(0, KEY, Some(request(length, generated, true)));
            weight(&*known, DecodeLoad::default(), outlook)
        };
        for generated in [100.0, 500.0, 800.0] {
            let mut load = DecodeLoad::default();
            load.enter(PROMPT, generated);
            let (by_curve, by_length) = (weight(&*learned, load, HERE), of(1000.0, generated, HERE));
            assert!((by_curve - by_length).abs() < 0.1 * by_curve.abs() + 0.05, "{by_curve} {by_length}");
        }
        assert!(of(900.0, 0.0, HERE) > of(450.0, 0.0, HERE) && of(450.0, 0.0, HERE) > of(70.0, 0.0, HERE));
        assert!((of(1000.0, 200.0, LATER) - of(1000.0, 520.0, HERE)).abs() < 1e-9);
        assert_eq!(of(500.0, 200.0, LATER), 0.0, "it will be gone");
        known.follow(0, KEY, None);
        let mut load = DecodeLoad::default();
        load.bind(KEY, PROMPT, 10.0);
        known.follow(0, KEY, Some(request(1000.0, 0.0, false)));
        let (by_curve, by_length) = (weight(&*learned, load.clone(), LATER), weight(&*known, load, LATER));
        assert!((by_curve - by_length).abs() < 0.1 * by_curve + 0.05, "{by_curve} {by_length}");
    }

    #[test]
    fn a_request_that_leaves_and_a_slot_that_is_cleared_weigh_nothing() {
        let mut known = known_weights();
        known.renew(&Survival::default(), COST, PROMPT);
        let weigh = |known: &dyn DecodeWeights| {
            let (loads, mut weights) = (vec![DecodeLoad::default(); 3], [f64::NAN; 2]);
            known.weigh(HERE, &loads, 1..3, &mut weights);
            weights
        };
        for clears in [false, true] {
            for (output_tokens, decodes) in [(0.0, false), (1.0, true), (900.0, true)] {
                known.follow(2, KEY, Some(request(1000.0, output_tokens, decodes)));
            }
            let [other, own] = weigh(&*known);
            assert!(other == 0.0 && own > 0.0, "{other} {own}");
            match clears {
                false => known.follow(2, KEY, None),
                true => known.clear(2),
            }
            assert_eq!(weigh(&*known), [0.0; 2]);
        }
    }
}
