//! Instantaneous load, in requests: running decodes alone, without requests that are bound here and
//! still in prefill.
use super::*;

pub static SPEC: PolicySpec =
    PolicySpec::new("ils_requests", "decode_bs, lowest", "SIBYL, its baseline ILS counted in requests", &[])
        .for_studies();

pub fn build(knobs: &Knobs) -> Result<Box<dyn Policy>, CoreError> {
    lowest(&SPEC, knobs, "decode_bs", &[])
}

#[cfg(test)]
mod tests {
    use crate::fleet::{Fleet, policy};
    use lmetric_core::indicators::Indicator::*;

    #[test]
    fn counts_running_decodes_only() {
        let fleet = Fleet::new(2).set(DecodeBs, &[1.0, 2.0]).set(BoundBs, &[50.0, 0.0]).set(Bs, &[51.0, 2.0]);
        assert_eq!(fleet.score(&*policy("ils_requests", &[])), [1.0, 2.0]);
    }
}
