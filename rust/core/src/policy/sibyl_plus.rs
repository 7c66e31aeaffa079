//! The least pressure. Each request weighs as much as its future load, with the weights of the best
//! linear rule for even loads.
//!
//! The length curve and the bound requests come from SIBYL; the criterion does not. The load at one
//! future moment is no better guide than the present load. Both send a cohort to an instance whose
//! current cohort will soon be gone, and the cohort comes back with its whole life. The rule is in
//! `pressure.rs`, its gain in docs/research/sibyl.md.
use super::*;
use crate::estimate::learned_weights;

pub static SPEC: PolicySpec = PolicySpec::new(
    "sibyl_plus",
    "decode_pressure + others' requests, lowest",
    "ours, from SIBYL's survival curve",
    &[],
);

pub fn build(knobs: &Knobs) -> Result<Box<dyn Policy>, CoreError> {
    // Load in bs beyond our own is external load, of which only the number is known.
    let policy = expression(&SPEC, knobs, "decode_pressure + (bs - decode_bs - bound_bs)", Prefer::Min, &[])?;
    Ok(Box::new(policy.with_decode_weights(learned_weights)))
}

#[cfg(test)]
mod tests {
    use crate::indicators::Indicator::*;
    use crate::policy::fleet::{Fleet, policy};

    #[test]
    fn others_requests_count_one_each() {
        let fleet = Fleet::new(2)
            .set(DecodePressure, &[3.5, 2.0])
            .set(Bs, &[4.0, 6.0])
            .set(DecodeBs, &[3.0, 2.0])
            .set(BoundBs, &[1.0, 1.0]);
        assert_eq!(fleet.score(&*policy("sibyl_plus", &[])), [3.5, 5.0]);
    }
}
