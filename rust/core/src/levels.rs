//! The queue of held requests and programs: lines by level and tenant, and the aging of levels.
//!
//! Requests wait in it for room on an instance ([`crate::admission`]), and programs for a place in
//! a cache ([`crate::program`]). Both use [`Lines`] for the order, the work that goes before, and
//! the bounds of a full queue.
//!
//! The highest level goes first. So that nothing starves, a level rises by one for every
//! `aging_seconds` that its oldest request has waited, up to the highest level that waits.
use crate::ids::Seconds;
use hashbrown::HashMap;
use serde::{Deserialize, Serialize};
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::hash::Hash;

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

/// Place in a line: what the order counts, and then arrival or birth.
type Place<I> = (u64, u64, I);

impl<I: Ord + Copy> Line<I> {
    /// Yields what waits, in order.
    pub fn iter(&self) -> impl DoubleEndedIterator<Item = I> + '_ {
        self.places.keys().map(|(.., id)| *id)
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

/// All that waits. A request or program has one place.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Lines<I: Ord + Hash> {
    /// In an order that all workers share, because the order of a sum changes its rounding.
    lines: BTreeMap<Key, Line<I>>,
    places: HashMap<I, (Key, Place<I>)>,
}

impl<I: Ord + Copy + Default + Hash> Lines<I> {
    /// Adds what begins to wait, or gives it another place. `weight`: that of the tenant, from now
    /// on. `order`: what the order of the line counts, and then arrival or birth. `since`: the
    /// start of the wait, if levels age with it.
    pub fn insert(
        &mut self,
        id: I,
        (key, weight): (Key, f64),
        order: (u64, u64),
        work: f64,
        since: Option<Seconds>,
    ) {
        self.remove(id);
        let place = (order.0, order.1, id);
        self.places.insert(id, (key, place));
        let line = self.lines.entry(key).or_default();
        line.places.insert(place, work);
        line.waits.extend(since.map(|since| (order.1, since)));
        line.work += work;
        line.weight = weight;
    }

    /// Removes what waits no longer.
    pub fn remove(&mut self, id: I) {
        let Some((key, place)) = self.places.remove(&id) else { return };
        let Some(line) = self.lines.get_mut(&key) else { return };
        line.work -= line.places.remove(&place).unwrap_or(0.0);
        line.waits.remove(&place.1);
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
        self.places.len()
    }

    /// Yields the lines, those of lower levels first.
    pub fn iter(&self) -> impl DoubleEndedIterator<Item = (Key, &Line<I>)> {
        self.lines.iter().map(|(key, line)| (*key, line))
    }

    /// Yields all that waits, in no order, each with its line.
    pub fn waiting(&self) -> impl Iterator<Item = (I, Key)> {
        self.places.iter().map(|(id, (key, _))| (*id, *key))
    }

    /// Returns the line of a tenant and level.
    pub fn get(&self, key: Key) -> Option<&Line<I>> {
        self.lines.get(&key)
    }

    /// Returns the line in which something waits; `None`: it does not wait.
    pub fn line_of(&self, id: I) -> Option<Key> {
        self.places.get(&id).map(|(key, _)| *key)
    }

    /// Returns the number of something that waits in the order of arrival or birth.
    pub fn number_of(&self, id: I) -> Option<u64> {
        self.places.get(&id).map(|(_, place)| place.1)
    }

    /// Returns how many wait in some lines.
    pub fn count(&self, counts: impl Fn(Key) -> bool) -> usize {
        self.iter().filter(|(key, _)| counts(*key)).map(|(_, line)| line.len()).sum()
    }

    /// Returns whether more than `most` wait, and a tenant has more than its share of them.
    pub fn is_over_share(&self, tenant: u64, most: usize) -> bool {
        if self.len() <= most {
            return false;
        }
        let tenants: BTreeSet<u64> = self.lines.keys().map(|key| key.tenant).collect();
        self.count(|key| key.tenant == tenant) > most / tenants.len().max(1)
    }

    /// Returns the last of the longest line of a level, if the line of `key` is shorter.
    pub fn last_of_longest(&self, key: Key) -> Option<I> {
        let lines = self.iter().filter(|(other, _)| other.level == key.level);
        let longest = lines.max_by_key(|(other, line)| (line.len(), *other))?.1;
        if longest.len() <= self.first(key, None).1 { None } else { longest.iter().next_back() }
    }

    /// Returns the last of the lowest level below that of `key`. `own`: only of its tenant.
    pub fn last_below(&self, key: Key, own: bool) -> Option<I> {
        let below = |other: Key| other.level < key.level && (!own || other.tenant == key.tenant);
        let lines = self.iter().filter(|(other, _)| below(*other));
        lines.max_by_key(|(other, line)| (Reverse(other.level), line.len(), *other))?.1.iter().next_back()
    }

    /// Returns the work and the number of what waits in a line, up to `last` if it is given.
    pub fn first(&self, key: Key, last: Option<I>) -> (f64, usize) {
        let Some(line) = self.get(key) else { return (0.0, 0) };
        match last.and_then(|last| self.places.get(&last)) {
            None => (line.work, line.len()),
            Some((_, last)) => {
                let first = line.places.range(..=*last);
                first.fold((0.0, 0), |(work, number), (_, each)| (work + each, number + 1))
            }
        }
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

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// A sorted list of the same requests has the same order and sums.
        #[test]
        fn lines_are_a_sorted_list(
            steps in prop::collection::vec((0u8..12, -1i8..2, 0u64..3, 0u64..5, any::<bool>()), 1..60),
        ) {
            let mut lines = Lines::default();
            let mut list: Vec<(Key, u64, u64, u8)> = Vec::new();
            for (number, (id, level, tenant, first, goes)) in steps.into_iter().enumerate() {
                let (key, number) = (Key { level, tenant }, number as u64);
                list.retain(|(.., known)| *known != id);
                if goes {
                    lines.remove(id);
                } else {
                    lines.insert(id, (key, 1.0), (first, number), f64::from(id), None);
                    list.push((key, first, number, id));
                }
                list.sort();
                let of = |key: Key| list.iter().filter(move |(line, ..)| *line == key).map(|(.., id)| *id);
                let all: Vec<u8> = lines.iter().flat_map(|(_, line)| line.iter()).collect();
                prop_assert_eq!(all, list.iter().map(|(.., id)| *id).collect::<Vec<_>>());
                prop_assert_eq!(lines.len(), list.len());
                for (key, .., id) in &list {
                    prop_assert_eq!(lines.line_of(*id), Some(*key));
                    let place = of(*key).position(|other| other == *id).unwrap();
                    let work: u8 = of(*key).take(place + 1).sum();
                    prop_assert_eq!(lines.first(*key, Some(*id)), (f64::from(work), place + 1));
                    let all: u8 = of(*key).sum();
                    prop_assert_eq!(lines.first(*key, None), (f64::from(all), of(*key).count()));
                }
            }
        }
    }
}
