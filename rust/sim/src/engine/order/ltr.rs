//! LTR with perfect prediction (Fu et al., 2024, "Efficient LLM Scheduling by Learning to Rank"), the baseline "LTR+" of UniBoost: the shortest answer first, and who has waited
//! for too many steps is promoted before all others for a quantum of steps (their starvation prevention). Promoted ones go by arrival. Only want of memory puts a
//! request back, the promoted last.
//!
//! The values are ours, no source at hand states any: promoted after 1,000 steps, some half a minute of a usual engine, for 200.
use super::{Job, LocalOrder};
use lmetric_core::CoreError;
use lmetric_core::error::whole;

/// [`super::Order::Ltr`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ltr {
    /// Steps in the queue after which a request is promoted; at least 1.
    pub starvation_steps: u32,
    /// Steps in the batch for which it stays so.
    pub quantum_steps: u32,
}

impl Default for Ltr {
    fn default() -> Ltr {
        Ltr { starvation_steps: 1000, quantum_steps: 200 }
    }
}

impl Ltr {
    /// Names of what can be set.
    pub const SETTINGS: [&'static str; 2] = ["starvation_steps", "quantum_steps"];

    /// Sets one of these.
    ///
    /// # Errors
    /// `BadValue` for what is not whole.
    pub fn set(&mut self, name: &str, value: f64) -> Result<(), CoreError> {
        let what = format!("local order: {name}");
        match name {
            "starvation_steps" => self.starvation_steps = whole(&what, value)?.max(1),
            _ => self.quantum_steps = whole(&what, value)?,
        }
        Ok(())
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
