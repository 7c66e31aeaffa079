//! Requests that go back into the queue, and what becomes of their KV: it is dropped and computed again, or copied to the host's memory and in again.
//!
//! A copy takes its bytes' time, either way, and the step in which it begins waits for it: nothing is computed meanwhile. (An engine may overlap the two, at
//! best hiding the shorter; then this is its worst case.) What the cache still holds when the request comes back is not copied in. The host holds so many tokens; a request that
//! does not fit there is computed again.
use super::{Admission, Engine};
use crate::sequence::State;
use lmetric_core::CoreError;
use lmetric_core::ids::Seconds;

/// What becomes of the KV of a request that goes back into the queue.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum Preempt {
    /// It is dropped, but for what the cache keeps.
    #[default]
    Recompute,
    /// It waits in the host's memory, where there is room: only under [`Admission::Vllm`].
    Swap {
        /// What a token's KV takes to be copied one way.
        seconds_per_token: Seconds,
        /// Tokens whose KV the host holds.
        host_tokens: u64,
    },
}

impl Preempt {
    /// # Errors
    /// `BadValue` for a time that is none, and for swapping where blocks are not accounted for.
    pub fn check(&self, admission: Admission) -> Result<(), CoreError> {
        let Preempt::Swap { seconds_per_token, .. } = *self else { return Ok(()) };
        let bad = |what: &str, got: String, expected: &str| {
            Err(CoreError::BadValue { what: what.into(), got, expected: expected.into() })
        };
        if !(0.0..=1e3).contains(&seconds_per_token) {
            return bad("preempt: seconds to swap a token", seconds_per_token.to_string(), "0 to 1000");
        }
        if admission != Admission::Vllm {
            return bad(
                "preempt",
                "swap under admission reserve".into(),
                "recompute, or admission vllm: only there are blocks that could be copied",
            );
        }
        Ok(())
    }
}

impl Engine {
    /// Of a running request, the tokens whose KV would go to the host if it went back now; 0: it would be computed again.
    fn to_host(&self, slot: u32) -> u32 {
        let computed = self.job(slot).computed;
        match self.settings.preempt {
            Preempt::Swap { host_tokens, .. } if self.host_tokens + u64::from(computed) <= host_tokens => {
                computed
            }
            _ => 0,
        }
    }

    /// What it costs the engine if a running request goes back now: its KV is copied out and in, or computed again, as if the cache kept none of it.
    pub(super) fn lost_seconds(&self, slot: u32) -> Seconds {
        match self.to_host(slot) {
            0 => self.profile.prefill_seconds_behind(0, self.job(slot).computed),
            tokens => 2.0 * self.copy_seconds(u64::from(tokens)),
        }
    }

    /// One way.
    pub(super) fn copy_seconds(&self, tokens: u64) -> Seconds {
        match self.settings.preempt {
            Preempt::Swap { seconds_per_token, .. } => tokens as f64 * seconds_per_token,
            Preempt::Recompute => 0.0,
        }
    }

    /// Puts a running request back into the queue.
    pub(super) fn preempt(&mut self, slot: u32) {
        let (attained, to_host) = (self.job(slot).attained, self.to_host(slot));
        let (gaps, state) = (self.gaps_of(slot), self.sequences[slot].state);
        self.unplace(slot);
        let begun = self.begun;
        let sequence = &mut self.sequences[slot];
        if state == State::Decode {
            (sequence.gaps, sequence.last_token) = (gaps, sequence.last_token.or(Some(begun)));
        }
        (sequence.state, sequence.computed) = (State::Waiting, 0);
        (sequence.pulled, sequence.in_host) = (to_host, to_host);
        sequence.attained = attained;
        self.host_tokens += u64::from(to_host);
        self.copied_tokens += u64::from(to_host);
        self.counters.swapped_out_tokens += u64::from(to_host);
        self.events.preempted.push(sequence.id);
        self.enqueue(slot);
        self.waiting_requests += 1;
        self.counters.preemptions += 1;
    }

    /// A request leaves the host's memory: it was admitted, so that `copied` tokens of it are copied in, or it is gone.
    pub(super) fn leave_host(&mut self, slot: u32, copied: u32) {
        let tokens = std::mem::take(&mut self.sequences[slot].in_host);
        if tokens > 0 {
            self.host_tokens -= u64::from(tokens);
            self.copied_tokens += u64::from(copied);
            self.counters.swapped_in_tokens += u64::from(copied);
        }
    }
}
