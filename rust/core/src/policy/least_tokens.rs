//! The fewest context tokens on the instance, including requests still in prefill.
use super::*;

pub static SPEC: PolicySpec = PolicySpec::new(
    "least_tokens",
    "tokens, lowest",
    "SIBYL Appendix J in tokens; STAR section 6.1 (current KV load)",
    &[],
)
.stable();

pub fn build(knobs: &Knobs) -> Result<Box<dyn Policy>, CoreError> {
    lowest(&SPEC, knobs, "tokens", &[])
}

#[cfg(test)]
mod tests {
    use crate::indicators::Indicator::*;
    use crate::policy::fleet::{Fleet, policy};

    #[test]
    fn counts_the_context_of_all_requests() {
        let fleet = Fleet::new(2).set(Tokens, &[9000.0, 4000.0]).set(DecodeTokens, &[1000.0, 4000.0]);
        assert_eq!(fleet.best(&*policy("least_tokens", &[])), Some(1));
    }
}
