//! The plan of the next step: room for running requests, then for waiting ones.
use super::host::Loading;
use super::order::{Composition, Job};
use super::{Admission, Chunk, Engine, prompt_blocks};
use crate::events::Admitted;
use crate::gaps::Makes;
use crate::profile::StepWork;
use crate::sequence::State;
use lmetric_core::ids::Seconds;
use lmetric_core::kv::tier::Tier;
use std::cmp::Reverse;

/// Resources that preempted requests free.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Freed {
    pub requests: u32,
    /// Freed requests that decode: each frees a token of the budget.
    pub decodes: u32,
    pub tokens: u64,
    pub blocks: u32,
}

impl Engine {
    /// Returns the work of the step, as planned so far.
    pub(super) fn planned(&self) -> StepWork {
        let mut work = StepWork {
            decode_sequences: self.decoding.len() as u32,
            context_tokens: self.context_tokens,
            ..Default::default()
        };
        for chunk in &self.chunks {
            if self.decodes(chunk) {
                work.decode_sequences += 1;
                work.context_tokens += u64::from(self.sequences[chunk.slot].total);
            } else {
                work.add_prefill(chunk.before, chunk.tokens);
            }
        }
        work
    }

    /// Returns the kind of tokens with the strictest SLO among the step's decodes, as planned so
    /// far.
    fn makes(&self) -> Makes {
        let fetched = self.chunks.iter().any(|chunk| {
            let sequence = &self.sequences[chunk.slot];
            self.decodes(chunk) && sequence.prefill_makes() == Makes::Answer
        });
        if self.answering > 0 || fetched { Makes::Answer } else { Makes::Thoughts }
    }

    /// Returns the longest time of the step, as planned so far: the shortest SLO of its decodes.
    fn allowed_seconds(&self, composition: &dyn Composition) -> Seconds {
        if self.own_slos == 0 {
            return composition.seconds(self.makes());
        }
        let own =
            |slot: u32, makes| self.sequences[slot].own_slo.unwrap_or_else(|| composition.seconds(makes));
        let decoding = self.decoding.iter().map(|&slot| own(slot, self.sequences[slot].makes(self.tick)));
        let fetched = self.chunks.iter().filter(|chunk| self.decodes(chunk));
        let fetched = fetched.map(|chunk| own(chunk.slot, self.sequences[chunk.slot].prefill_makes()));
        decoding.chain(fetched).fold(Seconds::INFINITY, Seconds::min)
    }

    /// Whether the rest of a chunk's prompt came from another engine: then it computes what a
    /// decode computes.
    pub(super) fn decodes(&self, chunk: &Chunk) -> bool {
        let sequence = &self.sequences[chunk.slot];
        sequence.fetched > 0 && chunk.tokens == 1 && chunk.before + 1 == sequence.total
    }

    /// Returns how many of `most` tokens of a prompt, behind `before`, the order lets this step
    /// take.
    pub(super) fn share(&self, before: u32, most: u32) -> u32 {
        match self.settings.order.rules().composition() {
            Some(composition) => {
                let seconds = self.allowed_seconds(composition);
                composition.prefill_tokens(&self.profile, &self.planned(), seconds, before, most)
            }
            None => most,
        }
    }

    /// Gives each sequence that crosses a block edge its new block. The block just filled can be
    /// found from now on.
    pub(super) fn grow_decodes(&mut self) {
        if self.settings.admission != Admission::Vllm {
            return;
        }
        let phase = (self.tick % u64::from(self.profile.block_tokens)) as usize;
        let mut i = 0;
        while let Some(&slot) = self.crossings[phase].get(i) {
            let preempted = self.events.preempted.len();
            let total = self.sequences[slot].total_at(self.tick);
            self.name_blocks(slot, total - 1);
            self.grow(slot, total);
            // A preemption may have moved any sequence: restart (grown sequences stay grown).
            i = if self.events.preempted.len() > preempted { 0 } else { i + 1 };
        }
    }

