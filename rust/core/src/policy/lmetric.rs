//! LMETRIC: the prefill work of the request on the instance, times the batch that it would join.
use super::*;

pub static SPEC: PolicySpec = PolicySpec::new(
    "lmetric",
    "p_token * (bs + bs_offset), lowest",
    "LMETRIC (OSDI 2026) section 5, Figures 17 and 18c; bs + 1 as in its authors' code",
    &[Knob::float(
        "bs_offset",
        0.0,
        1.0,
        1.0,
        "1: the batch size including this request; 0: the BS as printed in the paper",
    )],
)
.stable();

pub fn build(knobs: &Knobs) -> Result<Box<dyn Policy>, CoreError> {
    lowest(&SPEC, knobs, "p_token * (bs + bs_offset)", &[])
}

#[cfg(test)]
mod tests {
    use crate::indicators::Indicator::*;
    use crate::policy::fleet::{Fleet, policy};

    #[test]
    fn multiplies_queued_and_missing_tokens_with_the_batch_joined() {
        let fleet = Fleet::new(4)
            .set(Bs, &[0.0, 1.0, 3.0, 0.0])
            .set(QueuedPrefillTokens, &[0.0, 100.0, 0.0, 5000.0])
            .prompt(1000.0, &[0.0, 600.0, 1000.0, 1000.0]);
        // 1000 x 1, (100 + 400) x 2, at least 1 x 4, (5000 + 0) x 1.
        assert_eq!(fleet.score(&*policy("lmetric", &[])), [1000.0, 1000.0, 4.0, 5000.0]);
    }

    #[test]
    fn the_printed_formula_forgets_hits_on_idle_instances() {
        let fleet = Fleet::new(2).prompt(1000.0, &[0.0, 1000.0]);
        assert_eq!(fleet.score(&*policy("lmetric", &[("bs_offset", 0.0)])), [0.0, 0.0]);
        assert_eq!(fleet.score(&*policy("lmetric", &[])), [1000.0, 1.0]);
    }
}
