//! Instantaneous load, in tokens: running decodes alone, blind to what is bound here and still in prefill.
use super::*;

pub static SPEC: PolicySpec = PolicySpec::new("ils", "decode_tokens, lowest", "SIBYL, its baseline ILS", &[]);

pub fn build(knobs: &Knobs) -> Result<Box<dyn Policy>, CoreError> {
    lowest(&SPEC, knobs, "decode_tokens", &[])
}

#[cfg(test)]
mod tests {
    use crate::indicators::Indicator::*;
    use crate::policy::fleet::{Fleet, policy};

    #[test]
    fn counts_running_decodes_only() {
        let fleet = Fleet::new(2)
            .set(DecodeTokens, &[10.0, 20.0])
            .set(BoundTokens, &[1e6, 0.0])
            .set(Bs, &[99.0, 1.0]);
        assert_eq!(fleet.score(&*policy("ils", &[])), [10.0, 20.0]);
    }
}
