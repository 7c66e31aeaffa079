//! Each session stays on one instance: rendezvous hashing of session key and instance name.
//!
//! Each instance has a hash with the session, and the lowest hash wins. If an instance joins or
//! leaves, only the sessions that it wins or loses move. Moved sessions spread over all other
//! instances.
use super::*;
use crate::indicators::{Indicator, IndicatorSet};

pub static SPEC: PolicySpec = PolicySpec::new(
    "session_affinity",
    "hash(session, instance name), lowest; without a session key: lowest bs",
    "vLLM production-stack session router; nginx hash ... consistent; implemented by rendezvous hashing (Thaler, Ravishankar 1998)",
    &[],
)
.asymmetric()
.stable();

pub fn build(_: &Knobs) -> Result<Box<dyn Policy>, CoreError> {
    Ok(Box::new(SessionAffinity))
}

struct SessionAffinity;

impl Policy for SessionAffinity {
    fn spec(&self) -> &PolicySpec {
        &SPEC
    }

    fn reads(&self) -> IndicatorSet {
        IndicatorSet::of(&[Indicator::Bs])
    }

    fn score(
        &self,
        snapshot: &Snapshot<'_>,
        _rng: &mut PolicyRng,
        scores: &mut Scores,
    ) -> Result<(), CoreError> {
        let bs = snapshot.column(Indicator::Bs);
        for slot in snapshot.eligible_slots() {
            scores.score[slot] = match snapshot.session {
                Some(session) => weight(session, snapshot.name_hashes[slot]),
                None => bs[slot],
            };
        }
        Ok(())
    }
}

/// Returns a pseudo-random number from 0 to 1; equal hashes give equal numbers.
fn weight(session: u64, name: u64) -> f64 {
    let hash = mix(session ^ mix(name));
    (hash >> 11) as f64 / (1u64 << 53) as f64
}

/// The finalizer of SplitMix64 (Steele, Lea, Flood 2014).
fn mix(x: u64) -> u64 {
    let x = x.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    x ^ (x >> 31)
}

#[cfg(test)]
mod tests {
    use crate::indicators::Indicator::*;
    use crate::policy::fleet::{Fleet, policy};

    #[test]
    fn sessions_stay_spread_and_move_only_with_their_instance() {
        let affinity = policy("session_affinity", &[]);
        let mut fleet = Fleet::new(8);
        let mut best = |session, gone: Option<usize>| {
            fleet.session = Some(session);
            fleet.eligible = (0..8).map(|i| Some(i) != gone).collect();
            fleet.best(&*affinity).unwrap()
        };
        let before: Vec<usize> = (0..4000).map(|session| best(session, None)).collect();
        for slot in 0..8 {
            let n = before.iter().filter(|b| **b == slot).count();
            assert!((400..600).contains(&n), "slot {slot} has {n} of 4000 sessions");
        }
        let mut moved_to = [0; 8];
        for (session, before) in before.iter().enumerate() {
            let after = best(session as u64, Some(5));
            assert!(after == *before || *before == 5);
            moved_to[after] += usize::from(*before == 5);
        }
        assert!((0..8).all(|slot| (slot == 5) == (moved_to[slot] == 0)), "{moved_to:?}");
    }

    #[test]
    fn goes_by_name_and_not_by_slot_or_load() {
        let affinity = policy("session_affinity", &[]);
        let mut fleet = Fleet::new(4).set(Bs, &[9.0, 0.0, 5.0, 7.0]);
        fleet.session = Some(42);
        let chosen = fleet.names[fleet.best(&*affinity).unwrap()];
        fleet.names.rotate_left(1);
        fleet.columns.get_mut(Bs).fill(0.0);
        assert_eq!(fleet.names[fleet.best(&*affinity).unwrap()], chosen);
    }

    #[test]
    fn without_a_session_takes_the_least_requests() {
        let fleet = Fleet::new(3).set(Bs, &[2.0, 0.0, 1.0]);
        assert_eq!(fleet.order(&*policy("session_affinity", &[])), [1, 2, 0]);
    }
}
