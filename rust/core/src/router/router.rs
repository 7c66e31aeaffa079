//! The [`Router`] type: construction, instances and read access.
use super::caches::SharedCaches;
use super::context::DecisionContext;
use super::lifecycle::Lifecycle;
use super::listeners::workers::Workers;
use super::listeners::{Listener, Listeners};
use super::requests::Requests;
use super::settings::RouterConfig;
use super::state::{State, check_cache_blocks};
use crate::error::CoreError;
use crate::fleet::{Fleet, Member, Role};
use crate::ids::{Seconds, Slot};
use crate::policy::{Fallbacks, Policy};

/// Upper bound of plausible times. Larger values and NaN are errors of the caller and are ignored.
const FAR: Seconds = 1e12;

/// A router: decides, places and follows requests. Each pool has one router.
pub struct Router {
    /// State that decisions depend on.
    pub(super) state: State,
    /// Buffers that a decision writes while it is planned.
    pub(super) context: DecisionContext,
    /// Requests in flight, and records of all requests.
    pub(super) requests: Requests,
    /// Features that follow what the core does.
    pub(super) listeners: Listeners,
    /// The load of the other workers of this server, if there are any.
    pub(super) workers: Option<Box<Workers>>,
    /// Fallbacks of policies that were replaced.
    pub(super) fallbacks: Fallbacks,
    pub(super) latest: Seconds,
    /// Calls that may have changed what a decision reads.
    pub(super) calls: u64,
}

impl Router {
    /// Creates an empty router that does not split requests ([`Router::set_split`]). Follow-up
    /// segments go to the instance with the fewest requests ([`Router::set_decode_policy`]).
    ///
    /// # Errors
    /// `BadValue` for a setting out of its range.
    pub fn new(policy: Box<dyn Policy>, config: RouterConfig) -> Result<Router, CoreError> {
        Ok(Router {
            context: DecisionContext::new(config.seed),
            workers: None,
            requests: Requests::new(config.record_bytes),
            listeners: Listeners::new(&config)?,
            fallbacks: Fallbacks::default(),
            latest: 0.0,
            calls: 0,
            state: State::new(policy, config)?,
        })
    }

    /// Adds an instance. `cache_blocks`: blocks in its KV cache, if known; bounds its entries in
    /// the KV index.
    ///
    /// # Errors
    /// `BadValue` if the name is taken or empty, if its cache has no block, or if the fleet is
    /// full.
    pub fn add_instance(
        &mut self,
        name: &str,
        role: Role,
        cache_blocks: Option<u32>,
    ) -> Result<Slot, CoreError> {
        check_cache_blocks(name, cache_blocks)?;
        let id = self.state.fleet.add(name, role)?;
        self.change(Member::Added { id, cache_blocks });
        self.lifecycle(self.latest).end_lost_fetches()?;
        Ok(id)
    }

    /// Removes an instance. Its open tickets stay valid, but their events no longer change the
    /// ledger.
    ///
    /// # Errors
    /// `UnknownName`.
    pub fn remove_instance(&mut self, name: &str) -> Result<(), CoreError> {
        let id = self.state.fleet.find(name)?;
        self.state.fleet.remove(id);
        self.change(Member::Removed(id));
        Ok(())
    }

    /// Passes a change of the fleet on to everything that keeps data of instances.
    fn change(&mut self, member: Member) {
        self.calls += 1;
        self.state.member(member);
        self.context.member(member, self.state.fleet.slots());
        self.listeners.member(member, &self.state.fleet);
        if let Some(workers) = &mut self.workers {
            workers.member(member, &self.state.fleet);
        }
    }

    /// Counts the load that other workers have published since the last call.
    #[inline]
    pub(super) fn read_workers(&mut self, now: Seconds) {
        if let Some(workers) = &mut self.workers {
            workers.read(&mut self.listeners.replicas, &mut self.state.ledger, now);
            self.listeners.admission.follow(now);
        }
    }

    /// Returns the instances.
    pub fn fleet(&self) -> &Fleet {
        &self.state.fleet
    }

    /// Returns the instances, for changes of health or draining.
    pub fn fleet_mut(&mut self) -> &mut Fleet {
        self.calls += 1;
        &mut self.state.fleet
    }

    /// Returns the engines' caches, which have a lock of their own.
    pub fn caches(&self) -> &SharedCaches {
        &self.state.caches
    }

    /// Returns a time that never decreases. Callers may pass earlier times: a request may be timed
    /// before its body is read.
    pub(super) fn clock(&mut self, now: Seconds) -> Seconds {
        self.calls += 1;
        if now.abs() < FAR {
            self.latest = self.latest.max(now);
        }
        self.latest
    }

    /// Returns the lifecycle of requests at `now`.
    pub(super) fn lifecycle(&mut self, now: Seconds) -> Lifecycle<'_> {
        let now = self.clock(now);
        let Router { state, context, requests, listeners, .. } = self;
        Lifecycle { state, context, requests, listeners, now }
    }
}
