//! One engine: a queue, a batch, a cache of KV blocks, and steps.
//!
//! Every decoding sequence gets one token in every step. So its length follows from the engine's
//! *tick* (steps run so far). A step costs time for sequences that prefill, end or cross a block
//! edge, not for sequences that merely decode. Orders that rank decodes, too, pause some sequences
//! (`one_order.rs`); a paused sequence is not among the decoding ones.
use crate::cache::PrefixCache;
use crate::events::{Counters, KvEvent, KvLog, Load, StepEvents};
use crate::gaps::{DEFAULT_TOKEN_SLO_SECONDS, GapHistogram, Gaps, TokenGaps, TokenSlo};
use crate::hash;
use crate::pool::{BlockPool, Held, Piece};
use crate::profile::Profile;
use crate::sequence::{Sequence, Sequences, State};
use crate::text::Generator;
use hashbrown::HashMap;
use lmetric_core::CoreError;
use lmetric_core::ids::Seconds;
use lmetric_core::kv::tier::Tier;
use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::sync::Arc;

mod by_rank;
mod host;
mod learned;
mod one_order;
pub mod order;
mod plan;
mod put_back;
mod settle;

use host::Host;
pub use host::HostTier;
use learned::Learned;
use order::Order;
pub use put_back::Preempt;

/// How requests get memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Admission {
    /// As in vLLM: blocks are allocated as tokens are computed. If no block is left, the request
    /// with the highest (rank, arrival) in the [`Order`] goes back into the queue and is computed
    /// again later. Other requests can find full blocks at once, including blocks of generated
    /// tokens.
    Vllm,
    /// Requests are never preempted for memory. A request enters if its prompt and the prompt and
    /// output tokens of all running requests fit the capacity, or if it is alone. The cache is
    /// separate: a prompt's blocks enter when its prefill is complete, including its partial last
    /// block if the request names it.
    Reserve,
}

/// An engine's behavior, apart from its profile.
#[derive(Clone, Debug)]
pub struct Settings {
    /// How a request gets memory.
    pub admission: Admission,
    /// The local order of requests.
    pub order: Order,
    /// Handling of the KV of requests that go back into the queue.
    pub preempt: Preempt,
    /// The host-memory tier; `None`: the engine has none.
    pub host: Option<HostTier>,
    /// Whether [`Engine::kv_log`] records changes of the cache.
    pub kv_events: bool,
}

impl Default for Settings {
    fn default() -> Settings {
        Settings {
            admission: Admission::Vllm,
            order: Order::default(),
            preempt: Preempt::Recompute,
            host: None,
            kv_events: false,
        }
    }
}

/// A request's prompt.
#[derive(Clone, Copy, Debug)]
pub enum Prompt<'a> {
    /// Token IDs.
    Tokens(&'a [u32]),
    /// A trace's prompt: chained hashes of its blocks (further hashes stand for output blocks), and
    /// its length in tokens. If there are fewer hashes than blocks, no other request shares the
    /// remaining blocks.
    Chain {
        /// The chained hashes.
        hashes: &'a [u64],
        /// Prompt tokens.
        tokens: u32,
    },
}

/// A submitted request.
#[derive(Clone, Copy, Debug)]
pub struct Request<'a> {
    /// The caller's key, unique among the requests in the engine.
    pub id: u64,
    /// The prompt.
    pub prompt: Prompt<'a>,
    /// Exact number of output tokens.
    pub output_tokens: u32,
    /// Leading output tokens that are reasoning tokens; they have an SLO of their own
    /// ([`TokenSlo`], order `slo`).
    pub think_tokens: u32,
    /// Priority for the order `priority`; lower runs earlier.
    pub priority: i64,
    /// Requests with different salts share no block.
    pub salt: Option<&'a str>,
    /// Whether cached blocks of its prompt are reported again, as stored.
    pub report_cached: bool,
    /// Leading prompt tokens whose KV comes from another engine. They are not computed here, except
    /// for the prompt's last token, so that the first output token comes from a step of this
    /// engine. Tokens in the cache are not fetched. The fetched KV is lost if the request is
    /// preempted (but see [`Preempt::Swap`]). 0: the engine computes the whole prompt. (A prefill
    /// for another engine is a request of one output token.)
    pub fetched_tokens: u32,
}

