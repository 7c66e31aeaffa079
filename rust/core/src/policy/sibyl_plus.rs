//! The least pressure. Each request weighs as much as its future load, with the weights of the best
//! linear rule for even loads.
//!
//! The length curve and the bound requests come from SIBYL; the criterion does not. The load at one
//! future moment is no better guide than the present load. Both send a cohort to an instance whose
//! current cohort will soon be gone, and the cohort comes back with its whole life. The rule is in
//! `pressure.rs`, its gain in docs/research/sibyl.md.
use super::*;
use crate::estimate::pressure::weights_of;

const KNOBS: &[Knob] =
    &[Knob::flag("oracle", false, "use expected_output_tokens as the exact answer length").for_studies()];

pub static SPEC: PolicySpec = PolicySpec::new(
    "sibyl_plus",
    "decode_pressure + others' requests, lowest",
    "ours, from SIBYL's survival curve",
    KNOBS,
);

pub fn build(knobs: &Knobs) -> Result<Box<dyn Policy>, CoreError> {
    // Load in bs beyond our own is external load, of which only the number is known.
    let ours = if knobs.get("oracle") > 0.0 { "decode_pressure_known" } else { "decode_pressure" };
    let score = format!("{ours} + (bs - decode_bs - bound_bs)");
    let policy = expression(&SPEC, knobs, &score, Prefer::Min, &[])?;
    Ok(Box::new(policy.with_decode_weights(weights_of)))
}

#[cfg(test)]
mod tests {
    use crate::indicators::Indicator::*;
    use crate::policy::fleet::{Fleet, policy};

    #[test]
    fn others_requests_count_one_each() {
        let fleet = Fleet::new(2)
            .set(DecodePressure, &[3.5, 2.0])
            .set(DecodePressureKnown, &[1.0, 2.0])
            .set(Bs, &[4.0, 6.0])
            .set(DecodeBs, &[3.0, 2.0])
            .set(BoundBs, &[1.0, 1.0]);
        assert_eq!(fleet.score(&*policy("sibyl_plus", &[])), [3.5, 5.0]);
        assert_eq!(fleet.score(&*policy("sibyl_plus", &[("oracle", 1.0)])), [1.0, 5.0]);
    }
}
