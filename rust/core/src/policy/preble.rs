//! Preble's E2: take a holder if more tokens are cached than missing, else the lowest cost.
//!
//! An instance's cost is its recent work plus this request's prefill. Recent work is prefill and
//! output, decayed with 180 s for Preble's three-minute window. The cost includes evicted tokens
//! that must be computed again (0 if the cache size is unknown). A holder is skipped if it costs
//! more than `rebalance` times the lowest cost. Both costs include this request.
use super::*;

pub static SPEC: PolicySpec = PolicySpec::new(
    "preble",
    "cost = prefill_seconds * (window_prefill_tokens + new_tokens + max(0, new_tokens - cache_free_tokens)) + decode_seconds * window_output_tokens; if hit_tokens > new_tokens: lowest cost among the longest matches, unless above rebalance * min(cost); else lowest cost",
    "Preble (ICLR 2025), Algorithms 1 and 2 (E2)",
    &[
        Knob::float(
            "prefill_seconds",
            0.0,
            1.0,
            1e-4,
            "time to prefill one token, s; only the ratio to decode_seconds matters",
        ),
        Knob::float(
            "decode_seconds",
            0.0,
            1.0,
            3e-4,
            "share of the instance's time that one output token takes, s: a step of 10 ms shared by 32 requests",
        ),
        Knob::float("rebalance", 1.0, 1e6, 1.5, "maximum cost of a holder, relative to the lowest cost"),
    ],
);

const COST: &str = "(prefill_seconds * (window_prefill_tokens + new_tokens \
    + where(cache_free_tokens < new_tokens, new_tokens - cache_free_tokens, 0)) \
    + decode_seconds * window_output_tokens)";

pub fn build(knobs: &Knobs) -> Result<Box<dyn Policy>, CoreError> {
    lowest(
        &SPEC,
        knobs,
        &format!(
            "where((hit_tokens > new_tokens) & (hit_tokens >= max(hit_tokens)) & ({COST} <= rebalance * min({COST})), 0, 1)"
        ),
        &[COST],
    )
}

#[cfg(test)]
mod tests {
    use crate::indicators::Indicator::*;
    use crate::policy::fleet::{Fleet, policy};

    fn fleet(window: [f64; 3]) -> Fleet {
        Fleet::new(3)
            .set(CacheFreeTokens, &[1e6; 3])
            .set(WindowPrefillTokens, &window)
            .prompt(1000.0, &[600.0, 600.0, 0.0])
    }

    #[test]
    fn exploits_the_cheapest_holder_while_more_is_cached_than_missing() {
        // Costs 1300, 900 and 1000 tokens: both holders are within 1.5 times the lowest cost.
        assert_eq!(fleet([900.0, 500.0, 0.0]).order(&*policy("preble", &[])), [1, 0, 2]);
        let half = Fleet::new(2)
            .set(CacheFreeTokens, &[1e6; 2])
            .set(WindowPrefillTokens, &[600.0, 0.0])
            .prompt(1000.0, &[500.0, 0.0]);
        assert_eq!(half.best(&*policy("preble", &[])), Some(1), "half cached explores: 1100 against 1000");
    }

    #[test]
    fn passes_over_a_holder_that_costs_too_much_more() {
        // The lowest cost is slot 2's, 1000 tokens to prefill. Holders may cost up to 1500, which
        // is 1100 before this request.
        assert_eq!(fleet([1100.0, 9000.0, 0.0]).best(&*policy("preble", &[])), Some(0));
        assert_eq!(fleet([1101.0, 9000.0, 0.0]).best(&*policy("preble", &[])), Some(2));
        assert_eq!(fleet([1101.0, 9000.0, 0.0]).best(&*policy("preble", &[("rebalance", 2.0)])), Some(0));
    }

    #[test]
    fn output_and_eviction_cost_too() {
        let knobs = [("prefill_seconds", 1.0), ("decode_seconds", 0.5)];
        let fleet = Fleet::new(3)
            .set(WindowPrefillTokens, &[10.0, 10.0, 10.0])
            .set(WindowOutputTokens, &[0.0, 8.0, 0.0])
            .set(CacheFreeTokens, &[f64::NAN, 100.0, 30.0])
            .prompt(100.0, &[0.0, 0.0, 0.0]);
        let scores = fleet.scores(&*policy("preble", &knobs));
        assert_eq!(scores.score, [1.0; 3], "nothing cached: explore");
        assert_eq!(scores.then[0], [110.0, 114.0, 180.0]);
    }
}
