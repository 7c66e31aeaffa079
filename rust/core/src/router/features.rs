//! Calls about features that follow requests: the hot-spot guard, priorities and rebalancing.
use super::listeners::guard::{switch, tick};
use super::listeners::rebalancing::NamedMove;
use super::router::Router;
use super::state::State;
use crate::error::CoreError;
use crate::guard::{Guard, GuardEvent};
use crate::ids::Seconds;
use crate::rebalance::{Running, Stop};

impl Router {
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
    pub(super) fn switch_guard(&mut self) {
        let State { first, canary, .. } = &self.state;
        let on = first.guarded || canary.as_ref().is_some_and(|canary| canary.guarded);
        switch(&mut self.listeners.guard, on, self.state.config.guard);
    }

    /// Returns the current gamma in 1/s and the number of estimates; `None` if requests are not
    /// boosted.
    pub fn gamma(&self) -> Option<(f64, u64)> {
        self.listeners.priorities.as_ref()?.gamma()
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
