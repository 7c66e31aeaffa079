//! The [`Router`] type: construction, instances and read access.
use super::caches::SharedCaches;
use super::context::DecisionContext;
use super::decision::Totals;
use super::ledger::Ahead;
use super::lifecycle::Lifecycle;
use super::listeners::workers::Workers;
use super::listeners::{Listener, Listeners};
use super::plan::TtftSource;
use super::requests::Requests;
use super::settings::RouterConfig;
use super::state::{State, check_cache_blocks};
use crate::board::Board;
use crate::error::CoreError;
use crate::estimate::StepTime;
use crate::fleet::{Fleet, Member, Role};
use crate::ids::{InstanceId, Seconds};
use crate::indicators::{DeclaredId, IndicatorSet, Indicators};
use crate::kv::tier::Tier;
use crate::policy::{Fallbacks, Policy};
use crate::program::Followed;
use crate::record::DecisionRecord;
use crate::request::Request;
use std::sync::Arc;

/// Upper bound of plausible times. Larger values and NaN are errors of the caller and are ignored.
const FAR: Seconds = 1e12;

/// Bits of the numbers of one worker's decisions: enough for thousands of years, and all numbers
/// stay exact as floats.
const WORKER_BITS: u32 = 48;

/// A router: decides, places and follows requests. Each pool has one router.
pub struct Router {
    /// State that decisions depend on.
    pub(super) state: State,
    /// Buffers that a decision writes while it is planned.
    pub(super) context: DecisionContext,
    /// Requests in flight, and records of all requests.
    pub(super) requests: Requests,
    /// Features that follow what the core does.
    pub(super) listeners: Listeners,
    /// The load of the other workers of this server, if there are any.
    pub(super) workers: Option<Box<Workers>>,
    /// Buffers of the shadow, if there is one.
    pub(super) shadow: Option<Box<DecisionContext>>,
    /// Fallbacks of policies that were replaced.
    pub(super) fallbacks: Fallbacks,
    pub(super) latest: Seconds,
    /// Calls that may have changed what a decision reads.
    pub(super) calls: u64,
}

impl Router {
    /// Creates an empty router that does not split requests ([`Router::set_split`]). Follow-up
    /// segments go to the instance with the fewest requests ([`Router::set_decode_policy`]).
    ///
    /// # Errors
    /// `BadValue` for a setting out of its range.
    pub fn new(policy: Box<dyn Policy>, config: RouterConfig) -> Result<Router, CoreError> {
        Ok(Router {
            context: DecisionContext::new(config.seed),
            shadow: None,
            workers: None,
            requests: Requests::new(config.record_bytes),
            listeners: Listeners::new(&config)?,
            fallbacks: Fallbacks::default(),
            latest: 0.0,
            calls: 0,
            state: State::new(policy, config)?,
        })
    }

    /// Returns the indicators that the policies read.
    pub fn reads(&self) -> IndicatorSet {
        self.state.reads()
    }

    /// Returns predicted loads, if a policy needs them.
    pub fn ahead(&self) -> Option<&Ahead> {
        self.state.ledger.ahead()
    }

    /// Adds an instance. `cache_blocks`: blocks in its KV cache, if known; bounds its entries in
    /// the KV index.
    ///
    /// # Errors
    /// `BadValue` if the name is taken or empty, if its cache has no block, or if the fleet is
    /// full.
    pub fn add_instance(
        &mut self,
        name: &str,
        role: Role,
        cache_blocks: Option<u32>,
    ) -> Result<InstanceId, CoreError> {
        check_cache_blocks(name, cache_blocks)?;
        let id = self.state.fleet.add(name, role)?;
        self.change(Member::Added { id, cache_blocks });
        Ok(id)
    }

    /// Removes an instance. Its open tickets stay valid, but their events no longer change the
    /// ledger.
    ///
    /// # Errors
    /// `UnknownName`.
    pub fn remove_instance(&mut self, name: &str) -> Result<(), CoreError> {
        let id = self.state.fleet.find(name)?;
        self.state.fleet.remove(id);
        self.change(Member::Removed(id));
        Ok(())
    }

