//! The least prefill work ahead of the first token. Decode load is ignored.
use super::*;

pub static SPEC: PolicySpec = PolicySpec::new(
    "least_prefill",
    "queued_prefill_tokens + new_tokens, lowest",
    "Llumnix v1, prefill dispatch",
    &[],
)
.stable();

pub fn build(knobs: &Knobs) -> Result<Box<dyn Policy>, CoreError> {
    lowest(&SPEC, knobs, "queued_prefill_tokens + new_tokens", &[])
}

#[cfg(test)]
mod tests {
    use crate::indicators::Indicator::*;
    use crate::policy::fleet::{Fleet, policy};

    #[test]
    fn adds_the_queue_and_what_is_missing() {
        let fleet = Fleet::new(2).set(QueuedPrefillTokens, &[700.0, 0.0]).prompt(1000.0, &[900.0, 100.0]);
        assert_eq!(fleet.score(&*policy("least_prefill", &[])), [800.0, 900.0]);
    }
}
