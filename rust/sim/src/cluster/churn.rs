//! Fleet changes: instances join and leave while requests arrive.
//!
//! The changes of an instance take effect in order: a join waits until the instance is gone, and
//! later changes of the instance wait for this join. Requests that arrive while no instance takes
//! any wait for the next join.
//!
//! A cold change takes effect at once: a newcomer with an empty cache takes requests, and an
//! instance that leaves takes none and ends its own. With [`RouterConfig::warm`], a newcomer first
//! fetches prefixes. An instance that leaves first sends prefixes to its successors, and then its
//! running requests move there.
//!
//! A fetch begins like a request's prefix fetch and uses the same links. When the KV arrives, the
//! target runs a request of one token, as a real engine does: the KV takes memory there, and the
//! last token is computed.
//!
//! [`RouterConfig::warm`]: lmetric_core::router::RouterConfig::warm
use super::instances::{add_instance, new_engine};
use super::{Cluster, Event, State, bad};
use crate::engine::{Engine, Prompt, Request};
use crate::pool::Held;
use crate::transfer::Load;
use lmetric_core::CoreError;
use lmetric_core::fleet::Role;
use lmetric_core::ids::{Seconds, Slot};
use lmetric_core::warm::{Fetch, Warming};

/// Seconds between two looks at an instance that leaves.
const LOOK_SECONDS: Seconds = 0.25;

/// A change of the fleet. An instance whose first change is a join is absent until then.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FleetChange {
    /// Time of the change.
    pub at_seconds: Seconds,
    /// The instance.
    pub instance: u32,
    /// Whether it joins; else it leaves.
    pub joins: bool,
}

/// The outcome of a change.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ChangeRecord {
    /// The change.
    pub change: FleetChange,
    /// Time at which it took requests, or at which it was gone; NaN: not before the end of the run.
    pub done_seconds: Seconds,
    /// Fetches of prefixes, and tokens that arrived.
    pub fetches: u64,
    /// Tokens that arrived.
    pub fetched_tokens: u64,
    /// Running requests whose move began.
    pub moves: u64,
}

/// Presence of an instance.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Presence {
    Absent,
    Present,
    /// It leaves; the number of the change.
    Leaving(usize),
}

/// A change whose fetches are in progress.
struct Change {
    number: usize,
    warming: Warming,
}

/// A fetch of a fleet change in progress.
struct Fetching {
    change: usize,
    /// Number of the fetch in its plan.
    number: u64,
    fetch: Fetch,
    /// Tokens that are on their way, with the tokens that the target holds before them.
    reach: u32,
    pinned: Held,
    /// Whether the source has sent it.
    sent: bool,
}

/// All fleet changes of a run.
pub(super) struct Churn {
    pub presence: Vec<Presence>,
    pub records: Vec<ChangeRecord>,
    /// Engines of instances that have left.
    pub retired: Vec<Engine>,
    changes: Vec<Change>,
    /// Whether each change has taken effect.
    begun: Vec<bool>,
    /// Requests that arrived while no instance took any.
    pub held: Vec<u32>,
    /// By the number in the ids of engine requests; `None`: ended.
    fetches: Vec<Option<Fetching>>,
}

/// Offset of the ids of engine requests that fetch prefixes for fleet changes: above all others.
const FETCH: u64 = 1 << 33;

/// Returns the number of a fetch for a fleet change, if this is the id of one.
pub(super) fn fetch_of(id: u64) -> Option<usize> {
    id.checked_sub(FETCH).map(|number| number as usize)
}

