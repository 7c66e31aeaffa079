//! One engine: a queue, a batch, a cache of KV blocks, and steps.
//!
//! Every decoding sequence gets one token in every step. So its length follows from the engine's *tick* (steps run so
//! far), and a step costs the sequences that prefill, end or cross a block edge, not those that merely decode.
use crate::events::{Admitted, Counters, KvEvent, KvLog, Load, Prefilled, StepEvents, Token};
use crate::hash;
use crate::pool::BlockPool;
use crate::profile::{Profile, StepWork};
use crate::sequence::{Sequences, State};
use crate::text::Generator;
use hashbrown::HashMap;
use lmetric_core::CoreError;
use lmetric_core::ids::Seconds;
use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::sync::Arc;

/// How a request gets memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Admission {
    /// vLLM: blocks are taken as tokens are computed; where none is left, the request of the highest (priority, arrival)
    /// is put back into the queue and computed again later. Full blocks can be found by others at once, generated
    /// tokens too.
    Vllm,
    /// Nothing is ever put back: a request enters while the prompt and output tokens of all that run, with its prompt,
    /// fit the capacity, or alone. The cache lies beside them: a prompt's blocks enter when its prefill is complete,
    /// its partial last one too where the request names it.
    Reserve,
}

/// What the queue is ordered by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// Arrival; priorities are ignored.
    Fcfs,
    /// Priority (lower first), then arrival.
    Priority,
}

/// How an engine behaves, its profile apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    /// How a request gets memory.
    pub admission: Admission,
    /// What the queue is ordered by.
    pub order: Order,
    /// Whether changes of the cache are kept in [`Engine::kv_log`].
    pub kv_events: bool,
}

impl Default for Settings {
    fn default() -> Settings {
        Settings { admission: Admission::Vllm, order: Order::Fcfs, kv_events: false }
    }
}

/// What a request asks about.
#[derive(Clone, Copy, Debug)]
pub enum Prompt<'a> {
    /// Token ids.
    Tokens(&'a [u32]),
    /// A trace's prompt: chained hashes of its blocks (further ones stand for output blocks), and its length in tokens.
    /// Fewer hashes than blocks: the rest is shared with nobody.
    Chain {
        /// The chained hashes.
        hashes: &'a [u64],
        /// Prompt tokens.
        tokens: u32,
    },
}

/// A request as it comes.
#[derive(Clone, Copy, Debug)]
pub struct Request<'a> {
    /// The caller's name for it, unique among the requests in the engine.
    pub id: u64,
    /// What it asks about.
    pub prompt: Prompt<'a>,
    /// Output tokens it gets, exactly.
    pub output_tokens: u32,
    /// Lower runs earlier under [`Order::Priority`].
    pub priority: i64,
    /// Requests with different salts share no block.
    pub salt: Option<&'a str>,
}

#[derive(Clone, Copy, Debug)]
struct Chunk {
    slot: u32,
    order: u64,
    before: u32,
    tokens: u32,
}

#[derive(Clone, Copy, Debug)]
struct Step {
    start: Seconds,
    end: Seconds,
    steps: u32,
}

/// One engine. It has no clock: `now` comes in, never goes back, and a step's end comes out.
#[derive(Clone, Debug)]
pub struct Engine {
    profile: Profile,
    settings: Settings,
    generator: Option<Generator>,
    pool: BlockPool,
    kv: KvLog,
    events: StepEvents,
    counters: Counters,
    sequences: Sequences,
    by_id: HashMap<u64, u32>,
    /// Submitted, and not yet seen by a step: (arrival, slot, order).
    incoming: VecDeque<(Seconds, u32, u64)>,
    /// (priority, order, slot), lowest first. Entries of aborted requests are skipped when they come up.
    waiting: BinaryHeap<Reverse<(i64, u64, u32)>>,
    waiting_requests: u32,
    prefilling: Vec<u32>,
    decoding: Vec<u32>,
    tick: u64,
    /// Prompt and output tokens of the decoding and of the prefilling sequences.
    context_tokens: u64,
    prefilling_tokens: u64,
    /// (tick, slot) of last tokens. Entries that no longer hold are skipped when they come up.
    ends: BinaryHeap<Reverse<(u64, u32)>>,
    /// By tick modulo block size: decoding sequences that need a new block in the step at that tick.
    crossings: Vec<Vec<u32>>,
    chunks: Vec<Chunk>,
    step: Option<Step>,
    bytes: Vec<u8>,
    found: Vec<u32>,
}

