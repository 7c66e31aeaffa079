//! Counts of several routers: each router publishes its own counts, and keeps those of the others.
//!
//! Only the router that made a count changes it. A message replaces counts and adds none, so a
//! message that is lost or repeated counts nothing twice. Each start of a router has an origin of
//! its own: a router that starts again begins at 0, and its earlier counts stay until their periods
//! have passed. Messages with all counts also have the counts of other origins, so that a new
//! router learns the counts of routers that are gone.
use super::message::{Kind, MOST_ORIGINS, MOST_SKEW, Part, Words, read, write};
use super::ring::{Shape, WORDS};
use super::rows::Sum;
use super::{Budgets, Now};
use crate::error::CoreError;
use crate::ids::Seconds;
use hashbrown::{HashMap, HashSet};

/// Windows with counts of other origins from which on those that count no longer are dropped.
const MANY_WINDOWS: usize = 1024;
/// Origins without counts are forgotten after this time without a message, seconds.
const SILENT: Seconds = 10.0;
/// Rows that an [`Budgets::enter`] adds at most; later calls add the others. It takes some 10 ms.
const NEW_ROWS: usize = 8192;

/// A window's counts at the other origins.
#[derive(Debug, Default)]
pub(super) struct Others {
    /// Grows with each change.
    changes: u64,
    /// In the order of the origins.
    pub(super) by_origin: Vec<(u64, Words)>,
}

/// Words of an own row as published: their values, and the version in which each last changed.
#[derive(Debug)]
pub(super) struct Published {
    pub(super) words: [u64; WORDS],
    versions: [u64; WORDS],
    /// The latest of these versions.
    latest: u64,
    /// Version that last had the row.
    seen: u64,
    /// Number of changes of the row, as of its words.
    changes: Option<u64>,
}

impl Published {
    fn new() -> Published {
        Published { words: [0; WORDS], versions: [0; WORDS], latest: 0, seen: 0, changes: None }
    }
}

#[derive(Debug, Default)]
pub(super) struct Origin {
    version: u64,
    /// Version of the last message that changed something.
    pub(super) changed: u64,
    heard: Seconds,
}

/// The counts of all routers.
#[derive(Debug)]
pub struct Exchange {
    /// This router.
    pub(super) origin: u64,
    /// Of its counts.
    pub(super) version: u64,
    /// Version in which a count last changed.
    pub(super) changed: u64,
    // Boxed: a table of the rows themselves would be copied when it grows, for 0.1 s in large ones.
    pub(super) published: HashMap<u64, Box<Published>>,
    pub(super) origins: HashMap<u64, Origin>,
    pub(super) others: HashMap<u64, Others>,
    /// Number of windows in `others` at which those that count no longer are dropped.
    prune_at: usize,
    changes: u64,
}

impl Exchange {
    /// Creates the exchange of a router.
    pub fn new(origin: u64) -> Exchange {
        Exchange {
            origin,
            version: 0,
            changed: 0,
            published: HashMap::new(),
            origins: HashMap::new(),
            others: HashMap::new(),
            prune_at: MANY_WINDOWS,
            changes: 0,
        }
    }

    /// Returns the use of a window at all other origins. `sum`: the last answer.
    pub fn used(&self, key: u64, shape: Shape, part: i64, sum: &mut Sum) -> u64 {
        let Some(others) = self.others.get(&key) else { return 0 };
        if sum.changes != others.changes || sum.part != part {
            let used = shape.used(others.words(), part);
            *sum = Sum { changes: others.changes, part, used };
        }
        sum.used
    }

    /// Yields the words of a window at all other origins.
    pub fn words(&self, key: u64) -> impl Iterator<Item = u64> {
        self.others.get(&key).into_iter().flat_map(Others::words)
    }

    /// Applies the parts of a message. Returns whether the first part counts here now.
    pub(super) fn apply(&mut self, parts: Vec<Part>, now: Now) -> bool {
        let (mut is_complete, mut accepted, mut dropped) = (true, Vec::new(), HashSet::new());
        for (place, part) in parts.into_iter().enumerate() {
            let applied = self.accept(part, &mut accepted, &mut dropped, now);
            is_complete &= applied || place > 0;
        }
        self.drop_counts(&dropped);
        for Part { origin, rows, .. } in accepted {
            for (key, words) in rows {
                let others = self.others.entry(key).or_default();
                self.changes += 1;
                others.changes = self.changes;
                match others.by_origin.binary_search_by_key(&origin, |(id, _)| *id) {
                    Ok(at) => {
                        let known = &mut others.by_origin[at].1;
                        known.retain(|(place, _)| words.iter().all(|(changed, _)| changed != place));
                        known.extend(words);
                    }
                    Err(at) => others.by_origin.insert(at, (origin, words)),
                }
            }
        }
        is_complete
    }

