//! The event loop: requests arrive, the router places them, engines step, and the router receives
//! signals.
//!
//! Time moves from one event to the next. At each moment the loop first takes all events of that
//! moment and then places new requests. Last, free engines begin a step, so that the step includes
//! requests of that very moment.
//!
//! An engine whose batch only decodes runs through steps while nothing else changes, and produces
//! an event only at their end. A request that arrives in between cuts them short. The progress that
//! a decision needs is computed at the decision.
//!
//! Everything that happens later is an [`Event`] in one queue. Moves are events, and future
//! failures shall be events, not further loops. A request's way through the cluster begins in
//! `arrive` and runs one segment of its plan at a time; `handover` leads from one segment to the
//! next.
use crate::engine::order::Order;
use crate::engine::{Admission, Engine, HostTier, Preempt, Prompt, Request};
use crate::gaps::{GapHistogram, Gaps, Makes, TokenGaps, TokenSlo};
use crate::profile::Profile;
use crate::record::{Quantity, Records, Timeline};
use crate::routers::{Policies, Routers};
use crate::signals::Signals;
use crate::transfer::{Links, Transfer};
use crate::workload::{Waiting, Workload};
pub use churn::{ChangeRecord, FleetChange};
use churn::{Churn, fetch_of};
pub use fetches::SimulatedFetch;
use fetches::UnderWay;
use handover::Part;
use hashbrown::HashMap;
use lmetric_core::CoreError;
use lmetric_core::admission::{LoadConfig, Verdict};
use lmetric_core::estimate::StepTime;
use lmetric_core::fleet::Role;
use lmetric_core::guard::Phase;
use lmetric_core::ids::{ArrivalId, Seconds};
use lmetric_core::plan::Usage;
use lmetric_core::program::Finish;
use lmetric_core::rebalance::RebalanceConfig;
use lmetric_core::request::{Request as RouterRequest, Tenant};
use lmetric_core::router::{Priorities, Router, RouterConfig, Split};
pub use recompute::{MoveBy, Recompute};
use recompute::{Warming, ahead_of};
use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// A cluster: its engines, the router's view of them, and the recorded quantities.
#[derive(Clone, Debug)]
pub struct ClusterConfig {
    /// Profiles, one per instance, all with the workload's block size.
    pub profiles: Vec<Profile>,
    /// The router's step-time model of each instance; empty: the router's own settings apply to
    /// all.
    pub step_times: Vec<StepTime>,
    /// Role of each instance; empty: all take whole requests.
    pub roles: Vec<Role>,
    /// Cost of a KV transfer after a prefill on another instance.
    pub transfer: Transfer,
    /// Effects of prefix fetches on their holders. The router's settings turn prefix fetches on.
    pub fetching: SimulatedFetch,
    /// How requests get memory.
    pub admission: Admission,
    /// Whether the next turn's prompt finds the blocks of an answer in the cache, as on real
    /// engines: only under [`Admission::Vllm`]. Else it finds the blocks of prompts alone.
    pub cached_answers: bool,
    /// Whether the last request of a conversation says so.
    pub session_final: bool,
    /// Cache size that the routers receive, divided by the engines' own.
    pub reported_cache_ratio: f64,
    /// The local order of the engines.
    pub order: Order,
    /// Handling of the KV of requests that go back into a queue.
    pub preempt: Preempt,
    /// The host-memory tier of each engine; `None`: they have none.
    pub host: Option<HostTier>,
    /// Source of the numbers for the order `priority`; a session is a tenant. `None`: all requests
    /// have 0.
    pub priorities: Option<Priorities>,
    /// Seconds between two exports of a router's load to its peers; `None`: no exports.
    pub sharing_seconds: Option<Seconds>,
    /// The signals that the router receives, and their delay.
    pub signals: Signals,
    /// The router's settings. Two of them are derived: the signals decide whether its backlog
    /// drains by itself, the admission whether partial blocks count. With `unlimited_prefill`, each
    /// prefill takes its own time and uses no engine.
    pub router: RouterConfig,
    /// How the routers admit requests by load; a session is a tenant. `None`: they do not.
    pub load: Option<LoadConfig>,
    /// How to split requests that roles do not split.
    pub split: Split,
    /// Whether a segment with a successor sends nothing until its end, as on stock engines. (Their
    /// streams never include the parameters for fetching the KV they left.) Else its tokens stream
    /// as they are made.
    pub silent_segments: bool,
    /// Whether the router knows the length of each request's answer.
    pub output_known: bool,
    /// How running requests are moved; `None`: they do not move.
    pub rebalance: Option<RebalanceConfig>,
    /// How moving requests get to their target.
    pub move_by: MoveBy,
    /// Instances that join and leave, in order of time. The router's settings say whether they do
    /// so warm.
    pub changes: Vec<FleetChange>,
    /// Length of the timeline's buckets, in seconds.
    pub timeline_seconds: Seconds,
    /// Longest acceptable gap before an output token: before an answer token and before a reasoning
    /// token.
    pub token_slo: TokenSlo,
}

