//! The least context tokens on the instance once all its requests have their predicted output: STAR's hand-over by input, predicted length and load.
//!
//! Section 3 names these three and gives no formula. In the workload model of section 5.2 a load is tokens, now and to come; the request's own prompt and output
//! add the same to each instance and cancel. Section 6.1 dispatches all its baselines by current KV load alone: that is `least_tokens`.
use super::*;

pub static SPEC: PolicySpec =
    PolicySpec::new("star_dispatch", "tokens + remaining_tokens, lowest", "STAR section 3", &[]);

pub fn build(knobs: &Knobs) -> Result<Box<dyn Policy>, CoreError> {
    lowest(&SPEC, knobs, "tokens + remaining_tokens", &[])
}

#[cfg(test)]
mod tests {
    use crate::indicators::Indicator::*;
    use crate::policy::fleet::{Fleet, policy};

    #[test]
    fn sees_what_is_still_to_come() {
        let fleet = Fleet::new(2).set(Tokens, &[4000.0, 5000.0]).set(RemainingTokens, &[3000.0, 500.0]);
        assert_eq!(fleet.score(&*policy("star_dispatch", &[])), [7000.0, 5500.0]);
        assert_eq!(fleet.best(&*policy("least_tokens", &[])), Some(0));
    }
}
