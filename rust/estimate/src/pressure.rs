//! Weight of a request on the instance that decodes it, by its progress.
//!
//! Rules such as least requests or least tokens sum a value over the requests of an instance: 1, or
//! the context. A request that joins adds `G(t) = S(t) (a + b (prompt + t))` to each step of its
//! instance `t` tokens later, with `a` and `b` of the step-time model. A rule that reads only the
//! present load corrects load today that will be gone tomorrow, and its own cohorts come back to
//! it. A rule that reads all future load is slow.
//!
//! Take the arrivals as the only control input. The rule with the least variance of the load, for a
//! small price on correcting, weighs the expected load `m` tokens ahead by the impulse response of
//! `G / C`. Here C is the minimum-phase filter with `|C|^2 = |G|^2 + PRICE max |G|^2`. A request
//! then counts for `sum over m of w(m) S(g + m) / S(g) (a + b (prompt + g + m))`.
//!
//! A new request is load from the moment at which it starts to decode. So all other requests count
//! as they will be at that moment, in SIBYL's three types. Decoding requests are that much older,
//! weighted by their chance to last. Bound requests have begun by then, or begin later and count
//! with the remaining weights.
use crate::survival::{BUCKET_TOKENS, BUCKETS, Survival};
use crate::{DecodeCost, DecodeLoad, DecodeWeights, Outlook, weigh_equally};
use multiversion::multiversion;
use rustfft::FftPlanner;
use rustfft::num_complex::Complex;
use std::ops::Range;

/// Price of correcting, as a fraction of the largest gain of the load's response.
const PRICE: f64 = 1e-3;
/// Chance of a longer answer at which a life counts as ended.
const FEW: f64 = 1e-3;
/// Tokens between two samples of a life; twice as many if it has more than [`SAMPLES`].
const SAMPLE_TOKENS: f64 = 16.0;
/// Largest number of samples of a life.
const SAMPLES: usize = 1024;
/// Points of the transforms: a life, and room for the response to end in.
const POINTS: usize = 8 * SAMPLES;

/// Weights of requests: a part for each request, and a part for each token of its context.
#[derive(Clone, Debug, PartialEq)]
struct Curve {
    requests: Vec<f64>,
    context: Vec<f64>,
}

impl Curve {
    fn of(points: impl Iterator<Item = (f64, f64)>) -> Curve {
        let (requests, context) = points.unzip();
        Curve { requests, context }
    }

    /// Returns the weight with `context` tokens, `tokens` tokens along the curve.
    fn at(&self, tokens: f64, context: f64) -> f64 {
        let last = self.requests.len() - 1;
        let place = (tokens / BUCKET_TOKENS).clamp(0.0, last as f64);
        let low = (place as usize).min(last.saturating_sub(1));
        let part = place - low as f64;
        let value = |curve: &[f64]| curve[low] * (1.0 - part) + curve[(low + 1).min(last)] * part;
        value(&self.requests) + value(&self.context) * context
    }
}

/// Weights of the load of an instance by the time until then: the impulse response of `G / C`.
#[derive(Clone, Debug)]
pub struct LagWeights {
    /// Tokens between two lags. The first lag is half of it.
    pub sample_tokens: f64,
    /// Weight of the load at each lag.
    pub weights: Vec<f64>,
    /// Factor by which a request that starts without a prompt weighs 1.
    pub scale: f64,
    /// Chance of an answer longer than each lag.
    alive: Vec<f64>,
}

impl LagWeights {
    /// Makes the weights for answers of these lengths behind prompts of `prompt_tokens` on average.
    pub fn new(survival: &Survival, cost: DecodeCost, prompt_tokens: f64) -> LagWeights {
        let curve = survival.boundaries();
        let last = (1..curve.len()).rev().find(|&i| curve[i] >= FEW).map_or(1, |i| (i + 1).min(BUCKETS));
        let end = last as f64 * BUCKET_TOKENS;
        let mut sample_tokens = SAMPLE_TOKENS;
        while end > SAMPLES as f64 * sample_tokens {
            sample_tokens *= 2.0;
        }
        let samples = (end / sample_tokens) as usize;
        let (a, b) = (cost.sequence_seconds, cost.context_token_seconds);
        let mut lags = LagWeights { sample_tokens, weights: Vec::new(), scale: 1.0, alive: Vec::new() };
        lags.alive = (0..samples).map(|i| survival.at(lags.lag(i))).collect();
        let made = lags.by_lag(&lags.alive);
        let response: Vec<f64> =
            (0..samples).map(|i| lags.alive[i] * (a + b * prompt_tokens) + b * made[i]).collect();
        lags.weights = inner(&response);
        lags.weights.truncate(samples);
        let later = lags.by_lag(&lags.weights);
        let first = a * dot(&lags.weights, &lags.alive) + b * dot(&later, &lags.alive);
        lags.scale = 1.0 / first.abs().max(f64::MIN_POSITIVE);
        lags
    }