impl<'a> Request<'a> {
    /// Creates a request that only has a prompt and an answer.
    pub fn new(id: u64, prompt: Prompt<'a>, output_tokens: u32) -> Request<'a> {
        Request {
            id,
            prompt,
            output_tokens,
            think_tokens: 0,
            priority: 0,
            salt: None,
            report_cached: false,
            fetched_tokens: 0,
        }
    }
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
    /// Seconds of the first step, and seconds that each further step adds.
    first: Seconds,
    more: Seconds,
}

impl Step {
    /// Returns the seconds of the first `steps` steps.
    fn lasting(&self, steps: u32) -> Seconds {
        let n = f64::from(steps);
        n * self.first + self.more * n * (n - 1.0) / 2.0
    }

    /// Returns the largest number of steps, 1 to `most`, whose last step begins before `at`.
    fn begun(&self, at: Seconds, most: u32) -> u32 {
        plan::steps_within(at - self.start, self.first, self.more, most, |n| self.lasting(n))
    }
}

/// One engine. It has no clock: callers give `now`, which never goes back, and get the end of a
/// step.
#[derive(Clone, Debug)]
pub struct Engine {
    profile: Profile,
    settings: Settings,
    generator: Option<Generator>,
    /// The blocks under [`Admission::Vllm`], or the cache under [`Admission::Reserve`].
    pool: BlockPool,
    cache: PrefixCache,
    host: Option<Host>,
    kv: KvLog,
    events: StepEvents,
    counters: Counters,
    gaps: TokenGaps,
    learned: Learned,
    /// Time at which the latest step began.
    begun: Seconds,
    sequences: Sequences,
    by_id: HashMap<u64, u32>,
    /// Submitted requests that no step has seen yet: (arrival, slot, order).
    incoming: VecDeque<(Seconds, u32, u64)>,
    /// (rank, order, slot), lowest first. Entries of aborted requests are skipped when they come
    /// up.
    waiting: BinaryHeap<Reverse<(i64, u64, u32)>>,
    waiting_requests: u32,
    /// (step, slot, order): when waiting requests get another rank, first come first.
    promotions: VecDeque<(u64, u32, u64)>,
    prefilling: Vec<u32>,
    decoding: Vec<u32>,
    /// Decodes that the latest step leaves out, with their KV in place, and their prompt and output
    /// tokens.
    paused: Vec<u32>,
    paused_tokens: u64,
    /// Paused decodes that the current step resumes.
    resumed: Vec<u32>,
    /// For orders that rank decodes: the number of the latest plan, and the decodes that it has
    /// picked so far.
    plan: u64,
    picked: u32,
    tick: u64,
    /// Prompt and output tokens of the decoding sequences, and of the prefilling sequences.
    context_tokens: u64,
    prefilling_tokens: u64,
    /// Tokens whose KV waits in the host's memory, and tokens that the next step copies there or
    /// back.
    host_tokens: u64,
    copied_tokens: u64,
    /// Extra seconds of the next step.
    held_seconds: Seconds,
    /// (tick, order, slot) of last tokens. Outdated entries are skipped when they come up.
    ends: BinaryHeap<Reverse<(u64, u64, u32)>>,
    /// (tick, order, slot) of last reasoning tokens of requests that decode on, and the number of
    /// decodes that make answer tokens.
    answers: BinaryHeap<Reverse<(u64, u64, u32)>>,
    answering: u32,
    /// Requests in the engine that have an SLO of their own.
    own_slos: u32,
    /// By tick modulo block size: decoding sequences that need a new block in the step at that
    /// tick.
    crossings: Vec<Vec<u32>>,
    chunks: Vec<Chunk>,
    step: Option<Step>,
    bytes: Vec<u8>,
    /// The blocks found for the waiting request that was looked up last.
    found: Vec<Piece>,
}

impl Engine {
    /// Makes an idle engine. With a generator it makes tokens, and accepts prompts as token IDs
    /// only.
    pub fn new(
        profile: Profile,
        settings: Settings,
        generator: Option<Generator>,
    ) -> Result<Engine, CoreError> {
        profile.check()?;
        settings.preempt.check(settings.admission)?;
        settings.host.map_or(Ok(()), |tier| tier.check(settings.admission, &settings.order))?;
        let reserve = settings.admission == Admission::Reserve;
        Ok(Engine {
            learned: Learned::new(settings.order.rules().learns(), &profile)?,
            pool: BlockPool::new(if reserve { 0 } else { profile.cache_blocks }),
            cache: PrefixCache::new(profile.cache_blocks, Tier::Gpu),
            host: settings.host.map(|tier| Host::new(tier, profile.cache_blocks)),
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
            own_slos: 0,
            chunks: Vec::new(),
            step: None,
            bytes: Vec::new(),
            found: Vec::new(),
        })
    }

