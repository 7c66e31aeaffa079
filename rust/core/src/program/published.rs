//! The programs that a router has published, with the version in which each changed last.
use super::exchange::{HEAD_BYTES, MAX_ENDED, MAX_PUBLISHED, PeerPrograms, name_bytes};
use super::programs::Programs;
use crate::ids::{Seconds, Slot};
use hashbrown::HashMap;
use std::collections::{BTreeMap, BTreeSet};

/// The programs that peers know, by the versions in which they changed.
#[derive(Clone, Debug, Default)]
pub(super) struct Published {
    /// Whether this process published programs at the last version.
    on: bool,
    versions: HashMap<u64, u64>,
    /// Versions and keys of published programs, and of those that ended.
    order: BTreeSet<(u64, u64)>,
    gone: BTreeSet<(u64, u64)>,
}

impl Published {
    /// Enters the changes of programs as a version. `oldest`: oldest version that a message can
    /// still change. `on`: whether this process publishes programs.
    pub fn enter(&mut self, programs: &mut Programs, version: u64, oldest: u64, on: bool) {
        self.gone.retain(|(ended, _)| *ended > oldest);
        let changed = std::mem::replace(&mut programs.changed, on.then(BTreeSet::new));
        let known = self.versions.keys().copied();
        let changed = match changed {
            Some(changed) if on && self.on => changed,
            _ if on => programs.by_key.keys().copied().chain(known).collect(),
            _ => known.collect(),
        };
        self.on = on;
        for key in changed {
            let own = programs.is_own(key);
            if on && own == Some(true) {
                self.order.insert((version, key));
                if let Some(old) = self.versions.insert(key, version) {
                    self.order.remove(&(old, key));
                }
            } else if let Some(old) = self.versions.remove(&key) {
                self.order.remove(&(old, key));
                // A program of a peer is no longer published here, and does not end.
                if !on || own.is_none() {
                    self.gone.insert((version, key));
                }
            }
        }
        while self.order.len() > MAX_PUBLISHED
            && let Some((_, key)) = self.order.pop_first()
        {
            self.versions.remove(&key);
            self.gone.insert((version, key));
        }
        while self.gone.len() > MAX_ENDED {
            self.gone.pop_first();
        }
    }

    /// Returns the number of programs that changed since a version; `None`: all.
    pub fn count_since(&self, base: Option<u64>) -> usize {
        self.order.range(first(base)..).count()
    }

    /// Returns the programs that changed since a version; `None`: all. If they need more than
    /// `bytes`, the latest changes. `name_of`: returns the name of an instance.
    pub fn since(
        &self,
        programs: &Programs,
        base: Option<u64>,
        bytes: usize,
        now: Seconds,
        name_of: impl Fn(Slot) -> Option<Box<str>>,
    ) -> PeerPrograms {
        if !self.on {
            return PeerPrograms::default();
        }
        let mut left = bytes.saturating_sub(HEAD_BYTES);
        let mut told = PeerPrograms { measured: programs.measured, ..PeerPrograms::default() };
        let mut places = BTreeMap::new();
        if base.is_some() {
            let gone = self.gone.range(first(base)..).rev().take(left / 8);
            told.gone = gone.map(|(_, key)| *key).collect();
            left -= 8 * told.gone.len();
        }
        // The latest first, while bytes are left.
        for (_, key) in self.order.range(first(base)..).rev() {
            let Some((mut row, home)) = programs.as_published(*key, now) else { continue };
            let known = home.and_then(|home| places.get(&home.0)).copied();
            let new = home.filter(|_| known.is_none()).and_then(|home| Some((home, name_of(home)?)));
            let needed = row.most_bytes() + new.as_ref().map_or(0, |(_, name)| name_bytes(name));
            let Some(rest) = left.checked_sub(needed) else { break };
            left = rest;
            row.home = known.or(new.map(|(home, name)| {
                told.instances.push(name);
                places.insert(home.0, told.instances.len() - 1);
                told.instances.len() - 1
            }));
            told.programs.push(row);
        }
        told.programs.reverse();
        told.programs.sort_by_key(|row| row.parent != 0); // parents first
        told
    }
}

/// Returns the first entry behind a version.
fn first(base: Option<u64>) -> (u64, u64) {
    (base.map_or(0, |base| base + 1), 0)
}
