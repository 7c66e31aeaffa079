//! Moves of running requests: the open segment ends early, and another segment continues on the
//! target instance (STAR, section 5.4).
//!
//! A move takes time. Meanwhile, the request continues or waits. The segment on the target is bound
//! when the move begins ([`Lifecycle::begin_move`]). It is opened by [`crate::plan::Event::Moved`].
//! An event that ends the request also ends the move.
use super::writer::Lifecycle;
use crate::error::CoreError;
use crate::fleet::Role;
use crate::ids::Slot;
use crate::plan::{Cuts, Segment, Usage};
use crate::router::ledger::Stage;
use crate::router::listeners::Listener;
use crate::router::tickets::{self, TicketId};

/// Transfer of computed state to the target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Carry {
    /// The KV cache is transferred.
    Kv,
    /// Nothing is transferred: the target computes all tokens after its cached prefix.
    Recompute,
}

impl Lifecycle<'_> {
    /// Begins a move ([`Router::begin_move`](crate::router::Router::begin_move)).
    ///
    /// # Errors
    /// The errors of [`Router::begin_move`](crate::router::Router::begin_move).
    pub fn begin_move(&mut self, ticket: TicketId, target: Slot, carry: Carry) -> Result<Segment, CoreError> {
        self.state.fleet.check(target)?;
        let state = self.requests.tickets.get(ticket)?;
        let (source, made) = (state.open.at, state.open.entry.output_tokens);
        let runs = state.open.entry.stage == Stage::Decoding;
        let bound = !state.later.is_empty() || state.open.segment.to_token.is_some();
        let from = state.prompt_tokens.saturating_add(made as u32);
        let name = self.state.fleet.name(target);
        let outside = state.instances.as_ref().is_some_and(|only| only.iter().all(|each| **each != **name));
        let able = |id: Slot| self.state.instances[id.index()].cuts >= Cuts::Output;
        let carries = self.state.fleet.is_last(source) && able(source.slot()) && able(target);
        let problem = match () {
            () if !runs => "it has no token yet",
            () if bound => "a segment is already bound after its open segment",
            () if source == self.state.fleet.id_of(target) => "it already runs on the target",
            () if outside => "the target is not one of its instances",
            () if !self.state.takes_over(target) => {
                "the target is removed, unhealthy, draining or prefill-only"
            }
            () if carry == Carry::Kv && !carries => "the engines cannot transfer KV after an output token",
            () => "",
        };
        if !problem.is_empty() {
            return Err(CoreError::Ticket {
                ticket: ticket.0,
                problem: format!("it cannot move: {problem}"),
            });
        }
        let (key, now) = (tickets::slot(ticket), self.now);
        let mut placed = self.plan_for(ticket, |state, context, request, _| {
            state.match_prefix(context, request);
            let mut placed = state.placed_segment(context, request, target, from, None);
            placed.start = Some(now);
            if carry == Carry::Recompute {
                let hit = state.saved_tokens(request, placed.hit_blocks);
                placed.entry.new_tokens = f64::from(from) - hit;
            }
            placed
        })?;
        self.open_segment(key, &mut placed);
        let segment = placed.segment;
        self.requests.tickets.get(ticket)?.later.push(placed);
        Ok(segment)
    }

    /// Chooses another instance ([`Router::elsewhere`](crate::router::Router::elsewhere)).
    ///
    /// # Errors
    /// The errors of [`Router::elsewhere`](crate::router::Router::elsewhere).
    pub fn elsewhere(&mut self, ticket: TicketId) -> Result<Slot, CoreError> {
        let state = self.requests.tickets.get(ticket)?;
        if state.open.entry.stage != Stage::Decoding {
            let problem = "it cannot move: it has no token yet".into();
            return Err(CoreError::Ticket { ticket: ticket.0, problem });
        }
        state.lost.push(state.open.at);
        state.failed.clone_from(&state.lost);
        let (turn, now) = (self.state.turn_behind(&state.open), self.now);
        self.plan_for(ticket, |state, context, request, failed| {
            state.match_prefix(context, request);
            state.choose(context, request, turn, failed, None, now)
        })?
    }

    /// Cancels a move ([`Router::cancel_move`](crate::router::Router::cancel_move)).
    ///
    /// # Errors
    /// The errors of [`Router::cancel_move`](crate::router::Router::cancel_move).
    pub fn cancel_move(&mut self, ticket: TicketId) -> Result<(), CoreError> {
        let state = self.requests.tickets.get(ticket)?;
        if state.open.segment.to_token.is_none() {
            let later = std::mem::take(&mut state.later);
            later.iter().for_each(|placed| self.close_segment(tickets::slot(ticket), placed));
        }
        Ok(())
    }

    /// Ends the open segment at its current token, and opens the segment that the move bound.
    pub(super) fn complete_move(&mut self, ticket: TicketId) -> Result<Segment, CoreError> {
        let key = tickets::slot(ticket);
        let state = self.requests.tickets.get(ticket)?;
        if state.later.is_empty() || state.open.segment.to_token.is_some() {
            let problem = "no move has begun".into();
            return Err(CoreError::Ticket { ticket: ticket.0, problem });
        }
        let (made, decision) = (state.open.entry.output_tokens, state.decision);
        let from = state.prompt_tokens.saturating_add(made as u32);
        state.open.segment.to_token = Some(from);
        let mut bound = state.later.remove(0);
        // Add the tokens produced since the segment was bound.
        self.close_segment(key, &bound);
        let more = made - bound.entry.output_tokens;
        bound.entry.output_tokens = made;
        if bound.entry.new_tokens > 0.0 {
            bound.entry.new_tokens += more;
        }
        bound.segment.from_token = from;
        if self.state.fleet.is_current(bound.at) {
            self.state.instances[bound.segment.instance.index()].placed -= 1;
            self.state.later.made -= 1;
            bound.start = Some(self.now);
            self.open_segment(key, &mut bound);
        }
        self.requests.tickets.get(ticket)?.later.push(bound);
        let segment = self.hand_over(ticket, Usage::default())?;
        // A decode instance takes no next prompt while another instance does.
        let fleet = &self.state.fleet;
        if fleet.role(segment.instance) != Role::Decode || fleet.eligible_count() == 0 {
            self.listeners.placed_again(self.requests.tickets.get(ticket)?, self.now);
        }
        self.requests.totals.moved += 1;
        let name = self.state.fleet.name(segment.instance).clone();
        self.requests.records.update(decision, |r| r.moves.push((from, segment.instance.0, name)));
        Ok(segment)
    }
}
