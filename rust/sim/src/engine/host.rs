//! The host-memory tier: a copy of the GPU's KV blocks in the host's memory, as vLLM's
//! `OffloadingConnector` keeps it.
//!
//! Every block is copied to the host when it is computed (write-through), and the host drops the
//! least recently used blocks. A request whose prompt has more leading blocks in the host than on
//! the GPU loads them before its prefill. Its blocks on the GPU are allocated at once. It waits
//! outside of the queue while they are copied, and other requests run. Loads take turns on the
//! instance's link, in the order in which they begin. The link's other direction has room for all
//! copies to the host: a step makes few tokens, compared with the link's speed.
//!
//! Loaded blocks stay allocated until the request is admitted. If a running request finds no free
//! block, the last request in the queue that holds loaded blocks gives them up, and loads them
//! again later.
use super::order::Order;
use super::{Admission, Engine};
use crate::cache::PrefixCache;
use crate::sequence::State;
use lmetric_core::CoreError;
use lmetric_core::ids::Seconds;
use lmetric_core::kv::tier::Tier;
use std::collections::VecDeque;

/// The constants of a host-memory tier.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct HostTier {
    /// Blocks that the host holds, relative to the GPU's.
    pub capacity_ratio: f64,
    /// Seconds to load one token's KV to the GPU.
    pub seconds_per_token: Seconds,
    /// Seconds that the instance's next step takes longer, relative to the seconds of a load that
    /// begins before it.
    pub step_ratio: f64,
}

impl HostTier {
    /// Checks the settings.
    ///
    /// # Errors
    /// `BadValue` for a setting out of its range, an admission without blocks, or a local order
    /// that preempts.
    pub fn check(&self, admission: Admission, order: &Order) -> Result<(), CoreError> {
        let bad = |what: &str, got: String, expected: &str| {
            Err(CoreError::BadValue { what: format!("host_tier: {what}"), got, expected: expected.into() })
        };
        for (what, value, least, most) in [
            ("capacity", self.capacity_ratio, 1e-6, 1e6),
            ("seconds to load a token", self.seconds_per_token, 0.0, 1e3),
            ("step_ratio", self.step_ratio, 0.0, 1.0),
        ] {
            if !(value >= least && value <= most) {
                return bad(what, value.to_string(), &format!("{least} to {most}"));
            }
        }
        if admission != Admission::Vllm {
            return bad("admission", "reserve".into(), "vllm: only there are blocks that could be loaded");
        }
        if order.preempts() {
            return bad("local_order", order.text().into(), "one that does not preempt, such as fcfs");
        }
        Ok(())
    }

    /// Returns the blocks that the host holds beside a GPU with `cache_blocks` blocks.
    fn blocks(&self, cache_blocks: u32) -> u32 {
        (self.capacity_ratio * f64::from(cache_blocks)).round().clamp(1.0, f64::from(1 << 30)) as u32
    }
}

/// The state of an engine's host tier.
#[derive(Clone, Debug)]
pub(super) struct Host {
    tier: HostTier,
    cache: PrefixCache,
    /// Time until which the link is busy.
    link_free: Seconds,
    /// Loads under way, in order: (end, slot, order).
    loading: VecDeque<(Seconds, u32, u64)>,
    /// Queued requests that hold loaded blocks: (slot, order).
    loaded: Vec<(u32, u64)>,
}

impl Host {
    pub fn new(tier: HostTier, cache_blocks: u32) -> Host {
        Host {
            tier,
            cache: PrefixCache::new(tier.blocks(cache_blocks), Tier::Cpu),
            link_free: 0.0,
            loading: VecDeque::new(),
            loaded: Vec::new(),
        }
    }
}

/// The host tier's part in the admission of a queued request that was looked up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Loading {
    /// Nothing that the GPU does not have.
    Nothing,
    /// A load has begun: the request has left the queue.
    Begun,
    /// A load would need blocks or a slot that are not free.
    NoRoom,
}

impl Engine {
    /// Returns the end of the first load under way: the engine may have something to do then, even
    /// if no step runs.
    pub fn next_load(&self) -> Option<Seconds> {
        self.host.as_ref()?.loading.front().map(|&(end, ..)| end)
    }

    /// Copies the first `full` blocks of a request to the host.
    pub(super) fn write_through(&mut self, slot: u32, full: usize) {
        let Some(host) = &mut self.host else { return };
        let sequence = &self.sequences[slot];
        let chain = &sequence.chain[..full];
        let (found, kept) = host.cache.insert(chain, &mut self.kv);
        if found < kept {
            let parent = found.checked_sub(1).map(|last| chain[last]);
            self.kv.stored(Tier::Cpu, parent, &chain[found..kept], &[], sequence.salt.as_ref());
        }
    }

