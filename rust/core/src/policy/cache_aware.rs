//! SGLang's and vLLM's Rust routers: best match, unless the fleet is out of balance.
//!
//! Two of its known traps are closed. On a miss the rule as shipped takes the smallest tree whatever its load, and an instance
//! that is stuck on unique prompts keeps the smallest tree and gets all misses (sglang#14305): here only instances no busier
//! than the mean are considered (`guard_misses` 0: as shipped). Out of balance, equally short queues go by hit, so
//! that locality is not thrown away (sglang#32195).
use super::*;

pub static SPEC: PolicySpec = PolicySpec::new(
    "cache_aware",
    "if max(bs) - min(bs) > balance_abs and max(bs) > balance_rel * min(bs): least bs, then most kv_hit; else if max(kv_hit) > cache_threshold: most kv_hit, then least bs; else least index_blocks among bs <= mean(bs), then least bs",
    "sglang-router and vllm-router (cache_aware); sglang#14305 and #32195",
    &[
        Knob::float("cache_threshold", 0.0, 1.0, 0.3, "hit above which the best match is taken"),
        Knob::float("balance_abs", 0.0, 1e9, 64.0, "spread of batch sizes for imbalance, requests"),
        Knob::float("balance_rel", 1.0, 1e6, 1.5, "ratio of batch sizes for imbalance"),
        Knob::flag("guard_misses", true, "on a miss, look only at instances no busier than the mean"),
    ],
);

const IMBALANCED: &str = "(max(bs) - min(bs) > balance_abs) & (max(bs) > balance_rel * min(bs))";

pub fn build(knobs: &Knobs) -> Result<Box<dyn Policy>, CoreError> {
    lowest(
        &SPEC,
        knobs,
        &format!(
            "where({IMBALANCED}, bs, where(max(kv_hit) > cache_threshold, -kv_hit, \
             where((bs <= mean(bs)) | (guard_misses == 0), index_blocks, max(index_blocks) + 1 + bs)))"
        ),
        &[&format!("where({IMBALANCED}, -kv_hit, bs)")],
    )
}

#[cfg(test)]
mod tests {
    use crate::indicators::Indicator::*;
    use crate::policy::fleet::{Fleet, policy};

    #[test]
    fn takes_the_best_match_above_the_threshold() {
        let fleet =
            |best| Fleet::new(3).set(IndexBlocks, &[9.0, 5.0, 7.0]).prompt(100.0, &[best, 10.0, 10.0]);
        assert_eq!(fleet(31.0).best(&*policy("cache_aware", &[])), Some(0));
        assert_eq!(
            fleet(30.0).order(&*policy("cache_aware", &[])),
            [1, 2, 0],
            "a miss goes to the smallest tree"
        );
    }

    #[test]
    fn imbalance_needs_both_thresholds_and_keeps_locality_among_equals() {
        let fleet =
            |busy, idle| Fleet::new(3).set(Bs, &[busy, idle, idle]).prompt(100.0, &[100.0, 0.0, 20.0]);
        let order = |busy, idle| fleet(busy, idle).order(&*policy("cache_aware", &[]));
        assert_eq!(order(64.0, 0.0)[0], 0);
        assert_eq!(order(65.0, 0.0), [2, 1, 0]);
        assert_eq!(order(195.0, 130.0)[0], 0);
        assert_eq!(order(196.0, 130.0), [2, 1, 0]);
    }

    #[test]
    fn a_miss_does_not_always_go_to_the_smallest_tree() {
        // Slot 0 is stuck on unique prompts: a small tree and 40 requests, not yet out of balance.
        let fleet = Fleet::new(3)
            .set(Bs, &[40.0, 0.0, 1.0])
            .set(IndexBlocks, &[5.0, 900.0, 800.0])
            .prompt(9.0, &[0.0; 3]);
        assert_eq!(fleet.order(&*policy("cache_aware", &[])), [2, 1, 0]);
        assert_eq!(fleet.best(&*policy("cache_aware", &[("guard_misses", 0.0)])), Some(0), "as shipped");
    }
}
