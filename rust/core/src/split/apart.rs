//! Decode placement: the seconds that all requests together lose if a request decodes on an
//! instance.
//!
//! The functions are pure: loads and step times are plain numbers, results are seconds. A request
//! that is prefilled on one instance may decode there or, split at its prompt's end, on any other
//! instance. For each candidate, [`lost_seconds`] adds the time of the request's answer and the
//! delay of other requests. The request decodes on the instance with the least sum. Instances have
//! no fixed roles. But an instance with many prefills is slow to decode on, and an instance with
//! many decodes gets few prefills from a score that counts its batch. So roles form and disappear
//! as they pay off.
//!
//! **Derivation.** On an instance whose batch decodes `n` sequences of `C` context tokens together,
//! a step without prefill takes `fixed + a n + b C`. A request of `P` prompt tokens decodes for `L`
//! steps, with `P + L / 2` context tokens on average. (Each answer token takes one step, except
//! that the prefill makes the first token if the request stays.)
//!
//! - its own steps take `L (fixed + a (n + 1) + b (C + P + L / 2))`;
//! - each of the `n` other sequences waits `L (a + b (P + L / 2))` longer, if the batch size stays
//!   constant: new requests replace finished ones;
//! - the instance spends the share `u` of its time on prefills, in steps that delay decodes: all of
//!   the above takes `1 / (1 - u)` times as long;
//! - prefills queued on the instance add their own delay: they are not in `u` yet;
//! - on an instance other than the prefill's, the KV must be transferred: a time per missing token,
//!   plus a fixed time.
//!
//! Decoding elsewhere requires a minimum gain, because `u` overstates the delay of answers of a few
//! tokens: the score keeps prefills away from instances where a decode has just begun.
//!
//! The delay that a prefill causes on its instance is part of the first choice's score. It is the
//! same for all decode candidates.
use crate::estimate::StepTime;
use crate::ids::Seconds;

/// Maximum share of time that an instance spends on prefills in the cost model. Prefills placed
/// faster than they are computed count in the queue instead.
pub const MAX_PREFILL_SHARE: f64 = 0.95;

/// Settings of the decode placement cost.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Settings {
    /// Time constant of the share of time that an instance spends on prefills, in seconds; more
    /// than 0.
    pub recent_seconds: Seconds,
    /// Minimum gain of decoding elsewhere, in seconds over all requests; 0 or more.
    pub min_gain_seconds: Seconds,
    /// Seconds per transferred token; 0 or more. If prefix fetches are enabled, the learned fetch
    /// cost replaces it.
    pub transfer_seconds_per_token: Seconds,
    /// Fixed seconds per handoff; 0 or more. (A prefix fetch's fixed part is its wait for a step of
    /// its holder.)
    pub transfer_fixed_seconds: Seconds,
    /// Longest expected handoff, in seconds, at which the client gets the prefill's own token, if
    /// both engines can leave that token's KV to the decode instance. Otherwise the decode instance
    /// makes the first token after the KV transfer. 0 or more; 0: never.
    pub max_stall_seconds: Seconds,
}

impl Default for Settings {
    /// Time constants from 10 to 180 s differ little. Users are said to tolerate 0.1 s between two
    /// tokens. 0.3 s is the smallest gain at which answers of a few tokens lose nothing
    /// (`docs/research/planner.md`). The handoff defaults are those of
    /// [`crate::router::FetchConfig`].
    fn default() -> Settings {
        Settings {
            recent_seconds: 30.0,
            min_gain_seconds: 0.3,
            transfer_seconds_per_token: 4e-6,
            transfer_fixed_seconds: 0.005,
            max_stall_seconds: 0.1,
        }
    }
}

/// Load on an instance on which a request may decode.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Beside {
    /// n: sequences that decode on the instance or are bound to it.
    pub decoding: f64,
    /// C: context tokens of these sequences.
    pub context_tokens: f64,
    /// u: share of its time that the instance spends on prefills.
    pub prefill_share: f64,
    /// Seconds of the prefills queued on the instance.
    pub queued_prefill_seconds: Seconds,
}

/// Returns the seconds that all requests together lose if a request of `prompt_tokens` decodes for
/// `steps` steps on an instance with step time `step`. Excludes the KV transfer.
pub fn lost_seconds(step: &StepTime, beside: &Beside, prompt_tokens: f64, steps: f64) -> Seconds {
    let Beside { decoding, context_tokens, prefill_share, queued_prefill_seconds } = *beside;
    let mean_context = prompt_tokens + steps / 2.0;
    let own = step.step(decoding + 1.0, context_tokens + mean_context);
    let adds = step.decode_seconds_per_sequence + step.decode_seconds_per_context_token * mean_context;
    let decodes = steps * (own + decoding * adds);
    decodes / (1.0 - prefill_share.min(MAX_PREFILL_SHARE)) + queued_prefill_seconds
}

#[cfg(test)]
mod tests {
    use super::*;

    const STEP: StepTime = StepTime {
        fixed_seconds: 0.01,
        decode_seconds_per_sequence: 1e-4,
        decode_seconds_per_context_token: 1e-7,
        prefill_seconds_per_token: 1e-4,
        prefill_seconds_per_attention_pair: 0.0,
        max_batch_tokens: 2048.0,
        max_sequences: f64::INFINITY,
    };
    const IDLE: Beside =
        Beside { decoding: 0.0, context_tokens: 0.0, prefill_share: 0.0, queued_prefill_seconds: 0.0 };

    fn lost(beside: Beside) -> f64 {
        lost_seconds(&STEP, &beside, 1000.0, 200.0)
    }

    #[test]
    fn terms_by_hand() {
        let near = |beside: Beside, expected: f64| {
            assert!((lost(beside) - expected).abs() < 1e-12, "{} {expected}", lost(beside));
        };
        // 200 steps of 10 ms, 0.1 ms for the sequence, 1,100 context tokens: 10.21 ms.
        near(IDLE, 200.0 * 0.01021);
        // Nine other sequences of 2,000 tokens each: steps take 0.9 + 1.8 ms more, and each of the
        // nine slows by 0.21 ms.
        let nine = Beside { decoding: 9.0, context_tokens: 18_000.0, ..IDLE };
        near(nine, 200.0 * (0.01021 + 0.0009 + 0.0018 + 9.0 * 0.00021));
        // Prefills take three quarters of the time: four times as long.
        near(Beside { prefill_share: 0.75, ..nine }, 4.0 * 200.0 * 0.0148);
        // The prefill share is capped.
        near(Beside { prefill_share: 3.0, ..IDLE }, 20.0 * 200.0 * 0.01021);
        // Half a second of queue.
        near(Beside { queued_prefill_seconds: 0.5, ..IDLE }, 200.0 * 0.01021 + 0.5);
    }

    #[test]
    fn what_holds_up_only_adds() {
        for base in [IDLE, Beside { decoding: 20.0, context_tokens: 40_000.0, ..IDLE }] {
            for more in [
                Beside { decoding: base.decoding + 1.0, ..base },
                Beside { context_tokens: base.context_tokens + 1.0, ..base },
                Beside { prefill_share: 0.01, ..base },
                Beside { queued_prefill_seconds: 0.01, ..base },
            ] {
                assert!(lost(more) > lost(base), "{more:?}");
            }
        }
    }
}