    /// Adds a part to `accepted` if it changes counts, and to `dropped` the origins whose counts so
    /// far count no more. Returns whether its version counts here.
    fn accept(&mut self, part: Part, accepted: &mut Vec<Part>, dropped: &mut HashSet<u64>, now: Now) -> bool {
        if part.origin == self.origin {
            return true; // this router's own counts come back
        }
        let known = self.origins.get(&part.origin).map(|origin| origin.version);
        if part.base.is_some_and(|base| known.is_none_or(|known| known < base)) {
            return false;
        }
        let mut drop_counts = |origin: u64| {
            accepted.retain(|part| part.origin != origin);
            dropped.insert(origin);
        };
        if known.is_none() && self.origins.len() >= MOST_ORIGINS {
            let silent = self.origins.iter().min_by(|a, b| a.1.heard.total_cmp(&b.1.heard));
            if let Some(gone) = silent.map(|(id, _)| *id) {
                self.origins.remove(&gone);
                drop_counts(gone);
            }
        }
        let origin = self.origins.entry(part.origin).or_default();
        origin.heard = now.steady;
        if known.is_some_and(|known| known >= part.version) {
            return true;
        }
        origin.version = part.version;
        if part.base.is_none() || !part.rows.is_empty() {
            origin.changed = part.version;
        }
        if part.base.is_none() {
            drop_counts(part.origin);
        }
        accepted.push(part);
        true
    }

    /// Drops the counts of origins. Searches each window once for all of them.
    fn drop_counts(&mut self, origins: &HashSet<u64>) {
        if origins.is_empty() {
            return;
        }
        for others in self.others.values_mut() {
            let before = others.by_origin.len();
            others.by_origin.retain(|(id, _)| !origins.contains(id));
            if others.by_origin.len() != before {
                self.changes += 1;
                others.changes = self.changes;
            }
        }
    }

    /// Drops what counts no more.
    fn prune(&mut self, now: Now) {
        self.others.retain(|key, others| others.prune(Kind::of(*key), now));
        let counting: HashSet<u64> =
            self.others.values().flat_map(|others| others.by_origin.iter().map(|(id, _)| *id)).collect();
        self.drop_silent(now, |id| counting.contains(&id));
    }

    /// Drops the origins that are silent, and have no counts.
    pub(super) fn drop_silent(&mut self, now: Now, counts: impl Fn(u64) -> bool) {
        self.origins.retain(|id, origin| counts(*id) || now.steady - origin.heard < SILENT);
    }

    /// Enters the counts of an own row in the present version. `changes`: the number of its changes
    /// before `read`, which returns `None` for a row that serves another window.
    pub(super) fn enter(&mut self, key: u64, changes: u64, read: impl FnOnce() -> Option<[u64; WORDS]>) {
        let version = self.version;
        let published = self.published.entry(key).or_insert_with(|| Box::new(Published::new()));
        if published.changes != Some(changes) {
            let Some(words) = read() else { return };
            published.changes = Some(changes);
            for (place, word) in words.into_iter().enumerate() {
                if published.words[place] != word {
                    (published.words[place], published.versions[place]) = (word, version);
                    (published.latest, self.changed) = (version, version);
                }
            }
        }
        published.seen = version;
    }

    /// Drops the published rows that no version since `version` has.
    pub(super) fn drop_unseen(&mut self, version: u64) {
        self.published.retain(|_, published| published.seen >= version);
    }

    /// Returns the published counts of this router, as of the last change.
    pub(super) fn own(&self, base: Option<u64>, now: Now) -> Part {
        let mut own = Part { origin: self.origin, version: self.changed, base, rows: Vec::new() };
        for (key, published) in &self.published {
            let Published { words, versions, latest, .. } = &**published;
            if base.is_some_and(|base| *latest <= base) {
                continue;
            }
            let kind = Kind::of(*key);
            let is_part = |place: &usize| match base {
                Some(base) => versions[*place] > base,
                None => kind.counts(words[*place], now),
            };
            let words: Words = (0..WORDS).filter(is_part).map(|place| (place as u8, words[place])).collect();
            if !words.is_empty() {
                own.rows.push((*key, words));
            }
        }
        own
    }

    /// Returns the counts of all other origins.
    fn parts(&self) -> Vec<Part> {
        let part = |(id, origin): (&u64, &Origin)| {
            (*id, Part { origin: *id, version: origin.changed, base: None, rows: Vec::new() })
        };
        let mut parts: HashMap<u64, Part> = self.origins.iter().map(part).collect();
        for (key, others) in &self.others {
            for (id, words) in &others.by_origin {
                if let Some(part) = parts.get_mut(id) {
                    part.rows.push((*key, words.clone()));
                }
            }
        }
        parts.into_values().collect()
    }
}

impl Others {
    /// Drops words that count no more. Returns whether any is left.
    pub(super) fn prune(&mut self, kind: Kind, now: Now) -> bool {
        for (_, words) in &mut self.by_origin {
            words.retain(|(_, word)| kind.counts(*word, now));
        }
        self.by_origin.retain(|(_, words)| !words.is_empty());
        !self.by_origin.is_empty()
    }

