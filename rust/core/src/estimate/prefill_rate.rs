//! Prefill rate of an instance, learned from our own first tokens.
use crate::ids::Seconds;

/// Weight that an observation keeps when the next one comes: the last twenty or so count.
const KEEP: f64 = 0.95;

/// Ratio of decayed sums: long prefills weigh more than short ones, whose time is mostly fixed cost.
#[derive(Clone, Copy, Debug, Default)]
pub struct PrefillRate {
    tokens: f64,
    seconds: f64,
}

impl PrefillRate {
    /// `tokens` uncached prompt tokens were computed in `seconds`, from the moment the instance could begin.
    pub fn observe(&mut self, tokens: f64, seconds: Seconds) {
        if tokens > 0.0 && seconds > 0.0 {
            self.tokens = self.tokens * KEEP + tokens;
            self.seconds = self.seconds * KEEP + seconds;
        }
    }

    /// Tokens per second, once anything was observed.
    pub fn tokens_per_second(&self) -> Option<f64> {
        (self.seconds > 0.0).then(|| self.tokens / self.seconds)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn learns_the_ratio_and_forgets() {
        let mut rate = PrefillRate::default();
        assert_eq!(rate.tokens_per_second(), None);
        rate.observe(1000.0, 0.5);
        assert_eq!(rate.tokens_per_second(), Some(2000.0));
        (0..200).for_each(|_| rate.observe(1000.0, 0.1));
        assert!((rate.tokens_per_second().unwrap() - 10_000.0).abs() < 1.0);
        rate.observe(5.0, 0.0);
        assert!(rate.tokens_per_second().unwrap().is_finite());
    }
}