/// The outcome of a run.
pub struct Outcome {
    /// One row per request.
    pub records: Records,
    /// Load over time.
    pub timeline: Timeline,
    /// Times that the guard suspected a prefix.
    pub guard_alarms: u64,
    /// Times that the guard filtered instances.
    pub guard_filters: u64,
    /// Choices in which a policy scored no candidate, so the instance with the fewest requests was
    /// chosen.
    pub unscored: u64,
    /// Steps of all engines.
    pub steps: u64,
    /// Preemptions because an engine ran out of memory.
    pub out_of_memory: u64,
    /// Engines that stand still forever, beyond the limits of their [`crate::DecodeThroughput`].
    /// Their requests never end, nor do the requests that wait for these.
    pub stalled: u64,
    /// Variance of the decode step's seconds over the instances that decode, mean over the run
    /// (STAR, section 6.3), in seconds squared; 0 with one such instance.
    pub step_variance: f64,
    /// Gaps between the output tokens of all requests, as clients receive them.
    pub gaps: GapHistogram,
    /// Outcomes of the fleet changes, in the order of [`ClusterConfig::changes`].
    pub changes: Vec<ChangeRecord>,
    /// The routers after the run, with their totals and latest decision records.
    pub routers: Vec<Router>,
}

/// Events, in the order in which events of one moment are taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    /// The step of an instance has ended, or its end is seen, if this is still the instance's
    /// `version`.
    Step { instance: u32, version: u32 },
    /// A segment with a successor has ended.
    Prefilled { request: u32 },
    /// An instance whose last step was seen before its end may begin the next step.
    Free { instance: u32 },
    /// Blocks have arrived from an instance's host tier.
    Loaded { instance: u32 },
    /// The KV of a segment has arrived at the next segment's instance.
    HandOver { request: u32 },
    /// The holder of a prefix can send it.
    FetchBegins { request: u32 },
    /// A prefix fetch has ended.
    FetchEnds { request: u32 },
    /// An instance joins or leaves.
    FleetChange { number: u32 },
    /// A fleet change begins further fetches.
    ContinueChange { number: u32 },
    /// The source of a fetch for a fleet change can send it.
    PrefixBegins { fetch: u32 },
    /// The KV of such a fetch has arrived.
    PrefixArrives { fetch: u32 },
    /// A look at an instance that leaves.
    Leaves { instance: u32 },
    /// An instance reports its load.
    Report { instance: u32 },
    /// A router exports its load to its peers.
    Share { router: u32 },
    /// The router runs its periodic work.
    Tick,
    /// The routers admit held requests.
    Admit,
    /// The router runs a round of rebalancing.
    Rebalance,
    /// Step times are compared over the instances that decode.
    Compare,
    /// A request arrives.
    Arrival { request: u32 },
}

