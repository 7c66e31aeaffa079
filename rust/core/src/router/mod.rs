//! The router: the only one that commits. It decides from a snapshot, books the placement at once, follows each ticket to its
//! end and keeps the receipts. One router serves one pool: the instances of one model.

pub mod books;
mod derive;
mod explain;
pub mod shared;
pub mod tickets;

pub use shared::{SharedRouter, Ticket};
pub use tickets::TicketId;

use crate::error::CoreError;
use crate::estimate::StepTime;
use crate::fleet::{Fleet, Role};
use crate::guard::{Guard, GuardConfig, GuardEvent, Restriction};
use crate::ids::{InstanceId, Seconds};
use crate::indicators::{Columns, Indicator, IndicatorSet, Snapshot};
use crate::kv::index::KvIndex;
use crate::plan::{Event, Failure, Segment, Usage};
use crate::policy::{Policy, PolicyRng, Scores, select};
use crate::receipt::{Receipt, ReceiptRing};
use crate::request::Request;
use books::{Books, Entry, Report, Stage};
use rand::SeedableRng;
use tickets::{TicketState, Tickets};

/// Who feeds the KV index.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum IndexFeed {
    /// The router itself: what it placed somewhere is believed to be cached there.
    #[default]
    Approximate,
    /// The engines' own events.
    Exact,
}

/// Settings of a router.
#[derive(Clone, Debug)]
pub struct RouterConfig {
    /// Who feeds the KV index.
    pub index_feed: IndexFeed,
    /// Most bytes that the KV index may take.
    pub index_bytes: usize,
    /// Most bytes that the receipts may take.
    pub receipt_bytes: usize,
    /// Seed of every random choice.
    pub seed: u64,
    /// Whether queued prefill tokens drain between events at the learned rate (off where progress is reported exactly).
    pub drain: bool,
    /// The hot-spot guard.
    pub guard: GuardConfig,
    /// Step-time model behind `predicted_ttft_seconds`; without one the learned prefill rate serves.
    pub step_time: Option<StepTime>,
    /// Prefill rate assumed until one was learned, in tokens/s.
    pub prior_prefill_tokens_per_second: f64,
}

impl Default for RouterConfig {
    fn default() -> Self {
        RouterConfig {
            index_feed: IndexFeed::Approximate,
            index_bytes: 512 << 20,
            receipt_bytes: 16 << 20,
            seed: 0,
            drain: true,
            guard: GuardConfig::default(),
            step_time: None,
            prior_prefill_tokens_per_second: 8000.0,
        }
    }
}

/// No clock shows as many seconds: what is beyond is a mistake, and not a number still less.
const FAR: Seconds = 1e12;

/// Where a request goes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Decision {
    /// Number of the decision and of its receipt.
    pub id: u64,
    /// Its ticket.
    pub ticket: TicketId,
    /// The first segment.
    pub segment: Segment,
    /// Leading prompt tokens that the instance is believed to hold.
    pub predicted_hit_tokens: u32,
}

/// Counters since the start.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Totals {
    /// Decisions made.
    pub decisions: u64,
    /// Requests that no instance could take.
    pub no_instance: u64,
    /// Requests moved to the next of the ranking before their first token.
    pub retries: u64,
    /// Instances left out of a decision because an indicator was absent or the score was not a number.
    pub left_out: u64,
    /// Decisions whose filter left nothing and was waived.
    pub filter_waived: u64,
    /// Requests ended well.
    pub finished: u64,
    /// Tickets dropped while open.
    pub dropped: u64,
    /// Requests failed for good, by [`Failure::NAMES`].
    pub failed: [u64; Failure::NAMES.len()],
    /// Prompt tokens of requests ended well, as reported or estimated.
    pub prompt_tokens: u64,
    /// Cached tokens predicted for requests whose engine reported the real number.
    pub predicted_cached_tokens: u64,
    /// Cached tokens that those engines reported.
    pub cached_tokens: u64,
    /// Output tokens seen.
    pub output_tokens: u64,
}

