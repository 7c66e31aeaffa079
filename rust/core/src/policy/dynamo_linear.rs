//! Dynamo as the LMETRIC paper describes it: a weighted sum of normalized prefill work and
//! normalized total tokens.
use super::*;

pub static SPEC: PolicySpec = PolicySpec::new(
    "dynamo_linear",
    "w * p_token / max(p_token) + (1 - w) * tokens / max(tokens), lowest",
    "LMETRIC section 6 (its Dynamo baseline); the paper sweeps the weight and does not report it",
    &[Knob::float("w", 0.0, 1.0, 0.5, "weight of prefill work; sweep it for your workload")],
);

pub fn build(knobs: &Knobs) -> Result<Box<dyn Policy>, CoreError> {
    lowest(&SPEC, knobs, "w * norm(p_token) + (1 - w) * norm(tokens)", &[])
}

#[cfg(test)]
mod tests {
    use crate::indicators::Indicator::*;
    use crate::policy::fleet::{Fleet, policy};

    #[test]
    fn adds_two_normalised_loads() {
        let fleet = Fleet::new(3).set(Tokens, &[8000.0, 0.0, 2000.0]).prompt(1000.0, &[900.0, 0.0, 500.0]);
        let score = fleet.score(&*policy("dynamo_linear", &[]));
        assert_eq!(score, [0.5 * 0.1 + 0.5, 0.5, 0.25 + 0.5 * 0.25]);
        let score = fleet.score(&*policy("dynamo_linear", &[("w", 0.0)]));
        assert_eq!(score, [1.0, 0.0, 0.25]);
    }
}
