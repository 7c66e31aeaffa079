//! The least predicted time to first token.
//!
//! The prediction is the router's (step-time model or learned prefill rate), and absent for an
//! instance without a learned rate. Without a stand-in, such an instance would never get requests
//! and never learn a rate. So it counts as fast as the mean of the others; while no rate is known,
//! all count as equally fast.
use super::*;

pub static SPEC: PolicySpec = PolicySpec::new(
    "simulation",
    "predicted_ttft_seconds, lowest; where absent: p_token * mean(predicted_ttft_seconds / p_token) of the others, or p_token where all are absent",
    "LMETRIC section 4.6 and Figure 14; llm-d predicted-latency routing",
    &[],
)
.for_studies();

pub fn build(knobs: &Knobs) -> Result<Box<dyn Policy>, CoreError> {
    lowest(
        &SPEC,
        knobs,
        "where(predicted_ttft_seconds >= 0, predicted_ttft_seconds, p_token * \
         where(mean(predicted_ttft_seconds / p_token) >= 0, mean(predicted_ttft_seconds / p_token), 1))",
        &[],
    )
}

#[cfg(test)]
mod tests {
    use crate::fleet::{Fleet, policy};
    use lmetric_core::indicators::Indicator::*;

    #[test]
    fn unknown_instances_are_taken_for_average_ones() {
        let fleet = |predicted: &[f64]| {
            Fleet::new(3).set(PredictedTtftSeconds, predicted).prompt(1000.0, &[0.0, 500.0, 800.0])
        };
        let simulation = policy("simulation", &[]);
        assert_eq!(fleet(&[0.25, 0.5, 1.0]).score(&*simulation), [0.25, 0.5, 1.0]);
        // 0.25 s / 1000 and 0.25 s / 500: mean 0.375 ms per token, times 200
        let score = fleet(&[0.25, 0.25, f64::NAN]).score(&*simulation);
        assert_eq!(score[..2], [0.25, 0.25]);
        assert!((score[2] - 0.075).abs() < 1e-12);
        assert_eq!(fleet(&[f64::NAN; 3]).score(&*simulation), [1000.0, 500.0, 200.0]);
    }
}