    /// Passes a change of the fleet on to everything that keeps data of instances.
    fn change(&mut self, member: Member) {
        self.calls += 1;
        self.state.member(member);
        self.context.member(member, self.state.fleet.slots());
        self.listeners.member(member, &self.state.fleet);
        if let Some(workers) = &mut self.workers {
            workers.member(member, &self.state.fleet);
        }
    }

    /// Exchanges load with the other workers of this server from now on. `model`: a number that the
    /// routers of the same model share. The router must not have decided yet: its decisions are
    /// numbered anew, so that no two workers use the same number.
    ///
    /// # Errors
    /// `BadValue` if the board has no room for a further model.
    pub fn join(&mut self, board: Arc<Board>, model: u64) -> Result<(), CoreError> {
        self.state.ledger.changes.start();
        // A decision's number names it in all workers.
        self.requests.records.begin_at(((board.writer() as u64) << WORKER_BITS) + 1);
        self.listeners.admission.share(board.clone(), model, &self.state.fleet)?;
        self.workers = Some(Box::new(Workers::new(board, model, &self.state.fleet)));
        Ok(())
    }

    /// Ends the exchange with the other workers. Call it before a router is dropped whose process
    /// goes on: otherwise the others wait for its agent programs.
    pub fn leave(&mut self) {
        if let Some(workers) = self.workers.take() {
            workers.leave();
        }
        self.listeners.admission.leave();
    }

    /// Returns whether this router has the agent programs of the other workers. Until then, its
    /// requests belong to no program.
    pub fn has_programs_of_workers(&self) -> bool {
        self.listeners.admission.followed().is_none_or(Followed::is_present)
    }

    /// Publishes the load that has changed to the other workers of this server.
    #[inline]
    pub fn publish_changes(&mut self) {
        if let Some(workers) = &mut self.workers {
            workers.publish(&mut self.state.ledger, &self.state.fleet, self.latest);
        }
    }

    /// Publishes all load as of `now` to the other workers. Returns false if the board has no room
    /// for some of it.
    pub fn publish_all(&mut self, now: Seconds) -> bool {
        let now = self.clock(now);
        self.listeners.admission.follow(now);
        self.workers.as_mut().is_none_or(|workers| {
            workers.publish_all(&self.state.ledger, &self.state.fleet, now);
            !workers.is_full()
        })
    }

    /// Counts the load that other workers have published since the last call.
    #[inline]
    pub(super) fn read_workers(&mut self, now: Seconds) {
        if let Some(workers) = &mut self.workers {
            workers.read(&mut self.listeners.replicas, &mut self.state.ledger, now);
            self.listeners.admission.follow(now);
        }
    }

    /// Returns the instances.
    pub fn fleet(&self) -> &Fleet {
        &self.state.fleet
    }

    /// Returns the instances, for changes of health or draining.
    pub fn fleet_mut(&mut self) -> &mut Fleet {
        self.calls += 1;
        &mut self.state.fleet
    }

    /// Returns the engines' caches, which have a lock of their own.
    pub fn caches(&self) -> &SharedCaches {
        &self.state.caches
    }

    /// Returns the policy of first segments.
    pub fn policy(&self) -> &dyn Policy {
        &*self.state.first.policy
    }

    /// Returns the policy of follow-up segments.
    pub fn decode_policy(&self) -> &dyn Policy {
        &*self.state.later.policy
    }

    /// Returns the decisions that fallbacks made for the policies, since the start.
    pub fn fallbacks(&self) -> Fallbacks {
        let State { first, later, canary, .. } = &self.state;
        let all = [first, later].into_iter().chain(canary);
        all.fold(self.fallbacks.clone(), |sum, each| sum.and(each.policy.fallbacks()))
    }

    /// Returns the counters since the start.
    pub fn totals(&self) -> &Totals {
        &self.requests.totals
    }

    /// Returns the number of requests in flight.
    pub fn in_flight(&self) -> usize {
        self.requests.tickets.len()
    }

