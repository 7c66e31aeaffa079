//! What becomes of a placed request: progress, the end, the next of the ranking.
use super::context::DecisionContext;
use super::ledger::Stage;
use super::select::Turn;
use super::state::State;
use super::tickets::{self, Leg};
use super::{IndexFeed, Router, TicketId};
use crate::error::CoreError;
use crate::ids::Seconds;
use crate::plan::{Event, Failure, Segment, Usage};
use crate::receipt::{Balance, Nexts};
use crate::request::Request;
use smallvec::smallvec;

/// The segments of a request that was placed anew, what follows the first of them, and what the new plan says of its cut.
type Replaced = (Leg, Vec<Leg>, Nexts, Option<(Option<Box<str>>, Option<Balance>)>);

impl Router {
    /// Tells what happened to a ticket's open segment. Returns the segment that is open now where that changed: the next of the plan, or, for a
    /// request that failed before its first token, the same one elsewhere. A segment that then begins at token 0 is the whole request anew.
    ///
    /// # Errors
    /// `Ticket` where the ticket is closed. `NoInstance` where a segment ended well and nobody takes the next: the request has failed.
    pub fn advance(
        &mut self,
        ticket: TicketId,
        event: Event,
        now: Seconds,
    ) -> Result<Option<Segment>, CoreError> {
        let now = self.clock(now);
        let state = self.tickets.get(ticket)?;
        let follows = state.leg.segment.to_token.is_some();
        let prefills_only = state.leg.prefills_only();
        match event {
            Event::Moved => self.complete_move(ticket, now).map(Some),
            Event::Finished(usage) if follows => {
                self.tell_index(ticket);
                self.hand_over(ticket, usage, now).map(Some)
            }
            Event::FirstToken if prefills_only => {
                // Both legs run at once: the token comes from the next one.
                self.tell_index(ticket);
                let next = self.hand_over(ticket, Usage::default(), now)?;
                self.advance_open(ticket, event, now)?;
                Ok(Some(next))
            }
            _ => self.advance_open(ticket, event, now),
        }
    }

    /// The request is on its way, so its blocks will be there. Not told at the decision: many new blocks take tens of microseconds, and an
    /// instance that refuses the request never holds them.
    fn tell_index(&mut self, ticket: TicketId) {
        let Ok(state) = self.tickets.get(ticket) else { return };
        let leg = &mut state.leg;
        if leg.told || !self.state.fleet.is_current(leg.segment.instance, leg.instance_generation) {
            return;
        }
        leg.told = true;
        if let Some(pulling) =
            leg.pull.filter(|p| self.state.fleet.is_current(p.pull.holder, p.holder_generation))
        {
            let blocks = f64::from(pulling.pull.to_token) / state.tokens_per_block;
            self.state.index.touch(pulling.pull.holder, &state.chain, blocks.round() as u32);
        }
        match self.state.instances[leg.segment.instance.index()].index_feed {
            IndexFeed::Approximate => {
                self.state.index.record_hit(leg.segment.instance, &state.chain, leg.hit_blocks);
            }
            IndexFeed::Exact => self.state.index.touch(leg.segment.instance, &state.chain, leg.hit_blocks),
        }
    }

