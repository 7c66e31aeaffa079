//! Decisions: match, score, commit.
use super::books::{Entry, Stage};
use super::cut::Rest;
use super::tickets::{Pulling, TicketState};
use super::{Decision, Router};
use crate::error::CoreError;
use crate::fleet::Role;
use crate::guard::Restriction;
use crate::ids::{InstanceId, Seconds};
use crate::indicators::{Indicator, Snapshot};
use crate::plan::Cuts;
use crate::policy::{Scores, select};
use crate::priority::vtc::check_weight;
use crate::receipt::{Balance, Receipt};
use crate::request::Request;

/// Which of a plan's segments is placed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Turn {
    /// The one that begins with the request.
    First,
    /// One that follows another, in a pool of its own.
    Later,
    /// One that follows another on an equal of its instance, which may be that one itself only where it is not named.
    Peer(Option<InstanceId>),
}

/// The instances of a plan.
#[derive(Clone, Debug)]
pub(super) struct Chosen {
    pub first: InstanceId,
    pub rest: Rest,
    /// What the first fetches before it begins.
    pub pull: Option<Pulling>,
    /// Why the request stays in one piece, if others are cut.
    pub uncut: Option<Box<str>>,
    /// Expected times of its instances, if a cut was looked for.
    pub balance: Option<Balance>,
}

impl Chosen {
    /// All of a request on one instance.
    fn whole(first: InstanceId, pull: Option<Pulling>) -> Chosen {
        Chosen { first, rest: Rest::default(), pull, uncut: None, balance: None }
    }
}

