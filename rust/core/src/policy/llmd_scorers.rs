//! llm-d's default profile: a weighted sum of three scores from 0 to 1.
use super::*;

pub static SPEC: PolicySpec = PolicySpec::new(
    "llmd_scorers",
    "queue * (max(q_bs) - q_bs) / (max(q_bs) - min(q_bs)) + usage * (1 - kv_usage) + prefix * kv_hit, highest; equal queues score 1; instances without a reported kv_usage are left out",
    "llm-d-router 0.10, default scorers",
    &[
        Knob::float("queue", 0.0, 1e6, 2.0, "weight of the queue score"),
        Knob::float("usage", 0.0, 1e6, 2.0, "weight of the free KV cache fraction"),
        Knob::float("prefix", 0.0, 1e6, 3.0, "weight of the hit fraction"),
    ],
);

pub fn build(knobs: &Knobs) -> Result<Box<dyn Policy>, CoreError> {
    highest(
        &SPEC,
        knobs,
        "queue * where(max(q_bs) > min(q_bs), (max(q_bs) - q_bs) / (max(q_bs) - min(q_bs)), 1) \
         + usage * (1 - kv_usage) + prefix * kv_hit",
        &[],
    )
}

#[cfg(test)]
mod tests {
    use crate::indicators::Indicator::*;
    use crate::policy::fleet::{Fleet, policy};

    #[test]
    fn adds_queue_cache_and_hit() {
        let fleet = Fleet::new(3)
            .set(QBs, &[0.0, 1.0, 4.0])
            .set(KvUsage, &[0.5, 0.25, 0.0])
            .prompt(100.0, &[0.0, 50.0, 100.0]);
        assert_eq!(fleet.score(&*policy("llmd_scorers", &[])), [2.0 + 1.0, 1.5 + 1.5 + 1.5, 2.0 + 3.0]);
        assert_eq!(fleet.order(&*policy("llmd_scorers", &[])), [2, 1, 0]);
    }

    #[test]
    fn equal_queues_score_1_and_silence_is_left_out() {
        let fleet = Fleet::new(2).set(QBs, &[3.0, 3.0]).set(KvUsage, &[0.0, f64::NAN]);
        assert_eq!(fleet.score(&*policy("llmd_scorers", &[]))[0], 4.0);
        assert_eq!(fleet.order(&*policy("llmd_scorers", &[])), [0]);
    }
}
