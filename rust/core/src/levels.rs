//! Priority levels of waiting requests and held programs, and their aging.
//!
//! The highest level goes first. So that nothing starves, a level rises by one for every
//! `aging_seconds` that its oldest request has waited, up to the highest level that waits.
use crate::ids::Seconds;

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
