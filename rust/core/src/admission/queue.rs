//! Waiting requests: by tenant and level, and within a tenant and level by deadline.
use crate::ids::{ArrivalId, Seconds};
use hashbrown::HashMap;
use std::cmp::{Ordering, Reverse};
use std::collections::BTreeMap;

/// Place of a request in its line: deadline, then arrival.
pub(super) type Place = (u64, u64);

/// A tenant and a priority level.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct Key {
    /// Hash of the tenant's name.
    pub tenant: u64,
    pub level: i8,
}

impl Key {
    /// Returns the number under which its service counts. A tenant has a share of each level.
    pub fn share(self) -> u64 {
        self.tenant ^ (self.level as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15)
    }
}

/// The waiting requests of a tenant and level, and the sum of their work.
#[derive(Clone, Debug, Default)]
pub(super) struct Line {
    places: BTreeMap<Place, ArrivalId>,
    work: f64,
    weight: f64,
    /// Begin of each wait by arrival, if requests age.
    waits: BTreeMap<u64, Seconds>,
    /// Last time at which a limit of the tenant stopped the line.
    stopped: Seconds,
}

impl Line {
    /// Yields the waiting requests in order.
    pub fn iter(&self) -> impl Iterator<Item = ArrivalId> + '_ {
        self.places.values().copied()
    }

    /// Yields the waiting requests up to a place.
    pub fn until(&self, place: Place) -> impl Iterator<Item = ArrivalId> + '_ {
        self.places.range(..=place).map(|(_, id)| *id)
    }

    /// Returns the work of the waiting requests.
    pub fn work(&self) -> f64 {
        self.work
    }

    /// Returns the waiting request with the latest deadline.
    pub fn last(&self) -> Option<ArrivalId> {
        self.places.last_key_value().map(|(_, id)| *id)
    }

    /// Returns the longest wait during which no limit of the tenant stopped the line.
    pub fn longest_wait(&self, now: Seconds) -> Seconds {
        self.waits.first_key_value().map_or(0.0, |(_, since)| now - since.max(self.stopped))
    }

    /// Returns the tenant's weight.
    pub fn weight(&self) -> f64 {
        self.weight
    }

    /// Returns the number of waiting requests.
    pub fn len(&self) -> usize {
        self.places.len()
    }
}

/// All waiting requests.
#[derive(Clone, Debug, Default)]
pub(super) struct Queue {
    lines: HashMap<Key, Line>,
    len: usize,
    serial: u64,
}

impl Queue {
    /// Adds a request; returns its place. `since`: the begin of its wait, if requests age.
    pub fn push(
        &mut self,
        (key, weight): (Key, f64),
        deadline: Option<Seconds>,
        work: f64,
        id: ArrivalId,
        since: Option<Seconds>,
    ) -> Place {
        self.serial += 1;
        // Times are not negative, so their bits sort like the numbers.
        let place = (deadline.unwrap_or(f64::INFINITY).max(0.0).to_bits(), self.serial);
        let line = self.lines.entry(key).or_default();
        line.places.insert(place, id);
        if let Some(since) = since {
            line.waits.insert(self.serial, since);
        }
        line.work += work;
        line.weight = weight;
        self.len += 1;
        place
    }

    /// Removes a request.
    pub fn remove(&mut self, key: Key, place: Place, work: f64) {
        let Some(line) = self.lines.get_mut(&key) else { return };
        if line.places.remove(&place).is_some() {
            line.waits.remove(&place.1);
            self.len -= 1;
            line.work -= work;
        }
        if line.places.is_empty() {
            self.lines.remove(&key);
        }
    }

    /// Notes that a limit of their tenants stops these lines.
    pub fn stop(&mut self, stops: impl Fn(u64) -> bool, now: Seconds) {
        let stopped = self.lines.iter_mut().filter(|(key, _)| stops(key.tenant));
        stopped.for_each(|(_, line)| line.stopped = now);
    }

    /// Returns the number of waiting requests.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Yields the lines with waiting requests.
    pub fn lines(&self) -> impl Iterator<Item = (Key, &Line)> {
        self.lines.iter().map(|(key, line)| (*key, line))
    }

    /// Returns the waiting requests of a tenant and level.
    pub fn line(&self, key: Key) -> Option<&Line> {
        self.lines.get(&key)
    }

    /// Returns the number of waiting requests of a tenant.
    pub fn len_of(&self, tenant: u64) -> usize {
        self.lines().filter(|(key, _)| key.tenant == tenant).map(|(_, line)| line.len()).sum()
    }

    /// Returns the last request of the longest line of a level, if the line of `key` is shorter.
    pub fn last_of_longest(&self, key: Key) -> Option<ArrivalId> {
        let own = self.line(key).map_or(0, Line::len);
        let lines = self.lines().filter(|(other, _)| other.level == key.level);
        let longest = lines.max_by_key(|(other, line)| (line.len(), *other))?.1;
        if longest.len() <= own { None } else { longest.last() }
    }

    /// Returns the last request of the lowest level below that of `key`. `own`: only of its tenant.
    pub fn last_below(&self, key: Key, own: bool) -> Option<ArrivalId> {
        let below = |other: Key| other.level < key.level && (!own || other.tenant == key.tenant);
        let lines = self.lines().filter(|(other, _)| below(*other));
        lines.max_by_key(|(other, line)| (Reverse(other.level), line.len(), *other))?.1.last()
    }

    /// Returns the number of waiting requests of a line's tenant that have a higher level.
    pub fn own_above(&self, key: Key) -> usize {
        let own = |other: Key| other.tenant == key.tenant && other.level > key.level;
        self.lines().filter(|(other, _)| own(*other)).map(|(_, line)| line.len()).sum()
    }

    /// Returns the work that is taken up until the first requests of a line are, whose work is
    /// `first`. All work of higher levels goes before. Tenants share a level by weight, so of each
    /// other tenant in it, at most the work of its share goes before. Only lines that `may_run`
    /// count.
    pub fn work_before(&self, key: Key, first: f64, may_run: impl Fn(u64) -> bool) -> f64 {
        let Some(own) = self.line(key) else { return 0.0 };
        let per_weight = first / own.weight;
        let lines = self.lines().filter(|(other, _)| *other == key || may_run(other.tenant));
        let work = |(other, line): (Key, &Line)| match other.level.cmp(&key.level) {
            Ordering::Greater => line.work,
            Ordering::Equal => line.work.min(per_weight * line.weight),
            Ordering::Less => 0.0,
        };
        lines.map(work).sum()
    }
}
