//! Decisions: match, score, commit.
use super::books::{Entry, Stage};
use super::tickets::{self, TicketState};
use super::{Decision, Router};
use crate::error::CoreError;
use crate::guard::Restriction;
use crate::ids::{InstanceId, Seconds};
use crate::indicators::{Indicator, Snapshot};
use crate::plan::Segment;
use crate::policy::{Scores, select};
use crate::request::Request;

impl Router {
    /// Decides where `request` goes, books it there and opens its ticket.
    ///
    /// # Errors
    /// `NoInstance` where none is eligible or none can be scored; nothing is booked then.
    pub fn route(&mut self, request: &Request<'_>, now: Seconds) -> Result<Decision, CoreError> {
        self.route_labelled(request, None, now)
    }

    /// [`Router::route`] with the request's own id, for the receipt.
    ///
    /// # Errors
    /// As [`Router::route`].
    pub fn route_labelled(
        &mut self,
        request: &Request<'_>,
        request_id: Option<&str>,
        now: Seconds,
    ) -> Result<Decision, CoreError> {
        let now = self.clock(now);
        let chosen = self.decide(request, now)?;
        Ok(self.commit(request, request_id, chosen, now))
    }

    /// [`Router::route_labelled`] for a request whose chain is `chain`, which the ticket takes over instead of a copy; a buffer
    /// used before is left in its place. `request.chain` is not read.
    ///
    /// # Errors
    /// As [`Router::route`]; the chain stays where it is then.
    pub fn route_taking(
        &mut self,
        request: &Request<'_>,
        chain: &mut Vec<u64>,
        request_id: Option<&str>,
        now: Seconds,
    ) -> Result<Decision, CoreError> {
        let now = self.clock(now);
        let whole = Request { chain, ..*request };
        let chosen = self.decide(&whole, now)?;
        let decision = self.book(&whole, request_id, chosen, now);
        let spare = self.tickets.spare_chain();
        self.tickets.get(decision.ticket)?.chain = std::mem::replace(chain, spare);
        Ok(decision)
    }

    fn decide(&mut self, request: &Request<'_>, now: Seconds) -> Result<InstanceId, CoreError> {
        self.match_prefix(request.chain);
        self.score(request, now).inspect_err(|_| self.totals.no_instance += 1)
    }

    /// First stage of a decision: how much of the prompt each instance holds.
    pub fn match_prefix(&mut self, chain: &[u64]) {
        self.index.match_prefix(chain, &mut self.hit_blocks);
    }

    /// How many leading prompt tokens each live instance holds, in slot order. Nothing is booked or touched.
    pub fn hit_tokens(&mut self, request: &Request<'_>) -> Vec<u32> {
        self.match_prefix(request.chain);
        let mut hits = self.hit_blocks.clone();
        self.whole_hits(request, &mut hits);
        if self.fleet.live_count() < hits.len() {
            let mut slots = (0..).map(InstanceId);
            hits.retain(|_| slots.next().is_some_and(|id| self.fleet.is_live(id)));
        }
        hits
    }

    /// Second stage: scores every instance, and chooses. Nothing is booked.
    ///
    /// # Errors
    /// As [`Router::route`].
    pub fn score(&mut self, request: &Request<'_>, now: Seconds) -> Result<InstanceId, CoreError> {
        self.choose(request, &[], now)
    }

