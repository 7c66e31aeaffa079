//! The part of the fleet's time that goes into computing programs' contexts again.
//!
//! Holding programs back pays where recomputation is most of the work: then the caches lack room,
//! and each return evicts the context of another program. If most of the work is new, a held
//! request waits for nothing: chats on small caches are of this kind.
use crate::estimate::Decayed;
use crate::ids::Seconds;
use serde::{Deserialize, Serialize};

/// Time constant of the measurement, seconds.
const WINDOW_SECONDS: Seconds = 60.0;
/// Share of the instances' time from which recomputation counts. At 0.25, holding began too late:
/// +16% job completion time on the synthetic agents at a pressure of 0.7; 0.05 is like 0.1.
const SHARE_OF_TIME: f64 = 0.1;
/// Share of the prefill work from which recomputation counts. At a third, a recorded hour of chats
/// on small caches was held at its maximum load.
const SHARE_OF_WORK: f64 = 0.5;

/// Maximum of [`Waste::ratio`]: without new work, scores stay finite.
const MAX_RATIO: f64 = 20.0;

/// Seconds of prefill of the last minute, decayed.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub(super) struct Waste {
    /// All prefill work.
    all: Decayed,
    /// The part that some cache held before.
    again: Decayed,
}

impl Waste {
    /// Records the prefill of a request: its seconds, and the share of its tokens that are computed
    /// again.
    pub fn note(&mut self, seconds: Seconds, share_again: f64, now: Seconds) {
        self.add([seconds, seconds * share_again], now);
    }

    /// Adds prefill of peer routers, which is noted when its message comes.
    pub fn add(&mut self, [all, again]: [Seconds; 2], now: Seconds) {
        self.all.add(all, now, WINDOW_SECONDS);
        self.again.add(again, now, WINDOW_SECONDS);
    }

    /// Returns the recomputation per second of new work, at most [`MAX_RATIO`]; at first 0.
    pub fn ratio(&self) -> f64 {
        // Both sums decay at the same pace and change at the same times.
        let (again, all) = (self.again.last(), self.all.last());
        if again > 0.0 { again / (all - again).max(again / MAX_RATIO) } else { 0.0 }
    }

    /// Returns whether recomputation is most of the work, and takes a large part of the time of
    /// `instances`.
    pub fn is_large(&self, instances: usize, now: Seconds) -> bool {
        let (all, again) = (self.all.now(now, WINDOW_SECONDS), self.again.now(now, WINDOW_SECONDS));
        again > SHARE_OF_WORK * all && again > SHARE_OF_TIME * WINDOW_SECONDS * instances as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn recomputation_counts_if_it_is_most_of_the_work_and_takes_time() {
        let mut waste = Waste::default();
        assert!(!waste.is_large(1, 0.0));
        // 5 of 60 s on one instance: less than a tenth.
        waste.note(5.0, 1.0, 0.0);
        assert!(!waste.is_large(1, 0.0));
        waste.note(2.0, 1.0, 0.0);
        assert!(waste.is_large(1, 0.0));
        assert!(!waste.is_large(2, 0.0), "of two instances, it is a sixteenth");
        // As much new work as repeated work.
        waste.note(7.0, 0.0, 0.0);
        assert!(!waste.is_large(1, 0.0));
        waste.note(30.0, 0.9, 0.0);
        assert!(waste.is_large(1, 0.0));
        assert!(!waste.is_large(1, 120.0), "two minutes later");
    }

    #[test]
    fn the_ratio_is_of_recomputed_to_new_work() {
        let mut waste = Waste::default();
        assert_eq!(waste.ratio(), 0.0);
        waste.note(8.0, 0.25, 0.0);
        assert!((waste.ratio() - 2.0 / 6.0).abs() < 1e-12);
        // After a time constant, the first prefill counts exp(-1).
        waste.note(4.0, 1.0, WINDOW_SECONDS);
        let faded = (-1.0f64).exp();
        assert!((waste.ratio() - (2.0 * faded + 4.0) / (6.0 * faded)).abs() < 1e-12);
        let mut waste = Waste::default();
        waste.note(1.0, 1.0, 0.0);
        assert_eq!(waste.ratio(), MAX_RATIO, "nothing was new");
    }
}
