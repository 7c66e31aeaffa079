//! The segments of a request's plan: opened, handed over, closed, with their books.
use super::context::DecisionContext;
use super::decide::{Chosen, entry};
use super::ledger::Stage;
use super::select::Turn;
use super::state::State;
use super::tickets::{self, Leg, TicketState};
use super::{Router, TicketId};
use crate::error::CoreError;
use crate::fleet::Role;
use crate::ids::{InstanceId, Seconds};
use crate::indicators::Indicator;
use crate::plan::{Failure, Segment, Usage};
use crate::receipt::Next;
use crate::request::Request;

impl Router {
    /// Books all segments of a new ticket.
    pub(super) fn open_legs(&mut self, ticket: TicketId, now: Seconds) {
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

    /// Books a segment.
    pub(super) fn open_leg(&mut self, ticket: u32, leg: &mut Leg, now: Seconds) {
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
        if !leg.prefills_only() && self.state.ahead.is_some() {
            let (prompt, new) = (leg.entry.prompt_tokens, leg.entry.new_tokens);
            let start =
                leg.start.unwrap_or_else(|| now + self.state.prefill_seconds(slot, prompt - new, new, now));
            if let Some(ahead) = &mut self.state.ahead {
                ahead.bind(slot, leg.key(ticket), &leg.entry, start);
            }
        }
    }

    /// Takes a segment off the books, however it ended.
    pub(super) fn close_leg(&mut self, ticket: u32, leg: &Leg, now: Seconds) {
        if !self.state.fleet.is_current(leg.segment.instance, leg.instance_generation) {
            return;
        }
        let slot = leg.segment.instance.index();
        self.state.ledger.close(slot, ticket, &leg.entry, now);
        if let Some(ahead) = &mut self.state.ahead {
            ahead.end(slot, leg.key(ticket), &leg.entry, now);
        }
    }

    /// The open segment has ended well and another follows: closes the one, opens the other, which is chosen now unless one that still
    /// serves was bound. Where there is nobody, the request has failed and its ticket is closed.
    ///
    /// # Errors
    /// `NoInstance`.
    pub(super) fn hand_over(
        &mut self,
        ticket: TicketId,
        usage: Usage,
        now: Seconds,
    ) -> Result<Segment, CoreError> {
        let slot = tickets::slot(ticket);
        self.end_pull(ticket);
        let state = self.tickets.get(ticket)?;
        let mut ended = state.leg.clone();
        state.leg.instance_generation = 0; // off the books, whatever comes
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
    pub(super) fn arrive(&mut self, leg: &mut Leg) {
        if leg.entry.stage == Stage::Coming {
            self.state.ledger.arrive(leg.segment.instance.index(), &mut leg.entry);
        }
    }

    /// Chooses and books where a request goes on whose segment `ended`, in the place of the segment `bound`, where one was; all of it anew where
    /// nobody takes it over, if that may be.
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

    /// Plans for the request that a ticket was opened for: calls `with` with what planning reads and writes, the request,
    /// and the slots that failed it.
    ///
    /// # Errors
    /// `Ticket` if the ticket is closed.
    pub(super) fn plan_for<T>(
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
    pub(super) fn count_cached(&mut self, leg: &Leg, usage: Usage) {
        if let Some(cached) = usage.cached_tokens {
            self.totals.cached_tokens += u64::from(cached);
            self.totals.predicted_cached_tokens += (leg.entry.prompt_tokens - leg.entry.new_tokens) as u64;
        }
    }

    /// Closes a ticket with all its segments.
    pub(super) fn close(&mut self, ticket: TicketId, now: Seconds) -> Option<TicketState> {
        self.end_pull(ticket);
        let mut state = self.tickets.close(ticket)?;
        self.leave_queue(&state);
        self.close_leg(tickets::slot(ticket), &state.leg, now);
        for leg in &state.later {
            self.close_leg(tickets::slot(ticket), leg, now);
        }
        self.tickets.return_chain(std::mem::take(&mut state.chain));
        Some(state)
    }
}

impl State {
    /// The segments of a plan, as far as their instances are chosen.
    pub fn legs_of(
        &self,
        context: &DecisionContext,
        request: &Request<'_>,
        chosen: &Chosen,
        now: Seconds,
    ) -> (Leg, Vec<Leg>) {
        let end = |i: usize| chosen.rest.get(i).map(|follow| follow.from_token);
        let start = |i: usize| chosen.rest.get(i).map(|follow| now + follow.start_seconds);
        let mut leg = Leg { start: start(0), ..self.leg(context, request, chosen.first, 0, end(0)) };
        if let Some(pulling) = chosen.pull {
            leg.entry.new_tokens -= f64::from(pulling.pull.tokens());
            leg.pull = Some(pulling);
        }
        let later = chosen.rest.iter().enumerate().map_while(|(i, follow)| {
            let leg = self.leg(context, request, follow.instance?, follow.from_token, end(i + 1));
            Some(Leg { start: start(i), ..leg })
        });
        (leg, later.collect())
    }

    /// A segment of a request. What comes before `from_token` was computed elsewhere and is carried over.
    pub fn leg(
        &self,
        context: &DecisionContext,
        request: &Request<'_>,
        instance: InstanceId,
        from_token: u32,
        to_token: Option<u32>,
    ) -> Leg {
        let hit_blocks = context.hit_blocks[instance.index()];
        let hit =
            self.saved_tokens(request, hit_blocks).max(f64::from(from_token.min(request.prompt_tokens)));
        let mut entry = entry(request, hit);
        if let Some(to) = to_token {
            entry.prompt_tokens = f64::from(to.min(request.prompt_tokens));
            entry.new_tokens = (entry.prompt_tokens - hit).max(0.0);
            entry.expected_output_tokens = Some(f64::from(to.saturating_sub(request.prompt_tokens)));
        }
        if from_token > 0 {
            entry.output_tokens = f64::from(from_token.saturating_sub(request.prompt_tokens));
            entry.stage = Stage::Coming;
        }
        Leg {
            segment: Segment { instance, from_token, to_token },
            instance_generation: self.fleet.generation(instance),
            entry,
            hit_blocks,
            told: false,
            queued: from_token == 0,
            pull: None,
            start: None,
        }
    }

    /// Whether a bound segment's instance still takes it.
    pub fn serves(&self, leg: &Leg) -> bool {
        let instance = leg.segment.instance;
        let (healthy, ..) = self.fleet.state(instance);
        healthy && self.fleet.is_current(instance, leg.instance_generation)
    }

    /// Who is asked to go on behind a segment on `instance`.
    pub fn turn_behind(&self, instance: InstanceId) -> Turn {
        match self.fleet.role(instance) {
            Role::Both => Turn::Peer(None),
            Role::Prefill | Role::Decode => Turn::Later,
        }
    }

    /// Where the tokens `from` to `to` of a request go whose tokens before are computed.
    pub fn place_later(
        &self,
        context: &mut DecisionContext,
        request: &Request<'_>,
        turn: Turn,
        (from, to): (u32, Option<u32>),
        failed: &[u32],
        now: Seconds,
    ) -> Result<(Leg, Next), CoreError> {
        self.match_prefix(context, request.chain);
        let handoff = self.ahead.as_ref().map_or(0.0, |ahead| ahead.lag());
        match self.choose(context, request, turn, failed, Some(handoff), now) {
            Ok(next) => {
                let leg = Leg { start: Some(now + handoff), ..self.leg(context, request, next, from, to) };
                Ok((leg, self.next_of(context, next, handoff)))
            }
            Err(_) if self.config.colocate => {
                let whole = self.choose(context, request, Turn::First, failed, None, now)?;
                let mut next = self.next_of(context, whole, 0.0);
                next.score = context.first.scores.score[whole.index()];
                Ok((Leg { start: Some(now), ..self.leg(context, request, whole, 0, None) }, next))
            }
            Err(error) => Err(error),
        }
    }

    /// For the receipt: where a request goes on, as the last choice of a later segment saw it.
    pub fn next_of(&self, context: &DecisionContext, instance: InstanceId, handoff_seconds: Seconds) -> Next {
        let slot = instance.0;
        let score = context.later.scores.score.get(instance.index()).copied().unwrap_or(f64::NAN);
        Next { slot, name: self.fleet.name(instance).clone(), score, handoff_seconds }
    }

    /// Expected seconds until a request whose first segment is on `first` starts to decode.
    pub fn expected_handoff(
        &self,
        context: &DecisionContext,
        request: &Request<'_>,
        first: InstanceId,
        now: Seconds,
    ) -> Seconds {
        let hit = self.saved_tokens(request, context.hit_blocks[first.index()]);
        let prefill = self.prefill_seconds(first.index(), hit, f64::from(request.prompt_tokens) - hit, now);
        prefill + self.ahead.as_ref().map_or(0.0, |ahead| ahead.lag())
    }

    /// Seconds that a slot is expected to take for a prompt of which it holds `hit` tokens and not `new`.
    pub fn prefill_seconds(&self, slot: usize, hit: f64, new: f64, now: Seconds) -> Seconds {
        let (queued, decoding, context) = match self.config.unlimited_prefill {
            true => (0.0, 0.0, 0.0),
            false => (
                self.ledger.queued_prefill_on(slot, now),
                self.ledger.get(Indicator::RBs)[slot],
                self.ledger.get(Indicator::DecodeTokens)[slot],
            ),
        };
        self.ttft(slot, queued, hit, new, decoding, context, self.mean_prefill_rate())
    }
}
