//! LMETRIC for instances of different speeds: prefill work in seconds on the instance, times the
//! batch.
//!
//! An instance without a learned prefill rate counts as average. It therefore gets its share of
//! requests, and its first prompt gives a rate. If no instance has a learned rate, the order equals
//! the order of `lmetric`.
use super::*;

pub static SPEC: PolicySpec = PolicySpec::new(
    "lmetric_seconds",
    "p_seconds * (bs + bs_offset), lowest",
    "this project: `lmetric` with tokens divided by the learned prefill rate of each instance",
    &[Knob::float("bs_offset", 0.0, 1.0, 1.0, "1: the batch size including this request; 0: without it")],
);

pub fn build(knobs: &Knobs) -> Result<Box<dyn Policy>, CoreError> {
    lowest(&SPEC, knobs, "p_seconds * (bs + bs_offset)", &[])
}

#[cfg(test)]
mod tests {
    use crate::indicators::Indicator::*;
    use crate::policy::fleet::{Fleet, policy};

    #[test]
    fn multiplies_prefill_seconds_with_the_batch_joined() {
        let fleet = Fleet::new(3).set(Bs, &[0.0, 3.0, 1.0]).set(PSeconds, &[0.5, 0.125, 0.25]);
        assert_eq!(fleet.score(&*policy("lmetric_seconds", &[])), [0.5, 0.5, 0.5]);
        assert_eq!(fleet.score(&*policy("lmetric_seconds", &[("bs_offset", 0.0)])), [0.0, 0.375, 0.25]);
    }
}
