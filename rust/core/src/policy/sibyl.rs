//! SIBYL: the lowest predicted load, in tokens, when the request starts to decode. Each request is
//! weighted by the probability that it still runs then.
//!
//! The parameters for studies are the paper's ablations (Appendix J). The paper's REQLEVEL is
//! `least_requests`.
use super::*;
use crate::estimate::survival::{ALPHA, BUCKET_TOKENS};

const KNOBS: &[Knob] = &[
    Knob::flag("type1", true, "count the requests that already decode").for_studies(),
    Knob::flag("type2", true, "count the bound requests that start to decode before this request")
        .for_studies(),
    Knob::flag("type3", true, "count the bound requests that start to decode after this request")
        .for_studies(),
    Knob::float(
        "alpha",
        0.0,
        1.0,
        ALPHA,
        "weight that the learned survival curve of output lengths keeps at each new output (Eq. 4); 0.999 covers about the last 1,000 outputs",
    ),
    Knob::int(
        "bucket_tokens",
        8,
        1024,
        BUCKET_TOKENS as i64,
        "tokens between two points of the survival curve; also groups running requests. Decisions cost more with smaller buckets",
    ),
    Knob::flag(
        "survival",
        true,
        "weight each request by the probability that it still runs; false: prob @ 1",
    )
    .for_studies(),
];

pub static SPEC: PolicySpec = PolicySpec::new(
    "sibyl",
    "handoff_running_tokens + handoff_arrived_tokens + handoff_coming_tokens, lowest",
    "SIBYL, Eqs. 1 to 8; Eq. 8 instead of Algorithm 1, line 17, whose sign is wrong",
    KNOBS,
);

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
    let (alpha, bucket_tokens) = (knobs.get("alpha"), knobs.get("bucket_tokens"));
    let policy = expression(&SPEC, knobs, score, Prefer::Min, &[])?;
    Ok(Box::new(policy.with_length_curve(CurveSettings { alpha, bucket_tokens })))
}

#[cfg(test)]
mod tests {
    use crate::indicators::Indicator::*;
    use crate::policy::fleet::{Fleet, policy};

    #[test]
    fn sums_the_three_types() {
        let fleet = Fleet::new(2)
            .set(HandoffRunningTokens, &[100.0, 0.0])
            .set(HandoffArrivedTokens, &[0.0, 80.0])
            .set(HandoffArrivedTokensForCertain, &[0.0, 90.0])
            .set(HandoffComingTokens, &[10.0, 10.0])
            .set(DecodeTokens, &[150.0, 0.0])
            .set(DecodeBs, &[3.0, 0.0])
            .set(DecodeTokensPerSecond, &[20.0, f64::NAN])
            .request(HandoffSeconds, 0.5);
        let score = |knobs: &[(&str, f64)]| fleet.score(&*policy("sibyl", knobs));
        assert_eq!(score(&[]), [110.0, 90.0]);
        assert_eq!(score(&[("type1", 0.0)]), [10.0, 90.0]);
        assert_eq!(score(&[("type2", 0.0)]), [110.0, 10.0]);
        assert_eq!(score(&[("type3", 0.0)]), [100.0, 80.0]);
        // 150 + 3 x 0.5 s x 20 tokens/s, and what is bound for certain
        assert_eq!(score(&[("survival", 0.0)]), [190.0, 100.0]);
    }
}
