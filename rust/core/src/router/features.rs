//! Calls about features that follow requests: the hot-spot guard, priorities and rebalancing.
use super::listeners::guard::tick;
use super::listeners::rebalancing::NamedMove;
use super::router::Router;
use crate::error::CoreError;
use crate::guard::{Guard, GuardEvent};
use crate::ids::Seconds;
use crate::rebalance::{Running, Stop};

impl Router {
    /// Runs periodic work. Returns the guard's events and the time of the next call.
    pub fn tick(&mut self, now: Seconds) -> (Vec<GuardEvent>, Seconds) {
        let now = self.clock(now);
        let guard = &mut self.listeners.guard;
        (tick(guard, &self.state, now), now + guard.config().period_seconds)
    }

    /// Returns the hot-spot guard.
    pub fn guard(&self) -> &Guard {
        &self.listeners.guard
    }

    /// Returns the current gamma in 1/s and the number of estimates; `None` if requests are not
    /// boosted.
    pub fn gamma(&self) -> Option<(f64, u64)> {
        self.listeners.ordering.as_ref()?.gamma()
    }

    /// Runs one round of rebalancing over all instances that decode. Returns the moves worth
    /// making, and why there are no more. The ledger is unchanged; [`Router::begin_move`] makes a
    /// move.
    ///
    /// # Errors
    /// Errors of the forecast. Built-in forecasts do not fail.
    pub fn rebalance(&mut self, now: Seconds) -> Result<(Vec<NamedMove>, Stop), CoreError> {
        self.clock(now);
        match &mut self.listeners.rounds {
            Some(rounds) => rounds.round(&self.state, &self.requests.tickets),
            None => Ok((Vec::new(), Stop::Off)),
        }
    }

    /// Returns the requests that an immediate [`Router::rebalance`] would pass to the forecast.
    /// Empty if rebalancing is off.
    pub fn running(&self) -> Vec<Running> {
        let rounds = self.listeners.rounds.as_ref();
        rounds.map_or_else(Vec::new, |rounds| rounds.running(&self.state, &self.requests.tickets))
    }
}