/// Decides, books, follows. One for each pool.
pub struct Router {
    config: RouterConfig,
    fleet: Fleet,
    columns: Columns,
    books: Books,
    tickets: Tickets,
    index: KvIndex,
    policy: Box<dyn Policy>,
    reads: IndicatorSet,
    rng: PolicyRng,
    scores: Scores,
    hit_blocks: Vec<u32>,
    guard: Guard,
    /// Who may take the request at hand, after the guard.
    eligible: Vec<bool>,
    restriction: Restriction,
    /// Requests placed, by slot.
    placed: Vec<u64>,
    /// Blocks that each slot's KV cache holds, where known.
    cache_blocks: Vec<Option<u32>>,
    /// Scratch of the predicted times to first token.
    ttft: Vec<f64>,
    receipts: ReceiptRing,
    totals: Totals,
    latest: Seconds,
}

impl Router {
    /// An empty router.
    ///
    /// # Errors
    /// `BadValue` for a setting out of its range.
    pub fn new(policy: Box<dyn Policy>, config: RouterConfig) -> Result<Router, CoreError> {
        let mut columns = Columns::default();
        columns.resize(0);
        Ok(Router {
            fleet: Fleet::default(),
            columns,
            books: Books::new(if config.drain { config.prior_prefill_tokens_per_second } else { 0.0 }),
            tickets: Tickets::default(),
            index: KvIndex::new(config.index_bytes),
            reads: policy.reads(),
            policy,
            rng: PolicyRng::seed_from_u64(config.seed),
            scores: Scores::default(),
            hit_blocks: Vec::new(),
            guard: Guard::new(config.guard)?,
            eligible: Vec::new(),
            restriction: Restriction::Free,
            placed: Vec::new(),
            cache_blocks: Vec::new(),
            ttft: Vec::new(),
            receipts: ReceiptRing::new(config.receipt_bytes),
            totals: Totals::default(),
            latest: 0.0,
            config,
        })
    }

    /// Adds an instance. `cache_blocks`: what its KV cache holds, where known; bounds what is remembered of it.
    ///
    /// # Errors
    /// `BadValue` where the name is taken or empty, or the fleet is full.
    pub fn add_instance(
        &mut self,
        name: &str,
        role: Role,
        cache_blocks: Option<u32>,
    ) -> Result<InstanceId, CoreError> {
        let id = self.fleet.add(name, role)?;
        let slots = self.fleet.slots();
        self.columns.resize(slots);
        self.books.resize(slots);
        self.books.clear(id.index(), &mut self.columns);
        self.hit_blocks.resize(slots, 0);
        self.placed.resize(slots, 0);
        self.placed[id.index()] = 0;
        self.cache_blocks.resize(slots, None);
        self.cache_blocks[id.index()] = cache_blocks;
        self.index.add_instance(id, cache_blocks);
        Ok(id)
    }

    /// Removes an instance. Its open tickets stay valid; their events touch no books any more.
    ///
    /// # Errors
    /// `UnknownName`.
    pub fn remove_instance(&mut self, name: &str) -> Result<(), CoreError> {
        let id = self.fleet.find(name)?;
        self.fleet.remove(id);
        self.books.clear(id.index(), &mut self.columns);
        self.index.remove_instance(id);
        self.guard.instance_removed(id);
        Ok(())
    }

    /// The instances.
    pub fn fleet(&self) -> &Fleet {
        &self.fleet
    }

    /// The instances, to change health or draining.
    pub fn fleet_mut(&mut self) -> &mut Fleet {
        &mut self.fleet
    }

    /// The KV index, e.g. to feed events into.
    pub fn index_mut(&mut self) -> &mut KvIndex {
        &mut self.index
    }

    /// The KV index.
    pub fn index(&self) -> &KvIndex {
        &self.index
    }

    /// The policy in force.
    pub fn policy(&self) -> &dyn Policy {
        &*self.policy
    }

    /// Counters since the start.
    pub fn totals(&self) -> &Totals {
        &self.totals
    }

    /// Requests in flight.
    pub fn in_flight(&self) -> usize {
        self.tickets.len()
    }

    /// Requests in flight on an instance.
    pub fn in_flight_on(&self, id: InstanceId) -> usize {
        self.books.in_flight(id.index()) as usize
    }