impl Event {
    /// Whether the event repeats forever and leads to nothing by itself.
    fn for_ever(self) -> bool {
        matches!(
            self,
            Event::Report { .. }
                | Event::Share { .. }
                | Event::Tick
                | Event::Admit
                | Event::Rebalance
                | Event::Compare
                | Event::FleetChange { .. }
                | Event::ContinueChange { .. }
                | Event::Leaves { .. }
        )
    }
}

/// State of an instance.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Idle,
    /// Steps are under way.
    Stepping,
    /// Its last step was seen as ended, but still runs.
    Seen,
}

struct Instance {
    state: State,
    version: u32,
    /// Whether it is among the instances that begin a step at the end of this moment.
    ready: bool,
    /// End of a step that was seen before its end.
    busy_until: Seconds,
    /// Time at which its queue length last changed.
    queue_since: Seconds,
    queued: u32,
}

/// The state of a run.
struct Cluster<'a> {
    config: &'a ClusterConfig,
    workload: &'a Workload,
    engines: Vec<Engine>,
    instances: Vec<Instance>,
    routers: Routers,
    links: Links,
    churn: Churn,
    /// Prefix fetches that have not ended, by request.
    fetches: HashMap<u32, UnderWay>,
    /// Requests that wait for others.
    waiting: Waiting,
    /// The running part of each request, and whether its engine has made a token of it.
    parts: Vec<Part>,
    started: Vec<bool>,
    /// Whether each request's decode instance was known when its prefill began.
    early: Vec<bool>,
    /// Priority of each request in its engine's queue.
    priorities: Vec<i64>,
    records: Records,
    timeline: Timeline,
    events: BinaryHeap<Reverse<(u64, Event)>>,
    ready: Vec<u32>,
    now: Seconds,
    /// Time of each split request's last token before its boundary, and the gaps at the boundaries.
    last_tokens: Vec<Seconds>,
    /// By instance, the requests that leave it when its step ends.
    leaving: Vec<Vec<u32>>,
    /// Moves whose target computes ahead, by request.
    warming: HashMap<u32, Warming>,
    seams: TokenGaps,
    /// The gaps that engines count before tokens that are made again behind a boundary.
    again: GapHistogram,
    /// Sum and number of the variances of step times.
    variances: (f64, f64),
    /// Requests that have not ended, and pending events other than reports and ticks, which repeat
    /// forever.
    left: usize,
    moving: usize,
    /// Held requests, by the number of their router and their arrival there.
    held: HashMap<(usize, ArrivalId), u32>,
    guard_alarms: u64,
    guard_filters: u64,
    stalled: u64,
}

/// Plays `workload` over a cluster with one router per element of `policies`. The router's seed
/// draws a router for each request. `go_on` is called now and then; its error ends the run.
///
/// The same workload, policies and configuration give the same outcome, bit for bit.
///
/// # Errors
/// Settings out of range, a request that no engine could ever hold, a policy that cannot score.
pub fn simulate<E: From<CoreError>>(
    workload: &Workload,
    policies: Vec<Policies>,
    config: &ClusterConfig,
    mut go_on: impl FnMut() -> Result<(), E>,
) -> Result<Outcome, E> {
    let mut cluster = Cluster::new(workload, policies, config)?;
    let mut events = 0u64;
    while cluster.step()? {
        events += 1;
        if events.is_multiple_of(1 << 14) {
            go_on()?;
        }
    }
    cluster.time_stalls();
    let engines = || cluster.engines.iter().chain(&cluster.churn.retired);
    Ok(Outcome {
        out_of_memory: engines().map(|engine| engine.load().counters.out_of_memory).sum(),
        steps: engines().map(|engine| engine.load().counters.steps).sum(),
        stalled: cluster.stalled,
        records: cluster.records,
        timeline: cluster.timeline,
        guard_alarms: cluster.guard_alarms,
        guard_filters: cluster.guard_filters,
        unscored: cluster.routers.each().map(|observer| observer.router.totals().unscored).sum(),
        step_variance: cluster.variances.0 / cluster.variances.1.max(1.0),
        gaps: {
            let mut gaps = cluster.seams.histogram().clone();
            engines().for_each(|engine| gaps.add(engine.gaps()));
            gaps.subtract(&cluster.again);
            gaps
        },
        changes: cluster.churn.records,
        routers: cluster.routers.into_routers(),
    })
}

