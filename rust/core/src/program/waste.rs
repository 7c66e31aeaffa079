//! The part of the fleet's time that goes into computing programs' contexts again, and whether
//! holds save it.
//!
//! Holding programs back pays where recomputation is most of the work: then the caches lack room,
//! and each return evicts the context of another program. If most of the work is new, a held
//! request waits for nothing: chats on small caches are of this kind.
//!
//! It pays if the programs that fit then make more requests per second than all do now. On caches
//! of a few short programs they do not: engines compute such contexts again while others pause.
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

/// Numbers of [`Measured`] that are of prefill; the others are of pauses.
const OF_WORK: usize = 4;

/// Measurements of a router, as sums: seconds of prefill, and the part that some cache held before;
/// seconds to compute the known parts of all prompts; tokens computed again. Then seconds of the
/// pauses of programs that returned, and the number of these pauses.
pub(super) type Measured = [f64; OF_WORK + 2];

/// Measurements of the last minute, decayed.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub(super) struct Waste {
    /// All prefill work, in seconds.
    all: Decayed,
    /// The part that some cache held before.
    again: Decayed,
    /// Seconds to compute the known parts of all prompts.
    known: Decayed,
    /// Tokens computed again.
    again_tokens: Decayed,
    /// Seconds of pauses, and their number.
    pauses: [Decayed; 2],
}

impl Waste {
    /// Adds the prefill of a request, or that of a peer router, which is noted when its message
    /// comes.
    pub fn computed(&mut self, measured: &Measured, now: Seconds) {
        let sums = [&mut self.all, &mut self.again, &mut self.known, &mut self.again_tokens];
        sums.into_iter().zip(measured).for_each(|(sum, amount)| sum.add(*amount, now, WINDOW_SECONDS));
    }

    /// Adds the pause of a program that returned, or those of a peer router's programs.
    pub fn returned(&mut self, measured: &Measured, now: Seconds) {
        let sums = self.pauses.iter_mut().zip(&measured[OF_WORK..]);
        sums.for_each(|(sum, amount)| sum.add(*amount, now, WINDOW_SECONDS));
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

    /// Returns whether holds let programs make more requests per second than they do without.
    ///
    /// If only programs that fit returned, and each computed its context again, they would need
    /// more time than `instances` have. So without holds, requests are about to wait, and ever more
    /// contexts are evicted meanwhile. While they wait already, fewer return than would. Then, the
    /// pauses tell: an overfull cache has the context of a return with the probability `fit`, so an
    /// instance makes `1 / ((1 - fit) * seconds of a context)` requests per second. With holds, it
    /// makes as many as its programs do that fit, one per pause.
    pub fn holds_pay(
        &self,
        instances: usize,
        capacity_tokens: f64,
        expected_tokens: f64,
        now: Seconds,
    ) -> bool {
        let fit = (capacity_tokens / expected_tokens.max(1.0)).min(1.0);
        let known_per_second = self.known.now(now, WINDOW_SECONDS) / WINDOW_SECONDS;
        if known_per_second * fit > instances as f64 {
            return true;
        }
        // Both sums of a ratio decay at the same pace; without a pause, it is not a number.
        let full_cache_seconds =
            capacity_tokens / instances as f64 * self.again.last() / self.again_tokens.last();
        let [pauses, returns] = self.pauses.map(|sum| sum.last());
        (1.0 - fit) * full_cache_seconds > pauses / returns
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Prefill of a prompt of which a share is computed again.
    fn note(waste: &mut Waste, seconds: Seconds, share_again: f64, now: Seconds) {
        waste.computed(&[seconds, seconds * share_again, 0.0, 0.0, 0.0, 0.0], now);
    }

    #[test]
    fn recomputation_counts_if_it_is_most_of_the_work_and_takes_time() {
        let mut waste = Waste::default();
        assert!(!waste.is_large(1, 0.0));
        // 5 of 60 s on one instance: less than a tenth.
        note(&mut waste, 5.0, 1.0, 0.0);
        assert!(!waste.is_large(1, 0.0));
        note(&mut waste, 2.0, 1.0, 0.0);
        assert!(waste.is_large(1, 0.0));
        assert!(!waste.is_large(2, 0.0), "of two instances, it is a sixteenth");
        // As much new work as repeated work.
        note(&mut waste, 7.0, 0.0, 0.0);
        assert!(!waste.is_large(1, 0.0));
        note(&mut waste, 30.0, 0.9, 0.0);
        assert!(waste.is_large(1, 0.0));
        assert!(!waste.is_large(1, 120.0), "two minutes later");
    }

    #[test]
    fn the_ratio_is_of_recomputed_to_new_work() {
        let mut waste = Waste::default();
        assert_eq!(waste.ratio(), 0.0);
        note(&mut waste, 8.0, 0.25, 0.0);
        assert!((waste.ratio() - 2.0 / 6.0).abs() < 1e-12);
        // After a time constant, the first prefill counts exp(-1).
        note(&mut waste, 4.0, 1.0, WINDOW_SECONDS);
        let faded = (-1.0f64).exp();
        assert!((waste.ratio() - (2.0 * faded + 4.0) / (6.0 * faded)).abs() < 1e-12);
        let mut waste = Waste::default();
        note(&mut waste, 1.0, 1.0, 0.0);
        assert_eq!(waste.ratio(), MAX_RATIO, "nothing was new");
    }

    /// Each second, a program returns after `pause` seconds. Its context of 100 tokens takes
    /// `seconds`, apart from the share that is found in the cache.
    fn after_returns(seconds: Seconds, found: f64, pause: Seconds) -> Waste {
        let mut waste = Waste::default();
        for now in 0..600 {
            let again = 1.0 - found;
            let measured = [seconds * again, seconds * again, seconds, 100.0 * again, pause, 1.0];
            waste.computed(&measured, f64::from(now));
            waste.returned(&measured, f64::from(now));
        }
        waste
    }

    #[test]
    fn holds_pay_if_the_programs_that_fit_would_be_too_much_without_a_cache() {
        // A return per second, whose context takes 2 s, most of them found.
        let waste = after_returns(2.0, 0.9, 1000.0);
        assert!(waste.holds_pay(1, 1000.0, 1500.0, 599.0), "1.33 s per second");
        assert!(!waste.holds_pay(1, 1000.0, 2500.0, 599.0), "0.8");
        assert!(!waste.holds_pay(2, 2000.0, 3000.0, 599.0));
        assert!(!waste.holds_pay(1, 1000.0, 1500.0, 660.0), "a minute later");
    }

    #[test]
    fn holds_pay_while_requests_wait_if_pauses_are_short() {
        // A full cache takes 8 s, three of five returns find nothing.
        for (pause, pays) in [(4.0, true), (5.0, false)] {
            let waste = after_returns(0.8, 0.0, pause);
            assert_eq!(waste.holds_pay(1, 1000.0, 2500.0, 599.0), pays, "{pause}");
            assert!(!waste.holds_pay(1, 1000.0, 1000.0, 599.0), "all fit");
        }
        assert!(!Waste::default().holds_pay(1, 1000.0, 2500.0, 0.0));
        // Contexts were computed again, but no program has paused.
        let mut waste = Waste::default();
        waste.computed(&[0.8, 0.8, 0.8, 100.0, 0.0, 0.0], 0.0);
        assert!(!waste.holds_pay(1, 1000.0, 2500.0, 0.0));
    }
}
