//! Instantaneous load, in tokens: running decodes alone, without requests that are bound here and
//! still in prefill.
use super::*;

pub static SPEC: PolicySpec =
    PolicySpec::new("ils", "decode_tokens, lowest", "SIBYL, its baseline ILS", &[]).for_studies();

pub fn build(knobs: &Knobs) -> Result<Box<dyn Policy>, CoreError> {
    lowest(&SPEC, knobs, "decode_tokens", &[])
}

#[cfg(test)]
mod tests {
    use crate::fleet::{Fleet, policy};
    use lmetric_core::indicators::Indicator::*;

    #[test]
    fn counts_running_decodes_only() {
        let fleet = Fleet::new(2)
            .set(DecodeTokens, &[10.0, 20.0])
            .set(BoundTokens, &[1e6, 0.0])
            .set(Bs, &[99.0, 1.0]);
        assert_eq!(fleet.score(&*policy("ils", &[])), [10.0, 20.0]);
    }

    #[test]
    fn is_blind_to_what_least_tokens_sees() {
        let fleet = Fleet::new(2).set(Tokens, &[9000.0, 4000.0]).set(DecodeTokens, &[1000.0, 4000.0]);
        assert_eq!(fleet.best(&*policy("least_tokens", &[])), Some(1));
        assert_eq!(fleet.best(&*policy("ils", &[])), Some(0));
    }
}
