//! The tokens of delay that a placement causes: to the request, to the requests on its instance,
//! and to those of programs whose contexts it evicts (docs/explanation/default_policy.md).
//!
//! LMETRIC multiplies the queue by the batch size, although the requests there wait for the queue
//! wherever this request goes. So a burst in front of an instance that holds a long prompt costs
//! more than computing the prompt again elsewhere, and that evicts the next prompt. Here a queue
//! delays this request, and later ones by what it exceeds the mean queue, at least by half of it.
//! They count by the share of prefill work that is new: while contexts are computed again, a
//! request that leaves its context costs more than a queue.
use super::*;

pub static SPEC: PolicySpec = PolicySpec::new(
    "total_delay",
    "queued_prefill_tokens + mean(bs) / (1 + recompute_ratio) * maximum(queued_prefill_tokens / 2, queued_prefill_tokens - mean(queued_prefill_tokens)) + new_tokens * (bs + 1 + recompute_ratio * (mean(bs) + 1)), lowest",
    "this project: the sum of delays, in tokens",
    &[],
)
.stable()
.guarded();

const SCORE: &str = "queued_prefill_tokens \
    + mean(bs) / (1 + recompute_ratio) \
      * maximum(queued_prefill_tokens / 2, queued_prefill_tokens - mean(queued_prefill_tokens)) \
    + new_tokens * (bs + 1 + recompute_ratio * (mean(bs) + 1))";

pub fn build(knobs: &Knobs) -> Result<Box<dyn Policy>, CoreError> {
    lowest(&SPEC, knobs, SCORE, &[])
}

#[cfg(test)]
mod tests {
    use crate::indicators::Indicator::*;
    use crate::policy::fleet::{Fleet, policy};

    fn fleet() -> Fleet {
        Fleet::new(3)
            .set(Bs, &[0.0, 8.0, 1.0])
            .set(QueuedPrefillTokens, &[0.0, 20_000.0, 700.0])
            .prompt(142_000.0, &[2_000.0, 140_000.0, 0.0])
    }

    #[test]
    fn adds_the_own_delay_and_that_of_the_others() {
        // The mean batch is 3, and the mean queue 6,900 tokens: the long queue exceeds it by
        // 13,100, and of the short one, half counts for each later request.
        let scores = fleet().score(&*policy("total_delay", &[]));
        let home = 20_000.0 + 3.0 * 13_100.0 + 2_000.0 * 9.0;
        assert_eq!(scores, [140_000.0, home, 700.0 + 3.0 * 350.0 + 142_000.0 * 2.0]);
        assert_eq!(fleet().best(&*policy("total_delay", &[])), Some(1), "home, in spite of the burst");
        assert_eq!(fleet().best(&*policy("lmetric", &[])), Some(0), "LMETRIC computes 140,000 tokens again");
    }

    #[test]
    fn recomputation_makes_new_tokens_dearer_than_queues() {
        // A token is computed again per new token, and delays a mean batch. So half of the work is
        // new, and of the delay of later requests half counts.
        let scores = fleet().request(RecomputeRatio, 1.0).score(&*policy("total_delay", &[]));
        let new = [140_000.0, 2_000.0, 142_000.0];
        let later = [0.0, 3.0 * 13_100.0, 3.0 * 350.0];
        let before = fleet().score(&*policy("total_delay", &[]));
        let expected: Vec<f64> =
            (0..3).map(|slot| before[slot] - later[slot] / 2.0 + 4.0 * new[slot]).collect();
        assert_eq!(scores, expected);
    }
}
