//! Prefix fetches. Before a request begins, its instance copies a part of the prompt's KV cache
//! from another instance (the holder), if this takes less time than computing it.
//!
//! A fetch is a [`PrefixFetch`](crate::plan::PrefixFetch) beside the plan's segments, not a
//! segment. It is never open, produces no token, and uses no place in the holder's queue or batch.
//! If it fails, the request continues and its instance computes the missing part. A retry of the
//! request begins at token 0. The ledger counts a holder's fetches in `fetches`.
//! [`crate::router::plan`] plans the fetched tokens and the holder.
use super::writer::Lifecycle;
use crate::error::CoreError;
use crate::ids::Seconds;
use crate::router::tickets::{self, PlacedSegment, PlannedFetch, TicketId, TicketState};

impl Lifecycle<'_> {
    /// Begins a segment's prefix fetch: counts it at the holder, and its prompt waits for it.
    pub(super) fn open_fetch(&mut self, placed: &PlacedSegment) {
        let Some(planned) = placed.fetch else { return };
        self.state.ledger.wait(placed.segment.instance.index());
        self.requests.totals.fetches += 1;
        self.serve(&planned, 1.0);
    }

    /// Ends the prefix fetch of a ticket's open segment, if one runs.
    pub(super) fn end_fetch(&mut self, ticket: TicketId) {
        let Ok(state) = self.requests.tickets.get(ticket) else { return };
        let Some(planned) = state.open.fetch.as_mut().filter(|planned| planned.under_way) else { return };
        planned.under_way = false;
        let planned = *planned;
        self.serve(&planned, -1.0);
    }

    /// Ends the fetches whose holders' slots have other instances: nobody can bring their tokens.
    pub fn end_lost_fetches(&mut self) -> Result<(), CoreError> {
        let is_lost = |fetch: PlannedFetch| fetch.under_way && !self.state.fleet.is_last(fetch.holder);
        let lost = self.requests.tickets.iter().filter(|(_, each)| each.open.fetch.is_some_and(is_lost));
        let lost: Vec<TicketId> = lost.map(|(ticket, _)| ticket).collect();
        lost.into_iter().try_for_each(|ticket| self.fetched(ticket, 0, 0.0, false))
    }

    fn serve(&mut self, planned: &PlannedFetch, more: f64) {
        if let Some(holder) = self.state.fleet.current(planned.holder) {
            self.state.ledger.serve_fetch(holder.index(), more);
        }
    }

    /// Records the result of a prefix fetch: `tokens` arrived `seconds` after its start, or it was
    /// given up then (`late`). The instance computes the rest.
    pub(super) fn fetched(
        &mut self,
        ticket: TicketId,
        tokens: u32,
        seconds: Seconds,
        late: bool,
    ) -> Result<(), CoreError> {
        let problem = || "its open segment fetches no prefix".into();
        let none = || CoreError::Ticket { ticket: ticket.0, problem: problem() };
        let planned = self.requests.tickets.get(ticket)?.open.fetch.ok_or_else(none)?;
        let most = planned.fetch.tokens();
        if tokens > most || !(seconds >= 0.0 && seconds.is_finite()) {
            let expected = format!("at most the {most} planned tokens, in 0 s or more");
            return Err(CoreError::bad_value("fetched", format!("{tokens} tokens in {seconds} s"), expected));
        }
        if !planned.under_way {
            return Ok(()); // an earlier first token already ended the fetch
        }
        self.end_fetch(ticket);
        let TicketState { open: placed, decision, .. } = self.requests.tickets.get(ticket)?;
        if let Some(planned) = &mut placed.fetch {
            planned.fetch.to_token = planned.fetch.from_token + tokens;
        }
        placed.entry.new_tokens += f64::from(most - tokens);
        let (slot, key) = (placed.segment.instance.index(), tickets::slot(ticket));
        if self.state.fleet.is_current(placed.at) {
            self.state.ledger.requeue(slot, key, &placed.entry, self.now);
        }
        self.requests.totals.fetched_tokens += u64::from(tokens);
        if let Some(fetches) = &mut self.state.fetches {
            // A fetch that was given up after more than its expected time would have taken longer.
            // Another fetch that brought nothing teaches nothing.
            let late = late && tokens == 0 && seconds > fetches.cost.at(self.now).seconds(f64::from(most));
            fetches.cost.observe(f64::from(if late { most } else { tokens }), seconds, self.now);
        }
        self.requests.records.update(*decision, |r| {
            let fetch = r.fetch.iter_mut();
            fetch.for_each(|fetch| (fetch.tokens, fetch.seconds) = (Some(tokens), Some(seconds)));
        });
        Ok(())
    }
}