    /// The receipt of a decision, while it is kept.
    pub fn receipt(&self, id: u64) -> Option<&Receipt> {
        self.receipts.get(id)
    }

    /// Takes in an engine's load report.
    ///
    /// # Errors
    /// `UnknownName`, or `BadValue` for a number that cannot be.
    pub fn engine_report(&mut self, name: &str, report: Report) -> Result<(), CoreError> {
        let id = self.fleet.find(name)?;
        for (what, value) in
            [("waiting", report.waiting), ("running", report.running), ("kv_usage", report.kv_usage)]
        {
            if let Some(v) = value.filter(|v| !v.is_finite() || *v < 0.0) {
                return Err(CoreError::BadValue {
                    what: format!("{what} in the load report of {name}"),
                    got: v.to_string(),
                    expected: "a finite number, at least 0".into(),
                });
            }
        }
        let at = self.clock(report.at);
        self.books.report(id.index(), Report { at, ..report }, &mut self.columns);
        Ok(())
    }

    /// Decides where `request` goes, books it there and opens its ticket.
    ///
    /// # Errors
    /// `NoInstance` where none is eligible or none can be scored; nothing is booked then.
    pub fn route(&mut self, request: &Request<'_>, now: Seconds) -> Result<Decision, CoreError> {
        self.route_labelled(request, None, now)
    }

    /// [`Router::route`] with the request's own id, for the receipt.
    ///
    /// # Errors
    /// As [`Router::route`].
    pub fn route_labelled(
        &mut self,
        request: &Request<'_>,
        request_id: Option<&str>,
        now: Seconds,
    ) -> Result<Decision, CoreError> {
        let now = self.clock(now);
        self.match_prefix(request.chain);
        let chosen = self.score(request, now).inspect_err(|_| self.totals.no_instance += 1)?;
        Ok(self.commit(request, request_id, chosen, now))
    }

    /// Time never runs back here, whatever callers say: a request may be timed before its body was read.
    fn clock(&mut self, now: Seconds) -> Seconds {
        if now.abs() < FAR {
            self.latest = self.latest.max(now);
        }
        self.latest
    }

    /// First stage of a decision: how much of the prompt each instance holds.
    pub fn match_prefix(&mut self, chain: &[u64]) {
        self.index.match_prefix(chain, &mut self.hit_blocks);
    }

    /// How many leading prompt tokens each live instance holds, in slot order. Nothing is booked or touched.
    pub fn hit_tokens(&mut self, request: &Request<'_>) -> Vec<u32> {
        self.match_prefix(request.chain);
        let mut hits = self.hit_blocks.clone();
        derive::whole_hits(request, &mut hits);
        if self.fleet.live_count() < hits.len() {
            let mut slots = (0..).map(InstanceId);
            hits.retain(|_| slots.next().is_some_and(|id| self.fleet.is_live(id)));
        }
        hits
    }

    /// Second stage: scores every instance, and chooses. Nothing is booked.
    ///
    /// # Errors
    /// As [`Router::route`].
    pub fn score(&mut self, request: &Request<'_>, now: Seconds) -> Result<InstanceId, CoreError> {
        self.choose(request, &[], now)
    }

