//! Least attained service, by levels that double (a multi-level feedback queue), without knowledge
//! of lengths.
//!
//! Service is the seconds that the tokens computed for a request take alone on this engine, prompt
//! and answer alike. Each token counts once, and cached tokens do not count. (UniBoost, section
//! 3.2, counts tokens of both; a prompt's take a hundredth of the time: errata 7.) The first level
//! ends at the time of 256 decodes, UniBoost's bin k; every further level ends at twice as much.
//!
//! **No thrashing**: a request that was taken off the queue runs until it has passed the end of its
//! level. Then it goes back if a request of a lower level waits. So others preempt it at most once
//! per level: nine times within 65,536 output tokens.
use super::{Job, LocalOrder, OrderSpec, Preemption};
use crate::profile::Profile;
use lmetric_core::ids::Seconds;

/// Decodes of the first level.
const FIRST: f64 = 256.0;

pub(super) const ORDERS: &[OrderSpec] = &[OrderSpec {
    name: "las",
    first: "the least service so far, by levels",
    reads: "the engine's step times",
    source: "MLFQ, UniBoost's LAS",
    settings: &[],
    build: |_| Ok(Box::new(Las)),
}];

#[derive(Debug)]
pub struct Las;

/// Returns the least time of a decode.
fn decode_seconds(profile: &Profile) -> Seconds {
    profile.decode_seconds(0, 1)
}

fn service_seconds(job: &Job<'_>) -> Seconds {
    let prompt = job.context - job.made;
    let of_prompt = job.attained.min(prompt - job.spared);
    let made = job.attained - of_prompt;
    job.profile.prefill_seconds_behind(job.spared, of_prompt) + job.profile.decode_seconds(prompt + 1, made)
}

/// Returns the level: 0 below the time of 256 decodes, 1 below 512, 2 below 1,024, and so on.
fn level(job: &Job<'_>) -> u32 {
    let firsts = service_seconds(job) / (FIRST * decode_seconds(job.profile));
    (firsts as u64).checked_ilog2().map_or(0, |doubled| doubled + 1)
}

impl LocalOrder for Las {
    fn rank(&self, job: &Job<'_>) -> i64 {
        i64::from(level(job))
    }

    fn preemption(&self) -> Option<&dyn Preemption> {
        Some(self)
    }
}

impl Preemption for Las {
    fn yields(&self, running: &Job<'_>, entered: i64, waiting: i64) -> bool {
        self.rank(running) > entered.max(waiting)
    }

    fn firm_steps(&self, running: &Job<'_>, _waiting: i64) -> u32 {
        // An upper bound of the number of decodes: none takes longer than one with the context of
        // the last.
        let decode = decode_seconds(running.profile);
        let left = FIRST * decode * f64::from(level(running)).exp2() - service_seconds(running);
        let most = (left / decode).ceil() as u32;
        let longest = running.profile.decode_seconds(running.context.saturating_add(most), 1);
        ((left / longest) as u32).max(1)
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::job;
    use super::*;
    use crate::profile::tests::round;

    #[test]
    fn levels_double() {
        let profile = Profile { decode_seconds_per_context_token: 0.0, ..round() };
        // A decode takes 1.1 s. The prompt's 100 tokens take 3.5 s, or 3.18 decodes.
        for (attained, rank, steps) in [
            (0, 0, 256),
            (100, 0, 252),
            (352, 0, 1),
            (353, 1, 255),
            (608, 1, 1),
            (609, 2, 511),
            (65_536, 8, 96),
        ] {
            let made = attained.max(100) - 99;
            let running = Job { attained, made, context: 100 + made, ..job(&profile) };
            assert_eq!((Las.rank(&running), Las.firm_steps(&running, 0)), (rank, steps), "{attained}");
        }
        // 96 of the prompt's tokens were cached: a step with 4 tokens takes 1.04 s and 4 x 98
        // pairs.
        let spared = Job { spared: 96, attained: 4, made: 1, context: 101, ..job(&profile) };
        assert!((service_seconds(&spared) - 1.0792).abs() < 1e-9);
    }

    #[test]
    fn no_step_is_taken_past_the_end_of_a_level() {
        let profile = round();
        let mut running = Job { attained: 100, made: 1, context: 101, ..job(&profile) };
        let (mut cuts, mut levels) = (0, vec![0]);
        while running.context < 5000 {
            let steps = Las.firm_steps(&running, 0);
            let after = |n| Job {
                attained: running.attained + n,
                made: running.made + n,
                context: running.context + n,
                ..running
            };
            assert_eq!(Las.rank(&after(steps - 1)), Las.rank(&running));
            running = after(steps);
            cuts += 1;
            levels.push(Las.rank(&running));
        }
        levels.dedup();
        assert_eq!(levels, [0, 1, 2, 3, 4, 5, 6]);
        assert!(cuts < 60, "{cuts}");
    }

    #[test]
    fn a_level_is_run_out_before_another_gets_the_place() {
        let profile = Profile { decode_seconds_per_context_token: 0.0, ..round() };
        let at = |attained| Job { attained, made: 1000, context: 1100, ..job(&profile) };
        // (tokens, level on entering the queue, level of the waiting request)
        assert!(!Las.yields(&at(352), 0, 0));
        assert!(Las.yields(&at(353), 0, 0));
        assert!(!Las.yields(&at(353), 1, 0), "came back at this level");
        assert!(Las.yields(&at(609), 1, 0));
        assert!(!Las.yields(&at(609), 0, 2), "as much service");
    }
}
