//! Shortest remaining processing time, with known lengths: TRAIL with perfect prediction (Shahout
//! et al., 2024), without its threshold.
//!
//! Work is the seconds until the request would end, alone on this engine. In tokens, a long prompt
//! with a short answer would count as more work than a short prompt with a long answer, which takes
//! longer.
//!
//! **No thrashing**: running requests go back only if the exchange pays. Its cost is the waiting
//! request's work, plus the time that all running requests lose while the preempted ones are
//! computed again. The cost must be less than the work left of the first request to end.
//!
//! Without the exchange, the waiting request would get in when that first request ends, so it gains
//! those seconds. Each preempted request waits for about the waiting request's work, and every
//! request in the batch waits for the computing. In an engine of one slot this is SRPT with a cost
//! of changing, and each change lowers the sum of the end times. All computed tokens count as lost,
//! though the cache may keep some of them.
use super::{Exchange, Job, LocalOrder, OrderSpec, Preemption, seconds_to_rank};
use lmetric_core::ids::Seconds;

pub(super) const ORDERS: &[OrderSpec] = &[OrderSpec {
    name: "srpt",
    first: "the least work left: seconds to its end if it ran alone",
    reads: "the length, the engine's step times, the cache",
    source: "TRAIL with perfect prediction",
    settings: &[],
    build: |_| Ok(Box::new(Srpt)),
}];

#[derive(Debug)]
pub struct Srpt;

impl LocalOrder for Srpt {
    fn rank(&self, job: &Job<'_>) -> i64 {
        seconds_to_rank(seconds_left(job, job.output_tokens))
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
        self.rank(running) > waiting
    }

    fn pays(&self, exchange: &Exchange) -> bool {
        pays(exchange)
    }

    fn lasting_steps(&self, last: &Job<'_>, next: &Job<'_>) -> u32 {
        lasting_steps(last, next, self.rank(last) - self.rank(next))
    }
}

/// Whether the exchange pays. Each decode lowers the least work left and raises the loss, so that a
/// no stays a no while the same requests would go back.
pub fn pays(exchange: &Exchange) -> bool {
    let lost = seconds_to_rank(f64::from(exchange.running) * exchange.lost_seconds);
    exchange.waiting.saturating_add(lost) < exchange.least
}

/// Returns the decode steps for which `last` keeps more work left than `next`, if it is `ahead`
/// nanoseconds ahead. With each step it loses the difference of the two decode times.
pub fn lasting_steps(last: &Job<'_>, next: &Job<'_>, ahead: i64) -> u32 {
    if last.profile.decode_throughput.is_some() {
        return 1; // not linear
    }
    let more = f64::from(last.context) - f64::from(next.context);
    let closing = more * last.profile.decode_seconds_per_context_token * 1e9;
    // Ranks are rounded to nanoseconds.
    if closing <= 0.0 { u32::MAX } else { ((ahead - 2) as f64 / closing).max(1.0) as u32 }
}

/// Returns the seconds until a request with `output_tokens` would end, alone on the engine.
pub fn seconds_left(job: &Job<'_>, output_tokens: u32) -> Seconds {
    let (profile, left) = (job.profile, output_tokens.saturating_sub(job.made));
    match job.context - job.computed {
        // Computing one token behind the context is a decode.
        1 => profile.decode_seconds(job.context, left),
        tokens => {
            profile.prefill_seconds_behind(job.computed, tokens)
                + profile.decode_seconds(job.context + 1, left.saturating_sub(1))
        }
    }
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
        // Two steps for 100 tokens: 2 x 1 + 100 x 0.01 + 100 x 50 x 0.0001. Then 9 decodes behind
        // 101 to 109 tokens: 9 x 1.1 + 945 x 0.001.
        close(seconds_left(&fresh, 10), 3.5 + 9.9 + 0.945);
        // 60 of them cached: 1 + 40 x 0.01 + 40 x (60 + 20) x 0.0001.
        close(seconds_left(&Job { computed: 60, ..fresh }, 10), 1.72 + 9.9 + 0.945);
        // Four tokens made: 6 decodes behind 104 to 109 tokens.
        close(seconds_left(&Job { made: 4, context: 104, computed: 103, ..fresh }, 10), 6.6 + 0.639);
        // Preempted with four made: two steps for 104 tokens, which make the fifth; 5 decodes
        // behind 105 to 109.
        let again = Job { made: 4, context: 104, ..fresh };
        close(seconds_left(&again, 10), 2.0 + 1.04 + 104.0 * 52.0 * 0.0001 + 5.5 + 0.535);
        // Sent by another engine: its last prompt token is computed as a decode is.
        close(seconds_left(&Job { computed: 99, ..fresh }, 10), 11.0 + 1.045);
    }

    #[test]
    fn who_has_the_longer_context_is_overtaken() {
        let profile = round();
        let at = |context, output_tokens| Job {
            made: 10,
            context,
            computed: context - 1,
            output_tokens,
            ..job(&profile)
        };
        // A decode takes 1.1 s and 1 ms for each token of its context: of 510 and 110 tokens, 0.4 s
        // more.
        for (long, short) in
            [(at(510, 20), at(110, 20)), (at(510, 40), at(110, 45)), (at(1010, 33), at(90, 33))]
        {
            let steps = Srpt.lasting_steps(&long, &short);
            let after = |job: &Job<'_>, n: u32| {
                let (made, context, computed) = (job.made + n, job.context + n, job.computed + n);
                Srpt.rank(&Job { made, context, computed, ..*job })
            };
            assert!((0..steps).all(|n| after(&long, n) >= after(&short, n)), "{steps}");
            assert_eq!(Srpt.lasting_steps(&short, &long), u32::MAX);
        }
        // 30 x 1.61 + 0.435 s are left of the first, 35 x 1.21 + 0.595 s of the second: 5.79 s
        // less, which is 14.5 times 0.4 s.
        assert_eq!(Srpt.lasting_steps(&at(510, 40), &at(110, 45)), 14);
    }

    #[test]
    fn requests_go_back_only_where_that_pays_for_what_all_lose() {
        // 2 s of work, and three requests that lose 0.5 s each.
        let exchange =
            Exchange { waiting: 2_000_000_000, least: 3_500_000_000, running: 3, lost_seconds: 0.5 };
        assert!(!Srpt.pays(&exchange));
        assert!(Srpt.pays(&Exchange { least: exchange.least + 1, ..exchange }));
        assert!(!Srpt.pays(&Exchange { least: exchange.least + 1, running: 4, ..exchange }));
        let profile = round();
        let rank = Srpt.rank(&job(&profile));
        assert!(Srpt.yields(&job(&profile), 0, rank - 1) && !Srpt.yields(&job(&profile), 0, rank));
    }
}
