//! The lines of waiting requests and held programs by level and tenant, and the aging of levels.
//!
//! The highest level goes first. So that nothing starves, a level rises by one for every
//! `aging_seconds` that its oldest request has waited, up to the highest level that waits.
use crate::ids::Seconds;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Highest and lowest level.
pub const LEVELS: std::ops::RangeInclusive<i8> = -10..=10;

/// The order of levels in a round; empty without levels.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Ranks {
    /// Highest level with requests that may run.
    top: i8,
    /// For each level with such requests, how far it is below the highest after its rise.
    ranks: Vec<(i8, u8)>,
}

impl Ranks {
    /// Ranks levels. `waits`: levels of requests that may run, and their waits in seconds.
    pub fn new(waits: impl Iterator<Item = (i8, Seconds)>, aging_seconds: Seconds) -> Ranks {
        let mut longest: Vec<(i8, Seconds)> = Vec::new();
        for (level, wait) in waits {
            match longest.iter_mut().find(|(known, _)| *known == level) {
                Some((_, known)) => *known = known.max(wait),
                None => longest.push((level, wait)),
            }
        }
        longest.sort_unstable_by_key(|(level, _)| *level);
        let top = longest.last().map_or(0, |(level, _)| *level);
        let rank = |(level, wait): (i8, Seconds)| {
            // A cast of a quotient out of range saturates.
            let below = top.abs_diff(level);
            (level, below - below.min((wait / aging_seconds) as u8))
        };
        Ranks { top, ranks: longest.into_iter().map(rank).collect() }
    }

    /// Returns the rank of a level: 0 goes first.
    pub fn of(&self, level: i8) -> u8 {
        self.ranks.iter().find(|(known, _)| *known == level).map_or(0, |(_, rank)| *rank)
    }

    /// Returns by how many levels a level has risen.
    pub fn rise(&self, level: i8) -> u8 {
        self.ranks
            .iter()
            .find(|(known, _)| *known == level)
            .map_or(0, |(_, rank)| self.top.abs_diff(level) - rank)
    }
}

/// A priority level and a tenant.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) struct Key {
    /// Priority level.
    pub level: i8,
    /// Hash of the tenant's name.
    pub tenant: u64,
}

/// Place in a line: what the order counts, and then arrival or birth.
pub(crate) type Place<I> = (u64, u64, I);

/// The requests or programs of a level and tenant that wait, in order, with the work of each.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Line<I: Ord> {
    places: BTreeMap<Place<I>, f64>,
    work: f64,
    weight: f64,
    /// Start of each wait by arrival, if levels age with it.
    waits: BTreeMap<u64, Seconds>,
    /// Last time at which a limit of the tenant stopped the line.
    stopped: Seconds,
}

impl<I: Ord + Copy> Line<I> {
    /// Yields what waits, in order.
    pub fn iter(&self) -> impl DoubleEndedIterator<Item = I> + '_ {
        self.places.keys().map(|(.., id)| *id)
    }

    /// Returns the work and the number of those up to a place.
    pub fn until(&self, place: Place<I>) -> (f64, usize) {
        let first = self.places.range(..=place);
        first.fold((0.0, 0), |(work, number), (_, each)| (work + each, number + 1))
    }

    /// Returns the sum of the work.
    pub fn work(&self) -> f64 {
        self.work
    }

    /// Returns the tenant's weight.
    pub fn weight(&self) -> f64 {
        self.weight
    }

    /// Returns the longest wait during which no limit of the tenant stopped the line.
    pub fn longest_wait(&self, now: Seconds) -> Seconds {
        self.waits.first_key_value().map_or(0.0, |(_, since)| now - since.max(self.stopped))
    }

    /// Returns how many wait.
    pub fn len(&self) -> usize {
        self.places.len()
    }
}

/// All that waits.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Lines<I: Ord> {
    /// In an order that all workers share, because the order of a sum changes its rounding.
    lines: BTreeMap<Key, Line<I>>,
    len: usize,
}

impl<I: Ord + Copy + Default> Lines<I> {
    /// Adds what begins to wait. `weight`: that of the tenant, from now on. `since`: the start of
    /// the wait, if levels age with it.
    pub fn insert(&mut self, (key, weight): (Key, f64), place: Place<I>, work: f64, since: Option<Seconds>) {
        let line = self.lines.entry(key).or_default();
        line.places.insert(place, work);
        line.waits.extend(since.map(|since| (place.1, since)));
        line.work += work;
        line.weight = weight;
        self.len += 1;
    }

    /// Removes what waits no longer.
    pub fn remove(&mut self, key: Key, place: Place<I>) {
        let Some(line) = self.lines.get_mut(&key) else { return };
        if let Some(work) = line.places.remove(&place) {
            line.waits.remove(&place.1);
            line.work -= work;
            self.len -= 1;
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

    /// Returns how many wait.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Yields the lines, those of lower levels first.
    pub fn iter(&self) -> impl DoubleEndedIterator<Item = (Key, &Line<I>)> {
        self.lines.iter().map(|(key, line)| (*key, line))
    }

    /// Returns the line of a tenant and level.
    pub fn get(&self, key: Key) -> Option<&Line<I>> {
        self.lines.get(&key)
    }

    /// Returns how many wait in some lines.
    pub fn count(&self, counts: impl Fn(Key) -> bool) -> usize {
        self.iter().filter(|(key, _)| counts(*key)).map(|(_, line)| line.len()).sum()
    }

    /// Returns the work and the number of those that go until the first ones of a line have gone,
    /// whose work and number is `first`. All of higher levels go before. Tenants share a level by
    /// weight, so of each other tenant in it, at most the work of its share goes before. Only lines
    /// that `may_run` count.
    pub fn until(&self, key: Key, first: (f64, usize), may_run: impl Fn(u64) -> bool) -> (f64, usize) {
        let per_weight = self.get(key).map_or(0.0, |own| first.0 / own.weight);
        let lines = self.lines.range(Key { tenant: 0, ..key }..);
        let lines = lines.filter(|(other, _)| **other == key || may_run(other.tenant));
        lines.fold((0.0, 0), |(work, number), (other, line)| match other.level > key.level {
            true => (work + line.work, number + line.len()),
            false => (work + line.work.min(per_weight * line.weight), number + line.len().min(first.1)),
        })
    }
}
