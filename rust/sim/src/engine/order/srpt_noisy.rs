//! Shortest remaining processing time by a predicted length.
//!
//! The prediction is the true length times `exp(0.5 z)`, rounded, at least 1, where `z` is standard
//! normal. Its median is right. Two of three predictions are within a factor of 1.65, and one in
//! twenty is off by more than 2.66. The value of `z` follows from the seed and the request's id, so
//! a request has the same prediction on every instance and after every preemption.
//!
//! A request that has outlived its prediction counts as having no work left: while it runs, no
//! request goes back. All other rules are those of `srpt`.
use super::srpt::{lasting_steps, pays, seconds_left};
use super::{Exchange, Job, LocalOrder, OrderSpec, Preemption, seconds_to_rank};
use std::f64::consts::TAU;
use xxhash_rust::xxh3::xxh3_64_with_seed;

/// Standard deviation of the logarithm of predicted over true length.
const SIGMA: f64 = 0.5;

pub(super) const ORDERS: &[OrderSpec] = &[OrderSpec {
    name: "srpt_noisy",
    first: "the least work left by a predicted length",
    reads: "a prediction",
    source: "TRAIL",
    settings: &[],
    build: |given| Ok(Box::new(SrptNoisy { seed: given.seed })),
}];

#[derive(Clone, Copy, Debug)]
pub struct SrptNoisy {
    /// Seed of the predictions.
    pub seed: u64,
}

impl SrptNoisy {
    fn predicted(&self, job: &Job<'_>) -> u32 {
        // Two numbers in (0, 1) from 32 bits each, made normal by Box and Muller's transform.
        let bits = xxh3_64_with_seed(&job.id.to_le_bytes(), self.seed);
        let uniform = |bits: u64| (bits as u32 as f64 + 0.5) / 2f64.powi(32);
        let z = (-2.0 * uniform(bits).ln()).sqrt() * (TAU * uniform(bits >> 32)).cos();
        (f64::from(job.output_tokens) * (SIGMA * z).exp()).round().max(1.0) as u32
    }
}

impl LocalOrder for SrptNoisy {
    fn rank(&self, job: &Job<'_>) -> i64 {
        seconds_to_rank(seconds_left(job, self.predicted(job)))
    }

    fn reads_cache(&self) -> bool {
        true
    }

    fn preemption(&self) -> Option<&dyn Preemption> {
        Some(self)
    }
}

impl Preemption for SrptNoisy {
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

#[cfg(test)]
mod tests {
    use super::super::tests::job;
    use super::*;
    use crate::profile::tests::round;

    #[test]
    fn predictions_are_spread_as_stated() {
        let profile = round();
        let order = SrptNoisy { seed: 3 };
        let logs: Vec<f64> = (0..20_000)
            .map(|id| {
                let predicted = order.predicted(&Job { id, output_tokens: 100_000, ..job(&profile) });
                (f64::from(predicted) / 1e5).ln()
            })
            .collect();
        let mean = logs.iter().sum::<f64>() / 2e4;
        let sigma = (logs.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / 2e4).sqrt();
        // Within four standard errors: 0.5 / sqrt(20,000) of the mean, 0.5 / sqrt(40,000) of the
        // deviation.
        assert!(mean.abs() < 0.0142 && (sigma - SIGMA).abs() < 0.01, "{mean} {sigma}");
        let far = logs.iter().filter(|x| x.abs() > 2.66f64.ln()).count();
        assert!((900..1100).contains(&far), "{far}");
    }

    #[test]
    fn a_request_keeps_its_prediction_and_a_seed_its_predictions() {
        let profile = round();
        let asked = Job { output_tokens: 1000, ..job(&profile) };
        let order = SrptNoisy { seed: 3 };
        let later = Job { made: 60, context: 160, computed: 159, attained: 159, ..asked };
        assert_eq!(order.predicted(&asked), order.predicted(&later));
        assert_ne!(order.predicted(&asked), SrptNoisy { seed: 4 }.predicted(&asked));
        assert_ne!(order.predicted(&asked), order.predicted(&Job { id: 8, ..asked }));
        assert_eq!(order.predicted(&Job { output_tokens: 0, ..asked }), 1);
    }

    #[test]
    fn who_outlives_its_prediction_has_nothing_left() {
        let profile = round();
        let order = SrptNoisy { seed: 3 };
        let made = order.predicted(&job(&profile));
        let late = Job { made, context: 100 + made, computed: 99 + made, ..job(&profile) };
        assert_eq!(order.rank(&late), 0);
        assert!(!order.yields(&late, 0, 0));
    }
}