    /// Returns the tokens of a lag.
    pub fn lag(&self, i: usize) -> f64 {
        (i as f64 + 0.5) * self.sample_tokens
    }

    /// Returns each value times its lag.
    fn by_lag(&self, values: &[f64]) -> Vec<f64> {
        values.iter().enumerate().map(|(i, value)| value * self.lag(i)).collect()
    }
}

/// Weights of the requests of an instance, in units of requests without a prompt.
#[derive(Debug)]
struct Pressure {
    /// Weights of decoding requests by age, at the boundaries of buckets, times the chance to get
    /// so old; and 1 over that chance in the middle of each bucket.
    running: Curve,
    inverse: Vec<f64>,
    /// Weights of a request that begins later, by the number of tokens until then.
    coming: Curve,
}

impl Pressure {
    /// Makes the weights for answers of these lengths behind prompts of `prompt_tokens` on average.
    fn new(survival: &Survival, cost: DecodeCost, prompt_tokens: f64) -> Pressure {
        let curve = survival.boundaries();
        let lags = LagWeights::new(survival, cost, prompt_tokens);
        let (made, later) = (lags.by_lag(&lags.alive), lags.by_lag(&lags.weights));
        let LagWeights { sample_tokens, weights, scale, alive } = lags;
        // Boundaries of buckets are samples, too.
        let (samples, stride) = (alive.len(), (BUCKET_TOKENS / sample_tokens) as usize);
        let last = samples / stride;
        let (a, b) = (cost.sequence_seconds, cost.context_token_seconds);
        // For a request with `bucket` buckets of tokens, times the chance to get there: its weight
        // without context, and per token of its context.
        let of = |bucket: usize| {
            let alive = &alive[(bucket * stride).min(samples)..];
            let token = b * dot(&weights, alive);
            (a * dot(&weights, alive) + b * dot(&later, alive), token)
        };
        let scaled = |(request, token): (f64, f64)| (request * scale, token * scale);
        // Longer than any answer: as the nearly longest answers.
        let (request, token) = scaled(of(last - 1));
        let oldest = 1.0 / curve[last - 1];
        let running = Curve::of((0..=BUCKETS).map(|i| match i < last {
            true => scaled(of(i)),
            false => (request * curve[i] * oldest, token * curve[i] * oldest),
        }));
        let coming = Curve::of((0..=last).map(|bucket| {
            let weights = &weights[(bucket * stride).min(samples)..];
            let token = b * dot(weights, &alive);
            scaled((a * dot(weights, &alive) + b * dot(weights, &made), token))
        }));
        Pressure { running, inverse: survival.inverse_middles().to_vec(), coming }
    }

    /// Returns the weights for a request that starts to decode at the time of `outlook`.
    fn towards(&self, outlook: Outlook) -> Ahead<'_> {
        Ahead { pressure: self, running: self.table(outlook.further()), outlook }
    }

    /// Returns the weights of decoding requests, by bucket, with every request `further` tokens on.
    fn table(&self, further: f64) -> Curve {
        let place = 0.5 + (further / BUCKET_TOKENS).min(BUCKETS as f64);
        let (shift, part) = (place as usize, place - place.floor());
        let (ones, tokens) = (&self.running.requests, &self.running.context);
        Curve::of(self.inverse.iter().enumerate().map(|(bucket, inverse)| {
            // Beyond their ends, the curves keep their last values.
            let (low, high) = ((bucket + shift).min(BUCKETS), (bucket + shift + 1).min(BUCKETS));
            let one = ones[low] * (1.0 - part) + ones[high] * part;
            let token = tokens[low] * (1.0 - part) + tokens[high] * part;
            ((one + token * further) * inverse, token * inverse)
        }))
    }

    /// Returns the weight of a bound request that will have made `age` tokens by then; below 0: it
    /// starts that many tokens later.
    fn bound(&self, prompt_tokens: f64, age: f64) -> f64 {
        match age >= 0.0 {
            true => self.running.at(age, prompt_tokens + age),
            false => self.coming.at(-age, prompt_tokens),
        }
    }
}