impl Engine {
    /// An idle engine. With a generator it makes tokens, and takes prompts as token ids only.
    pub fn new(
        profile: Profile,
        settings: Settings,
        generator: Option<Generator>,
    ) -> Result<Engine, CoreError> {
        profile.check()?;
        Ok(Engine {
            pool: BlockPool::new(profile.cache_blocks),
            kv: KvLog { on: settings.kv_events, ..Default::default() },
            crossings: vec![Vec::new(); profile.block_tokens as usize],
            profile,
            settings,
            generator,
            events: StepEvents::default(),
            counters: Counters::default(),
            sequences: Sequences::default(),
            by_id: HashMap::new(),
            incoming: VecDeque::new(),
            waiting: BinaryHeap::new(),
            waiting_requests: 0,
            prefilling: Vec::new(),
            decoding: Vec::new(),
            tick: 0,
            context_tokens: 0,
            prefilling_tokens: 0,
            ends: BinaryHeap::new(),
            chunks: Vec::new(),
            step: None,
            bytes: Vec::new(),
            found: Vec::new(),
        })
    }

    /// The engine's constants.
    pub fn profile(&self) -> &Profile {
        &self.profile
    }

    /// Puts a request into the queue. A step takes it off if it begins at `now` or later.
    ///
    /// Errors: an empty prompt, no output token, an id that is in the engine already, token ids that the generator does
    /// not know, a prompt without token ids for an engine that makes tokens, and, under [`Admission::Vllm`], more tokens
    /// than the KV memory holds.
    pub fn submit(&mut self, request: &Request<'_>, now: Seconds) -> Result<(), CoreError> {
        self.check(request)?;
        let order = self.counters.submitted;
        let slot = self.sequences.insert();
        let sequence = &mut self.sequences[slot];
        sequence.state = State::Waiting;
        sequence.id = request.id;
        sequence.priority = if self.settings.order == Order::Priority { request.priority } else { 0 };
        sequence.order = order;
        sequence.output_tokens = request.output_tokens;
        sequence.root = hash::root(request.salt);
        sequence.salt = request.salt.map(Arc::from);
        match request.prompt {
            Prompt::Tokens(tokens) => {
                sequence.prompt_tokens = tokens.len() as u32;
                sequence.tokens.extend_from_slice(tokens);
                let block = self.profile.block_tokens as usize;
                hash::extend(sequence.root, block, tokens, &mut self.bytes, &mut sequence.chain);
                if self.generator.is_some() {
                    sequence.read.read_all(tokens);
                }
            }
            Prompt::Chain { hashes, tokens } => {
                sequence.prompt_tokens = tokens;
                sequence.chain.extend_from_slice(hashes);
            }
        }
        sequence.total = sequence.prompt_tokens;
        self.by_id.insert(request.id, slot);
        self.incoming.push_back((now, slot, order));
        self.waiting_requests += 1;
        self.counters.submitted += 1;
        Ok(())
    }

