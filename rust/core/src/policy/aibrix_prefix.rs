//! AIBrix's prefix-cache router: the best match that is not much busier than the mean, unless the fleet is out of balance.
//!
//! Its "running requests" are those that the gateway has in flight, which is `bs`. The instance of least load is never above
//! the mean, so somebody always passes; those that do not come after, by load.
use super::*;

pub static SPEC: PolicySpec = PolicySpec::new(
    "aibrix_prefix",
    "if max(bs) - min(bs) > imbalance: least bs; else among bs <= mean(bs) + sigmas * std(bs) most kv_hit, then least bs; the rest by bs",
    "AIBrix 0.7, prefix-cache router",
    &[
        Knob::float(
            "imbalance",
            0.0,
            1e9,
            8.0,
            "spread of batch sizes above which hits are ignored, requests",
        ),
        Knob::float(
            "sigmas",
            0.0,
            100.0,
            1.0,
            "how far above the mean load a match may be, in standard deviations",
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
        // mean 3, sigma sqrt((9 + 1 + 1 + 9 + 0) / 5) = 2: slot 3 (6) is above 5, the others pass.
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
