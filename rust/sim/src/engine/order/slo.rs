//! Libra's batches (section 4.2, Algorithm 2): beside its decodes, a step takes as many prompt
//! tokens as keep it within the token SLO. Prompts go by arrival.
//!
//! The paper refines a profile table (prefill tokens, context, decodes, measured time) with each
//! batch. Here the engine's own step-time model replaces the table: a full table converges to it.
//! The model also includes the attention pairs of a chunk, which the table's three columns leave
//! out.
//!
//! A step that makes only reasoning tokens uses their SLO; a step that makes an answer token uses
//! the answer SLO (section 4.4). A request may have an SLO of its own
//! ([`Engine::set_own_slo`](crate::Engine::set_own_slo)); the shortest of the decodes counts.
//!
//! If no request decodes, no token can be late: the step takes the whole token budget. If the
//! decodes alone take longer than the SLO, the step still takes [`MIN_TOKENS`]: M = 0 would keep
//! every prompt waiting until enough answers have ended.
use super::{Composition, Job, LocalOrder, OrderSpec};
use crate::gaps::{Makes, TokenSlo};
use crate::profile::{Profile, StepWork};
use lmetric_core::CoreError;
use lmetric_core::ids::Seconds;

/// Least number of prompt tokens in a step, if a prompt has as many left: a block, one to three
/// milliseconds of a usual engine.
const MIN_TOKENS: u32 = 16;
/// Token SLO of the paper's evaluation, in seconds (section 6.1).
pub const TOKEN_SECONDS: Seconds = 0.1;

pub(super) const ORDERS: &[OrderSpec] = &[OrderSpec {
    name: "slo",
    first: "the earliest arrival, with as many prompt tokens per step as `--order-slo` allows",
    reads: "the engine's step times",
    source: "Libra, Algorithm 2",
    settings: &[],
    build: |given| {
        let slo = Slo { tokens: given.slo };
        slo.check()?;
        Ok(Box::new(slo))
    },
}];

#[derive(Clone, Copy, Debug)]
pub struct Slo {
    /// Longest time of a step that makes an answer token, and of a step that makes only reasoning
    /// tokens, in seconds.
    pub tokens: TokenSlo,
}

impl Slo {
    /// Checks the SLOs.
    ///
    /// # Errors
    /// `BadValue` for an SLO that is 0 or not a number.
    pub fn check(&self) -> Result<(), CoreError> {
        let TokenSlo { answer_seconds, think_seconds } = self.tokens;
        check_token_seconds("a token", answer_seconds)?;
        check_token_seconds("a thought", think_seconds)
    }
}

/// Checks the SLO of a kind of tokens.
///
/// # Errors
/// `BadValue` for an SLO that is 0 or not a number.
pub(in super::super) fn check_token_seconds(kind: &str, seconds: Seconds) -> Result<(), CoreError> {
    if seconds > 0.0 && seconds <= 1e6 {
        return Ok(());
    }
    Err(CoreError::BadValue {
        what: format!("local order slo: seconds {kind}"),
        got: seconds.to_string(),
        expected: "more than 0, at most 1e6".into(),
    })
}

impl LocalOrder for Slo {
    fn rank(&self, _: &Job<'_>) -> i64 {
        0
    }

    fn composition(&self) -> Option<&dyn Composition> {
        Some(self)
    }
}

impl Composition for Slo {
    fn seconds(&self, makes: Makes) -> Seconds {
        self.tokens.of(makes)
    }

