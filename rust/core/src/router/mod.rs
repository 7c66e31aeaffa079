//! The router: the only one that commits. It decides from a snapshot, books the placement at once, follows each ticket to its
//! end and keeps the receipts. One router serves one pool: the instances of one model.
//!
//! `decide` places a request, `cut` says where it is cut, `legs` the segments of its plan, `pull` what is fetched before one begins, `moves` closes one early, `rounds` says which, `follow` what becomes of it, `ahead` what the load will be, `derive` the indicators of the moment, `explain` its receipt, `books`
//! what is placed where, `tickets` who is in flight, `shared` the lock, `feed` what the engines' events tell.

pub mod ahead;
mod apart;
mod context;
mod cut;
mod decide;
mod derive;
mod explain;
pub mod feed;
mod follow;
mod idle;
pub mod ledger;
mod legs;
mod moves;
pub mod priorities;
mod pull;
mod replicas;
mod rounds;
mod select;
pub mod shared;
mod state;
pub mod tickets;

pub use apart::{Apart, Mean};
pub use cut::{Lengths, Libra, Split};
pub use derive::TtftSource;
pub use ledger::Share;
pub use moves::Carry;
pub use priorities::Priorities;
pub use pull::PullConfig;
pub use replicas::MOST_REPLICAS;
pub use rounds::{Forecast, NamedMove, RescheduleConfig, Rescheduling, Rule};
pub use shared::{SharedRouter, Ticket};
pub use tickets::TicketId;

use crate::error::CoreError;
use crate::estimate::StepTime;
use crate::estimate::survival::BUCKET_TOKENS;
use crate::fleet::{Fleet, Role};
use crate::guard::{Guard, GuardConfig, GuardEvent};
use crate::ids::{InstanceId, Seconds};
use crate::indicators::{IndicatorSet, Indicators};
use crate::kv::index::KvIndex;
use crate::plan::{Binding, Failure, Pull, Segment};
use crate::policy::Policy;
use crate::priority::Priority;
use crate::receipt::{Receipt, ReceiptRing};
use crate::request::Request;
use ahead::{AHEAD, Ahead, PROJECTED, WEIGHED};
use context::DecisionContext;
use ledger::Report;
use priorities::Ordering;
use replicas::Replicas;
use state::{Selector, State};
use tickets::Tickets;

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
    /// Whether queued prefill tokens drain between events by the learned cost of prefills (off where progress is reported exactly).
    pub drain: bool,
    /// The hot-spot guard.
    pub guard: GuardConfig,
    /// Step-time model behind `predicted_ttft_seconds`; without one, what is learned serves.
    pub step_time: Option<StepTime>,
    /// Prefill rate assumed until one was learned, in tokens/s.
    pub prior_prefill_tokens_per_second: f64,
    /// Whether engines keep the partial last block of a prompt too, so that all but one token may be cached. (vLLM does not.)
    pub partial_blocks: bool,
    /// When the instance of a second segment is chosen.
    pub binding: Binding,
    /// Whether an instance takes a whole request, whatever its role, where nobody of the other role is there.
    pub colocate: bool,
    /// Whether a prefill never waits for others on its instance, so that the expected hand-over counts no queue (SIBYL, Algorithm 2).
    pub unlimited_prefill: bool,
    /// How requests are cut that no roles cut.
    pub split: Split,
    /// When prefixes are pulled from other instances; `None`: never.
    pub pull: Option<PullConfig>,
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
            partial_blocks: false,
            binding: Binding::Early,
            colocate: true,
            unlimited_prefill: false,
            split: Split::None,
            pull: None,
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
    /// The first segment. Where it ends before the request does, another follows.
    pub segment: Segment,
    /// The one that follows it, where its instance is chosen already.
    pub next: Option<Segment>,
    /// What its instance is to fetch before it begins.
    pub pull: Option<Pull>,
    /// Leading prompt tokens that the instance is believed to hold.
    pub predicted_hit_tokens: u32,
    /// What it is given for its engine's queue, where requests are ordered.
    pub priority: Option<Priority>,
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
    /// Choices in which the policy scored no candidate, so that the fewest requests decided.
    pub unscored: u64,
    /// Decisions whose filter left nothing and was waived.
    pub filter_waived: u64,
    /// Requests cut at other places than where roles cut them.
    pub split: u64,
    /// Running requests moved to another instance.
    pub moved: u64,
    /// Prefixes that were to be pulled.
    pub pulls: u64,
    /// Prompt tokens that were pulled.
    pub pulled_tokens: u64,
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
    /// What a decision depends on.
    state: State,
    /// What a decision writes while it is planned.
    context: DecisionContext,
    /// The requests in flight.
    tickets: Tickets,
    replicas: Replicas,
    /// What requests are ordered by, if at all.
    ordering: Option<Ordering>,
    receipts: ReceiptRing,
    totals: Totals,
    latest: Seconds,
}

