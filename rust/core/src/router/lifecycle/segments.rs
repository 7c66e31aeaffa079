//! Opens, hands off and closes the segments of a plan.
use super::writer::Lifecycle;
use crate::error::CoreError;
use crate::fleet::InstanceId;
use crate::plan::{Failure, Segment, Usage};
use crate::request::Request;
use crate::router::context::DecisionContext;
use crate::router::ledger::Stage;
use crate::router::state::State;
use crate::router::tickets::{self, HandedOver, PlacedSegment, TicketId, TicketState};
use smallvec::SmallVec;

impl Lifecycle<'_> {
    /// Adds all segments of a new ticket to the ledger.
    pub(super) fn open_segments(&mut self, ticket: TicketId) {
        let slot = tickets::slot(ticket);
        let Ok(state) = self.requests.tickets.get(ticket) else { return };
        let mut placed = state.open.clone();
        let later = std::mem::take(&mut state.later);
        self.open_segment(slot, &mut placed);
        let later = later.into_iter().map(|mut placed| {
            self.open_segment(slot, &mut placed);
            placed
        });
        let later: Vec<PlacedSegment> = later.collect();
        if let Ok(state) = self.requests.tickets.get(ticket) {
            (state.open, state.later) = (placed, later);
        }
    }

    /// Adds a segment to the ledger.
    pub(super) fn open_segment(&mut self, ticket: u32, placed: &mut PlacedSegment) {
        let slot = placed.segment.instance.index();
        match placed.entry.stage {
            Stage::Coming => self.state.ledger.bind(slot, &placed.entry),
            _ => self.state.ledger.open(slot, ticket, &placed.entry, self.now),
        }
        self.open_fetch(placed);
        self.state.instances[slot].placed += 1;
        if placed.segment.from_token > 0 {
            self.state.later.made += 1;
        }
        self.state.foresee(ticket, placed, self.now);
    }

    /// Removes a segment from the ledger.
    pub(super) fn close_segment(&mut self, ticket: u32, placed: &PlacedSegment) {
        if !self.state.fleet.is_current(placed.at) {
            return;
        }
        self.state.ledger.end(placed.segment.instance.index(), placed.key(ticket), &placed.entry, self.now);
    }

    /// Closes the open segment, which ended as planned, and opens the next one. A bound segment is
    /// used if its instance is still available; otherwise an instance is chosen now. If no instance
    /// is available, the request fails and its ticket is closed.
    ///
    /// # Errors
    /// `NoInstance`.
    pub(super) fn hand_over(&mut self, ticket: TicketId, usage: Usage) -> Result<Segment, CoreError> {
        let slot = tickets::slot(ticket);
        self.end_fetch(ticket);
        let state = self.requests.tickets.get(ticket)?;
        let mut ended = state.open.clone();
        state.open.at = InstanceId::NONE;
        // The first segment's engine has read the prompt from its cache.
        let first = state.handed_over.unwrap_or_else(|| HandedOver {
            at: self.now,
            usage,
            predicted_cached_tokens: ended.predicted_cached_tokens(),
        });
        state.handed_over = Some(HandedOver { at: self.now, ..first });
        state.failed.clone_from(&state.lost);
        let bound = if state.later.is_empty() { None } else { Some(state.later.remove(0)) };
        let (decision, seconds) = (state.decision, self.now - state.decided_at);
        let made = f64::from(ended.segment.to_token.unwrap_or(0).saturating_sub(state.prompt_tokens));
        if let Some(instance) = self.state.fleet.current(ended.at) {
            let place = instance.index();
            if ended.prefills_only() {
                // The end of a prefill segment teaches the same prefill cost as a first token.
                self.state.ledger.first_token(place, slot, &mut ended.entry, self.now);
                self.state.ledger.close(place, slot, &ended.entry, self.now);
            } else {
                self.close_segment(slot, &ended);
            }
        }
        // Tokens of a segment without reports before its end.
        self.requests.totals.output_tokens += (made - ended.entry.output_tokens).max(0.0) as u64;
        self.state.ledger.answers.passed(ended.entry.output_tokens, made);
        self.requests.records.update(decision, |r| {
            r.outcome.handed_over_seconds.get_or_insert(seconds);
            if made > 0.0 {
                r.outcome.ttft_seconds.get_or_insert(seconds);
            }
        });
        let mut placed = match bound {
            Some(placed) if self.state.serves(&placed) => placed,
            bound => {
                if let Some(placed) = &bound {
                    self.close_segment(slot, placed);
                }
                self.go_on(ticket, &ended, bound.map(|placed| placed.segment))?
            }
        };
        self.arrive(&mut placed);
        let segment = placed.segment;
        self.requests.tickets.get(ticket)?.open = placed;
        Ok(segment)
    }

    /// Marks a bound segment as sent to its engine.
    pub(super) fn arrive(&mut self, placed: &mut PlacedSegment) {
        if placed.entry.stage == Stage::Coming {
            self.state.ledger.arrive(placed.segment.instance.index(), &mut placed.entry);
        }
    }

    /// Chooses an instance for the segment after `ended` and places it; replaces the segment
    /// `bound`, if any. If no instance is available and `colocate` allows it, the whole request is
    /// placed again.
    fn go_on(
        &mut self,
        ticket: TicketId,
        ended: &PlacedSegment,
        bound: Option<Segment>,
    ) -> Result<PlacedSegment, CoreError> {
        let (turn, now) = (self.state.turn_behind(ended), self.now);
        let (from, to) = (ended.segment.to_token, bound.and_then(|segment| segment.to_token));
        let replaced = self.plan_for(ticket, |state, context, request, failed| {
            let tokens = (from.unwrap_or(request.prompt_tokens), to);
            state.place_later(context, request, turn, tokens, failed, now)
        })?;
        let (mut placed, next) = match replaced {
            Ok(placed) => placed,
            Err(error) => {
                self.end_failed(ticket, Failure::Refused);
                return Err(error);
            }
        };
        self.open_segment(tickets::slot(ticket), &mut placed);
        let state = self.requests.tickets.get(ticket)?;
        let decision = state.decision;
        // If the new segment runs to the end of the request, the segments bound after it are not
        // needed.
        let needless =
            if placed.segment.to_token.is_none() { std::mem::take(&mut state.later) } else { Vec::new() };
        needless.iter().for_each(|placed| self.close_segment(tickets::slot(ticket), placed));
        let kept = needless.is_empty();
        self.requests.records.update(decision, |r| r.goes_on(from.unwrap_or(0), next, kept));
        Ok(placed)
    }

    /// Calls `with` to plan for a ticket's request. Arguments: state, planning context, request,
    /// and the slots that failed it. A new instance in the slot of a removed one has not failed it.
    ///
    /// # Errors
    /// `Ticket` if the ticket is closed.
    pub(super) fn plan_for<T>(
        &mut self,
        ticket: TicketId,
        with: impl FnOnce(&State, &mut DecisionContext, &Request<'_>, &[u32]) -> T,
    ) -> Result<T, CoreError> {
        let ticket = self.requests.tickets.get(ticket)?;
        let request = ticket.request();
        self.listeners.restrict(&request, self.context);
        let failed = ticket.failed.iter().filter_map(|failed| self.state.fleet.current(*failed));
        let failed: SmallVec<[u32; 8]> = failed.map(|id| id.0).collect();
        let planned = with(self.state, self.context, &request, &failed);
        self.context.count_unscored(&mut self.requests.totals);
        Ok(planned)
    }

    /// Adds the prompt of a successful request to the totals, with its predicted and reported
    /// cached tokens.
    pub(super) fn count_prompt(&mut self, prompt: u32, predicted: f64, reported: Option<u32>) {
        let totals = &mut self.requests.totals;
        totals.prompt_tokens += u64::from(prompt);
        totals.predicted_cached_tokens += predicted as u64;
        if let Some(cached) = reported {
            totals.reported_prompt_tokens += u64::from(prompt);
            totals.cached_tokens += u64::from(cached);
        }
    }

    /// Learns the cost of a load from a lower tier, unless the engine found other cached tokens
    /// than predicted.
    pub(super) fn learn_load(&mut self, placed: &PlacedSegment, usage: Usage) {
        let entry = &placed.entry;
        let predicted = placed.predicted_cached_tokens();
        if entry.tier_tokens > 0.0
            && self.state.fleet.is_current(placed.at)
            && usage.cached_tokens.is_none_or(|cached| f64::from(cached) == predicted)
        {
            self.state.ledger.parts_mut(placed.segment.instance.index()).1.ended(entry);
        }
    }

    /// Closes a ticket and all its segments.
    pub(super) fn close(&mut self, ticket: TicketId) -> Option<TicketState> {
        self.end_fetch(ticket);
        let mut state = self.requests.tickets.close(ticket)?;
        self.close_segment(tickets::slot(ticket), &state.open);
        for placed in &state.later {
            self.close_segment(tickets::slot(ticket), placed);
        }
        self.requests.tickets.return_chain(std::mem::take(&mut state.chain));
        Some(state)
    }
}