fn bad<T>(what: &str, got: impl ToString, expected: impl Into<String>) -> Result<T, CoreError> {
    Err(CoreError::BadValue { what: what.into(), got: got.to_string(), expected: expected.into() })
}

impl Cluster<'_> {
    /// Puts an event into the queue. Times are never negative, so their bits sort like the numbers.
    fn at(&mut self, time: Seconds, event: Event) {
        self.moving += usize::from(!event.for_ever());
        self.events.push(Reverse((time.max(0.0).to_bits(), event)));
    }

    /// Takes the next event. Returns false if all requests have ended.
    fn step(&mut self) -> Result<bool, CoreError> {
        let next = self.events.peek().map(|Reverse((time, _))| f64::from_bits(*time));
        if next.is_none_or(|next| next > self.now) && !self.ready.is_empty() {
            self.start_ready()?;
            return Ok(true);
        }
        if self.left == 0 {
            return Ok(false);
        }
        // A repeating event may come at the very moment at which an engine is about to begin a
        // step.
        let waits = !self.held.is_empty() || (!self.churn.held.is_empty() && self.join_to_come());
        let goes_on = self.moving > 0 || !self.ready.is_empty() || waits;
        let Some(Reverse((time, event))) = self.events.pop().filter(|_| goes_on) else {
            if self.stalled > 0 {
                return Ok(false);
            }
            return bad(
                "simulation",
                format!("{} requests that never end", self.left),
                "engines that serve them",
            );
        };
        self.now = f64::from_bits(time);
        self.moving -= usize::from(!event.for_ever());
        match event {
            Event::Step { instance, version } if self.instances[instance as usize].version == version => {
                self.see(instance as usize)?;
            }
            Event::Step { .. } => {}
            Event::Prefilled { request } => self.prefilled(request as usize)?,
            Event::Free { instance } => self.free(instance as usize),
            Event::Loaded { instance } => {
                if self.instances[instance as usize].state == State::Idle {
                    self.free(instance as usize);
                }
            }
            Event::HandOver { request } => self.hand_over(request as usize)?,
            Event::FetchBegins { request } => self.begin_fetch(request as usize),
            Event::FetchEnds { request } => self.end_fetch(request as usize)?,
            Event::FleetChange { number } => self.begin_change(number as usize)?,
            Event::ContinueChange { number } => self.continue_change(number as usize)?,
            Event::PrefixBegins { fetch } => self.begin_prefix(fetch as usize)?,
            Event::PrefixArrives { fetch } => self.prefix_arrives(fetch as usize)?,
            Event::Leaves { instance } => self.leave_fleet(instance as usize)?,
            Event::Arrival { request } => self.arrive(request as usize)?,
            Event::Report { instance } => {
                self.routers.report(instance as usize, &self.engines[instance as usize], self.now)?;
                let period = self.config.signals.report_period_seconds.unwrap_or(1.0);
                self.at(self.now + period, event);
            }
            Event::Share { router } => {
                self.routers.share(router as usize, &self.engines, self.now)?;
                self.at(self.now + self.config.sharing_seconds.unwrap_or(1.0), event);
            }
            Event::Tick => self.tick()?,
            Event::Admit => self.admit_round()?,
            Event::Rebalance => self.rebalance()?,
            Event::Compare => self.compare(),
        }
        Ok(true)
    }

    fn tick(&mut self) -> Result<(), CoreError> {
        self.routers.catch_up_all(&self.engines, self.now)?;
        let mut next = f64::INFINITY; // equal for all routers: they have the same settings
        for observer in self.routers.each() {
            let (events, at) = observer.router.tick(self.now);
            for event in events.iter().filter(|event| !event.released) {
                match event.phase {
                    Phase::Suspected => self.guard_alarms += 1,
                    Phase::Filtering => self.guard_filters += 1,
                }
            }
            next = next.min(at);
        }
        self.at(next, Event::Tick);
        Ok(())
    }

    /// Records the arrival of a request, and places it unless it must wait.
    fn arrive(&mut self, request: usize) -> Result<(), CoreError> {
        self.routers.catch_up(request as u64, &self.engines, self.now)?;
        let arrival = &mut self.records.arrival_seconds[request];
        *arrival = if arrival.is_nan() { self.now } else { *arrival };
        if !self.churn.any_present() {
            self.churn.held.push(request as u32);
            return Ok(());
        }
        let asked = router_request(self.workload, self.config, request);
        let router = &mut self.routers.of(request as u64).router;
        // Sessions are tenants for admission by load only: programs know them as sessions.
        let tenant = if self.config.load.is_some() { asked.tenant } else { Tenant::NOBODY };
        let unordered = RouterRequest { tenant, ..asked.clone() };
        let Some((arrival, verdict)) = router.arrive(&unordered, self.now)? else {
            return self.place(request, &asked);
        };
        match (verdict, arrival) {
            (Verdict::Held { .. }, Some(arrival)) => {
                let router = self.routers.number_of(request as u64);
                self.held.insert((router, arrival), request as u32);
                Ok(())
            }
            (Verdict::Refused { by, retry_after_seconds }, _) => {
                self.refuse(request as u32, by, retry_after_seconds);
                Ok(())
            }
            (_, arrival) => self.place(request, &RouterRequest { arrival, ..asked }),
        }
    }

    /// Places a request and puts it into the engine's queue.
    fn place(&mut self, request: usize, asked: &RouterRequest<'_>) -> Result<(), CoreError> {
        let observer = self.routers.of(request as u64);
        let shape = &self.workload.shape;
        let decision = observer.router.route(asked, self.now)?;
        observer.placed(request as u64, decision.ticket, decision.segment, shape.input_tokens[request]);
        observer.sent(request as u64, self.now)?;
        self.priorities[request] = decision.priority.map_or(0, |priority| priority.value);
        let instance = decision.segment.instance.index();
        self.records.hold_seconds[request] = self.now - self.records.arrival_seconds[request];
        self.records.instance[request] = instance as i64;
        self.records.predicted_hit_tokens[request] = i64::from(decision.predicted_hit_tokens);
        if let Some(next) = decision.next {
            self.records.decode_instance[request] = next.instance.index() as i64;
        }
        self.begin(request, decision.segment);
        if let Some(fetch) = decision.fetch {
            self.ask_for_fetch(request, fetch);
            return Ok(());
        }
        if decision.segment.to_token.is_some() && self.config.router.unlimited_prefill {
            return self.prefill_alone(request, instance);
        }
        self.submit(request, instance)
    }

    /// Submits the current part of a request to an engine.
    fn submit(&mut self, request: usize, instance: usize) -> Result<(), CoreError> {
        let part = self.parts[request];
        let asked = Request {
            priority: self.priorities[request],
            ..engine_request(self.workload, self.config, request, part)
        };
        if part.recomputed {
            let hashes = self.chain_with_answer(request, part.from);
            let prompt = Prompt::Chain { hashes: &hashes, tokens: part.from };
            return self.put(&Request { prompt, fetched_tokens: 0, ..asked }, instance);
        }
        self.put(&asked, instance)
    }

    /// Puts a request into an engine's queue.
    fn put(&mut self, asked: &Request<'_>, instance: usize) -> Result<(), CoreError> {
        self.engines[instance].submit(asked, self.now)?;
        self.count_queue(instance);
        match self.instances[instance].state {
            State::Idle => self.free(instance),
            State::Seen => {}
            State::Stepping => {
                if let Some(end) = self.engines[instance].interrupt(self.now) {
                    self.expect(instance, end);
                }
            }
        }
        Ok(())
    }

    /// Lets the instance begin a step at the end of this moment.
    fn free(&mut self, instance: usize) {
        self.instances[instance].state = State::Idle;
        if !std::mem::replace(&mut self.instances[instance].ready, true) {
            self.ready.push(instance as u32);
        }
    }

    /// Begins the steps of this moment.
    fn start_ready(&mut self) -> Result<(), CoreError> {
        let mut ready = std::mem::take(&mut self.ready);
        ready.sort_unstable();
        for &instance in &ready {
            let instance = instance as usize;
            self.instances[instance].ready = false;
            let end = self.engines[instance].start_steps(self.now, f64::INFINITY);
            let events = self.engines[instance].events();
            for admitted in events.admitted.iter().filter(|admitted| admitted.first_time) {
                if !placed(admitted.id) {
                    continue;
                }
                let request = admitted.id as usize;
                self.parts[request].began = self.now;
                if self.parts[request].from > 0 {
                    self.records.decode_start_seconds[request] = self.now;
                } else {
                    self.records.scheduled_seconds[request] = self.now;
                    self.records.hit_tokens[request] = i64::from(admitted.cached_tokens);
                    self.records.fetched_tokens[request] = i64::from(admitted.fetched_tokens);
                    self.records.loaded_tokens[request] = i64::from(admitted.loaded_tokens);
                }
            }
            let whole = events.preempted.iter().filter(|id| placed(**id));
            whole.for_each(|&id| self.records.preemptions[id as usize] += 1);
            for admitted in events.admitted.iter().filter(|each| fetch_of(each.id).is_none()) {
                if let Some(request) = ahead_of(admitted.id) {
                    let warming = self.warming.get_mut(&(request as u32));
                    warming.into_iter().for_each(|warming| warming.began(admitted.cached_tokens));
                    continue;
                }
                self.routers.of(admitted.id).started(admitted, self.now)?;
            }
            self.count_queue(instance);
            self.routers.cache_changed(instance, self.engines[instance].kv_log(), self.now);
            if let Some(end) = end {
                self.instances[instance].state = State::Stepping;
                self.expect(instance, end);
            } else if let Some(end) = self.engines[instance].next_load() {
                self.at(end, Event::Loaded { instance: instance as u32 });
            }
        }
        ready.clear();
        self.ready = ready;
        Ok(())
    }

    /// Schedules the event at which the end of the steps under way is seen.
    fn expect(&mut self, instance: usize, end: Seconds) {
        if end.is_infinite() {
            self.stalled += 1;
            return;
        }
        let seen = match self.config.signals.step_end {
            false => end,
            true => self.engines[instance].last_step_start().unwrap_or(end).max(self.now),
        };
        self.instances[instance].version += 1;
        let version = self.instances[instance].version;
        self.at(seen, Event::Step { instance: instance as u32, version });
    }

    /// Applies the results of the steps under way.
    fn see(&mut self, instance: usize) -> Result<(), CoreError> {
        let kept = self.config.split.keeps_tokens();
        let running = f64::from(self.engines[instance].running());
        let events = self.engines[instance].finish_step();
        let (start, end) = (events.start, events.end);
        self.timeline.add(instance, Quantity::Running, start, end, running);
        let computed: u32 = events.prefilled.iter().map(|chunk| chunk.tokens).sum();
        self.timeline.add(instance, Quantity::PrefillTokens, start, end, f64::from(computed) / (end - start));
        for chunk in events.prefilled.iter().filter(|chunk| fetch_of(chunk.id).is_none()) {
            let request = ahead_of(chunk.id).unwrap_or(chunk.id as usize);
            // Another instance has computed this token; here it takes what a decode takes.
            if chunk.decodes && self.parts[request].from > 0 {
                continue;
            }
            self.records.computed_tokens[request] += i64::from(chunk.tokens);
        }
        for chunk in events.prefilled.iter().filter(|chunk| placed(chunk.id)) {
            let request = chunk.id as usize;
            // No client receives the first token of a prefill for another instance.
            let (part, prompt) = (&self.parts[request], self.workload.shape.input_tokens[request]);
            let streams = part.streams(prompt, self.config.silent_segments);
            let first = chunk.done && !self.started[request] && streams;
            if first {
                self.started[request] = true;
                let at = &mut self.records.first_token_seconds[request];
                *at = if at.is_nan() { end } else { *at };
                let last = std::mem::replace(&mut self.last_tokens[request], f64::NAN);
                if !last.is_nan() {
                    let makes = makes(self.workload, request, part.from);
                    self.records.add_gaps(request, self.seams.single(end - last, makes));
                }
            }
            self.routers.of(chunk.id).prefilled(chunk, first, self.now)?;
        }
        let (mut arrivals, mut prefilled, mut warmed) = (Vec::new(), Vec::new(), Vec::new());
        let mut fetched = Vec::new();
        for ((&id, &gaps), &last_bin) in events.finished.iter().zip(&events.gaps).zip(&events.last_bins) {
            if let Some(fetch) = fetch_of(id) {
                fetched.push(fetch);
                continue;
            }
            if let Some(request) = ahead_of(id) {
                warmed.push(request);
                continue;
            }
            let request = id as usize;
            let part = &self.parts[request];
            let shape = &self.workload.shape;
            let (prompt, output) = (shape.input_tokens[request], shape.output_tokens[request]);
            let follows = part.follows(prompt, output, kept);
            if part.streams(prompt, self.config.silent_segments) {
                // A token behind a boundary is made again. The step that made it first is part of
                // the gap at the boundary.
                let again = part.to.filter(|_| follows && !kept).is_some_and(|to| {
                    self.again.count_in(last_bin);
                    let slo = self.config.token_slo.of(makes(self.workload, request, to - 1));
                    end - events.last_start > slo
                });
                let slow = gaps.slow.saturating_sub(u32::from(again));
                self.records.add_gaps(request, Gaps { slow, ..gaps });
            }
            if follows {
                if part.to.is_some_and(|to| to > prompt) {
                    // The last token that counts came one step before a token that is made again.
                    let at_end = kept || self.config.silent_segments;
                    self.last_tokens[request] = if at_end { end } else { events.last_start };
                }
                prefilled.push(request);
                continue;
            }
            self.left -= 1;
            let records = &mut self.records;
            if part.to.is_some() {
                // The answer is over before the boundary. A silent segment sends it now.
                let first = &mut records.first_token_seconds[request];
                *first = if first.is_nan() { end } else { *first };
                let cut = match part.from {
                    0 => &mut records.cut_tokens,
                    _ => &mut records.answer_cut_tokens,
                };
                cut[request] = -1;
                if part.from == 0 {
                    records.decode_instance[request] = -1;
                }
            }
            records.finished_seconds[request] = end;
            let usage = Usage {
                prompt_tokens: Some(prompt),
                cached_tokens: Some(self.records.found_tokens(request)),
                output_tokens: Some(output),
                finish: match self.workload.finish(request) {
                    0 => Finish::Stop,
                    1 => Finish::ToolCalls,
                    2 => Finish::Length,
                    _ => Finish::Unknown,
                },
            };
            self.routers.of(id).ended(id, usage, self.now)?;
            arrivals.extend(self.waiting.end(self.workload, request, end));
        }
        arrivals.into_iter().for_each(|(at, request)| self.at(at, Event::Arrival { request }));
        self.routers.cache_changed(instance, self.engines[instance].kv_log(), self.now);
        self.let_go(instance, end)?;
        if let MoveBy::Recompute(by) = self.config.move_by {
            warmed.into_iter().try_for_each(|request| self.warmed(request, by))?;
        }
        fetched.into_iter().try_for_each(|fetch| self.prefix_there(fetch))?;
        for request in prefilled {
            self.next_segment(request, end)?;
            self.at(end, Event::Prefilled { request: request as u32 });
        }
        if end > self.now {
            self.instances[instance].state = State::Seen;
            self.instances[instance].busy_until = end;
            self.at(end, Event::Free { instance: instance as u32 });
        } else {
            self.free(instance);
        }
        if self.config.load.is_some() && self.routers.each().any(|observer| observer.router.waiting() > 0) {
            self.admit_held()?;
        }
        Ok(())
    }

    /// Records a change in the length of an instance's queue.
    fn count_queue(&mut self, instance: usize) {
        let (state, waiting) = (&mut self.instances[instance], self.engines[instance].waiting());
        let (since, queued) = (state.queue_since, state.queued);
        (state.queue_since, state.queued) = (self.now, waiting);
        self.timeline.add(instance, Quantity::Waiting, since, self.now, f64::from(queued));
    }
}