impl Churn {
    /// Checks the changes of a fleet of `instances` instances.
    pub fn new(changes: &[FleetChange], instances: usize, roles: &[Role]) -> Result<Churn, CoreError> {
        let mut presence = vec![None; instances];
        if !changes.is_empty() && roles.iter().any(|role| *role != Role::Both) {
            return bad("fleet changes", "a fleet with roles", "instances of the role both");
        }
        let mut last = 0.0;
        for change in changes {
            let FleetChange { at_seconds, instance, joins } = *change;
            if !(at_seconds >= last && at_seconds <= 1e11) {
                return bad(
                    "fleet changes",
                    format!("a change at {at_seconds} s"),
                    "changes in order of time",
                );
            }
            last = at_seconds;
            let Some(there) = presence.get_mut(instance as usize) else {
                return bad("fleet changes: instance", instance, format!("0 to {}", instances - 1));
            };
            if *there == Some(joins) {
                let what = if joins { "joins" } else { "leaves" };
                return bad(
                    "fleet changes",
                    format!("instance {instance} {what} twice"),
                    "one after the other",
                );
            }
            *there = Some(joins);
        }
        let first = |i: usize| changes.iter().find(|change| change.instance as usize == i);
        let presence: Vec<Presence> = (0..instances)
            .map(|i| match first(i) {
                Some(change) if change.joins => Presence::Absent,
                _ => Presence::Present,
            })
            .collect();
        let mut there: Vec<bool> = presence.iter().map(|one| *one == Presence::Present).collect();
        for change in changes {
            there[change.instance as usize] = change.joins;
            if !there.contains(&true) {
                let got = format!("no instance after {} s", change.at_seconds);
                return bad("fleet changes", got, "at least one instance at any time");
            }
        }
        let record = |change: &FleetChange| ChangeRecord {
            change: *change,
            done_seconds: f64::NAN,
            fetches: 0,
            fetched_tokens: 0,
            moves: 0,
        };
        Ok(Churn {
            presence,
            records: changes.iter().map(record).collect(),
            retired: Vec::new(),
            changes: Vec::new(),
            begun: vec![false; changes.len()],
            held: Vec::new(),
            fetches: Vec::new(),
        })
    }

    /// Whether some instance takes requests.
    pub fn any_present(&self) -> bool {
        self.presence.contains(&Presence::Present)
    }

    /// Whether a change waits for an earlier change of its instance.
    fn waits(&self, number: usize) -> bool {
        let instance = self.records[number].change.instance;
        (0..number).any(|i| !self.begun[i] && self.records[i].change.instance == instance)
    }

    /// Returns the next change of the same instance, if its time has passed.
    fn late(&self, number: usize, now: Seconds) -> Option<usize> {
        let instance = self.records[number].change.instance;
        let next = (number + 1..self.records.len()).find(|i| self.records[*i].change.instance == instance);
        next.filter(|next| self.records[*next].change.at_seconds < now)
    }

    /// Whether a fetch still needs an instance.
    fn uses(&self, instance: usize) -> bool {
        self.fetches.iter().flatten().any(|each| {
            (each.fetch.source.slot().index() == instance && !each.sent)
                || each.fetch.target.slot().index() == instance
        })
    }
}

