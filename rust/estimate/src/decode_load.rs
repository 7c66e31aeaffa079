//! Decode load of one instance: running decodes and bound requests, in buckets of generated tokens.
//! So a decision's cost depends on the number of buckets, not of requests.
//!
//! SIBYL (section 4.3) projects each request's load to the time at which a new request will start
//! to decode. Its three types are sums over requests. Here, requests of one bucket are projected
//! together, as if they were in the middle of the bucket. All requests of an instance decode at the
//! instance's rate: continuous batching gives each running request one token per step.
use crate::Seconds;
use crate::survival::{BUCKET_TOKENS, Survival, buckets_of};
use multiversion::multiversion;

/// Minimum number of allocated buckets: most answers are shorter.
const LEAST: usize = 16;

/// Requests and their context tokens (prompt and generated), in buckets by a token count.
#[derive(Clone, Debug)]
pub struct Histogram {
    bucket_tokens: f64,
    requests: Vec<f64>,
    context: Vec<f64>,
}

impl Default for Histogram {
    fn default() -> Histogram {
        Histogram::new(BUCKET_TOKENS)
    }
}

impl Histogram {
    /// Creates an empty histogram with buckets of `bucket_tokens` tokens.
    pub fn new(bucket_tokens: f64) -> Histogram {
        Histogram { bucket_tokens, requests: Vec::new(), context: Vec::new() }
    }

    fn bucket(&self, tokens: f64) -> usize {
        ((tokens / self.bucket_tokens) as usize).min(buckets_of(self.bucket_tokens) - 1)
    }

    /// Adds a request to the bucket of `tokens`.
    pub fn put(&mut self, tokens: f64, context: f64) {
        let bucket = self.bucket(tokens);
        if bucket >= self.requests.len() {
            let room = (bucket + 1).next_power_of_two().max(LEAST).min(buckets_of(self.bucket_tokens));
            self.requests.resize(room, 0.0);
            self.context.resize(room, 0.0);
        }
        self.requests[bucket] += 1.0;
        self.context[bucket] += context;
    }

    /// Removes a request from the bucket of `tokens`.
    pub fn take(&mut self, tokens: f64, context: f64) {
        let bucket = self.bucket(tokens);
        self.requests[bucket] -= 1.0;
        self.context[bucket] -= context;
        while self.requests.len() > LEAST && self.requests.last() == Some(&0.0) {
            self.requests.pop();
            self.context.pop();
        }
    }

    /// Moves a request from the bucket of `tokens` to the bucket of `then`, and adds `more` to its
    /// context.
    fn move_on(&mut self, tokens: f64, then: f64, context: f64, more: f64) {
        let at = self.bucket(tokens);
        if at == self.bucket(then) {
            self.context[at] += more;
        } else {
            self.put(then, context + more);
            self.take(tokens, context);
        }
    }

    /// Returns the sum over buckets of requests x `one` + context tokens x `token`. Both slices
    /// have one value per bucket.
    pub(crate) fn weighed(&self, one: &[f64], token: &[f64]) -> f64 {
        weigh(&self.requests, &self.context, one, token)
    }

    /// Returns requests and context tokens, by bucket.
    pub fn buckets(&self) -> (&[f64], &[f64]) {
        (&self.requests, &self.context)
    }
}

/// Decodes of one instance by generated tokens, and the requests bound to it.
#[derive(Clone, Debug, Default)]
pub struct DecodeLoad {
    decoding: Histogram,
    pending: Vec<Pending>,
}

/// A request bound to an instance on which it does not decode yet.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Pending {
    /// The key of its segment, as the caller chose it.
    pub key: (u32, u32),
    /// Prompt tokens.
    pub prompt_tokens: f64,
    /// Expected start of its decode (tau_k).
    pub start: Seconds,
}

/// SIBYL's projected load of an instance, in tokens, by type of request.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Projection {
    /// Type 1: decoding now (Eq. 6).
    pub running: f64,
    /// Type 2: bound, and decoding by the projected time (Eq. 7).
    pub arrived: f64,
    /// Type 3: bound, and decoding after the projected time (Eq. 8).
    pub coming: f64,
}

impl DecodeLoad {
    /// Creates an empty load with buckets of `bucket_tokens` generated tokens.
    pub fn new(bucket_tokens: f64) -> DecodeLoad {
        DecodeLoad { decoding: Histogram::new(bucket_tokens), pending: Vec::new() }
    }

