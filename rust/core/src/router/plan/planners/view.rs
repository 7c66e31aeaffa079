//! The interface between the router and planners of any crate.
use super::*;
use crate::estimate::StepTime;
use crate::indicators::Indicator;
use crate::record::Balance;
use crate::request::Request;
use crate::router::parts::Turn;
use crate::split::{Load, Whole};
use smallvec::SmallVec;

impl View<'_> {
    /// Returns the request.
    pub fn request(&self) -> &Request<'_> {
        self.request
    }

    /// Returns the instance of the first segment.
    pub fn first(&self) -> Slot {
        self.first
    }

    /// Chooses the instance of a second segment by the decode policy. The planner sets the
    /// segment's `from_token`, which is 0 here. `None`: no instance is available, and the request
    /// is not split.
    pub fn second(&mut self) -> Option<(Slot, Follow)> {
        let handoff = self.state.expected_handoff(self.context, self.request, self.first, self.now);
        let Some(second) = self.other_than(&[], handoff) else {
            self.leave_whole("no second instance is available");
            return None;
        };
        Some((second, self.follow(second, handoff)))
    }

    /// Chooses an instance by the decode policy, not the first and none in `taken`.
    /// `start_seconds`: expected seconds until the segment starts to decode.
    pub fn other_than(&mut self, taken: &[Slot], start_seconds: Seconds) -> Option<Slot> {
        let View { state, request, first, failed, now, .. } = *self;
        let mut left_out: SmallVec<[u32; 8]> = SmallVec::from_slice(failed);
        left_out.extend(taken.iter().map(|id| id.0));
        let turn = Turn::Peer(Some(first));
        state.choose(self.context, request, turn, &left_out, Some(start_seconds), now).ok()
    }

    /// Returns a segment on the last chosen instance, with `from_token` 0.
    pub fn follow(&self, instance: Slot, start_seconds: Seconds) -> Follow {
        self.state.follow(self.context, 0, Some(instance), start_seconds)
    }

    /// Leaves the request unsplit, for this reason. Decision records show the reason.
    pub fn leave_whole(&mut self, reason: &str) -> Rest {
        self.context.leave_whole(reason)
    }

    /// Sets the expected times of the instances for the decision record.
    pub fn set_balance(&mut self, balance: Balance) {
        self.context.balance = Some(balance);
    }

    /// Returns the request's length and the cached tokens on both instances.
    pub fn whole(&self, second: Slot) -> Whole {
        Whole {
            prompt_tokens: self.request.prompt_tokens,
            first_hit_tokens: self.hit_tokens_on(self.first),
            second_hit_tokens: self.hit_tokens_on(second),
            expected_output_tokens: self.request.expected_output_tokens.unwrap_or(1),
        }
    }

    /// Returns the prompt tokens that an instance need not compute.
    pub fn hit_tokens_on(&self, id: Slot) -> u32 {
        self.state.saved_tokens(self.request, self.context.matched.hit_blocks[id.index()]) as u32
    }

    /// Returns the cut positions that all these instances' engines support.
    pub fn cuts_of(&self, on: &[Slot]) -> Cuts {
        on.iter().map(|id| self.state.instances[id.index()].cuts).min().unwrap_or_default()
    }

    /// Returns the load of an instance.
    pub fn load_of(&self, id: Slot) -> Load {
        self.state.load_of(id.index(), self.now)
    }

    /// Returns the step-time model of an instance; `None`: unknown.
    pub fn step_time_of(&self, id: Slot) -> Option<StepTime> {
        self.state.step_time_of(id.index())
    }

    /// Returns the number of blocks in an instance's KV cache, if known.
    pub fn cache_blocks_of(&self, id: Slot) -> Option<u32> {
        self.state.instances[id.index()].cache_blocks
    }
}

impl State {
    /// Returns the load of a slot's instance.
    pub(super) fn load_of(&self, slot: usize, now: Seconds) -> Load {
        let at = |indicator| self.ledger.get(indicator)[slot];
        let queued = self.ledger.queued_on(slot, now);
        Load {
            queued_prefill_tokens: queued.tokens,
            queued_prefill_pairs: queued.pairs,
            decoding: at(Indicator::DecodeBs) + at(Indicator::BoundBs),
            context_tokens: at(Indicator::Tokens),
            remaining_output_tokens: at(Indicator::RemainingTokens) + self.ledger.bound_remaining_on(slot),
        }
    }
}
