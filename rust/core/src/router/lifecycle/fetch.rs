//! Prefix fetches. Before a request begins, its instance copies a part of the prompt's KV cache
//! from another instance (the holder), if this takes less time than computing it.
//!
//! A fetch is a [`Pull`](crate::plan::Pull) beside the plan's segments, not a segment. It is never
//! open, produces no token, and uses no place in the holder's queue or batch. If it fails, the
//! request continues and its instance computes the missing part. A retry of the request begins at
//! token 0. The ledger counts a holder's fetches in `pulls`. [`crate::router::plan`] plans the
//! fetched tokens and the holder.
use super::writer::Lifecycle;
use crate::error::CoreError;
use crate::ids::Seconds;
use crate::router::tickets::{self, Leg, Pulling, TicketId};

impl Lifecycle<'_> {
    /// Begins a segment's prefix fetch: counts it at the holder, and its prompt waits for it.
    pub(super) fn open_pull(&mut self, leg: &Leg) {
        let Some(pulling) = leg.pull else { return };
        self.state.ledger.wait(leg.segment.instance.index());
        self.requests.totals.pulls += 1;
        self.serve(&pulling, 1.0);
    }

    /// Ends the prefix fetch of a ticket's open segment, if one runs.
    pub(super) fn end_pull(&mut self, ticket: TicketId) {
        let leg = self.requests.tickets.get(ticket).ok().map(|state| &mut state.leg);
        if let Some(pulling) = leg.and_then(|leg| leg.pull.as_mut()).filter(|pulling| pulling.under_way) {
            pulling.under_way = false;
            let pulling = *pulling;
            self.serve(&pulling, -1.0);
        }
    }

    fn serve(&mut self, pulling: &Pulling, more: f64) {
        let holder = pulling.pull.holder;
        if self.state.fleet.is_current(holder, pulling.holder_generation) {
            self.state.ledger.serve_pull(holder.index(), more);
        }
    }

    /// Records the result of a prefix fetch: `tokens` arrived `seconds` after its start. The
    /// instance computes the rest.
    pub(super) fn pulled(
        &mut self,
        ticket: TicketId,
        tokens: u32,
        seconds: Seconds,
    ) -> Result<(), CoreError> {
        let state = self.requests.tickets.get(ticket)?;
        let Some(pulling) = state.leg.pull else {
            let problem = "its open segment fetches no prefix".into();
            return Err(CoreError::Ticket { ticket: ticket.0, problem });
        };
        let most = pulling.pull.tokens();
        if tokens > most || !(seconds >= 0.0 && seconds.is_finite()) {
            let (what, got) = ("fetched".into(), format!("{tokens} tokens in {seconds} s"));
            let expected = format!("at most the {most} planned tokens, in 0 s or more");
            return Err(CoreError::BadValue { what, got, expected });
        }
        if !pulling.under_way {
            return Ok(()); // an earlier first token already ended the fetch
        }
        self.end_pull(ticket);
        let state = self.requests.tickets.get(ticket)?;
        let (leg, decision) = (&mut state.leg, state.decision);
        if let Some(pulling) = &mut leg.pull {
            pulling.pull.to_token = pulling.pull.from_token + tokens;
        }
        leg.entry.new_tokens += f64::from(most - tokens);
        let (slot, key) = (leg.segment.instance.index(), tickets::slot(ticket));
        if self.state.fleet.is_current(leg.segment.instance, leg.instance_generation) {
            self.state.ledger.requeue(slot, key, &leg.entry, self.now);
        }
        self.requests.totals.pulled_tokens += u64::from(tokens);
        if let Some(pulls) = &mut self.state.pulls {
            pulls.cost.observe(f64::from(tokens), seconds);
        }
        self.requests.receipts.update(decision, |r| {
            if let Some(pull) = &mut r.pull {
                (pull.tokens, pull.seconds) = (Some(tokens), Some(seconds));
            }
        });
        Ok(())
    }
}
