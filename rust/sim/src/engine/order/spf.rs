//! Shortest prompt first, by the tokens that are neither cached nor sent by another engine when the
//! request enters the queue. UniBoost (section 2) names "shortest prefill first" among the engines'
//! heuristics; its A.5 leaves out prefix hits, as here.
use super::{Job, LocalOrder, OrderSpec};

pub(super) const ORDERS: &[OrderSpec] = &[OrderSpec {
    name: "spf",
    first: "the shortest prompt, by tokens that are neither cached nor sent when it enters the queue",
    reads: "the cache",
    source: "SGLang, vLLM; UniBoost A.5",
    settings: &[],
    build: |_| Ok(Box::new(Spf)),
}];

#[derive(Debug)]
pub struct Spf;

impl LocalOrder for Spf {
    fn rank(&self, job: &Job<'_>) -> i64 {
        i64::from(job.context - job.computed)
    }

    fn reads_cache(&self) -> bool {
        true
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::job;
    use super::*;
    use crate::profile::tests::round;

    #[test]
    fn what_is_cached_does_not_count() {
        let profile = round();
        assert_eq!(Spf.rank(&job(&profile)), 100);
        let long = Job { context: 900, computed: 832, ..job(&profile) };
        assert_eq!(Spf.rank(&long), 68);
    }
}