    /// Returns the engine's constants.
    pub fn profile(&self) -> &Profile {
        &self.profile
    }

    /// Counts gaps between tokens against this SLO from now on (default:
    /// [`DEFAULT_TOKEN_SLO_SECONDS`]).
    pub fn set_token_slo(&mut self, slo: TokenSlo) {
        self.gaps = TokenGaps::new(slo);
    }

    /// Returns the gaps between the tokens of all requests.
    pub fn gaps(&self) -> &GapHistogram {
        self.gaps.histogram()
    }

    /// Puts a request into the queue. A step that begins at `now` or later can take it off.
    ///
    /// Errors: an empty prompt, no output token, or an id that is already in the engine. If the
    /// engine makes tokens: a prompt without token IDs, or IDs outside of its vocabulary. Under
    /// [`Admission::Vllm`]: more tokens than the KV memory holds.
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
        sequence.fetched = request.fetched_tokens;
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

    /// Gives a request its own SLO of a token, which counts in the order `slo` in place of the
    /// order's, for answer and reasoning tokens.
    ///
    /// Errors: a request that is not in the engine, or an SLO that is 0 or not a number.
    pub fn set_own_slo(&mut self, id: u64, seconds: Seconds) -> Result<(), CoreError> {
        order::check_token_seconds("a token", seconds)?;
        let slot = self.by_id.get(&id).copied().ok_or_else(|| CoreError::BadValue {
            what: "request with an SLO".into(),
            got: id.to_string(),
            expected: "one that is in the engine".into(),
        })?;
        let before = self.sequences[slot].own_slo.replace(seconds);
        self.own_slos += u32::from(before.is_none());
        Ok(())
    }

    /// Returns the errors of [`Engine::submit`].
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
        if request.fetched_tokens as usize > prompt_tokens {
            let got = request.fetched_tokens.to_string();
            return bad("fetched tokens", got, format!("at most the prompt's {prompt_tokens}"));
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
        // The last token is never computed, so it needs no block.
        let (needed, block) =
            (prompt_tokens + request.output_tokens as usize - 1, self.profile.block_tokens as usize);
        let (most, why) = match self.settings.admission {
            Admission::Vllm => (self.profile.cache_blocks as usize * block, ": the KV memory"),
            // A request alone in the batch may be larger than the KV memory.
            Admission::Reserve => (u32::MAX as usize / 2, ""),
        };
        if needed > most {
            return bad("prompt and output", format!("{needed} tokens"), format!("at most {most}{why}"));
        }
        Ok(())
    }

    /// Drops a request in any state. Returns false if it is not in the engine.
    pub fn abort(&mut self, id: u64) -> bool {
        let Some(slot) = self.by_id.get(&id).copied() else { return false };
        if matches!(self.sequences[slot].state, State::Waiting | State::Loading) {
            self.waiting_requests -= 1;
            self.release_loaded(slot);
        } else {
            self.unplace(slot);
        }
        self.forget(slot);
        self.counters.aborted += 1;
        true
    }

    /// Removes a decoding request, between two steps. Returns the output tokens that it has made
    /// here, and the gaps between them. None: it does not decode here now.
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

    /// Returns the output tokens that a decoding request has made here by `at`. None: it does not
    /// decode here now.
    pub fn made(&self, id: u64, at: Seconds) -> Option<u32> {
        let sequence = &self.sequences[*self.by_id.get(&id)?];
        let decodes = sequence.state == State::Decode;
        let done = sequence.total_at(self.tick) - sequence.prompt_tokens;
        decodes.then(|| done + self.progress(at).1)
    }

