//! The end of a step: its results, and the engine's counts.
use super::{Admission, Chunk, Engine, Step, prompt_blocks};
use crate::events::{Prefilled, Token};
use crate::gaps::{GapHistogram, Gaps, Makes};
use crate::hash;
use crate::sequence::State;
use lmetric_core::kv::tier::Tier;
use std::cmp::Reverse;

impl Engine {
    pub(super) fn finish_decodes(&mut self, step: &Step) {
        let steps = step.steps;
        let made = self.decoding.len() as u64 * u64::from(steps);
        self.tick += u64::from(steps);
        self.gaps.steps(self.tick, self.decoding.len(), step.first, step.more, steps);
        self.count_pauses();
        self.context_tokens += made;
        self.counters.generation_tokens += made;
        if let Some(generator) = &self.generator {
            for &slot in &self.decoding {
                let sequence = &mut self.sequences[slot];
                let token = generator.next(sequence.read);
                sequence.read.read(token);
                sequence.tokens.push(token);
                let last = sequence.end == self.tick;
                self.events.tokens.push(Token { id: sequence.id, token, from_prefill: false, last });
            }
        }
        while let Some(&Reverse((tick, order, slot))) =
            self.answers.peek().filter(|next| next.0.0 <= self.tick)
        {
            self.answers.pop();
            if self.answers_at(slot, order, tick) {
                self.answer(slot);
            }
        }
        while let Some(&Reverse((end, order, slot))) = self.ends.peek() {
            if end > self.tick {
                break;
            }
            self.ends.pop();
            if self.ends_at(slot, order, end) {
                self.finish(slot);
            }
        }
    }

    /// Whether an entry of `ends` is still valid.
    pub(super) fn ends_at(&self, slot: u32, order: u64, end: u64) -> bool {
        let sequence = &self.sequences[slot];
        (sequence.state, sequence.order, sequence.end) == (State::Decode, order, end)
    }

    /// Whether an entry of `answers` is still valid.
    pub(super) fn answers_at(&self, slot: u32, order: u64, tick: u64) -> bool {
        let sequence = &self.sequences[slot];
        (sequence.state, sequence.order, sequence.answers) == (State::Decode, order, tick)
    }

    /// Ends the reasoning of a request; from now on its gaps count against the answer's SLO.
    fn answer(&mut self, slot: u32) {
        let sequence = &mut self.sequences[slot];
        sequence.gaps.slow += self.gaps.slow_since(Makes::Thoughts, sequence.slow_mark);
        sequence.slow_mark = self.gaps.mark(Makes::Answer);
        // A request that was preempted and came back may have two entries of the same tick.
        sequence.answers = 0;
        self.answering += 1;
    }

    pub(super) fn finish_prefills(&mut self) {
        for i in 0..self.chunks.len() {
            let chunk = self.chunks[i];
            let Chunk { slot, order, tokens, .. } = chunk;
            let sequence = &self.sequences[slot];
            if (sequence.state, sequence.order) != (State::Prefill, order) {
                continue; // aborted while the step ran
            }
            let decodes = self.decodes(&chunk);
            let sequence = &mut self.sequences[slot];
            sequence.computed += tokens;
            let done = sequence.computed == sequence.total;
            self.events.prefilled.push(Prefilled { id: sequence.id, tokens, done, decodes });
            if done {
                self.finish_prefill(slot);
            }
        }
        self.chunks.clear();
    }

    /// Ends a prefill: the prompt's blocks are there, and so is an output token.
    pub(super) fn finish_prefill(&mut self, slot: u32) {
        if self.settings.admission == Admission::Reserve {
            self.cache_prompt(slot);
        }
        self.prefilling.retain(|&other| other != slot);
        let sequence = &mut self.sequences[slot];
        self.prefilling_tokens -= u64::from(sequence.total);
        if sequence.total == sequence.prompt_tokens {
            self.counters.prompt_tokens += u64::from(sequence.prompt_tokens);
            self.counters.cached_prompt_tokens += u64::from(sequence.cached.unwrap_or(0));
        }
        let made = sequence.prefill_makes();
        sequence.total += 1;
        let left = sequence.prompt_tokens + sequence.output_tokens - sequence.total;
        self.counters.generation_tokens += 1;
        if let Some(generator) = &self.generator {
            let token = generator.next(sequence.read);
            sequence.read.read(token);
            sequence.tokens.push(token);
            self.events.tokens.push(Token { id: sequence.id, token, from_prefill: true, last: left == 0 });
        }
        self.enter_decodes(slot);
        if let Some(before) = self.sequences[slot].last_token.take() {
            let waited = self.events.end - before;
            let gap = self.gaps.single(waited, made);
            let sequence = &mut self.sequences[slot];
            sequence.gaps = sequence.gaps.and(gap);
            sequence.waited = Some((self.tick, GapHistogram::place(waited)));
        }
        if left == 0 {
            self.finish(slot);
        } else {
            self.ends.push(Reverse((self.sequences[slot].end, self.sequences[slot].order, slot)));
        }
    }

