//! The caller's priority, lower first: vLLM's `--scheduling-policy priority`.
use super::{Job, LocalOrder, OrderSpec};

pub(super) const ORDERS: &[OrderSpec] = &[OrderSpec {
    name: "priority",
    first: "the lowest priority: on emulated engines the request's own, in the simulator the router's (`--priority uniboost` or `vtc`, where a session is a tenant; [priorities](../how-to/overload.md#priorities-in-the-engines-queues))",
    reads: "the request's `priority`",
    source: "vLLM `--scheduling-policy priority`",
    settings: &[],
    build: |_| Ok(Box::new(Priority)),
}];

#[derive(Debug)]
pub struct Priority;

impl LocalOrder for Priority {
    fn rank(&self, job: &Job<'_>) -> i64 {
        job.priority
    }

    fn reads_priority(&self) -> bool {
        true
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
