//! Routers side by side: what each of them alone knows, its requests in flight, the others add to
//! what they see of the instances.
//!
//! A router tells what it has on each instance (`Router::share`); whoever hears it (`Router::hear`)
//! counts that as if it had been placed here, until the next word from there or until it is too old
//! (`Router::forget_silent`). How it gets from one to the other is the caller's. Indicators that a
//! policy keeps about single requests (`handoff_*`, `decode_pressure*`) stay each router's own, as
//! does what it learns.
use super::ledger::{Ledger, Share};
use crate::error::CoreError;
use crate::fleet::Fleet;
use crate::ids::Seconds;
use std::collections::BTreeMap;

/// Most routers that one listens to; more side by side is a mistake, and what is kept is bounded by
/// it.
pub const MOST_REPLICAS: usize = 64;

/// What the routers beside this one said last.
#[derive(Clone, Debug, Default)]
pub(super) struct Replicas {
    by_name: BTreeMap<Box<str>, Replica>,
    /// Sums over all of them, by slot.
    sums: Vec<Share>,
}

#[derive(Clone, Debug)]
struct Replica {
    heard: Seconds,
    /// By slot; shorter than the fleet where nothing was said of the last ones.
    shares: Vec<Share>,
}

impl Replicas {
    /// What they have on a slot together.
    fn on(&self, slot: usize) -> Share {
        let mut all = Share::default();
        self.by_name.values().filter_map(|replica| replica.shares.get(slot)).for_each(|share| all.add(share));
        all
    }

    /// Replaces `old` by `new` in the sum of a slot, whoever has it. The sum is worked out anew
    /// when a router has nothing left there, so that rounding errors never outlive the load that
    /// made them.
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

    /// The instance of a slot is gone.
    pub fn clear(&mut self, slot: usize) {
        self.sums.get_mut(slot).into_iter().for_each(|sum| *sum = Share::default());
        self.by_name
            .values_mut()
            .filter_map(|replica| replica.shares.get_mut(slot))
            .for_each(|share| *share = Share::default());
    }

    /// What the router `replica` has on each instance, heard at `now`; replaces what it said
    /// before. Instances that are not in the fleet are passed over.
    ///
    /// # Errors
    /// `BadValue` for a number that cannot be, or more than [`MOST_REPLICAS`] replicas. Nothing has
    /// changed then.
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
                        what: format!("{what} on {instance} that router {replica} tells of"),
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
                what: "routers side by side".into(),
                got: format!("{replica}, one beyond {MOST_REPLICAS}"),
                expected: format!("at most {MOST_REPLICAS}"),
            });
        }
        let said = Replica { heard: now, shares: by_slot.clone() };
        let before = self.by_name.insert(replica.into(), said);
        self.count(ledger, &before.map_or_else(Vec::new, |before| before.shares), &by_slot, now);
        Ok(())
    }

    /// Forgets what routers said that have said nothing for `seconds`. Their names.
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

    /// The routers that count now, and when each was heard last.
    pub fn heard(&self) -> impl Iterator<Item = (&str, Seconds)> {
        self.by_name.iter().map(|(name, replica)| (&**name, replica.heard))
    }

    /// A router that had `before` on the slots has `shares` now.
    fn count(&mut self, ledger: &mut Ledger, before: &[Share], shares: &[Share], now: Seconds) {
        let nothing = Share::default();
        for slot in 0..before.len().max(shares.len()) {
            let [old, new] = [before, shares].map(|all| all.get(slot).unwrap_or(&nothing));
            ledger.set_peers(slot, self.replace(slot, old, new), now);
        }
    }
}