    /// Lets a sequence decode: from the next step on it gets a token in every step.
    pub(super) fn enter_decodes(&mut self, slot: u32) {
        let sequence = &mut self.sequences[slot];
        let (total, order) = (sequence.total, sequence.order);
        let thoughts = (sequence.prompt_tokens + sequence.think_tokens).saturating_sub(total);
        let left = sequence.prompt_tokens + sequence.output_tokens - total;
        (sequence.state, sequence.since, sequence.end) =
            (State::Decode, self.tick, self.tick + u64::from(left));
        sequence.at = self.decoding.len() as u32;
        self.decoding.push(slot);
        self.context_tokens += u64::from(total);
        let phase = self.crossing_phase(slot);
        self.sequences[slot].crossing_at = self.crossings[phase].len() as u32;
        self.crossings[phase].push(slot);
        let sequence = &mut self.sequences[slot];
        sequence.answers = match thoughts {
            0 => self.tick,
            thoughts if thoughts < left => self.tick + u64::from(thoughts),
            _ => u64::MAX,
        };
        let makes = sequence.makes(self.tick);
        sequence.slow_mark = self.gaps.mark(makes);
        match makes {
            Makes::Answer => self.answering += 1,
            Makes::Thoughts if thoughts < left => self.answers.push(Reverse((sequence.answers, order, slot))),
            Makes::Thoughts => {}
        }
    }

    /// Reserving admission: puts all blocks of the prompt into the cache, the first as the most
    /// recently used.
    pub(super) fn cache_prompt(&mut self, slot: u32) {
        let (sequence, block) = (&self.sequences[slot], self.profile.block_tokens);
        let chain = prompt_blocks(&sequence.chain, sequence.prompt_tokens, block);
        let (found, kept) = self.cache.insert(chain, &mut self.kv);
        if found < kept {
            let block = block as usize;
            let tokens = sequence.tokens.get(found * block..kept * block).unwrap_or_default();
            let parent = found.checked_sub(1).map(|last| chain[last]);
            self.kv.stored(Tier::Gpu, parent, &chain[found..kept], tokens, sequence.salt.as_ref());
        }
    }

    /// Ends a request that has its last token.
    pub(super) fn finish(&mut self, slot: u32) {
        self.events.finished.push(self.sequences[slot].id);
        let sequence = &self.sequences[slot];
        self.learned.ended(self.events.end - sequence.arrival, sequence.output_tokens);
        self.events.gaps.push(self.gaps_of(slot));
        let waited = self.sequences[slot].waited.filter(|(tick, _)| *tick == self.tick);
        self.events.last_bins.push(waited.map_or(self.gaps.latest(), |(_, bin)| bin));
        self.name_blocks(slot, self.sequences[slot].total_at(self.tick) - 1);
        self.unplace(slot);
        self.forget(slot);
        self.counters.finished += 1;
    }

    /// Returns the gaps between a request's tokens so far.
    pub(super) fn gaps_of(&self, slot: u32) -> Gaps {
        let sequence = &self.sequences[slot];
        match sequence.state {
            State::Decode => {
                let makes = sequence.makes(self.tick);
                sequence.gaps.and(self.gaps.since(sequence.since, makes, sequence.slow_mark))
            }
            _ => sequence.gaps,
        }
    }

    pub(super) fn running_tokens(&self) -> u64 {
        self.prefilling_tokens + self.context_tokens + self.paused_tokens
    }