    /// Starts a step at `now` and returns its end. None: there is nothing to do at `now`. While a
    /// step runs, returns its end. The end is infinite if the engine stands still (see
    /// [`crate::DecodeThroughput`]).
    pub fn start_step(&mut self, now: Seconds) -> Option<Seconds> {
        self.start_steps(now, now)
    }

    /// Starts a step at `now`, and further steps that begin before `until` and before the next
    /// known arrival while only lengths change. Returns the end of the last step. An engine that
    /// makes tokens starts one step.
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
        self.end_loads(now);
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
        // A step that copies is alone: a request was preempted or admitted in it.
        let copied = std::mem::take(&mut self.copied_tokens);
        let held = std::mem::take(&mut self.held_seconds);
        let first = self.profile.step_seconds(&work) + self.copy_seconds(copied) + held;
        let mut step = Step { start: now, end: now + first, steps: 1, first, more: 0.0 };
        // After a preemption, the next step looks at the queue again.
        let alone = held > 0.0 || self.generator.is_some() || !self.resumed.is_empty();
        if self.prefilling.is_empty() && self.events.preempted.is_empty() && !alone {
            // Each further step has one more token of context for each sequence.
            step.more = self.profile.more_seconds(self.decoding.len() as u32);
            let horizon = self.incoming.front().map_or(until, |(arrival, ..)| arrival.min(until));
            let horizon = self.next_load().map_or(horizon, |end| end.min(horizon));
            step.steps = step.begun(horizon, self.alike_steps());
            step.end = now + step.lasting(step.steps);
        }
        self.step = Some(step);
        Some(step.end)
    }

    /// Cancels the steps under way that begin at `at` or later (the first stays), so that a step
    /// that begins then can include new requests. Returns the new end. None: nothing changes.
    pub fn interrupt(&mut self, at: Seconds) -> Option<Seconds> {
        let step = self.step.as_mut()?;
        let steps = step.begun(at, step.steps);
        if steps == step.steps {
            return None;
        }
        (step.steps, step.end) = (steps, step.start + step.lasting(steps));
        Some(step.end)
    }

    /// Returns the end of the step that runs at `at`.
    pub fn present_step_ends(&self, at: Seconds) -> Option<Seconds> {
        self.step.map(|step| step.start + step.lasting(step.begun(at, step.steps)))
    }

    /// Makes the next step take longer by `seconds`: the engine does other work before it. Has no
    /// effect if the engine has nothing to do then.
    pub fn hold(&mut self, seconds: Seconds) {
        self.held_seconds += seconds;
    }

    /// Marks the first `tokens` of a prompt, which the cache holds, as the most recently used.
    /// Returns the blocks that are pinned until [`Engine::release_prefix`]; none under
    /// [`Admission::Reserve`], whose cache has no users.
    pub fn use_prefix(&mut self, chain: &[u64], tokens: u32) -> Held {
        let blocks = tokens.div_ceil(self.profile.block_tokens) as usize;
        let front = &chain[..chain.len().min(blocks)];
        let mut held = Held::default();
        match self.settings.admission {
            Admission::Reserve => {
                self.cache.touch(front);
            }
            Admission::Vllm => {
                let found: Vec<Piece> = self.pool.find(front).collect();
                self.pool.share(&found, &mut held);
            }
        }
        held
    }

    /// Releases pinned blocks, the last first.
    pub fn release_prefix(&mut self, blocks: &mut Held) {
        self.pool.release(blocks);
    }

    /// Returns the time at which the last of the steps under way begins.
    pub fn last_step_start(&self) -> Option<Seconds> {
        self.step
            .map(|step| if step.steps > 1 { step.start + step.lasting(step.steps - 1) } else { step.start })
    }

    /// Whether the step under way never ends.
    pub fn stalled(&self) -> bool {
        self.step.is_some_and(|step| step.end.is_infinite())
    }