    /// Shares the token budget left by the decodes among the running prefills, in order.
    pub(super) fn plan_prefills(&mut self) {
        self.chunks.clear();
        let mut i = 0;
        while let Some(&slot) = self.prefilling.get(i) {
            let preempted = self.events.preempted.len();
            let sequence = &self.sequences[slot];
            let (before, order) = (sequence.computed, sequence.order);
            let tokens = self.share(before, (sequence.total - before).min(self.budget()));
            if tokens == 0 {
                break;
            }
            if self.settings.admission == Admission::Vllm {
                self.grow(slot, before + tokens);
            }
            if self.events.preempted.len() > preempted {
                self.chunks.clear();
                i = 0;
                continue;
            }
            self.chunks.push(Chunk { slot, order, before, tokens });
            i += 1;
        }
        for i in 0..self.chunks.len() {
            let Chunk { slot, before, tokens, .. } = self.chunks[i];
            self.name_blocks(slot, before + tokens);
        }
    }

    /// Takes requests off the queue while there is room.
    pub(super) fn admit_waiting(&mut self) {
        let vllm = self.settings.admission == Admission::Vllm && self.host.is_none();
        while let Some((.., slot)) = self.next_waiting() {
            if vllm && self.budget() == 0 {
                break; // nothing fits, so what is cached need not be known
            }
            self.look_up(slot);
            let loading = self.load_from_host(slot);
            if loading == Loading::Begun {
                continue;
            }
            if loading == Loading::NoRoom || !self.fits(slot, Freed::default()) {
                // Queued requests may hold all blocks, and nothing runs that could free one.
                let stuck = self.running() == 0 && !self.loads();
                if stuck && self.take_loaded_back(slot) {
                    continue;
                }
                break;
            }
            self.waiting.pop();
            self.admit(slot);
        }
    }

    /// Returns (rank, order, slot) of the next request in the queue.
    pub(super) fn next_waiting(&mut self) -> Option<(i64, u64, u32)> {
        while let Some(&Reverse(next @ (_, order, slot))) = self.waiting.peek() {
            let sequence = &self.sequences[slot];
            if (sequence.state, sequence.order) == (State::Waiting, order) {
                return Some(next);
            }
            self.waiting.pop();
        }
        None
    }

    /// Returns the prompt tokens to compute of waiting and running requests, without tokens of
    /// waiting requests that the cache holds now.
    pub fn prefill_tokens(&self) -> u64 {
        let waiting = self.waiting.iter().map(|Reverse((_, order, slot))| (*order, *slot));
        let incoming = self.incoming.iter().map(|(_, slot, order)| (*order, *slot));
        let uncached = waiting.chain(incoming).filter_map(|(order, slot)| {
            let sequence = &self.sequences[slot];
            let is_there = (sequence.state, sequence.order) == (State::Waiting, order);
            let hit = || self.hit_tokens(&sequence.chain, sequence.prompt_tokens);
            is_there.then(|| u64::from(sequence.total.saturating_sub(hit())))
        });
        uncached.sum::<u64>() + self.load().remaining_prefill_tokens
    }

    /// Puts a request into the queue.
    pub(super) fn enqueue(&mut self, slot: u32) {
        let steps = self.counters.steps;
        let sequence = &mut self.sequences[slot];
        sequence.queued_step = steps;
        if let Some(after) = self.settings.order.rules().promotes_after() {
            self.promotions.push_back((steps + u64::from(after), slot, sequence.order));
        }
        self.enqueue_by_rank(slot);
    }

    /// Ranks the queue again if a request has waited long enough for another rank.
    pub(super) fn promote(&mut self) {
        let steps = self.counters.steps;
        let mut due = false;
        while let Some(&(_, slot, order)) = self.promotions.front().filter(|&&(at, ..)| at <= steps) {
            self.promotions.pop_front();
            let sequence = &self.sequences[slot];
            due |= (sequence.state, sequence.order) == (State::Waiting, order);
        }
        if due {
            self.rank_waiting();
        }
    }

