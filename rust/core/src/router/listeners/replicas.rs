//! Peer routers: each router adds the in-flight load of its peers to its own view of the instances.
//!
//! A router publishes its load on each instance (`Router::share`). A peer that receives this load
//! (`Router::hear`) counts it like its own until the next message or a timeout
//! (`Router::forget_silent`). The caller carries the messages. Indicators about single requests
//! (`handoff_*`, `decode_pressure*`) and all learned values stay local to each router. Tokens
//! of agent programs count in the working sets of [`Programs`].
use super::listener::Listener;
use crate::error::CoreError;
use crate::fleet::{Fleet, Member};
use crate::ids::{InstanceId, Seconds};
use crate::program::{MAX_ROOTS, PeerPrograms, Programs};
use crate::router::ledger::{Ledger, Published, Share};
use std::collections::BTreeMap;

/// Maximum number of peers. More peers indicate a configuration error; the limit also bounds
/// memory.
pub const MAX_REPLICAS: usize = 64;

/// The last published load of each peer.
#[derive(Clone, Debug, Default)]
pub struct Replicas {
    by_name: BTreeMap<Box<str>, Replica>,
    /// The load of the other workers on this machine, by worker and slot.
    by_worker: Vec<Vec<Share>>,
    /// Sums over all peers, by slot.
    sums: Vec<Share>,
}

#[derive(Clone, Debug)]
struct Replica {
    heard: Seconds,
    /// Load by slot; shorter than the fleet if the message omits the last slots.
    shares: Vec<Published>,
}

/// The ledgers in which the load of peers counts.
pub struct Ledgers<'a> {
    /// Requests and tokens in flight.
    pub load: &'a mut Ledger,
    /// Working sets of agent programs, if they are followed.
    pub programs: Option<&'a mut Programs>,
}

impl Replicas {
    /// Returns the load of all peers on a slot.
    fn on(&self, slot: usize) -> Share {
        let mut all = Share::default();
        self.published(slot).for_each(|load| all.add(&load.share));
        self.by_worker.iter().filter_map(|shares| shares.get(slot)).for_each(|share| all.add(share));
        all
    }

    /// Yields the load of each peer on a slot.
    fn published(&self, slot: usize) -> impl Iterator<Item = &Published> {
        self.by_name.values().filter_map(move |replica| replica.shares.get(slot))
    }

    /// Replaces `old` by `new` in a slot's sum. The sum is recomputed when a peer's load drops to
    /// zero, so that rounding errors do not outlive the load that caused them.
    fn replace(&mut self, slot: usize, old: &Share, new: &Share) -> Share {
        if self.sums.len() <= slot {
            self.sums.resize(slot + 1, Share::default());
        }
        if old != new {
            if new.is_nothing() {
                self.sums[slot] = self.on(slot);
            } else {
                self.sums[slot].subtract(old);
                self.sums[slot].add(new);
            }
        }
        self.sums[slot]
    }

    /// Clears a slot whose instance was removed.
    fn clear(&mut self, slot: usize) {
        self.sums.get_mut(slot).into_iter().for_each(|sum| *sum = Share::default());
        self.by_name
            .values_mut()
            .filter_map(|replica| replica.shares.get_mut(slot))
            .for_each(|load| *load = Published::default());
        self.by_worker
            .iter_mut()
            .filter_map(|shares| shares.get_mut(slot))
            .for_each(|share| *share = Share::default());
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
        let shares = &mut self.by_worker[worker];
        if shares.len() <= slot {
            shares.resize(slot + 1, Share::default());
        }
        let old = std::mem::replace(&mut shares[slot], share);
        if old != share {
            let sum = self.replace(slot, &old, &share);
            ledger.set_peers(slot, sum, now);
        }
    }

    /// Replaces the published load of the router `replica`, received at `now`. Instances that are
    /// not in the fleet are skipped.
    ///
    /// # Errors
    /// `BadValue` for an impossible number, or for more than [`MAX_REPLICAS`] replicas. Nothing
    /// has changed then.
    pub fn hear<'a>(
        &mut self,
        ledgers: &mut Ledgers<'_>,
        fleet: &Fleet,
        replica: &str,
        shares: impl IntoIterator<Item = (&'a str, Published)>,
        now: Seconds,
    ) -> Result<(), CoreError> {
        let mut by_slot = Vec::new();
        for (instance, load) in shares {
            let bad = |what: &str, got: String, expected: String| CoreError::BadValue {
                what: format!("{what} on {instance} in the load of router {replica}"),
                got,
                expected,
            };
            let numbers = Share::NAMES.iter().copied().zip(load.share.numbers());
            let roots = load.roots.iter().map(|root| ("tokens of a root", root.root.tokens));
            for (what, value) in numbers.chain(roots) {
                if !(0.0..=1e15).contains(&value) {
                    return Err(bad(what, value.to_string(), "0 to 1e15".into()));
                }
            }
            if let Some(root) = load.roots.iter().find(|root| !(0.0..=1.0).contains(&root.probability)) {
                return Err(bad("probability of a root", root.probability.to_string(), "0 to 1".into()));
            }
            if load.roots.len() > MAX_ROOTS {
                return Err(bad("roots", load.roots.len().to_string(), format!("at most {MAX_ROOTS}")));
            }
            if let Ok(id) = fleet.find(instance) {
                by_slot.resize(by_slot.len().max(id.index() + 1), Published::default());
                by_slot[id.index()] = load;
            }
        }
        if !self.by_name.contains_key(replica) && self.by_name.len() >= MAX_REPLICAS {
            return Err(CoreError::BadValue {
                what: "peer routers".into(),
                got: format!("{replica}, after {MAX_REPLICAS} others"),
                expected: format!("at most {MAX_REPLICAS}"),
            });
        }
        let said = Replica { heard: now, shares: by_slot.clone() };
        let before = self.by_name.insert(replica.into(), said);
        self.count(ledgers, &before.map_or_else(Vec::new, |before| before.shares), &by_slot, now);
        Ok(())
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
            if let Some(replica) = self.by_name.remove(name) {
                self.count(ledgers, &replica.shares, &[], now);
            }
        }
        gone
    }

    /// Yields the peers whose load counts, each with the time of its last message.
    pub fn heard(&self) -> impl Iterator<Item = (&str, Seconds)> {
        self.by_name.iter().map(|(name, replica)| (&**name, replica.heard))
    }

    /// Updates the ledgers from a peer's load `before` to its load `shares`.
    fn count(&mut self, ledgers: &mut Ledgers<'_>, before: &[Published], shares: &[Published], now: Seconds) {
        let nothing = Published::default();
        for slot in 0..before.len().max(shares.len()) {
            let [old, new] = [before, shares].map(|all| all.get(slot).unwrap_or(&nothing));
            let sum = self.replace(slot, &old.share, &new.share);
            ledgers.load.set_peers(slot, sum, now);
            if let Some(all) = &mut ledgers.programs {
                let roots = self.published(slot).flat_map(|load| load.roots.iter().copied()).collect();
                let peers = PeerPrograms {
                    tokens: sum.program_tokens,
                    programs: sum.programs,
                    held_tokens: sum.held_program_tokens,
                    admitted_tokens: sum.admitted_program_tokens,
                    roots,
                };
                all.set_peers(InstanceId(slot as u32), peers);
            }
        }
    }
}

impl Listener for Replicas {
    fn member(&mut self, member: Member, _: &Fleet) {
        if let Member::Removed(id) = member {
            self.clear(id.index());
        }
    }
}