/// Weights at the time at which a new request starts to decode.
struct Ahead<'a> {
    pressure: &'a Pressure,
    /// Weights of decoding requests, by bucket.
    running: Curve,
    outlook: Outlook,
}

impl Ahead<'_> {
    /// Returns the weight of the requests that decode on an instance or are bound to it.
    fn of(&self, load: &DecodeLoad) -> f64 {
        let running = load.decoding().weighed(&self.running.requests, &self.running.context);
        let bound = load.pending().map(|p| self.pressure.bound(p.prompt_tokens, self.outlook.age(p.start)));
        running + bound.sum::<f64>()
    }
}

/// Weights for learned lengths.
#[derive(Debug, Default)]
struct LearnedWeights(Option<Pressure>);

impl DecodeWeights for LearnedWeights {
    fn renew(&mut self, survival: &Survival, cost: DecodeCost, prompt_tokens: f64) {
        self.0 = Some(Pressure::new(survival, cost, prompt_tokens));
    }

    fn weigh(&self, outlook: Outlook, loads: &[DecodeLoad], slots: Range<usize>, weights: &mut [f64]) {
        let loads = &loads[slots];
        let Some(pressure) = &self.0 else { return weigh_equally(loads, weights) };
        let ahead = pressure.towards(outlook);
        weights.iter_mut().zip(loads).for_each(|(weight, load)| *weight = ahead.of(load));
    }
}

/// Builds weights for learned lengths.
pub fn learned_weights() -> Box<dyn DecodeWeights> {
    Box::<LearnedWeights>::default()
}

/// Returns the sum of products over the length of the shorter slice.
#[multiversion(targets("x86_64+avx2"))]
fn dot(a: &[f64], b: &[f64]) -> f64 {
    let n = a.len().min(b.len());
    let (a, b) = (&a[..n], &b[..n]);
    let mut sums = [0.0; 8];
    let whole = n / 8 * 8;
    for i in (0..whole).step_by(8) {
        for (lane, sum) in sums.iter_mut().enumerate() {
            *sum += a[i + lane] * b[i + lane];
        }
    }
    (whole..n).for_each(|i| sums[0] += a[i] * b[i]);
    sums.iter().sum()
}

