//! A uniform random choice. Load is ignored.
use super::*;
use crate::indicators::IndicatorSet;
use rand::RngExt;

pub static SPEC: PolicySpec =
    PolicySpec::new("random", "a uniform draw for each instance, lowest", "textbook", &[]).random().stable();

pub fn build(_: &Knobs) -> Result<Box<dyn Policy>, CoreError> {
    Ok(Box::new(Random))
}

struct Random;

impl Policy for Random {
    fn spec(&self) -> &PolicySpec {
        &SPEC
    }

    fn reads(&self) -> IndicatorSet {
        IndicatorSet::EMPTY
    }

    fn score(
        &self,
        snapshot: &Snapshot<'_>,
        rng: &mut PolicyRng,
        scores: &mut Scores,
    ) -> Result<(), CoreError> {
        snapshot.eligible_slots().for_each(|slot| scores.score[slot] = rng.random());
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use crate::policy::fleet::{Fleet, policy};

    #[test]
    fn spreads_evenly() {
        let mut fleet = Fleet::new(4);
        let mut chosen = [0; 4];
        for seed in 0..4000 {
            fleet.seed = seed;
            chosen[fleet.best(&*policy("random", &[])).unwrap()] += 1;
        }
        assert!(chosen.iter().all(|n| (850..1150).contains(n)), "{chosen:?}");
    }
}
