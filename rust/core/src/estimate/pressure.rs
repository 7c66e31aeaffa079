//! What a request weighs on the instance that decodes it, by how far it is.
//!
//! Rules such as least requests or least tokens sum something over the requests of an instance: 1, or the context. A request that joins adds
//! `G(t) = S(t) (a + b (prompt + t))` to each step of its instance `t` tokens later, with `a` and `b` of the step-time model. A rule that looks at the present
//! load alone corrects today what will be gone tomorrow, and its own cohorts come back to it; one that looks at all that is still to come is slow. Seen as
//! control with the arrivals as the only input, the rule with the least variance of the load for a small price on correcting weighs the expected load `m` tokens
//! ahead by the impulse response of `G / C`, where C is the minimum-phase filter with `|C|^2 = |G|^2 + PRICE max |G|^2`. A request then counts for
//! `sum over m of w(m) S(g + m) / S(g) (a + b (prompt + g + m))`.
use super::survival::{BUCKET_TOKENS, BUCKETS, Survival};
use rustfft::FftPlanner;
use rustfft::num_complex::Complex;

/// Price of correcting, of the largest gain of the load's response.
const PRICE: f64 = 1e-3;
/// Samples of a life, from its start to the length that few reach.
const SAMPLES: usize = 256;
/// Chance of an answer that is longer, where the samples end.
const FEW: f64 = 3e-3;
/// Points of the transforms: a life, and room for the response to end in.
const POINTS: usize = 4096;
/// Lags whose weights count: beyond the longest life there is nothing to weigh.
const LAGS: usize = SAMPLES;

/// What a step costs for each sequence that decodes, and for each token of its context; only their ratio matters.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DecodeCost {
    /// Seconds for each sequence.
    pub sequence_seconds: f64,
    /// Seconds for each token of context.
    pub context_token_seconds: f64,
}

/// Weights of requests by their bucket of generated tokens: a request counts for `requests + prompt_tokens x prompt`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Pressure {
    requests: Vec<f64>,
    prompts: Vec<f64>,
    /// Of a request that has not begun.
    start: (f64, f64),
}

impl Pressure {
    /// The weights for answers of these lengths behind prompts of `prompt_tokens` on average.
    pub fn new(survival: &Survival, cost: DecodeCost, prompt_tokens: f64) -> Pressure {
        let curve = survival.boundaries();
        let last = (1..curve.len()).rev().find(|&i| curve[i] >= FEW).map_or(1, |i| (i + 1).min(BUCKETS));
        let sample = last as f64 * BUCKET_TOKENS / SAMPLES as f64;
        let at = |generated: f64, prompt: f64| {
            cost.sequence_seconds + cost.context_token_seconds * (prompt + generated)
        };
        let response: Vec<f64> = (0..SAMPLES)
            .map(|i| (i as f64 + 0.5) * sample)
            .map(|x| survival.at(x) * at(x, prompt_tokens))
            .collect();
        let weights = inner(&response);
        let of = |generated: f64| {
            let alive = survival.at(generated);
            let (mut requests, mut prompts) = (0.0, 0.0);
            for (lag, weight) in weights.iter().enumerate() {
                let then = generated + (lag as f64 + 0.5) * sample;
                let weight = weight * survival.at(then) / alive;
                requests += weight * at(then, 0.0);
                prompts += weight * cost.context_token_seconds;
            }
            (requests, prompts)
        };
        let scale = 1.0 / of(0.0).0.abs().max(f64::MIN_POSITIVE);
        let (requests, prompts) = (0..last)
            .map(|bucket| of((bucket as f64 + 0.5) * BUCKET_TOKENS))
            .map(|(requests, prompts)| (requests * scale, prompts * scale))
            .unzip();
        let (start_requests, start_prompts) = of(0.0);
        Pressure { requests, prompts, start: (start_requests * scale, start_prompts * scale) }
    }

    /// Weights of a request, and of each token of its prompt, in each bucket of generated tokens; what is longer weighs as the last.
    pub fn buckets(&self) -> (&[f64], &[f64]) {
        (&self.requests, &self.prompts)
    }

    /// The same of a request that has not begun to decode.
    pub fn start(&self) -> (f64, f64) {
        self.start
    }
}

/// Impulse response of `G / C` for the first [`LAGS`] samples.
fn inner(response: &[f64]) -> Vec<f64> {
    let mut planner = FftPlanner::new();
    let (forward, back) = (planner.plan_fft_forward(POINTS), planner.plan_fft_inverse(POINTS));
    let mut g = vec![Complex::new(0.0, 0.0); POINTS];
    g.iter_mut().zip(response).for_each(|(g, x)| g.re = *x);
    forward.process(&mut g);
    let largest = g.iter().map(|g| g.norm_sqr()).fold(0.0, f64::max);
    // The minimum-phase filter of a given gain: its logarithm's transform is causal (cepstrum folded onto positive times).
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
    g[..LAGS].iter().map(|w| w.re / POINTS as f64).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const COST: DecodeCost = DecodeCost { sequence_seconds: 7e-5, context_token_seconds: 8.2e-8 };

    fn lengths(lengths: impl Iterator<Item = u32>) -> Survival {
        let mut survival = Survival::new(0.9999);
        lengths.for_each(|l| survival.observe(l));
        survival
    }

    #[test]
    fn a_filter_that_is_minimum_phase_passes_everything_at_once() {
        // 1 + z/2 is its own minimum-phase filter: G / C is 1, but for the small price.
        let weights = inner(&[1.0, 0.5]);
        assert!((weights[0] - 1.0).abs() < 0.01, "{:?}", &weights[..4]);
        assert!(weights[1..].iter().all(|w| w.abs() < 0.01), "{:?}", &weights[..4]);
        // z/2 behind nothing and then 1: the response comes a sample later than it could, and so do the weights.
        let late = inner(&[0.5, 1.0]);
        assert!((late[0] - 0.5).abs() < 0.01 && (late[1] - 0.75).abs() < 0.01, "{:?}", &late[..4]);
    }

    #[test]
    fn long_prompts_weigh_more_and_answers_near_their_end_less() {
        let survival = lengths((0..4000).map(|i| 500 + i % 4000));
        let pressure = Pressure::new(&survival, COST, 1000.0);
        let (requests, prompts) = pressure.buckets();
        assert!(prompts.iter().all(|w| *w >= -1e-6) && requests.iter().all(|w| w.is_finite()));
        assert!(requests[requests.len() - 2] < requests[0], "{requests:?}");
        assert!((pressure.start().0 - 1.0).abs() < 1e-9 && pressure.start().1 > 0.0);
    }

    #[test]
    fn where_answers_end_at_once_as_often_as_ever_age_does_not_matter() {
        // Geometric lengths without context costs: what is still to come is the same at every age, and so is the weight.
        let mut x = 1u64;
        let survival = lengths((0..20_000).map(|_| {
            x = x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            1 + (-600.0 * (((x >> 11) as f64 + 1.0) / (1u64 << 53) as f64).ln()) as u32
        }));
        let cost = DecodeCost { sequence_seconds: 1.0, context_token_seconds: 0.0 };
        let pressure = Pressure::new(&survival, cost, 0.0);
        let (requests, _) = pressure.buckets();
        assert!(requests[..15].iter().all(|w| (w - 1.0).abs() < 0.1), "{requests:?}");
    }
}
