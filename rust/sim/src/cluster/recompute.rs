//! Moves as the server makes them by default: the target computes prompt and answer so far ahead, as a
//! request of one token, while the source runs on. When it has said that token, its prefix cache holds all
//! but the last tokens, and only then the request leaves its source.
use super::{Cluster, bad};
use crate::engine::{Prompt, Request};
use crate::hash;
use lmetric_core::CoreError;
use lmetric_core::ids::{InstanceId, Seconds};

/// How running requests get to where they move.
#[derive(Clone, Copy, Debug, PartialEq, Default)]
pub enum MoveBy {
    /// Their KV is sent while they pause, as in STAR.
    #[default]
    Kv,
    /// The target computes what there is, as the server does by default.
    Recompute(Recompute),
}

/// Bounds of [`MoveBy::Recompute`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Recompute {
    /// Most moves that are on their way at a time.
    pub at_once: u32,
    /// A move is given up if its client would wait longer for the next token.
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
    /// Tokens of prompt and answer that it was asked to compute.
    sent_tokens: u32,
    /// Of these, those that its cache held when it began.
    cached_tokens: u32,
    asked: Seconds,
}

impl Warming {
    /// The target took it off its queue.
    pub fn began(&mut self, cached_tokens: u32) {
        self.cached_tokens = cached_tokens;
    }
}

/// Ids of the requests that targets compute ahead lie above all of the trace's.
const AHEAD: u64 = 1 << 32;

/// The trace's request that a target computes ahead under this id, if it is such an id.
pub(super) fn ahead_of(id: u64) -> Option<usize> {
    id.checked_sub(AHEAD).map(|request| request as usize)
}

impl Cluster<'_> {
    /// Asks the target for one token behind what there is. False: too many moves are on their way.
    pub(super) fn warm(
        &mut self,
        request: usize,
        target: InstanceId,
        by: Recompute,
    ) -> Result<bool, CoreError> {
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
            pulled_tokens: 0,
        };
        self.put(&asked, to)?;
        let warming = Warming { target: to as u32, sent_tokens, cached_tokens: 0, asked: self.now };
        self.warming.insert(request as u32, warming);
        Ok(true)
    }

    /// The target has said its token: the request leaves its source, unless it has ended or was put back
    /// there meanwhile, or its client would wait too long.
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

    /// Seconds that the target will take for what was said since it was asked, of `total` tokens by now,
    /// going by what it took for the rest. More than it computed then is not as slow as that, for its queue
    /// was in those seconds, too.
    fn gap_seconds(&self, warming: &Warming, total: u32) -> Seconds {
        let profile = self.engines[warming.target as usize].profile();
        let block = profile.block_tokens;
        let left = total - warming.sent_tokens / block * block;
        let computed = warming.sent_tokens.saturating_sub(warming.cached_tokens).max(block);
        let more = profile.prefill_seconds(left.saturating_sub(computed));
        (f64::from(left) / f64::from(computed)).min(1.0) * (self.now - warming.asked) + more
    }

    /// Tokens of prompt and answer of a request whose open segment has made so many output tokens.
    fn reached(&self, request: usize, made: u32) -> u32 {
        self.parts[request].from.max(self.workload.shape.input_tokens[request]) + made
    }

    /// Hashes of the full blocks of a request's prompt and answer, up to so many tokens.
    pub(super) fn chain_with_answer(&self, request: usize, tokens: u32) -> Vec<u64> {
        let shape = &self.workload.shape;
        let (prompt, block) = (shape.input_tokens[request], shape.block_tokens);
        let chain = shape.chain(request);
        let mut hashes = chain[..chain.len().min((prompt / block) as usize)].to_vec();
        // A trace may know fewer blocks than the prompt has.
        hash::extend_own(&mut hashes, (tokens / block) as usize, request as u64);
        hashes
    }
}
