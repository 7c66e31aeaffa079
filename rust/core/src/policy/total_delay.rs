//! The tokens of delay that a placement causes: the request waits for the queue and for its own
//! prefill, and each request there waits for this prefill.
//!
//! LMETRIC multiplies the queue by the batch size, too, although the requests there wait for the
//! queue wherever this request goes. So a burst in front of an instance that holds a long prompt
//! costs more than computing the prompt again elsewhere.
use super::*;

pub static SPEC: PolicySpec = PolicySpec::new(
    "total_delay",
    "queued_prefill_tokens + new_tokens * (bs + 1), lowest",
    "this project: the sum of delays, in tokens",
    &[],
)
.stable()
.guarded();

pub fn build(knobs: &Knobs) -> Result<Box<dyn Policy>, CoreError> {
    lowest(&SPEC, knobs, "queued_prefill_tokens + new_tokens * (bs + 1)", &[])
}

#[cfg(test)]
mod tests {
    use crate::indicators::Indicator::*;
    use crate::policy::fleet::{Fleet, policy};

    #[test]
    fn adds_the_own_delay_and_that_of_the_others() {
        let fleet = Fleet::new(3)
            .set(Bs, &[0.0, 4.0, 1.0])
            .set(QueuedPrefillTokens, &[0.0, 100_000.0, 700.0])
            .prompt(142_000.0, &[2_000.0, 140_000.0, 0.0]);
        // 140,000 x 1, 100,000 + 2,000 x 5, 700 + 142,000 x 2.
        assert_eq!(fleet.score(&*policy("total_delay", &[])), [140_000.0, 110_000.0, 284_700.0]);
        assert_eq!(fleet.best(&*policy("total_delay", &[])), Some(1), "home, in spite of the burst");
        assert_eq!(fleet.best(&*policy("lmetric", &[])), Some(0), "LMETRIC computes 140,000 tokens again");
    }
}