    fn advance_open(
        &mut self,
        ticket: TicketId,
        event: Event,
        now: Seconds,
    ) -> Result<Option<Segment>, CoreError> {
        if !matches!(event, Event::Failed(_) | Event::GaveUp(_)) {
            self.tell_index(ticket);
        }
        match event {
            Event::Pulled { tokens, seconds } => self.pulled(ticket, tokens, seconds, now)?,
            Event::FirstToken => self.end_pull(ticket),
            _ => {}
        }
        let state = self.tickets.get(ticket)?;
        let leg = &mut state.leg;
        let (slot, key) = (leg.segment.instance.index(), tickets::slot(ticket));
        let current = self.state.fleet.is_current(leg.segment.instance, leg.instance_generation);
        match event {
            Event::Sent => {
                let first = !std::mem::replace(&mut leg.queued, true);
                let begun = matches!(leg.entry.stage, Stage::Decoding | Stage::Coming);
                if current && first && !begun && leg.entry.new_tokens > 0.0 {
                    self.state.ledger.queue(slot, key, &leg.entry, now);
                }
            }
            Event::Scheduled(cached) if current => {
                self.state.ledger.scheduled(slot, &mut leg.entry);
                if let Some(cached) = cached {
                    let there = f64::from(cached.max(leg.carried()));
                    let left = (leg.entry.prompt_tokens - there).max(0.0);
                    self.state.ledger.rebook(slot, key, left, now);
                }
            }
            Event::Prefilled(tokens) if current => {
                self.state.ledger.prefilled(slot, key, f64::from(tokens), now);
            }
            Event::FirstToken => {
                let (decision, ttft) = (state.decision, now - state.decided_at);
                let first = leg.entry.stage != Stage::Decoding;
                if current {
                    self.state.ledger.first_token(slot, key, &mut leg.entry, now);
                    if let Some(ahead) = self.state.ahead.as_mut().filter(|_| first) {
                        let lag = state.handed_over.map(|(at, _)| now - at);
                        ahead.start(slot, leg.key(key), &leg.entry, now, lag);
                    }
                } else if first {
                    leg.entry.stage = Stage::Decoding;
                    leg.entry.output_tokens += 1.0;
                }
                self.totals.output_tokens += 1;
                self.receipts.update(decision, |r| {
                    r.outcome.ttft_seconds.get_or_insert(ttft);
                });
            }
            Event::Tokens(n) => {
                self.totals.output_tokens += u64::from(n);
                if current && leg.entry.stage == Stage::Decoding {
                    let n = f64::from(n);
                    if let Some(ahead) = &mut self.state.ahead {
                        ahead.grow(slot, &leg.entry, n, now);
                    }
                    self.state.ledger.tokens(slot, key, &mut leg.entry, n, now);
                } else if leg.entry.stage == Stage::Decoding {
                    leg.entry.output_tokens += f64::from(n); // its instance has left, and finishes what it has
                }
            }
            Event::Finished(usage) | Event::Ended(usage) => self.finish(ticket, usage, now),
            Event::Failed(failure) => return Ok(self.fail(ticket, failure, true, now)),
            Event::GaveUp(failure) => return Ok(self.fail(ticket, failure, false, now)),
            Event::Scheduled(_) | Event::Prefilled(_) | Event::Moved | Event::Pulled { .. } => {}
        }
        Ok(None)
    }

    /// Closes a ticket that nobody holds any more. Does nothing where it is closed.
    pub fn drop_ticket(&mut self, ticket: TicketId) {
        if let Some(state) = self.close(ticket, self.latest) {
            self.totals.dropped += 1;
            let seconds = self.latest - state.decided_at;
            self.receipts.update(state.decision, |r| {
                r.outcome.dropped = true;
                r.outcome.e2e_seconds = Some(seconds);
            });
        }
    }

    fn finish(&mut self, ticket: TicketId, usage: Usage, now: Seconds) {
        let Some(state) = self.close(ticket, now) else { return };
        let made = usage.output_tokens.unwrap_or(state.leg.entry.output_tokens as u32);
        if self.state.ahead.is_some() && made > 0 {
            let cost = self.state.decode_cost();
            let seen = state.leg.entry.output_tokens;
            self.state.ahead.iter_mut().for_each(|ahead| ahead.finished(made, seen, cost, now));
        }
        if made > 0 {
            self.learn_length(state.prompt_tokens, state.length_class, made);
        }
        let prompt = usage.prompt_tokens.unwrap_or(state.leg.entry.prompt_tokens as u32);
        self.learn_tail(now - state.decided_at);
        self.charge_unseen(&state, made.saturating_sub(state.leg.entry.output_tokens as u32));
        self.totals.finished += 1;
        self.totals.prompt_tokens += u64::from(prompt);
        // Of a prompt that was computed before it came, the first segment's engine says what was cached.
        let usage = match state.handed_over {
            Some((_, first)) => Usage { cached_tokens: first.cached_tokens, ..usage },
            None => {
                self.count_cached(&state.leg, usage);
                usage
            }
        };
        let seconds = now - state.decided_at;
        self.receipts.update(state.decision, |r| {
            r.outcome.ended = Some(None);
            r.outcome.usage = usage;
            r.outcome.e2e_seconds = Some(seconds);
        });
    }

    fn fail(&mut self, ticket: TicketId, failure: Failure, retry: bool, now: Seconds) -> Option<Segment> {
        let state = self.tickets.get(ticket).ok()?;
        if retry && failure.may_move() && state.leg.entry.stage != Stage::Decoding {
            let moved = self.move_on(ticket, now);
            if moved.is_some() {
                return moved;
            }
        }
        self.end_failed(ticket, failure, now);
        None
    }

