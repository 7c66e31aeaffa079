//! First come, first served: the default of vLLM and SGLang.
use super::{Job, LocalOrder, OrderSpec};

pub(super) const ORDERS: &[OrderSpec] = &[OrderSpec {
    name: "fcfs",
    first: "the earliest arrival",
    reads: "",
    source: "vLLM, SGLang",
    settings: &[],
    build: |_| Ok(Box::new(Fcfs)),
}];

#[derive(Debug)]
pub struct Fcfs;

impl LocalOrder for Fcfs {
    fn rank(&self, _: &Job<'_>) -> i64 {
        0
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::job;
    use super::*;
    use crate::profile::tests::round;

    #[test]
    fn nothing_but_arrival_counts() {
        let profile = round();
        let other = Job { priority: -9, output_tokens: 1, context: 1, attained: 50, ..job(&profile) };
        assert_eq!(Fcfs.rank(&job(&profile)), Fcfs.rank(&other));
    }
}
