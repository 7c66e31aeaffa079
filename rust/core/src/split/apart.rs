//! Where a request decodes: what all requests together lose by that, in seconds.
//!
//! Pure: loads and step times come in as plain numbers, seconds come out. A request that was prefilled on one instance may decode there or, cut at its prompt's
//! end, on any other. For each of them, [`lost_seconds`] adds up what its answer takes there and what it takes of others. Where that is least, it decodes. No
//! instance has a role; but one that prefills much is a slow place to decode at, and one that decodes much gets few prefills from a score that
//! counts its batch. So roles arise where they pay, as many as pay, and go when they do not.
//!
//! **Derivation.** On an instance whose batch decodes `n` sequences of `C` context tokens together, a step in which nothing prefills takes
//! `fixed + a n + b C`. A request of `P` prompt tokens is there for `L` steps, with `P + L / 2` context tokens in the mean. (Of its answer's tokens each takes one, but where the request
//! stays the first comes of the prefill.)
//!
//! - its own steps take `L (fixed + a (n + 1) + b (C + P + L / 2))`;
//! - each of the `n` beside it waits for `L (a + b (P + L / 2))` more, if the batch stays as it is: what ends is replaced;
//! - the instance spends the share `u` of its time on prefills, in steps that hold decodes up: all of that takes `1 / (1 - u)` times as long;
//! - prefills that are queued there hold it up once more: they are what is late already, and not in `u` yet;
//! - elsewhere than where its prompt is computed, its KV has to be moved: so much a token that is not there yet, and so much besides.
//!
//! Waiting for less than there is to gain does not pay, and `u` says too much of answers of a few tokens: the score keeps prefills away from where one has just begun. So going elsewhere has to
//! gain a little.
//!
//! What a prefill delays by being placed where it is, the score of the first choice weighs; it is the same for all places to decode at.
use crate::estimate::StepTime;
use crate::ids::Seconds;

/// An instance spends at most this share of its time on prefills, as far as costs are concerned: what is placed there faster than it is computed is in its queue.
pub const MOST_PREFILL_SHARE: f64 = 0.95;

/// What the seconds lost are made of.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Settings {
    /// Time constant of the share of its time that an instance spends on prefills, in seconds; more than 0.
    pub recent_seconds: Seconds,
    /// What going elsewhere must gain, in seconds over all requests; 0 or more.
    pub least_gain_seconds: Seconds,
    /// Seconds that a moved token takes; where prefixes are pulled, what pulls taught counts instead. 0 or more.
    pub transfer_seconds_per_token: Seconds,
    /// Seconds that each hand-over takes besides. 0 or more. (A pull's besides are its wait for a step of its holder.)
    pub transfer_fixed_seconds: Seconds,
    /// The client gets the prefill's own token where the hand-over is expected to take at most so many seconds and both engines can leave that token's KV to the
    /// next; else the next one makes the first token, once the KV is there. 0 or more; 0: never.
    pub most_stall_seconds: Seconds,
}

impl Default for Settings {
    /// 10 to 180 recent seconds differ little; a tenth of a second is what users are said to bear between two tokens; and a gain of 0.3 s is the least at which answers of a few tokens lose nothing (`docs/planner.md`); a hand-over as [`crate::router::PullConfig`] has it.
    fn default() -> Settings {
        Settings {
            recent_seconds: 30.0,
            least_gain_seconds: 0.3,
            transfer_seconds_per_token: 4e-6,
            transfer_fixed_seconds: 0.005,
            most_stall_seconds: 0.1,
        }
    }
}

/// What is at work on an instance at which a request may decode.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Beside {
    /// n: sequences that decode there or are bound to.
    pub decoding: f64,
    /// C: their context tokens.
    pub context_tokens: f64,
    /// u: share of its time that it spends on prefills.
    pub prefill_share: f64,
    /// Seconds that prefills take which are queued there.
    pub queued_prefill_seconds: Seconds,
}

/// What all requests together lose if one of `prompt_tokens` decodes for `steps` on an instance whose steps take what `step` says; but for the move there.
pub fn lost_seconds(step: &StepTime, beside: &Beside, prompt_tokens: f64, steps: f64) -> Seconds {
    let Beside { decoding, context_tokens, prefill_share, queued_prefill_seconds } = *beside;
    let mean_context = prompt_tokens + steps / 2.0;
    let own = step.step(decoding + 1.0, context_tokens + mean_context);
    let adds = step.decode_seconds_per_sequence + step.decode_seconds_per_context_token * mean_context;
    let decodes = steps * (own + decoding * adds);
    decodes / (1.0 - prefill_share.min(MOST_PREFILL_SHARE)) + queued_prefill_seconds
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
        // 200 steps of 10 ms, 0.1 ms for itself, 1,100 context tokens: 10.21 ms.
        near(IDLE, 200.0 * 0.01021);
        // Nine of 2,000 tokens each beside it: its steps take 0.9 + 1.8 ms more, and each of the nine gets 0.21 ms slower.
        let nine = Beside { decoding: 9.0, context_tokens: 18_000.0, ..IDLE };
        near(nine, 200.0 * (0.01021 + 0.0009 + 0.0018 + 9.0 * 0.00021));
        // Three quarters of the time go to prefills: four times that.
        near(Beside { prefill_share: 0.75, ..nine }, 4.0 * 200.0 * 0.0148);
        // Never all of it.
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