    fn prefill_tokens(
        &self,
        profile: &Profile,
        planned: &StepWork,
        seconds: Seconds,
        before: u32,
        most: u32,
    ) -> u32 {
        if planned.decode_sequences == 0 {
            return most;
        }
        // The largest t with c t + d t (before + t / 2) <= the rest of the SLO, in the form without
        // cancellation.
        let room = seconds - profile.step_seconds(planned);
        let pair = profile.prefill_seconds_per_attention_pair;
        let token = profile.prefill_seconds_per_token + pair * f64::from(before);
        let root = (token * token + 2.0 * pair * room.max(0.0)).sqrt();
        // A step that takes exactly the SLO is within it, despite rounding of the last bit.
        let tokens = 2.0 * room.max(0.0) / (token + root) + 1e-6;
        // If prompt tokens cost nothing, any number is right: the cast turns infinity into the
        // largest number, and 0 / 0 into 0.
        let least = MIN_TOKENS.saturating_sub(planned.prefill_tokens);
        (tokens as u32).max(least).min(most)
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::job;
    use super::*;
    use crate::profile::tests::round;

    fn planned(decode_sequences: u32) -> StepWork {
        StepWork {
            decode_sequences,
            context_tokens: 100 * u64::from(decode_sequences),
            ..StepWork::default()
        }
    }

    #[test]
    fn the_budget_by_hand() {
        let profile = round();
        // Four decodes of 100 tokens: 1 + 0.4 + 0.4 = 1.8 s. Of 10 s that leaves 8.2 s; 100 t + 0.5
        // t^2 = 82,000 at t = 317.19.
        let slo = Slo { tokens: TokenSlo::same(10.0) };
        assert_eq!(slo.prefill_tokens(&profile, &planned(4), 10.0, 0, 4096), 317);
        // Behind 1,000 tokens each token costs ten times more: 1,100 t + 0.5 t^2 = 82,000.
        assert_eq!(slo.prefill_tokens(&profile, &planned(4), 10.0, 1000, 4096), 72);
        assert_eq!(slo.prefill_tokens(&profile, &planned(4), 10.0, 0, 100), 100);
        // Reasoning tokens alone may take longer: 13 s leave 11.2 s, 100 t + 0.5 t^2 = 112,000.
        let stages = Slo { tokens: TokenSlo { think_seconds: 13.0, ..slo.tokens } };
        assert_eq!(stages.prefill_tokens(&profile, &planned(4), stages.seconds(Makes::Answer), 0, 4096), 317);
        assert_eq!(
            stages.prefill_tokens(&profile, &planned(4), stages.seconds(Makes::Thoughts), 0, 4096),
            383
        );
        // Earlier parts of the plan count.
        let mut more = planned(4);
        more.add_prefill(0, 300);
        assert_eq!(slo.prefill_tokens(&profile, &more, 10.0, 0, 4096), 54); // 100 t + 0.5 t^2 = 7,000
        for tokens in [317, 318] {
            let mut work = planned(4);
            work.add_prefill(0, tokens);
            assert_eq!(profile.step_seconds(&work) <= 10.0, tokens == 317);
        }
    }

    #[test]
    fn prompts_are_never_kept_waiting_for_ever() {
        let profile = round();
        let slo = Slo { tokens: TokenSlo::same(1.5) };
        assert_eq!(slo.prefill_tokens(&profile, &planned(0), 1.5, 0, 4096), 4096, "nothing decodes");
        assert_eq!(slo.prefill_tokens(&profile, &planned(8), 1.5, 0, 4096), 16, "decodes alone take 2.6 s");
        let mut work = planned(8);
        work.add_prefill(0, 12);
        assert_eq!(slo.prefill_tokens(&profile, &work, 1.5, 0, 4096), 4);
        work.add_prefill(12, 4);
        assert_eq!(slo.prefill_tokens(&profile, &work, 1.5, 0, 4096), 0);
        let free =
            Profile { prefill_seconds_per_token: 0.0, prefill_seconds_per_attention_pair: 0.0, ..profile };
        assert_eq!(slo.prefill_tokens(&free, &planned(8), 9.0, 0, 4096), 4096);
    }

    #[test]
    fn nothing_but_arrival_counts_and_bad_times_are_named() {
        let profile = round();
        let slo = Slo { tokens: TokenSlo::same(TOKEN_SECONDS) };
        let other = Job { priority: -9, output_tokens: 1, context: 1, attained: 50, ..job(&profile) };
        assert_eq!(slo.rank(&job(&profile)), slo.rank(&other));
        assert_eq!(slo.check(), Ok(()));
        let good = TokenSlo::same(TOKEN_SECONDS);
        for token_seconds in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            let message = Slo { tokens: TokenSlo { think_seconds: token_seconds, ..good } }
                .check()
                .unwrap_err()
                .to_string();
            assert!(message.contains("seconds a thought"), "{message}");
        }
    }
}
