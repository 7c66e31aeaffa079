//! Cost of fetching a prefix from another instance, learned from the fetches that callers report.
use crate::Seconds;

/// Weight that an observation keeps when the next one arrives: about the last fifty count.
const KEEP: f64 = 0.98;
/// Tokens of the prior's two observations. About fifty real observations outweigh both.
const PRIOR_TOKENS: [f64; 2] = [1024.0, 32768.0];
/// The fixed part and the per-token part are separated if fetch lengths differ by at least this
/// much.
const MIN_INDEPENDENT: f64 = 1e-3;
/// Time after an observation for which the learned cost applies unchanged.
const FRESH_SECONDS: Seconds = 60.0;
/// Time in which the weight of the learned cost then halves, in favor of the prior. When fetches
/// are learned to be too slow, none are made. Without this, nothing would show that they are fast
/// again.
const HALF_LIFE_SECONDS: Seconds = 60.0;

/// Sums over observations, each weighted by 1 / tokens: of 1, tokens, tokens squared, seconds, and
/// tokens x seconds.
#[derive(Clone, Copy, Debug, Default)]
struct Sums {
    ones: f64,
    tokens: f64,
    squares: f64,
    seconds: f64,
    products: f64,
}

impl Sums {
    fn add(&mut self, tokens: f64, seconds: Seconds) {
        let weight = 1.0 / tokens;
        for (sum, value) in [
            (&mut self.ones, weight),
            (&mut self.tokens, 1.0),
            (&mut self.squares, tokens),
            (&mut self.seconds, weight * seconds),
            (&mut self.products, seconds),
        ] {
            *sum = *sum * KEEP + value;
        }
    }

    /// Returns the sums with this share of their weight, and the rest of the weight from `other`.
    fn faded(&self, kept: f64, other: &Sums) -> Sums {
        let mix = |sum: f64, other: f64| kept * sum + (1.0 - kept) * other;
        Sums {
            ones: mix(self.ones, other.ones),
            tokens: mix(self.tokens, other.tokens),
            squares: mix(self.squares, other.squares),
            seconds: mix(self.seconds, other.seconds),
            products: mix(self.products, other.products),
        }
    }

    /// Returns seconds per token and fixed seconds.
    fn solved(&self, prior_fixed: Seconds) -> (Seconds, Seconds) {
        let determinant = self.ones * self.squares - self.tokens * self.tokens;
        if determinant <= MIN_INDEPENDENT * self.ones * self.squares {
            // All fetches have the same length, so the fixed part cannot be determined.
            let fixed = prior_fixed.min(self.products / self.tokens);
            return ((self.products - fixed * self.tokens) / self.squares, fixed);
        }
        let per_token = (self.ones * self.products - self.tokens * self.seconds) / determinant;
        let fixed = (self.squares * self.seconds - self.tokens * self.products) / determinant;
        match () {
            () if per_token < 0.0 => (0.0, self.seconds / self.ones),
            () if fixed < 0.0 => (self.products / self.squares, 0.0),
            () => (per_token, fixed),
        }
    }
}

/// Least squares of seconds = fixed + per token x tokens, both at least 0, over decayed
/// observations. Each observation is weighted by 1 / tokens, so that errors of short and long
/// fetches count equally. It starts with two observations that match the prior, and returns to them
/// while nothing is observed.
#[derive(Clone, Copy, Debug)]
pub struct FetchCost {
    prior_fixed: Seconds,
    prior: Sums,
    sums: Sums,
    observed: u64,
    /// Time of the last observation.
    at: Seconds,
    /// Learned (seconds per token, fixed seconds).
    cost: (Seconds, Seconds),
}

impl FetchCost {
    /// Starts with a prior cost.
    pub fn new(seconds_per_token: Seconds, fixed_seconds: Seconds) -> FetchCost {
        let mut prior = Sums::default();
        PRIOR_TOKENS.iter().for_each(|tokens| prior.add(*tokens, fixed_seconds + seconds_per_token * tokens));
        FetchCost {
            prior_fixed: fixed_seconds,
            prior,
            sums: prior,
            observed: 0,
            at: 0.0,
            cost: (seconds_per_token, fixed_seconds),
        }
    }

    /// Records a fetch of `tokens` that took `seconds`, including all waits.
    pub fn observe(&mut self, tokens: f64, seconds: Seconds, now: Seconds) {
        if tokens > 0.0 && seconds >= 0.0 {
            *self = self.at(now);
            self.observed += 1;
            self.at = now;
            self.sums.add(tokens, seconds);
            self.cost = self.sums.solved(self.prior_fixed);
        }
    }

