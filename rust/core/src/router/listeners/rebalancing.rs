//! Rebalancing as a listener: it follows conversations, and in each round, the rebalancer gets the
//! running requests of each instance and returns moves (STAR, section 5.2). The caller makes the
//! moves (`Router::begin_move`).
use super::listener::{Ended, Listener, Placement};
use crate::error::CoreError;
use crate::estimate::{Prompt, Remaining, RemainingCurve, Turns};
use crate::fleet::{Fleet, Role};
use crate::ids::{Seconds, Slot};
use crate::indicators::Indicator;
use crate::plan::Cuts;
use crate::rebalance::{InstanceLoad, Move, Rebalancing, Running, RunningRequest, Stop};
use crate::record::DecisionRecord;
use crate::request::Request;
use crate::router::ledger::Stage;
use crate::router::state::State;
use crate::router::tickets::{Kept, TicketId, TicketState, Tickets};

/// A move that a round proposes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct NamedMove {
    /// Ticket of the request.
    pub ticket: TicketId,
    /// The move and its reason.
    pub why: Move,
}

/// Decode step time of an instance without data: a fluent reader's time per token.
const STEP_SECONDS: Seconds = 0.05;

/// Rounds of rebalancing, with what their forecast learns.
pub struct Rounds {
    by: Rebalancing,
    /// The latest turns of conversations, if the forecast reads them.
    pub turns: Option<Turns>,
}

impl Rounds {
    /// Creates the rounds. `turns`: turns known so far, if any.
    pub fn new(by: Rebalancing, turns: Option<Turns>) -> Rounds {
        let turns = by.forecast.reads_turns().then(|| turns.unwrap_or_default());
        Rounds { by, turns }
    }

    /// Runs one round over all instances that decode. Returns the moves worth making, and why there
    /// are no more.
    ///
    /// # Errors
    /// Errors of the forecast. Built-in forecasts do not fail.
    pub fn round(&mut self, state: &State, tickets: &Tickets) -> Result<(Vec<NamedMove>, Stop), CoreError> {
        let by = &mut self.by;
        let listed = listed(tickets, &state.fleet, by);
        let asked: Vec<Running> = listed.iter().map(|listed| listed.asked).collect();
        let curve = state.ledger.answers.curve().filter(|_| by.forecast.reads_curve());
        let curve = curve.map(|curve| RemainingCurve::new(&curve.unlimited()));
        let mut predicted = Vec::with_capacity(asked.len());
        by.forecast.predict(&asked, curve.as_ref(), &mut predicted)?;
        let mut requests: Vec<Vec<RunningRequest>> = vec![Vec::new(); state.fleet.slots()];
        let mut coming = vec![(0.0, 0.0); state.fleet.slots()];
        let mut tokens_per_block = 0.0;
        for (Listed { ticket, request, comes, asked }, remaining) in listed.iter().zip(predicted) {
            let placed = &request.open;
            let slot = placed.segment.instance.index();
            if *comes {
                coming[slot].0 += 1.0;
                coming[slot].1 += placed.entry.prompt_tokens + placed.entry.output_tokens;
            }
            tokens_per_block = f64::max(tokens_per_block, request.tokens_per_block);
            // Subtract the tokens received since the prediction.
            let since = placed.entry.output_tokens - asked.output_tokens;
            requests[slot].push(RunningRequest {
                id: ticket.0,
                tokens: (placed.entry.prompt_tokens + placed.entry.output_tokens) as u32,
                remaining: Remaining { tokens: (remaining.tokens - since).max(0.0), ..remaining },
                movable: !comes
                    && request.may_be_cut
                    && request.later.is_empty()
                    && request.instances.is_none()
                    && placed.segment.to_token.is_none()
                    && state.instances[slot].cuts >= Cuts::Output,
            });
        }
        let pools = state.fleet.decoder_count() > 0;
        let slots = (0..state.fleet.slots() as u32).map(Slot);
        let loads: Vec<InstanceLoad<'_>> = slots
            .filter(|id| {
                let role = state.fleet.role(*id);
                state.fleet.is_live(*id) && if pools { role == Role::Decode } else { role == Role::Both }
            })
            .map(|id| load_to_balance(state, id, &requests[id.index()], coming[id.index()], tokens_per_block))
            .collect();
        let round = by.rule.round(&loads)?;
        let named = |why: &Move| NamedMove { ticket: TicketId(why.request), why: *why };
        Ok((round.moves.iter().map(named).collect(), round.stop))
    }

