//! Read access for metrics and pages: counters, records, learned values and indicators.
use crate::estimate::{Answers, StepTime};
use crate::ids::{Seconds, Slot};
use crate::indicators::{DeclaredId, IndicatorSet, Indicators};
use crate::kv::tier::Tier;
use crate::policy::{Fallbacks, Policy};
use crate::record::DecisionRecord;
use crate::request::Request;
use crate::router::decision::Totals;
use crate::router::ledger::Ahead;
use crate::router::plan::TtftSource;
use crate::router::router::Router;
use crate::router::state::State;

impl Router {
    /// Returns the indicators that the policies read.
    pub fn reads(&self) -> IndicatorSet {
        self.state.reads()
    }

    /// Returns predicted loads, if a policy needs them.
    pub fn ahead(&self) -> Option<&Ahead> {
        self.state.ledger.ahead()
    }

    /// Returns the learned lengths of answers.
    pub fn answers(&self) -> &Answers {
        &self.state.ledger.answers
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
    pub fn in_flight_on(&self, id: Slot) -> usize {
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

    /// Returns the leading prompt tokens that each live instance holds, in slot order. Changes no
    /// state.
    pub fn hit_tokens(&mut self, request: &Request<'_>) -> Vec<u32> {
        self.match_prefix(request);
        let mut hits = self.context.matched.hit_blocks.clone();
        self.state.whole_hits(request, &mut hits);
        let fleet = &self.state.fleet;
        if fleet.live_count() < hits.len() {
            let mut ids = self.state.ids();
            hits.retain(|_| ids.next().is_some_and(|id| fleet.is_live(id)));
        }
        hits
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
        self.context.matched.clear();
        let able = self.state.fleet.eligible_count();
        self.state.derive(&mut self.context, &Request::default(), reads, able, None, now);
    }

    /// Returns the number of requests placed on an instance since it was added.
    pub fn decisions_on(&self, id: Slot) -> u64 {
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
    pub fn ttft_source(&self, id: Slot, pool_rate: bool) -> TtftSource {
        self.state.ttft_source(id.index(), pool_rate)
    }

    /// Returns the step-time model learned from this router's streams on an instance; `None` until
    /// there are enough streams.
    ///
    /// # Panics
    /// If the router has no such slot.
    pub fn step_time(&self, id: Slot) -> Option<StepTime> {
        self.state.ledger.step_fit(id.index()).step_time()
    }

    /// Returns an instance's loads from a tier: the cost of a loaded token relative to a computed
    /// one, the number of loads behind it, and the tokens loaded.
    pub fn tier_loads_of(&self, id: Slot, tier: Tier) -> (f64, u64, u64) {
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