    /// Begins to load the blocks of the next request in the queue, which was looked up, if the host
    /// has more of them.
    pub(super) fn load_from_host(&mut self, slot: u32) -> Loading {
        let Some(host) = &mut self.host else { return Loading::Nothing };
        let (sequence, block) = (&self.sequences[slot], self.profile.block_tokens);
        if !sequence.blocks.is_empty() {
            return Loading::Nothing;
        }
        let most = ((sequence.total - 1) / block) as usize;
        let chain = &sequence.chain[..sequence.chain.len().min(most)];
        let on_gpu = self.found.iter().map(|piece| piece.blocks as usize).sum::<usize>();
        let in_host = host.cache.find(chain);
        if in_host as u32 * block <= sequence.fetched.max(on_gpu as u32 * block) {
            return Loading::Nothing;
        }
        let pinned = self.pool.free_among(&self.found) as usize;
        let new = in_host - on_gpu;
        let running = (self.prefilling.len() + self.decoding.len() + self.paused.len()) as u32;
        if running == self.profile.max_sequences || (self.pool.free() as usize) < pinned + new {
            return Loading::NoRoom;
        }
        host.cache.touch(&chain[..in_host]);
        let seconds = host.tier.seconds_per_token * new as f64 * f64::from(block);
        host.link_free = host.link_free.max(self.begun) + seconds;
        host.loading.push_back((host.link_free, slot, sequence.order));
        self.held_seconds += host.tier.step_ratio * seconds;
        self.waiting.pop();
        let sequence = &mut self.sequences[slot];
        sequence.state = State::Loading;
        self.pool.share(&self.found, &mut sequence.blocks);
        self.pool.take(new as u32, &mut sequence.blocks, &mut self.kv);
        Loading::Begun
    }

    /// Puts the requests whose loads have ended by `now` back into the queue, with their blocks.
    pub(super) fn end_loads(&mut self, now: Seconds) {
        while let Some(host) = &mut self.host
            && let Some(&(_, slot, order)) = host.loading.front().filter(|&&(end, ..)| end <= now)
        {
            host.loading.pop_front();
            let sequence = &mut self.sequences[slot];
            if (sequence.state, sequence.order) != (State::Loading, order) {
                continue; // aborted while it was loaded
            }
            host.loaded.push((slot, order));
            let (from, to) = (sequence.blocks.named(), sequence.blocks.len());
            self.pool.name(&mut sequence.blocks, &sequence.chain[from..to]);
            let block = self.profile.block_tokens;
            let range = from * block as usize..to * block as usize;
            let tokens = sequence.tokens.get(range).unwrap_or_default();
            let parent = from.checked_sub(1).map(|i| sequence.chain[i]);
            self.kv.stored(Tier::Gpu, parent, &sequence.chain[from..to], tokens, sequence.salt.as_ref());
            sequence.state = State::Waiting;
            sequence.loaded = (to - from) as u32 * block;
            self.counters.loaded_tokens += u64::from(sequence.loaded);
            self.enqueue_by_rank(slot);
        }
    }

    /// Takes back the blocks of the last request in the queue that holds loaded blocks, except
    /// `kept`. Returns false if there is none.
    pub(super) fn take_loaded_back(&mut self, kept: u32) -> bool {
        let Some(host) = &mut self.host else { return false };
        let rank = |&(slot, order): &(u32, u64)| (slot != kept).then(|| (self.sequences[slot].rank, order));
        let Some(last) = host.loaded.iter().copied().filter(|h| rank(h).is_some()).max_by_key(rank) else {
            return false;
        };
        self.release_loaded(last.0);
        true
    }

    /// Releases the blocks that a request holds while it waits or loads, the last first.
    pub(super) fn release_loaded(&mut self, slot: u32) {
        self.forget_loaded(slot);
        let sequence = &mut self.sequences[slot];
        sequence.loaded = 0;
        self.pool.release(&mut sequence.blocks);
    }

    /// Drops a request from those that hold loaded blocks while they wait.
    pub(super) fn forget_loaded(&mut self, slot: u32) {
        if let Some(host) = &mut self.host {
            host.loaded.retain(|&(other, _)| other != slot);
        }
    }

    /// Whether blocks are on their way from the host.
    pub(super) fn loads(&self) -> bool {
        self.host.as_ref().is_some_and(|host| !host.loading.is_empty())
    }
}
