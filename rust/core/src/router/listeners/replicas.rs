//! Peer routers: each router adds the in-flight load of its peers to its own view of the instances.
//!
//! A router publishes its load on each instance, or the changes of it (`super::outgoing`). A peer
//! that receives this load (`Router::hear`) counts it like its own until the next message or a
//! timeout (`Router::forget_silent`). The caller carries the messages. Indicators about single
//! requests (`handoff_*`, `decode_pressure*`) and all learned values stay local to each router.
//! Agent programs of peers are among those of [`Followed`].
use super::listener::Listener;
use super::published::Published;
use crate::error::CoreError;
use crate::fleet::{Fleet, Member};
use crate::ids::{Seconds, Slot};
use crate::program::{Followed, PeerPrograms};
use crate::router::ledger::{Ledger, Share, Timed};
use std::collections::{BTreeMap, HashMap};

/// Maximum number of peers. More peers indicate a configuration error; the limit also bounds
/// memory.
pub const MAX_REPLICAS: usize = 64;
/// Maximum number of instances per peer that have load and are not in the fleet.
const MAX_ELSEWHERE: usize = 16_384;

/// Version of a peer whose next message must be full: no message changes it.
const NO_VERSION: u64 = u64::MAX;

/// The last published load of each peer.
#[derive(Clone, Debug, Default)]
pub struct Replicas {
    by_name: BTreeMap<Box<str>, Replica>,
    /// The load of the other workers on this machine, by worker and slot.
    by_worker: Vec<Vec<Timed>>,
    /// Sums over all peers, by slot.
    sums: Vec<Timed>,
}

#[derive(Clone, Debug, Default)]
struct Replica {
    heard: Seconds,
    version: u64,
    /// Load by slot; shorter than the fleet if the last slots have none.
    loads: Vec<Heard>,
    /// Load on instances that are not in the fleet, because routers learn of changes at different
    /// times.
    elsewhere: HashMap<Box<str>, Heard>,
    /// Whether the fleet may have an instance of `elsewhere` now.
    joined: bool,
}

/// Load on an instance, as of a time.
#[derive(Clone, Debug, Default)]
struct Heard {
    load: Published,
    at: Seconds,
}

impl Heard {
    fn share(&self, now: Seconds, ledger: &Ledger) -> Share {
        self.load.share.later(now - self.at, ledger.recent_seconds())
    }
}

/// The ledgers in which the load of peers counts.
pub struct Ledgers<'a> {
    /// Requests and tokens in flight.
    pub load: &'a mut Ledger,
    /// Working sets of agent programs, if they are followed.
    pub programs: Option<&'a mut Followed>,
}

/// A message of a peer.
pub struct Message<'a, I> {
    /// Name of the peer.
    pub from: &'a str,
    /// Version of its load.
    pub version: u64,
    /// Version that the message changes; none: it has the load of all instances.
    pub base: Option<u64>,
    /// Load by instance.
    pub loads: I,
    /// Agent programs.
    pub programs: &'a PeerPrograms,
}

impl Replicas {
    /// Returns the load of all peers on a slot.
    fn on(&self, slot: usize, ledger: &Ledger, now: Seconds) -> Share {
        let mut all = Share::default();
        self.published(slot).for_each(|heard| all.add(&heard.share(now, ledger)));
        let workers = self.by_worker.iter().filter_map(|loads| loads.get(slot));
        workers.for_each(|load| all.add(&load.now(now, ledger.recent_seconds())));
        all
    }

    /// Yields the load of each peer on a slot.
    fn published(&self, slot: usize) -> impl Iterator<Item = &Heard> {
        self.by_name.values().filter_map(move |replica| replica.loads.get(slot))
    }

    /// Replaces `old` by `new` in a slot's sum. The sum is recomputed when a peer's load drops to
    /// zero, so that rounding errors do not outlive the load that caused them.
    fn replace(&mut self, ledger: &mut Ledger, slot: usize, old: &Share, new: &Share, now: Seconds) {
        if self.sums.len() <= slot {
            self.sums.resize(slot + 1, Timed::default());
        }
        let sum = if new.is_nothing() {
            self.on(slot, ledger, now)
        } else {
            let mut sum = self.sums[slot].now(now, ledger.recent_seconds());
            if old != new {
                sum.subtract(old);
                sum.add(new);
            }
            sum
        };
        self.sums[slot] = Timed { share: sum, at: now };
        ledger.set_peers(slot, sum, now);
    }

