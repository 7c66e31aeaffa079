//! Moves as the server makes them by default. The target computes the prompt and the answer so far
//! ahead, as a request of one token, while the source runs on. When it has made that token, its
//! prefix cache holds all but the last tokens. Only then does the request leave its source.
use super::{Cluster, bad};
use crate::engine::{Prompt, Request};
use crate::hash;
use lmetric_core::CoreError;
use lmetric_core::ids::{Seconds, Slot};

/// How running requests move to their target.
#[derive(Clone, Copy, Debug, PartialEq, Default)]
pub enum MoveBy {
    /// Their KV is sent while they pause, as in STAR.
    #[default]
    Kv,
    /// The target computes prompt and answer again, as the server does by default.
    Recompute(Recompute),
}

/// Bounds of [`MoveBy::Recompute`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Recompute {
    /// Largest number of moves in progress.
    pub at_once: u32,
    /// Longest wait of the client for the next token; longer moves are canceled.
    pub max_gap_seconds: Seconds,
}

impl Default for Recompute {
    fn default() -> Recompute {
        Recompute { at_once: 4, max_gap_seconds: 1.0 }
    }
}

impl MoveBy {
    pub(crate) fn check(&self) -> Result<(), CoreError> {
        if let MoveBy::Recompute(Recompute { at_once, max_gap_seconds }) = self {
            if *at_once == 0 {
                return bad("migration_max_concurrent", 0, "1 move or more");
            }
            if !(0.0..=1e9).contains(max_gap_seconds) {
                return bad("migration_max_gap_seconds", max_gap_seconds, "0 to 1e9 seconds");
            }
        }
        Ok(())
    }
}

/// A move whose target computes ahead.
#[derive(Clone, Copy, Debug)]
pub(super) struct Warming {
    target: u32,
    /// Tokens of prompt and answer in the request to the target.
    sent_tokens: u32,
    /// Of `sent_tokens`, the tokens that its cache held when it began.
    cached_tokens: u32,
    asked: Seconds,
}

impl Warming {
    /// Records that the target took it off its queue.
    pub fn began(&mut self, cached_tokens: u32) {
        self.cached_tokens = cached_tokens;
    }
}

/// Offset of the ids of requests that targets compute ahead: above all ids of the trace.
const AHEAD: u64 = 1 << 32;

/// Returns the trace's request that a target computes ahead under this id, if it is such an id.
pub(super) fn ahead_of(id: u64) -> Option<usize> {
    id.checked_sub(AHEAD).map(|request| request as usize)
}

impl Cluster<'_> {
    /// Requests one token behind prompt and answer so far from the target. Returns false if too
    /// many moves are in progress.
    pub(super) fn warm(&mut self, request: usize, target: Slot, by: Recompute) -> Result<bool, CoreError> {
        let source = self.parts[request].instance as usize;
        let made = self.engines[source].made(request as u64, self.now);
        let Some(made) = made.filter(|_| self.warming.len() < by.at_once as usize) else { return Ok(false) };
        let sent_tokens = self.reached(request, made);
        let to = target.index();
        let hashes = self.chain_with_answer(request, sent_tokens);
        let asked = Request {
            id: AHEAD + request as u64,
            prompt: Prompt::Chain { hashes: &hashes, tokens: sent_tokens },
            output_tokens: 1,
            think_tokens: 0,
            priority: self.priorities[request],
            salt: None,
            report_cached: false,
            fetched_tokens: 0,
        };
        self.put(&asked, to)?;
        let warming = Warming { target: to as u32, sent_tokens, cached_tokens: 0, asked: self.now };
        self.warming.insert(request as u32, warming);
        Ok(true)
    }

    /// Handles the target's token: the request leaves its source, unless it has ended or was
    /// preempted there meanwhile, or its client would wait too long.
    pub(super) fn warmed(&mut self, request: usize, by: Recompute) -> Result<(), CoreError> {
        let Some(warming) = self.warming.remove(&(request as u32)) else { return Ok(()) };
        let source = self.parts[request].instance as usize;
        let made = self.engines[source].made(request as u64, self.now);
        let soon = made.is_some_and(|made| {
            let total = self.reached(request, made);
            self.gap_seconds(&warming, total) <= by.max_gap_seconds
        });
        if soon {
            return self.ask_to_leave(request, source);
        }
        self.routers.of(request as u64).cancel_move(request as u64, self.now)
    }

    /// Returns the seconds that the target will take for the tokens made since the request to it,
    /// of `total` tokens by now. Uses the target's speed for the tokens computed ahead. Tokens
    /// beyond their number use the profile's speed, because the measured seconds include the
    /// target's queue.
    fn gap_seconds(&self, warming: &Warming, total: u32) -> Seconds {
        let profile = self.engines[warming.target as usize].profile();
        let block = profile.block_tokens;
        let left = total - warming.sent_tokens / block * block;
        let computed = warming.sent_tokens.saturating_sub(warming.cached_tokens).max(block);
        let more = profile.prefill_seconds(left.saturating_sub(computed));
        (f64::from(left) / f64::from(computed)).min(1.0) * (self.now - warming.asked) + more
    }

    /// Returns the tokens of prompt and answer of a request whose open segment has made `made`
    /// output tokens.
    fn reached(&self, request: usize, made: u32) -> u32 {
        self.parts[request].from.max(self.workload.shape.input_tokens[request]) + made
    }

    /// Returns the hashes of the full blocks of a request's prompt and answer, up to `tokens`
    /// tokens.
    pub(super) fn chain_with_answer(&self, request: usize, tokens: u32) -> Vec<u64> {
        let shape = &self.workload.shape;
        let blocks = (tokens / shape.block_tokens) as usize;
        let mut hashes = match self.config.cached_answers {
            true => shape.chain_with_answer(request).to_vec(),
            false => shape.full_blocks(request, shape.input_tokens[request]).to_vec(),
        };
        hashes.truncate(blocks);
        // A trace may know fewer blocks than the prompt has.
        hash::extend_own(&mut hashes, blocks, request as u64);
        hashes
    }
}
