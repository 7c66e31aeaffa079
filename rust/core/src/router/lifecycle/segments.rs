//! The segments of a request's plan: opened, handed over, closed.
use crate::error::CoreError;
use crate::ids::Seconds;
use crate::plan::{Failure, Segment, Usage};
use crate::request::Request;
use crate::router::context::DecisionContext;
use crate::router::ledger::Stage;
use crate::router::router::Router;
use crate::router::state::State;
use crate::router::tickets::{self, Leg, TicketId, TicketState};

impl Router {
    /// Adds all segments of a new ticket to the ledger.
    pub(in crate::router) fn open_legs(&mut self, ticket: TicketId, now: Seconds) {
        let slot = tickets::slot(ticket);
        let Ok(state) = self.tickets.get(ticket) else { return };
        let mut leg = state.leg.clone();
        let later = std::mem::take(&mut state.later);
        self.open_leg(slot, &mut leg, now);
        let later = later.into_iter().map(|mut leg| {
            self.open_leg(slot, &mut leg, now);
            leg
        });
        let later: Vec<Leg> = later.collect();
        if let Ok(state) = self.tickets.get(ticket) {
            (state.leg, state.later) = (leg, later);
        }
    }

    /// Adds a segment to the ledger.
    pub(in crate::router) fn open_leg(&mut self, ticket: u32, leg: &mut Leg, now: Seconds) {
        let slot = leg.segment.instance.index();
        match leg.entry.stage {
            Stage::Coming => self.state.ledger.bind(slot, &leg.entry),
            _ => self.state.ledger.open(slot, ticket, &leg.entry, now),
        }
        self.open_pull(leg);
        self.state.instances[slot].placed += 1;
        if leg.segment.from_token > 0 {
            self.state.later.made += 1;
        }
        self.state.foresee(ticket, leg, now);
    }

    /// Takes a segment off the ledger, however it ended.
    pub(in crate::router) fn close_leg(&mut self, ticket: u32, leg: &Leg, now: Seconds) {
        if !self.state.fleet.is_current(leg.segment.instance, leg.instance_generation) {
            return;
        }
        self.state.ledger.end(leg.segment.instance.index(), leg.key(ticket), &leg.entry, now);
    }

    /// The open segment has ended well and another follows: closes the one, opens the other, which
    /// is chosen now unless one that still serves was bound. Where there is nobody, the request has
    /// failed and its ticket is closed.
    ///
    /// # Errors
    /// `NoInstance`.
    pub(in crate::router) fn hand_over(
        &mut self,
        ticket: TicketId,
        usage: Usage,
        now: Seconds,
    ) -> Result<Segment, CoreError> {
        let slot = tickets::slot(ticket);
        self.end_pull(ticket);
        let state = self.tickets.get(ticket)?;
        let mut ended = state.leg.clone();
        state.leg.instance_generation = 0; // off the ledger, whatever comes
        let first = state.handed_over.map_or(usage, |(_, first)| first);
        state.handed_over = Some((now, first));
        state.failed.clone_from(&state.lost);
        let bound = if state.later.is_empty() { None } else { Some(state.later.remove(0)) };
        let (decision, seconds) = (state.decision, now - state.decided_at);
        let made = f64::from(ended.segment.to_token.unwrap_or(0).saturating_sub(state.prompt_tokens));
        let instance = ended.segment.instance;
        if self.state.fleet.is_current(instance, ended.instance_generation) {
            let place = instance.index();
            if ended.prefills_only() {
                // What a first token teaches of prefills, the end of a first segment does.
                self.state.ledger.first_token(place, slot, &mut ended.entry, now);
                self.state.ledger.close(place, slot, &ended.entry, now);
            } else {
                self.close_leg(slot, &ended, now);
            }
        }
        // Tokens of a segment that said nothing until its end.
        self.totals.output_tokens += (made - ended.entry.output_tokens).max(0.0) as u64;
        if ended.segment.from_token == 0 {
            self.count_cached(&ended, usage);
        }
        self.receipts.update(decision, |r| {
            r.outcome.handed_over_seconds.get_or_insert(seconds);
            if made > 0.0 {
                r.outcome.ttft_seconds.get_or_insert(seconds);
            }
        });
        let mut leg = match bound {
            Some(leg) if self.state.serves(&leg) => leg,
            bound => {
                if let Some(leg) = &bound {
                    self.close_leg(slot, leg, now);
                }
                self.go_on(ticket, &ended, bound.map(|leg| leg.segment), now)?
            }
        };
        self.arrive(&mut leg);
        let segment = leg.segment;
        self.tickets.get(ticket)?.leg = leg;
        Ok(segment)
    }

