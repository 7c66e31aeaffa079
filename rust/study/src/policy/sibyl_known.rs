//! `sibyl_plus` with `expected_output_tokens` as the exact answer length, which simulations know.
use super::*;
use lmetric_core::estimate::weights_of;
use lmetric_core::policy::{Prefer, expression};

pub static SPEC: PolicySpec = PolicySpec::new(
    "sibyl_known",
    "decode_pressure_known + others' requests, lowest",
    "ours, an oracle: sibyl_plus that knows lengths",
    &[],
)
.for_studies();

pub fn build(knobs: &Knobs) -> Result<Box<dyn Policy>, CoreError> {
    let score = "decode_pressure_known + (bs - decode_bs - bound_bs)";
    let policy = expression(&SPEC, knobs, score, Prefer::Min, &[])?;
    Ok(Box::new(policy.with_decode_weights(weights_of)))
}

#[cfg(test)]
mod tests {
    use crate::fleet::{Fleet, policy};
    use lmetric_core::indicators::Indicator::*;

    #[test]
    fn others_requests_count_one_each() {
        let fleet = Fleet::new(2)
            .set(DecodePressure, &[3.5, 2.0])
            .set(DecodePressureKnown, &[1.0, 2.0])
            .set(Bs, &[4.0, 6.0])
            .set(DecodeBs, &[3.0, 2.0])
            .set(BoundBs, &[1.0, 1.0]);
        assert_eq!(fleet.score(&*policy("sibyl_known", &[])), [1.0, 5.0]);
    }
}