    /// [`Router::score`] without the slots in `failed`.
    pub(super) fn choose(
        &mut self,
        request: &Request<'_>,
        failed: &[u32],
        now: Seconds,
    ) -> Result<InstanceId, CoreError> {
        let slots = self.fleet.slots();
        self.eligible.clear();
        self.eligible.extend_from_slice(self.fleet.eligible());
        failed.iter().for_each(|slot| self.eligible[*slot as usize] = false);
        let eligible_count = match failed {
            [] => self.fleet.eligible_count(),
            _ => self.eligible.iter().filter(|e| **e).count(),
        };
        if eligible_count == 0 {
            return Err(self.nobody());
        }
        self.restriction = self.guard.restrict(request.chain, &mut self.eligible);
        let excluded = if let Restriction::Filtered(out) = self.restriction { out } else { 0 };
        self.derive(request, self.reads, now);
        let snapshot = Snapshot {
            columns: &self.columns,
            eligible: &self.eligible,
            eligible_count: eligible_count - excluded,
            name_hashes: self.fleet.name_hashes(),
            ordinal: self.totals.decisions,
            session: request.session,
        };
        self.scores.reset(slots);
        if self.restriction == Restriction::BalanceOnly {
            self.scores.score.copy_from_slice(snapshot.column(Indicator::Bs));
        } else {
            self.policy.score(&snapshot, &mut self.rng, &mut self.scores)?;
        }
        if snapshot.eligible_count < slots {
            // From here on a score that is a number belongs to an instance that may take the request.
            for (score, _) in self.scores.score.iter_mut().zip(&self.eligible).filter(|(_, e)| !**e) {
                *score = f64::NAN;
            }
        }
        let best = select::best(&self.scores, snapshot.eligible, &mut self.rng).ok_or_else(|| {
            CoreError::NoInstance(format!(
                "policy {} (`{}`) scores none of the {} eligible instances: an indicator it reads ({}) is absent, or it divides \
                 by zero",
                self.policy.spec().name,
                self.policy.spec().formula,
                snapshot.eligible_count,
                self.reads.iter().map(|i| i.decl().name).collect::<Vec<_>>().join(", "),
            ))
        })?;
        Ok(InstanceId(best as u32))
    }

    /// The scores of the last [`Router::score`], one a slot.
    pub fn last_scores(&self) -> &Scores {
        &self.scores
    }

    /// Third stage: books the request on `chosen`, writes the receipt, opens the ticket.
    pub fn commit(
        &mut self,
        request: &Request<'_>,
        request_id: Option<&str>,
        chosen: InstanceId,
        now: Seconds,
    ) -> Decision {
        let decision = self.book(request, request_id, chosen, now);
        let mut chain = self.tickets.spare_chain();
        chain.extend_from_slice(request.chain);
        if let Ok(state) = self.tickets.get(decision.ticket) {
            state.chain = chain;
        }
        decision
    }

    /// [`Router::commit`] without the ticket's chain.
    fn book(
        &mut self,
        request: &Request<'_>,
        request_id: Option<&str>,
        chosen: InstanceId,
        now: Seconds,
    ) -> Decision {
        let slot = chosen.index();
        let hit = self.saved_tokens(request, self.hit_blocks[slot]);
        let entry = entry(request, hit);
        let segment = Segment { instance: chosen, from_token: 0, to_token: None };
        let matched = self.hit_blocks.iter().copied().max().unwrap_or(0);
        self.guard.observe(now, request.chain, matched, &self.scores, &self.eligible, chosen);
        let receipt = self.explain(request, request_id, chosen, hit as u32, now);
        let id = receipt.id;
        self.receipts.push(receipt);
        let ticket = self.tickets.open(TicketState {
            segment,
            instance_generation: self.fleet.generation(chosen),
            entry,
            decision: id,
            decided_at: now,
            tokens_per_block: request.tokens_per_block,
            chain: Vec::new(),
            session: request.session,
            failed: Vec::new(),
            hit_blocks: self.hit_blocks[slot],
            told: false,
        });
        self.books.open(slot, tickets::slot(ticket), &entry, now, &mut self.columns);
        self.totals.decisions += 1;
        self.placed[slot] += 1;
        Decision { id, ticket, segment, predicted_hit_tokens: hit as u32 }
    }

    fn nobody(&self) -> CoreError {
        let live = self.fleet.live_count();
        CoreError::NoInstance(match live {
            0 => "the router has no instances".into(),
            _ => format!("none of the {live} instances is healthy, of a fitting role and not draining"),
        })
    }
}

/// What a placement books.
pub(super) fn entry(request: &Request<'_>, hit_tokens: f64) -> Entry {
    let prompt_tokens = f64::from(request.prompt_tokens);
    Entry {
        prompt_tokens,
        new_tokens: prompt_tokens - hit_tokens,
        output_tokens: 0.0,
        expected_output_tokens: request.expected_output_tokens.map(f64::from),
        stage: Stage::Bound,
    }
}