    fn words(&self) -> impl Iterator<Item = u64> {
        self.by_origin.iter().flat_map(|(_, words)| words.iter().map(|(_, word)| *word))
    }
}

impl Budgets {
    /// Shares the counts with other routers from now on. `origin`: this start of this router.
    pub fn share(&mut self, origin: u64) {
        self.exchange = Some(Exchange::new(origin));
    }

    /// Enters the present counts as a new version, and returns its number; 0 without other routers.
    /// The counts of all workers are this router's. Of many new rows, each call enters a part.
    pub fn enter(&mut self) -> u64 {
        let Some(exchange) = &mut self.exchange else { return 0 };
        exchange.version += 1;
        let most = exchange.published.len() + NEW_ROWS;
        for row in self.rows.iter() {
            if exchange.published.len() < most || exchange.published.contains_key(&row.key()) {
                exchange.enter(row.key(), row.changes(), || row.read());
            }
        }
        exchange.drop_unseen(exchange.version);
        exchange.version
    }

    /// Returns a message with the counts of the last [`Budgets::enter`]: those that have changed
    /// since the version `base`, or all counts and those of other origins.
    pub fn encode(&mut self, base: Option<u64>, now: Now) -> Vec<u8> {
        let Some(exchange) = &mut self.exchange else { return Vec::new() };
        let mut own = exchange.own(base, now);
        own.version = exchange.version;
        let mut parts = vec![own];
        if base.is_none() {
            exchange.prune(now);
            parts.extend(exchange.parts());
        }
        write(&parts, now)
    }

    /// Applies a message of another router. Returns whether its version counts here now, and how
    /// many seconds the other clock is ahead. If that is more than [`MOST_SKEW`], in any direction,
    /// the message changes nothing. No bytes: a router that shares no counts.
    ///
    /// # Errors
    /// `BadValue` for bytes that are no message. Then nothing changes.
    pub fn merge(&mut self, bytes: &[u8], now: Now) -> Result<(bool, Seconds), CoreError> {
        if bytes.is_empty() {
            return Ok((true, 0.0));
        }
        let (parts, then) = read(bytes)?;
        let ahead = [then.steady - now.steady, then.unix - now.unix]
            .into_iter()
            .max_by(|a, b| a.abs().total_cmp(&b.abs()))
            .unwrap_or(0.0);
        let Some(exchange) = self.exchange.as_mut().filter(|_| ahead.abs() <= MOST_SKEW) else {
            return Ok((true, ahead));
        };
        let is_complete = exchange.apply(parts, now);
        if exchange.others.len() >= exchange.prune_at {
            exchange.prune(now);
            // So that windows that still count are not all checked at each message.
            exchange.prune_at = MANY_WINDOWS.max(2 * exchange.others.len());
        }
        Ok((is_complete, ahead))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A message of 256 routers once searched each window 256 times, and the router did nothing
    /// else meanwhile.
    #[test]
    fn a_message_searches_each_window_once() {
        let now = Now { steady: 0.0, unix: 0.0 };
        let message = |version| {
            let part = |origin| Part {
                origin,
                version,
                base: None,
                rows: vec![(16, vec![(0, version)]), (32, vec![(0, origin)])],
            };
            (1..=3).rev().map(part).collect::<Vec<Part>>()
        };
        let mut exchange = Exchange::new(9);
        exchange.apply(message(1), now);
        let before = exchange.changes;
        assert_eq!(before, 2 * 3);
        exchange.apply(message(2), now);
        // Each window lost the counts of all three origins at once.
        assert_eq!(exchange.changes - before, 2 + 2 * 3);
        assert_eq!(exchange.words(16).collect::<Vec<u64>>(), [2, 2, 2]);
        assert_eq!(exchange.words(32).collect::<Vec<u64>>(), [1, 2, 3]);
    }

    /// The counts of an origin that is forgotten, or replaced, within a message do not come back.
    #[test]
    fn a_message_of_too_many_origins_keeps_the_counts_of_those_that_are_known() {
        let now = Now { steady: 0.0, unix: 0.0 };
        let part =
            |origin, version| Part { origin, version, base: None, rows: vec![(16, vec![(0, version)])] };
        let mut exchange = Exchange::new(0);
        let origins = 1..=MOST_ORIGINS as u64 + 9;
        exchange.apply(origins.map(|origin| part(origin, 1)).collect(), now);
        assert_eq!(exchange.origins.len(), MOST_ORIGINS);
        let with_counts = exchange.others[&16].by_origin.iter().map(|(id, _)| *id);
        assert!(with_counts.clone().all(|id| exchange.origins.contains_key(&id)));
        assert_eq!(with_counts.count(), MOST_ORIGINS);
        let mut exchange = Exchange::new(0);
        exchange.apply(vec![part(1, 1), part(1, 2)], now);
        assert_eq!(exchange.words(16).collect::<Vec<u64>>(), [2]);
    }
}