    /// Binds a request's segment, expected to start decoding at `start`. The caller chooses `key`.
    pub fn bind(&mut self, key: (u32, u32), prompt_tokens: f64, start: Seconds) {
        self.pending.push(Pending { key, prompt_tokens, start });
    }

    /// Removes a bound segment, because it decodes now or never will. Does nothing for an unknown
    /// key.
    pub fn unbind(&mut self, key: (u32, u32)) {
        if let Some(i) = self.pending.iter().position(|p| p.key == key) {
            self.pending.swap_remove(i);
        }
    }

    /// Adds a decoding request with `prompt_tokens` and `generated` tokens.
    pub fn enter(&mut self, prompt_tokens: f64, generated: f64) {
        self.decoding.put(generated, prompt_tokens + generated);
    }

    /// Removes a decoding request.
    pub fn leave(&mut self, prompt_tokens: f64, generated: f64) {
        self.decoding.take(generated, prompt_tokens + generated);
    }

    /// Adds `tokens` generated tokens to a decoding request.
    pub fn grow(&mut self, prompt_tokens: f64, generated: f64, tokens: f64) {
        self.decoding.move_on(generated, generated + tokens, prompt_tokens + generated, tokens);
    }

    /// Returns the decoding requests, by generated tokens.
    pub fn decoding(&self) -> &Histogram {
        &self.decoding
    }

    /// Returns the bound requests.
    pub fn pending(&self) -> impl Iterator<Item = &Pending> {
        self.pending.iter()
    }

    /// Projects the load from `now` to `then` (SIBYL, Eq. 1). `rate`: tokens/s of a request that
    /// decodes here. `mean_rate`: mean over all instances, used for bound requests.
    ///
    /// The error of each running request is at most its context times the change of S(g + x)/S(g)
    /// within a bucket.
    pub fn project(
        &self,
        survival: &Survival,
        now: Seconds,
        then: Seconds,
        rate: f64,
        mean_rate: f64,
    ) -> Projection {
        let mut load = Projection {
            running: self.running(survival, rate * (then - now).max(0.0)),
            ..Projection::default()
        };
        for p in &self.pending {
            // A request that has not started starts no earlier than now, whatever its expected
            // start.
            let generated = (then - p.start.max(now)) * mean_rate;
            if generated >= 0.0 {
                load.arrived += (p.prompt_tokens + generated) * survival.at(generated);
            } else {
                // Eq. (8) as text: with the pseudo-code's minus, the load would grow with the
                // distance.
                load.coming += (p.prompt_tokens + generated).max(0.0);
            }
        }
        load
    }

    /// Returns the type 1 load, in buckets of the curve's width, with each request `further` tokens
    /// ahead.
    fn running(&self, survival: &Survival, further: f64) -> f64 {
        let buckets = survival.buckets();
        let place = 0.5 + (further / survival.bucket_tokens()).min(buckets as f64);
        let (shift, part) = (place as usize, place - place.floor());
        let (curve, inverse) = (survival.boundaries(), survival.inverse_middles());
        // Beyond its end, the curve is constant.
        let (requests, context) = self.decoding.buckets();
        let within = requests.len().min(buckets.saturating_sub(shift));
        let ends = curve[buckets];
        let sum = project(
            &requests[..within],
            &context[..within],
            &curve[shift.min(buckets)..],
            &inverse[..within],
            part,
            further,
        );
        let beyond =
            (within..requests.len()).map(|b| (context[b] + requests[b] * further) * ends * inverse[b]);
        sum + beyond.sum::<f64>()
    }
}

/// Independent partial sums, so that additions need not wait for each other.
const LANES: usize = 4;

/// Returns the sum over buckets of (context + requests x further) x S(middle + further) /
/// S(middle).
#[multiversion(targets("x86_64+avx2"))]
fn project(
    requests: &[f64],
    context: &[f64],
    ahead: &[f64],
    inverse: &[f64],
    part: f64,
    further: f64,
) -> f64 {
    let n = requests.len();
    let (context, inverse) = (&context[..n], &inverse[..n]);
    if n == 0 {
        return 0.0;
    }
    let ahead = &ahead[..n + 1];
    let mut sums = [0.0; LANES];
    let mut i = 0;
    while i + LANES <= n {
        for (lane, sum) in sums.iter_mut().enumerate() {
            let j = i + lane;
            let s = ahead[j] * (1.0 - part) + ahead[j + 1] * part;
            *sum += (context[j] + requests[j] * further) * (s * inverse[j]);
        }
        i += LANES;
    }
    let mut sum: f64 = sums.iter().sum();
    for j in i..n {
        let s = ahead[j] * (1.0 - part) + ahead[j + 1] * part;
        sum += (context[j] + requests[j] * further) * (s * inverse[j]);
    }
    sum
}