    /// Clears a slot whose instance was removed. Its load still counts if the instance returns.
    fn clear(&mut self, id: Slot, fleet: &Fleet) {
        let slot = id.index();
        self.sums.get_mut(slot).into_iter().for_each(|sum| *sum = Timed::default());
        for replica in self.by_name.values_mut() {
            let Some(heard) = replica.loads.get_mut(slot).map(std::mem::take) else { continue };
            if !heard.load.is_nothing() && replica.elsewhere.len() < MAX_ELSEWHERE {
                replica.elsewhere.insert((&**fleet.name(id)).into(), heard);
            }
        }
        self.by_worker
            .iter_mut()
            .filter_map(|loads| loads.get_mut(slot))
            .for_each(|load| *load = Timed::default());
    }

    /// Replaces the load of another worker on a slot.
    pub fn set_worker(
        &mut self,
        ledger: &mut Ledger,
        worker: usize,
        slot: usize,
        share: Share,
        now: Seconds,
    ) {
        if self.by_worker.len() <= worker {
            self.by_worker.resize_with(worker + 1, Vec::new);
        }
        let loads = &mut self.by_worker[worker];
        if loads.len() <= slot {
            loads.resize(slot + 1, Timed::default());
        }
        let old = std::mem::replace(&mut loads[slot], Timed { share, at: now });
        if old.share != share {
            let old = old.now(now, ledger.recent_seconds());
            self.replace(ledger, slot, &old, &share, now);
        }
    }