    /// Returns the cost as it counts at `now`.
    pub fn at(&self, now: Seconds) -> FetchCost {
        let idle = now - self.at - FRESH_SECONDS;
        if self.observed == 0 || idle <= 0.0 {
            return *self;
        }
        let sums = self.sums.faded((-idle / HALF_LIFE_SECONDS).exp2(), &self.prior);
        FetchCost { sums, cost: sums.solved(self.prior_fixed), ..*self }
    }

    /// Returns seconds per token and fixed seconds of a fetch.
    pub fn cost(&self) -> (Seconds, Seconds) {
        self.cost
    }

    /// Returns the seconds of a fetch of `tokens` tokens.
    pub fn seconds(&self, tokens: f64) -> Seconds {
        let (per_token, fixed) = self.cost;
        fixed + per_token * tokens
    }

    /// Returns the number of fetches observed.
    pub fn observed(&self) -> u64 {
        self.observed
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn begins_with_the_prior_and_forgets_it() {
        let mut cost = FetchCost::new(1e-5, 0.002);
        assert_eq!(cost.cost(), (1e-5, 0.002));
        assert_eq!(cost.seconds(1000.0), 0.012);
        // An observation that matches the prior changes nothing.
        cost.observe(5000.0, 0.052, 0.0);
        let close = |a: f64, b: f64| assert!((a / b - 1.0).abs() < 1e-9, "{a} is not {b}");
        close(cost.cost().0, 1e-5);
        close(cost.cost().1, 0.002);
        // The network is four times as slow as the prior.
        for i in 0..2000 {
            let tokens = f64::from(500 + 100 * (i % 50));
            cost.observe(tokens, 0.01 + 4e-5 * tokens, f64::from(i));
        }
        assert!((cost.cost().0 / 4e-5 - 1.0).abs() < 1e-6, "{:?}", cost.cost());
        assert!((cost.cost().1 / 0.01 - 1.0).abs() < 1e-4, "{:?}", cost.cost());
        assert_eq!(cost.observed(), 2001);
    }

    #[test]
    fn fetches_of_one_length_keep_the_fixed_part_of_the_prior() {
        let mut cost = FetchCost::new(1e-5, 0.002);
        (0..2000).for_each(|_| cost.observe(1000.0, 0.042, 0.0));
        assert!((cost.cost().1 - 0.002).abs() < 1e-9, "{:?}", cost.cost());
        assert!((cost.seconds(1000.0) - 0.042).abs() < 1e-9);
    }

    /// Slow fetches of a busy time are forgotten when none is made, and the next one counts at
    /// once.
    #[test]
    fn it_returns_to_the_prior_while_nothing_is_observed() {
        let slow = |tokens: f64| 0.02 + 1.5e-4 * tokens;
        let mut cost = FetchCost::new(1e-5, 0.002);
        (0..200).for_each(|i| {
            cost.observe(f64::from(500 + 100 * (i % 50)), slow(f64::from(500 + 100 * (i % 50))), 100.0)
        });
        let learned = cost.seconds(4096.0);
        assert!((learned / slow(4096.0) - 1.0).abs() < 0.01, "{learned}");
        assert_eq!(cost.at(160.0).cost(), cost.cost(), "a minute later, all of it counts");
        let mut last = learned;
        for minute in 1..=20 {
            let now = cost.at(160.0 + 60.0 * f64::from(minute)).seconds(4096.0);
            assert!(now < last && now > 0.04296 - 1e-9, "{now} {last}");
            last = now;
        }
        assert!((last / (0.002 + 1e-5 * 4096.0) - 1.0).abs() < 1e-3, "{last}");
        cost.observe(4096.0, 0.08, 2000.0);
        assert!((0.044..0.08).contains(&cost.seconds(4096.0)), "{}", cost.seconds(4096.0));
        assert_eq!(cost.observed(), 201);
    }

    proptest! {
        #[test]
        fn no_part_is_ever_negative(
            prior in (0.0f64..1e-3, 0.0f64..1.0),
            observed in prop::collection::vec((1.0f64..1e5, 0.0f64..10.0), 1..80),
        ) {
            let mut cost = FetchCost::new(prior.0, prior.1);
            for (tokens, seconds) in observed {
                cost.observe(tokens, seconds, 0.0);
                let (per_token, fixed) = cost.cost();
                prop_assert!(per_token >= 0.0 && fixed >= 0.0, "{per_token} {fixed}");
            }
        }
    }
}