    /// [`Router::score`] without the slots in `failed`.
    fn choose(
        &mut self,
        request: &Request<'_>,
        failed: &[u32],
        now: Seconds,
    ) -> Result<InstanceId, CoreError> {
        let slots = self.fleet.slots();
        self.eligible.clear();
        self.eligible.extend_from_slice(self.fleet.eligible());
        failed.iter().for_each(|slot| self.eligible[*slot as usize] = false);
        let eligible_count = match failed {
            [] => self.fleet.eligible_count(),
            _ => self.eligible.iter().filter(|e| **e).count(),
        };
        if eligible_count == 0 {
            return Err(self.nobody());
        }
        self.restriction = self.guard.restrict(request.chain, &mut self.eligible);
        let excluded = if let Restriction::Filtered(out) = self.restriction { out } else { 0 };
        self.derive(request, self.reads, now);
        let snapshot = Snapshot {
            columns: &self.columns,
            eligible: &self.eligible,
            eligible_count: eligible_count - excluded,
            name_hashes: self.fleet.name_hashes(),
            ordinal: self.totals.decisions,
            session: request.session,
        };
        self.scores.reset(slots);
        if self.restriction == Restriction::BalanceOnly {
            self.scores.score.copy_from_slice(snapshot.column(Indicator::Bs));
        } else {
            self.policy.score(&snapshot, &mut self.rng, &mut self.scores)?;
        }
        if snapshot.eligible_count < slots {
            // From here on a score that is a number belongs to an instance that may take the request.
            for (score, _) in self.scores.score.iter_mut().zip(&self.eligible).filter(|(_, e)| !**e) {
                *score = f64::NAN;
            }
        }
        let best = select::best(&self.scores, snapshot.eligible, &mut self.rng).ok_or_else(|| {
            CoreError::NoInstance(format!(
                "policy {} (`{}`) scores none of the {} eligible instances: an indicator it reads ({}) is absent, or it divides \
                 by zero",
                self.policy.spec().name,
                self.policy.spec().formula,
                snapshot.eligible_count,
                self.reads.iter().map(|i| i.decl().name).collect::<Vec<_>>().join(", "),
            ))
        })?;
        Ok(InstanceId(best as u32))
    }

    /// The scores of the last [`Router::score`], one a slot.
    pub fn last_scores(&self) -> &Scores {
        &self.scores
    }

    /// Third stage: books the request on `chosen`, writes the receipt, opens the ticket.
    pub fn commit(
        &mut self,
        request: &Request<'_>,
        request_id: Option<&str>,
        chosen: InstanceId,
        now: Seconds,
    ) -> Decision {
        let slot = chosen.index();
        let hit = derive::hit_tokens(request, self.hit_blocks[slot]);
        let entry = entry(request, hit);
        let segment = Segment { instance: chosen, from_token: 0, to_token: None };
        let matched = self.hit_blocks.iter().copied().max().unwrap_or(0);
        self.guard.observe(now, request.chain, matched, &self.scores, &self.eligible, chosen);
        let receipt = self.explain(request, request_id, chosen, hit as u32, now);
        let id = receipt.id;
        self.receipts.push(receipt);
        let chain = self.tickets.keep_chain(request.chain);
        let ticket = self.tickets.open(TicketState {
            segment,
            instance_generation: self.fleet.generation(chosen),
            entry,
            decision: id,
            decided_at: now,
            tokens_per_block: request.tokens_per_block,
            chain,
            session: request.session,
            failed: Vec::new(),
            hit_blocks: self.hit_blocks[slot],
            told: false,
        });
        self.books.open(slot, tickets::slot(ticket), &entry, now, &mut self.columns);
        self.totals.decisions += 1;
        self.placed[slot] += 1;
        Decision { id, ticket, segment, predicted_hit_tokens: hit as u32 }
    }