    fn check(&self, request: &Request<'_>) -> Result<(), CoreError> {
        let bad = |what: &str, got: String, expected: String| {
            Err(CoreError::BadValue { what: format!("{what} of request {}", request.id), got, expected })
        };
        let prompt_tokens = match request.prompt {
            Prompt::Tokens(tokens) => {
                self.generator.as_ref().map_or(Ok(()), |generator| generator.check(tokens))?;
                tokens.len()
            }
            Prompt::Chain { .. } if self.generator.is_some() => {
                return bad("prompt", "block hashes".into(), "token ids: this engine makes tokens".into());
            }
            Prompt::Chain { tokens, .. } => tokens as usize,
        };
        if prompt_tokens == 0 {
            return bad("prompt", "no token".into(), "at least one".into());
        }
        if request.output_tokens == 0 {
            return bad("output tokens", "0".into(), "at least 1".into());
        }
        if self.by_id.contains_key(&request.id) {
            return bad("id", request.id.to_string(), "one that is not in the engine already".into());
        }
        // The last token is never computed, so it needs no place.
        let (needed, block) =
            (prompt_tokens + request.output_tokens as usize - 1, self.profile.block_tokens as usize);
        let most = match self.settings.admission {
            Admission::Vllm => self.profile.cache_blocks as usize * block,
            Admission::Reserve => u32::MAX as usize / 2,
        };
        if needed > most {
            return bad(
                "prompt and output",
                format!("{needed} tokens"),
                format!("at most {most}: the KV memory"),
            );
        }
        Ok(())
    }

    /// Drops a request, wherever it is. False: it is not in the engine.
    pub fn abort(&mut self, id: u64) -> bool {
        let Some(slot) = self.by_id.get(&id).copied() else { return false };
        if self.sequences[slot].state == State::Waiting {
            self.waiting_requests -= 1;
        } else {
            self.unplace(slot);
        }
        self.forget(slot);
        self.counters.aborted += 1;
        true
    }

    /// Starts a step at `now` and gives its end. None: there is nothing to do at `now`. While a step runs, its end.
    pub fn start_step(&mut self, now: Seconds) -> Option<Seconds> {
        self.start_steps(now, now)
    }

    /// Starts a step at `now` and, as long as nothing changes but lengths, all further ones that begin before `until`
    /// and before the next arrival already known; gives the end of the last. An engine that makes tokens starts one.
    pub fn start_steps(&mut self, now: Seconds, until: Seconds) -> Option<Seconds> {
        if let Some(step) = self.step {
            return Some(step.end);
        }
        self.clear_events();
        while let Some(&(_, slot, order)) = self.incoming.front().filter(|(arrival, ..)| *arrival <= now) {
            self.incoming.pop_front();
            let sequence = &self.sequences[slot];
            if (sequence.state, sequence.order) == (State::Waiting, order) {
                self.waiting.push(Reverse((sequence.priority, order, slot)));
            }
        }
        if self.settings.admission == Admission::Vllm {
            self.grow_decodes();
        }
        self.plan_prefills();
        if self.events.preempted.is_empty() {
            self.admit();
        }
        if self.decoding.is_empty() && self.chunks.is_empty() {
            return None;
        }
        let mut work = StepWork {
            decode_sequences: self.decoding.len() as u32,
            context_tokens: self.context_tokens,
            ..Default::default()
        };
        self.chunks.iter().for_each(|chunk| work.add_prefill(chunk.before, chunk.tokens));
        let first = self.profile.step_seconds(&work);
        let (mut steps, mut seconds) = (1, first);
        // After a preemption the queue is looked at again in the next step.
        if self.prefilling.is_empty() && self.events.preempted.is_empty() && self.generator.is_none() {
            // Each further step has one more token of context for each sequence.
            let more = self.profile.decode_seconds_per_context_token * self.decoding.len() as f64;
            let lasting = |steps: u32| {
                let n = f64::from(steps);
                n * first + more * n * (n - 1.0) / 2.0
            };
            let horizon = self.incoming.front().map_or(until, |(arrival, ..)| arrival.min(until)) - now;
            steps = steps_within(horizon, first, more, self.alike_steps(), lasting);
            seconds = lasting(steps);
        }
        self.step = Some(Step { start: now, end: now + seconds, steps });
        Some(now + seconds)
    }

    /// Ends the step: gives what happened in it. Its time is the one that `start_step` gave.
    pub fn finish_step(&mut self) -> &StepEvents {
        let Some(step) = self.step.take() else {
            self.clear_events();
            return &self.events;
        };
        (self.events.start, self.events.end, self.events.steps) = (step.start, step.end, step.steps);
        self.counters.steps += u64::from(step.steps);
        self.finish_decodes(step.steps);
        self.finish_prefills();
        &self.events
    }

