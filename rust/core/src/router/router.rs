//! [`Router`]: what it is made of, its instances, and what can be seen of it.
use super::context::DecisionContext;
use super::decision::Totals;
use super::ledger::Ahead;
use super::lifecycle::Lifecycle;
use super::plan::TtftSource;
use super::replicas::Replicas;
use super::requests::Requests;
use super::settings::RouterConfig;
use super::state::State;
use crate::error::CoreError;
use crate::estimate::StepTime;
use crate::fleet::{Fleet, Role};
use crate::guard::{Guard, GuardEvent};
use crate::ids::{InstanceId, Seconds};
use crate::indicators::{DeclaredId, Indicator, IndicatorSet, Indicators, declared};
use crate::kv::index::KvIndex;
use crate::policy::{Fallbacks, Policy};
use crate::receipt::Receipt;
use crate::request::Request;

/// No clock shows as many seconds: what is beyond is a mistake, and not a number still less.
const FAR: Seconds = 1e12;

/// Decides, places, follows. One for each pool.
pub struct Router {
    /// What a decision depends on.
    pub(super) state: State,
    /// What a decision writes while it is planned.
    pub(super) context: DecisionContext,
    /// The requests in flight, and what is recorded of all.
    pub(super) requests: Requests,
    pub(super) replicas: Replicas,
    /// Of policies that were replaced.
    pub(super) fallbacks: Fallbacks,
    pub(super) latest: Seconds,
}

impl Router {
    /// An empty router that splits no requests ([`Router::set_split`]). Segments that follow others
    /// go where there are the least requests ([`Router::set_decode_policy`]).
    ///
    /// # Errors
    /// `BadValue` for a setting out of its range.
    pub fn new(policy: Box<dyn Policy>, config: RouterConfig) -> Result<Router, CoreError> {
        Ok(Router {
            context: DecisionContext::new(config.seed),
            requests: Requests::new(config.receipt_bytes),
            replicas: Replicas::default(),
            fallbacks: Fallbacks::default(),
            latest: 0.0,
            state: State::new(policy, config)?,
        })
    }

    /// Indicators that its policies read.
    pub fn reads(&self) -> IndicatorSet {
        self.state.reads()
    }

    /// What the load will be, where a policy asks for it.
    pub fn ahead(&self) -> Option<&Ahead> {
        self.state.ledger.ahead()
    }

    /// Adds an instance. `cache_blocks`: what its KV cache holds, where known; bounds what is
    /// remembered of it.
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

    /// Removes an instance. Its open tickets stay valid; their events touch no ledger any more.
    ///
    /// # Errors
    /// `UnknownName`.
    pub fn remove_instance(&mut self, name: &str) -> Result<(), CoreError> {
        let id = self.state.fleet.find(name)?;
        self.state.fleet.remove(id);
        self.replicas.clear(id.index());
        self.state.ledger.clear(id.index());
        self.state.index.remove_instance(id);
        self.state.guard.instance_removed(id);
        Ok(())
    }

    /// Puts an empty index in the place of the present one, which is returned: dropping it takes a
    /// while.
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

    /// Decisions that fallbacks made for the policies, since the start.
    pub fn fallbacks(&self) -> Fallbacks {
        let State { first, later, .. } = &self.state;
        self.fallbacks.clone().and(first.policy.fallbacks()).and(later.policy.fallbacks())
    }

    /// Counters since the start.
    pub fn totals(&self) -> &Totals {
        &self.requests.totals
    }

    /// Requests in flight.
    pub fn in_flight(&self) -> usize {
        self.requests.tickets.len()
    }

    /// Requests in flight on an instance.
    pub fn in_flight_on(&self, id: InstanceId) -> usize {
        if self.state.fleet.check(id).is_ok() { self.state.ledger.in_flight(id.index()) as usize } else { 0 }
    }

    /// The receipt of a decision, while it is kept.
    pub fn receipt(&self, id: u64) -> Option<&Receipt> {
        self.requests.receipts.get(id)
    }

    /// Time never runs back here, whatever callers say: a request may be timed before its body was
    /// read.
    pub(super) fn clock(&mut self, now: Seconds) -> Seconds {
        if now.abs() < FAR {
            self.latest = self.latest.max(now);
        }
        self.latest
    }

    /// What changes requests at `now`.
    pub(super) fn lifecycle(&mut self, now: Seconds) -> Lifecycle<'_> {
        let now = self.clock(now);
        let Router { state, context, requests, .. } = self;
        Lifecycle { state, context, requests, now }
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

    /// The hot-spot guard, to look at.
    pub fn guard(&self) -> &Guard {
        &self.state.guard
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
        let declared: Vec<DeclaredId> = declared::declared().iter().map(|decl| decl.id).collect();
        self.state.derive_declared(&mut self.context, &declared, now);
    }

    /// Requests placed on an instance since it was added.
    pub fn decisions_on(&self, id: InstanceId) -> u64 {
        self.state.instances.get(id.index()).map_or(0, |instance| instance.placed)
    }

    /// The latest time that the router was told of, on its caller's clock.
    pub fn latest(&self) -> Seconds {
        self.latest
    }

    /// Whether a prefill rate was learned on any instance.
    pub fn knows_a_rate(&self) -> bool {
        self.state.ledger.get(Indicator::PrefillTokensPerSecond).iter().any(|rate| !rate.is_nan())
    }

    /// What a prediction of the time to first token on a slot rests on. `pool_rate`: whether a rate
    /// [is known](Router::knows_a_rate) of any.
    ///
    /// # Panics
    /// If the router has no such slot.
    pub fn ttft_source(&self, id: InstanceId, pool_rate: bool) -> TtftSource {
        self.state.ttft_source(id.index(), pool_rate)
    }

    /// The step-time model learned from our own streams on an instance; None until there were
    /// enough of them.
    ///
    /// # Panics
    /// If the router has no such slot.
    pub fn step_time(&self, id: InstanceId) -> Option<StepTime> {
        self.state.ledger.step_fit(id.index()).step_time()
    }

    /// Seconds that a pulled token takes and that a pull takes besides, as learned, and how many
    /// pulls that was learned from; `None` where nothing is pulled.
    pub fn pull_cost(&self) -> Option<(Seconds, Seconds, u64)> {
        self.state.pulls.map(|pulls| pulls.learned())
    }

    /// Gamma as it is now, 1/s, and how often it was estimated; `None` if nobody is boosted.
    pub fn gamma(&self) -> Option<(f64, u64)> {
        self.requests.ordering.as_ref()?.gamma()
    }
}