    /// Returns how many of the steps under way have begun before `at`, and how many have ended by
    /// then.
    pub fn progress(&self, at: Seconds) -> (u32, u32) {
        let Some(step) = &self.step else { return (0, 0) };
        let begun = step.begun(at, step.steps);
        (begun, if step.start + step.lasting(begun) <= at { begun } else { begun - 1 })
    }

    /// Returns the decoding requests, and the output tokens each had when the steps under way
    /// began.
    pub fn decoding(&self) -> impl Iterator<Item = (u64, u32)> {
        let made = |s: &Sequence, tick| (s.id, s.total_at(tick) - s.prompt_tokens);
        self.decoding.iter().map(move |&slot| made(&self.sequences[slot], self.tick))
    }

    /// Returns the number of decoding sequences, and their context tokens after this many of the
    /// steps under way.
    pub fn decode_load(&self, steps: u32) -> (u32, u64) {
        let n = self.decoding.len() as u32;
        (n, self.context_tokens + u64::from(steps) * u64::from(n))
    }

    /// Returns the number of steps run.
    pub fn steps(&self) -> u64 {
        self.counters.steps
    }

    /// Returns the number of admitted requests: requests in the batch, and requests that an order
    /// which ranks decodes has left out of it.
    pub fn running(&self) -> u32 {
        (self.prefilling.len() + self.decoding.len() + self.paused.len()) as u32
    }

    /// Returns the number of requests in the queue.
    pub fn waiting(&self) -> u32 {
        self.waiting_requests
    }

    /// Ends the step at the time that `start_step` returned, and returns its events.
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
        self.learned.steps(step.end - step.start, decoded + u64::from(computed), step.steps);
        self.finish_decodes(&step);
        self.finish_prefills();
        if self.learned.look() {
            self.rank_waiting();
        }
        &self.events
    }

    /// Returns the events so far of the step under way (admissions, preemptions), or the events of
    /// the last step.
    pub fn events(&self) -> &StepEvents {
        &self.events
    }

    /// Returns the changes of the cache since [`KvLog::clear`]: read and clear them after each
    /// step.
    pub fn kv_log(&mut self) -> &mut KvLog {
        &mut self.kv
    }

    /// Empties the prefix cache. Returns false and does nothing while a request uses a block.
    pub fn reset_cache(&mut self) -> bool {
        let cleared = self.pool.clear();
        self.cache.clear();
        if cleared && self.kv.on {
            self.kv.events.push(KvEvent::Cleared);
        }
        cleared
    }

    /// Returns the load at the begin of the steps under way, or now.
    pub fn load(&self) -> Load {
        self.load_after(0)
    }

    /// Returns the load after this many of the steps under way, if only lengths change in them.
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

    /// Returns the cached tokens of a request that ran here under this id before, as
    /// [`Engine::hit_tokens`] but including its answer's tokens. The cache keeps such tokens under
    /// [`Admission::Vllm`] only.
    pub fn own_tokens(&self, chain: &[u64], id: u64, tokens: u32) -> u32 {
        let mut own = chain.to_vec();
        if self.settings.admission == Admission::Vllm {
            hash::extend_own(&mut own, (tokens / self.profile.block_tokens) as usize, id);
        }
        self.hit_tokens(&own, tokens)
    }

    /// Returns the tokens of a prompt that the cache holds now, at most `prompt_tokens - 1`.
    pub fn hit_tokens(&self, chain: &[u64], prompt_tokens: u32) -> u32 {
        let block = self.profile.block_tokens;
        let found = match self.settings.admission {
            Admission::Vllm => {
                let full = (prompt_tokens.saturating_sub(1) / block) as usize;
                let found = self.pool.find(&chain[..chain.len().min(full)]);
                found.map(|piece| piece.blocks as usize).sum()
            }
            Admission::Reserve => self.cache.find(prompt_blocks(chain, prompt_tokens, block)),
        };
        (found as u32 * block).min(prompt_tokens.saturating_sub(1))
    }
}

/// Returns the blocks of a prompt, including its partial last block.
fn prompt_blocks(chain: &[u64], prompt_tokens: u32, block_tokens: u32) -> &[u64] {
    &chain[..chain.len().min(prompt_tokens.div_ceil(block_tokens) as usize)]
}