    /// Changes of the cache since [`KvLog::clear`]: read and clear them after each step.
    pub fn kv_log(&mut self) -> &mut KvLog {
        &mut self.kv
    }

    /// Empties the prefix cache. False, and nothing is done, while a request uses a block.
    pub fn reset_cache(&mut self) -> bool {
        let cleared = self.pool.clear();
        if cleared && self.kv.on {
            self.kv.events.push(KvEvent::Cleared);
        }
        cleared
    }

    /// The load now.
    pub fn load(&self) -> Load {
        let memory = f64::from(self.profile.cache_blocks);
        let used = match self.settings.admission {
            Admission::Vllm => f64::from(self.pool.capacity() - self.pool.free()),
            Admission::Reserve => self.running_tokens() as f64 / f64::from(self.profile.block_tokens),
        };
        let remaining = |slot: &u32| u64::from(self.sequences[*slot].total - self.sequences[*slot].computed);
        Load {
            waiting: self.waiting_requests,
            running: self.running(),
            kv_usage: used / memory,
            remaining_prefill_tokens: self.prefilling.iter().map(remaining).sum(),
            context_tokens: self.context_tokens,
            counters: self.counters,
        }
    }

    /// Tokens of a prompt that the cache holds now, of at most `prompt_tokens - 1`.
    pub fn hit_tokens(&self, chain: &[u64], prompt_tokens: u32) -> u32 {
        let block = self.profile.block_tokens;
        let most = match self.settings.admission {
            Admission::Vllm => (prompt_tokens.saturating_sub(1) / block) as usize,
            Admission::Reserve => prompt_tokens.div_ceil(block) as usize,
        };
        let found = chain.iter().take(most).take_while(|&&hash| self.pool.find(hash).is_some()).count();
        (found as u32 * block).min(prompt_tokens.saturating_sub(1))
    }

    // -- planning a step ------------------------------------------------------------------------------------------