    /// Puts a waiting request into the queue, by its current rank.
    pub(super) fn enqueue_by_rank(&mut self, slot: u32) {
        let rank = self.settings.order.rules().rank(&self.job(slot));
        let sequence = &mut self.sequences[slot];
        sequence.rank = rank;
        self.waiting.push(Reverse((rank, sequence.order, slot)));
    }

    /// Ranks the queue again.
    pub(super) fn rank_waiting(&mut self) {
        for Reverse((_, order, slot)) in std::mem::take(&mut self.waiting) {
            let sequence = &self.sequences[slot];
            if (sequence.state, sequence.order) == (State::Waiting, order) {
                self.enqueue_by_rank(slot);
            }
        }
    }

    /// Returns (rank, order) of a running request: lower runs earlier, higher is preempted first.
    /// The rank changes only in orders that revise it.
    pub(super) fn rank(&self, slot: u32) -> (i64, u64) {
        let rules = self.settings.order.rules();
        let sequence = &self.sequences[slot];
        let rank = if rules.revises() { rules.rank(&self.job(slot)) } else { sequence.rank };
        (rank, sequence.order)
    }

    /// Returns the values of a request that the order may read.
    pub(super) fn job(&self, slot: u32) -> Job<'_> {
        let sequence = &self.sequences[slot];
        let context = sequence.total_at(self.tick);
        let computed = match sequence.state {
            State::Decode | State::Paused => context - 1,
            State::Prefill => sequence.computed,
            _ if self.settings.order.rules().reads_cache() => {
                self.before(slot, self.hit_tokens(&sequence.chain, context))
            }
            _ => 0,
        };
        let running = sequence.state != State::Waiting;
        let attained = if running { computed.saturating_sub(sequence.spared) } else { 0 };
        Job {
            profile: &self.profile,
            id: sequence.id,
            priority: sequence.priority,
            output_tokens: sequence.output_tokens,
            made: context - sequence.prompt_tokens,
            context,
            computed,
            spared: if sequence.cached.is_none() { computed } else { sequence.spared },
            attained: attained.max(sequence.attained),
            attained_before: sequence.attained,
            waited_steps: if running {
                sequence.waited_steps
            } else {
                self.counters.steps - sequence.queued_step
            },
            served_steps: if running {
                self.counters.steps - sequence.waited_steps - sequence.queued_step
            } else {
                0
            },
            arrival_seconds: sequence.arrival,
            learned: &self.learned,
        }
    }

    /// Admits a request that was taken off the queue, and for which there is room, with the blocks
    /// found for it.
    pub(super) fn admit(&mut self, slot: u32) {
        let block = self.profile.block_tokens;
        let hit = match self.settings.admission {
            Admission::Vllm => self.take_blocks(slot),
            Admission::Reserve => {
                let sequence = &self.sequences[slot];
                let found = self.cache.touch(prompt_blocks(&sequence.chain, sequence.total, block));
                (found as u32 * block).min(sequence.total - 1)
            }
        };
        self.waiting_requests -= 1;
        self.sequences[slot].waited_steps = self.counters.steps - self.sequences[slot].queued_step;
        let before = self.before(slot, hit);
        let tokens = self.share(before, (self.sequences[slot].total - before).min(self.budget()));
        self.prefilling.push(slot);
        let sequence = &mut self.sequences[slot];
        let (order, total) = (sequence.order, sequence.total);
        if tokens > 0 {
            self.chunks.push(Chunk { slot, order, before, tokens });
        }
        self.prefilling_tokens += u64::from(total);
        (sequence.state, sequence.computed, sequence.plan) = (State::Prefill, before, self.plan);
        let first_time = sequence.cached.is_none();
        if first_time {
            (sequence.cached, sequence.spared) = (Some(hit), before);
            self.counters.prefix_cache_queries += u64::from(total);
            self.counters.prefix_cache_hits += u64::from(hit);
            self.counters.fetched_prompt_tokens += u64::from(before - hit);
        }
        if first_time && sequence.report_cached && hit >= block {
            let blocks = (hit / block) as usize;
            let tokens = sequence.tokens.get(..blocks * block as usize).unwrap_or_default();
            self.kv.stored(Tier::Gpu, None, &sequence.chain[..blocks], tokens, sequence.salt.as_ref());
        }
        let fetched_tokens = before - hit;
        let (id, loaded_tokens) = (sequence.id, std::mem::take(&mut sequence.loaded));
        self.leave_host(slot, fetched_tokens);
        self.events.admitted.push(Admitted {
            id,
            cached_tokens: hit,
            fetched_tokens,
            loaded_tokens,
            first_time,
        });
        self.name_blocks(slot, before + tokens);
    }

    /// Returns the leading tokens of a waiting request that need not be computed if `hit` tokens
    /// are cached, including fetched tokens, but never the last token.
    fn before(&self, slot: u32, hit: u32) -> u32 {
        let sequence = &self.sequences[slot];
        hit.max(sequence.fetched).min(sequence.total - 1)
    }

    /// Looks up the cached blocks of a waiting request, as far as its admission needs them.
    pub(super) fn look_up(&mut self, slot: u32) {
        self.found.clear();
        if self.settings.admission == Admission::Vllm {
            let sequence = &self.sequences[slot];
            // It may hold blocks that were loaded from the host tier.
            let (held, most) =
                (sequence.blocks.len(), ((sequence.total - 1) / self.profile.block_tokens) as usize);
            let chain = &sequence.chain[..sequence.chain.len().min(most)];
            self.found.extend(self.pool.find(chain.get(held..).unwrap_or_default()));
        }
    }

    /// Whether a waiting request that was looked up fits, once `freed` is free. It needs a slot in
    /// the batch, and memory for its prompt (reserving) or for its first chunk of at least one
    /// token (vLLM).
    pub(super) fn fits(&self, slot: u32, freed: Freed) -> bool {
        let (sequence, block) = (&self.sequences[slot], self.profile.block_tokens);
        let running = self.running() - freed.requests;
        // An order that ranks decodes bounds the batch, not the requests in memory.
        if running == self.profile.max_sequences && !self.settings.order.rules().ranks_decodes() {
            return false;
        }
        match self.settings.admission {
            Admission::Vllm => {
                let (tokens, new) = self.first_blocks(slot, self.budget() + freed.decodes);
                let pinned = self.pool.free_among(&self.found);
                tokens > 0 && self.pool.free() + freed.blocks >= pinned + new
            }
            Admission::Reserve => {
                let capacity = u64::from(self.profile.cache_blocks) * u64::from(block);
                running == 0 || self.running_tokens() - freed.tokens + u64::from(sequence.total) <= capacity
            }
        }
    }

    /// Returns, for a waiting request that was looked up, the tokens of its first chunk, and the
    /// blocks it needs beside those found.
    fn first_blocks(&self, slot: u32, budget: u32) -> (u32, u32) {
        let found: u32 = self.found.iter().map(|piece| piece.blocks).sum();
        let found = found + self.sequences[slot].blocks.len() as u32;
        let block = self.profile.block_tokens;
        let before = self.before(slot, found * block);
        let tokens = self.share(before, (self.sequences[slot].total - before).min(budget));
        (tokens, (before + tokens).div_ceil(block) - found)
    }

    /// Takes the blocks found for a waiting request, and blocks for fetched tokens and its first
    /// chunk. Returns the hit in tokens.
    fn take_blocks(&mut self, slot: u32) -> u32 {
        let (_, new) = self.first_blocks(slot, self.budget());
        let sequence = &mut self.sequences[slot];
        self.pool.share(&self.found, &mut sequence.blocks);
        let held = sequence.blocks.len() as u32;
        self.pool.take(new, &mut sequence.blocks, &mut self.kv);
        self.forget_loaded(slot);
        held * self.profile.block_tokens
    }

    /// Returns the steps until a sequence ends, finishes reasoning or needs a block.
    pub(super) fn alike_steps(&mut self) -> u32 {
        let end = loop {
            let Some(&Reverse((end, order, slot))) = self.ends.peek() else { break self.tick + 1 };
            if self.ends_at(slot, order, end) {
                break end;
            }
            self.ends.pop();
        };
        // When reasoning ends, gaps count against another SLO from then on.
        let thoughts = loop {
            let Some(&Reverse((tick, order, slot))) = self.answers.peek() else { break end };
            if self.answers_at(slot, order, tick) {
                break tick;
            }
            self.answers.pop();
        };
        let mut most = u32::try_from(end.min(thoughts) - self.tick).unwrap_or(u32::MAX);
        if self.settings.admission == Admission::Vllm {
            let block = u64::from(self.profile.block_tokens);
            let edge =
                (1..=block).find(|ahead| !self.crossings[((self.tick + ahead) % block) as usize].is_empty());
            most = most.min(edge.unwrap_or(block) as u32);
        }
        if let Some(&(at, ..)) = self.promotions.front() {
            most = most.min(u32::try_from(at.saturating_sub(self.counters.steps)).unwrap_or(u32::MAX).max(1));
        }
        most.min(self.firm_steps())
    }

    /// Allocates blocks until the sequence has room for `tokens` tokens. If none is left, preempts
    /// the last in rank, maybe the sequence itself. Under an order that ranks decodes, requests
    /// that the step has picked already are not preempted.
    pub(super) fn grow(&mut self, slot: u32, tokens: u32) {
        let needed = tokens.div_ceil(self.profile.block_tokens) as usize;
        while self.sequences[slot].blocks.len() < needed {
            let held = &mut self.sequences[slot].blocks;
            let more = (needed - held.len()) as u32;
            match self.pool.take(more, held, &mut self.kv) {
                1.. => {}
                0 if self.take_loaded_back(slot) => {}
                0 => {
                    let running = self.prefilling.iter().chain(&self.decoding).chain(&self.paused);
                    let ranked = self.settings.order.rules().ranks_decodes();
                    let picked = |slot| ranked && self.sequences[slot].plan == self.plan;
                    let victim =
                        *running.max_by_key(|&&slot| (!picked(slot), self.last(slot))).unwrap_or(&slot);
                    self.counters.out_of_memory += 1;
                    self.preempt(victim);
                    if victim == slot {
                        return;
                    }
                }
            }
        }
    }
}

/// Returns the largest number of steps, 1 to `most`, whose last step begins before `horizon`.
/// `lasting(n)` is the length of `n` steps: the first `first`, each further one `more` longer than
/// the one before.
pub(super) fn steps_within(
    horizon: f64,
    first: f64,
    more: f64,
    most: u32,
    lasting: impl Fn(u32) -> f64,
) -> u32 {
    if horizon.is_nan() || horizon <= first || most <= 1 {
        return 1;
    }
    if horizon >= lasting(most) {
        return most;
    }
    // Root of first x + more x (x - 1) / 2 = horizon in a form without cancellation; then corrected
    // for rounding.
    let half = first - more / 2.0;
    let root = 2.0 * horizon / (half + (half * half + 2.0 * more * horizon).sqrt());
    let mut begun = (root as u32).min(most - 1);
    while begun > 0 && lasting(begun) >= horizon {
        begun -= 1;
    }
    while begun + 1 < most && lasting(begun + 1) < horizon {
        begun += 1;
    }
    begun + 1
}
