//! Shortest remaining processing time, lengths known: TRAIL with perfect prediction (Shahout et al., 2024), without its threshold.
//!
//! Work is the seconds until the request would end, were it alone on this engine: in tokens, a long prompt with a short answer
//! would pass for more work than a short prompt with a long answer, which takes longer.
//!
//! **No thrashing**: a running request goes back only where the waiting one's work and what the running one would have to compute
//! again are together less than what the running one has left. On an engine of one place every such change lowers the sum of the
//! two end times. All that is computed counts as lost, though the cache may give some of it back.
use super::{Job, LocalOrder, Preemption};
use crate::profile::{Profile, StepWork};
use lmetric_core::ids::Seconds;

pub struct Srpt;

impl LocalOrder for Srpt {
    fn rank(&self, job: &Job<'_>) -> i64 {
        nanoseconds(seconds_left(job, job.output_tokens))
    }

    fn reads_cache(&self) -> bool {
        true
    }

    fn preemption(&self) -> Option<&dyn Preemption> {
        Some(self)
    }
}

impl Preemption for Srpt {
    fn yields(&self, running: &Job<'_>, _entered: i64, waiting: i64) -> bool {
        pays(self.rank(running), running, waiting)
    }
}

/// Whether it pays to put `running`, which has `left` nanoseconds of work left, back for one with `waiting`. Each decode lowers the
/// first and raises what is lost, so that a no stays a no.
pub fn pays(left: i64, running: &Job<'_>, waiting: i64) -> bool {
    waiting.saturating_add(nanoseconds(prefill_seconds(running.profile, 0, running.computed))) < left
}

/// Seconds until a request that gets `output_tokens` would end, alone on the engine.
pub fn seconds_left(job: &Job<'_>, output_tokens: u32) -> Seconds {
    let (profile, left) = (job.profile, output_tokens.saturating_sub(job.made));
    match job.context - job.computed {
        // What computes one token behind its context is a decode.
        1 => decode_seconds(profile, job.context, left),
        tokens => {
            prefill_seconds(profile, job.computed, tokens)
                + decode_seconds(profile, job.context + 1, left.saturating_sub(1))
        }
    }
}

/// Whole nanoseconds: ranks are compared exactly.
pub fn nanoseconds(seconds: Seconds) -> i64 {
    (seconds * 1e9) as i64
}

fn prefill_seconds(profile: &Profile, before: u32, tokens: u32) -> Seconds {
    let mut work = StepWork::default();
    work.add_prefill(before, tokens);
    let steps = tokens.div_ceil(profile.max_batch_tokens);
    profile.step_seconds(&work) + (f64::from(steps) - 1.0) * profile.fixed_seconds
}

/// `steps` decodes, the first behind `context` tokens.
fn decode_seconds(profile: &Profile, context: u32, steps: u32) -> Seconds {
    let first = StepWork { decode_sequences: 1, context_tokens: u64::from(context), ..StepWork::default() };
    let n = f64::from(steps);
    n * profile.step_seconds(&first) + profile.more_seconds(1) * n * (n - 1.0) / 2.0
}

#[cfg(test)]
mod tests {
    use super::super::tests::job;
    use super::*;
    use crate::profile::tests::round;

    fn close(a: f64, b: f64) {
        assert!((a - b).abs() < 1e-9, "{a} is not {b}");
    }

    #[test]
    fn remaining_work_by_hand() {
        let profile = round();
        let fresh = job(&profile);
        // Two steps for 100 tokens: 2 x 1 + 100 x 0.01 + 100 x 50 x 0.0001. Then 9 decodes behind 101 to 109 tokens: 9 x 1.1 + 945 x 0.001.
        close(seconds_left(&fresh, 10), 3.5 + 9.9 + 0.945);
        // 60 of them cached: 1 + 40 x 0.01 + 40 x (60 + 20) x 0.0001.
        close(seconds_left(&Job { computed: 60, ..fresh }, 10), 1.72 + 9.9 + 0.945);
        // Four tokens made: 6 decodes behind 104 to 109 tokens.
        close(seconds_left(&Job { made: 4, context: 104, computed: 103, ..fresh }, 10), 6.6 + 0.639);
        // Put back with four made: two steps for 104 tokens, of which comes the fifth; 5 decodes behind 105 to 109.
        let again = Job { made: 4, context: 104, ..fresh };
        close(seconds_left(&again, 10), 2.0 + 1.04 + 104.0 * 52.0 * 0.0001 + 5.5 + 0.535);
        // Sent by another engine: its last prompt token is computed as a decode is.
        close(seconds_left(&Job { computed: 99, ..fresh }, 10), 11.0 + 1.045);
    }

    #[test]
    fn a_request_goes_back_only_where_that_pays_for_what_is_lost() {
        let profile = round();
        // 36 decodes left behind 164 tokens and more: 36 x 1.1 + (164 + 199) x 18 x 0.001 = 46.134. Lost: 3 + 1.63 + 163 x 81.5 x 0.0001.
        let running = Job { output_tokens: 100, made: 64, context: 164, computed: 163, ..job(&profile) };
        let (left, lost) = (46.134, 3.0 + 1.63 + 1.32845);
        close(seconds_left(&running, 100), left);
        assert!(Srpt.yields(&running, 0, nanoseconds(left - lost - 0.001)));
        assert!(!Srpt.yields(&running, 0, nanoseconds(left - lost + 0.001)));
    }
}
