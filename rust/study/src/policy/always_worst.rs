//! A negative control: a study in which this policy does not come last is broken.
use super::*;

pub static SPEC: PolicySpec = PolicySpec::new(
    "always_worst",
    "p_token * (bs + 1), highest",
    "the control of BLIS (inference-sim), on LMETRIC's score",
    &[],
)
.for_studies();

pub fn build(knobs: &Knobs) -> Result<Box<dyn Policy>, CoreError> {
    highest(&SPEC, knobs, "p_token * (bs + 1)", &[])
}

#[cfg(test)]
mod tests {
    use crate::fleet::{Fleet, policy};
    use lmetric_core::indicators::Indicator::*;

    #[test]
    fn takes_what_lmetric_would_take_last() {
        let fleet = Fleet::new(3).set(Bs, &[0.0, 9.0, 2.0]).prompt(100.0, &[50.0, 0.0, 0.0]);
        assert_eq!(fleet.score(&*policy("always_worst", &[])), [50.0, 1000.0, 300.0]);
        assert_eq!(fleet.order(&*policy("always_worst", &[])), [1, 2, 0]);
        assert_eq!(fleet.order(&*policy("lmetric", &[])), [0, 2, 1]);
    }
}
