//! Dynamo's KV router: the sum of pending prefill work and KV blocks in use; optional softmax draw.
//!
//! The hit reduces the prefill work; with a credit of 1, the prefill work is `p_token`. With a
//! temperature, costs are normalized by their range, and an instance is drawn with probability
//! proportional to exp(-cost / temperature). Gumbel noise on each cost implements this draw: the
//! lowest noisy cost is the draw, and the order is a draw without replacement.
use super::*;
use crate::indicators::IndicatorSet;
use rand::RngExt;
use rand::distr::Open01;

pub static SPEC: PolicySpec = PolicySpec::new(
    "dynamo",
    "max(0, queued_prefill_tokens + prompt_tokens - overlap_credit * hit_tokens) / block_tokens + w * tokens / block_tokens, lowest; \
     temperature above 0: a random draw by softmax of -(cost - min) / (max - min) / temperature",
    "Dynamo 1.6, KV router, default cost",
    &[
        Knob::float("overlap_credit", 0.0, 10.0, 1.0, "factor by which hit tokens reduce the prefill work"),
        Knob::float("w", 0.0, 1000.0, 1.0, "weight of the blocks in use"),
        Knob::float("block_tokens", 1.0, 1e6, 16.0, "tokens per block; scales the score, does not change the choice"),
        Knob::float("temperature", 0.0, 100.0, 0.0, "0: lowest cost wins; above 0: softmax over costs normalized by their range"),
    ],
)
.random();

pub fn build(knobs: &Knobs) -> Result<Box<dyn Policy>, CoreError> {
    let cost = "maximum(0, queued_prefill_tokens + prompt_tokens - overlap_credit * hit_tokens) / block_tokens \
                + w * tokens / block_tokens";
    let cost = lowest(&SPEC, knobs, cost, &[])?;
    let temperature = knobs.get("temperature");
    Ok(if temperature > 0.0 { Box::new(Softmax { cost, temperature }) } else { cost })
}

struct Softmax {
    cost: Box<dyn Policy>,
    temperature: f64,
}

impl Policy for Softmax {
    fn spec(&self) -> &PolicySpec {
        &SPEC
    }

    fn reads(&self) -> IndicatorSet {
        self.cost.reads()
    }

    fn score(
        &self,
        snapshot: &Snapshot<'_>,
        rng: &mut PolicyRng,
        scores: &mut Scores,
    ) -> Result<(), CoreError> {
        self.cost.score(snapshot, rng, scores)?;
        let costs = || snapshot.eligible_slots().map(|slot| scores.score[slot]);
        let (min, max) = (costs().fold(f64::INFINITY, f64::min), costs().fold(f64::NEG_INFINITY, f64::max));
        let range = if max > min { max - min } else { 1.0 };
        for slot in snapshot.eligible_slots() {
            let uniform: f64 = rng.sample(Open01);
            let gumbel = -(-uniform.ln()).ln();
            scores.score[slot] = (scores.score[slot] - min) / range / self.temperature - gumbel;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use crate::indicators::Indicator::*;
    use crate::policy::fleet::{Fleet, policy};

    fn fleet() -> Fleet {
        Fleet::new(3)
            .set(QueuedPrefillTokens, &[0.0, 320.0, 0.0])
            .set(Tokens, &[640.0, 0.0, 160.0])
            .prompt(320.0, &[320.0, 160.0, 0.0])
    }

    #[test]
    fn adds_prefill_and_decode_blocks() {
        assert_eq!(fleet().score(&*policy("dynamo", &[])), [40.0, 30.0, 30.0]);
        assert_eq!(fleet().score(&*policy("dynamo", &[("w", 0.0)])), [0.0, 30.0, 20.0]);
        assert_eq!(fleet().score(&*policy("dynamo", &[("overlap_credit", 0.0)])), [60.0, 40.0, 30.0]);
        let credit = [("overlap_credit", 2.0), ("w", 0.0)];
        assert_eq!(fleet().score(&*policy("dynamo", &credit)), [0.0, 20.0, 20.0], "never below 0");
    }

    #[test]
    fn temperature_draws_by_softmax() {
        // Costs 0, 30 and 20, range 30: logits 0, -2 and -4/3 at temperature 1/2.
        let dynamo = policy("dynamo", &[("w", 0.0), ("temperature", 0.5)]);
        let weights = [1.0, (-2.0f64).exp(), (-4.0f64 / 3.0).exp()];
        let mut fleet = fleet();
        let mut chosen = [0.0; 3];
        for seed in 0..20_000 {
            fleet.seed = seed;
            chosen[fleet.best(&*dynamo).unwrap()] += 1.0 / 20_000.0;
        }
        for (share, weight) in chosen.iter().zip(weights) {
            assert!((share - weight / weights.iter().sum::<f64>()).abs() < 0.015, "{chosen:?}");
        }
    }

    #[test]
    fn equal_costs_are_drawn_evenly_and_stay_finite() {
        let fleet = Fleet::new(3).prompt(10.0, &[0.0; 3]);
        let score = fleet.score(&*policy("dynamo", &[("temperature", 1e-9)]));
        assert!(score.iter().all(|s| s.is_finite()), "{score:?}");
    }
}
