//! LMETRIC with prefix fetches and decode placement: batch size weighs less than in LMETRIC.
use super::*;

pub static SPEC: PolicySpec = PolicySpec::new(
    "planner",
    "(p_token - fetch_tokens + fetch_cost_tokens) * (1 + weight * bs), lowest; made for `split: apart`, which places the decode of each request",
    "this project: LMETRIC's score (OSDI 2026, section 5), with a smaller weight of the batch, because decodes can move to other instances",
    &[Knob::float(
        "weight",
        0.0,
        1e6,
        0.1,
        "weight of each request of the batch. 1 is LMETRIC's bs + 1: twice the batch weighs as much as twice the prompt. \
         A lower weight suffices if decodes can move away from prefills",
    )],
);

pub fn build(knobs: &Knobs) -> Result<Box<dyn Policy>, CoreError> {
    // Fetched tokens are uncached tokens, and the last token is never fetched: at least 1 stays.
    lowest(&SPEC, knobs, "(p_token - fetch_tokens + fetch_cost_tokens) * (1 + weight * bs)", &[])
}

#[cfg(test)]
mod tests {
    use crate::indicators::Indicator::*;
    use crate::policy::fleet::{Fleet, policy};

    fn fleet() -> Fleet {
        Fleet::new(3)
            .set(Bs, &[9.0, 1.0, 0.0])
            .set(QueuedPrefillTokens, &[0.0, 100.0, 0.0])
            .prompt(1000.0, &[960.0, 200.0, 0.0])
            .set(FetchTokens, &[0.0, 760.0, 960.0])
            .set(FetchCostTokens, &[0.0, 76.0, 96.0])
    }

    #[test]
    fn scores_by_hand() {
        // 40 x 1.9, (100 + 800 - 760 + 76) x 1.1, (1000 - 960 + 96) x 1.
        let scores = fleet().score(&*policy("planner", &[]));
        for (score, expected) in scores.iter().zip([76.0, 237.6, 136.0]) {
            assert!((score - expected).abs() < 1e-9, "{scores:?}");
        }
    }

    #[test]
    fn a_weight_of_one_is_lmetric_pull() {
        let planner = fleet().score(&*policy("planner", &[("weight", 1.0)]));
        assert_eq!(planner, fleet().score(&*policy("lmetric_pull", &[])));
    }
}
