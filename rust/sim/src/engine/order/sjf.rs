//! Shortest job first: the shortest answer, with known lengths. LTR (Fu et al., 2024) with perfect
//! prediction, without its guard against starvation.
use super::{Job, LocalOrder, OrderSpec};

pub(super) const ORDERS: &[OrderSpec] = &[OrderSpec {
    name: "sjf",
    first: "the shortest answer",
    reads: "its length",
    source: "LTR with perfect prediction",
    settings: &[],
    build: |_| Ok(Box::new(Sjf)),
}];

#[derive(Debug)]
pub struct Sjf;

impl LocalOrder for Sjf {
    fn rank(&self, job: &Job<'_>) -> i64 {
        i64::from(job.output_tokens)
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::job;
    use super::*;
    use crate::profile::tests::round;

    #[test]
    fn the_shorter_answer_runs_first_whatever_its_prompt() {
        let profile = round();
        let short = Job { output_tokens: 9, context: 5000, ..job(&profile) };
        assert!(Sjf.rank(&short) < Sjf.rank(&job(&profile)));
    }
}
