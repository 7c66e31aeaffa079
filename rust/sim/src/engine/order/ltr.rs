//! LTR with perfect prediction (Fu et al., 2024, "Efficient LLM Scheduling by Learning to Rank"),
//! the baseline "LTR+" of UniBoost: the shortest answer first. A request that has waited for too
//! many steps is promoted before all others for a quantum of steps (their starvation prevention).
//! Promoted requests go by arrival. Requests are preempted only for want of memory, the promoted
//! ones last.
//!
//! The values are ours, since no available source states any: promoted after 1,000 steps, about
//! half a minute of a usual engine, for 200.
use super::{Job, LocalOrder, OrderSpec};
use serde::Deserialize;

pub(super) const ORDERS: &[OrderSpec] = &[OrderSpec {
    name: "ltr",
    first: "the shortest answer; a request that has waited for 1,000 steps (`starvation_steps`) before all others, for 200 (`quantum_steps`)",
    reads: "its length",
    source: "Fu et al. 2024: LTR with perfect prediction (\"SJF (LTR+)\" in UniBoost)",
    settings: &["starvation_steps", "quantum_steps"],
    build: |given| {
        let order: Ltr = given.reader().read()?;
        Ok(Box::new(Ltr { starvation_steps: order.starvation_steps.max(1), ..order }))
    },
}];

#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(default)]
pub struct Ltr {
    /// Steps in the queue after which a request is promoted; at least 1.
    pub starvation_steps: u32,
    /// Steps in the batch for which it stays promoted.
    pub quantum_steps: u32,
}

impl Default for Ltr {
    fn default() -> Ltr {
        Ltr { starvation_steps: 1000, quantum_steps: 200 }
    }
}

impl LocalOrder for Ltr {
    fn rank(&self, job: &Job<'_>) -> i64 {
        let promoted = job.waited_steps >= u64::from(self.starvation_steps)
            && job.served_steps < u64::from(self.quantum_steps);
        if promoted { -1 } else { i64::from(job.output_tokens) }
    }

    fn revises(&self) -> bool {
        true
    }

    fn promotes_after(&self) -> Option<u32> {
        Some(self.starvation_steps)
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::job;
    use super::*;
    use crate::profile::tests::round;

    #[test]
    fn who_has_waited_long_is_before_all_others_for_a_quantum() {
        let profile = round();
        let order = Ltr::default();
        let after = |waited_steps, served_steps| {
            order.rank(&Job { waited_steps, served_steps, output_tokens: 4000, ..job(&profile) })
        };
        assert_eq!((after(999, 0), after(1000, 0)), (4000, -1));
        assert_eq!((after(1000, 199), after(1000, 200)), (-1, 4000));
        assert!(order.rank(&job(&profile)) > -1);
    }
}
