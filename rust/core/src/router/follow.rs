//! What callers tell and ask of requests that are placed.
use super::lifecycle::Carry;
use super::router::Router;
use super::tickets::TicketId;
use crate::error::CoreError;
use crate::ids::{InstanceId, Seconds};
use crate::plan::{Event, Pull, Segment};

impl Router {
    /// Tells what happened to a ticket's open segment. Returns the segment that is open now where
    /// that changed: the next of the plan, or, for a request that failed before its first token,
    /// the same one elsewhere. A segment that then begins at token 0 is the whole request anew.
    ///
    /// # Errors
    /// `Ticket` where the ticket is closed. `NoInstance` where a segment ended well and nobody
    /// takes the next: the request has failed.
    pub fn advance(
        &mut self,
        ticket: TicketId,
        event: Event,
        now: Seconds,
    ) -> Result<Option<Segment>, CoreError> {
        self.lifecycle(now).advance(ticket, event)
    }

    /// Closes a ticket that nobody holds any more. Does nothing where it is closed.
    pub fn drop_ticket(&mut self, ticket: TicketId) {
        let now = self.latest;
        self.lifecycle(now).drop_ticket(ticket);
    }

    /// Whether a ticket is open.
    pub fn is_open(&mut self, ticket: TicketId) -> bool {
        self.requests.tickets.get(ticket).is_ok()
    }

    /// The segments that are bound behind a ticket's open one, in order.
    pub fn bound(&mut self, ticket: TicketId) -> impl Iterator<Item = Segment> {
        let bound = self.requests.tickets.get(ticket).ok();
        bound.into_iter().flat_map(|state| state.later.iter().map(|leg| leg.segment))
    }

    /// What the open segment of a ticket pulls before it begins; `None` where it pulls nothing, or
    /// the pull is over.
    pub fn pull_of(&mut self, ticket: TicketId) -> Option<Pull> {
        let pulling = self.requests.tickets.get(ticket).ok()?.leg.pull?;
        pulling.under_way.then_some(pulling.pull)
    }

    /// Begins to move a running request: places a segment for what is left of it on `target`,
    /// behind its open one.
    ///
    /// # Errors
    /// `Ticket` where it is closed, without a token so far, has a segment bound behind the open one
    /// already, or could not go there: `target` is where it is, gone, not healthy, draining,
    /// prefills only, or one of both engines cannot hand over behind an output token. `BadValue` if
    /// the router has no slot `target`.
    pub fn begin_move(
        &mut self,
        ticket: TicketId,
        target: InstanceId,
        carry: Carry,
        now: Seconds,
    ) -> Result<Segment, CoreError> {
        self.lifecycle(now).begin_move(ticket, target, carry)
    }

    /// The instance of a running request has failed it: it is not asked for it again. Where it
    /// would best go on, chosen among the others as a segment that follows another is. Places
    /// nothing.
    ///
    /// # Errors
    /// `Ticket` where it is closed or has no token yet, `NoInstance`.
    pub fn elsewhere(&mut self, ticket: TicketId, now: Seconds) -> Result<InstanceId, CoreError> {
        self.lifecycle(now).elsewhere(ticket)
    }

    /// Gives up a move that has begun. Does nothing where none has.
    ///
    /// # Errors
    /// `Ticket` where it is closed.
    pub fn cancel_move(&mut self, ticket: TicketId, now: Seconds) -> Result<(), CoreError> {
        self.lifecycle(now).cancel_move(ticket)
    }
}
