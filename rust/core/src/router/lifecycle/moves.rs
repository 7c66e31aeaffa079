//! Moves of running requests: the open segment is closed early, and another goes on elsewhere
//! (STAR, section 5.4).
//!
//! A move takes time, in which the request runs on or waits: its segment on the target is bound
//! when the move begins ([`Lifecycle::begin_move`]) and opened when [`crate::plan::Event::Moved`] says
//! that it is there. Whatever ends the request meanwhile ends the move with it.
use super::writer::Lifecycle;
use crate::error::CoreError;
use crate::ids::InstanceId;
use crate::plan::{Cuts, Segment, Usage};
use crate::router::ledger::Stage;
use crate::router::tickets::{self, TicketId};

/// How a move brings what was computed to the target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Carry {
    /// Its KV is sent.
    Kv,
    /// Nothing is: the target computes it again behind what its prefix cache holds.
    Recompute,
}

impl Lifecycle<'_> {
    /// See [`Router::begin_move`](crate::router::Router::begin_move).
    ///
    /// # Errors
    /// As there.
    pub fn begin_move(
        &mut self,
        ticket: TicketId,
        target: InstanceId,
        carry: Carry,
    ) -> Result<Segment, CoreError> {
        self.state.fleet.check(target)?;
        let state = self.requests.tickets.get(ticket)?;
        let (source, made) = (state.leg.segment.instance, state.leg.entry.output_tokens);
        let runs = state.leg.entry.stage == Stage::Decoding;
        let bound = !state.later.is_empty() || state.leg.segment.to_token.is_some();
        let from = state.prompt_tokens.saturating_add(made as u32);
        let able = |id: InstanceId| self.state.instances[id.index()].cuts >= Cuts::Output;
        let problem = match () {
            () if !runs => "it has no token yet",
            () if bound => "another segment is to follow its open one",
            () if source == target => "it runs there already",
            () if !self.state.takes_over(target) => {
                "the target is gone, not healthy, draining, or prefills only"
            }
            () if carry == Carry::Kv && !(able(source) && able(target)) => {
                "the engines cannot hand over behind an output token"
            }
            () => "",
        };
        if !problem.is_empty() {
            return Err(CoreError::Ticket {
                ticket: ticket.0,
                problem: format!("it cannot move: {problem}"),
            });
        }
        let (key, now) = (tickets::slot(ticket), self.now);
        let mut leg = self.plan_for(ticket, |state, context, request, _| {
            state.match_prefix(context, request.chain);
            let mut leg = state.leg(context, request, target, from, None);
            leg.start = Some(now);
            if carry == Carry::Recompute {
                let hit = state.saved_tokens(request, leg.hit_blocks);
                leg.entry.new_tokens = f64::from(from) - hit;
            }
            leg
        })?;
        self.open_leg(key, &mut leg);
        let segment = leg.segment;
        self.requests.tickets.get(ticket)?.later.push(leg);
        Ok(segment)
    }

    /// See [`Router::elsewhere`](crate::router::Router::elsewhere).
    ///
    /// # Errors
    /// As there.
    pub fn elsewhere(&mut self, ticket: TicketId) -> Result<InstanceId, CoreError> {
        let state = self.requests.tickets.get(ticket)?;
        let source = state.leg.segment.instance;
        if state.leg.entry.stage != Stage::Decoding {
            let problem = "it cannot move: it has no token yet".into();
            return Err(CoreError::Ticket { ticket: ticket.0, problem });
        }
        state.lost.push(source.0);
        state.failed.clone_from(&state.lost);
        let (turn, now) = (self.state.turn_behind(source), self.now);
        self.plan_for(ticket, |state, context, request, failed| {
            state.match_prefix(context, request.chain);
            state.choose(context, request, turn, failed, None, now)
        })?
    }

    /// See [`Router::cancel_move`](crate::router::Router::cancel_move).
    ///
    /// # Errors
    /// As there.
    pub fn cancel_move(&mut self, ticket: TicketId) -> Result<(), CoreError> {
        let state = self.requests.tickets.get(ticket)?;
        if state.leg.segment.to_token.is_none() {
            let later = std::mem::take(&mut state.later);
            later.iter().for_each(|leg| self.close_leg(tickets::slot(ticket), leg));
        }
        Ok(())
    }

    /// Closes the open segment where it is, and opens the one that was bound by a move.
    pub(super) fn complete_move(&mut self, ticket: TicketId) -> Result<Segment, CoreError> {
        let key = tickets::slot(ticket);
        let state = self.requests.tickets.get(ticket)?;
        if state.later.is_empty() || state.leg.segment.to_token.is_some() {
            let problem = "no move of it has begun".into();
            return Err(CoreError::Ticket { ticket: ticket.0, problem });
        }
        let (made, decision) = (state.leg.entry.output_tokens, state.decision);
        let from = state.prompt_tokens.saturating_add(made as u32);
        state.leg.segment.to_token = Some(from);
        let mut bound = state.later.remove(0);
        // It has made some more since it was bound.
        self.close_leg(key, &bound);
        let more = made - bound.entry.output_tokens;
        bound.entry.output_tokens = made;
        if bound.entry.new_tokens > 0.0 {
            bound.entry.new_tokens += more;
        }
        bound.segment.from_token = from;
        if self.state.fleet.is_current(bound.segment.instance, bound.instance_generation) {
            self.state.instances[bound.segment.instance.index()].placed -= 1;
            self.state.later.made -= 1;
            bound.start = Some(self.now);
            self.open_leg(key, &mut bound);
        }
        self.requests.tickets.get(ticket)?.later.push(bound);
        let segment = self.hand_over(ticket, Usage::default())?;
        self.requests.totals.moved += 1;
        let name = self.state.fleet.name(segment.instance).clone();
        self.requests.receipts.update(decision, |r| r.moves.push((from, segment.instance.0, name)));
        Ok(segment)
    }
}