/// Whether the router placed an engine's request.
fn placed(id: u64) -> bool {
    ahead_of(id).is_none()
}

/// Returns the chain of a request's prompt that an engine's cache can hold: vLLM's holds full
/// blocks only.
fn chain<'w>(workload: &'w Workload, config: &ClusterConfig, request: usize) -> &'w [u64] {
    let shape = &workload.shape;
    match config.admission {
        Admission::Reserve => shape.chain(request),
        Admission::Vllm => shape.full_blocks(request, shape.input_tokens[request]),
    }
}

/// Returns the chain of a request's prompt and, if answers are cached, of its answer.
fn chain_with_answer<'w>(workload: &'w Workload, config: &ClusterConfig, request: usize) -> &'w [u64] {
    match config.cached_answers {
        true => workload.shape.chain_with_answer(request),
        false => chain(workload, config, request),
    }
}

/// Returns a request as its router sees it.
fn router_request<'w>(workload: &'w Workload, config: &ClusterConfig, request: usize) -> RouterRequest<'w> {
    let shape = &workload.shape;
    RouterRequest {
        chain: chain(workload, config, request),
        prompt_tokens: shape.input_tokens[request],
        tokens_per_block: f64::from(shape.block_tokens),
        expected_output_tokens: config.output_known.then(|| shape.output_tokens[request]),
        think_tokens: config.output_known.then(|| shape.think_tokens[request]),
        length_class: None,
        session: shape.sessions[request],
        session_final: config.session_final && workload.is_final(request),
        tenant: Tenant { id: shape.sessions[request].unwrap_or(Tenant::NOBODY.id), ..Tenant::NOBODY },
        ..RouterRequest::default()
    }
}

