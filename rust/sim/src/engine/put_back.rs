//! Preemption: requests that go back into the queue. Their KV is dropped and computed again, or
//! copied to the host's memory and back.
//!
//! A copy takes the time of its bytes, either way, and the step in which it begins waits for it: no
//! token is computed meanwhile. (An engine may overlap the two and at best hide the shorter one;
//! then this is its worst case.) Tokens that the cache still holds when the request comes back are
//! not copied in. The host holds a limited number of tokens; a request that does not fit there is
//! computed again.
use super::{Admission, Engine};
use crate::sequence::State;
use lmetric_core::CoreError;
use lmetric_core::ids::Seconds;

/// Handling of the KV of preempted requests.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum Preempt {
    /// KV is dropped, except for blocks that the cache keeps.
    #[default]
    Recompute,
    /// KV waits in the host's memory, if there is room: only under [`Admission::Vllm`].
    Swap {
        /// Seconds to copy a token's KV one way.
        seconds_per_token: Seconds,
        /// Tokens whose KV the host can hold.
        host_tokens: u64,
    },
}

impl Preempt {
    /// Checks the settings.
    ///
    /// # Errors
    /// `BadValue` for an invalid time, and for swapping under an admission without blocks.
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
    /// Returns the tokens of a running request whose KV would go to the host if it were preempted
    /// now; 0: they would be computed again.
    fn to_host(&self, slot: u32) -> u32 {
        let computed = self.job(slot).computed;
        match self.settings.preempt {
            Preempt::Swap { host_tokens, .. } if self.host_tokens + u64::from(computed) <= host_tokens => {
                computed
            }
            _ => 0,
        }
    }

    /// Returns the seconds that preempting a running request costs the engine now. Its KV is copied
    /// out and in, or computed again, as if the cache kept no block.
    pub(super) fn lost_seconds(&self, slot: u32) -> Seconds {
        match self.to_host(slot) {
            0 => self.profile.prefill_seconds_behind(0, self.job(slot).computed),
            tokens => 2.0 * self.copy_seconds(u64::from(tokens)),
        }
    }

    /// Returns the seconds of a copy one way.
    pub(super) fn copy_seconds(&self, tokens: u64) -> Seconds {
        match self.settings.preempt {
            Preempt::Swap { seconds_per_token, .. } => tokens as f64 * seconds_per_token,
            Preempt::Recompute => 0.0,
        }
    }

    /// Preempts a running request.
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
        (sequence.fetched, sequence.in_host) = (to_host, to_host);
        sequence.attained = attained;
        self.host_tokens += u64::from(to_host);
        self.copied_tokens += u64::from(to_host);
        self.counters.swapped_out_tokens += u64::from(to_host);
        self.events.preempted.push(sequence.id);
        self.enqueue(slot);
        self.waiting_requests += 1;
        self.counters.preemptions += 1;
    }

    /// Removes a request from the host's memory. It was admitted, so that `copied` of its tokens
    /// are copied in, or it is gone.
    pub(super) fn leave_host(&mut self, slot: u32, copied: u32) {
        let tokens = std::mem::take(&mut self.sequences[slot].in_host);
        if tokens > 0 {
            self.host_tokens -= u64::from(tokens);
            self.copied_tokens += u64::from(copied);
            self.counters.swapped_in_tokens += u64::from(copied);
        }
    }
}
