//! Prefill time of an instance, learned from this router's first tokens.
use crate::Seconds;

/// Weight that an observation keeps when the next one arrives: about the last fifty count.
const KEEP: f64 = 0.98;
/// Weight that a prediction error keeps when the next one arrives: the last twenty count.
const KEEP_ERROR: f64 = 0.95;
/// Minimum decayed number of predictions before their error is returned: four predictions.
const MIN_JUDGED: f64 = 3.0;
/// Maximum seconds of a prefill, in multiples of its prediction. The larger of this and of
/// [`MAX_PULL`] applies, so that neither short prefills, which take mostly fixed costs, nor slow
/// engines are outliers.
const MAX_RATIO: f64 = 5.0;
/// Maximum seconds that a prefill adds to the sum of seconds beyond its prediction, as a fraction
/// of the sum.
const MAX_PULL: f64 = 0.25;
/// Token and pair costs are separated if at least this fraction of the pairs is not proportional to
/// the tokens.
const MIN_INDEPENDENT: f64 = 1e-3;

/// Returns the attention pairs of a prefill of `new` tokens after `hit` cached tokens.
pub fn attention_pairs(hit: f64, new: f64) -> f64 {
    new * (hit + new / 2.0)
}

/// Least squares of seconds = a x tokens + b x attention pairs, both at least 0, over decayed
/// observations. Each observation is weighted by 1 / tokens. Without pairs, this is the ratio of
/// the sums: long prefills weigh more than short ones, whose time is mostly fixed cost.
#[derive(Clone, Copy, Debug, Default)]
pub struct PrefillRate {
    tokens: f64,
    seconds: f64,
    pairs: f64,
    /// Sums of pairs squared, and of pairs times seconds, each divided by tokens.
    pairs_pairs: f64,
    pairs_seconds: f64,
    /// Decayed sums of squared relative errors of predictions made before the observation, and
    /// their number.
    errors: f64,
    judged: f64,
}

impl PrefillRate {
    /// Records that `tokens` uncached prompt tokens with `pairs` attention pairs took `seconds`,
    /// counted from the time at which the instance could begin. A stall has limited weight.
    pub fn observe(&mut self, tokens: f64, pairs: f64, mut seconds: Seconds) {
        if tokens > 0.0 && seconds > 0.0 {
            if let Some(predicted) = self.seconds(tokens, pairs).filter(|predicted| *predicted > 0.0) {
                let error = (seconds / predicted - 1.0).min(10.0);
                self.errors = self.errors * KEEP_ERROR + error * error;
                if self.judged >= MIN_JUDGED {
                    let most = (MAX_RATIO * predicted).max(predicted + MAX_PULL * self.seconds);
                    seconds = seconds.min(most);
                }
                self.judged = self.judged * KEEP_ERROR + 1.0;
            }
            for (sum, value) in [
                (&mut self.tokens, tokens),
                (&mut self.seconds, seconds),
                (&mut self.pairs, pairs),
                (&mut self.pairs_pairs, pairs * pairs / tokens),
                (&mut self.pairs_seconds, pairs * seconds / tokens),
            ] {
                *sum = *sum * KEEP + value;
            }
        }
    }

    /// Returns the overall tokens per second; `None` before the first observation.
    pub fn tokens_per_second(&self) -> Option<f64> {
        (self.seconds > 0.0).then(|| self.tokens / self.seconds)
    }

    /// Returns the root mean square relative error of the predictions made before each of about the
    /// last 20 prefills; `None` before enough prefills.
    pub fn relative_error(&self) -> Option<f64> {
        (self.judged >= MIN_JUDGED).then(|| (self.errors / self.judged).sqrt())
    }

