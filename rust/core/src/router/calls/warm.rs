//! Calls about warm fleet changes.
use crate::error::CoreError;
use crate::ids::{Seconds, Slot};
use crate::router::listeners::warm;
use crate::router::router::Router;
use crate::router::tickets::TicketId;
use crate::warm::{Demand, Fetch, WarmConfig, Warming, plan};

impl Router {
    /// Sets whether instances join and leave warm; `None`: cold. Remembered prompts are dropped.
    ///
    /// # Errors
    /// `BadValue` for a setting out of its range.
    pub fn set_warm(&mut self, config: Option<WarmConfig>) -> Result<(), CoreError> {
        config.map_or(Ok(()), |config| config.check())?;
        self.listeners.demand = config.as_ref().map(Demand::new);
        self.state.config.warm = config;
        Ok(())
    }

    /// Returns the prompts of recent requests, if fleet changes are warm.
    pub fn demand(&self) -> Option<&Demand> {
        self.listeners.demand.as_ref()
    }

    /// Returns the last whole block of a ticket's prompt, which names the prompt in fetches
    /// ([`Fetch::prompt`]); `None`: it has no whole block.
    ///
    /// # Errors
    /// `Ticket` if the ticket is closed.
    pub fn prompt_key(&mut self, ticket: TicketId) -> Result<Option<u64>, CoreError> {
        Ok(warm::prompt_key(self.requests.tickets.get(ticket)?))
    }

    /// Begins to warm an instance that has joined: it accepts no new requests until
    /// [`Router::end_warming`]. Returns the fetches to make before.
    ///
    /// # Errors
    /// `BadValue` if fleet changes are cold or the fleet has no such slot.
    pub fn begin_join(&mut self, id: Slot, now: Seconds) -> Result<Warming, CoreError> {
        warm::config(&self.state)?;
        self.state.fleet.set_warming(id, true)?;
        warm::plan_change(self.demand(), &self.state, id, now, plan::join)
    }

    /// Lets a warming instance accept requests.
    ///
    /// # Errors
    /// `BadValue` if the fleet has no such slot.
    pub fn end_warming(&mut self, id: Slot) -> Result<(), CoreError> {
        self.state.fleet.set_warming(id, false)
    }

    /// Lets an instance drain. Returns the fetches to make before it leaves.
    ///
    /// # Errors
    /// `BadValue` if fleet changes are cold or the fleet has no such slot.
    pub fn begin_leave(&mut self, id: Slot, now: Seconds) -> Result<Warming, CoreError> {
        warm::config(&self.state)?;
        self.state.fleet.set_draining(id, true)?;
        warm::plan_change(self.demand(), &self.state, id, now, plan::leave)
    }

    /// Records that a fetch of a fleet change has brought `tokens`. An exact index gets the blocks
    /// from the engine's events. Nothing is recorded if another instance has taken the target's
    /// slot.
    pub fn prefix_fetched(&mut self, fetch: &Fetch, tokens: u32) {
        warm::fetched(&mut self.state, fetch, tokens);
    }

    /// Returns the running requests of an instance that can move, each with its target. The target
    /// is the instance that holds most of the prompt, if that is at least half of it. Otherwise it
    /// is the instance with the fewest requests. [`Router::begin_move`] begins a move.
    pub fn moves_from(&self, id: Slot) -> Vec<(TicketId, Slot)> {
        warm::moves_from(&self.state, &self.requests.tickets, id)
    }
}
