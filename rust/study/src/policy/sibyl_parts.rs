//! SIBYL without one of its parts: the paper's ablations (Appendix J).
use super::*;

const KNOBS: &[Knob] = &[
    Knob::flag("type1", true, "count the requests that already decode"),
    Knob::flag("type2", true, "count the bound requests that start to decode before this request"),
    Knob::flag("type3", true, "count the bound requests that start to decode after this request"),
    Knob::flag(
        "survival",
        true,
        "weight each request by the probability that it still runs; false: prob @ 1",
    ),
];

pub static SPEC: PolicySpec = PolicySpec::new(
    "sibyl_parts",
    "the parts of sibyl that are on, lowest",
    "SIBYL Appendix J, its ablations",
    KNOBS,
)
.for_studies();

pub fn build(knobs: &Knobs) -> Result<Box<dyn Policy>, CoreError> {
    let score = match knobs.get("survival") > 0.0 {
        true => {
            "type1 * handoff_running_tokens + type2 * handoff_arrived_tokens + type3 * handoff_coming_tokens"
        }
        false => {
            "type1 * (decode_tokens + decode_bs * handoff_seconds * \
             where(decode_tokens_per_second >= 0, decode_tokens_per_second, 0)) + \
             type2 * handoff_arrived_tokens_for_certain + type3 * handoff_coming_tokens"
        }
    };
    lowest(&SPEC, knobs, score, &[])
}

#[cfg(test)]
mod tests {
    use crate::fleet::{Fleet, policy};
    use lmetric_core::indicators::Indicator::*;

    #[test]
    fn leaves_out_a_part() {
        let fleet = Fleet::new(2)
            .set(HandoffRunningTokens, &[100.0, 0.0])
            .set(HandoffArrivedTokens, &[0.0, 80.0])
            .set(HandoffArrivedTokensForCertain, &[0.0, 90.0])
            .set(HandoffComingTokens, &[10.0, 10.0])
            .set(DecodeTokens, &[150.0, 0.0])
            .set(DecodeBs, &[3.0, 0.0])
            .set(DecodeTokensPerSecond, &[20.0, f64::NAN])
            .request(HandoffSeconds, 0.5);
        let score = |knobs: &[(&str, f64)]| fleet.score(&*policy("sibyl_parts", knobs));
        assert_eq!(score(&[]), fleet.score(&*policy("sibyl", &[])));
        assert_eq!(score(&[("type1", 0.0)]), [10.0, 90.0]);
        assert_eq!(score(&[("type2", 0.0)]), [110.0, 10.0]);
        assert_eq!(score(&[("type3", 0.0)]), [100.0, 80.0]);
        // 150 + 3 x 0.5 s x 20 tokens/s, and what is bound for certain
        assert_eq!(score(&[("survival", 0.0)]), [190.0, 100.0]);
    }
}
