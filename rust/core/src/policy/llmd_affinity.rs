//! Sticky until saturated: prefer holders while their prefill backlog is short, then the lowest
//! backlog.
//!
//! In-flight tokens are uncached tokens still to be computed (`queued_prefill_tokens`). Their time
//! to first token assumes the fleet's peak prefill rate, as in llm-d's configuration.
use super::*;

pub static SPEC: PolicySpec = PolicySpec::new(
    "llmd_affinity",
    "2 if kv_hit >= affinity and queued_prefill_tokens / peak_prefill_tokens_per_second <= max_ttft_seconds, plus 1 - min(1, queued_prefill_tokens / full_load_tokens), highest",
    "llm-d guides of 2026-08: prefix-cache-affinity filter (llm-d-router#1639), token-load scorer",
    &[
        Knob::float("affinity", 0.0, 1.0, 0.8, "minimum hit fraction of a holder"),
        Knob::float("max_ttft_seconds", 0.0, 1e6, 18.0, "maximum backlog of a preferred holder, s"),
        Knob::float(
            "peak_prefill_tokens_per_second",
            1.0,
            1e9,
            15926.0,
            "prefill rate of an instance, tokens/s; the default is llm-d's for Qwen3-32B on 2 H100; set the rate of your instances",
        ),
        Knob::float("full_load_tokens", 1.0, 1e12, 4194304.0, "backlog that scores 0, tokens"),
    ],
);

pub fn build(knobs: &Knobs) -> Result<Box<dyn Policy>, CoreError> {
    highest(
        &SPEC,
        knobs,
        "where((kv_hit >= affinity) & (queued_prefill_tokens <= max_ttft_seconds * peak_prefill_tokens_per_second), 2, 0) \
         + 1 - minimum(1, queued_prefill_tokens / full_load_tokens)",
        &[],
    )
}

#[cfg(test)]
mod tests {
    use crate::indicators::Indicator::*;
    use crate::policy::fleet::{Fleet, policy};

    #[test]
    fn stays_with_holders_until_they_are_saturated() {
        let limit = 18.0 * 15926.0;
        let fleet = |backlog| {
            Fleet::new(3)
                .set(QueuedPrefillTokens, &[backlog, 1048576.0, 0.0])
                .prompt(100.0, &[80.0, 100.0, 79.0])
        };
        let affinity = policy("llmd_affinity", &[]);
        assert_eq!(fleet(0.0).score(&*affinity), [3.0, 0.75, 1.0], "slot 1 is over 18 s, slot 2 under 80%");
        assert_eq!(fleet(limit).best(&*affinity), Some(0));
        assert_eq!(fleet(limit + 1.0).order(&*affinity), [2, 0, 1]);
        assert_eq!(fleet(1e9).score(&*affinity)[0], 0.0);
    }
}
