//! Output of an engine: events of a step, events of the KV cache, load.
use crate::gaps::Gaps;
use lmetric_core::kv::tier::Tier;
use std::ops::Range;
use std::sync::Arc;

/// The events of a step. The buffers are reused: read them before the next step starts.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StepEvents {
    /// When the step began.
    pub start: f64,
    /// When it ended.
    pub end: f64,
    /// When the last of its steps began.
    pub last_start: f64,
    /// Steps in it: more than one only from [`crate::Engine::start_steps`].
    pub steps: u32,
    /// Requests taken off the queue when the step began.
    pub admitted: Vec<Admitted>,
    /// Requests put back into the queue when the step began, their blocks freed.
    pub preempted: Vec<u64>,
    /// Prompt tokens computed, by request.
    pub prefilled: Vec<Prefilled>,
    /// Tokens made, in batch order. Empty if the engine has no generator.
    pub tokens: Vec<Token>,
    /// Requests that ended with this step.
    pub finished: Vec<u64>,
    /// Gaps between the tokens of each request in `finished`.
    pub gaps: Vec<Gaps>,
    /// Bin of the gap before the last token of each request in `finished`; without meaning for a
    /// request of one token.
    pub last_bins: Vec<usize>,
}

/// A request was taken off the queue.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Admitted {
    /// Its id.
    pub id: u64,
    /// Prompt tokens found in the cache.
    pub cached_tokens: u32,
    /// Tokens behind the cached ones whose KV came from another engine or the host's memory.
    pub fetched_tokens: u32,
    /// Part of the cached tokens that was loaded from the host tier for this admission.
    pub loaded_tokens: u32,
    /// False after a preemption.
    pub first_time: bool,
}

/// Prompt tokens were computed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Prefilled {
    /// The request's id.
    pub id: u64,
    /// Tokens computed in this step; after a preemption they may be output tokens as well.
    pub tokens: u32,
    /// Whether the prefill is complete. The step that completes it makes an output token.
    pub done: bool,
    /// Whether it is the last token of a prompt that came from another engine: the step computes
    /// what a decode computes.
    pub decodes: bool,
}

/// An output token was made.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Token {
    /// The request's id.
    pub id: u64,
    /// The token's id.
    pub token: u32,
    /// Whether it came out of a prefill: the first token, or the first after a preemption.
    pub from_prefill: bool,
    /// Whether it is the last.
    pub last: bool,
}

/// A change of the KV cache.
#[derive(Clone, Debug, PartialEq)]
pub enum KvEvent {
    /// Consecutive blocks were stored.
    Stored {
        /// The tier that holds them now.
        tier: Tier,
        /// Hash of the block before the first block; none if the blocks start the chain.
        parent: Option<u64>,
        /// Range of the blocks' hashes in [`KvLog::hashes`].
        hashes: Range<usize>,
        /// Range of their token IDs in [`KvLog::tokens`]; empty if the request came as hashes.
        tokens: Range<usize>,
        /// The request's cache salt.
        salt: Option<Arc<str>>,
    },
    /// One copy of each of these blocks was removed.
    Removed {
        /// The tier that held them.
        tier: Tier,
        /// Range of their hashes in [`KvLog::hashes`], in the order of removal.
        hashes: Range<usize>,
    },
    /// The whole cache was cleared.
    Cleared,
}

/// The changes of the KV cache since the log was last cleared, in order. An inactive log records
/// nothing.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct KvLog {
    /// Whether the log records changes.
    pub on: bool,
    /// The changes.
    pub events: Vec<KvEvent>,
    /// Block hashes of the events.
    pub hashes: Vec<u64>,
    /// Token ids of the stored events.
    pub tokens: Vec<u32>,
}

impl KvLog {
    /// Clears the changes, after they have been read.
    pub fn clear(&mut self) {
        self.events.clear();
        self.hashes.clear();
        self.tokens.clear();
    }

    pub(crate) fn removed(&mut self, tier: Tier, hash: u64) {
        if !self.on {
            return;
        }
        let at = self.hashes.len();
        self.hashes.push(hash);
        match self.events.last_mut() {
            Some(KvEvent::Removed { tier: last, hashes }) if *last == tier => hashes.end += 1,
            _ => self.events.push(KvEvent::Removed { tier, hashes: at..at + 1 }),
        }
    }

    pub(crate) fn stored(
        &mut self,
        tier: Tier,
        parent: Option<u64>,
        hashes: &[u64],
        tokens: &[u32],
        salt: Option<&Arc<str>>,
    ) {
        if self.on {
            let (h, t) = (self.hashes.len(), self.tokens.len());
            self.hashes.extend_from_slice(hashes);
            self.tokens.extend_from_slice(tokens);
            self.events.push(KvEvent::Stored {
                tier,
                parent,
                hashes: h..self.hashes.len(),
                tokens: t..self.tokens.len(),
                salt: salt.cloned(),
            });
        }
    }
}

/// Counts since the engine began. `submitted = finished + aborted + running + waiting` at all
/// times.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Requests taken.
    pub submitted: u64,
    /// Requests that reached their last token.
    pub finished: u64,
    /// Requests aborted.
    pub aborted: u64,
    /// Requests that left while they ran, to move to another engine.
    pub left: u64,
    /// Preemptions, for want of blocks or for another request.
    pub preemptions: u64,
    /// Preemptions for want of blocks.
    pub out_of_memory: u64,
    /// Prompt tokens of the requests whose prefill is complete.
    pub prompt_tokens: u64,
    /// Prompt tokens in `prompt_tokens` that came out of the cache.
    pub cached_prompt_tokens: u64,
    /// Output tokens made.
    pub generation_tokens: u64,
    /// Prompt tokens looked up in the cache.
    pub prefix_cache_queries: u64,
    /// Prompt tokens found there.
    pub prefix_cache_hits: u64,
    /// Prompt tokens whose KV came from another engine.
    pub fetched_prompt_tokens: u64,
    /// Tokens whose KV was copied to the host's memory.
    pub swapped_out_tokens: u64,
    /// Tokens whose KV was copied back from the host's memory.
    pub swapped_in_tokens: u64,
    /// Tokens whose KV was loaded from the host tier.
    pub loaded_tokens: u64,
    /// Steps run.
    pub steps: u64,
}

/// An engine's load at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Load {
    /// Requests in the queue.
    pub waiting: u32,
    /// Requests in the batch.
    pub running: u32,
    /// Share of the KV memory in use by running requests, 0 to 1. It may exceed 1 under reserving
    /// admission, where one request always runs.
    pub kv_usage: f64,
    /// Prompt tokens that the running requests have yet to compute.
    pub remaining_prefill_tokens: u64,
    /// Prompt and output tokens of the sequences that decode.
    pub context_tokens: u64,
    /// Tokens whose KV waits in the host's memory.
    pub host_tokens: u64,
    /// Counts since the engine began.
    pub counters: Counters,
}
