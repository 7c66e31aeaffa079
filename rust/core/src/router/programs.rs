//! Agent programs: which requests run now, and which wait until their program fits into a cache.
use super::router::Router;
use crate::error::CoreError;
use crate::ids::{InstanceId, Seconds};
use crate::kv::tiers::Tier;
use crate::program::capacity::FullCache;
use crate::program::{Arrival, Finish, ProgramConfig, ProgramMode, Programs, Released, TurnId, Verdict};
use crate::request::Request;
use std::borrow::Cow;

impl Router {
    /// Records an arriving request before its decision: finds its agent program and decides whether
    /// it runs now. The caller passes the turn in [`Request::program_turn`] to [`Router::route`]. A
    /// request that is never routed needs [`Router::drop_turn`]. Returns `None` if programs are not
    /// followed.
    ///
    /// # Errors
    /// `BadValue` for an invalid request.
    pub fn arrive(
        &mut self,
        request: &Request<'_>,
        now: Seconds,
    ) -> Result<Option<(TurnId, Verdict)>, CoreError> {
        if self.requests.programs.is_none() {
            return Ok(None);
        }
        request.check()?;
        let now = self.clock(now);
        // Before the first request, the tokens of a block are unknown.
        let slots = self.state.fleet.slots();
        if self.programs().is_some_and(|all| all.instances().len() < slots || all.tokens_per_block() <= 0.0) {
            self.update_capacities(request.tokens_per_block, now);
        }
        let Some(programs) = &mut self.requests.programs else { return Ok(None) };
        let arrival = Arrival {
            chain: request.chain,
            prompt_tokens: request.prompt_tokens,
            tokens_per_block: request.tokens_per_block,
            session: request.session.filter(|_| programs.config().sessions),
            tenant: request.tenant.id,
            weight: request.tenant.weight,
            last: request.session_final,
        };
        Ok(Some(programs.arrive(&arrival, now)))
    }

    /// Returns a request with its turn of a program and the turn's instance. A caller that only
    /// observes programs may route requests without [`Router::arrive`].
    pub(super) fn with_turn<'r>(
        &mut self,
        request: Cow<'r, Request<'r>>,
        now: Seconds,
    ) -> Result<Cow<'r, Request<'r>>, CoreError> {
        let Some(programs) = self.programs() else { return Ok(request) };
        if let Some(turn) = request.program_turn {
            let home = programs.assigned(turn);
            return Ok(Cow::Owned(Request { home, ..request.into_owned() }));
        }
        if programs.config().mode == ProgramMode::Admit {
            return Err(CoreError::BadValue {
                what: "turn".into(),
                got: "none".into(),
                expected: "the turn that arrive() returned, because the router admits programs".into(),
            });
        }
        let program_turn = self.arrive(&request, now)?.map(|(turn, _)| turn);
        // Programs are only observed: the policy chooses.
        Ok(Cow::Owned(Request { program_turn, home: None, ..request.into_owned() }))
    }

    /// Ends a turn whose request was not routed, for example because its client left.
    pub fn drop_turn(&mut self, turn: TurnId, now: Seconds) {
        let now = self.clock(now);
        if let Some(programs) = &mut self.requests.programs {
            programs.ended(turn, 0, Finish::Unknown, now);
        }
    }

    /// Runs the periodic work on programs, about twice a second and after the end of a request.
    /// Returns the held requests that may run now.
    pub fn release_programs(&mut self, now: Seconds) -> Vec<Released> {
        let now = self.clock(now);
        if self.requests.programs.is_none() {
            return Vec::new();
        }
        let tokens_per_block = self.programs().map_or(0.0, Programs::tokens_per_block);
        self.update_capacities(tokens_per_block, now);
        let Some(programs) = &mut self.requests.programs else { return Vec::new() };
        programs.tick(now);
        programs.released()
    }

    /// Passes the capacities of all instances to the programs.
    fn update_capacities(&mut self, tokens_per_block: f64, now: Seconds) {
        for slot in 0..self.state.fleet.slots() {
            let id = InstanceId(slot as u32);
            let seen = self.state.index.take_full(id);
            self.state.instances[slot].full.note(seen, now);
            let capacity = self.cached_blocks_at_most(id).map(|blocks| blocks * tokens_per_block.max(1.0));
            let available = self.state.fleet.eligible()[slot];
            if let Some(programs) = &mut self.requests.programs {
                programs.set_instance(id, capacity, available);
            }
        }
    }

    /// Returns the measured size of an instance's cache in blocks if it differs from
    /// [`Router::cache_blocks`].
    pub fn measured_cache_blocks(&self, id: InstanceId) -> Option<u32> {
        let instance = self.state.instances.get(id.index())?;
        instance.full.measured(instance.cache_blocks)
    }

    /// Forgets the measured size of an instance's cache: its engine may be another one.
    pub(super) fn forget_full(&mut self, id: InstanceId) {
        self.state.index.take_full(id);
        if let Some(instance) = self.state.instances.get_mut(id.index()) {
            instance.full = FullCache::default();
        }
    }

    /// Returns the blocks that an instance's cache holds: as reported, unless its engine removes
    /// blocks at another number; `None`: unknown. A lower tier that reports removals is full, so
    /// the number of its blocks is its capacity; one without has no limit yet.
    fn cached_blocks_at_most(&self, id: InstanceId) -> Option<f64> {
        let instance = &self.state.instances[id.index()];
        let gpu = f64::from(instance.full.blocks(instance.cache_blocks)?);
        match self.state.tiers.get(Tier::Cpu).map_or(0, |tier| tier.blocks(id)) {
            0 => Some(gpu),
            blocks if self.state.tiers.removes(Tier::Cpu, id) => Some(gpu.max(f64::from(blocks))),
            _ => None,
        }
    }

    /// Sets how programs are followed; `None`: not at all. The programs known so far are kept if
    /// programs stay on.
    ///
    /// # Errors
    /// `BadValue` for a setting out of its range.
    pub fn set_programs(&mut self, config: Option<ProgramConfig>) -> Result<(), CoreError> {
        match (&mut self.requests.programs, config) {
            (Some(programs), Some(config)) => programs.set_config(config)?,
            (programs, config) => *programs = config.map(Programs::new).transpose()?,
        }
        self.state.config.programs = config;
        Ok(())
    }

    /// Returns the agent programs, if they are followed.
    pub fn programs(&self) -> Option<&Programs> {
        self.requests.programs.as_ref()
    }
}