    /// Closes a ticket as failed.
    pub(super) fn end_failed(&mut self, ticket: TicketId, failure: Failure, now: Seconds) {
        let Some(state) = self.close(ticket, now) else { return };
        let place = Failure::NAMES.iter().position(|(_, f)| *f == failure).expect("named");
        self.totals.failed[place] += 1;
        let seconds = now - state.decided_at;
        self.receipts.update(state.decision, |r| {
            r.outcome.ended = Some(Some(failure));
            r.outcome.e2e_seconds = Some(seconds);
        });
    }

    /// Places a segment that failed on the best of the instances that have not failed it: the ranking as it is by now, so that what one
    /// dead instance leaves behind does not all go to the same next one. `None`: nobody is left.
    fn move_on(&mut self, ticket: TicketId, now: Seconds) -> Option<Segment> {
        let key = tickets::slot(ticket);
        self.end_pull(ticket);
        let state = self.tickets.get(ticket).ok()?;
        let old = state.leg.clone();
        state.leg.instance_generation = 0; // off the books, whatever comes
        state.failed.push(old.segment.instance.0);
        let later = std::mem::take(&mut state.later);
        let decision = state.decision;
        self.close_leg(key, &old, now);
        later.iter().for_each(|leg| self.close_leg(key, leg, now));
        let Segment { instance, from_token, to_token } = old.segment;
        let first = from_token == 0;
        // Of three segments, one that fails in the middle leaves the rest to the one that takes it over.
        let to_token = to_token.filter(|_| first);
        let turn = self.state.turn_behind(instance);
        let placed = self
            .plan_for(ticket, |state, context, request, failed| match first {
                true => state.place_first(context, request, failed, now),
                false => state
                    .place_later(context, request, turn, (from_token, to_token), failed, now)
                    .map(|(leg, next)| (leg, Vec::new(), smallvec![next], None)),
            })
            .ok()?;
        let (mut leg, bound, next, notes) = placed.ok()?;
        let pulled = leg.pull.map_or(0, |pulling| pulling.pull.tokens());
        let hit = leg.entry.prompt_tokens - leg.entry.new_tokens - f64::from(pulled);
        let pull = leg.pull.as_ref().map(|pulling| self.state.pull_told(pulling));
        self.open_leg(key, &mut leg, now);
        self.arrive(&mut leg);
        let bound: Vec<_> = bound
            .into_iter()
            .map(|mut leg| {
                self.open_leg(key, &mut leg, now);
                leg
            })
            .collect();
        let segment = leg.segment;
        let cuts = segment.to_token.into_iter().chain(bound.iter().filter_map(|leg| leg.segment.to_token));
        let cuts = cuts.collect();
        let state = self.tickets.get(ticket).ok()?;
        (state.leg, state.later) = (leg, bound);
        self.totals.retries += 1;
        let name = self.state.fleet.name(segment.instance).clone();
        self.receipts.update(decision, |r| {
            if first {
                r.moved.push((segment.instance.0, name));
                r.predicted_hit_tokens = hit as u32;
                r.cuts = cuts;
                r.next = next;
                r.pull = pull;
                if let Some((uncut, balance)) = notes {
                    (r.uncut, r.balance) = (uncut, balance);
                }
                return;
            }
            r.cuts.retain(|cut| *cut <= from_token);
            next.into_iter().for_each(|next| r.goes_on(from_token, next, false));
        });
        Some(segment)
    }
}

impl State {
    /// Where a request begins that failed elsewhere, and where it goes on.
    fn place_first(
        &self,
        context: &mut DecisionContext,
        request: &Request<'_>,
        failed: &[u32],
        now: Seconds,
    ) -> Result<Replaced, CoreError> {
        self.match_prefix(context, request.chain);
        let first = self.choose(context, request, Turn::First, failed, None, now)?;
        let chosen = self.plan(context, request, first, failed, now)?;
        let (leg, later) = self.legs_of(context, request, &chosen, now);
        // A reason that the caller gave stands in the receipt already, in the caller's words.
        let notes = request.uncut.is_none().then_some((chosen.uncut, chosen.balance));
        Ok((leg, later, self.next_in(&chosen.rest), notes))
    }
}
