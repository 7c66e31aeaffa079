//! Segments of plans, with their entries in the ledger.
use crate::error::CoreError;
use crate::estimate::Queued;
use crate::fleet::Role;
use crate::ids::{Seconds, Slot};
use crate::indicators::Indicator;
use crate::kv::tier::Tier;
use crate::plan::Segment;
use crate::record::Next;
use crate::request::Request;
use crate::router::context::DecisionContext;
use crate::router::ledger::{Entry, Stage};
use crate::router::parts::{Chosen, Replaced, Turn};
use crate::router::state::State;
use crate::router::tickets::PlacedSegment;

impl State {
    /// Returns the segments of a plan, as far as their instances are chosen.
    pub fn segments_of(
        &self,
        context: &DecisionContext,
        request: &Request<'_>,
        chosen: &Chosen,
        now: Seconds,
    ) -> (PlacedSegment, Vec<PlacedSegment>) {
        let end = |i: usize| chosen.rest.get(i).map(|follow| follow.from_token);
        let start = |i: usize| chosen.rest.get(i).map(|follow| now + follow.start_seconds);
        let mut placed = PlacedSegment {
            start: start(0),
            ..self.placed_segment(context, request, chosen.first, 0, end(0))
        };
        if let Some(planned) = chosen.fetch {
            placed.entry.new_tokens -= f64::from(planned.fetch.tokens());
            placed.fetch = Some(planned);
        }
        let later = chosen.rest.iter().enumerate().map_while(|(i, follow)| {
            let placed =
                self.placed_segment(context, request, follow.instance?, follow.from_token, end(i + 1));
            Some(PlacedSegment { start: start(i), ..placed })
        });
        (placed, later.collect())
    }

    /// Returns a segment of a request. Another instance computes the tokens before `from_token` and
    /// transfers them.
    pub fn placed_segment(
        &self,
        context: &DecisionContext,
        request: &Request<'_>,
        instance: Slot,
        from_token: u32,
        to_token: Option<u32>,
    ) -> PlacedSegment {
        let (hit_blocks, tier_blocks) = context.matched.blocks_on(instance.index());
        let (hit, tier_tokens) = self.reusable_tokens(request, (hit_blocks, tier_blocks));
        let hit = hit.max(f64::from(from_token.min(request.prompt_tokens)));
        let mut entry = entry(request, hit);
        (entry.tier_tokens, entry.tier) = (tier_tokens, context.matched.tier_of(instance.index()));
        if let Some(to) = to_token {
            entry.prompt_tokens = f64::from(to.min(request.prompt_tokens));
            entry.new_tokens = (entry.prompt_tokens - hit).max(0.0);
            entry.expected_output_tokens = Some(f64::from(to.saturating_sub(request.prompt_tokens)));
        }
        if from_token > 0 {
            entry.output_tokens = f64::from(from_token.saturating_sub(request.prompt_tokens));
            entry.stage = Stage::Coming;
        }
        PlacedSegment {
            segment: Segment { instance, from_token, to_token },
            at: self.fleet.id_of(instance),
            role: self.fleet.role(instance),
            entry,
            hit_blocks,
            tier_blocks,
            told: false,
            queued: from_token == 0,
            fetch: None,
            start: None,
        }
    }

    /// Adds a segment to the predicted loads, if they are kept: as a decode if it already decodes,
    /// else with its expected start.
    pub fn foresee(&mut self, ticket: u32, placed: &PlacedSegment, now: Seconds) {
        let wanted = self.ledger.ahead().is_some() && !placed.prefills_only();
        if !wanted || !self.fleet.is_current(placed.at) {
            return;
        }
        let (slot, key) = (placed.segment.instance.index(), placed.key(ticket));
        if placed.entry.stage == Stage::Decoding {
            return self.ledger.resume(slot, key, &placed.entry, now);
        }
        let (prompt, new) = (placed.entry.prompt_tokens, placed.entry.new_tokens);
        let start = placed.start.unwrap_or_else(|| now + self.prefill_seconds(slot, prompt - new, new, now));
        self.ledger.expect(slot, key, &placed.entry, start);
    }

    /// Returns whether the instance of a bound segment still accepts it.
    pub fn serves(&self, placed: &PlacedSegment) -> bool {
        self.fleet.current(placed.at).is_some_and(|id| self.fleet.state(id).0)
    }

    /// Returns the kind of choice for the segment after another one.
    pub fn turn_behind(&self, placed: &PlacedSegment) -> Turn {
        // Another instance in the slot may have another role.
        match if self.fleet.is_last(placed.at) { self.fleet.role(placed.at.slot()) } else { placed.role } {
            Role::Both => Turn::Peer(None),
            Role::Prefill | Role::Decode => Turn::Later,
        }
    }

