//! Calls about features that follow requests: the hot-spot guard, priorities and rebalancing.
use crate::error::CoreError;
use crate::guard::{Guard, GuardEvent};
use crate::ids::Seconds;
use crate::rebalance::{Rebalancing, Running, Stop};
use crate::router::listeners::guard::{switch, tick};
use crate::router::listeners::priorities::{Boosts, Priorities};
use crate::router::listeners::rebalancing::{NamedMove, Rounds};
use crate::router::router::Router;
use crate::router::state::{ForecastReads, State};

impl Router {
    /// Turns the hot-spot guard on or off for the router's policy. A canary's policy may still need
    /// it ([`Router::set_canary`]).
    pub fn set_guard(&mut self, on: bool) {
        self.state.first.guarded = on;
        self.switch_guard();
    }

    /// Turns the hot-spot guard on or off for all policies.
    pub fn set_guard_of_all(&mut self, on: bool) {
        let State { canary, shadow, .. } = &mut self.state;
        canary.iter_mut().chain(shadow).for_each(|each| each.guarded = on);
        self.set_guard(on);
    }

    /// Runs periodic work. Returns the guard's events and the time of the next call.
    pub fn tick(&mut self, now: Seconds) -> (Vec<GuardEvent>, Seconds) {
        let now = self.clock(now);
        let events = tick(&mut self.listeners.guard, &self.state, now);
        (events, now + self.state.config.guard.period_seconds)
    }

    /// Returns the hot-spot guard, if it is on.
    pub fn guard(&self) -> Option<&Guard> {
        self.listeners.guard.as_ref().filter(|guard| guard.config().on)
    }

    /// Switches the guard on if it filters candidates of the router's policy or of the canary.
    pub(in crate::router) fn switch_guard(&mut self) {
        let State { first, canary, .. } = &self.state;
        let on = first.guarded || canary.as_ref().is_some_and(|canary| canary.guarded);
        switch(&mut self.listeners.guard, on, self.state.config.guard);
    }

    /// Sets the order of requests; `None`: requests have no priority.
    ///
    /// # Errors
    /// `BadValue` for a setting out of its range.
    pub fn set_priorities(&mut self, priorities: Option<Priorities>) -> Result<(), CoreError> {
        self.listeners.boosts = priorities.map(Boosts::new).transpose()?.flatten();
        self.listeners.admission.order_engines(priorities == Some(Priorities::Vtc));
        Ok(())
    }

    /// Replaces `clock_offset_seconds` of [`Priorities::UniBoost`], for example after a step or
    /// drift of the wall clock. Learned values stay. Other orders have no clock.
    ///
    /// # Errors
    /// `BadValue` for an offset out of range.
    pub fn set_clock_offset(&mut self, seconds: Seconds) -> Result<(), CoreError> {
        self.listeners.boosts.as_mut().map_or(Ok(()), |boosts| boosts.set_clock_offset(seconds))
    }

    /// Returns the current gamma in 1/s and the number of estimates; `None` if requests are not
    /// boosted.
    pub fn gamma(&self) -> Option<(f64, u64)> {
        self.listeners.boosts.as_ref().map(Boosts::gamma)
    }

    /// Sets how running requests are moved; `None`: they are not moved. From now on, the router
    /// learns the data that the forecast reads.
    ///
    /// # Errors
    /// `BadValue` if policies and forecast need different survival curves.
    pub fn set_rebalancing(&mut self, rebalancing: Option<Rebalancing>) -> Result<(), CoreError> {
        self.state.forecast =
            rebalancing.as_ref().map(|by| ForecastReads { curve: by.forecast.reads_curve() });
        let turns = self.listeners.rebalancing.take().and_then(|rounds| rounds.turns);
        self.listeners.rebalancing = rebalancing.map(|by| Rounds::new(by, turns));
        self.look_ahead()
    }

    /// Runs one round of rebalancing over all instances that decode. Returns the moves worth
    /// making, and why there are no more. The ledger is unchanged; [`Router::begin_move`] makes a
    /// move.
    ///
    /// # Errors
    /// Errors of the forecast. Built-in forecasts do not fail.
    pub fn rebalance(&mut self, now: Seconds) -> Result<(Vec<NamedMove>, Stop), CoreError> {
        self.clock(now);
        match &mut self.listeners.rebalancing {
            Some(rounds) => rounds.round(&self.state, &self.requests.tickets),
            None => Ok((Vec::new(), Stop::Off)),
        }
    }

    /// Returns the requests that an immediate [`Router::rebalance`] would pass to the forecast.
    /// Empty if rebalancing is off.
    pub fn running(&self) -> Vec<Running> {
        let rounds = self.listeners.rebalancing.as_ref();
        rounds.map_or_else(Vec::new, |rounds| rounds.running(&self.state, &self.requests.tickets))
    }
}
