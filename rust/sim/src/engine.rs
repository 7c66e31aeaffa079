//! One engine: a queue, a batch, a cache of KV blocks, and steps.
//!
//! Every decoding sequence gets one token in every step. So its length follows from the engine's *tick* (steps run so
//! far), and a step costs the sequences that prefill, end or cross a block edge, not those that merely decode. Orders that
//! rank decodes, too, pause some of them (`one_order.rs`); a paused sequence is not among the decoding ones.
use crate::cache::PrefixCache;
use crate::events::{Counters, KvEvent, KvLog, Load, StepEvents};
use crate::gaps::{DEFAULT_TOKEN_SLO_SECONDS, GapHistogram, Gaps, TokenGaps, TokenSlo};
use crate::hash;
use crate::pool::BlockPool;
use crate::profile::Profile;
use crate::sequence::{Sequence, Sequences, State};
use crate::text::Generator;
use hashbrown::HashMap;
use lmetric_core::CoreError;
use lmetric_core::ids::Seconds;
use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::sync::Arc;

mod by_rank;
mod learned;
mod one_order;
pub mod order;
mod plan;
mod put_back;
mod settle;

use learned::Learned;
use order::Order;
pub use put_back::Preempt;

/// How a request gets memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Admission {
    /// vLLM: blocks are taken as tokens are computed; where none is left, the request of the highest (rank, arrival) in the
    /// [`Order`] is put back into the queue and computed again later. Full blocks can be found by others at once, generated
    /// tokens too.
    Vllm,
    /// Nothing is put back for want of memory: a request enters while the prompt and output tokens of all that run, with its prompt,
    /// fit the capacity, or alone. The cache lies beside them: a prompt's blocks enter when its prefill is complete,
    /// its partial last one too where the request names it.
    Reserve,
}

/// How an engine behaves, its profile apart.
#[derive(Clone, Debug)]
pub struct Settings {
    /// How a request gets memory.
    pub admission: Admission,
    /// What requests are ordered by.
    pub order: Order,
    /// What becomes of the KV of requests that go back into the queue.
    pub preempt: Preempt,
    /// Whether changes of the cache are kept in [`Engine::kv_log`].
    pub kv_events: bool,
}

impl Default for Settings {
    fn default() -> Settings {
        Settings {
            admission: Admission::Vllm,
            order: Order::default(),
            preempt: Preempt::Recompute,
            kv_events: false,
        }
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
    /// Of these, the first that are thoughts: their SLO is another ([`TokenSlo`], order `slo`).
    pub think_tokens: u32,
    /// Lower runs earlier under the order `priority`.
    pub priority: i64,
    /// Requests with different salts share no block.
    pub salt: Option<&'a str>,
    /// The blocks of its prompt that are cached already are told of again, as stored.
    pub report_cached: bool,
    /// Leading prompt tokens whose KV comes from elsewhere: not computed here, but for the prompt's last token, so that the
    /// first output token comes from a step of this engine. What the cache holds is not pulled. Lost where the request is put
    /// back (but see [`Preempt::Swap`]). 0: it computes its prompt itself. (A prefill for another engine is a request of one output token.)
    pub pulled_tokens: u32,
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
    /// Seconds of the first of them, and what each further one takes more than the one before.
    first: Seconds,
    more: Seconds,
}

impl Step {
    /// Seconds that the first `steps` steps take.
    fn lasting(&self, steps: u32) -> Seconds {
        let n = f64::from(steps);
        n * self.first + self.more * n * (n - 1.0) / 2.0
    }