    /// Returns the requests that an immediate round would pass to the forecast.
    pub fn running(&self, state: &State, tickets: &Tickets) -> Vec<Running> {
        listed(tickets, &state.fleet, &self.by).iter().map(|listed| listed.asked).collect()
    }
}

impl Listener for Rounds {
    fn placed(&mut self, placement: &Placement<'_>, _: &mut DecisionRecord, kept: &mut Kept) {
        if let Some(turns) = &mut self.turns {
            let Request { session, chain, tokens_per_block, prompt_tokens: tokens, .. } = *placement.request;
            kept.turn = turns.arrived(Prompt { session, chain, tokens_per_block, tokens }, placement.now);
        }
    }

    fn ended(&mut self, ended: &Ended<'_>) {
        if let Some(turns) = self.turns.as_mut().filter(|_| ended.finished && ended.made > 0) {
            turns.ended(&ended.ticket.kept.turn, ended.made);
        }
    }
}

/// Returns an instance's load for the rebalancer.
fn load_to_balance<'a>(
    state: &State,
    id: Slot,
    requests: &'a [RunningRequest],
    coming: (f64, f64),
    tokens_per_block: f64,
) -> InstanceLoad<'a> {
    let slot = id.index();
    let at = |indicator| state.ledger.get(indicator)[slot];
    let blocks = state.instances[slot].cache_blocks.map_or(f64::from(u32::MAX), f64::from);
    // `requests` already contains the requests whose KV is in transfer; the rest are bound.
    let (bound, bound_tokens) = (at(Indicator::BoundBs) - coming.0, at(Indicator::BoundTokens) - coming.1);
    let model = state.step_time_of(slot).or_else(|| state.ledger.step_fit(slot).step_time());
    let step = model.map(|model| model.step(at(Indicator::DecodeBs), at(Indicator::DecodeTokens)));
    InstanceLoad {
        instance: id,
        capacity_tokens: (blocks * tokens_per_block.max(1.0)) as u64,
        other_tokens: state.ledger.peers(slot).tokens() as u64,
        queued_tokens: if bound > 0.0 { (bound_tokens / bound) as u64 } else { 0 },
        step_seconds: step.filter(|seconds| *seconds > 0.0).unwrap_or(STEP_SECONDS),
        accepts: state.takes_over(id) && state.instances[slot].cuts >= Cuts::Output,
        requests,
    }
}

/// A request considered in a round.
struct Listed<'a> {
    ticket: TicketId,
    request: &'a TicketState,
    /// Whether its KV is in transfer.
    comes: bool,
    /// Input for the forecast, as of the last prediction.
    asked: Running,
}

/// Returns the requests that decode and those whose KV is in transfer. Requests in transfer count
/// as load of their target; otherwise every round until their arrival would move one more request
/// there.
fn listed<'a>(tickets: &'a Tickets, fleet: &Fleet, by: &Rebalancing) -> Vec<Listed<'a>> {
    let every = f64::from(by.repredict_tokens.max(1));
    let mut listed = Vec::new();
    for (ticket, request) in tickets.iter() {
        let placed = &request.open;
        let entry = &placed.entry;
        let runs = entry.stage == Stage::Decoding;
        let comes = !runs && placed.segment.from_token > 0;
        if (runs || comes) && fleet.is_current(placed.at) {
            let interval = (entry.output_tokens / every).floor();
            let asked = Running {
                ticket: ticket.0,
                interval: interval as u64,
                output_tokens: interval * every,
                prompt_tokens: f64::from(request.prompt_tokens),
                expected_output_tokens: entry.expected_output_tokens,
                expected_is_limit: by.expected_is_limit,
                turn: request.kept.turn,
            };
            listed.push(Listed { ticket, request, comes, asked });
        }
    }
    listed
}