    /// Gives each sequence that crosses a block edge its new block; the block just filled can be found from now on.
    fn grow_decodes(&mut self) {
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
    fn plan_prefills(&mut self) {
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
    fn admit(&mut self) {
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
                    let hit = self.hit_tokens(&sequence.chain, total);
                    let touched = hit.div_ceil(block) as usize;
                    for &hash in sequence.chain[..touched].iter().rev() {
                        self.pool.find(hash).into_iter().for_each(|block| self.pool.touch(block));
                    }
                    hit
                }
            };
            self.waiting.pop();
            self.waiting_requests -= 1;
            let tokens = (total - hit).min(self.budget());
            if tokens > 0 {
                self.chunks.push(Chunk { slot, order, before: hit, tokens });
            }
            self.prefilling.push(slot);
            self.prefilling_tokens += u64::from(total);
            let sequence = &mut self.sequences[slot];
            (sequence.state, sequence.computed) = (State::Prefill, hit);
            let first_time = sequence.cached.is_none();
            if first_time {
                sequence.cached = Some(hit);
                self.counters.prefix_cache_queries += u64::from(total);
                self.counters.prefix_cache_hits += u64::from(hit);
            }
            self.events.admitted.push(Admitted { id: sequence.id, cached_tokens: hit, first_time });
            self.name_blocks(slot, hit + tokens);
        }
    }

    /// Blocks for the cached prefix of a waiting request and for its first chunk: gives the hit in tokens, or None where
    /// the budget or the blocks do not suffice.
    fn find_room(&mut self, slot: u32) -> Option<u32> {
        let block = self.profile.block_tokens;
        let sequence = &self.sequences[slot];
        let most = ((sequence.total - 1) / block) as usize;
        self.found.clear();
        self.found.extend(sequence.chain.iter().take(most).map_while(|&hash| self.pool.find(hash)));
        let hit = self.found.len() as u32 * block;
        let tokens = (sequence.total - hit).min(self.budget());
        let pinned = self.found.iter().filter(|&&block| !self.pool.in_use(block)).count() as u32;
        let new = (hit + tokens).div_ceil(block) - self.found.len() as u32;
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
    fn alike_steps(&mut self) -> u32 {
        let end = loop {
            let Some(&Reverse((end, slot))) = self.ends.peek() else { break self.tick + 1 };
            if self.sequences[slot].state == State::Decode && self.sequences[slot].end == end {
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
    fn grow(&mut self, slot: u32, tokens: u32) {
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

    fn preempt(&mut self, slot: u32) {
        self.unplace(slot);
        let sequence = &mut self.sequences[slot];
        (sequence.state, sequence.computed) = (State::Waiting, 0);
        let (priority, order) = sequence.rank();
        self.waiting.push(Reverse((priority, order, slot)));
        self.waiting_requests += 1;
        self.counters.preemptions += 1;
        self.events.preempted.push(sequence.id);
    }

    // -- ending a step --------------------------------------------------------------------------------------------

    fn finish_decodes(&mut self, steps: u32) {
        let made = self.decoding.len() as u64 * u64::from(steps);
        self.tick += u64::from(steps);
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
        while let Some(&Reverse((end, slot))) = self.ends.peek().filter(|Reverse((end, _))| *end <= self.tick)
        {
            self.ends.pop();
            if self.sequences[slot].state == State::Decode && self.sequences[slot].end == end {
                self.finish(slot);
            }
        }
    }

    fn finish_prefills(&mut self) {
        for i in 0..self.chunks.len() {
            let Chunk { slot, order, tokens, .. } = self.chunks[i];
            let sequence = &mut self.sequences[slot];
            if (sequence.state, sequence.order) != (State::Prefill, order) {
                continue; // aborted while the step ran
            }
            sequence.computed += tokens;
            let done = sequence.computed == sequence.total;
            self.events.prefilled.push(Prefilled { id: sequence.id, tokens, done });
            if done {
                self.finish_prefill(slot);
            }
        }
        self.chunks.clear();
    }

    /// The prefill is complete: the prompt's blocks are there, and so is an output token.
    fn finish_prefill(&mut self, slot: u32) {
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
        sequence.total += 1;
        let left = sequence.prompt_tokens + sequence.output_tokens - sequence.total;
        (sequence.state, sequence.since, sequence.end) =
            (State::Decode, self.tick, self.tick + u64::from(left));
        self.counters.generation_tokens += 1;
        if let Some(generator) = &self.generator {
            let token = generator.next(sequence.read);
            sequence.read.read(token);
            sequence.tokens.push(token);
            self.events.tokens.push(Token { id: sequence.id, token, from_prefill: true, last: left == 0 });
        }
        let (total, end) = (sequence.total, sequence.end);
        sequence.at = self.decoding.len() as u32;
        self.decoding.push(slot);
        self.context_tokens += u64::from(total);
        let phase = self.crossing_phase(slot);
        self.sequences[slot].crossing_at = self.crossings[phase].len() as u32;
        self.crossings[phase].push(slot);
        if left == 0 {
            self.finish(slot);
        } else {
            self.ends.push(Reverse((end, slot)));
        }
    }

    /// Reserving admission: all blocks of the prompt enter the cache, the first as the most recently used.
    fn cache_prompt(&mut self, slot: u32) {
        let sequence = &self.sequences[slot];
        let most = sequence.prompt_tokens.div_ceil(self.profile.block_tokens) as usize;
        let chain = &sequence.chain[..sequence.chain.len().min(most)];
        self.found.clear();
        self.found.extend(chain.iter().map_while(|&hash| self.pool.find(hash)));
        // First those that are there, so that they do not make room for the others.
        self.found.iter().rev().for_each(|&block| self.pool.touch(block));
        let (parents, new) = chain.split_at(self.found.len());
        for &hash in new.iter().rev() {
            match self.pool.find(hash) {
                Some(block) => self.pool.touch(block),
                None => {
                    if let Some(block) = self.pool.take(&mut self.kv) {
                        self.pool.name(block, hash);
                        self.pool.release(block);
                    }
                }
            }
        }
        self.found.iter().rev().for_each(|&block| self.pool.touch(block));
        if !new.is_empty() {
            let block = self.profile.block_tokens as usize;
            let tokens = sequence.tokens.get(parents.len() * block..chain.len() * block).unwrap_or_default();
            self.kv.stored(parents.last().copied(), new, tokens, sequence.salt.as_ref());
        }
    }

    /// A request has its last token.
    fn finish(&mut self, slot: u32) {
        self.events.finished.push(self.sequences[slot].id);
        self.name_blocks(slot, self.sequences[slot].total_at(self.tick) - 1);
        self.unplace(slot);
        self.forget(slot);
        self.counters.finished += 1;
    }

    // -- books ----------------------------------------------------------------------------------------------------

    fn running(&self) -> u32 {
        (self.prefilling.len() + self.decoding.len()) as u32
    }

    fn running_tokens(&self) -> u64 {
        self.prefilling_tokens + self.context_tokens
    }

    /// Tokens that this step's decodes and chunks so far leave.
    fn budget(&self) -> u32 {
        let planned: u32 = self.chunks.iter().map(|chunk| chunk.tokens).sum();
        self.profile.max_batch_tokens - self.decoding.len() as u32 - planned
    }

    fn crossing_phase(&self, slot: u32) -> usize {
        let (sequence, block) = (&self.sequences[slot], u64::from(self.profile.block_tokens));
        let ahead = (block - u64::from(sequence.total - 1) % block) % block;
        ((sequence.since + ahead) % block) as usize
    }

    /// The full blocks among the first `computed` tokens can be found from now on.
    fn name_blocks(&mut self, slot: u32, computed: u32) {
        if self.settings.admission == Admission::Reserve {
            return;
        }
        let block = self.profile.block_tokens as usize;
        let sequence = &mut self.sequences[slot];
        if !sequence.tokens.is_empty() {
            let computed = &sequence.tokens[..sequence.tokens.len().min(computed as usize)];
            hash::extend(sequence.root, block, computed, &mut self.bytes, &mut sequence.chain);
        }
        let full = (computed as usize / block).min(sequence.chain.len());
        let named = sequence.named;
        if full <= named {
            return;
        }
        for i in named..full {
            self.pool.name(sequence.blocks[i], sequence.chain[i]);
        }
        let parent = named.checked_sub(1).map(|i| sequence.chain[i]);
        let tokens = sequence.tokens.get(named * block..full * block).unwrap_or_default();
        self.kv.stored(parent, &sequence.chain[named..full], tokens, sequence.salt.as_ref());
        sequence.named = full;
    }

    /// Takes a running sequence out of the batch and gives its blocks back, the last first.
    fn unplace(&mut self, slot: u32) {
        let (state, total) = (self.sequences[slot].state, self.sequences[slot].total_at(self.tick));
        if state == State::Decode {
            self.context_tokens -= u64::from(total);
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
        } else {
            self.prefilling.retain(|&other| other != slot);
            self.prefilling_tokens -= u64::from(total);
        }
        let sequence = &mut self.sequences[slot];
        (sequence.total, sequence.named) = (total, 0);
        sequence.blocks.drain(..).rev().for_each(|block| self.pool.release(block));
    }

    fn forget(&mut self, slot: u32) {
        self.by_id.remove(&self.sequences[slot].id);
        self.sequences.remove(slot);
    }

    fn clear_events(&mut self) {
        let events = &mut self.events;
        events.admitted.clear();
        events.preempted.clear();
        events.prefilled.clear();
        events.tokens.clear();
        events.finished.clear();
        (events.steps, events.start, events.end) = (0, 0.0, 0.0);
    }
}

/// The most steps, 1 to `most`, of which the last begins before `horizon`; `lasting(n)` is how long `n` steps take, the
/// first `first`, each further one `more` longer than the one before.
fn steps_within(horizon: f64, first: f64, more: f64, most: u32, lasting: impl Fn(u32) -> f64) -> u32 {
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
