//! Calls about placed requests, which their lifecycle answers.
use crate::error::CoreError;
use crate::ids::{Seconds, Slot};
use crate::plan::{Event, PrefixFetch, Segment};
use crate::router::lifecycle::Carry;
use crate::router::router::Router;
use crate::router::tickets::TicketId;

impl Router {
    /// Applies an event of a ticket's open segment. Returns the segment that is open now, if it
    /// changed: the next segment of the plan, or a retry on another instance after a failure before
    /// the first token. A retry from token 0 repeats the whole request.
    ///
    /// # Errors
    /// `Ticket` if the ticket is closed. `NoInstance` if a segment ended as planned and no instance
    /// can take the next; the request has then failed.
    pub fn advance(
        &mut self,
        ticket: TicketId,
        event: Event,
        now: Seconds,
    ) -> Result<Option<Segment>, CoreError> {
        self.lifecycle(now).advance(ticket, event)
    }

    /// Closes an abandoned ticket. Does nothing if the ticket is already closed.
    pub fn drop_ticket(&mut self, ticket: TicketId) {
        let now = self.latest;
        self.lifecycle(now).drop_ticket(ticket);
    }

    /// Returns whether a ticket is open.
    pub fn is_open(&mut self, ticket: TicketId) -> bool {
        self.requests.tickets.get(ticket).is_ok()
    }

    /// Yields the segments bound after a ticket's open one, in order, up to one whose instance has
    /// given its slot to another.
    pub fn bound(&mut self, ticket: TicketId) -> impl Iterator<Item = Segment> {
        let (fleet, tickets) = (&self.state.fleet, &mut self.requests.tickets);
        let bound = tickets.get(ticket).ok().into_iter().flat_map(|ticket| &ticket.later);
        bound.take_while(move |placed| fleet.is_last(placed.at)).map(|placed| placed.segment)
    }

    /// Returns the running prefix fetch of a ticket's open segment; `None` if there is none or it
    /// is over. It ends without tokens if its holder's slot gets another instance.
    pub fn fetch_of(&mut self, ticket: TicketId) -> Option<PrefixFetch> {
        let planned = self.requests.tickets.get(ticket).ok()?.open.fetch?;
        planned.under_way.then_some(planned.fetch)
    }

    /// Begins to move a running request: places a segment on `target` for the rest of the request,
    /// after the open segment.
    ///
    /// # Errors
    /// `Ticket` if the ticket is closed, has no token yet or already has a bound segment. `Ticket`
    /// also if `target` is the current instance, removed, unhealthy, draining or prefill-only, or
    /// if one of both engines cannot transfer KV after an output token. `BadValue` if the router
    /// has no slot `target`.
    pub fn begin_move(
        &mut self,
        ticket: TicketId,
        target: Slot,
        carry: Carry,
        now: Seconds,
    ) -> Result<Segment, CoreError> {
        self.lifecycle(now).begin_move(ticket, target, carry)
    }

    /// Chooses another instance for a running request whose instance failed. The failed instance
    /// gets no further segment of the request. The choice follows the rules of a follow-up segment.
    /// Places nothing.
    ///
    /// # Errors
    /// `Ticket` if the ticket is closed or has no token yet; `NoInstance`.
    pub fn elsewhere(&mut self, ticket: TicketId, now: Seconds) -> Result<Slot, CoreError> {
        self.lifecycle(now).elsewhere(ticket)
    }

    /// Cancels a move. Does nothing if no move has begun.
    ///
    /// # Errors
    /// `Ticket` if the ticket is closed.
    pub fn cancel_move(&mut self, ticket: TicketId, now: Seconds) -> Result<(), CoreError> {
        self.lifecycle(now).cancel_move(ticket)
    }
}
