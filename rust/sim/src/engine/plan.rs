//! What the next step does: room for those that run, then for those that wait.
use super::{Admission, Chunk, Engine, prompt_blocks};
use crate::events::Admitted;
use crate::sequence::State;
use std::cmp::Reverse;

impl Engine {
    /// Gives each sequence that crosses a block edge its new block; the block just filled can be found from now on.
    pub(super) fn grow_decodes(&mut self) {
        let phase = (self.tick % u64::from(self.profile.block_tokens)) as usize;
        let mut i = 0;
        while let Some(&slot) = self.crossings[phase].get(i) {
            let preempted = self.events.preempted.len();
            let total = self.sequences[slot].total_at(self.tick);
            self.name_blocks(slot, total - 1);
            self.grow(slot, total);
            // A preemption may have moved anything: look again from the start (what has grown stays grown).
            i = if self.events.preempted.len() > preempted { 0 } else { i + 1 };
        }
    }

    /// Shares what the decodes leave of the token budget among the running prefills, in order.
    pub(super) fn plan_prefills(&mut self) {
        self.chunks.clear();
        let mut i = 0;
        while let Some(&slot) = self.prefilling.get(i) {
            let preempted = self.events.preempted.len();
            let sequence = &self.sequences[slot];
            let (before, order) = (sequence.computed, sequence.order);
            let tokens = (sequence.total - before).min(self.budget());
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
    pub(super) fn admit(&mut self) {
        let block = self.profile.block_tokens;
        let capacity = u64::from(self.profile.cache_blocks) * u64::from(block);
        while let Some(&Reverse((_, order, slot))) = self.waiting.peek() {
            let sequence = &self.sequences[slot];
            if (sequence.state, sequence.order) != (State::Waiting, order) {
                self.waiting.pop();
                continue;
            }
            let (running, total) = (self.running(), sequence.total);
            if running == self.profile.max_sequences {
                break;
            }
            let hit = match self.settings.admission {
                Admission::Vllm => match self.find_room(slot) {
                    Some(hit) => hit,
                    None => break,
                },
                Admission::Reserve if running > 0 && self.running_tokens() + u64::from(total) > capacity => {
                    break;
                }
                Admission::Reserve => {
                    let found = self.cache.touch(prompt_blocks(&sequence.chain, total, block));
                    (found as u32 * block).min(total - 1)
                }
            };
            self.waiting.pop();
            self.waiting_requests -= 1;
            let before = self.before(slot, hit);
            let tokens = (total - before).min(self.budget());
            if tokens > 0 {
                self.chunks.push(Chunk { slot, order, before, tokens });
            }
            self.prefilling.push(slot);
            self.prefilling_tokens += u64::from(total);
            let sequence = &mut self.sequences[slot];
            (sequence.state, sequence.computed) = (State::Prefill, before);
            let first_time = sequence.cached.is_none();
            if first_time {
                sequence.cached = Some(hit);
                self.counters.prefix_cache_queries += u64::from(total);
                self.counters.prefix_cache_hits += u64::from(hit);
                self.counters.pulled_prompt_tokens += u64::from(before - hit);
            }
            if first_time && sequence.report_cached && hit >= block {
                let blocks = (hit / block) as usize;
                let tokens = sequence.tokens.get(..blocks * block as usize).unwrap_or_default();
                self.kv.stored(None, &sequence.chain[..blocks], tokens, sequence.salt.as_ref());
            }
            let pulled_tokens = before - hit;
            let id = sequence.id;
            self.events.admitted.push(Admitted { id, cached_tokens: hit, pulled_tokens, first_time });
            self.name_blocks(slot, before + tokens);
        }
    }

    /// Of a waiting request, the leading tokens that need not be computed once `hit` are cached: what is pulled, too, but never
    /// the last one.
    fn before(&self, slot: u32, hit: u32) -> u32 {
        let sequence = &self.sequences[slot];
        hit.max(sequence.pulled).min(sequence.total - 1)
    }

    /// Blocks for the cached and pulled prefix of a waiting request and for its first chunk: gives the hit in tokens, or None
    /// where the budget or the blocks do not suffice.
    pub(super) fn find_room(&mut self, slot: u32) -> Option<u32> {
        let block = self.profile.block_tokens;
        let sequence = &self.sequences[slot];
        let most = ((sequence.total - 1) / block) as usize;
        self.found.clear();
        self.found.extend(sequence.chain.iter().take(most).map_while(|&hash| self.pool.find(hash)));
        let hit = self.found.len() as u32 * block;
        let before = self.before(slot, hit);
        let tokens = (sequence.total - before).min(self.budget());
        let pinned = self.found.iter().filter(|&&block| !self.pool.in_use(block)).count() as u32;
        let new = (before + tokens).div_ceil(block) - self.found.len() as u32;
        if tokens == 0 || self.pool.free() < pinned + new {
            return None;
        }
        let sequence = &mut self.sequences[slot];
        sequence.blocks.extend_from_slice(&self.found);
        sequence.named = self.found.len();
        self.found.iter().for_each(|&block| self.pool.share(block));
        sequence.blocks.extend((0..new).map_while(|_| self.pool.take(&mut self.kv)));
        Some(hit)
    }

    /// Steps until a sequence ends or needs a block.
    pub(super) fn alike_steps(&mut self) -> u32 {
        let end = loop {
            let Some(&Reverse((end, order, slot))) = self.ends.peek() else { break self.tick + 1 };
            if self.ends_at(slot, order, end) {
                break end;
            }
            self.ends.pop();
        };
        let mut most = u32::try_from(end - self.tick).unwrap_or(u32::MAX);
        if self.settings.admission == Admission::Vllm {
            let block = u64::from(self.profile.block_tokens);
            let edge =
                (1..=block).find(|ahead| !self.crossings[((self.tick + ahead) % block) as usize].is_empty());
            most = most.min(edge.unwrap_or(block) as u32);
        }
        most
    }

    /// Takes blocks until the sequence has room for `tokens` tokens; where none is left, the last in rank goes, maybe
    /// itself.
    pub(super) fn grow(&mut self, slot: u32, tokens: u32) {
        let needed = tokens.div_ceil(self.profile.block_tokens) as usize;
        while self.sequences[slot].blocks.len() < needed {
            match self.pool.take(&mut self.kv) {
                Some(block) => self.sequences[slot].blocks.push(block),
                None => {
                    let running = self.prefilling.iter().chain(&self.decoding);
                    let victim = *running.max_by_key(|&&slot| self.sequences[slot].rank()).unwrap_or(&slot);
                    self.preempt(victim);
                    if victim == slot {
                        return;
                    }
                }
            }
        }
    }

    pub(super) fn preempt(&mut self, slot: u32) {
        self.unplace(slot);
        let sequence = &mut self.sequences[slot];
        (sequence.state, sequence.computed, sequence.pulled) = (State::Waiting, 0, 0);
        let (priority, order) = sequence.rank();
        self.waiting.push(Reverse((priority, order, slot)));
        self.waiting_requests += 1;
        self.counters.preemptions += 1;
        self.events.preempted.push(sequence.id);
    }
}

/// The most steps, 1 to `most`, of which the last begins before `horizon`; `lasting(n)` is how long `n` steps take, the
/// first `first`, each further one `more` longer than the one before.
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
    // Root of first x + more x (x - 1) / 2 = horizon in a form without cancellation; then repaired for rounding.
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
