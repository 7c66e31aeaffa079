//! The caller's priority, lower first: vLLM's `--scheduling-policy priority`.
use super::{Job, LocalOrder};

pub struct Priority;

impl LocalOrder for Priority {
    fn rank(&self, job: &Job<'_>) -> i64 {
        job.priority
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::job;
    use super::*;
    use crate::profile::tests::round;

    #[test]
    fn the_lower_priority_runs_first() {
        let profile = round();
        let urgent = Job { priority: -1, output_tokens: 1000, ..job(&profile) };
        assert!(Priority.rank(&urgent) < Priority.rank(&job(&profile)));
    }
}