/// Returns the sum over buckets of requests x one + context x token.
#[multiversion(targets("x86_64+avx2"))]
fn weigh(requests: &[f64], context: &[f64], one: &[f64], token: &[f64]) -> f64 {
    let n = requests.len();
    let (context, one, token) = (&context[..n], &one[..n], &token[..n]);
    let mut sums = [0.0; 8];
    let whole = n / 8 * 8;
    for i in (0..whole).step_by(8) {
        for (lane, sum) in sums.iter_mut().enumerate() {
            let j = i + lane;
            *sum += requests[j] * one[j] + context[j] * token[j];
        }
    }
    (whole..n).for_each(|j| sums[0] += requests[j] * one[j] + context[j] * token[j]);
    sums.iter().sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::survival::CurveSettings;
    use proptest::prelude::*;

    fn half_at_640() -> Survival {
        let mut survival = Survival::default();
        [640, 1280].iter().for_each(|&l| survival.observe(l, false));
        survival
    }

    #[test]
    fn the_three_types_by_hand() {
        let survival = half_at_640();
        let mut load = DecodeLoad::default();
        load.enter(1000.0, 608.0); // the middle of bucket 9: S(608) = 3/4, halfway between 1 at 576 and 1/2 at 640
        load.bind((1, 0), 500.0, 12.0);
        load.bind((2, 0), 300.0, 25.0);
        let p = load.project(&survival, 10.0, 20.0, 6.4, 40.0);
        // Type 1: 64 tokens further, S(672) = 1/2. Type 2: 8 s x 40 = 320 tokens, S = 1. Type 3: 5
        // s x 40 = 200 less than the prompt.
        assert!((p.running - 1672.0 * (0.5 / 0.75)).abs() < 1e-9, "{p:?}");
        assert!((p.arrived - 820.0).abs() < 1e-9 && (p.coming - 100.0).abs() < 1e-9, "{p:?}");
        // A request expected at 12 that has not started by 15 starts at 15 at the earliest.
        let late = load.project(&survival, 15.0, 20.0, 6.4, 40.0);
        assert!((late.arrived - 700.0).abs() < 1e-9, "{late:?}");
        load.unbind((1, 0));
        load.unbind((2, 0));
        load.leave(1000.0, 608.0);
        assert_eq!(load.project(&survival, 10.0, 20.0, 6.4, 40.0), Projection::default());
    }

    proptest! {
        #[test]
        fn buckets_are_as_near_to_requests_as_they_promise(
            lengths in prop::collection::vec(1u32..9000, 0..60),
            running in prop::collection::vec((1u32..5000, 1u32..40_000, 0u32..700), 0..40),
            further in 0.0..3000.0f64,
            width in prop::sample::select(vec![16.0, 64.0, 100.0, 256.0]),
        ) {
            let mut survival = Survival::new(CurveSettings { bucket_tokens: width, ..CurveSettings::default() });
            lengths.iter().for_each(|&l| survival.observe(l, false));
            let mut load = DecodeLoad::new(width);
            let (mut exact, mut bound, mut total) = (0.0, 0.0, 0.0);
            for &(prompt, generated, more) in &running {
                let (prompt, mut generated, more) = (f64::from(prompt), f64::from(generated), f64::from(more));
                load.enter(prompt, generated);
                load.grow(prompt, generated, more);
                generated += more;
                total += prompt + generated;
                let context = prompt + generated + further;
                exact += context * survival.at(generated + further) / survival.at(generated);
                let low = load.decoding.bucket(generated) as f64 * width;
                let high = low + width;
                if generated < high {
                    bound += context
                        * (survival.at(low + further) / survival.at(high) - survival.at(high + further) / survival.at(low));
                }
            }
            let projected = load.running(&survival, further);
            prop_assert!((projected - exact).abs() <= bound + 1e-6 * (1.0 + exact), "{projected} {exact} {bound}");
            prop_assert!((load.decoding().buckets().1.iter().sum::<f64>() - total).abs() < 1e-6);
            for &(prompt, generated, more) in &running {
                load.leave(f64::from(prompt), f64::from(generated + more));
            }
            prop_assert!(load.decoding().buckets().0.iter().all(|n| *n == 0.0) && load.decoding().buckets().1.iter().all(|n| *n == 0.0));
        }
    }
}
