//! SIBYL: the lowest predicted load, in tokens, when the request starts to decode. Each request is
//! weighted by the probability that it still runs then.
//!
//! The paper's REQLEVEL is `least_requests`.
use super::*;
use crate::estimate::survival::{ALPHA, BUCKET_TOKENS};

const KNOBS: &[Knob] = &[
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
];

pub static SPEC: PolicySpec = PolicySpec::new(
    "sibyl",
    "handoff_running_tokens + handoff_arrived_tokens + handoff_coming_tokens, lowest",
    "SIBYL, Eqs. 1 to 8; Eq. 8 instead of Algorithm 1, line 17, whose sign is wrong",
    KNOBS,
);

pub fn build(knobs: &Knobs) -> Result<Box<dyn Policy>, CoreError> {
    let score = "handoff_running_tokens + handoff_arrived_tokens + handoff_coming_tokens";
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
            .set(HandoffComingTokens, &[10.0, 10.0]);
        assert_eq!(fleet.score(&*policy("sibyl", &[])), [110.0, 90.0]);
    }
}
