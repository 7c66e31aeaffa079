//! Applies the effects of a request's events.
use super::machine::{self, Effect, Place};
use super::writer::Lifecycle;
use crate::error::CoreError;
use crate::estimate::{Answer, AnswerEnd};
use crate::fleet::InstanceId;
use crate::kv::predictions::Prediction;
use crate::plan::{Event, Failure, Segment, Usage};
use crate::router::ledger::Stage;
use crate::router::listeners::{Ended, Listener};
use crate::router::settings::IndexFeed;
use crate::router::state::State;
use crate::router::tickets::{self, HandedOver, TicketId, TicketState};
use smallvec::smallvec;

impl Lifecycle<'_> {
    /// Applies an event ([`Router::advance`](crate::router::Router::advance)).
    ///
    /// # Errors
    /// The errors of [`Router::advance`](crate::router::Router::advance).
    pub fn advance(&mut self, ticket: TicketId, event: Event) -> Result<Option<Segment>, CoreError> {
        let mut open_now = None;
        loop {
            let placed = &self.requests.tickets.get(ticket)?.open;
            let effects = machine::effects(&event, Place::of(placed), placed.entry.stage);
            let recorded = placed.told;
            for effect in effects {
                if *effect == Effect::RecordPrompt && recorded {
                    continue;
                }
                if let Some(segment) = self.apply(*effect, ticket, event)? {
                    open_now = Some(segment);
                }
            }
            if effects.last() != Some(&Effect::Again) {
                return Ok(open_now);
            }
        }
    }

    /// Applies one effect of an event. Returns the segment that is open now, if it changed.
    #[inline]
    fn apply(
        &mut self,
        effect: Effect,
        ticket: TicketId,
        event: Event,
    ) -> Result<Option<Segment>, CoreError> {
        match (effect, event) {
            (Effect::RecordPrompt, _) => self.record_prompt(ticket),
            (Effect::ExpectPrompt, _) => self.expect_prompt(ticket),
            (Effect::EndFetch, _) => self.end_fetch(ticket),
            (Effect::LearnFetch, Event::Fetched { tokens, seconds, late }) => {
                self.fetched(ticket, tokens, seconds, late)?;
            }
            (Effect::CompleteMove, _) => return self.complete_move(ticket).map(Some),
            (Effect::HandOver, Event::Finished(usage)) => {
                return self.hand_over(ticket, usage).map(Some);
            }
            (Effect::HandOver, _) => return self.hand_over(ticket, Usage::default()).map(Some),
            (Effect::Finish, Event::Finished(usage) | Event::Ended(usage)) => self.finish(ticket, usage),
            (Effect::PlaceAnew, Event::Failed(failure)) => {
                let anew = self.place_anew(ticket);
                if anew.is_none() {
                    self.end_failed(ticket, failure);
                }
                return Ok(anew);
            }
            (Effect::Fail, Event::Failed(failure) | Event::GaveUp(failure)) => {
                self.end_failed(ticket, failure);
            }
            (Effect::CountFirstToken, _) => self.count_first_token(ticket)?,
            (Effect::CountTokens, Event::Tokens(n)) => self.requests.totals.output_tokens += u64::from(n),
            (effect, event) => self.write_ledger(effect, ticket, event)?,
        }
        Ok(None)
    }

    /// Applies an effect on the ledger alone. Removed instances have no ledger entries.
    fn write_ledger(&mut self, effect: Effect, ticket: TicketId, event: Event) -> Result<(), CoreError> {
        let State { ledger, fleet, .. } = &mut *self.state;
        let request = self.requests.tickets.get(ticket)?;
        let placed = &mut request.open;
        let (slot, ticket) = (placed.segment.instance.index(), tickets::slot(ticket));
        let current = fleet.is_current(placed.at);
        let key = placed.key(ticket);
        match (effect, event) {
            (Effect::Enqueue, _) => {
                let first = !std::mem::replace(&mut placed.queued, true);
                if current && first && placed.entry.new_tokens > 0.0 {
                    ledger.queue(slot, ticket, &placed.entry, self.now);
                }
            }
            (Effect::BeginDecoding, _) if current => {
                let lag = request.handed_over.map(|handed| self.now - handed.at);
                ledger.begin_decoding(slot, key, &mut placed.entry, lag, self.now);
            }
            (Effect::BeginDecoding, _) => {
                placed.entry.stage = Stage::Decoding;
                placed.entry.output_tokens += 1.0;
            }
            (Effect::Grow, Event::Tokens(n)) if current => {
                ledger.tokens(slot, key, &mut placed.entry, f64::from(n), self.now);
            }
            // The instance was removed but finishes its requests.
            (Effect::Grow, Event::Tokens(n)) => placed.entry.output_tokens += f64::from(n),
            (Effect::Dequeue, _) if current => ledger.scheduled(slot, &mut placed.entry),
            (Effect::Rebook, Event::Scheduled(Some(cached))) if current => {
                let there = f64::from(cached.max(placed.carried()));
                let left = (placed.entry.prompt_tokens - there).max(0.0);
                ledger.rebook(slot, ticket, left, self.now);
            }
            (Effect::CountPrefilled, Event::Prefilled(tokens)) if current => {
                ledger.prefilled(slot, ticket, f64::from(tokens), self.now);
            }
            _ => {}
        }
        Ok(())
    }

    fn count_first_token(&mut self, ticket: TicketId) -> Result<(), CoreError> {
        let state = self.requests.tickets.get(ticket)?;
        let (decision, ttft) = (state.decision, self.now - state.decided_at);
        self.requests.totals.output_tokens += 1;
        self.requests.records.update(decision, |r| {
            r.outcome.ttft_seconds.get_or_insert(ttft);
        });
        Ok(())
    }

    /// Predicts that the instance holds the prompt of a sent segment, or uses its part there. This
    /// happens after the decision, because an instance that refuses the request never holds the
    /// blocks.
    fn record_prompt(&mut self, ticket: TicketId) {
        let Ok(state) = self.requests.tickets.get(ticket) else { return };
        let placed = &mut state.open;
        if !self.state.fleet.is_current(placed.at) {
            return;
        }
        placed.told = true;
        self.state.predicted = true;
        if let Some(planned) = placed.fetch.filter(|planned| self.state.fleet.is_current(planned.holder)) {
            let blocks = f64::from(planned.fetch.to_token) / state.tokens_per_block;
            self.state.caches.predict_use(planned.fetch.holder, &state.chain, blocks.round() as u32, 0);
        }
        match self.state.instances[placed.segment.instance.index()].index_feed {
            IndexFeed::Approximate => {
                let (id, hit_blocks) = (placed.segment.instance, placed.hit_blocks);
                self.state.caches.predict(Prediction::Holds { id, hit_blocks }, &state.chain);
            }
            IndexFeed::Exact => {
                let (instance, blocks) = (placed.segment.instance, placed.hit_blocks);
                self.state.caches.predict_use(instance, &state.chain, blocks, blocks + placed.tier_blocks);
            }
        }
    }

    /// Expects the computed prompt of the open segment on its instance, if events feed its index:
    /// they come later. Engines may not cache blocks that arrived by transfer.
    fn expect_prompt(&mut self, ticket: TicketId) {
        let Ok(state) = self.requests.tickets.get(ticket) else { return };
        let (placed, id) = (&state.open, state.open.segment.instance);
        let is_exact = self.state.instances[id.index()].index_feed == IndexFeed::Exact;
        if placed.segment.from_token == 0 && is_exact && self.state.fleet.is_current(placed.at) {
            // No engine reports a partial last block.
            let computed = placed.segment.to_token.unwrap_or(u32::MAX).min(state.prompt_tokens);
            let blocks = (f64::from(computed) / state.tokens_per_block) as usize;
            let prediction = Prediction::Computed { id, hit_blocks: placed.hit_blocks, now: self.now };
            self.state.caches.predict(prediction, &state.chain[..state.chain.len().min(blocks)]);
            self.state.predicted = true;
        }
    }

    /// Closes an abandoned ticket. Does nothing if the ticket is already closed.
    pub fn drop_ticket(&mut self, ticket: TicketId) {
        if let Some(state) = self.close(ticket) {
            self.note_end(&state, None);
            self.requests.totals.dropped += 1;
            let seconds = self.now - state.decided_at;
            self.requests.records.update(state.decision, |r| {
                r.outcome.dropped = true;
                r.outcome.e2e_seconds = Some(seconds);
            });
        }
    }

    fn finish(&mut self, ticket: TicketId, usage: Usage) {
        let Some(state) = self.close(ticket) else { return };
        let made = self.note_end(&state, Some(usage));
        let ledger = &self.state.ledger;
        let learned = ledger.ahead().zip(ledger.answers.curve()).filter(|_| made > 0);
        if learned.is_some_and(|(ahead, curve)| ahead.weights_due(curve.seen(), self.now)) {
            // The cost walks through the instances.
            let cost = self.state.decode_cost();
            self.state.ledger.renew_weights(cost, self.now);
        }
        let prompt = usage.prompt_tokens.unwrap_or(state.open.entry.prompt_tokens as u32);
        self.requests.totals.finished += 1;
        // After a handoff, the engine of the first segment knows the cached tokens of the prompt.
        let (usage, predicted) = match state.handed_over {
            Some(HandedOver { usage: first, predicted_cached_tokens, .. }) => {
                (Usage { cached_tokens: first.cached_tokens, ..usage }, predicted_cached_tokens)
            }
            None => {
                self.learn_load(&state.open, usage);
                (usage, state.open.predicted_cached_tokens())
            }
        };
        self.count_prompt(prompt, predicted, usage.cached_tokens);
        let seconds = self.now - state.decided_at;
        self.requests.records.update(state.decision, |r| {
            r.outcome.ended = Some(None);
            r.outcome.usage = usage;
            r.outcome.e2e_seconds = Some(seconds);
        });
    }

    /// Learns from the end of a request, and passes it on to the listeners. `usage`: that of a
    /// request that succeeded. Returns its output tokens.
    fn note_end(&mut self, ticket: &TicketState, usage: Option<Usage>) -> u32 {
        let (finished, usage) = (usage.is_some(), usage.unwrap_or_default());
        let counted = ticket.open.entry.output_tokens;
        let made = usage.output_tokens.unwrap_or(counted as u32);
        let end = match (finished, usage.at_limit()) {
            (false, _) => AnswerEnd::Cut,
            (true, true) => AnswerEnd::AtLimit,
            (true, false) => AnswerEnd::Natural,
        };
        let TicketState { prompt_tokens, length_class, .. } = *ticket;
        let answer = Answer { prompt_tokens, length_class, tokens: made, counted, end };
        self.state.ledger.answers.ended(&answer);
        self.listeners.ended(&Ended { ticket, finished, usage, made, now: self.now });
        made
    }

    /// Closes a ticket as failed.
    pub(super) fn end_failed(&mut self, ticket: TicketId, failure: Failure) {
        let Some(state) = self.close(ticket) else { return };
        self.note_end(&state, None);
        let place = Failure::NAMES.iter().position(|(_, f)| *f == failure).expect("named");
        self.requests.totals.failed[place] += 1;
        let seconds = self.now - state.decided_at;
        self.requests.records.update(state.decision, |r| {
            r.outcome.ended = Some(Some(failure));
            r.outcome.e2e_seconds = Some(seconds);
        });
    }

    /// Places a failed segment on the best instance that has not failed it. The choice uses current
    /// scores, so that requests of a failed instance do not all go to one next instance. Returns
    /// `None` if no instance is left.
    fn place_anew(&mut self, ticket: TicketId) -> Option<Segment> {
        let key = tickets::slot(ticket);
        self.end_fetch(ticket);
        let state = self.requests.tickets.get(ticket).ok()?;
        let old = state.open.clone();
        state.open.at = InstanceId::NONE;
        state.failed.push(old.at);
        let later = std::mem::take(&mut state.later);
        let decision = state.decision;
        self.close_segment(key, &old);
        later.iter().for_each(|placed| self.close_segment(key, placed));
        let Segment { from_token, to_token, .. } = old.segment;
        let first = from_token == 0;
        // If a middle segment fails, its replacement runs to the end of the request.
        let to_token = to_token.filter(|_| first);
        let (turn, now) = (self.state.turn_behind(&old), self.now);
        let replaced = self
            .plan_for(ticket, |state, context, request, failed| match first {
                true => state.place_first(context, request, failed, now),
                false => state
                    .place_later(context, request, turn, (from_token, to_token), failed, now)
                    .map(|(placed, next)| (placed, Vec::new(), smallvec![next], None)),
            })
            .ok()?;
        let (mut placed, bound, next, notes) = replaced.ok()?;
        let fetched = placed.fetch.map_or(0, |planned| planned.fetch.tokens());
        let hit = placed.entry.prompt_tokens - placed.entry.new_tokens - f64::from(fetched);
        let request = self.requests.tickets.get(ticket).ok()?.request();
        let (_, tier) = self.state.reusable_tokens(&request, (placed.hit_blocks, placed.tier_blocks));
        let fetch = placed.fetch.as_ref().map(|planned| self.state.fetch_record(planned));
        self.open_segment(key, &mut placed);
        self.arrive(&mut placed);
        let bound: Vec<_> = bound
            .into_iter()
            .map(|mut placed| {
                self.open_segment(key, &mut placed);
                placed
            })
            .collect();
        let segment = placed.segment;
        let later = bound.iter().filter_map(|placed| placed.segment.to_token);
        let cuts = segment.to_token.into_iter().chain(later).collect();
        let state = self.requests.tickets.get(ticket).ok()?;
        (state.open, state.later) = (placed, bound);
        if first {
            self.listeners.placed_again(state, now);
        }
        self.requests.totals.retries += 1;
        let name = self.state.fleet.name(segment.instance).clone();
        self.requests.records.update(decision, |r| {
            if first {
                r.moved.push((segment.instance.0, name));
                r.predicted_hit_tokens = hit as u32;
                r.predicted_tier_tokens = tier as u32;
                r.cuts = cuts;
                r.next = next;
                r.fetch = fetch;
                if let Some((split_reason, balance)) = notes {
                    (r.split_reason, r.balance) = (split_reason, balance);
                }
            } else if let Some(last) = r.moves.last_mut().filter(|(token, ..)| *token == from_token) {
                // The target of the move failed before its first token.
                (last.1, last.2) = (segment.instance.0, name);
            } else {
                r.cuts.retain(|cut| *cut <= from_token);
                next.into_iter().for_each(|next| r.goes_on(from_token, next, false));
            }
        });
        Some(segment)
    }
}
