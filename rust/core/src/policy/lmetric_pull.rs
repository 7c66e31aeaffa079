//! LMETRIC with prefix fetches: prefix tokens fetched from another instance count at their transfer
//! cost.
use super::*;

pub static SPEC: PolicySpec = PolicySpec::new(
    "lmetric_pull",
    "(p_token - fetch_tokens + by_batch * fetch_cost_tokens) * (bs + bs_offset) + (1 - by_batch) * fetch_cost_tokens, lowest; \
     without prefix fetches, equal to lmetric",
    "this project: LMETRIC's score (OSDI 2026, section 5) with prefix fetches",
    &[
        Knob::float(
            "bs_offset",
            0.0,
            1.0,
            1.0,
            "1: the batch size including this request; 0: the BS as printed in the paper",
        ),
        Knob::float(
            "by_batch",
            0.0,
            1.0,
            1.0,
            "share of a fetch's cost that counts once per request of the batch, as computed tokens do; 0: the cost counts once",
        ),
    ],
);

pub fn build(knobs: &Knobs) -> Result<Box<dyn Policy>, CoreError> {
    // Fetched tokens are uncached tokens, and the last token is never fetched: at least 1 stays.
    let score = "(p_token - fetch_tokens + by_batch * fetch_cost_tokens) * (bs + bs_offset) + (1 - by_batch) * fetch_cost_tokens";
    lowest(&SPEC, knobs, score, &[])
}

#[cfg(test)]
mod tests {
    use crate::indicators::Indicator::*;
    use crate::policy::fleet::{Fleet, policy};

    #[test]
    fn a_fetched_token_counts_at_its_cost() {
        let fleet = Fleet::new(3)
            .set(Bs, &[9.0, 1.0, 0.0])
            .set(QueuedPrefillTokens, &[0.0, 100.0, 0.0])
            .prompt(1000.0, &[960.0, 200.0, 0.0])
            .set(FetchTokens, &[0.0, 760.0, 960.0])
            .set(FetchCostTokens, &[0.0, 76.0, 96.0]);
        // 40 x 10, (100 + 800 - 760 + 76) x 2, (1000 - 960 + 96) x 1.
        assert_eq!(fleet.score(&*policy("lmetric_pull", &[])), [400.0, 432.0, 136.0]);
        // Cost outside the product: 40 x 10, 140 x 2 + 76, 40 x 1 + 96. Then with half of it
        // outside.
        assert_eq!(fleet.score(&*policy("lmetric_pull", &[("by_batch", 0.0)])), [400.0, 356.0, 136.0]);
        assert_eq!(fleet.score(&*policy("lmetric_pull", &[("by_batch", 0.5)])), [400.0, 394.0, 136.0]);
        assert_eq!(fleet.score(&*policy("lmetric", &[])), [400.0, 1800.0, 1000.0]);
    }

    #[test]
    fn is_lmetric_where_nothing_is_fetched() {
        let fleet = Fleet::new(3)
            .set(Bs, &[0.0, 1.0, 3.0])
            .set(QueuedPrefillTokens, &[0.0, 100.0, 0.0])
            .prompt(1000.0, &[0.0, 600.0, 992.0]);
        for knobs in [&[][..], &[("bs_offset", 0.0)]] {
            assert_eq!(fleet.score(&*policy("lmetric_pull", knobs)), fleet.score(&*policy("lmetric", knobs)));
        }
    }
}
