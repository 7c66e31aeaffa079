//! Least attained service, by levels that double (a multi-level feedback queue): nothing need be known of lengths.
//!
//! Service is tokens computed, of prompt and answer alike (UniBoost, section 3.2 and A.5; errata 8), what the cache gave left out. The
//! first level ends at 256 tokens, UniBoost's bin k, every further one at twice as many.
//!
//! **No thrashing**: a request that was taken off the queue runs until it has passed the end of its level; then it goes back where one
//! of a lower level waits. So others put it back at most once a level: nine times within 65,536 tokens.
use super::{Job, LocalOrder, Preemption};

/// Tokens of the first level.
const FIRST_TOKENS: u32 = 256;

pub struct Las;

/// 0 below 256 tokens, 1 below 512, 2 below 1,024, and so on.
fn level(attained: u32) -> u32 {
    (attained / FIRST_TOKENS).checked_ilog2().map_or(0, |doubled| doubled + 1)
}

impl LocalOrder for Las {
    fn rank(&self, job: &Job<'_>) -> i64 {
        i64::from(level(job.attained))
    }

    fn preemption(&self) -> Option<&dyn Preemption> {
        Some(self)
    }
}

impl Preemption for Las {
    fn yields(&self, running: &Job<'_>, entered: i64, waiting: i64) -> bool {
        self.rank(running) > entered.max(waiting)
    }

    fn firm_steps(&self, running: &Job<'_>) -> u32 {
        let end = u64::from(FIRST_TOKENS) << level(running.attained);
        u32::try_from(end - u64::from(running.attained)).unwrap_or(u32::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::job;
    use super::*;
    use crate::profile::tests::round;

    #[test]
    fn levels_double() {
        let profile = round();
        for (attained, rank, steps) in [
            (0, 0, 256),
            (255, 0, 1),
            (256, 1, 256),
            (511, 1, 1),
            (512, 2, 512),
            (1023, 2, 1),
            (1024, 3, 1024),
            (65_535, 8, 1),
            (65_536, 9, 65_536),
            (u32::MAX, 24, 1),
        ] {
            let running = Job { attained, ..job(&profile) };
            assert_eq!((Las.rank(&running), Las.firm_steps(&running)), (rank, steps), "{attained}");
        }
    }

    #[test]
    fn a_level_is_run_out_before_another_gets_the_place() {
        let profile = round();
        let at = |attained| Job { attained, ..job(&profile) };
        // (tokens, level on entering the queue, level of the one that waits)
        assert!(!Las.yields(&at(255), 0, 0));
        assert!(Las.yields(&at(256), 0, 0));
        assert!(!Las.yields(&at(300), 1, 0), "came back at this level");
        assert!(Las.yields(&at(512), 1, 0));
        assert!(!Las.yields(&at(512), 0, 2), "as much service");
    }
}
