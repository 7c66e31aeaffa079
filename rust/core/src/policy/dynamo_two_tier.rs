//! Two tiers: lowest load if the fleet is out of balance, else the least loaded of the best
//! holders.
use super::*;

pub static SPEC: PolicySpec = PolicySpec::new(
    "dynamo_two_tier",
    "if max(bs) - min(bs) > imbalance and max(bs) > ratio * min(bs): lowest bs; else if max(kv_hit) > overlap: lowest bs among the instances with the highest kv_hit; else lowest bs",
    "ai-dynamo/dynamo#14498",
    &[
        Knob::float(
            "imbalance",
            0.0,
            1e9,
            32.0,
            "spread of batch sizes (requests) above which the fleet is out of balance",
        ),
        Knob::float("ratio", 1.0, 1e6, 1.1, "ratio of batch sizes above which the fleet is out of balance"),
        Knob::float("overlap", 0.0, 1.0, 0.5, "hit fraction above which holders are preferred"),
    ],
);

pub fn build(knobs: &Knobs) -> Result<Box<dyn Policy>, CoreError> {
    lowest(
        &SPEC,
        knobs,
        "where((max(bs) - min(bs) > imbalance) & (max(bs) > ratio * min(bs)), bs, \
         where((kv_hit > overlap) & (kv_hit >= max(kv_hit)), 0, 1))",
        &["bs"],
    )
}

#[cfg(test)]
mod tests {
    use crate::indicators::Indicator::*;
    use crate::policy::fleet::{Fleet, policy};

    #[test]
    fn takes_the_least_busy_of_the_best_holders() {
        let fleet = Fleet::new(4).set(Bs, &[9.0, 5.0, 1.0, 0.0]).prompt(100.0, &[60.0, 60.0, 55.0, 0.0]);
        assert_eq!(fleet.order(&*policy("dynamo_two_tier", &[])), [1, 0, 3, 2]);
        let half = Fleet::new(2).set(Bs, &[1.0, 0.0]).prompt(100.0, &[50.0, 0.0]);
        assert_eq!(half.best(&*policy("dynamo_two_tier", &[])), Some(1), "half is not above a half");
    }

    #[test]
    fn balances_only_when_both_the_spread_and_the_ratio_are_wide() {
        let fleet = |busy, idle| Fleet::new(2).set(Bs, &[busy, idle]).prompt(100.0, &[100.0, 0.0]);
        let best = |busy, idle| fleet(busy, idle).best(&*policy("dynamo_two_tier", &[])).unwrap();
        assert_eq!((best(32.0, 0.0), best(33.0, 0.0)), (0, 1));
        assert_eq!((best(440.0, 400.0), best(441.0, 400.0)), (0, 1));
    }
}
