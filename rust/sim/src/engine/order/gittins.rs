//! Gittins' index: the request with the least expected cost per chance to end goes first. Lengths
//! of answers are known only as a distribution, which the engine learns from its own requests.
//!
//! Let S be the length of the answer of a request that has made *a* tokens. Its index is the least
//! value of `E[min(S - a, D) | S > a] / P(S - a <= D | S > a)` over all D. The unit is seconds
//! alone on this engine, including the rest of the prompt. The lengths are kept in buckets of 64
//! tokens ([`Survival`]): *a* is the lower edge of its bucket, and D ends at an edge. So the index
//! of a decoding request changes only when it leaves a bucket. A request that is longer than any
//! answer seen goes last. Until the first 16 requests have ended, all go by arrival.
use super::super::learned::Learns;
use super::{Job, LocalOrder, OrderSpec, Preemption, seconds_to_rank};
use lmetric_core::estimate::survival::{BUCKET_TOKENS, FLOOR, Survival};
use lmetric_core::ids::Seconds;

pub(super) const ORDERS: &[OrderSpec] = &[OrderSpec {
    name: "gittins",
    first: "the least expected work per chance to end with it (Gittins' index)",
    reads: "lengths of ended answers, step times, the cache",
    source: "Gittins",
    settings: &[],
    build: |_| Ok(Box::new(Gittins)),
}];

#[derive(Debug)]
pub struct Gittins;

/// Returns the bucket of a request's answer so far.
fn bucket(made: u32) -> usize {
    (f64::from(made) / BUCKET_TOKENS) as usize
}

/// Returns the index for `prompt` seconds before the first token and `decode` seconds for each
/// token.
fn index(lengths: &Survival, made: u32, prompt: Seconds, decode: Seconds) -> Seconds {
    let s = lengths.boundaries();
    let from = bucket(made).min(s.len() - 1);
    let (mut expected, mut least) = (0.0, f64::INFINITY);
    for to in from + 1..s.len() {
        expected += BUCKET_TOKENS * (s[to - 1] + s[to]) / 2.0;
        let ended = s[from] - s[to];
        if ended > 0.0 {
            least = f64::min(least, (prompt * s[from] + decode * expected) / ended);
        }
        if s[to] <= FLOOR {
            break;
        }
    }
    least
}

impl LocalOrder for Gittins {
    fn learns(&self) -> Learns {
        Learns::Lengths
    }

    fn rank(&self, job: &Job<'_>) -> i64 {
        let lengths = &job.learned.lengths;
        if lengths.seen() == 0 {
            return 0;
        }
        let edge = bucket(job.made) as u32 * BUCKET_TOKENS as u32;
        let decode = job.profile.decode_seconds(job.context - job.made + edge, 1);
        let prompt = match job.context - job.computed {
            1 => 0.0,
            tokens => job.profile.prefill_seconds_behind(job.computed, tokens),
        };
        seconds_to_rank(index(lengths, job.made, prompt, decode))
    }

    fn reads_cache(&self) -> bool {
        true
    }

    fn preemption(&self) -> Option<&dyn Preemption> {
        Some(self)
    }
}

impl Preemption for Gittins {
    fn yields(&self, running: &Job<'_>, _entered: i64, waiting: i64) -> bool {
        self.rank(running) > waiting
    }

    fn firm_steps(&self, running: &Job<'_>, _waiting: i64) -> u32 {
        (bucket(running.made) as u32 + 1) * BUCKET_TOKENS as u32 - running.made
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::learned::Learned;
    use super::super::super::learned::tests::NOTHING;
    use super::super::tests::job;
    use super::*;
    use crate::profile::tests::round;

    /// Half of the answers have 64 tokens, half 640.
    fn two_lengths() -> Learned {
        let mut lengths = Survival::default();
        (0..16).for_each(|_| [64, 640].into_iter().for_each(|tokens| lengths.observe(tokens, false)));
        let mut learned = NOTHING.clone();
        learned.lengths = lengths;
        learned
    }

    #[test]
    fn the_index_by_hand() {
        let lengths = two_lengths().lengths;
        let at = |made, prompt| index(&lengths, made, prompt, 1.0);
        // S falls from 1 to 0.5 over the first 64 tokens: half of them end, after 48 tokens each.
        assert!((at(0, 0.0) - 96.0).abs() < 1e-9);
        assert!((at(63, 10.0) - (48.0 + 10.0) / 0.5).abs() < 1e-9);
        // A request with 64 tokens is a long one: 8 buckets, and half a bucket in which S falls to
        // its floor of 0.0001.
        let long = (8.0 * 64.0 * 0.5 + 32.0 * 0.5001) / 0.4999;
        assert!((at(64, 0.0) - long).abs() < 1e-9);
        // A request that is about to end, and a request longer than any answer seen.
        assert!((at(600, 0.0) - 32.0 * 0.5001 / 0.4999).abs() < 1e-9);
        assert_eq!(at(640, 0.0), f64::INFINITY);
        assert_eq!(at(u32::MAX, 0.0), f64::INFINITY);
        // If the prompt takes long, it pays to wait for the end: all of 320 tokens.
        assert!((at(0, 500.0) - (500.0 + 48.0 + 256.0 + 32.0 * 0.5001) / 0.9999).abs() < 1e-9);
    }

    #[test]
    fn ranks_change_where_a_bucket_ends() {
        let (profile, learned) = (round(), two_lengths());
        let made =
            |made| Job { made, context: 100 + made, computed: 99 + made, learned: &learned, ..job(&profile) };
        // 1 + 0.1 + 0.001 x 100 s per decode.
        assert!((Gittins.rank(&made(0)) as f64 * 1e-9 - 96.0 * 1.2).abs() < 1e-6);
        assert_eq!(Gittins.rank(&made(0)), Gittins.rank(&made(63)));
        assert_eq!((Gittins.firm_steps(&made(1), 0), Gittins.firm_steps(&made(64), 0)), (63, 64));
        assert!(Gittins.yields(&made(64), 0, Gittins.rank(&made(0))));
        assert!(!Gittins.yields(&made(600), 0, Gittins.rank(&made(0))));
        // Before any request has ended, all are alike.
        let unknown = Job { learned: &NOTHING, ..made(64) };
        assert_eq!(Gittins.rank(&unknown), 0);
    }
}
