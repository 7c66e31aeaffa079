//! Routers side by side: each request comes to one of them, drawn for it, and only that one knows of it. What engines say all of them hear, and now and then they tell
//! each other what they have where, or nothing.
use crate::engine::Engine;
use crate::events::KvLog;
use crate::signals::{Observer, Signals};
use lmetric_core::CoreError;
use lmetric_core::ids::Seconds;
use lmetric_core::policy::Policy;
use lmetric_core::router::Router;
use std::collections::VecDeque;
use xxhash_rust::xxh3::xxh3_64_with_seed;

/// What a router decides by.
pub struct Policies {
    /// Where a request runs.
    pub place: Box<dyn Policy>,
    /// Where it decodes, if it is prefilled elsewhere; none: the router's own choice.
    pub decode: Option<Box<dyn Policy>>,
}

impl From<Box<dyn Policy>> for Policies {
    fn from(place: Box<dyn Policy>) -> Policies {
        Policies { place, decode: None }
    }
}

/// Changes of a cache on their way.
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
}

impl Routers {
    /// `seed` draws which router a request comes to.
    pub fn new(routers: Vec<Router>, signals: Signals, requests: usize, seed: u64) -> Routers {
        Routers {
            all: routers.into_iter().map(|router| Observer::new(router, signals, requests)).collect(),
            seed,
            event_delay_seconds: signals.event_delay_seconds,
            late: VecDeque::new(),
            spare: Vec::new(),
        }
    }

    /// The one that a request comes to.
    pub fn of(&mut self, request: u64) -> &mut Observer {
        let routers = self.all.len() as u64;
        let drawn = if routers == 1 { 0 } else { xxh3_64_with_seed(&request.to_le_bytes(), self.seed) };
        &mut self.all[(drawn % routers) as usize]
    }

    /// Each of them.
    pub fn each(&mut self) -> impl Iterator<Item = &mut Observer> {
        self.all.iter_mut()
    }

    /// As they are left.
    pub fn into_routers(self) -> Vec<Router> {
        self.all.into_iter().map(|observer| observer.router).collect()
    }

    /// Before the decision on a request: what is due by now, and what only a decision asks for.
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

    /// The same before all of them look at what they do periodically.
    pub fn catch_up_all(&mut self, engines: &[Engine], now: Seconds) -> Result<(), CoreError> {
        self.hear(now);
        self.all.iter_mut().try_for_each(|observer| observer.catch_up(engines, now))
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.all.len()
    }

    /// One of them tells the others what it has on each instance.
    pub fn share(&mut self, router: usize, engines: &[Engine], now: Seconds) -> Result<(), CoreError> {
        self.all[router].catch_up(engines, now)?;
        let (name, told) = (router.to_string(), self.all[router].router.share(now));
        for (_, other) in self.all.iter_mut().enumerate().filter(|(i, _)| *i != router) {
            other.router.hear(&name, told.iter().map(|(instance, share)| (&**instance, *share)), now)?;
        }
        Ok(())
    }

    /// An engine's load report.
    pub fn report(&mut self, instance: usize, engine: &Engine, now: Seconds) -> Result<(), CoreError> {
        self.all.iter_mut().try_for_each(|observer| observer.report(instance, engine, now))
    }

    /// The changes of an instance's cache since the last call.
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

    /// Changes of caches that are due.
    fn hear(&mut self, now: Seconds) {
        while self.late.front().is_some_and(|late| late.due <= now) {
            let Some(mut late) = self.late.pop_front() else { break };
            self.all.iter_mut().for_each(|observer| observer.apply(late.instance, &late.log));
            late.log.clear();
            self.spare.push(late.log);
        }
    }
}