impl Router {
    /// An empty router. Segments that follow others go where there are the least requests; see [`Router::set_decode_policy`].
    ///
    /// # Errors
    /// `BadValue` for a setting out of its range.
    pub fn new(policy: Box<dyn Policy>, config: RouterConfig) -> Result<Router, CoreError> {
        let mut router = Router {
            context: DecisionContext::new(config.seed),
            tickets: Tickets::default(),
            replicas: Replicas::default(),
            ordering: None,
            receipts: ReceiptRing::new(config.receipt_bytes),
            totals: Totals::default(),
            latest: 0.0,
            state: State::new(policy, config)?,
        };
        router.set_split(router.state.config.split)?;
        router.look_ahead()?;
        Ok(router)
    }

    /// Sets the policy that chooses the instances of segments which follow others: where a request decodes whose prompt is prefilled elsewhere.
    ///
    /// # Errors
    /// `BadValue` while requests are in flight, of which nothing was kept for it, or if its curve of answer lengths does not
    /// suit the other policy.
    pub fn set_decode_policy(&mut self, policy: Box<dyn Policy>) -> Result<(), CoreError> {
        if self.in_flight() > 0 {
            return Err(CoreError::BadValue {
                what: "decode policy".into(),
                got: format!("{} while {} requests are in flight", policy.spec().name, self.in_flight()),
                expected: "one that is set before the first request".into(),
            });
        }
        self.state.later = Selector::new(policy);
        self.look_ahead()
    }

    /// When the instance of a second segment is chosen; what is bound already stays so.
    pub fn set_binding(&mut self, binding: Binding) {
        self.state.config.binding = binding;
    }

    /// Keeps what the load will be, where a policy asks for it.
    fn look_ahead(&mut self) -> Result<(), CoreError> {
        let reads = self.reads();
        let projects =
            [&self.state.later, &self.state.first].into_iter().find(|each| each.reads.intersects(PROJECTED));
        let curve = projects.map(|each| each.policy.length_curve()).unwrap_or_default();
        if reads.intersects(WEIGHED) && curve.bucket_tokens != BUCKET_TOKENS {
            return Err(CoreError::BadValue {
                what: "bucket_tokens".into(),
                got: format!("{} beside a policy that reads decode_pressure", curve.bucket_tokens),
                expected: BUCKET_TOKENS.to_string(),
            });
        }
        let wanted = reads.intersects(AHEAD) || self.forecasts();
        self.state.ahead = wanted.then(|| Ahead::new(reads, self.state.fleet.slots(), curve));
        Ok(())
    }

    /// Indicators that its policies read.
    pub fn reads(&self) -> IndicatorSet {
        self.state.reads()
    }

    /// What the load will be, where a policy asks for it.
    pub fn ahead(&self) -> Option<&Ahead> {
        self.state.ahead.as_ref()
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
        let id = self.state.add_instance(name, role, cache_blocks)?;
        self.context.resize(self.state.fleet.slots());
        self.context.clear(id.index());
        Ok(id)
    }

    /// Removes an instance. Its open tickets stay valid; their events touch no books any more.
    ///
    /// # Errors
    /// `UnknownName`.
    pub fn remove_instance(&mut self, name: &str) -> Result<(), CoreError> {
        let id = self.state.fleet.find(name)?;
        self.state.fleet.remove(id);
        self.replicas.clear(id.index());
        self.state.ledger.clear(id.index());
        if let Some(ahead) = &mut self.state.ahead {
            ahead.clear(id.index());
        }
        self.state.index.remove_instance(id);
        self.state.guard.instance_removed(id);
        Ok(())
    }

    /// Who feeds the index of an instance.
    pub fn index_feed(&self, id: InstanceId) -> IndexFeed {
        self.state
            .instances
            .get(id.index())
            .map_or(self.state.config.index_feed, |instance| instance.index_feed)
    }

