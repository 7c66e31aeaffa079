//! LMETRIC for instances of unequal speed: the prefill work in seconds of the instance, times the batch.
//!
//! An instance without a learned prefill rate counts as an average one, so that it gets its share of requests and is learned
//! from its first prompt. If no rate is known of any, the order is that of `lmetric`.
use super::*;

pub static SPEC: PolicySpec = PolicySpec::new(
    "lmetric_seconds",
    "p_seconds * (bs + bs_offset), lowest; the hot-spot guard filters before it",
    "this project: `lmetric` with its tokens over the prefill rate that is learned of each instance",
    &[Knob::float(
        "bs_offset",
        0.0,
        1.0,
        1.0,
        "1: the batch once this request has joined; 0: the batch without it",
    )],
)
.guarded();

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