    /// The most steps, 1 to `most`, of which the last begins before `at`.
    fn begun(&self, at: Seconds, most: u32) -> u32 {
        plan::steps_within(at - self.start, self.first, self.more, most, |n| self.lasting(n))
    }
}

/// One engine. It has no clock: `now` comes in, never goes back, and a step's end comes out.
#[derive(Clone, Debug)]
pub struct Engine {
    profile: Profile,
    settings: Settings,
    generator: Option<Generator>,
    /// The blocks under [`Admission::Vllm`], and the cache under [`Admission::Reserve`].
    pool: BlockPool,
    cache: PrefixCache,
    kv: KvLog,
    events: StepEvents,
    counters: Counters,
    gaps: TokenGaps,
    learned: Learned,
    /// When the latest step began.
    begun: Seconds,
    sequences: Sequences,
    by_id: HashMap<u64, u32>,
    /// Submitted, and not yet seen by a step: (arrival, slot, order).
    incoming: VecDeque<(Seconds, u32, u64)>,
    /// (rank, order, slot), lowest first. Entries of aborted requests are skipped when they come up.
    waiting: BinaryHeap<Reverse<(i64, u64, u32)>>,
    waiting_requests: u32,
    /// (step, slot, order): when who waits gets another rank, first come first.
    promotions: VecDeque<(u64, u32, u64)>,
    prefilling: Vec<u32>,
    decoding: Vec<u32>,
    /// Decodes that the latest step leaves out, with their KV in place, and their prompt and output tokens.
    paused: Vec<u32>,
    paused_tokens: u64,
    /// Paused decodes that the step under way takes up again.
    resumed: Vec<u32>,
    /// Under an order that ranks decodes: the number of the latest plan, and the decodes that it has picked so far.
    plan: u64,
    picked: u32,
    tick: u64,
    /// Prompt and output tokens of the decoding and of the prefilling sequences.
    context_tokens: u64,
    prefilling_tokens: u64,
    /// Tokens whose KV waits in the host's memory, and those that the next step copies there or back.
    host_tokens: u64,
    copied_tokens: u64,
    /// What the next step takes longer.
    held_seconds: Seconds,
    /// (tick, order, slot) of last tokens. Entries that no longer hold are skipped when they come up.
    ends: BinaryHeap<Reverse<(u64, u64, u32)>>,
    /// The same of thoughts' ends, of those that decode on; and how many of those that decode make an answer's tokens.
    answers: BinaryHeap<Reverse<(u64, u64, u32)>>,
    answering: u32,
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
        settings.preempt.check(settings.admission)?;
        let reserve = settings.admission == Admission::Reserve;
        Ok(Engine {
            learned: Learned::new(settings.order.rules().learns(), &profile)?,
            pool: BlockPool::new(if reserve { 0 } else { profile.cache_blocks }),
            cache: PrefixCache::new(profile.cache_blocks),
            kv: KvLog { on: settings.kv_events, ..Default::default() },
            crossings: vec![Vec::new(); profile.block_tokens as usize],
            profile,
            settings,
            generator,
            events: StepEvents::default(),
            counters: Counters::default(),
            gaps: TokenGaps::new(TokenSlo::same(DEFAULT_TOKEN_SLO_SECONDS)),
            begun: 0.0,
            sequences: Sequences::default(),
            by_id: HashMap::new(),
            incoming: VecDeque::new(),
            waiting: BinaryHeap::new(),
            waiting_requests: 0,
            promotions: VecDeque::new(),
            prefilling: Vec::new(),
            decoding: Vec::new(),
            paused: Vec::new(),
            paused_tokens: 0,
            resumed: Vec::new(),
            plan: 0,
            picked: 0,
            tick: 0,
            context_tokens: 0,
            prefilling_tokens: 0,
            host_tokens: 0,
            copied_tokens: 0,
            held_seconds: 0.0,
            ends: BinaryHeap::new(),
            answers: BinaryHeap::new(),
            answering: 0,
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

    /// Counts gaps between tokens against another SLO than [`DEFAULT_TOKEN_SLO_SECONDS`], from now on.
    pub fn set_token_slo(&mut self, slo: TokenSlo) {
        self.gaps = TokenGaps::new(slo);
    }

    /// Gaps between the tokens of all requests.
    pub fn gaps(&self) -> &GapHistogram {
        self.gaps.histogram()
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
        sequence.priority = request.priority;
        sequence.order = order;
        sequence.arrival = now;
        sequence.output_tokens = request.output_tokens;
        sequence.think_tokens = request.think_tokens;
        sequence.root = hash::root(request.salt);
        sequence.salt = request.salt.map(Arc::from);
        sequence.report_cached = request.report_cached;
        sequence.pulled = request.pulled_tokens;
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

    /// Refuses what [`Engine::submit`] would refuse.
    pub fn check(&self, request: &Request<'_>) -> Result<(), CoreError> {
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
        if request.pulled_tokens as usize > prompt_tokens {
            let got = request.pulled_tokens.to_string();
            return bad("pulled tokens", got, format!("at most the prompt's {prompt_tokens}"));
        }
        if request.think_tokens > request.output_tokens {
            let got = request.think_tokens.to_string();
            return bad(
                "thought tokens",
                got,
                format!("at most its {} output tokens", request.output_tokens),
            );
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

    /// Takes a request out that decodes, between two steps: gives the output tokens that it has made here, and the gaps between them. None: it does not decode
    /// here now.
    pub fn leave(&mut self, id: u64) -> Option<(u32, Gaps)> {
        let slot = self.by_id.get(&id).copied()?;
        let sequence = &self.sequences[slot];
        if sequence.state != State::Decode || self.step.is_some() {
            return None;
        }
        let made = sequence.total_at(self.tick) - sequence.prompt_tokens;
        let gaps = self.gaps_of(slot);
        self.name_blocks(slot, self.sequences[slot].total_at(self.tick) - 1);
        self.unplace(slot);
        self.forget(slot);
        self.counters.left += 1;
        Some((made, gaps))
    }

    /// Output tokens that a decoding request has made here by `at`. None: it does not decode here now.
    pub fn made(&self, id: u64, at: Seconds) -> Option<u32> {
        let sequence = &self.sequences[*self.by_id.get(&id)?];
        let decodes = sequence.state == State::Decode;
        let done = sequence.total_at(self.tick) - sequence.prompt_tokens;
        decodes.then(|| done + self.progress(at).1)
    }

    /// Starts a step at `now` and gives its end. None: there is nothing to do at `now`. While a step runs, its end; infinite
    /// where the engine stands still (see [`crate::DecodeThroughput`]).
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
        self.begun = now;
        while let Some(&(_, slot, order)) = self.incoming.front().filter(|(arrival, ..)| *arrival <= now) {
            self.incoming.pop_front();
            let sequence = &self.sequences[slot];
            if (sequence.state, sequence.order) == (State::Waiting, order) {
                self.enqueue(slot);
            }
        }
        self.promote();
        if self.settings.order.rules().ranks_decodes() {
            self.plan_by_one_order();
        } else {
            self.grow_decodes();
            if self.settings.order.rules().preemption().is_some() {
                self.plan_by_rank();
            } else {
                self.plan_prefills();
                if self.events.preempted.is_empty() {
                    self.admit_waiting();
                }
            }
        }
        if self.decoding.is_empty() && self.chunks.is_empty() {
            self.held_seconds = 0.0;
            return None;
        }
        let work = self.planned();
        // A step that copies is one alone: something was put back or admitted in it.
        let copied = std::mem::take(&mut self.copied_tokens);
        let held = std::mem::take(&mut self.held_seconds);
        let first = self.profile.step_seconds(&work) + self.copy_seconds(copied) + held;
        let mut step = Step { start: now, end: now + first, steps: 1, first, more: 0.0 };
        // After a preemption the queue is looked at again in the next step.
        let alone = held > 0.0 || self.generator.is_some() || !self.resumed.is_empty();
        if self.prefilling.is_empty() && self.events.preempted.is_empty() && !alone {
            // Each further step has one more token of context for each sequence.
            step.more = self.profile.more_seconds(self.decoding.len() as u32);
            let horizon = self.incoming.front().map_or(until, |(arrival, ..)| arrival.min(until));
            step.steps = step.begun(horizon, self.alike_steps());
            step.end = now + step.lasting(step.steps);
        }
        self.step = Some(step);
        Some(step.end)
    }

    /// Of the steps under way, leaves out those that begin at `at` or later (the first stays), so that one which begins
    /// then can take in what came; gives the new end. None: nothing changes.
    pub fn interrupt(&mut self, at: Seconds) -> Option<Seconds> {
        let step = self.step.as_mut()?;
        let steps = step.begun(at, step.steps);
        if steps == step.steps {
            return None;
        }
        (step.steps, step.end) = (steps, step.start + step.lasting(steps));
        Some(step.end)
    }

    /// When the step ends that runs at `at`.
    pub fn present_step_ends(&self, at: Seconds) -> Option<Seconds> {
        self.step.map(|step| step.start + step.lasting(step.begun(at, step.steps)))
    }

    /// The next step takes so much longer: the engine does something else before it. Nothing is held up where it has nothing to do then.
    pub fn hold(&mut self, seconds: Seconds) {
        self.held_seconds += seconds;
    }

    /// The first `tokens` of a prompt, which the cache holds, are used now: makes them the most recently used. Gives the blocks that stay for it until
    /// [`Engine::release_prefix`]; none under [`Admission::Reserve`], where the cache has no users.
    pub fn use_prefix(&mut self, chain: &[u64], tokens: u32) -> Vec<u32> {
        let blocks = tokens.div_ceil(self.profile.block_tokens) as usize;
        let front = &chain[..chain.len().min(blocks)];
        match self.settings.admission {
            Admission::Reserve => {
                self.cache.touch(front);
                Vec::new()
            }
            Admission::Vllm => {
                let found: Vec<u32> = front.iter().map_while(|&hash| self.pool.find(hash)).collect();
                found.iter().for_each(|&block| self.pool.share(block));
                found
            }
        }
    }

    /// Ends a use of blocks, the last first.
    pub fn release_prefix(&mut self, blocks: &mut Vec<u32>) {
        blocks.drain(..).rev().for_each(|block| self.pool.release(block));
    }

    /// When the last of the steps under way begins.
    pub fn last_step_start(&self) -> Option<Seconds> {
        self.step
            .map(|step| if step.steps > 1 { step.start + step.lasting(step.steps - 1) } else { step.start })
    }

    /// Whether the step under way has no end.
    pub fn stalled(&self) -> bool {
        self.step.is_some_and(|step| step.end.is_infinite())
    }

    /// Of the steps under way, how many have begun before `at` and how many have ended by then.
    pub fn progress(&self, at: Seconds) -> (u32, u32) {
        let Some(step) = &self.step else { return (0, 0) };
        let begun = step.begun(at, step.steps);
        (begun, if step.start + step.lasting(begun) <= at { begun } else { begun - 1 })
    }

    /// The decoding requests, and the output tokens each had when the steps under way began.
    pub fn decoding(&self) -> impl Iterator<Item = (u64, u32)> {
        let made = |s: &Sequence, tick| (s.id, s.total_at(tick) - s.prompt_tokens);
        self.decoding.iter().map(move |&slot| made(&self.sequences[slot], self.tick))
    }

    /// Sequences that decode, and their context tokens once so many of the steps under way have run.
    pub fn decode_load(&self, steps: u32) -> (u32, u64) {
        let n = self.decoding.len() as u32;
        (n, self.context_tokens + u64::from(steps) * u64::from(n))
    }

    /// Steps run.
    pub fn steps(&self) -> u64 {
        self.counters.steps
    }

    /// Requests that were taken off the queue: those in the batch, and those that an order which ranks decodes has left out of it.
    pub fn running(&self) -> u32 {
        (self.prefilling.len() + self.decoding.len() + self.paused.len()) as u32
    }

    /// Requests in the queue.
    pub fn waiting(&self) -> u32 {
        self.waiting_requests
    }

    /// Ends the step: gives what happened in it. Its time is the one that `start_step` gave.
    pub fn finish_step(&mut self) -> &StepEvents {
        let Some(step) = self.step.take() else {
            self.clear_events();
            return &self.events;
        };
        self.events.last_start = step.start + step.lasting(step.steps - 1);
        (self.events.start, self.events.end, self.events.steps) = (step.start, step.end, step.steps);
        self.counters.steps += u64::from(step.steps);
        let computed: u32 = self.chunks.iter().map(|chunk| chunk.tokens).sum();
        let decoded = self.decoding.len() as u64 * u64::from(step.steps);
        self.learned.steps(step.end - step.start, decoded + u64::from(computed));
        let before = self.learned.seen();
        self.finish_decodes(&step);
        self.finish_prefills();
        if self.learned.look(before) {
            self.rank_waiting();
        }
        &self.events
    }

    /// What the step under way has done so far (admissions, preemptions), or the last one did.
    pub fn events(&self) -> &StepEvents {
        &self.events
    }

    /// Changes of the cache since [`KvLog::clear`]: read and clear them after each step.
    pub fn kv_log(&mut self) -> &mut KvLog {
        &mut self.kv
    }

    /// Empties the prefix cache. False, and nothing is done, while a request uses a block.
    pub fn reset_cache(&mut self) -> bool {
        let cleared = self.pool.clear();
        self.cache.clear();
        if cleared && self.kv.on {
            self.kv.events.push(KvEvent::Cleared);
        }
        cleared
    }

    /// The load when the steps under way began, or now.
    pub fn load(&self) -> Load {
        self.load_after(0)
    }

    /// The load once so many of the steps under way, of which none changes more than lengths, have run.
    pub fn load_after(&self, steps: u32) -> Load {
        let memory = f64::from(self.profile.cache_blocks);
        let made = u64::from(steps) * self.decoding.len() as u64;
        let used = match self.settings.admission {
            Admission::Vllm => f64::from(self.pool.capacity() - self.pool.free()),
            Admission::Reserve => {
                (self.running_tokens() + made) as f64 / f64::from(self.profile.block_tokens)
            }
        };
        let remaining = |slot: &u32| u64::from(self.sequences[*slot].total - self.sequences[*slot].computed);
        Load {
            waiting: self.waiting_requests,
            running: self.running(),
            kv_usage: used / memory,
            remaining_prefill_tokens: self.prefilling.iter().map(remaining).sum(),
            context_tokens: self.context_tokens + made,
            host_tokens: self.host_tokens,
            counters: self.counters,
        }
    }

    /// [`Engine::hit_tokens`] of a request that ran here under this id before, its answer's tokens counted: those that it left in the cache, where that keeps such (it
    /// does under [`Admission::Vllm`]).
    pub fn own_tokens(&self, chain: &[u64], id: u64, tokens: u32) -> u32 {
        let mut own = chain.to_vec();
        if self.settings.admission == Admission::Vllm {
            hash::extend_own(&mut own, (tokens / self.profile.block_tokens) as usize, id);
        }
        self.hit_tokens(&own, tokens)
    }

    /// Tokens of a prompt that the cache holds now, of at most `prompt_tokens - 1`.
    pub fn hit_tokens(&self, chain: &[u64], prompt_tokens: u32) -> u32 {
        let block = self.profile.block_tokens;
        let found = match self.settings.admission {
            Admission::Vllm => {
                let full = (prompt_tokens.saturating_sub(1) / block) as usize;
                chain.iter().take(full).take_while(|&&hash| self.pool.find(hash).is_some()).count()
            }
            Admission::Reserve => self.cache.find(prompt_blocks(chain, prompt_tokens, block)),
        };
        (found as u32 * block).min(prompt_tokens.saturating_sub(1))
    }
}

/// The blocks of a prompt, its partial last one included.
fn prompt_blocks(chain: &[u64], prompt_tokens: u32, block_tokens: u32) -> &[u64] {
    &chain[..chain.len().min(prompt_tokens.div_ceil(block_tokens) as usize)]
}
