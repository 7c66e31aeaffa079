//! AIBrix's prefix-cache router: the best prefix match whose load is near the mean.
//!
//! If the fleet is out of balance, the least loaded instance wins. AIBrix counts the requests that
//! its gateway has in flight; this is `bs`. The least loaded instance is never above the mean, so
//! at least one instance passes the load filter. Instances above the bound follow, ordered by load.
use super::*;

pub static SPEC: PolicySpec = PolicySpec::new(
    "aibrix_prefix",
    "if max(bs) - min(bs) > imbalance: lowest bs; else, among bs <= mean(bs) + sigmas * std(bs): highest kv_hit, then lowest bs; the other instances follow by bs",
    "AIBrix 0.7, prefix-cache router",
    &[
        Knob::float(
            "imbalance",
            0.0,
            1e9,
            8.0,
            "spread of batch sizes (requests) above which hits are ignored",
        ),
        Knob::float(
            "sigmas",
            0.0,
            100.0,
            1.0,
            "maximum load of a match above the mean, in standard deviations",
        ),
    ],
);

pub fn build(knobs: &Knobs) -> Result<Box<dyn Policy>, CoreError> {
    lowest(
        &SPEC,
        knobs,
        "where(max(bs) - min(bs) > imbalance, bs, where(bs <= mean(bs) + sigmas * std(bs), -kv_hit, 1 + bs))",
        &["bs"],
    )
}

#[cfg(test)]
mod tests {
    use crate::indicators::Indicator::*;
    use crate::policy::fleet::{Fleet, policy};

    #[test]
    fn passes_over_a_match_a_sigma_above_the_mean() {
        // Mean 3, sigma sqrt((9 + 1 + 1 + 9 + 0) / 5) = 2. The bound is 5: only slot 3 (6 requests)
        // fails.
        let fleet =
            Fleet::new(5).set(Bs, &[0.0, 2.0, 4.0, 6.0, 3.0]).prompt(100.0, &[0.0, 50.0, 80.0, 90.0, 80.0]);
        assert_eq!(fleet.order(&*policy("aibrix_prefix", &[])), [4, 2, 1, 0, 3]);
        assert_eq!(fleet.best(&*policy("aibrix_prefix", &[("sigmas", 2.0)])), Some(3));
    }

    #[test]
    fn balances_load_when_the_spread_is_wide() {
        let fleet = Fleet::new(3).set(Bs, &[12.0, 4.0, 3.0]).prompt(100.0, &[0.0, 90.0, 0.0]);
        assert_eq!(fleet.order(&*policy("aibrix_prefix", &[])), [2, 1, 0]);
        assert_eq!(fleet.best(&*policy("aibrix_prefix", &[("imbalance", 9.0)])), Some(1));
    }
}
