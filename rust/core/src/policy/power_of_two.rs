//! Draws two instances at random and takes the less busy instance.
//!
//! The policy reads `bs`, which counts a request from its decision on. With polled load instead,
//! all requests between two polls would go to the instance that looked idle (vllm-router#178).
use super::*;
use crate::indicators::{Indicator, IndicatorSet};
use rand::RngExt;

pub static SPEC: PolicySpec = PolicySpec::new(
    "power_of_two",
    "bs of two instances drawn at random, lowest; the other instances follow by bs",
    "textbook (Mitzenmacher 2001)",
    &[],
)
.random()
.stable();

pub fn build(_: &Knobs) -> Result<Box<dyn Policy>, CoreError> {
    Ok(Box::new(PowerOfTwo))
}

struct PowerOfTwo;

impl Policy for PowerOfTwo {
    fn spec(&self) -> &PolicySpec {
        &SPEC
    }

    fn reads(&self) -> IndicatorSet {
        IndicatorSet::of(&[Indicator::Bs])
    }

    fn score(
        &self,
        snapshot: &Snapshot<'_>,
        rng: &mut PolicyRng,
        scores: &mut Scores,
    ) -> Result<(), CoreError> {
        draw_two(snapshot, rng, &mut scores.score);
        Ok(())
    }
}

/// Scores two drawn slots by `bs`. All other slots follow, ordered by `bs`.
pub(super) fn draw_two(snapshot: &Snapshot<'_>, rng: &mut PolicyRng, score: &mut [f64]) {
    let bs = snapshot.column(Indicator::Bs);
    let count = snapshot.eligible_count;
    if count == 0 {
        return;
    }
    let first = rng.random_range(0..count);
    // Drawn from the other slots, so that the two differ. A single instance is drawn twice.
    let second = (first + if count > 1 { rng.random_range(1..count) } else { 0 }) % count;
    let behind = 1.0 + snapshot.eligible_slots().map(|slot| bs[slot]).fold(0.0, f64::max);
    for (position, slot) in snapshot.eligible_slots().enumerate() {
        score[slot] = bs[slot] + if position == first || position == second { 0.0 } else { behind };
    }
}

#[cfg(test)]
mod tests {
    use crate::indicators::Indicator::*;
    use crate::policy::fleet::{Fleet, policy};

    #[test]
    fn takes_the_less_busy_of_two_that_differ() {
        let mut fleet = Fleet::new(4).set(Bs, &[0.0, 10.0, 20.0, 30.0]);
        let mut chosen = [0; 4];
        for seed in 0..6000 {
            fleet.seed = seed;
            chosen[fleet.best(&*policy("power_of_two", &[])).unwrap()] += 1;
        }
        // Of the six pairs, slot 0 wins 3, slot 1 wins 2, slot 2 wins 1, and the busiest slot wins
        // none.
        for (n, expected) in chosen.into_iter().zip([3000, 2000, 1000, 0]) {
            assert!((expected - 200..=expected + 200).contains(&n) && (expected > 0 || n == 0), "{chosen:?}");
        }
    }

    #[test]
    fn goes_by_load_counted_at_the_decision() {
        let reads = policy("power_of_two", &[]).reads();
        assert!(reads.contains(Bs) && !reads.contains(ReportedRunning) && !reads.contains(ReportedWaiting));
    }
}
