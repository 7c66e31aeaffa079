//! SIBYL without one of its parts: the paper's ablations (Appendix J).
use super::*;
use lmetric_core::estimate::survival::{ALPHA, CurveSettings};
use lmetric_core::policy::{Prefer, expression};

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

/// A curve of one bucket, which is so much longer than any answer that the probability is exactly 1
/// at each length. Studies of this policy move no running requests: a forecast would read this
/// curve, too.
const CERTAIN: CurveSettings = CurveSettings { alpha: ALPHA, bucket_tokens: 1e30 };

pub fn build(knobs: &Knobs) -> Result<Box<dyn Policy>, CoreError> {
    let (curve, score) = match knobs.get("survival") > 0.0 {
        true => (
            CurveSettings::default(),
            "type1 * handoff_running_tokens + type2 * handoff_arrived_tokens + type3 * handoff_coming_tokens",
        ),
        false => (
            CERTAIN,
            "type1 * (decode_tokens + decode_bs * handoff_seconds * \
             where(decode_tokens_per_second >= 0, decode_tokens_per_second, 0)) + \
             type2 * handoff_arrived_tokens + type3 * handoff_coming_tokens",
        ),
    };
    let policy = expression(&SPEC, knobs, score, Prefer::Min, &[])?;
    Ok(Box::new(policy.with_length_curve(curve)))
}

#[cfg(test)]
mod tests {
    use crate::fleet::{Fleet, policy};
    use lmetric_core::estimate::{DecodeLoad, Survival};
    use lmetric_core::indicators::Indicator::*;

    #[test]
    fn leaves_out_a_part() {
        let fleet = Fleet::new(2)
            .set(HandoffRunningTokens, &[100.0, 0.0])
            .set(HandoffArrivedTokens, &[0.0, 80.0])
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
        // 150 + 3 x 0.5 s x 20 tokens/s
        assert_eq!(score(&[("survival", 0.0)]), [190.0, 90.0]);
    }
    #[test]
    fn without_survival_each_request_still_runs() {
        let curve = policy("sibyl_parts", &[("survival", 0.0)]).length_curve();
        let mut survival = Survival::new(curve);
        let mut load = DecodeLoad::new(curve.bucket_tokens);
        load.enter(700.0, 40_000.0);
        load.bind((1, 0), 500.0, 1.0);
        for length in [1, 40_000, 70, 3].into_iter().cycle().take(5000) {
            survival.observe(length, false);
            assert_eq!([0.0, 64.0, 777.0, 1e6].map(|tokens| survival.at(tokens)), [1.0; 4]);
        }
        assert_eq!(load.project(&survival, 0.0, 10.0, 40.0, 33.3).arrived, 500.0 + 9.0 * 33.3);
        let curve = policy("sibyl_parts", &[]).length_curve();
        assert_eq!(curve, policy("sibyl", &[]).length_curve());
    }
}
