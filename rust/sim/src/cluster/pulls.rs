//! Prefixes that are pulled: before a request queues where it runs, a part of its prompt's KV comes from an instance that holds it.
//!
//! The holder answers between two steps (or at once): a pull begins when its present step ends, with what its cache still holds by then, and costs it
//! [`Pulling::holder_seconds`] where it has something to compute. The KV goes over the links that hand-overs use. What is gone meanwhile the request's own instance
//! computes. What that holds itself stays there while it waits; blocks for what is pulled are taken when the request is admitted, as for hand-overs.
use super::{Cluster, Event, State, bad};
use crate::transfer::Load;
use lmetric_core::CoreError;
use lmetric_core::ids::Seconds;
use lmetric_core::plan::Pull;

/// What a pull does to its holder.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Pulling {
    /// Seconds that its next step takes longer, where it is not idle: vLLM asks its holder for the prefix as a request of one token.
    pub holder_seconds: Seconds,
    /// Whether it waits for the holder's present step: asked as a request is, an engine answers between two. Else its memory is read at once, as a store of KV that is
    /// shared among engines would.
    pub waits: bool,
    /// Whether what is sent stays in its cache until it is; else what was evicted by the end of a pull has not come.
    pub pinned: bool,
}

impl Default for Pulling {
    fn default() -> Pulling {
        Pulling { holder_seconds: 0.0, waits: true, pinned: true }
    }
}

impl Pulling {
    pub(crate) fn check(&self) -> Result<(), CoreError> {
        if !(0.0..=1e6).contains(&self.holder_seconds) {
            return bad("pull: holder_seconds", self.holder_seconds, "0 to 1e6 seconds");
        }
        Ok(())
    }
}

/// A pull that has not ended.
#[derive(Clone, Debug)]
pub(super) struct UnderWay {
    pub pull: Pull,
    /// When it was asked for.
    asked: Seconds,
    /// Tokens on their way, and those that need not be computed once they are there.
    tokens: u32,
    reach: u32,
    /// Blocks of the holder that stay until then.
    pinned: Vec<u32>,
}

impl Cluster<'_> {
    /// A request is to pull a prefix before it queues.
    pub(super) fn ask_for_pull(&mut self, request: usize, pull: Pull) {
        let holder = pull.holder.index();
        self.records.pull_instance[request] = holder as i64;
        let asked = self.now;
        let waits = self.config.pulling.waits;
        let begins = if waits { self.present_step_ends(holder) } else { self.now };
        let under_way = UnderWay { pull, asked, tokens: 0, reach: 0, pinned: Vec::new() };
        self.pulls.insert(request as u32, under_way);
        let costs = self.config.pulling.holder_seconds;
        if costs > 0.0 && self.instances[holder].state != State::Idle {
            self.engines[holder].hold(costs);
            if self.instances[holder].state == State::Stepping
                && let Some(end) = self.engines[holder].interrupt(self.now)
            {
                self.expect(holder, end);
            }
        }
        self.at(begins, Event::PullBegins { request: request as u32 });
    }

    /// When the step that an instance runs now ends; now, where it runs none, or one without an end.
    fn present_step_ends(&self, instance: usize) -> Seconds {
        let end = match self.instances[instance].state {
            State::Idle => self.now,
            State::Seen => self.instances[instance].busy_until,
            State::Stepping => self.engines[instance].present_step_ends(self.now).unwrap_or(self.now),
        };
        if end.is_finite() { end.max(self.now) } else { self.now }
    }

    /// The holder sends what it still holds, and the request's instance does not.
    pub(super) fn begin_pull(&mut self, request: usize) {
        let Some(mut under_way) = self.pulls.remove(&(request as u32)) else { return };
        let (holder, to) = (under_way.pull.holder.index(), self.parts[request].instance as usize);
        let prompt = self.workload.shape.input_tokens[request];
        let chain = super::chain(self.workload, self.config, request);
        let held = self.engines[holder].hit_tokens(chain, prompt).min(under_way.pull.to_token);
        let own = self.engines[to].hit_tokens(chain, prompt);
        under_way.tokens = held.saturating_sub(own);
        under_way.reach = held;
        if under_way.tokens > 0 {
            under_way.pinned = self.engines[holder].use_prefix(chain, held);
            if !self.config.pulling.pinned {
                self.engines[holder].release_prefix(&mut under_way.pinned);
            }
        }
        let load = Load { from: holder, to, tokens: under_way.tokens, began: None, ended: self.now };
        let there = self.links.carry(load);
        self.pulls.insert(request as u32, under_way);
        self.at(there, Event::PullEnds { request: request as u32 });
    }

    /// What was pulled is there: the request queues.
    pub(super) fn end_pull(&mut self, request: usize) -> Result<(), CoreError> {
        let Some(mut under_way) = self.pulls.remove(&(request as u32)) else { return Ok(()) };
        let (holder, to) = (under_way.pull.holder.index(), self.parts[request].instance as usize);
        if !under_way.pinned.is_empty() {
            self.engines[holder].release_prefix(&mut under_way.pinned);
            if self.instances[holder].state == State::Idle {
                self.free(holder); // what waits there may have waited for these blocks
            }
        }
        if !self.config.pulling.pinned && under_way.tokens > 0 {
            let prompt = self.workload.shape.input_tokens[request];
            let chain = super::chain(self.workload, self.config, request);
            let held = self.engines[holder].hit_tokens(chain, prompt).min(under_way.reach);
            under_way.tokens = under_way.tokens.saturating_sub(under_way.reach - held);
            under_way.reach = held;
        }
        let seconds = self.now - under_way.asked;
        self.records.pull_seconds[request] = seconds;
        let came = if under_way.tokens > 0 { under_way.reach } else { 0 };
        let tokens = came.saturating_sub(under_way.pull.from_token);
        self.routers.of(request as u64).pulled(request as u64, tokens, seconds, self.now)?;
        self.parts[request].pulled = came;
        self.submit(request, to)
    }
}