    /// Places the tokens `from` to `to` of a request whose earlier tokens are computed.
    pub fn place_later(
        &self,
        context: &mut DecisionContext,
        request: &Request<'_>,
        turn: Turn,
        (from, to): (u32, Option<u32>),
        failed: &[u32],
        now: Seconds,
    ) -> Result<(PlacedSegment, Next), CoreError> {
        self.match_prefix(context, request);
        let handoff = self.ledger.ahead().map_or(0.0, |ahead| ahead.lag());
        match self.choose(context, request, turn, failed, Some(handoff), now) {
            Ok(next) => {
                let placed = PlacedSegment {
                    start: Some(now + handoff),
                    ..self.placed_segment(context, request, next, from, to)
                };
                Ok((placed, self.next_of(context, next, handoff)))
            }
            Err(_) if self.config.colocate => {
                let whole = self.choose(context, request, Turn::First, failed, None, now)?;
                let mut next = self.next_of(context, whole, 0.0);
                next.score = context.first.scores.score[whole.index()];
                Ok((
                    PlacedSegment {
                        start: Some(now),
                        ..self.placed_segment(context, request, whole, 0, None)
                    },
                    next,
                ))
            }
            Err(error) => Err(error),
        }
    }

    /// Returns the instance of a follow-up segment for the decision record, with the score of the
    /// last choice.
    pub fn next_of(&self, context: &DecisionContext, instance: Slot, handoff_seconds: Seconds) -> Next {
        let slot = instance.0;
        let score = context.later.scores.score.get(instance.index()).copied().unwrap_or(f64::NAN);
        Next { slot, name: self.fleet.name(instance).clone(), score, handoff_seconds }
    }

    /// Returns the expected seconds until a request with its first segment on `first` starts to
    /// decode.
    pub fn expected_handoff(
        &self,
        context: &DecisionContext,
        request: &Request<'_>,
        first: Slot,
        now: Seconds,
    ) -> Seconds {
        let (hit, _) = self.reusable_tokens(request, context.matched.blocks_on(first.index()));
        let prefill = self.prefill_seconds(first.index(), hit, f64::from(request.prompt_tokens) - hit, now);
        prefill + self.ledger.ahead().map_or(0.0, |ahead| ahead.lag())
    }

    /// Returns the expected seconds of a prefill on a slot, with `hit` cached and `new` uncached
    /// tokens.
    pub fn prefill_seconds(&self, slot: usize, hit: f64, new: f64, now: Seconds) -> Seconds {
        let (queued, decoding, context) = match self.config.unlimited_prefill {
            true => (Queued::default(), 0.0, 0.0),
            false => (
                self.ledger.queued_on(slot, now),
                self.ledger.get(Indicator::RBs)[slot],
                self.ledger.get(Indicator::DecodeTokens)[slot],
            ),
        };
        self.ttft(slot, queued, hit, new, decoding, context, self.mean_prefill_rate())
    }

    /// Plans a request again after a failure on another instance.
    pub fn place_first(
        &self,
        context: &mut DecisionContext,
        request: &Request<'_>,
        failed: &[u32],
        now: Seconds,
    ) -> Result<Replaced, CoreError> {
        self.match_prefix(context, request);
        let first = self.choose(context, request, Turn::First, failed, None, now)?;
        let chosen = self.plan(context, request, first, failed, now)?;
        let (placed, later) = self.segments_of(context, request, &chosen, now);
        // The decision record already shows a reason given by the caller.
        let notes = request.split_reason.is_none().then_some((chosen.split_reason, chosen.balance));
        Ok((placed, later, self.next_in(&chosen.rest), notes))
    }

    /// Returns whether an instance can take over running requests.
    pub fn takes_over(&self, id: Slot) -> bool {
        let live = id.index() < self.fleet.slots() && self.fleet.is_live(id);
        live && {
            let (healthy, draining, role) = self.fleet.state(id);
            healthy && !draining && !self.fleet.is_warming(id) && role != Role::Prefill
        }
    }
}

/// Returns the ledger entry of a new placement.
fn entry(request: &Request<'_>, hit_tokens: f64) -> Entry {
    let prompt_tokens = f64::from(request.prompt_tokens);
    Entry {
        prompt_tokens,
        new_tokens: prompt_tokens - hit_tokens,
        output_tokens: 0.0,
        expected_output_tokens: request.expected_output_tokens.map(f64::from),
        stage: Stage::Bound,
        tier_tokens: 0.0,
        tier: Tier::Gpu,
        load_seconds: None,
        lora: request.lora.unwrap_or(0),
        tenant: request.tenant.id,
        whole_answer: request.whole_answer,
    }
}