impl Router {
    /// Decides where `request` goes, books it there and opens its ticket.
    ///
    /// # Errors
    /// `NoInstance` if none is eligible; nothing is booked then.
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
        let request = &*self.estimated(request);
        let (chosen, receipt) = self.decide(request, request_id, now)?;
        Ok(self.commit_plan(request, chosen, receipt, now))
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
        let whole = self.estimated(&whole);
        let (chosen, receipt) = self.decide(&whole, request_id, now)?;
        let decision = self.book(&whole, chosen, receipt, now);
        let spare = self.tickets.spare_chain();
        self.tickets.get(decision.ticket)?.chain = std::mem::replace(chain, spare);
        Ok(decision)
    }

    /// The plan of a request, and its receipt as far as the first choice explains it.
    fn decide(
        &mut self,
        request: &Request<'_>,
        request_id: Option<&str>,
        now: Seconds,
    ) -> Result<(Chosen, Box<Receipt>), CoreError> {
        check_weight(request.tenant.weight)?;
        request.check()?;
        self.match_prefix(request.chain);
        let first = self.score(request, now).inspect_err(|_| self.totals.no_instance += 1)?;
        // Before the rest is planned: choosing a second instance derives the same columns anew.
        let receipt = self.explain(request, request_id, first, now);
        match self.plan(request, first, &[], now) {
            Ok(chosen) => Ok((chosen, receipt)),
            Err(error) => {
                self.receipts.put_back(receipt);
                self.totals.no_instance += 1;
                Err(error)
            }
        }
    }

    /// What follows a first segment on `first`, and what is pulled before it; `failed`: slots that are not asked.
    pub(super) fn plan(
        &mut self,
        request: &Request<'_>,
        first: InstanceId,
        failed: &[u32],
        now: Seconds,
    ) -> Result<Chosen, CoreError> {
        let rest = self.rest(request, first, failed, now)?;
        let pull = self.pull_for(request, first, &rest);
        Ok(Chosen { first, rest, pull, uncut: self.uncut.take(), balance: self.balance.take() })
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
        self.choose(request, Turn::First, &[], None, now)
    }

    /// The instance of a segment, by the policy of its turn, without the slots in `failed`. `handoff`: seconds until it is expected to start to
    /// decode, where it follows another.
    pub(super) fn choose(
        &mut self,
        request: &Request<'_>,
        turn: Turn,
        failed: &[u32],
        handoff: Option<Seconds>,
        now: Seconds,
    ) -> Result<InstanceId, CoreError> {
        let reads = match turn {
            Turn::First => self.first.reads,
            Turn::Later | Turn::Peer(_) => self.later.reads,
        };
        let eligible_count = self.admit(turn, failed);
        if eligible_count == 0 {
            return Err(self.nobody(turn));
        }
        self.derive(request, reads, eligible_count, handoff, now);
        let (chooser, restriction) = match turn {
            Turn::First => {
                self.restriction = self.guard.restrict(request.chain, &mut self.first.eligible);
                (&mut self.first, self.restriction)
            }
            Turn::Later | Turn::Peer(_) => (&mut self.later, Restriction::Free),
        };
        let excluded = if let Restriction::Filtered(out) = restriction { out } else { 0 };
        let slots = self.fleet.slots();
        let snapshot = Snapshot {
            columns: &self.columns,
            eligible: &chooser.eligible,
            eligible_count: eligible_count - excluded,
            name_hashes: self.fleet.name_hashes(),
            ordinal: chooser.made,
            session: request.session,
        };
        chooser.scores.reset(slots);
        if restriction == Restriction::BalanceOnly {
            chooser.scores.score.copy_from_slice(snapshot.column(Indicator::Bs));
        } else {
            chooser.policy.score(&snapshot, &mut self.rng, &mut chooser.scores)?;
            chooser.scores.check(slots, &chooser.policy.spec().name)?;
        }
        leave_ineligible(&mut chooser.scores, &snapshot);
        if let Some(best) = select::best(&chooser.scores, snapshot.eligible, &mut self.rng) {
            return Ok(InstanceId(best as u32));
        }
        // An instance that takes requests exists, so the request must not fail: fewest requests wins.
        self.totals.unscored += 1;
        chooser.scores.reset(slots);
        chooser.scores.unscored = true;
        chooser.scores.score.copy_from_slice(snapshot.column(Indicator::Bs));
        leave_ineligible(&mut chooser.scores, &snapshot);
        let best = select::best(&chooser.scores, snapshot.eligible, &mut self.rng);
        best.map(|best| InstanceId(best as u32)).ok_or_else(|| self.nobody(turn))
    }

    /// Marks who may take a segment; returns how many. Where nobody takes prompts, instances that decode only take whole requests, if
    /// they may.
    pub(super) fn admit(&mut self, turn: Turn, failed: &[u32]) -> usize {
        let fleet = &self.fleet;
        let (chooser, able, count) = match turn {
            Turn::First => (&mut self.first, fleet.eligible(), fleet.eligible_count()),
            Turn::Later => (&mut self.later, fleet.decoders(), fleet.decoder_count()),
            Turn::Peer(_) => (&mut self.later, fleet.eligible(), fleet.eligible_count()),
        };
        let mut mark = |able: &[bool], count: usize| {
            chooser.eligible.clear();
            chooser.eligible.extend_from_slice(able);
            failed.iter().for_each(|slot| chooser.eligible[*slot as usize] = false);
            if let Turn::Peer(first) = turn {
                // It takes over from the first: the engines of both must be able to, and the roles that prefill only do not go on.
                for (slot, eligible) in chooser.eligible.iter_mut().enumerate() {
                    let id = InstanceId(slot as u32);
                    *eligible &=
                        first != Some(id) && fleet.role(id) == Role::Both && self.cuts[slot] > Cuts::Nowhere;
                }
                return chooser.eligible.iter().filter(|e| **e).count();
            }
            if failed.is_empty() { count } else { chooser.eligible.iter().filter(|e| **e).count() }
        };
        match mark(able, count) {
            0 if turn == Turn::First && self.config.colocate => mark(fleet.decoders(), fleet.decoder_count()),
            count => count,
        }
    }

    /// The scores of the last [`Router::score`], one a slot.
    pub fn last_scores(&self) -> &Scores {
        &self.first.scores
    }

    /// Third stage: books the request, all of it on `chosen`, writes the receipt, opens the ticket.
    ///
    /// # Errors
    /// `BadValue` if `chosen` is no slot that the last [`Router::score`] scored, or the request cannot be.
    pub fn commit(
        &mut self,
        request: &Request<'_>,
        request_id: Option<&str>,
        chosen: InstanceId,
        now: Seconds,
    ) -> Result<Decision, CoreError> {
        self.fleet.check(chosen)?;
        request.check()?;
        if self.first.scores.score.len() != self.fleet.slots() {
            return Err(CoreError::BadValue {
                what: "commit".into(),
                got: "a fleet that has changed since the last score".into(),
                expected: "a request that was scored just before".into(),
            });
        }
        let receipt = self.explain(request, request_id, chosen, now);
        let pull = self.pull_for(request, chosen, &Rest::default());
        Ok(self.commit_plan(request, Chosen::whole(chosen, pull), receipt, now))
    }

    fn commit_plan(
        &mut self,
        request: &Request<'_>,
        chosen: Chosen,
        receipt: Box<Receipt>,
        now: Seconds,
    ) -> Decision {
        let decision = self.book(request, chosen, receipt, now);
        let mut chain = self.tickets.spare_chain();
        chain.extend_from_slice(request.chain);
        if let Ok(state) = self.tickets.get(decision.ticket) {
            state.chain = chain;
        }
        decision
    }

    /// [`Router::commit_plan`] without the ticket's chain.
    fn book(
        &mut self,
        request: &Request<'_>,
        chosen: Chosen,
        mut receipt: Box<Receipt>,
        now: Seconds,
    ) -> Decision {
        let first = chosen.first;
        let hit = self.saved_tokens(request, self.hit_blocks[first.index()]);
        let matched = self.hit_blocks.iter().copied().max().unwrap_or(0);
        self.guard.observe(now, request.chain, matched, &self.first.scores, &self.first.eligible, first);
        self.totals.left_out += u64::from(receipt.left_out);
        self.totals.filter_waived += u64::from(receipt.filter_waived);
        let (leg, later) = self.legs_of(request, &chosen, now);
        receipt.next = self.next_in(&chosen.rest);
        receipt.cuts.extend(chosen.rest.iter().map(|follow| follow.from_token));
        receipt.uncut = chosen.uncut;
        receipt.unpulled = request.unpulled.filter(|_| self.pulls.is_some()).map(Into::into);
        receipt.pull = chosen.pull.as_ref().map(|pulling| self.pull_told(pulling));
        let (priority, place) = self.prioritise(&request.tenant, request.prompt_tokens, hit as u32, now);
        receipt.priority = priority;
        receipt.balance = chosen.balance;
        let id = self.receipts.push(receipt);
        let (segment, next) = (leg.segment, later.first().map(|leg| leg.segment));
        let ticket = self.tickets.open(TicketState {
            leg,
            later,
            handed_over: None,
            decision: id,
            decided_at: now,
            tokens_per_block: request.tokens_per_block,
            chain: Vec::new(),
            prompt_tokens: request.prompt_tokens,
            expected_output_tokens: request.expected_output_tokens,
            think_tokens: request.think_tokens,
            length_class: request.length_class,
            may_be_cut: request.uncut.is_none(),
            may_be_pulled_for: request.unpulled.is_none(),
            session: request.session,
            place,
            failed: Vec::new(),
            lost: Vec::new(),
        });
        self.totals.split += u64::from(segment.to_token.is_some_and(|_| self.peers(&segment)));
        self.open_legs(ticket, now);
        self.totals.decisions += 1;
        self.first.made += 1;
        let pull = chosen.pull.map(|pulling| pulling.pull);
        Decision { id, ticket, segment, next, pull, predicted_hit_tokens: hit as u32, priority }
    }

    pub(super) fn nobody(&self, turn: Turn) -> CoreError {
        let live = self.fleet.live_count();
        CoreError::NoInstance(match (live, turn) {
            (0, _) => "the router has no instances".into(),
            (_, Turn::First) => {
                format!("none of the {live} instances is healthy, of a fitting role and not draining")
            }
            (_, Turn::Later) => {
                format!("none of the {live} instances is of the role decode, healthy and not draining")
            }
            (_, Turn::Peer(_)) => {
                format!("none of the {live} instances takes over from others, healthy and not draining")
            }
        })
    }
}

/// From here on a score that is a number belongs to an instance that may take the request.
fn leave_ineligible(scores: &mut Scores, snapshot: &Snapshot<'_>) {
    if snapshot.eligible_count < snapshot.eligible.len() {
        for (score, _) in scores.score.iter_mut().zip(snapshot.eligible).filter(|(_, e)| !**e) {
            *score = f64::NAN;
        }
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
