//! Priority levels of waiting requests ([`crate::levels`]).
//!
//! A request of a higher level goes first. So that nothing starves, a level rises by one for every
//! `aging_seconds` that its oldest request has waited, up to the highest level that waits. Equal
//! levels take turns by shares. So a request waits at most `aging_seconds` for each level above its
//! own, and from then on as if there were no levels. Young requests rise with the oldest of their
//! level: if they did not, a tenant with a long line would go before all others of its level.
use super::limits::Limits;
use super::{Admission, Arrival, Load, Stage, Turn, Turns};
use crate::ids::{ArrivalId, Seconds};
use crate::levels::{Key, Ranks};
use crate::priority::vtc::VirtualTokens;
use std::cmp::Reverse;

/// How a request's level mattered, for its decision record.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LevelNote {
    /// The request's level.
    pub level: i8,
    /// Levels by which aging had raised it when it was its turn.
    pub aged_levels: u8,
    /// Seconds from its arrival to its placement.
    pub held_seconds: Seconds,
}

/// Waiting requests of a level.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LevelSnapshot {
    /// The level.
    pub level: i8,
    /// Levels by which aging raises it now.
    pub aged_levels: u8,
    /// Waiting requests.
    pub waiting: usize,
    /// Wait of its oldest request in seconds, while its tenant's limit lets it run.
    pub oldest_seconds: Seconds,
}

impl Admission {
    /// Returns whether requests have levels.
    pub fn has_levels(&self) -> bool {
        self.load.as_ref().is_some_and(|load| load.config.aging_seconds.is_some())
    }

    /// Returns what a decision record shows of a request's level; `None` without levels.
    pub fn level_note(&self, id: ArrivalId, now: Seconds) -> Option<LevelNote> {
        let arrival =
            self.arrivals.get(id).filter(|arrival| self.has_levels() || arrival.asked.level != 0)?;
        let Arrival { asked, aged_levels, arrived, .. } = *arrival;
        Some(LevelNote { level: asked.level, aged_levels, held_seconds: now - arrived })
    }

    /// Gives requests that wait their present levels. Each keeps its place in the order of arrival.
    pub fn set_levels(&mut self, level_of: impl Fn(ArrivalId) -> i8) {
        let has_levels = self.has_levels();
        let Some(load) = &mut self.load else { return };
        let mut waiting = Vec::new();
        for (id, arrival) in &mut self.arrivals {
            let level = if has_levels { level_of(id) } else { 0 };
            if let Stage::Cache | Stage::Room = arrival.stage {
                arrival.asked.level = level;
                waiting.extend(load.queue.number_of(id).map(|number| (number, id)));
                load.queue.remove(id);
            }
        }
        waiting.sort_unstable();
        waiting.into_iter().for_each(|(_, id)| load.enqueue(&self.arrivals[id], id));
    }

    /// Counts the levels of all requests again, after levels were switched on or off.
    pub(super) fn count_levels(&mut self) {
        let levels: hashbrown::HashMap<ArrivalId, i8> =
            self.arrivals.iter().map(|(id, arrival)| (id, arrival.asked.level)).collect();
        self.set_levels(|id| levels[&id]);
        let Some(load) = &mut self.load else { return };
        load.limits_from.clear();
        for arrival in self.arrivals.values() {
            if let Stage::Ready(Some(_)) | Stage::Running(Some(_)) = arrival.stage {
                load.begin_level(arrival.key(), arrival.asked.weight, arrival.began);
            }
        }
    }
}

/// Returns the number under which a tenant's service counts at the engines, whatever its levels.
pub(super) fn share_of_all(tenant: u64) -> u64 {
    share_of(Key { tenant, level: i8::MIN }) // no request has this level
}

/// Returns the number under which a line's service counts. A tenant has a share of each level.
pub(super) fn share_of(key: Key) -> u64 {
    key.tenant ^ (key.level as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15)
}

