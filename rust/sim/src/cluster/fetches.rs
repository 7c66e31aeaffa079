//! Prefix fetches: before a request queues on its instance, a part of its prompt's KV is copied
//! from an instance that holds it.
//!
//! The holder answers between two steps (or at once). So a fetch begins when the holder's present
//! step ends, with the tokens that its cache still holds by then. It costs the holder
//! [`SimulatedFetch::holder_seconds`] if the holder has something to compute. The KV uses the links
//! of KV transfers. The request's own instance computes the tokens that are gone meanwhile. Tokens
//! that it holds itself stay there while the request waits. Blocks for fetched tokens are allocated
//! at admission, as for KV transfers.
use super::{Cluster, Event, State, bad};
use crate::pool::Held;
use crate::transfer::Load;
use lmetric_core::CoreError;
use lmetric_core::ids::Seconds;
use lmetric_core::plan::PrefixFetch;

/// Effects of a prefix fetch on its holder.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SimulatedFetch {
    /// Seconds that the holder's next step takes longer, if the holder is not idle: vLLM sends its
    /// holder a request of one token for the prefix.
    pub holder_seconds: Seconds,
    /// Whether a fetch waits for the holder's present step: an engine answers requests between two
    /// steps. Else the holder's memory is read at once, as from a shared KV store.
    pub waits: bool,
    /// Whether the holder keeps the blocks until the fetch ends; else blocks that are evicted by
    /// then do not arrive.
    pub pinned: bool,
}

impl Default for SimulatedFetch {
    fn default() -> SimulatedFetch {
        SimulatedFetch { holder_seconds: 0.0, waits: true, pinned: true }
    }
}

impl SimulatedFetch {
    pub(crate) fn check(&self) -> Result<(), CoreError> {
        if !(0.0..=1e6).contains(&self.holder_seconds) {
            return bad("prefix_fetch: holder_seconds", self.holder_seconds, "0 to 1e6 seconds");
        }
        Ok(())
    }
}

/// A prefix fetch that has not ended.
#[derive(Clone, Debug)]
pub(super) struct UnderWay {
    pub fetch: PrefixFetch,
    /// Time of the request for the prefix.
    asked: Seconds,
    /// Tokens on their way, and tokens that need not be computed once they have arrived.
    tokens: u32,
    reach: u32,
    /// Blocks that the holder keeps until then.
    pinned: Held,
}

impl Cluster<'_> {
    /// Requests a prefix from its holder before the request queues.
    pub(super) fn ask_for_fetch(&mut self, request: usize, fetch: PrefixFetch) {
        let holder = fetch.holder.index();
        self.records.fetch_instance[request] = holder as i64;
        let asked = self.now;
        let waits = self.config.fetching.waits;
        let begins = if waits { self.present_step_ends(holder) } else { self.now };
        let under_way = UnderWay { fetch, asked, tokens: 0, reach: 0, pinned: Held::default() };
        self.fetches.insert(request as u32, under_way);
        self.hold_for_fetch(holder);
        self.at(begins, Event::FetchBegins { request: request as u32 });
    }

    /// Makes a busy holder's next step longer: it answers a request for a prefix.
    pub(super) fn hold_for_fetch(&mut self, holder: usize) {
        let costs = self.config.fetching.holder_seconds;
        if costs > 0.0 && self.instances[holder].state != State::Idle {
            self.engines[holder].hold(costs);
            if self.instances[holder].state == State::Stepping
                && let Some(end) = self.engines[holder].interrupt(self.now)
            {
                self.expect(holder, end);
            }
        }
    }

    /// Returns the end of an instance's current step; now, if it runs no step or one without an
    /// end.
    pub(super) fn present_step_ends(&self, instance: usize) -> Seconds {
        let end = match self.instances[instance].state {
            State::Idle => self.now,
            State::Seen => self.instances[instance].busy_until,
            State::Stepping => self.engines[instance].present_step_ends(self.now).unwrap_or(self.now),
        };
        if end.is_finite() { end.max(self.now) } else { self.now }
    }

    /// Sends the tokens that the holder still holds and the request's instance does not.
    pub(super) fn begin_fetch(&mut self, request: usize) {
        let Some(mut under_way) = self.fetches.remove(&(request as u32)) else { return };
        let (holder, to) = (under_way.fetch.holder.index(), self.parts[request].instance as usize);
        let prompt = self.workload.shape.input_tokens[request];
        let chain = super::chain(self.workload, self.config, request);
        let held = self.engines[holder].hit_tokens(chain, prompt).min(under_way.fetch.to_token);
        let own = self.engines[to].hit_tokens(chain, prompt);
        under_way.tokens = held.saturating_sub(own);
        under_way.reach = held;
        if under_way.tokens > 0 {
            under_way.pinned = self.engines[holder].use_prefix(chain, held);
            if !self.config.fetching.pinned {
                self.engines[holder].release_prefix(&mut under_way.pinned);
            }
        }
        let load = Load { from: holder, to, tokens: under_way.tokens, began: None, ended: self.now };
        let there = self.links.carry(load);
        self.fetches.insert(request as u32, under_way);
        self.at(there, Event::FetchEnds { request: request as u32 });
    }

    /// Ends a prefix fetch: the request queues.
    pub(super) fn end_fetch(&mut self, request: usize) -> Result<(), CoreError> {
        let Some(mut under_way) = self.fetches.remove(&(request as u32)) else { return Ok(()) };
        let (holder, to) = (under_way.fetch.holder.index(), self.parts[request].instance as usize);
        if !under_way.pinned.is_empty() {
            self.engines[holder].release_prefix(&mut under_way.pinned);
            if self.instances[holder].state == State::Idle {
                self.free(holder); // requests there may have waited for these blocks
            }
        }
        if !self.config.fetching.pinned && under_way.tokens > 0 {
            let prompt = self.workload.shape.input_tokens[request];
            let chain = super::chain(self.workload, self.config, request);
            let held = self.engines[holder].hit_tokens(chain, prompt).min(under_way.reach);
            under_way.tokens = under_way.tokens.saturating_sub(under_way.reach - held);
            under_way.reach = held;
        }
        let seconds = self.now - under_way.asked;
        self.records.fetch_seconds[request] = seconds;
        let came = if under_way.tokens > 0 { under_way.reach } else { 0 };
        let tokens = came.saturating_sub(under_way.fetch.from_token);
        self.routers.of(request as u64).fetched(request as u64, tokens, seconds, self.now)?;
        self.parts[request].fetched = came;
        self.submit(request, to)
    }
}