/// Returns the impulse response of `G / C` for the first [`SAMPLES`] samples.
fn inner(response: &[f64]) -> Vec<f64> {
    let mut planner = FftPlanner::new();
    let (forward, back) = (planner.plan_fft_forward(POINTS), planner.plan_fft_inverse(POINTS));
    let mut g = vec![Complex::new(0.0, 0.0); POINTS];
    g.iter_mut().zip(response).for_each(|(g, x)| g.re = *x);
    forward.process(&mut g);
    let largest = g.iter().map(|g| g.norm_sqr()).fold(0.0, f64::max);
    // The minimum-phase filter of a given gain: its logarithm's transform is causal (cepstrum
    // folded onto positive times).
    let mut log: Vec<Complex<f64>> =
        g.iter().map(|g| Complex::new(0.5 * (g.norm_sqr() + PRICE * largest).ln(), 0.0)).collect();
    back.process(&mut log);
    for (i, c) in log.iter_mut().enumerate() {
        let fold = if i == 0 || i == POINTS / 2 {
            1.0
        } else if i < POINTS / 2 {
            2.0
        } else {
            0.0
        };
        *c *= fold / POINTS as f64;
    }
    forward.process(&mut log);
    for (g, log) in g.iter_mut().zip(&log) {
        *g /= log.exp();
    }
    back.process(&mut g);
    g[..SAMPLES].iter().map(|w| w.re / POINTS as f64).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::survival::CurveSettings;

    const COST: DecodeCost = DecodeCost { sequence_seconds: 7e-5, context_token_seconds: 8.2e-8 };

    fn lengths(lengths: impl Iterator<Item = u32>) -> Survival {
        let mut survival = Survival::new(CurveSettings { alpha: 0.9999, ..CurveSettings::default() });
        lengths.for_each(|l| survival.observe(l, false));
        survival
    }

    #[test]
    fn a_filter_that_is_minimum_phase_passes_everything_at_once() {
        // 1 + z/2 is its own minimum-phase filter: G / C is 1, except for the small price.
        let weights = inner(&[1.0, 0.5]);
        assert!((weights[0] - 1.0).abs() < 0.01, "{:?}", &weights[..4]);
        assert!(weights[1..].iter().all(|w| w.abs() < 0.01), "{:?}", &weights[..4]);
        // z/2 behind 0 and then 1: the response comes a sample later than it could, and so do the
        // weights.
        let late = inner(&[0.5, 1.0]);
        assert!((late[0] - 0.5).abs() < 0.01 && (late[1] - 0.75).abs() < 0.01, "{:?}", &late[..4]);
    }

    const HERE: Outlook = Outlook { now: 0.0, then: 0.0, rate: 0.0 };

    /// Returns the weight of one decoding request with `generated` tokens.
    fn one(pressure: &Pressure, generated: f64, prompt: f64, outlook: Outlook) -> f64 {
        let mut load = DecodeLoad::default();
        load.enter(prompt, generated);
        pressure.towards(outlook).of(&load)
    }

    fn bound(pressure: &Pressure, prompt: f64, start: f64, outlook: Outlook) -> f64 {
        let mut load = DecodeLoad::default();
        load.bind((1, 0), prompt, start);
        pressure.towards(outlook).of(&load)
    }

    #[test]
    fn long_prompts_weigh_more_and_answers_near_their_end_less() {
        let survival = lengths((0..4000).map(|i| 500 + i % 4000));
        let pressure = Pressure::new(&survival, COST, 1000.0);
        let one = |generated: f64, prompt: f64| one(&pressure, generated, prompt, HERE);
        assert!(one(100.0, 4000.0) > one(100.0, 1000.0));
        assert!(one(1000.0, 1000.0) > one(100.0, 1000.0), "it grows and still stays long");
        assert!(one(4400.0, 1000.0) < 0.7 * one(3500.0, 1000.0), "it will be gone");
        assert!(one(9000.0, 1000.0) > 0.0, "longer than any seen");
        assert!((bound(&pressure, 0.0, 0.0, HERE) - 1.0).abs() < 1e-9);
        assert!(bound(&pressure, 5000.0, 0.0, HERE) > 1.0);
    }

    #[test]
    fn it_is_seen_as_it_will_be_when_the_new_one_starts() {
        let survival = lengths((0..4000).map(|i| 500 + i % 4000));
        let pressure = Pressure::new(&survival, COST, 1000.0);
        let later = Outlook { now: 0.0, then: 20.0, rate: 32.0 };
        // A request that decodes: 640 tokens older, if it lasts.
        let lasts = survival.at(2144.0) / survival.at(1504.0);
        let expected = one(&pressure, 2144.0, 1000.0, HERE) * lasts;
        assert!((one(&pressure, 1504.0, 1000.0, later) - expected).abs() < 0.01, "{expected}");
        // A request that starts in between has made 8 s x 32 tokens; a request that starts at the
        // same time, none. A request that starts later weighs less, the later the less.
        let at = |start: f64| bound(&pressure, 800.0, start, later);
        let expected = one(&pressure, 256.0, 800.0, HERE) * survival.at(256.0);
        assert!((at(12.0) - expected).abs() < 0.02 * expected, "{} {expected}", at(12.0));
        assert!((at(20.0) - bound(&pressure, 800.0, 0.0, HERE)).abs() < 1e-9);
        assert_eq!(at(-3.0), at(0.0), "not before now");
        assert!(
            at(20.0) > at(60.0) && at(60.0) > at(100.0) && at(1e6).abs() < 0.05,
            "{} {}",
            at(60.0),
            at(1e6)
        );
    }

    #[test]
    fn where_answers_end_at_once_as_often_as_ever_age_does_not_matter() {
        // Geometric lengths without context costs: the expected rest is the same at every age, and
        // so is the weight.
        let mut x = 1u64;
        let survival = lengths((0..20_000).map(|_| {
            x = x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            1 + (-600.0 * (((x >> 11) as f64 + 1.0) / (1u64 << 53) as f64).ln()) as u32
        }));
        let cost = DecodeCost { sequence_seconds: 1.0, context_token_seconds: 0.0 };
        let pressure = Pressure::new(&survival, cost, 0.0);
        for bucket in 0..15 {
            let weight = one(&pressure, (f64::from(bucket) + 0.5) * BUCKET_TOKENS, 0.0, HERE);
            assert!((weight - 1.0).abs() < 0.1, "{bucket} {weight}");
        }
    }
}
