//! The fewest requests on the instance, queued or running, from any source.
use super::*;

pub static SPEC: PolicySpec = PolicySpec::new(
    "least_requests",
    "bs, lowest",
    "textbook; for decode: REQLEVEL of SIBYL (Appendix J) and STAR section 6.1, including requests bound to the instance",
    &[],
)
.stable();

pub fn build(knobs: &Knobs) -> Result<Box<dyn Policy>, CoreError> {
    lowest(&SPEC, knobs, "bs", &[])
}

#[cfg(test)]
mod tests {
    use crate::indicators::Indicator::*;
    use crate::policy::fleet::{Fleet, policy};

    #[test]
    fn counts_what_is_queued_and_bound_too() {
        let fleet = Fleet::new(3).set(Bs, &[4.0, 2.0, 3.0]).set(DecodeBs, &[0.0, 2.0, 1.0]);
        assert_eq!(fleet.order(&*policy("least_requests", &[])), [1, 2, 0]);
    }
}
