//! Expected remaining tokens of an answer, from the distribution of answer lengths (the curve of
//! `survival.rs`) and its length so far.
//!
//! With S the probability that an answer is longer, an answer of g tokens has
//! `integral of S from g on / S(g)` remaining tokens on average. The mean square of the remaining
//! tokens is `2 x integral of (u - g) S(u) from g on / S(g)`. The curve is linear between its
//! points, so both integrals are exact sums, stored from each point on: a prediction costs O(1).
use crate::survival::{FLOOR, PRIOR_TOKENS, Survival};

/// A prediction of the remaining output tokens.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Remaining {
    /// Expected number of tokens: 0 or more.
    pub tokens: f64,
    /// Standard deviation in tokens; 0 if the number is known.
    pub deviation: f64,
}

impl Remaining {
    /// Returns a certain prediction, as from an oracle.
    pub fn exact(tokens: f64) -> Remaining {
        Remaining { tokens, deviation: 0.0 }
    }
}

/// Remaining tokens by length so far.
#[derive(Clone, Debug)]
pub struct RemainingCurve {
    bucket_tokens: f64,
    /// S at `i * bucket_tokens`; values at the floor are 0.
    curve: Vec<f64>,
    /// Integrals from each point on of S(u), and of S(u) times the distance from the point.
    area: Vec<f64>,
    moment: Vec<f64>,
}

impl RemainingCurve {
    /// Builds the curve from a length curve. Use [`Survival::unlimited`], which counts running
    /// answers, and of answers at their limits what they have: a mean over ended answers alone is
    /// too short.
    pub fn new(survival: &Survival) -> RemainingCurve {
        let curve: Vec<f64> =
            survival.boundaries().iter().map(|s| if *s > FLOOR { *s } else { 0.0 }).collect();
        let (bucket_tokens, buckets) = (survival.bucket_tokens(), survival.buckets());
        let (mut area, mut moment) = (vec![0.0; buckets + 1], vec![0.0; buckets + 1]);
        for i in (0..buckets).rev() {
            (area[i], moment[i]) = onward(bucket_tokens, curve[i], curve[i + 1], area[i + 1], moment[i + 1]);
        }
        RemainingCurve { bucket_tokens, curve, area, moment }
    }

    /// Returns the remaining tokens of an answer with `generated` tokens, capped by `limit` total
    /// tokens (its `max_tokens`; infinite if it has none).
    ///
    /// Beyond the longest observed answer, each token is equally likely to be the last, at the rate
    /// of the curve's prior (a mean of 2,000 remaining tokens).
    pub fn at(&self, generated: f64, limit: f64) -> Remaining {
        let generated = generated.max(0.0);
        let most = (limit - generated).max(0.0);
        let (s, area, moment) = self.from(generated);
        let (tokens, square) = if s > FLOOR {
            // Beyond the limit nothing remains: E[min(L, limit) - g], and its square.
            let (_, beyond, beyond_moment) = self.from(limit.max(generated));
            let moment = if beyond > 0.0 { moment - beyond_moment - most * beyond } else { moment };
            ((area - beyond) / s, 2.0 * moment / s)
        } else if most.is_finite() {
            let (mean, end) = (PRIOR_TOKENS, (-most / PRIOR_TOKENS).exp());
            (mean * (1.0 - end), 2.0 * mean * (mean * (1.0 - end) - most * end))
        } else {
            (PRIOR_TOKENS, 2.0 * PRIOR_TOKENS * PRIOR_TOKENS)
        };
        let tokens = tokens.clamp(0.0, most);
        Remaining { tokens, deviation: (square - tokens * tokens).max(0.0).sqrt() }
    }

    /// Returns S at a length, and both integrals from there on.
    fn from(&self, tokens: f64) -> (f64, f64, f64) {
        let place = tokens / self.bucket_tokens;
        if place >= (self.curve.len() - 1) as f64 {
            return (0.0, 0.0, 0.0);
        }
        let bucket = place as usize;
        let part = place - bucket as f64;
        let s = self.curve[bucket] * (1.0 - part) + self.curve[bucket + 1] * part;
        let next = bucket + 1;
        let width = self.bucket_tokens * (1.0 - part);
        let (area, moment) = onward(width, s, self.curve[next], self.area[next], self.moment[next]);
        (s, area, moment)
    }
}

