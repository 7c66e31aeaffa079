//! Prefix pull: before a request begins, its instance fetches the part of the prompt's KV that another instance holds and it does not, where that takes less
//! time than computing it again. So a plan has two segments: `[0, H)` on the holder, where nothing is computed, and the rest on the chosen instance.
//!
//! The first of them is a [`Pull`] beside the plan's segments, not one of them: it is never open. No token comes of it, it waits in no queue and takes no place in the
//! holder's batch; if it fails, the request does not, since its instance computes what is missing; and a retry begins anew, at token 0. A segment that is open has
//! all of that in the ledger. What the holder does is counted by itself, in `pulls`.
//!
//! For each instance the best way is one of two: compute what it misses, or pull as much as the fullest holder with time has ([`Indicator::PullTokens`],
//! [`Indicator::PullCostTokens`]). Scores may read it; whatever they read, the instance that is chosen pulls where it pays.
use crate::error::CoreError;
use crate::ids::Seconds;
use crate::plan::Pull;
use crate::router::router::Router;
use crate::router::tickets::{self, Leg, Pulling, TicketId};

impl Router {
    /// What the open segment of a ticket pulls before it begins; `None` where it pulls nothing, or the pull is over.
    pub fn pull_of(&mut self, ticket: TicketId) -> Option<Pull> {
        let pulling = self.tickets.get(ticket).ok()?.leg.pull?;
        pulling.under_way.then_some(pulling.pull)
    }

    /// A leg's pull begins: its holder has one more to serve, and its prompt waits for it.
    pub(in crate::router) fn open_pull(&mut self, leg: &Leg) {
        let Some(pulling) = leg.pull else { return };
        self.state.ledger.wait(leg.segment.instance.index());
        self.totals.pulls += 1;
        self.serve(&pulling, 1.0);
    }

    /// What the open segment of a ticket pulls is over, or of no use any more. Does nothing where it pulls nothing.
    pub(in crate::router) fn end_pull(&mut self, ticket: TicketId) {
        let leg = self.tickets.get(ticket).ok().map(|state| &mut state.leg);
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

    /// `tokens` of what a ticket's open segment was to pull came, `seconds` after it was asked for; its instance computes the rest.
    pub(in crate::router) fn pulled(
        &mut self,
        ticket: TicketId,
        tokens: u32,
        seconds: Seconds,
        now: Seconds,
    ) -> Result<(), CoreError> {
        let state = self.tickets.get(ticket)?;
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
        let state = self.tickets.get(ticket)?;
        let (leg, decision) = (&mut state.leg, state.decision);
        if let Some(pulling) = &mut leg.pull {
            pulling.pull.to_token = pulling.pull.from_token + tokens;
        }
        leg.entry.new_tokens += f64::from(most - tokens);
        let (slot, key) = (leg.segment.instance.index(), tickets::slot(ticket));
        if self.state.fleet.is_current(leg.segment.instance, leg.instance_generation) {
            self.state.ledger.requeue(slot, key, &leg.entry, now);
        }
        self.totals.pulled_tokens += u64::from(tokens);
        if let Some(pulls) = &mut self.state.pulls {
            pulls.cost.observe(f64::from(tokens), seconds);
        }
        self.receipts.update(decision, |r| {
            if let Some(pull) = &mut r.pull {
                (pull.tokens, pull.seconds) = (Some(tokens), Some(seconds));
            }
        });
        Ok(())
    }
}