impl Cluster<'_> {
    /// Makes the instances that join later unavailable, and schedules the changes.
    pub(super) fn schedule_changes(&mut self) -> Result<(), CoreError> {
        for instance in 0..self.engines.len() {
            if self.churn.presence[instance] == Presence::Absent {
                let id = Slot(instance as u32);
                for observer in self.routers.each() {
                    observer.router.fleet_mut().set_healthy(id, false)?;
                }
            }
        }
        for (number, change) in self.config.changes.iter().enumerate() {
            self.at(change.at_seconds, Event::FleetChange { number: number as u32 });
        }
        Ok(())
    }

    /// Begins a change.
    pub(super) fn begin_change(&mut self, number: usize) -> Result<(), CoreError> {
        let FleetChange { instance, joins, .. } = self.churn.records[number].change;
        let id = Slot(instance);
        let (now, warm) = (self.now, self.config.router.warm.is_some());
        if self.churn.waits(number) {
            return Ok(()); // the earlier change begins it
        }
        self.routers.catch_up_all(&self.engines, now)?;
        if joins && self.churn.presence[instance as usize] != Presence::Absent {
            // The old engine has not left yet.
            self.at(now + LOOK_SECONDS, Event::FleetChange { number: number as u32 });
            return Ok(());
        }
        self.churn.begun[number] = true;
        if let Some(next) = self.churn.late(number, now) {
            self.at(now, Event::FleetChange { number: next as u32 });
        }
        let mut plan = None; // of the first router
        for observer in self.routers.each() {
            let router = &mut observer.router;
            if joins {
                router.fleet_mut().set_healthy(id, true)?;
            }
            let made = match (warm, joins) {
                (true, true) => Some(router.begin_join(id, now)?),
                (true, false) => Some(router.begin_leave(id, now)?),
                (false, true) => None,
                (false, false) => {
                    router.fleet_mut().set_draining(id, true)?;
                    None
                }
            };
            plan = plan.or(made);
        }
        self.churn.presence[instance as usize] =
            if joins { Presence::Present } else { Presence::Leaving(number) };
        if !joins {
            // Fetches of earlier changes from or to it.
            self.churn.changes.iter_mut().for_each(|change| change.warming.forget(id));
            self.at(now, Event::Leaves { instance });
        } else {
            for request in std::mem::take(&mut self.churn.held) {
                self.at(now, Event::Arrival { request });
            }
            if !warm {
                self.churn.records[number].done_seconds = now;
            }
        }
        if let Some(warming) = plan {
            self.churn.changes.push(Change { number, warming });
            self.continue_change(number)?;
        }
        Ok(())
    }

    /// Whether a change that is still to come may let an instance take requests.
    pub(super) fn join_to_come(&self) -> bool {
        self.churn.records.iter().zip(&self.churn.begun).any(|(record, begun)| {
            let FleetChange { instance, joins, .. } = record.change;
            !begun && joins && !self.engines[instance as usize].stalled()
        })
    }

    /// Begins the fetches of a change that may begin now, and ends the change after the last one.
    pub(super) fn continue_change(&mut self, number: usize) -> Result<(), CoreError> {
        let now = self.now;
        let Some(place) = self.churn.changes.iter().position(|change| change.number == number) else {
            return Ok(());
        };
        while let Some((fetch_number, fetch)) =
            self.churn.changes[place].warming.begin(self.routers.fleet(), now)
        {
            self.ask_for_prefix(number, fetch_number, fetch);
        }
        let warming = &self.churn.changes[place].warming;
        if !warming.is_over(now) {
            if let Some(at) = warming.wakes(now) {
                self.at(at, Event::ContinueChange { number: number as u32 });
            }
            return Ok(());
        }
        let (fetches, fetched_tokens) = warming.fetched();
        self.churn.changes.remove(place);
        let record = &mut self.churn.records[number];
        (record.fetches, record.fetched_tokens) = (fetches, fetched_tokens);
        let FleetChange { instance, joins, .. } = record.change;
        if joins {
            record.done_seconds = now;
            for observer in self.routers.each() {
                observer.router.end_warming(Slot(instance))?;
            }
        }
        Ok(())
    }

    fn ask_for_prefix(&mut self, change: usize, number: u64, fetch: Fetch) {
        let source = fetch.source.slot().index();
        let waits = self.config.fetching.waits;
        let begins = if waits { self.present_step_ends(source) } else { self.now };
        self.hold_for_fetch(source);
        let index = self.churn.fetches.len() as u32;
        let fetching = Fetching { change, number, fetch, reach: 0, pinned: Held::default(), sent: false };
        self.churn.fetches.push(Some(fetching));
        self.at(begins, Event::PrefixBegins { fetch: index });
    }

    /// Sends the tokens that the source still holds and the target does not.
    pub(super) fn begin_prefix(&mut self, index: usize) -> Result<(), CoreError> {
        let Some(mut fetching) = self.churn.fetches[index].take() else { return Ok(()) };
        let (source, target) = (fetching.fetch.source.slot().index(), fetching.fetch.target.slot().index());
        let there = |cluster: &Self, instance: usize| cluster.churn.presence[instance] != Presence::Absent;
        if !there(self, source) || !there(self, target) {
            return self.end_prefix(fetching, 0);
        }
        let (chain, tokens) = (&fetching.fetch.chain, fetching.fetch.tokens);
        // One more token: an engine never finds the last token of a prompt.
        let held = self.engines[source].hit_tokens(chain, tokens + 1).min(tokens);
        let own = self.engines[target].hit_tokens(chain, tokens + 1).min(tokens);
        if held <= own {
            return self.end_prefix(fetching, 0);
        }
        fetching.reach = held;
        fetching.pinned = self.engines[source].use_prefix(chain, held);
        if !self.config.fetching.pinned {
            self.engines[source].release_prefix(&mut fetching.pinned);
        }
        let load = Load { from: source, to: target, tokens: held - own, began: None, ended: self.now };
        let arrives = self.links.carry(load);
        self.churn.fetches[index] = Some(fetching);
        self.at(arrives, Event::PrefixArrives { fetch: index as u32 });
        Ok(())
    }

    /// Puts the request of one token that takes the KV into the target's queue.
    pub(super) fn prefix_arrives(&mut self, index: usize) -> Result<(), CoreError> {
        let Some(mut fetching) = self.churn.fetches[index].take() else { return Ok(()) };
        let (source, target) = (fetching.fetch.source.slot().index(), fetching.fetch.target.slot().index());
        if !fetching.pinned.is_empty() {
            self.engines[source].release_prefix(&mut fetching.pinned);
            if self.instances[source].state == State::Idle {
                self.free(source); // requests there may have waited for these blocks
            }
        }
        if self.churn.presence[target] == Presence::Absent {
            return self.end_prefix(fetching, 0);
        }
        fetching.sent = true;
        let block = self.workload.shape.block_tokens;
        let chain = fetching.fetch.chain[..(fetching.reach / block) as usize].to_vec();
        let asked = Request {
            id: FETCH + index as u64,
            prompt: Prompt::Chain { hashes: &chain, tokens: fetching.reach + 1 },
            output_tokens: 1,
            think_tokens: 0,
            priority: 0,
            salt: None,
            report_cached: false,
            fetched_tokens: fetching.reach,
        };
        self.churn.fetches[index] = Some(fetching);
        self.put(&asked, target)
    }

    /// Ends a fetch whose request has ended.
    pub(super) fn prefix_there(&mut self, index: usize) -> Result<(), CoreError> {
        match self.churn.fetches[index].take() {
            Some(fetching) => {
                let tokens = fetching.reach;
                self.end_prefix(fetching, tokens)
            }
            None => Ok(()),
        }
    }

    fn end_prefix(&mut self, fetching: Fetching, tokens: u32) -> Result<(), CoreError> {
        if tokens > 0 {
            for observer in self.routers.each() {
                observer.router.prefix_fetched(&fetching.fetch, tokens);
            }
        }
        let change = self.churn.changes.iter_mut().find(|change| change.number == fetching.change);
        if let Some(change) = change {
            change.warming.ended(fetching.number, tokens, self.now);
        }
        self.at(self.now, Event::ContinueChange { number: fetching.change as u32 });
        Ok(())
    }

    /// Looks at an instance that leaves: moves its running requests once its prefixes are sent, and
    /// removes it when it is idle.
    pub(super) fn leave_fleet(&mut self, instance: usize) -> Result<(), CoreError> {
        let Presence::Leaving(number) = self.churn.presence[instance] else { return Ok(()) };
        let id = Slot(instance as u32);
        let fetches = self.churn.changes.iter().any(|change| change.number == number);
        if self.config.router.warm.is_some() && !fetches {
            let mut moves = Vec::new();
            for observer in self.routers.each() {
                observer.catch_up_tokens(&self.engines, self.now)?;
                let named = observer.router.moves_from(id);
                moves.extend(named.iter().map(|(ticket, to)| (observer.request_of(*ticket), *to)));
            }
            for (request, to) in moves {
                let Some(request) = request else { continue };
                let began = self.begin_move(request as usize, to)?;
                self.churn.records[number].moves += u64::from(began);
            }
        }
        let placed: usize = self.routers.each().map(|observer| observer.router.in_flight_on(id)).sum();
        let engine = &self.engines[instance];
        let idle = placed == 0
            && !fetches
            && engine.running() == 0
            && engine.waiting() == 0
            && self.instances[instance].state == State::Idle
            && !self.churn.uses(instance)
            && !self.fetches.values().any(|fetch| fetch.fetch.holder == id)
            && self.links.sends_until(instance) <= self.now;
        if !idle {
            self.at(self.now + LOOK_SECONDS, Event::Leaves { instance: id.0 });
            return Ok(());
        }
        self.churn.records[number].done_seconds = self.now;
        self.churn.presence[instance] = Presence::Absent;
        let fresh = new_engine(self.config, instance)?;
        self.churn.retired.push(std::mem::replace(&mut self.engines[instance], fresh));
        self.instances[instance].version += 1;
        self.count_queue(instance);
        self.routers.forget(instance);
        let config = self.config;
        for observer in self.routers.each() {
            observer.forget(instance);
            let router = &mut observer.router;
            router.remove_instance(&format!("engine-{instance}"))?;
            let same = add_instance(router, config, instance)?;
            if same != id {
                return bad("fleet changes", format!("instance {instance} in another slot"), "its own slot");
            }
            router.fleet_mut().set_healthy(id, false)?;
        }
        Ok(())
    }
}