    /// Applies a message of a peer, received at `now`. Load on instances that are not in the fleet
    /// counts once they are. Returns false if the message changes another version than the last one
    /// from this peer; nothing has changed then, and the peer's next message must be full.
    ///
    /// # Errors
    /// `BadValue` for an impossible number, or for too many peers or instances. Nothing has changed
    /// then.
    pub fn hear<'a>(
        &mut self,
        ledgers: &mut Ledgers<'_>,
        fleet: &Fleet,
        message: Message<'_, impl IntoIterator<Item = (&'a str, Published)>>,
        now: Seconds,
    ) -> Result<bool, CoreError> {
        let Message { from, version, base, loads, programs } = message;
        if ledgers.programs.as_mut().is_some_and(|programs| programs.lacks_peers()) {
            self.by_name.values_mut().for_each(|replica| replica.version = NO_VERSION);
        }
        let known = self.by_name.get(from);
        if base.is_some() && known.map(|replica| replica.version) != base {
            return Ok(false);
        }
        let loads: Vec<(&str, Published)> = loads.into_iter().collect();
        for (instance, load) in &loads {
            load.check(|| format!("on {instance} in the load of router {from}"))?;
        }
        if known.is_none() && self.by_name.len() >= MAX_REPLICAS {
            return Err(CoreError::BadValue {
                what: "peer routers".into(),
                got: format!("{from}, after {MAX_REPLICAS} others"),
                expected: format!("at most {MAX_REPLICAS}"),
            });
        }
        let kept = known.filter(|_| base.is_some()).map(|replica| &replica.elsewhere);
        let is_new = |name: &str| {
            fleet.get(name).is_none() && kept.is_none_or(|elsewhere| !elsewhere.contains_key(name))
        };
        let new = loads.iter().filter(|(name, load)| !load.is_nothing() && is_new(name)).count();
        let elsewhere = kept.map_or(0, HashMap::len) + new;
        if elsewhere > MAX_ELSEWHERE {
            return Err(CoreError::BadValue {
                what: format!("instances in the load of router {from} that this router does not have"),
                got: elsewhere.to_string(),
                expected: format!("at most {MAX_ELSEWHERE}; give all routers the same instances"),
            });
        }
        let replica = self.by_name.entry(from.into()).or_default();
        (replica.heard, replica.version) = (now, version);
        let mut ended = Vec::new();
        if base.is_none() {
            replica.elsewhere.clear();
            ended.extend(replica.loads.iter().map(|heard| !heard.load.is_nothing()));
        }
        // Before the message's own loads, which are newer.
        self.join(ledgers, fleet, from, now);
        for (instance, load) in loads {
            let Some(id) = fleet.get(instance) else {
                self.set_elsewhere(from, instance, load, now);
                continue;
            };
            ended.get_mut(id.index()).into_iter().for_each(|ended| *ended = false);
            self.set(ledgers, from, id.index(), Heard { load, at: now }, now);
        }
        for (slot, _) in ended.iter().enumerate().filter(|(_, ended)| **ended) {
            self.set(ledgers, from, slot, Heard::default(), now);
        }
        if let Some(followed) = &mut ledgers.programs {
            followed.hear(from, programs, base.is_none(), fleet, now);
        }
        Ok(true)
    }

    fn set_elsewhere(&mut self, from: &str, instance: &str, load: Published, now: Seconds) {
        let Some(replica) = self.by_name.get_mut(from) else { return };
        if load.is_nothing() {
            replica.elsewhere.remove(instance);
        } else {
            replica.elsewhere.insert(instance.into(), Heard { load, at: now });
        }
    }

    /// Counts a peer's load on instances that have joined the fleet.
    fn join(&mut self, ledgers: &mut Ledgers<'_>, fleet: &Fleet, from: &str, now: Seconds) {
        let Some(replica) = self.by_name.get_mut(from).filter(|replica| replica.joined) else { return };
        replica.joined = false;
        let joined: Vec<(usize, Heard)> = replica
            .elsewhere
            .extract_if(|name, _| fleet.get(name).is_some())
            .filter_map(|(name, heard)| Some((fleet.get(&name)?.index(), heard)))
            .collect();
        for (slot, heard) in joined {
            self.set(ledgers, from, slot, heard, now);
        }
    }

    /// Replaces a peer's load on a slot.
    fn set(&mut self, ledgers: &mut Ledgers<'_>, from: &str, slot: usize, heard: Heard, now: Seconds) {
        let Some(replica) = self.by_name.get_mut(from) else { return };
        if replica.loads.len() <= slot {
            replica.loads.resize(slot + 1, Heard::default());
        }
        let new = heard.share(now, ledgers.load);
        let old = std::mem::replace(&mut replica.loads[slot], heard).share(now, ledgers.load);
        self.replace(ledgers.load, slot, &old, &new, now);
        self.count_programs(ledgers.programs.as_deref_mut(), slot);
    }

    /// Removes the load of peers without a message in the last `seconds`. Returns their names.
    pub fn forget_silent(
        &mut self,
        ledgers: &mut Ledgers<'_>,
        seconds: Seconds,
        now: Seconds,
    ) -> Vec<Box<str>> {
        let oldest = now - seconds;
        let gone = self.by_name.iter().filter(|(_, replica)| replica.heard < oldest);
        let gone: Vec<Box<str>> = gone.map(|(name, _)| name.clone()).collect();
        for name in &gone {
            let Some(replica) = self.by_name.remove(name) else { continue };
            for (slot, heard) in
                replica.loads.iter().enumerate().filter(|(_, heard)| !heard.load.is_nothing())
            {
                self.replace(ledgers.load, slot, &heard.load.share, &Share::default(), now);
                self.count_programs(ledgers.programs.as_deref_mut(), slot);
            }
        }
        if let Some(programs) = &mut ledgers.programs {
            programs.keep_peers(self.by_name.keys().map(|name| &**name), seconds, now);
        }
        gone
    }

    /// Yields the peers whose load counts, each with the time of its last message.
    pub fn heard(&self) -> impl Iterator<Item = (&str, Seconds)> {
        self.by_name.iter().map(|(name, replica)| (&**name, replica.heard))
    }

    /// Counts the requests of all peers outside agent programs, once programs are followed.
    pub fn count_all_programs(&self, programs: &mut Followed) {
        (0..self.sums.len()).for_each(|slot| self.count_programs(Some(&mut *programs), slot));
    }

    /// Updates a slot's working set.
    fn count_programs(&self, programs: Option<&mut Followed>, slot: usize) {
        let Some(programs) = programs else { return };
        programs.set_others_of_peers(Slot(slot as u32), self.sums[slot].share.other_tokens);
    }
}

impl Listener for Replicas {
    fn member(&mut self, member: Member, fleet: &Fleet) {
        match member {
            Member::Added { .. } => self.by_name.values_mut().for_each(|replica| replica.joined = true),
            Member::Removed(id) => self.clear(id, fleet),
        }
    }
}
