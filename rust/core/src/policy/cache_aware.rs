//! The Rust routers of SGLang and vLLM: the best prefix match, unless the fleet is out of balance.
//!
//! This version fixes two known problems. On a miss, the published rule takes the smallest tree at
//! any load. An instance stuck on unique prompts keeps the smallest tree and gets all misses
//! (sglang#14305). Here, a miss considers only instances at or below the mean load (`guard_misses`
//! 0: the published rule). Out of balance, equally short queues are ordered by hit, which keeps
//! locality (sglang#32195).
use super::*;

pub static SPEC: PolicySpec = PolicySpec::new(
    "cache_aware",
    "if max(bs) - min(bs) > balance_abs and max(bs) > balance_rel * min(bs): lowest bs, then highest kv_hit; else if max(kv_hit) > cache_threshold: highest kv_hit, then lowest bs; else lowest index_blocks among bs <= mean(bs), then lowest bs",
    "sglang-router and vllm-router (cache_aware); sglang#14305 and #32195",
    &[
        Knob::float("cache_threshold", 0.0, 1.0, 0.3, "hit fraction above which the best match wins"),
        Knob::float(
            "balance_abs",
            0.0,
            1e9,
            64.0,
            "spread of batch sizes (requests) above which the fleet is out of balance",
        ),
        Knob::float(
            "balance_rel",
            1.0,
            1e6,
            1.5,
            "ratio of batch sizes above which the fleet is out of balance",
        ),
        Knob::flag("guard_misses", true, "on a miss, consider only instances at or below the mean load"),
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
        // Slot 0 is stuck on unique prompts: a small tree and 40 requests. The fleet is still in
        // balance.
        let fleet = Fleet::new(3)
            .set(Bs, &[40.0, 0.0, 1.0])
            .set(IndexBlocks, &[5.0, 900.0, 800.0])
            .prompt(9.0, &[0.0; 3]);
        assert_eq!(fleet.order(&*policy("cache_aware", &[])), [2, 1, 0]);
        assert_eq!(fleet.best(&*policy("cache_aware", &[("guard_misses", 0.0)])), Some(0), "as shipped");
    }
}