impl Load {
    /// Adds a request to its line.
    pub(super) fn enqueue(&mut self, arrival: &Arrival, id: ArrivalId) {
        self.serial += 1;
        // Times are not negative, so their bits sort like the numbers.
        let deadline = arrival.deadline.unwrap_or(f64::INFINITY).max(0.0).to_bits();
        let line = (arrival.key(), arrival.asked.weight.max(1e-3));
        let since = self.config.aging_seconds.map(|_| arrival.since);
        self.queue.insert(id, line, (deadline, self.serial), arrival.work, since);
    }

    /// Notes which lines may not run: the wait for a tenant's own limit raises no level.
    pub(super) fn note_stopped(&mut self, now: Seconds) {
        let Load { config, limits, queue, .. } = self;
        if config.aging_seconds.is_some() && !config.tenants.is_empty() {
            queue.stop(|tenant| !config.may_run(tenant, limits), now);
        }
    }

    /// Returns the order of the levels with requests that may run.
    pub(super) fn ranks(&self, now: Seconds) -> Ranks {
        let Some(aging_seconds) = self.config.aging_seconds else { return Ranks::default() };
        let lines = self.queue.iter().filter(|(key, _)| self.may_run(key.tenant));
        Ranks::new(lines.map(|(key, line)| (key.level, line.longest_wait(now))), aging_seconds)
    }

    /// Returns the lines that may run a request, in their order.
    pub(super) fn turns(&self, ranks: &Ranks, shares: &VirtualTokens) -> Turns {
        let lines = self.queue.iter().filter(|(key, _)| self.may_run(key.tenant));
        lines.map(|(key, _)| self.turn(key, ranks, shares)).collect()
    }

    /// Returns the place of a line in that order.
    pub(super) fn turn(&self, key: Key, ranks: &Ranks, shares: &VirtualTokens) -> Turn {
        Reverse((ranks.of(key.level), shares.start(share_of(key)), key.tenant, key))
    }

    /// Returns whether a line may take the room that is kept for others of its level and above.
    pub(super) fn may_take_kept(&self, key: Key, weight: f64, now: Seconds) -> bool {
        match self.config.aging_seconds {
            None => self.limits.may_take_kept(key.tenant, weight, now),
            Some(_) => {
                let mut from = self.limits_from.range(key.level..);
                from.next().is_none_or(|(_, limits)| limits.may_take_kept(key.tenant, weight, now))
            }
        }
    }

    /// Counts a request that goes to an engine.
    pub(super) fn begin_level(&mut self, key: Key, weight: f64, now: Seconds) {
        if self.config.aging_seconds.is_none() {
            return;
        }
        if !self.limits_from.contains_key(&key.level) {
            let above = self.limits_from.range(key.level..).next().map(|(_, limits)| limits.clone());
            self.limits_from.insert(key.level, above.unwrap_or_else(|| Limits::new(None)));
        }
        let counted = self.limits_from.range_mut(..=key.level);
        counted.for_each(|(_, limits)| limits.begin(key.tenant, weight.max(1e-3), false, now));
    }

    /// Counts the end of such a request.
    pub(super) fn end_level(&mut self, key: Key, now: Seconds) {
        self.limits_from.range_mut(..=key.level).for_each(|(_, limits)| limits.end(key.tenant, now));
    }

    /// Returns the levels with waiting requests, the highest first.
    pub(super) fn levels(&self, now: Seconds) -> Vec<LevelSnapshot> {
        let ranks = self.ranks(now);
        let mut levels: Vec<LevelSnapshot> = Vec::new();
        for (key, line) in self.queue.iter().filter(|_| self.config.aging_seconds.is_some()) {
            let place = levels.iter().position(|each| each.level == key.level).unwrap_or_else(|| {
                let aged_levels = ranks.rise(key.level);
                levels.push(LevelSnapshot { level: key.level, aged_levels, ..LevelSnapshot::default() });
                levels.len() - 1
            });
            levels[place].waiting += line.len();
            levels[place].oldest_seconds = levels[place].oldest_seconds.max(line.longest_wait(now));
        }
        levels.sort_unstable_by_key(|each| Reverse(each.level));
        levels
    }
}
