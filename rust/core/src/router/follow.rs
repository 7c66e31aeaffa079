//! What becomes of a placed request: progress, the end, the next of the ranking.
use super::books::Stage;
use super::decide::entry;
use super::tickets::{self, TicketState};
use super::{IndexFeed, Router, TicketId};
use crate::error::CoreError;
use crate::ids::Seconds;
use crate::plan::{Event, Failure, Segment, Usage};
use crate::request::Request;

impl Router {
    /// Tells what happened to a ticket's open segment. Returns the next segment where there is one: a request that failed before
    /// its first token moves to the next of its ranking.
    ///
    /// # Errors
    /// `Ticket` where the ticket is closed.
    pub fn advance(
        &mut self,
        ticket: TicketId,
        event: Event,
        now: Seconds,
    ) -> Result<Option<Segment>, CoreError> {
        let now = self.clock(now);
        let state = self.tickets.get(ticket)?;
        let slot = state.segment.instance.index();
        let current = self.fleet.is_current(state.segment.instance, state.instance_generation);
        if current && !state.told && !matches!(event, Event::Failed(_) | Event::GaveUp(_)) {
            // The request is on its way, so its blocks will be there. Not told at the decision: many new blocks take tens of
            // microseconds, and an instance that refuses the request never holds them.
            state.told = true;
            match self.feeds[slot] {
                IndexFeed::Approximate => {
                    self.index.record_hit(state.segment.instance, &state.chain, state.hit_blocks);
                }
                IndexFeed::Exact => {
                    self.index.touch(state.segment.instance, &state.chain, state.hit_blocks);
                }
            }
        }
        match event {
            Event::Sent => {}
            Event::Scheduled(cached) if current => {
                self.books.scheduled(slot, &mut state.entry, &mut self.columns);
                if let Some(cached) = cached {
                    let left = (state.entry.prompt_tokens - f64::from(cached)).max(0.0);
                    self.books.rebook(slot, tickets::slot(ticket), left, now);
                }
            }
            Event::Prefilled(tokens) if current => {
                self.books.prefilled(slot, tickets::slot(ticket), f64::from(tokens), now);
            }
            Event::FirstToken => {
                let (decision, ttft) = (state.decision, now - state.decided_at);
                if current {
                    self.books.first_token(
                        slot,
                        tickets::slot(ticket),
                        &mut state.entry,
                        now,
                        &mut self.columns,
                    );
                } else {
                    state.entry.stage = Stage::Decoding;
                }
                self.totals.output_tokens += 1;
                self.receipts.update(decision, |r| {
                    r.outcome.ttft_seconds.get_or_insert(ttft);
                });
            }
            Event::Tokens(n) => {
                self.totals.output_tokens += u64::from(n);
                if current && state.entry.stage == Stage::Decoding {
                    let (n, ticket) = (f64::from(n), tickets::slot(ticket));
                    self.books.tokens(slot, ticket, &mut state.entry, n, now, &mut self.columns);
                }
            }
            Event::Finished(usage) => self.finish(ticket, usage, now),
            Event::Failed(failure) => return Ok(self.fail(ticket, failure, true, now)),
            Event::GaveUp(failure) => return Ok(self.fail(ticket, failure, false, now)),
            Event::Scheduled(_) | Event::Prefilled(_) => {}
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
        let totals = &mut self.totals;
        totals.finished += 1;
        let prompt = usage.prompt_tokens.unwrap_or(state.entry.prompt_tokens as u32);
        totals.prompt_tokens += u64::from(prompt);
        if let Some(cached) = usage.cached_tokens {
            totals.cached_tokens += u64::from(cached);
            totals.predicted_cached_tokens += (state.entry.prompt_tokens - state.entry.new_tokens) as u64;
        }
        let seconds = now - state.decided_at;
        self.receipts.update(state.decision, |r| {
            r.outcome.ended = Some(None);
            r.outcome.usage = usage;
            r.outcome.e2e_seconds = Some(seconds);
        });
    }

    fn fail(&mut self, ticket: TicketId, failure: Failure, retry: bool, now: Seconds) -> Option<Segment> {
        let state = self.tickets.get(ticket).ok()?;
        if retry && failure.may_move() && state.entry.stage != Stage::Decoding {
            let moved = self.move_on(ticket, now);
            if moved.is_some() {
                return moved;
            }
        }
        let state = self.close(ticket, now)?;
        let place = Failure::NAMES.iter().position(|(_, f)| *f == failure).expect("named");
        self.totals.failed[place] += 1;
        let seconds = now - state.decided_at;
        self.receipts.update(state.decision, |r| {
            r.outcome.ended = Some(Some(failure));
            r.outcome.e2e_seconds = Some(seconds);
        });
        None
    }

    /// Places a request that failed on the best of the instances that have not: the ranking as it is by now, so that what one
    /// dead instance leaves behind does not all go to the same next one. `None`: nobody is left.
    fn move_on(&mut self, ticket: TicketId, now: Seconds) -> Option<Segment> {
        let state = self.tickets.get(ticket).ok()?;
        let old = state.segment.instance;
        if self.fleet.is_current(old, state.instance_generation) {
            self.books.close(old.index(), tickets::slot(ticket), &state.entry, now, &mut self.columns);
            state.instance_generation = 0; // off the books, whatever comes
        }
        state.failed.push(old.0);
        let (chain, failed) = (std::mem::take(&mut state.chain), std::mem::take(&mut state.failed));
        let request = Request {
            chain: &chain,
            prompt_tokens: state.entry.prompt_tokens as u32,
            tokens_per_block: state.tokens_per_block,
            expected_output_tokens: state.entry.expected_output_tokens.map(|t| t as u32),
            session: state.session,
        };
        self.match_prefix(&chain);
        let next = self.choose(&request, &failed, now).ok();
        let hit_blocks = next.map_or(0, |next| self.hit_blocks[next.index()]);
        let hit = self.saved_tokens(&request, hit_blocks);
        let entry = entry(&request, hit);
        let state = self.tickets.get(ticket).expect("an open ticket");
        (state.chain, state.failed) = (chain, failed);
        let next = next?;
        state.entry = entry;
        state.segment = Segment { instance: next, from_token: 0, to_token: None };
        state.instance_generation = self.fleet.generation(next);
        state.hit_blocks = hit_blocks;
        state.told = false;
        let (segment, decision) = (state.segment, state.decision);
        self.books.open(next.index(), tickets::slot(ticket), &entry, now, &mut self.columns);
        self.placed[next.index()] += 1;
        self.totals.retries += 1;
        let name = self.fleet.name(next).clone();
        self.receipts.update(decision, |r| {
            r.moved.push((next.0, name));
            r.predicted_hit_tokens = hit as u32;
        });
        Some(segment)
    }

    fn close(&mut self, ticket: TicketId, now: Seconds) -> Option<TicketState> {
        let mut state = self.tickets.close(ticket)?;
        if self.fleet.is_current(state.segment.instance, state.instance_generation) {
            let slot = state.segment.instance.index();
            self.books.close(slot, tickets::slot(ticket), &state.entry, now, &mut self.columns);
        }
        self.tickets.return_chain(std::mem::take(&mut state.chain));
        Some(state)
    }
}