    /// Tells what happened to a ticket's open segment. Returns the next segment where there is one: a request that failed before
    /// its first token moves to the next of its ranking.
    ///
    /// # Errors
    /// `Ticket` where the ticket is closed.
    pub fn advance(
        &mut self,
        ticket: TicketId,
        event: Event,
        now: Seconds,
    ) -> Result<Option<Segment>, CoreError> {
        let now = self.clock(now);
        let state = self.tickets.get(ticket)?;
        let slot = state.segment.instance.index();
        let current = self.fleet.is_current(state.segment.instance, state.instance_generation);
        if current && !state.told && !matches!(event, Event::Failed(_) | Event::GaveUp(_)) {
            // The request is on its way, so its blocks will be there. Not told at the decision: many new blocks take tens of
            // microseconds, and an instance that refuses the request never holds them.
            state.told = true;
            match self.config.index_feed {
                IndexFeed::Approximate => {
                    self.index.record_hit(state.segment.instance, &state.chain, state.hit_blocks);
                }
                IndexFeed::Exact => {
                    self.index.touch(state.segment.instance, &state.chain, state.hit_blocks);
                }
            }
        }
        match event {
            Event::Sent => {}
            Event::Scheduled if current => {
                self.books.scheduled(slot, &mut state.entry, &mut self.columns);
            }
            Event::Prefilled(tokens) if current => {
                self.books.prefilled(slot, tickets::slot(ticket), f64::from(tokens), now);
            }
            Event::FirstToken => {
                let (decision, ttft) = (state.decision, now - state.decided_at);
                if current {
                    self.books.first_token(
                        slot,
                        tickets::slot(ticket),
                        &mut state.entry,
                        now,
                        &mut self.columns,
                    );
                } else {
                    state.entry.stage = Stage::Decoding;
                }
                self.totals.output_tokens += 1;
                self.receipts.update(decision, |r| {
                    r.outcome.ttft_seconds.get_or_insert(ttft);
                });
            }
            Event::Tokens(n) => {
                self.totals.output_tokens += u64::from(n);
                if current && state.entry.stage == Stage::Decoding {
                    self.books.tokens(slot, &mut state.entry, f64::from(n), now, &mut self.columns);
                }
            }
            Event::Finished(usage) => self.finish(ticket, usage, now),
            Event::Failed(failure) => return Ok(self.fail(ticket, failure, true, now)),
            Event::GaveUp(failure) => return Ok(self.fail(ticket, failure, false, now)),
            Event::Scheduled | Event::Prefilled(_) => {}
        }
        Ok(None)
    }

    /// Everything periodic. Returns what the guard did, and when to call again.
    pub fn tick(&mut self, now: Seconds) -> (Vec<GuardEvent>, Seconds) {
        let now = self.clock(now);
        let (index, eligible) = (&self.index, self.fleet.eligible());
        let events = self.guard.tick(now, self.fleet.eligible_count(), |hash, out| {
            let before = out.len();
            index.holders(hash, out);
            let mut place = before;
            for i in before..out.len() {
                if eligible[out[i].index()] {
                    out.swap(place, i);
                    place += 1;
                }
            }
            out.truncate(place);
        });
        (events, now + self.guard.config().period_seconds)
    }

    /// Switches the guard.
    pub fn set_guard(&mut self, on: bool) {
        self.guard.set_on(on);
    }

    /// The hot-spot guard, to look at.
    pub fn guard(&self) -> &Guard {
        &self.guard
    }

    /// Whether a ticket is open.
    pub fn is_open(&mut self, ticket: TicketId) -> bool {
        self.tickets.get(ticket).is_ok()
    }

    /// The indicator columns; those of a request hold the last one's values.
    pub fn columns(&self) -> &Columns {
        &self.columns
    }

    /// Fills in every per-instance indicator at `now`, for a request of which nothing is known.
    pub fn derive_all(&mut self, now: Seconds) {
        let all: Vec<Indicator> = crate::indicators::INDICATORS.iter().map(|d| d.id).collect();
        self.hit_blocks.fill(0);
        self.derive(&Request::default(), IndicatorSet::of(&all), now);
    }

    /// Requests placed on an instance since it was added.
    pub fn decisions_on(&self, id: InstanceId) -> u64 {
        self.placed[id.index()]
    }

    /// Closes a ticket that nobody holds any more. Does nothing where it is closed.
    pub fn drop_ticket(&mut self, ticket: TicketId) {
        if let Some(state) = self.close(ticket, self.latest) {
            self.totals.dropped += 1;
            let seconds = self.latest - state.decided_at;
            self.receipts.update(state.decision, |r| {
                r.outcome.dropped = true;
                r.outcome.e2e_seconds = Some(seconds);
            });
        }
    }

    fn finish(&mut self, ticket: TicketId, usage: Usage, now: Seconds) {
        let Some(state) = self.close(ticket, now) else { return };
        let totals = &mut self.totals;
        totals.finished += 1;
        let prompt = usage.prompt_tokens.unwrap_or(state.entry.prompt_tokens as u32);
        totals.prompt_tokens += u64::from(prompt);
        if let Some(cached) = usage.cached_tokens {
            totals.cached_tokens += u64::from(cached);
            totals.predicted_cached_tokens += (state.entry.prompt_tokens - state.entry.new_tokens) as u64;
        }
        let seconds = now - state.decided_at;
        self.receipts.update(state.decision, |r| {
            r.outcome.ended = Some(None);
            r.outcome.usage = usage;
            r.outcome.e2e_seconds = Some(seconds);
        });
    }

