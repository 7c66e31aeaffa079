//! Warm fleet changes as a listener ([`crate::warm`]): each placed prompt is remembered. From them,
//! prefix fetches are planned for instances that join or leave. The running requests of an instance
//! that leaves get targets. The caller makes the fetches and the moves.
use super::listener::{Listener, Placement};
use crate::error::CoreError;
use crate::ids::{Seconds, Slot};
use crate::indicators::Indicator;
use crate::kv::predictions::Prediction;
use crate::plan::Cuts;
use crate::record::DecisionRecord;
use crate::router::ledger::Stage;
use crate::router::settings::IndexFeed;
use crate::router::state::State;
use crate::router::tickets::{Kept, TicketId, TicketState, Tickets};
use crate::warm::{Demand, Fetch, Fleet, WarmConfig, Warming};

impl Listener for Demand {
    fn placed(&mut self, placement: &Placement<'_>, _: &mut DecisionRecord, _: &mut Kept) {
        let request = placement.request;
        self.note(request.chain, request.prompt_tokens, request.tokens_per_block, placement.now);
    }
}

/// Returns the last whole block of a ticket's prompt (`Router::prompt_key`).
pub fn prompt_key(ticket: &TicketState) -> Option<u64> {
    Demand::whole(&ticket.chain, ticket.prompt_tokens, ticket.tokens_per_block).last().copied()
}

/// Returns the settings of warm fleet changes.
///
/// # Errors
/// `BadValue` if fleet changes are cold.
pub fn config(state: &State) -> Result<WarmConfig, CoreError> {
    state.config.warm.ok_or_else(|| CoreError::BadValue {
        what: "fleet change".into(),
        got: "a warm one".into(),
        expected: "a cold one: the router was made without settings of warm changes".into(),
    })
}

/// Records that a fetch of a fleet change has brought `tokens` (`Router::prefix_fetched`).
pub fn fetched(state: &mut State, fetch: &Fetch, tokens: u32) {
    let Some(id) = state.fleet.current(fetch.target).filter(|_| fetch.tokens > 0) else { return };
    if state.instances[id.index()].index_feed == IndexFeed::Approximate {
        let share = f64::from(tokens.min(fetch.tokens)) / f64::from(fetch.tokens);
        let blocks = (fetch.chain.len() as f64 * share) as usize;
        state.caches.predict(Prediction::Holds { id, hit_blocks: 0 }, &fetch.chain[..blocks]);
        state.predicted = true;
    }
}

/// Returns the running requests of an instance that can move, each with its target
/// (`Router::moves_from`).
pub fn moves_from(state: &State, tickets: &Tickets, id: Slot) -> Vec<(TicketId, Slot)> {
    let able = |id: Slot| state.instances[id.index()].cuts >= Cuts::Output;
    let targets: Vec<Slot> =
        state.ids().filter(|to| *to != id && state.takes_over(*to) && able(*to)).collect();
    if targets.is_empty() || state.fleet.check(id).is_err() || !able(id) {
        return Vec::new();
    }
    let mut requests: Vec<f64> = state.ledger.get(Indicator::Bs).to_vec();
    let mut hits = vec![0; state.fleet.slots()];
    let mut moves = Vec::new();
    let caches = state.caches.read();
    for (ticket, request) in tickets.iter() {
        let placed = &request.open;
        let runs = state.fleet.current(placed.at) == Some(id) && placed.entry.stage == Stage::Decoding;
        if !runs
            || !request.may_be_cut
            || !request.later.is_empty()
            || placed.segment.to_token.is_some()
            || request.instances.is_some()
        {
            continue;
        }
        caches.gpu().match_prefix(&request.chain, &mut hits);
        let holder = targets.iter().copied().max_by_key(|to| hits[to.index()]);
        let holder = holder.filter(|to| 2 * hits[to.index()] as usize >= request.chain.len().max(1));
        let least = || {
            let load = |id: &Slot| requests[id.index()];
            targets.iter().copied().min_by(|a, b| load(a).total_cmp(&load(b)))
        };
        if let Some(to) = holder.or_else(least) {
            requests[to.index()] += 1.0;
            moves.push((ticket, to));
        }
    }
    moves
}

/// Plans the fetches for an instance that joins or leaves; `by` is the plan of that change.
///
/// # Errors
/// `BadValue` if fleet changes are cold.
pub fn plan_change(
    demand: Option<&Demand>,
    state: &State,
    id: Slot,
    now: Seconds,
    by: impl Fn(&Demand, &Fleet<'_>, Slot, &WarmConfig, Seconds) -> Vec<Fetch>,
) -> Result<Warming, CoreError> {
    let config = config(state)?;
    let Some(demand) = demand else {
        return Ok(Warming::new(Vec::new(), config, now));
    };
    let able = |id: Slot| state.instances[id.index()].cuts > Cuts::Nowhere;
    let ready: Vec<bool> =
        state.ids().map(|other| state.fleet.eligible()[other.index()] && able(other)).collect();
    let fetching = |tokens: f64| match &state.fetches {
        Some(fetches) => fetches.at(now).cost.seconds(tokens),
        None => config.fixed_seconds + config.seconds_per_token * tokens,
    };
    let caches = state.caches.read();
    let fleet = Fleet {
        index: caches.gpu(),
        id_of: &|id| state.fleet.id_of(id),
        ready: &ready,
        cache_blocks: &|id| state.instances[id.index()].cache_blocks,
        saved_seconds: &|id, tokens| {
            state.computing_seconds(id.index(), 0.0, tokens, &mut None) - fetching(tokens)
        },
    };
    let planned = if able(id) { by(demand, &fleet, id, &config, now) } else { Vec::new() };
    Ok(Warming::new(planned, config, now))
}
