//! The life of a prefix fetch. Before a request begins, its instance copies the part of the
//! prompt's KV cache that another instance (the holder) has, if that takes less time than computing
//! it.
//!
//! A fetch is a [`Pull`](crate::plan::Pull) beside the plan's segments, not a segment: it is never open, produces no
//! token, and takes no place in the holder's queue or batch. If it fails, the request goes on and
//! its instance computes the missing part. A retry of the request begins at token 0. The ledger
//! counts the fetches that a holder serves in `pulls`. What is fetched, and from which holder, is
//! planned in [`crate::router::plan`].
use super::writer::Lifecycle;
use crate::error::CoreError;
use crate::ids::Seconds;
use crate::router::tickets::{self, Leg, Pulling, TicketId};

impl Lifecycle<'_> {
    /// A leg's pull begins: its holder has one more to serve, and its prompt waits for it.
    pub(super) fn open_pull(&mut self, leg: &Leg) {
        let Some(pulling) = leg.pull else { return };
        self.state.ledger.wait(leg.segment.instance.index());
        self.requests.totals.pulls += 1;
        self.serve(&pulling, 1.0);
    }

    /// What the open segment of a ticket pulls is over, or of no use any more. Does nothing where
    /// it pulls nothing.
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

    /// `tokens` of what a ticket's open segment was to pull came, `seconds` after it was asked for;
    /// its instance computes the rest.
    pub(super) fn pulled(
        &mut self,
        ticket: TicketId,
        tokens: u32,
        seconds: Seconds,
    ) -> Result<(), CoreError> {
        let state = self.requests.tickets.get(ticket)?;
        let Some(pulling) = state.leg.pull else {
            let problem = "its open segment pulls nothing".into();
            return Err(CoreError::Ticket { ticket: ticket.0, problem });
        };
        let most = pulling.pull.tokens();
        if tokens > most || !(seconds >= 0.0 && seconds.is_finite()) {
            let (what, got) = ("pulled".into(), format!("{tokens} tokens in {seconds} s"));
            let expected = format!("at most the {most} tokens that were to be pulled, in 0 s or more");
            return Err(CoreError::BadValue { what, got, expected });
        }
        if !pulling.under_way {
            return Ok(()); // a first token came before: it is known to be over
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