    /// Returns the number of requests in flight on an instance.
    pub fn in_flight_on(&self, id: InstanceId) -> usize {
        if self.state.fleet.check(id).is_ok() { self.state.ledger.in_flight(id.index()) as usize } else { 0 }
    }

    /// Returns the number of the latest decision.
    pub fn last_decision(&self) -> u64 {
        self.requests.records.last_id()
    }

    /// Returns the decision record with this id, if it is still kept.
    pub fn record(&self, id: u64) -> Option<&DecisionRecord> {
        self.requests.records.get(id)
    }

    /// Returns a time that never decreases. Callers may pass earlier times: a request may be timed
    /// before its body is read.
    pub(super) fn clock(&mut self, now: Seconds) -> Seconds {
        self.calls += 1;
        if now.abs() < FAR {
            self.latest = self.latest.max(now);
        }
        self.latest
    }

    /// Returns the lifecycle of requests at `now`.
    pub(super) fn lifecycle(&mut self, now: Seconds) -> Lifecycle<'_> {
        let now = self.clock(now);
        let Router { state, context, requests, listeners, .. } = self;
        Lifecycle { state, context, requests, listeners, now }
    }

    /// Returns the indicator columns. Request indicators hold the values of the last request.
    pub fn columns(&self) -> Indicators<'_> {
        self.state.indicators(&self.context)
    }

    /// Computes declared indicators at `now`.
    pub fn derive_declared(&mut self, declared: &[DeclaredId], now: Seconds) {
        self.state.derive_declared(&mut self.context, declared, now);
    }

    /// Computes the indicators `reads` at `now`, for a request without known properties.
    pub fn derive_some(&mut self, reads: IndicatorSet, now: Seconds) {
        self.read_workers(now);
        self.context.arrived = None;
        self.context.hit_blocks.fill(0);
        self.context.tier_blocks.clear();
        self.context.tiers.clear();
        let able = self.state.fleet.eligible_count();
        self.state.derive(&mut self.context, &Request::default(), reads, able, None, now);
    }

    /// Returns the number of requests placed on an instance since it was added.
    pub fn decisions_on(&self, id: InstanceId) -> u64 {
        self.state.instances.get(id.index()).map_or(0, |instance| instance.placed)
    }

    /// Returns the latest time received, on the caller's clock.
    pub fn latest(&self) -> Seconds {
        self.latest
    }

    /// Returns whether a prefill rate is learned on any instance.
    pub fn knows_a_rate(&self) -> bool {
        self.state.ledger.mean_prefill_rate().is_some()
    }

    /// Returns the source of TTFT predictions on a slot. `pool_rate`: whether any instance has a
    /// [learned rate](Router::knows_a_rate).
    ///
    /// # Panics
    /// If the router has no such slot.
    pub fn ttft_source(&self, id: InstanceId, pool_rate: bool) -> TtftSource {
        self.state.ttft_source(id.index(), pool_rate)
    }

    /// Returns the step-time model learned from this router's streams on an instance; `None` until
    /// there are enough streams.
    ///
    /// # Panics
    /// If the router has no such slot.
    pub fn step_time(&self, id: InstanceId) -> Option<StepTime> {
        self.state.ledger.step_fit(id.index()).step_time()
    }

    /// Returns an instance's loads from a tier: the cost of a loaded token relative to a computed
    /// one, the number of loads behind it, and the tokens loaded.
    pub fn tier_loads_of(&self, id: InstanceId, tier: Tier) -> (f64, u64, u64) {
        let ratio = self.state.tier_load_ratio(id.index(), tier);
        let loads = self.state.ledger.loads(id.index()).of(tier);
        loads.map_or((ratio, 0, 0), |loads| (ratio, loads.cost.observed(), loads.hit_tokens as u64))
    }

    /// Returns the learned seconds per fetched token, the learned fixed seconds per fetch and the
    /// number of fetches behind them, as they count at `now`; `None` if prefix fetches are off.
    pub fn fetch_cost(&self, now: Seconds) -> Option<(Seconds, Seconds, u64)> {
        self.state.fetches.map(|fetches| fetches.at(now).learned())
    }
}