    /// Changes who feeds the index of an instance; what the index holds of it stays.
    ///
    /// # Errors
    /// `BadValue` if the router has no such slot.
    pub fn set_index_feed(&mut self, id: InstanceId, feed: IndexFeed) -> Result<(), CoreError> {
        self.state.instance_mut(id)?.index_feed = feed;
        Ok(())
    }

    /// Blocks that an instance's cache holds, where known.
    pub fn cache_blocks(&self, id: InstanceId) -> Option<u32> {
        self.state.instances.get(id.index())?.cache_blocks
    }

    /// Says what an instance's cache holds, all ranks together. What is beyond it leaves the index with [`KvIndex::trim`].
    ///
    /// # Errors
    /// `BadValue` if the router has no such slot.
    pub fn set_cache_blocks(&mut self, id: InstanceId, cache_blocks: Option<u32>) -> Result<(), CoreError> {
        self.state.instance_mut(id)?.cache_blocks = cache_blocks;
        self.state.index.set_capacity(id, cache_blocks);
        Ok(())
    }

    /// Puts an empty index in the place of the present one, which is returned: dropping it takes a while.
    pub fn renew_index(&mut self, byte_bound: usize) -> KvIndex {
        let old = std::mem::replace(&mut self.state.index, KvIndex::new(byte_bound));
        for id in self.state.ids() {
            if self.state.fleet.is_live(id) {
                self.state.index.add_instance(id, self.state.instances[id.index()].cache_blocks);
            }
        }
        old
    }

    /// The instances.
    pub fn fleet(&self) -> &Fleet {
        &self.state.fleet
    }

    /// The instances, to change health or draining.
    pub fn fleet_mut(&mut self) -> &mut Fleet {
        &mut self.state.fleet
    }

    /// The KV index, e.g. to feed events into.
    pub fn index_mut(&mut self) -> &mut KvIndex {
        &mut self.state.index
    }

    /// The KV index.
    pub fn index(&self) -> &KvIndex {
        &self.state.index
    }

    /// The policy in force.
    pub fn policy(&self) -> &dyn Policy {
        &*self.state.first.policy
    }

    /// The policy for segments that follow others.
    pub fn decode_policy(&self) -> &dyn Policy {
        &*self.state.later.policy
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
        if self.state.fleet.check(id).is_ok() { self.state.ledger.in_flight(id.index()) as usize } else { 0 }
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
        let id = self.state.fleet.find(name)?;
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
        self.state.ledger.report(id.index(), Report { at, ..report });
        Ok(())
    }

    /// Time never runs back here, whatever callers say: a request may be timed before its body was read.
    fn clock(&mut self, now: Seconds) -> Seconds {
        if now.abs() < FAR {
            self.latest = self.latest.max(now);
        }
        self.latest
    }

    /// Everything periodic. Returns what the guard did, and when to call again.
    pub fn tick(&mut self, now: Seconds) -> (Vec<GuardEvent>, Seconds) {
        let now = self.clock(now);
        let (index, eligible) = (&self.state.index, self.state.fleet.eligible());
        let events = self.state.guard.tick(now, self.state.fleet.eligible_count(), |hash, out| {
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
        (events, now + self.state.guard.config().period_seconds)
    }

    /// Switches the guard.
    pub fn set_guard(&mut self, on: bool) {
        self.state.guard.set_on(on);
    }

    /// The hot-spot guard, to look at.
    pub fn guard(&self) -> &Guard {
        &self.state.guard
    }

    /// Whether a ticket is open.
    pub fn is_open(&mut self, ticket: TicketId) -> bool {
        self.tickets.get(ticket).is_ok()
    }

    /// The indicator columns; those of a request hold the last one's values.
    pub fn columns(&self) -> Indicators<'_> {
        self.state.indicators(&self.context)
    }

    /// Fills in every per-instance indicator at `now`, for a request of which nothing is known.
    pub fn derive_all(&mut self, now: Seconds) {
        self.context.hit_blocks.fill(0);
        let able = self.state.fleet.eligible_count();
        self.state.derive(&mut self.context, &Request::default(), IndicatorSet::ALL, able, None, now);
    }

    /// Requests placed on an instance since it was added.
    pub fn decisions_on(&self, id: InstanceId) -> u64 {
        self.state.instances.get(id.index()).map_or(0, |instance| instance.placed)
    }

    /// The latest time that the router was told of, on its caller's clock.
    pub fn latest(&self) -> Seconds {
        self.latest
    }
}
