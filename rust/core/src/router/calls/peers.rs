//! Calls about the load of peer routers.
use crate::error::CoreError;
use crate::ids::Seconds;
use crate::program::PeerPrograms;
use crate::router::listeners::Listeners;
use crate::router::listeners::message::{Load, MOST_PROGRAM_BYTES};
use crate::router::listeners::outgoing::published;
use crate::router::listeners::published::Published;
use crate::router::listeners::replicas::{Ledgers, Message};
use crate::router::router::Router;
use crate::router::state::State;
use std::sync::Arc;

impl Router {
    /// Returns the load that this router placed on each instance, for its peers. Idle instances are
    /// left out.
    pub fn share(&self, now: Seconds) -> Vec<(Arc<str>, Published)> {
        let now = self.latest.max(now);
        let State { fleet, ledger, .. } = &self.state;
        let load = published(self.listeners.admission.followed(), now);
        self.state
            .ids()
            .filter(|id| fleet.is_live(*id))
            .map(|id| (fleet.name(id).clone(), load(ledger, id)))
            .filter(|(_, load)| !load.is_nothing())
            .collect()
    }

    /// Enters this router's load and agent programs at `now` as the version `version` for its
    /// peers; versions grow from 1 on. `oldest`: oldest version that a message can still change.
    /// Takes time for the instances whose load changes, or for all if agent programs are followed.
    ///
    /// # Errors
    /// `BadValue` for a version that is not above the last one.
    pub fn enter_load(&mut self, version: u64, oldest: u64, now: Seconds) -> Result<(), CoreError> {
        let now = self.clock(now);
        let Router { state, listeners: Listeners { admission, outgoing, .. }, .. } = self;
        let all = admission.programs().is_some();
        let load = published(admission.followed(), now);
        outgoing.enter(version, oldest, all, &mut state.ledger, &state.fleet, now, load)?;
        admission.followed_mut().into_iter().for_each(|programs| programs.enter(version, oldest));
        Ok(())
    }

    /// Returns the load of the instances and the agent programs that changed since the version
    /// `base` of [`Router::enter_load`]; `None`: of all that have load, and all programs.
    pub fn load_since(&self, base: Option<u64>, now: Seconds) -> Load {
        let programs = self.programs_since(base, MOST_PROGRAM_BYTES, now);
        Load { programs, ..self.instances_since(base, now) }
    }

    /// Returns the load of [`Router::load_since`] without its programs.
    pub fn instances_since(&self, base: Option<u64>, now: Seconds) -> Load {
        let (State { fleet, ledger, .. }, now) = (&self.state, self.latest.max(now));
        let instances = self.listeners.outgoing.since(base, ledger, fleet, now);
        Load { instances, programs: PeerPrograms::default() }
    }

    /// Returns the programs of [`Router::load_since`], and if they need more than `bytes`, those
    /// that changed last. The others follow with a later change, or with a whole load.
    pub fn programs_since(&self, base: Option<u64>, bytes: usize, now: Seconds) -> PeerPrograms {
        let now = self.latest.max(now);
        let programs = self.listeners.admission.followed();
        programs.map(|programs| programs.since(base, bytes, &self.state.fleet, now)).unwrap_or_default()
    }

    /// Returns the number of programs that changed since a version; `None`: of all.
    pub fn count_programs_since(&self, base: Option<u64>) -> usize {
        self.listeners.admission.followed().map_or(0, |programs| programs.count_since(base))
    }

    /// Replaces the published load of the router `replica` on each instance; it has no agent
    /// programs. Load on instances that are not in the fleet counts once they are.
    ///
    /// # Errors
    /// `BadValue` for an impossible number, or for more than
    /// [`MAX_REPLICAS`](crate::router::MAX_REPLICAS) replicas. Nothing has changed then.
    pub fn hear<'a>(
        &mut self,
        replica: &str,
        shares: impl IntoIterator<Item = (&'a str, impl Into<Published>)>,
        now: Seconds,
    ) -> Result<(), CoreError> {
        let loads = shares.into_iter().map(|(instance, load)| (instance, load.into()));
        let programs = &PeerPrograms::default();
        self.hear_message(Message { from: replica, version: 0, base: None, loads, programs }, now).map(drop)
    }

    /// Applies the message of a peer. Takes time for the instances in the message alone, if it has
    /// changes. Returns false if it changes another version than the last one from this peer;
    /// nothing has changed then, and the peer's next message must be full.
    ///
    /// # Errors
    /// `BadValue` for an impossible number, or for too many peers or instances. Nothing has changed
    /// then.
    pub fn hear_message<'a>(
        &mut self,
        message: Message<'_, impl IntoIterator<Item = (&'a str, Published)>>,
        now: Seconds,
    ) -> Result<bool, CoreError> {
        let now = self.clock(now);
        let Router { state, listeners: Listeners { admission, replicas, .. }, .. } = self;
        let mut ledgers = Ledgers { load: &mut state.ledger, programs: admission.followed_mut() };
        replicas.hear(&mut ledgers, &state.fleet, message, now)
    }

    /// Removes the load of peers without a message in the last `seconds`. After that, their
    /// requests count only through engine reports. Returns the peers' names.
    pub fn forget_silent(&mut self, seconds: Seconds, now: Seconds) -> Vec<Box<str>> {
        let now = self.clock(now);
        let Router { state, listeners: Listeners { admission, replicas, .. }, .. } = self;
        let mut ledgers = Ledgers { load: &mut state.ledger, programs: admission.followed_mut() };
        replicas.forget_silent(&mut ledgers, seconds, now)
    }

    /// Yields the peers whose load counts, each with the time of its last message.
    pub fn replicas(&self) -> impl Iterator<Item = (&str, Seconds)> {
        self.listeners.replicas.heard()
    }
}
