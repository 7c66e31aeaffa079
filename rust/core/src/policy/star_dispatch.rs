//! The fewest context tokens once all requests on the instance have reached their predicted output
//! length: STAR's dispatch to decode instances.
//!
//! STAR section 3 names input, predicted length and load, without a formula. In its workload model
//! (section 5.2), load is present and future tokens. The request's own prompt and output add the
//! same amount to each instance and cancel. The baselines of section 6.1 dispatch by current KV
//! load alone; this is `least_tokens`.
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