    fn fail(&mut self, ticket: TicketId, failure: Failure, retry: bool, now: Seconds) -> Option<Segment> {
        let state = self.tickets.get(ticket).ok()?;
        if retry && failure.may_move() && state.entry.stage != Stage::Decoding {
            let moved = self.move_on(ticket, now);
            if moved.is_some() {
                return moved;
            }
        }
        let state = self.close(ticket, now)?;
        let place = Failure::NAMES.iter().position(|(_, f)| *f == failure).expect("named");
        self.totals.failed[place] += 1;
        let seconds = now - state.decided_at;
        self.receipts.update(state.decision, |r| {
            r.outcome.ended = Some(Some(failure));
            r.outcome.e2e_seconds = Some(seconds);
        });
        None
    }

    /// Places a request that failed on the best of the instances that have not: the ranking as it is by now, so that what one
    /// dead instance leaves behind does not all go to the same next one. `None`: nobody is left.
    fn move_on(&mut self, ticket: TicketId, now: Seconds) -> Option<Segment> {
        let state = self.tickets.get(ticket).ok()?;
        let old = state.segment.instance;
        if self.fleet.is_current(old, state.instance_generation) {
            self.books.close(old.index(), tickets::slot(ticket), &state.entry, now, &mut self.columns);
            state.instance_generation = 0; // off the books, whatever comes
        }
        state.failed.push(old.0);
        let (chain, failed) = (std::mem::take(&mut state.chain), std::mem::take(&mut state.failed));
        let request = Request {
            chain: &chain,
            prompt_tokens: state.entry.prompt_tokens as u32,
            tokens_per_block: state.tokens_per_block,
            expected_output_tokens: state.entry.expected_output_tokens.map(|t| t as u32),
            session: state.session,
        };
        self.match_prefix(&chain);
        let next = self.choose(&request, &failed, now).ok();
        let hit_blocks = next.map_or(0, |next| self.hit_blocks[next.index()]);
        let hit = derive::hit_tokens(&request, hit_blocks);
        let entry = entry(&request, hit);
        let state = self.tickets.get(ticket).expect("an open ticket");
        (state.chain, state.failed) = (chain, failed);
        let next = next?;
        state.entry = entry;
        state.segment = Segment { instance: next, from_token: 0, to_token: None };
        state.instance_generation = self.fleet.generation(next);
        state.hit_blocks = hit_blocks;
        state.told = false;
        let (segment, decision) = (state.segment, state.decision);
        self.books.open(next.index(), tickets::slot(ticket), &entry, now, &mut self.columns);
        self.placed[next.index()] += 1;
        self.totals.retries += 1;
        let name = self.fleet.name(next).clone();
        self.receipts.update(decision, |r| {
            r.moved.push((next.0, name));
            r.predicted_hit_tokens = hit as u32;
        });
        Some(segment)
    }

    fn close(&mut self, ticket: TicketId, now: Seconds) -> Option<TicketState> {
        let mut state = self.tickets.close(ticket)?;
        if self.fleet.is_current(state.segment.instance, state.instance_generation) {
            let slot = state.segment.instance.index();
            self.books.close(slot, tickets::slot(ticket), &state.entry, now, &mut self.columns);
        }
        self.tickets.spare_chain(std::mem::take(&mut state.chain));
        Some(state)
    }

    fn nobody(&self) -> CoreError {
        let live = self.fleet.live_count();
        CoreError::NoInstance(match live {
            0 => "the router has no instances".into(),
            _ => format!("none of the {live} instances is healthy, of a fitting role and not draining"),
        })
    }
}

fn entry(request: &Request<'_>, hit_tokens: f64) -> Entry {
    let prompt_tokens = f64::from(request.prompt_tokens);
    Entry {
        prompt_tokens,
        new_tokens: prompt_tokens - hit_tokens,
        output_tokens: 0.0,
        expected_output_tokens: request.expected_output_tokens.map(f64::from),
        stage: Stage::Bound,
    }
}
