//! Routers side by side. Each request is drawn for one router, and only that router knows it. All
//! routers receive the engines' signals. From time to time they exchange their load per instance,
//! or never.
use crate::engine::Engine;
use crate::events::KvLog;
use crate::signals::{Observer, Signals};
use lmetric_core::CoreError;
use lmetric_core::fleet::Fleet;
use lmetric_core::ids::Seconds;
use lmetric_core::policy::Policy;
use lmetric_core::router::{Load, Message, Router};
use std::collections::VecDeque;
use xxhash_rust::xxh3::xxh3_64_with_seed;

/// The policies of a router.
pub struct Policies {
    /// Policy that chooses where a request runs.
    pub place: Box<dyn Policy>,
    /// Policy that chooses where a request decodes if another instance prefills it; none: the
    /// router's default.
    pub decode: Option<Box<dyn Policy>>,
}

impl From<Box<dyn Policy>> for Policies {
    fn from(place: Box<dyn Policy>) -> Policies {
        Policies { place, decode: None }
    }
}

/// Delayed changes of a cache.
struct Late {
    due: Seconds,
    instance: usize,
    log: KvLog,
}

/// All routers of a cluster; at least one.
pub(crate) struct Routers {
    all: Vec<Observer>,
    seed: u64,
    event_delay_seconds: Seconds,
    late: VecDeque<Late>,
    spare: Vec<KvLog>,
    /// Version of the load of each router.
    versions: Vec<u64>,
}

impl Routers {
    /// Makes the routers. `seed` draws the router of each request.
    pub fn new(routers: Vec<Router>, signals: Signals, requests: usize, seed: u64) -> Routers {
        Routers {
            versions: vec![0; routers.len()],
            all: routers.into_iter().map(|router| Observer::new(router, signals, requests)).collect(),
            seed,
            event_delay_seconds: signals.event_delay_seconds,
            late: VecDeque::new(),
            spare: Vec::new(),
        }
    }

    /// Returns the number of a request's router.
    pub fn number_of(&self, request: u64) -> usize {
        let routers = self.all.len() as u64;
        let drawn = if routers == 1 { 0 } else { xxh3_64_with_seed(&request.to_le_bytes(), self.seed) };
        (drawn % routers) as usize
    }

    /// Returns the router of a request.
    pub fn of(&mut self, request: u64) -> &mut Observer {
        let number = self.number_of(request);
        &mut self.all[number]
    }

    /// Returns the instances, which all routers have alike.
    pub fn fleet(&self) -> &Fleet {
        self.all[0].router.fleet()
    }

    /// Iterates over all routers.
    pub fn each(&mut self) -> impl Iterator<Item = &mut Observer> {
        self.all.iter_mut()
    }

    /// Returns the routers after the run.
    pub fn into_routers(self) -> Vec<Router> {
        self.all.into_iter().map(|observer| observer.router).collect()
    }

    /// Brings a router up to date before the decision on a request: applies due signals, and reads
    /// the signals that only decisions need.
    pub fn catch_up(
        &mut self,
        request: u64,
        engines: &[Engine],
        now: Seconds,
    ) -> Result<&mut Observer, CoreError> {
        self.hear(now);
        let observer = self.of(request);
        observer.catch_up(engines, now)?;
        Ok(observer)
    }

    /// Brings all routers up to date before their periodic work.
    pub fn catch_up_all(&mut self, engines: &[Engine], now: Seconds) -> Result<(), CoreError> {
        self.hear(now);
        self.all.iter_mut().try_for_each(|observer| observer.catch_up(engines, now))
    }

    /// Returns the number of routers.
    pub fn len(&self) -> usize {
        self.all.len()
    }

    /// Exports one router's load on each instance to the other routers.
    pub fn share(&mut self, router: usize, engines: &[Engine], now: Seconds) -> Result<(), CoreError> {
        self.all[router].catch_up(engines, now)?;
        let known = self.versions[router];
        let (name, version, base) = (router.to_string(), known + 1, Some(known).filter(|known| *known > 0));
        self.versions[router] = version;
        let sender = &mut self.all[router].router;
        sender.enter_load(version, known, now)?;
        let Load { instances, programs } = &sender.load_since(base, now);
        for (_, other) in self.all.iter_mut().enumerate().filter(|(i, _)| *i != router) {
            let loads = instances.iter().map(|(instance, load)| (&**instance, *load));
            let message = Message { from: &name, version, base, loads, programs };
            other.router.hear_message(message, now)?;
        }
        Ok(())
    }

    /// Passes an engine's load report to all routers.
    pub fn report(&mut self, instance: usize, engine: &Engine, now: Seconds) -> Result<(), CoreError> {
        self.all.iter_mut().try_for_each(|observer| observer.report(instance, engine, now))
    }

    /// Passes the changes of an instance's cache since the last call to all routers.
    pub fn cache_changed(&mut self, instance: usize, log: &mut KvLog, now: Seconds) {
        if log.events.is_empty() {
            return;
        }
        if self.event_delay_seconds == 0.0 {
            self.all.iter_mut().for_each(|observer| observer.apply(instance, log));
            log.clear();
        } else {
            let empty = self.spare.pop().unwrap_or_else(|| KvLog { on: true, ..KvLog::default() });
            let due = now + self.event_delay_seconds;
            self.late.push_back(Late { due, instance, log: std::mem::replace(log, empty) });
        }
    }

    /// Drops the late changes of an instance's cache: its engine is gone.
    pub fn forget(&mut self, instance: usize) {
        self.late.retain(|late| late.instance != instance);
    }

    /// Applies the changes of caches that are due.
    fn hear(&mut self, now: Seconds) {
        while self.late.front().is_some_and(|late| late.due <= now) {
            let Some(mut late) = self.late.pop_front() else { break };
            self.all.iter_mut().for_each(|observer| observer.apply(late.instance, &late.log));
            late.log.clear();
            self.spare.push(late.log);
        }
    }
}
