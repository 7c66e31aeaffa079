//! Peer routers: each router adds the in-flight load of its peers to its own view of the instances.
//!
//! A router publishes its load on each instance (`Router::share`). A peer that receives this load
//! (`Router::hear`) counts it like its own until the next message or a timeout
//! (`Router::forget_silent`). The caller carries the messages. Indicators about single requests
//! (`handoff_*`, `decode_pressure*`) and all learned values stay local to each router.
//! does what it learns.
use super::ledger::{Ledger, Share};
use crate::error::CoreError;
use crate::fleet::Fleet;
use crate::ids::Seconds;
use std::collections::BTreeMap;

/// Maximum number of peers. More peers indicate a configuration error; the limit also bounds
/// memory.
pub const MOST_REPLICAS: usize = 64;

/// The last published load of each peer.
#[derive(Clone, Debug, Default)]
pub(super) struct Replicas {
    by_name: BTreeMap<Box<str>, Replica>,
    /// Sums over all peers, by slot.
    sums: Vec<Share>,
}

#[derive(Clone, Debug)]
struct Replica {
    heard: Seconds,
    /// Load by slot; shorter than the fleet if the message omits the last slots.
    shares: Vec<Share>,
}

impl Replicas {
    /// Returns the load of all peers on a slot.
    fn on(&self, slot: usize) -> Share {
        let mut all = Share::default();
        self.by_name.values().filter_map(|replica| replica.shares.get(slot)).for_each(|share| all.add(share));
        all
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
    pub fn clear(&mut self, slot: usize) {
        self.sums.get_mut(slot).into_iter().for_each(|sum| *sum = Share::default());
        self.by_name
            .values_mut()
            .filter_map(|replica| replica.shares.get_mut(slot))
            .for_each(|share| *share = Share::default());
    }

    /// Replaces the published load of the router `replica`, received at `now`. Instances that are
    /// not in the fleet are skipped.
    ///
    /// # Errors
    /// `BadValue` for an impossible number, or for more than [`MOST_REPLICAS`] replicas. Nothing
    /// has changed then.
    pub fn hear<'a>(
        &mut self,
        ledger: &mut Ledger,
        fleet: &Fleet,
        replica: &str,
        shares: impl IntoIterator<Item = (&'a str, Share)>,
        now: Seconds,
    ) -> Result<(), CoreError> {
        let mut by_slot = Vec::new();
        for (instance, share) in shares {
            for (what, value) in Share::NAMES.iter().zip(share.numbers()) {
                if !(0.0..=1e15).contains(&value) {
                    return Err(CoreError::BadValue {
                        what: format!("{what} on {instance} in the load of router {replica}"),
                        got: value.to_string(),
                        expected: "0 to 1e15".into(),
                    });
                }
            }
            if let Ok(id) = fleet.find(instance) {
                by_slot.resize(by_slot.len().max(id.index() + 1), Share::default());
                by_slot[id.index()] = share;
            }
        }
        if !self.by_name.contains_key(replica) && self.by_name.len() >= MOST_REPLICAS {
            return Err(CoreError::BadValue {
                what: "peer routers".into(),
                got: format!("{replica}, after {MOST_REPLICAS} others"),
                expected: format!("at most {MOST_REPLICAS}"),
            });
        }
        let said = Replica { heard: now, shares: by_slot.clone() };
        let before = self.by_name.insert(replica.into(), said);
        self.count(ledger, &before.map_or_else(Vec::new, |before| before.shares), &by_slot, now);
        Ok(())
    }

    /// Removes the load of peers without a message in the last `seconds`. Returns their names.
    pub fn forget_silent(&mut self, ledger: &mut Ledger, seconds: Seconds, now: Seconds) -> Vec<Box<str>> {
        let oldest = now - seconds;
        let gone = self.by_name.iter().filter(|(_, replica)| replica.heard < oldest);
        let gone: Vec<Box<str>> = gone.map(|(name, _)| name.clone()).collect();
        for name in &gone {
            if let Some(replica) = self.by_name.remove(name) {
                self.count(ledger, &replica.shares, &[], now);
            }
        }
        gone
    }

    /// Yields the peers whose load counts, each with the time of its last message.
    pub fn heard(&self) -> impl Iterator<Item = (&str, Seconds)> {
        self.by_name.iter().map(|(name, replica)| (&**name, replica.heard))
    }

    /// Updates the ledger from a peer's load `before` to its load `shares`.
    fn count(&mut self, ledger: &mut Ledger, before: &[Share], shares: &[Share], now: Seconds) {
        let nothing = Share::default();
        for slot in 0..before.len().max(shares.len()) {
            let [old, new] = [before, shares].map(|all| all.get(slot).unwrap_or(&nothing));
            ledger.set_peers(slot, self.replace(slot, old, new), now);
        }
    }
}