/// Returns the kind of a request's token behind `tokens` of prompt and output.
fn makes(workload: &Workload, request: usize, tokens: u32) -> Makes {
    let shape = &workload.shape;
    let thought = shape.input_tokens[request] + shape.think_tokens[request];
    if tokens < thought { Makes::Thoughts } else { Makes::Answer }
}

fn engine_request<'w>(
    workload: &'w Workload,
    config: &ClusterConfig,
    request: usize,
    part: Part,
) -> Request<'w> {
    let (shape, hashes) = (&workload.shape, chain_with_answer(workload, config, request));
    let (prompt, output) = (shape.input_tokens[request], shape.output_tokens[request]);
    // The engine computes the prompt up to the boundary, and reads earlier output tokens like a
    // prompt.
    let tokens = part.to.map_or(prompt, |to| to.min(prompt)).max(part.from);
    let whole = if tokens < prompt { (tokens / shape.block_tokens) as usize } else { hashes.len() };
    let kept = config.split.keeps_tokens();
    let end = part.asked(prompt, kept).map_or(prompt + output, |to| to.min(prompt + output));
    Request {
        id: request as u64,
        prompt: Prompt::Chain { hashes: &hashes[..hashes.len().min(whole)], tokens },
        output_tokens: end - tokens,
        // No client receives the token that is made again behind the boundary: it counts like the
        // token before it.
        think_tokens: match part.to {
            Some(to) if to <= prompt + shape.think_tokens[request] => end - tokens,
            _ => (prompt + shape.think_tokens[request]).saturating_sub(tokens),
        },
        priority: 0, // set at submission
        salt: None,
        report_cached: false,
        fetched_tokens: part.from.max(part.fetched.min(tokens)),
    }
}

mod admit;
mod churn;
mod fetches;
mod handover;
mod instances;
mod moves;
mod recompute;
mod start;
#[cfg(test)]
mod tests;