    /// The segments that are bound behind a ticket's open one, in order.
    pub fn bound(&mut self, ticket: TicketId) -> impl Iterator<Item = Segment> {
        self.tickets.get(ticket).ok().into_iter().flat_map(|state| state.later.iter().map(|leg| leg.segment))
    }

    /// A segment's turn has come: where it was bound behind another, it goes to its engine.
    pub(in crate::router) fn arrive(&mut self, leg: &mut Leg) {
        if leg.entry.stage == Stage::Coming {
            self.state.ledger.arrive(leg.segment.instance.index(), &mut leg.entry);
        }
    }

    /// Chooses and places the segment that follows `ended`, instead of the segment `bound`, if
    /// there was one. If nobody takes it over and `colocate` allows it, the whole request is placed
    /// anew.
    fn go_on(
        &mut self,
        ticket: TicketId,
        ended: &Leg,
        bound: Option<Segment>,
        now: Seconds,
    ) -> Result<Leg, CoreError> {
        let turn = self.state.turn_behind(ended.segment.instance);
        let (from, to) = (ended.segment.to_token, bound.and_then(|segment| segment.to_token));
        let placed = self.plan_for(ticket, |state, context, request, failed| {
            let tokens = (from.unwrap_or(request.prompt_tokens), to);
            state.place_later(context, request, turn, tokens, failed, now)
        })?;
        let (mut leg, next) = match placed {
            Ok(placed) => placed,
            Err(error) => {
                self.end_failed(ticket, Failure::Refused, now);
                return Err(error);
            }
        };
        self.open_leg(tickets::slot(ticket), &mut leg, now);
        let state = self.tickets.get(ticket)?;
        let decision = state.decision;
        // One that takes the request whole leaves nothing to those bound behind it.
        let needless =
            if leg.segment.to_token.is_none() { std::mem::take(&mut state.later) } else { Vec::new() };
        needless.iter().for_each(|leg| self.close_leg(tickets::slot(ticket), leg, now));
        let kept = needless.is_empty();
        self.receipts.update(decision, |r| r.goes_on(from.unwrap_or(0), next, kept));
        Ok(leg)
    }

    /// Plans for the request that a ticket was opened for: calls `with` with what planning reads
    /// and writes, the request, and the slots that failed it.
    ///
    /// # Errors
    /// `Ticket` if the ticket is closed.
    pub(in crate::router) fn plan_for<T>(
        &mut self,
        ticket: TicketId,
        with: impl FnOnce(&State, &mut DecisionContext, &Request<'_>, &[u32]) -> T,
    ) -> Result<T, CoreError> {
        let ticket = self.tickets.get(ticket)?;
        let planned = with(&self.state, &mut self.context, &ticket.request(), &ticket.failed);
        self.count_unscored();
        Ok(planned)
    }

    /// Joins what was predicted of a cache with what its engine says.
    pub(in crate::router) fn count_cached(&mut self, leg: &Leg, usage: Usage) {
        if let Some(cached) = usage.cached_tokens {
            self.totals.cached_tokens += u64::from(cached);
            self.totals.predicted_cached_tokens += (leg.entry.prompt_tokens - leg.entry.new_tokens) as u64;
        }
    }

    /// Closes a ticket with all its segments.
    pub(in crate::router) fn close(&mut self, ticket: TicketId, now: Seconds) -> Option<TicketState> {
        self.end_pull(ticket);
        let mut state = self.tickets.close(ticket)?;
        self.ordering.iter_mut().for_each(|ordering| ordering.leave_queue(&state));
        self.close_leg(tickets::slot(ticket), &state.leg, now);
        for leg in &state.later {
            self.close_leg(tickets::slot(ticket), leg, now);
        }
        self.tickets.return_chain(std::mem::take(&mut state.chain));
        Some(state)
    }
}
