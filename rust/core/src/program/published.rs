//! The programs that a router has published, with the version in which each changed last.
use super::exchange::{MAX_ENDED, MAX_PUBLISHED, PeerPrograms};
use super::programs::Programs;
use crate::ids::{InstanceId, Seconds};
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

    /// Returns the programs that changed since a version; `None`: all. `name_of`: returns the name
    /// of an instance.
    pub fn since(
        &self,
        programs: &Programs,
        base: Option<u64>,
        now: Seconds,
        name_of: impl Fn(InstanceId) -> Option<Box<str>>,
    ) -> PeerPrograms {
        if !self.on {
            return PeerPrograms::default();
        }
        let from = (base.map_or(0, |base| base + 1), 0);
        let mut told = PeerPrograms { work: programs.work, ..PeerPrograms::default() };
        let mut places = BTreeMap::new();
        for (_, key) in self.order.range(from..) {
            let Some((mut row, home)) = programs.as_published(*key, now) else { continue };
            row.home = home.and_then(|home| {
                if let Some(place) = places.get(&home.0) {
                    return Some(*place);
                }
                told.instances.push(name_of(home)?);
                places.insert(home.0, told.instances.len() - 1);
                Some(told.instances.len() - 1)
            });
            told.programs.push(row);
        }
        told.programs.sort_by_key(|row| row.parent != 0); // parents first
        if base.is_some() {
            told.gone = self.gone.range(from..).map(|(_, key)| *key).collect();
        }
        told
    }
}