/// Returns both integrals from a point on. S falls from `s` to `end` over `width` tokens; beyond
/// that, the integrals are `area` and `moment`.
fn onward(width: f64, s: f64, end: f64, area: f64, moment: f64) -> (f64, f64) {
    let here = width * (s + end) / 2.0;
    let here_moment = width * width * (s / 6.0 + end / 3.0);
    (here + area, here_moment + moment + width * area)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::survival::BUCKET_TOKENS;
    use proptest::prelude::*;

    fn curve(lengths: impl IntoIterator<Item = u32>) -> RemainingCurve {
        let mut s = Survival::default();
        lengths.into_iter().for_each(|l| s.observe(l, false));
        RemainingCurve::new(&s)
    }

    #[test]
    fn two_lengths() {
        // Half end in the bucket up to 640, half in the bucket up to 6,400: S is linear in these
        // two buckets.
        let curve = curve((0..1000).flat_map(|_| [640, 6400]));
        let at = |g: f64| curve.at(g, f64::INFINITY);
        assert!((at(0.0).tokens - (608.0 + 6368.0) / 2.0).abs() < 3.0, "{:?}", at(0.0));
        assert!((at(0.0).deviation - 2880.0).abs() < 3.0, "{:?}", at(0.0));
        assert!((at(1000.0).tokens - 5368.0).abs() < 1e-6, "{:?}", at(1000.0));
        assert!((at(1000.0).deviation - 64.0 / 12f64.sqrt()).abs() < 1e-3, "{:?}", at(1000.0));
        // With a limit of 2,000: half have 608, half 2,000.
        let cut = curve.at(0.0, 2000.0);
        assert!((cut.tokens - 1304.0).abs() < 1.0 && (cut.deviation - 696.0).abs() < 1.0, "{cut:?}");
        assert_eq!(curve.at(3000.0, 2000.0), Remaining::exact(0.0));
    }

    #[test]
    fn where_nobody_has_been_the_prior_holds() {
        let short = curve((0..100).map(|_| 100));
        for (generated, limit, tokens) in [
            (5000.0, f64::INFINITY, 2000.0),
            (50_000.0, f64::INFINITY, 2000.0),
            (5000.0, 7000.0, 2000.0 * (1.0 - (-1f64).exp())),
        ] {
            assert!((short.at(generated, limit).tokens - tokens).abs() < 1e-9);
        }
        assert!(short.at(5000.0, 7000.0).deviation < short.at(5000.0, f64::INFINITY).deviation);
        let none = RemainingCurve::new(&Survival::default().product_limit());
        assert!(
            (none.at(0.0, f64::INFINITY).tokens - 2000.0).abs() < 60.0,
            "{:?}",
            none.at(0.0, f64::INFINITY)
        );
    }

    proptest! {
        #[test]
        fn it_is_the_mean_of_those_that_are_longer(lengths in prop::collection::vec(1u32..30_000, 20..400), part in 0.0..0.9f64) {
            let curve = curve(lengths.iter().copied());
            let longest = f64::from(*lengths.iter().max().unwrap());
            let generated = (part * longest / BUCKET_TOKENS).floor() * BUCKET_TOKENS;
            let still: Vec<f64> = lengths.iter().map(|l| f64::from(*l) - generated).filter(|s| *s > 0.0).collect();
            let n = still.len() as f64;
            let mean = still.iter().sum::<f64>() / n;
            let deviation = (still.iter().map(|s| (s - mean).powi(2)).sum::<f64>() / n).sqrt();
            let at = curve.at(generated, f64::INFINITY);
            // The curve resolves lengths to one bucket.
            prop_assert!((at.tokens - mean).abs() <= BUCKET_TOKENS, "{at:?} {mean}");
            prop_assert!((at.deviation - deviation).abs() <= 2.0 * BUCKET_TOKENS, "{at:?} {deviation}");
        }
    }
}
