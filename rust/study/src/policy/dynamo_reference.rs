//! The `dynamo` policy of the independent simulator that is compared with this one: all tokens
//! that the instance has yet to compute or keep, in blocks.
//!
//! `tokens` is the context of all its requests, including the prompts of waiting ones.
//! `remaining_tokens` is their expected remaining output, if known.
use super::*;

pub static SPEC: PolicySpec = PolicySpec::new(
    "dynamo_reference",
    "(queued_prefill_tokens + new_tokens + tokens + remaining_tokens) / block_tokens, lowest",
    "an independent simulator, written apart from this router",
    &[Knob::float("block_tokens", 1.0, 1e6, 512.0, "tokens a block; scales the score, changes no choice")],
)
.for_studies();

pub fn build(knobs: &Knobs) -> Result<Box<dyn Policy>, CoreError> {
    lowest(
        &SPEC,
        knobs,
        "(queued_prefill_tokens + new_tokens + tokens + remaining_tokens) / block_tokens",
        &[],
    )
}

#[cfg(test)]
mod tests {
    use crate::fleet::{Fleet, policy};
    use lmetric_core::indicators::Indicator::*;

    #[test]
    fn adds_all_tokens_to_come_and_to_keep() {
        let fleet = Fleet::new(2)
            .set(QueuedPrefillTokens, &[512.0, 0.0])
            .set(Tokens, &[1024.0, 4096.0])
            .set(RemainingTokens, &[256.0, 512.0])
            .prompt(2048.0, &[1792.0, 0.0]);
        // (512 + 256 + 1024 + 256) / 512 and (0 + 2048 + 4096 + 512) / 512
        assert_eq!(fleet.score(&*policy("dynamo_reference", &[])), [4.0, 13.0]);
    }

    #[test]
    fn a_full_hit_on_an_idle_instance_is_0_and_not_1() {
        let fleet = Fleet::new(1).prompt(512.0, &[512.0]);
        assert_eq!(fleet.score(&*policy("dynamo_reference", &[])), [0.0]);
    }
}