    /// Returns the tokens of the budget that this step's decodes and chunks leave so far.
    pub(super) fn budget(&self) -> u32 {
        let planned: u32 = self.chunks.iter().map(|chunk| chunk.tokens).sum();
        let ranked = self.settings.order.rules().ranks_decodes();
        let decodes = if ranked { self.picked } else { self.decoding.len() as u32 };
        self.profile.max_batch_tokens - decodes - planned
    }

    pub(super) fn crossing_phase(&self, slot: u32) -> usize {
        let (sequence, block) = (&self.sequences[slot], u64::from(self.profile.block_tokens));
        let ahead = (block - u64::from(sequence.total - 1) % block) % block;
        ((sequence.since + ahead) % block) as usize
    }

    /// Makes the full blocks among the first `computed` tokens available to other requests.
    pub(super) fn name_blocks(&mut self, slot: u32, computed: u32) {
        if self.settings.admission == Admission::Reserve {
            return;
        }
        let block = self.profile.block_tokens as usize;
        let sequence = &mut self.sequences[slot];
        if !sequence.tokens.is_empty() {
            let computed = &sequence.tokens[..sequence.tokens.len().min(computed as usize)];
            hash::extend(sequence.root, block, computed, &mut self.bytes, &mut sequence.chain);
        }
        let full = computed as usize / block;
        // Without tokens, blocks past the chain (the answer's among them) get hashes of this
        // request alone. They age in the cache like other blocks, and the request finds them again
        // after a preemption.
        while sequence.chain.len() < full {
            let previous = sequence.chain.last().copied().unwrap_or(sequence.root);
            sequence.chain.push(hash::own(previous, sequence.id));
        }
        let named = sequence.blocks.named();
        if full <= named {
            return;
        }
        self.pool.name(&mut sequence.blocks, &sequence.chain[named..full]);
        let parent = named.checked_sub(1).map(|i| sequence.chain[i]);
        let tokens = sequence.tokens.get(named * block..full * block).unwrap_or_default();
        self.kv.stored(Tier::Gpu, parent, &sequence.chain[named..full], tokens, sequence.salt.as_ref());
        self.write_through(slot, full);
    }

    /// Removes a running sequence from the batch and releases its blocks, the last first.
    pub(super) fn unplace(&mut self, slot: u32) {
        let (state, total) = (self.sequences[slot].state, self.sequences[slot].total_at(self.tick));
        match state {
            State::Decode => self.leave_decodes(slot),
            State::Paused => self.leave_paused(slot),
            _ => {
                self.prefilling.retain(|&other| other != slot);
                self.prefilling_tokens -= u64::from(total);
            }
        }
        let sequence = &mut self.sequences[slot];
        sequence.total = total;
        self.pool.release(&mut sequence.blocks);
    }

    /// Removes a sequence from those that get a token in every step.
    pub(super) fn leave_decodes(&mut self, slot: u32) {
        self.context_tokens -= u64::from(self.sequences[slot].total_at(self.tick));
        self.answering -= u32::from(self.sequences[slot].makes(self.tick) == Makes::Answer);
        let phase = self.crossing_phase(slot);
        let (at, crossing_at) = (self.sequences[slot].at, self.sequences[slot].crossing_at);
        self.decoding.swap_remove(at as usize);
        if let Some(&moved) = self.decoding.get(at as usize) {
            self.sequences[moved].at = at;
        }
        self.crossings[phase].swap_remove(crossing_at as usize);
        if let Some(&moved) = self.crossings[phase].get(crossing_at as usize) {
            self.sequences[moved].crossing_at = crossing_at;
        }
    }

    pub(super) fn forget(&mut self, slot: u32) {
        self.leave_host(slot, 0);
        self.by_id.remove(&self.sequences[slot].id);
        self.own_slos -= u32::from(self.sequences[slot].own_slo.is_some());
        self.sequences.remove(slot);
    }

    pub(super) fn clear_events(&mut self) {
        let events = &mut self.events;
        events.admitted.clear();
        events.preempted.clear();
        events.prefilled.clear();
        events.tokens.clear();
        events.finished.clear();
        events.gaps.clear();
        events.last_bins.clear();
        (events.steps, events.start, events.last_start, events.end) = (0, 0.0, 0.0, 0.0);
    }
}
