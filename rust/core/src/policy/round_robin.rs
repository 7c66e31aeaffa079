//! Instances in turn. Load is ignored.
use super::*;
use crate::indicators::IndicatorSet;

pub static SPEC: PolicySpec = PolicySpec::new(
    "round_robin",
    "(position among eligible instances - number of earlier decisions) modulo number of eligible instances, lowest",
    "textbook",
    &[],
)
.asymmetric()
.stable();

pub fn build(_: &Knobs) -> Result<Box<dyn Policy>, CoreError> {
    Ok(Box::new(RoundRobin))
}

struct RoundRobin;

impl Policy for RoundRobin {
    fn spec(&self) -> &PolicySpec {
        &SPEC
    }

    fn reads(&self) -> IndicatorSet {
        IndicatorSet::EMPTY
    }

    fn score(
        &self,
        snapshot: &Snapshot<'_>,
        _rng: &mut PolicyRng,
        scores: &mut Scores,
    ) -> Result<(), CoreError> {
        let count = snapshot.eligible_count as u64;
        for (position, slot) in snapshot.eligible_slots().enumerate() {
            scores.score[slot] = ((position as u64 + count - snapshot.ordinal % count) % count) as f64;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use crate::policy::fleet::{Fleet, policy};

    #[test]
    fn takes_turns_among_the_eligible() {
        let mut fleet = Fleet::new(4);
        fleet.eligible[1] = false;
        let mut best = |ordinal| {
            fleet.ordinal = ordinal;
            fleet.best(&*policy("round_robin", &[])).unwrap()
        };
        assert_eq!((0..7).map(&mut best).collect::<Vec<_>>(), [0, 2, 3, 0, 2, 3, 0]);
        assert_eq!(best(u64::MAX), 0, "2^64 - 1 is divisible by 3");
        fleet.ordinal = 1;
        assert_eq!(fleet.order(&*policy("round_robin", &[])), [2, 3, 0], "failover goes on in turn");
    }
}