    /// Returns the seconds of a prefill of `tokens` tokens with `pairs` attention pairs; `None`
    /// before the first observation.
    pub fn seconds(&self, tokens: f64, pairs: f64) -> Option<Seconds> {
        if self.seconds <= 0.0 {
            return None;
        }
        let determinant = self.tokens * self.pairs_pairs - self.pairs * self.pairs;
        let (mut a, mut b) = (self.seconds / self.tokens, 0.0);
        if determinant > MIN_INDEPENDENT * self.tokens * self.pairs_pairs {
            let by_pairs = self.tokens * self.pairs_seconds - self.seconds * self.pairs;
            let by_tokens = self.seconds * self.pairs_pairs - self.pairs_seconds * self.pairs;
            if by_tokens < 0.0 {
                (a, b) = (0.0, self.pairs_seconds / self.pairs_pairs);
            } else if by_pairs > 0.0 {
                (a, b) = (by_tokens / determinant, by_pairs / determinant);
            }
        }
        Some(a * tokens + b * pairs)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn learns_the_ratio_and_forgets() {
        let mut rate = PrefillRate::default();
        assert_eq!((rate.tokens_per_second(), rate.seconds(1.0, 1.0)), (None, None));
        rate.observe(1000.0, 0.0, 0.5);
        assert_eq!(rate.tokens_per_second(), Some(2000.0));
        assert_eq!(rate.seconds(500.0, 1e9), Some(0.25), "the cost of pairs is unknown");
        (0..1000).for_each(|_| rate.observe(1000.0, 0.0, 0.1));
        assert!((rate.tokens_per_second().unwrap() - 10_000.0).abs() < 1.0);
        rate.observe(5.0, 0.0, 0.0);
        assert!(rate.tokens_per_second().unwrap().is_finite());
    }

    #[test]
    fn tells_how_far_off_it_was() {
        let mut rate = PrefillRate::default();
        (0..5).for_each(|_| rate.observe(1000.0, 0.0, 0.1));
        assert!(rate.relative_error().unwrap() < 1e-9);
        (0..200).for_each(|i| rate.observe(1000.0, 0.0, if i % 2 == 0 { 0.08 } else { 0.12 }));
        assert!((rate.relative_error().unwrap() - 0.2).abs() < 0.02);
    }

    #[test]
    fn a_stall_does_not_change_the_rate_for_long() {
        let rate_after = |stalls: u32, slow: f64| {
            let mut rate = PrefillRate::default();
            (0..100).for_each(|_| rate.observe(2000.0, 0.0, 0.2));
            (0..stalls).for_each(|_| rate.observe(2000.0, 0.0, slow));
            rate.tokens_per_second().unwrap()
        };
        assert!(rate_after(1, 60.0) > 10_000.0 / 1.5, "{}", rate_after(1, 60.0));
        // An engine that has become slower, also by much, is learned.
        assert!(rate_after(50, 2.0) < 1700.0, "{}", rate_after(50, 2.0));
        assert!(rate_after(50, 60.0) < 70.0, "{}", rate_after(50, 60.0));
    }

    /// Fixed costs dominate a prefill of a few tokens.
    #[test]
    fn a_short_prefill_is_no_stall() {
        let mut rate = PrefillRate::default();
        (0..100).for_each(|_| rate.observe(2000.0, 0.0, 0.2));
        rate.observe(16.0, 0.0, 0.02);
        let (tokens, seconds) = (99_000.0_f64, 9.9_f64);
        let close = rate.tokens_per_second().unwrap() / ((tokens + 16.0) / (seconds + 0.02)) - 1.0;
        assert!(close.abs() < 1e-3, "{close}");
    }

    proptest! {
        /// For any costs per token and pair, prompts of several lengths determine both.
        #[test]
        fn tells_tokens_from_pairs(
            a in 1e-5f64..1e-3, b in 0.0f64..1e-8,
            lengths in prop::collection::vec((0.0f64..1e4, 100.0f64..1e5), 5..60),
        ) {
            let mut rate = PrefillRate::default();
            let pairs = |(hit, new)| attention_pairs(hit, new);
            let seconds = |prompt: (f64, f64)| a * prompt.1 + b * pairs(prompt);
            lengths.iter().for_each(|p| rate.observe(p.1, pairs(*p), seconds(*p)));
            let independent = rate.tokens * rate.pairs_pairs - rate.pairs * rate.pairs
                > 0.01 * rate.tokens * rate.pairs_pairs;
            for prompt in [(0.0, 1000.0), (5000.0, 3000.0), (0.0, 1e5)] {
                let learned = rate.seconds(prompt.1, pairs(prompt)).unwrap();
                prop_assert!(learned > 0.0);
                if independent {
                    prop_assert!((learned / seconds(prompt) - 1.0).abs() < 1e-6, "{learned} {}", seconds(prompt));
                }
            }
        }

        /// Noise never makes a cost negative.
        #[test]
        fn costs_are_never_negative(
            observed in prop::collection::vec((1.0f64..1e5, 0.0f64..1e5, 1e-4f64..100.0), 1..80),
            tokens in 0.0f64..1e5, pairs in 0.0f64..1e10,
        ) {
            let mut rate = PrefillRate::default();
            observed.iter().for_each(|(new, hit, s)| rate.observe(*new, attention_pairs(*hit, *new), *s));
            prop_assert!(rate.seconds(tokens, pairs).unwrap() >= 0.0);
        }
    }
}
