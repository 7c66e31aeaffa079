//! TRAIL with perfect prediction (Shahout et al., 2024), the baseline "TRAIL+" of UniBoost (section
//! 4): shortest remaining processing time. But a request that has made a share of its answer
//! (default: 0.6) is not preempted for another any more (TRAIL's limited preemption).
//!
//! Work is counted in seconds, as under `srpt`; TRAIL counts output tokens. Unlike `srpt`, an
//! exchange need not pay.
use super::srpt::Srpt;
use super::{Job, LocalOrder, OrderSpec, Preemption, bad};
use serde::Deserialize;

pub(super) const ORDERS: &[OrderSpec] = &[OrderSpec {
    name: "trail",
    first: "the least work left, as `srpt`; a request that has made 0.6 (`threshold`) of its answer stays",
    reads: "the length, step times, the cache",
    source: "TRAIL with perfect prediction (\"TRAIL+\" in UniBoost)",
    settings: &["threshold"],
    build: |given| {
        let order: Trail = given.reader().read()?;
        if !(0.0..=1.0).contains(&order.threshold) {
            return bad("local order: threshold", order.threshold.to_string(), "0 to 1".into());
        }
        Ok(Box::new(order))
    },
}];

#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(default)]
pub struct Trail {
    /// Share of its answer after which a request is safe, 0 to 1.
    pub threshold: f64,
}

impl Default for Trail {
    fn default() -> Trail {
        Trail { threshold: 0.6 }
    }
}

impl LocalOrder for Trail {
    fn rank(&self, job: &Job<'_>) -> i64 {
        Srpt.rank(job)
    }

    fn reads_cache(&self) -> bool {
        true
    }

    fn preemption(&self) -> Option<&dyn Preemption> {
        Some(self)
    }
}

/// Each decode lowers the rank and raises the number of tokens made, so that a no stays a no.
impl Preemption for Trail {
    fn yields(&self, running: &Job<'_>, _entered: i64, waiting: i64) -> bool {
        let safe = f64::from(running.made) >= self.threshold * f64::from(running.output_tokens);
        !safe && self.rank(running) > waiting
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::job;
    use super::*;
    use crate::profile::tests::round;

    #[test]
    fn who_has_made_six_tenths_of_its_answer_stays() {
        let profile = round();
        let order = Trail::default();
        let made = |made| Job { made, context: 100 + made, computed: 99 + made, ..job(&profile) };
        assert_eq!(order.rank(&made(5)), Srpt.rank(&made(5)));
        assert!(order.yields(&made(5), 0, 0) && !order.yields(&made(6), 0, 0));
        assert!(!order.yields(&made(5), 0, order.rank(&made(5))));
        assert!(Trail { threshold: 1.0 }.yields(&made(9), 0, 0));
    }
}
