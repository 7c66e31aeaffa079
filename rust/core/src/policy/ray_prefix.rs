//! Ray Serve LLM's prefix-aware router: the best match if the fleet is balanced, else power of two.
//!
//! The first releases call a fleet balanced up to a spread of 10 requests. Later releases use an
//! infinite spread, so they never balance. This version uses 10.
use super::*;
use crate::indicators::{Indicator, IndicatorSet};

pub static SPEC: PolicySpec = PolicySpec::new(
    "ray_prefix",
    "if max(bs) - min(bs) <= imbalance: highest kv_hit (if max(kv_hit) < match_rate: lowest index_blocks), then lowest bs; \
     else power_of_two",
    "Ray Serve LLM, PrefixCacheAffinityRouter",
    &[
        Knob::float("imbalance", 0.0, 1e9, 10.0, "maximum spread of batch sizes (requests) of a balanced fleet"),
        Knob::float("match_rate", 0.0, 1.0, 0.1, "minimum hit fraction of a match"),
    ],
)
.random();

pub fn build(knobs: &Knobs) -> Result<Box<dyn Policy>, CoreError> {
    let score = "where(max(kv_hit) >= match_rate, -kv_hit, index_blocks)";
    Ok(Box::new(RayPrefix {
        balanced: lowest(&SPEC, knobs, score, &["bs"])?,
        imbalance: knobs.get("imbalance"),
    }))
}

struct RayPrefix {
    balanced: Box<dyn Policy>,
    imbalance: f64,
}

impl Policy for RayPrefix {
    fn spec(&self) -> &PolicySpec {
        &SPEC
    }

    fn reads(&self) -> IndicatorSet {
        self.balanced.reads()
    }

    fn score(
        &self,
        snapshot: &Snapshot<'_>,
        rng: &mut PolicyRng,
        scores: &mut Scores,
    ) -> Result<(), CoreError> {
        let bs = snapshot.column(Indicator::Bs);
        let load = || snapshot.eligible_slots().map(|slot| bs[slot]);
        let spread = load().fold(f64::NEG_INFINITY, f64::max) - load().fold(f64::INFINITY, f64::min);
        if spread <= self.imbalance {
            return self.balanced.score(snapshot, rng, scores);
        }
        power_of_two::draw_two(snapshot, rng, &mut scores.score);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use crate::indicators::Indicator::*;
    use crate::policy::fleet::{Fleet, policy};

    #[test]
    fn follows_the_match_while_balanced() {
        let fleet = |best| {
            Fleet::new(3)
                .set(Bs, &[10.0, 0.0, 1.0])
                .set(IndexBlocks, &[9.0, 7.0, 5.0])
                .prompt(100.0, &[best, 5.0, 5.0])
        };
        assert_eq!(fleet(10.0).order(&*policy("ray_prefix", &[])), [0, 1, 2]);
        assert_eq!(fleet(9.0).order(&*policy("ray_prefix", &[])), [2, 1, 0], "the fewest prefixes");
    }

    #[test]
    fn draws_two_when_out_of_balance() {
        let mut fleet = Fleet::new(3).set(Bs, &[11.0, 0.0, 5.0]).prompt(100.0, &[100.0, 0.0, 0.0]);
        let mut chosen = [0; 3];
        for seed in 0..300 {
            fleet.seed = seed;
            chosen[fleet.best(&*policy("ray_prefix", &[])).unwrap()] += 1;
        }
        assert!(chosen[0] == 0 && chosen[1] > 150 && chosen[2] > 60, "{chosen:?}");
        assert_eq!(fleet.best(&*policy("ray_prefix", &[("imbalance", 11.0)])), Some(0));
    }
}
