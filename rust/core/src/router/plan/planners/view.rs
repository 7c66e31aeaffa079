//! What planners may see and do: the interface between the router and planners of any crate.
use super::*;
use crate::estimate::StepTime;
use crate::indicators::Indicator;
use crate::receipt::Balance;
use crate::request::Request;
use crate::router::parts::Turn;
use crate::split::{Load, Whole};
use smallvec::SmallVec;

impl View<'_> {
    /// The request.
    pub fn request(&self) -> &Request<'_> {
        self.request
    }

    /// The instance of its first segment.
    pub fn first(&self) -> InstanceId {
        self.first
    }

    /// Chooses the instance of a second segment by the decode policy. The segment still begins at
    /// token 0: the planner sets `from_token`. `None`: no instance takes over, and the request is
    /// left in one piece.
    pub fn second(&mut self) -> Option<(InstanceId, Follow)> {
        let handoff = self.state.expected_handoff(self.context, self.request, self.first, self.now);
        let Some(second) = self.other_than(&[], handoff) else {
            self.leave_whole("no second instance takes over");
            return None;
        };
        Some((second, self.follow(second, handoff)))
    }

    /// Chooses an instance by the decode policy: neither the first nor one in `taken`. The segment
    /// is expected to start to decode there in `start_seconds`.
    pub fn other_than(&mut self, taken: &[InstanceId], start_seconds: Seconds) -> Option<InstanceId> {
        let View { state, request, first, failed, now, .. } = *self;
        let mut left_out: SmallVec<[u32; 8]> = SmallVec::from_slice(failed);
        left_out.extend(taken.iter().map(|id| id.0));
        let turn = Turn::Peer(Some(first));
        state.choose(self.context, request, turn, &left_out, Some(start_seconds), now).ok()
    }

    /// A segment on an instance that was chosen last; it still begins at token 0.
    pub fn follow(&self, instance: InstanceId, start_seconds: Seconds) -> Follow {
        self.state.follow(self.context, 0, Some(instance), start_seconds)
    }

    /// Leaves the request in one piece, for this reason, which receipts show.
    pub fn leave_whole(&mut self, reason: &str) -> Rest {
        self.context.leave_whole(reason)
    }

    /// Writes the expected times of the instances into the receipt.
    pub fn set_balance(&mut self, balance: Balance) {
        self.context.balance = Some(balance);
    }

    /// The request, and what two instances hold of it.
    pub fn whole(&self, second: InstanceId) -> Whole {
        Whole {
            prompt_tokens: self.request.prompt_tokens,
            first_hit_tokens: self.hit_tokens_on(self.first),
            second_hit_tokens: self.hit_tokens_on(second),
            expected_output_tokens: self.request.expected_output_tokens.unwrap_or(1),
        }
    }

    /// Prompt tokens that an instance need not compute.
    pub fn hit_tokens_on(&self, id: InstanceId) -> u32 {
        self.state.saved_tokens(self.request, self.context.hit_blocks[id.index()]) as u32
    }

    /// Where all of these instances' engines can hand over.
    pub fn cuts_of(&self, on: &[InstanceId]) -> Cuts {
        on.iter().map(|id| self.state.instances[id.index()].cuts).min().unwrap_or_default()
    }

    /// What is assigned to an instance.
    pub fn load_of(&self, id: InstanceId) -> Load {
        self.state.load_of(id.index(), self.now)
    }

    /// What the steps of an instance take; `None`: nothing is known of them.
    pub fn step_time_of(&self, id: InstanceId) -> Option<StepTime> {
        self.state.step_time_of(id.index())
    }

    /// Blocks that an instance's KV cache holds, if known.
    pub fn cache_blocks_of(&self, id: InstanceId) -> Option<u32> {
        self.state.instances[id.index()].cache_blocks
    }
}

impl State {
    /// What is assigned to a slot's instance.
    pub(super) fn load_of(&self, slot: usize, now: Seconds) -> Load {
        let at = |indicator| self.ledger.get(indicator)[slot];
        Load {
            queued_prefill_tokens: self.ledger.queued_prefill_on(slot, now),
            queued_prefill_pairs: self.ledger.queued_pairs_on(slot),
            decoding: at(Indicator::DecodeBs) + at(Indicator::BoundBs),
            context_tokens: at(Indicator::Tokens),
            remaining_output_tokens: at(Indicator::RemainingTokens) + self.ledger.bound_remaining_on(slot),
        }
    }
}
