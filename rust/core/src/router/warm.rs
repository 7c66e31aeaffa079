//! Warm fleet changes: plans of prefix fetches for instances that join or leave, and moves of the
//! running requests of an instance that leaves. The caller makes the fetches and the moves.
use super::caches::Prediction;
use super::ledger::Stage;
use super::router::Router;
use super::settings::IndexFeed;
use super::tickets::TicketId;
use crate::error::CoreError;
use crate::ids::{InstanceId, Seconds};
use crate::indicators::Indicator;
use crate::plan::Cuts;
use crate::warm::{Demand, Fetch, Fleet, WarmConfig, Warming, plan};

impl Router {
    /// Sets whether instances join and leave warm; `None`: cold. Remembered prompts are dropped.
    ///
    /// # Errors
    /// `BadValue` for a setting out of its range.
    pub fn set_warm(&mut self, config: Option<WarmConfig>) -> Result<(), CoreError> {
        config.map_or(Ok(()), |config| config.check())?;
        self.listeners.demand = config.as_ref().map(Demand::new);
        self.state.config.warm = config;
        Ok(())
    }

    /// Returns the prompts of recent requests, if fleet changes are warm.
    pub fn demand(&self) -> Option<&Demand> {
        self.listeners.demand.as_ref()
    }

    /// Returns the last whole block of a ticket's prompt, which names the prompt in fetches
    /// ([`Fetch::prompt`]); `None`: it has no whole block.
    ///
    /// # Errors
    /// `Ticket` if the ticket is closed.
    pub fn prompt_key(&mut self, ticket: TicketId) -> Result<Option<u64>, CoreError> {
        let state = self.requests.tickets.get(ticket)?;
        let whole = Demand::whole(&state.chain, state.prompt_tokens, state.tokens_per_block);
        Ok(whole.last().copied())
    }

    /// Begins to warm an instance that has joined: it accepts no new requests until
    /// [`Router::end_warming`]. Returns the fetches to make before.
    ///
    /// # Errors
    /// `BadValue` if fleet changes are cold or the fleet has no such slot.
    pub fn begin_join(&mut self, id: InstanceId, now: Seconds) -> Result<Warming, CoreError> {
        self.warm_config()?;
        self.state.fleet.set_warming(id, true)?;
        self.plan_change(id, now, plan::join)
    }

    /// Lets a warming instance accept requests.
    ///
    /// # Errors
    /// `BadValue` if the fleet has no such slot.
    pub fn end_warming(&mut self, id: InstanceId) -> Result<(), CoreError> {
        self.state.fleet.set_warming(id, false)
    }

    /// Lets an instance drain. Returns the fetches to make before it leaves.
    ///
    /// # Errors
    /// `BadValue` if fleet changes are cold or the fleet has no such slot.
    pub fn begin_leave(&mut self, id: InstanceId, now: Seconds) -> Result<Warming, CoreError> {
        self.warm_config()?;
        self.state.fleet.set_draining(id, true)?;
        self.plan_change(id, now, plan::leave)
    }

    /// Records that a fetch of a fleet change has brought `tokens`. An exact index gets the blocks
    /// from the engine's events. Nothing is recorded if another instance has taken the target's
    /// slot.
    pub fn prefix_fetched(&mut self, fetch: &Fetch, tokens: u32) {
        let slot = fetch.target.index();
        let Some(instance) = self.state.instances.get(slot).filter(|_| fetch.tokens > 0) else { return };
        let current = self.state.fleet.is_current(fetch.target, fetch.target_generation);
        if instance.index_feed == IndexFeed::Approximate && current {
            let share = f64::from(tokens.min(fetch.tokens)) / f64::from(fetch.tokens);
            let blocks = (fetch.chain.len() as f64 * share) as usize;
            self.state.caches.predict(Prediction::Fetched { id: fetch.target }, &fetch.chain[..blocks]);
            self.state.predicted = true;
        }
    }

    /// Returns the running requests of an instance that can move, each with its target. The target
    /// is the instance that holds most of the prompt, if that is at least half of it. Otherwise it
    /// is the instance with the fewest requests. [`Router::begin_move`] begins a move.
    pub fn moves_from(&self, id: InstanceId) -> Vec<(TicketId, InstanceId)> {
        let state = &self.state;
        let able = |id: InstanceId| state.instances[id.index()].cuts >= Cuts::Output;
        let targets: Vec<InstanceId> =
            state.ids().filter(|to| *to != id && state.takes_over(*to) && able(*to)).collect();
        if targets.is_empty() || state.fleet.check(id).is_err() || !able(id) {
            return Vec::new();
        }
        let mut requests: Vec<f64> = state.ledger.get(Indicator::Bs).to_vec();
        let mut hits = vec![0; state.fleet.slots()];
        let mut moves = Vec::new();
        let caches = state.caches.read();
        for (ticket, request) in self.requests.tickets.iter() {
            let placed = &request.open;
            let runs = placed.segment.instance == id
                && state.fleet.is_current(id, placed.instance_generation)
                && placed.entry.stage == Stage::Decoding;
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
                let load = |id: &InstanceId| requests[id.index()];
                targets.iter().copied().min_by(|a, b| load(a).total_cmp(&load(b)))
            };
            if let Some(to) = holder.or_else(least) {
                requests[to.index()] += 1.0;
                moves.push((ticket, to));
            }
        }
        moves
    }

    fn warm_config(&self) -> Result<WarmConfig, CoreError> {
        self.state.config.warm.ok_or_else(|| CoreError::BadValue {
            what: "fleet change".into(),
            got: "a warm one".into(),
            expected: "a cold one: the router was made without settings of warm changes".into(),
        })
    }

    fn plan_change(
        &self,
        id: InstanceId,
        now: Seconds,
        by: impl Fn(&Demand, &Fleet<'_>, InstanceId, &WarmConfig, Seconds) -> Vec<Fetch>,
    ) -> Result<Warming, CoreError> {
        let config = self.warm_config()?;
        let Some(demand) = &self.listeners.demand else {
            return Ok(Warming::new(Vec::new(), config, now));
        };
        let state = &self.state;
        let able = |id: InstanceId| state.instances[id.index()].cuts > Cuts::Nowhere;
        let ready: Vec<bool> =
            state.ids().map(|other| state.fleet.eligible()[other.index()] && able(other)).collect();
        let fetching = |tokens: f64| match &state.fetches {
            Some(fetches) => fetches.at(now).cost.seconds(tokens),
            None => config.fixed_seconds + config.seconds_per_token * tokens,
        };
        let caches = state.caches.read();
        let fleet = Fleet {
            index: caches.gpu(),
            generation: &|id| state.fleet.generation(id),
            ready: &ready,
            cache_blocks: &|id| state.instances[id.index()].cache_blocks,
            saved_seconds: &|id, tokens| {
                state.computing_seconds(id.index(), 0.0, tokens, &mut None) - fetching(tokens)
            },
        };
        let planned = if able(id) { by(demand, &fleet, id, &config, now) } else { Vec::new() };
        Ok(Warming::new(planned, config, now))
    }
}
