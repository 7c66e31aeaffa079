//! The use of a window: amounts by sub-period, in words that several processes may change at once.
//!
//! A word has the number of its sub-period (24 bits, modulo) and the amount in it (40 bits). A
//! rolling window counts the present sub-period and 60 past ones. So the sum is never below the
//! use of any whole period, and above it at most by the use of one sixtieth of a period. A calendar
//! window has one word. All changes are atomic, and no process ever waits for another.
use crate::board::BUDGET_WORDS;
use crate::ids::Seconds;
use std::sync::atomic::{AtomicU64, Ordering};

/// Words of a row.
pub const WORDS: usize = BUDGET_WORDS;
/// Sub-periods of a rolling period.
pub const PARTS: usize = WORDS - 1;
/// Largest amount of a sub-period, and of a limit.
pub const MOST: u64 = (1 << AMOUNT_BITS) - 1;

/// Bits of a word's amount.
pub const AMOUNT_BITS: u32 = 40;
/// Numbers of sub-periods in a word.
pub const TAGS: i64 = 1 << (64 - AMOUNT_BITS);

/// How a window uses the words of its row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Past sub-periods that count.
    past: usize,
    /// Future sub-periods that count, because a clock may go back.
    future: usize,
}

pub const ROLLING: Shape = Shape { past: PARTS, future: PARTS };
pub const CALENDAR: Shape = Shape { past: 0, future: 1 };

impl Shape {
    fn words(self) -> usize {
        self.past + 1
    }

    fn word(self, row: &[AtomicU64], part: i64) -> &AtomicU64 {
        &row[part.rem_euclid(self.words() as i64) as usize]
    }

    /// Returns the age of a word in sub-periods, if the word counts at `part`.
    pub fn age(self, word: u64, part: i64) -> Option<i64> {
        let behind = (part - (word >> AMOUNT_BITS) as i64).rem_euclid(TAGS);
        let age = if behind < TAGS / 2 { behind } else { behind - TAGS };
        (-(self.future as i64)..=self.past as i64).contains(&age).then_some(age)
    }

    /// Yields the words of a row.
    pub fn of(self, row: &[AtomicU64]) -> impl Iterator<Item = u64> {
        row[..self.words()].iter().map(|word| word.load(Ordering::Acquire))
    }

    /// Returns the amount that counts at the sub-period `part`.
    pub fn used(self, words: impl Iterator<Item = u64>, part: i64) -> u64 {
        words.filter(|word| self.age(*word, part).is_some()).map(|word| word & MOST).sum()
    }

    /// Adds an amount to the sub-period `part`. Returns the sub-period that has it.
    pub fn add(self, row: &[AtomicU64], part: i64, amount: u64) -> i64 {
        let word = self.word(row, part);
        let mut known = word.load(Ordering::Acquire);
        loop {
            // A clock that goes back a little does not begin a calendar period again.
            let age = self.age(known, part).filter(|age| *age == 0 || self == CALENDAR);
            let (at, old) = age.map_or((part, 0), |age| (part - age, known & MOST));
            let next = pack(at, (old + amount).min(MOST));
            match word.compare_exchange_weak(known, next, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => return at,
                Err(other) => known = other,
            }
        }
    }

    /// Takes an amount off the sub-period `part`, unless its word serves another one by now.
    pub fn take(self, row: &[AtomicU64], part: i64, amount: u64) {
        let word = self.word(row, part);
        let mut known = word.load(Ordering::Acquire);
        while known >> AMOUNT_BITS == tag(part) {
            let next = pack(part, (known & MOST).saturating_sub(amount));
            match word.compare_exchange_weak(known, next, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => return,
                Err(other) => known = other,
            }
        }
    }

    /// Returns how many sub-periods later at least `amount` of the use counts no more; `None`: no
    /// time is enough.
    pub fn wait(self, words: impl Iterator<Item = u64>, part: i64, amount: u64) -> Option<i64> {
        let mut ages: Vec<(i64, u64)> =
            words.filter_map(|word| self.age(word, part).map(|age| (age, word & MOST))).collect();
        ages.sort_unstable_by_key(|(age, _)| -age);
        let mut freed = 0;
        ages.into_iter().find_map(|(age, used)| {
            freed += used;
            (freed >= amount).then_some(self.past as i64 + 1 - age)
        })
    }
}

/// Adds the word of another row: the newer sub-period stays, and amounts of the same one add up. A
/// word without an amount has no sub-period, so it changes nothing.
pub fn add_word(word: &AtomicU64, other: u64) {
    let sum = |known: u64| {
        if other & MOST == 0 {
            return None;
        }
        let ahead = (other >> AMOUNT_BITS).wrapping_sub(known >> AMOUNT_BITS) as i64;
        match ahead.rem_euclid(TAGS) {
            0 => Some(known - (known & MOST) + ((known & MOST) + (other & MOST)).min(MOST)),
            ahead if ahead < TAGS / 2 || known == 0 => Some(other),
            _ => None,
        }
    };
    let _ = word.fetch_update(Ordering::AcqRel, Ordering::Acquire, sum);
}

/// Returns the length of a sub-period of a rolling period.
pub fn part_seconds(period: Seconds) -> Seconds {
    period / PARTS as f64
}

fn tag(part: i64) -> u64 {
    part.rem_euclid(TAGS) as u64
}

fn pack(part: i64, amount: u64) -> u64 {
    tag(part) << AMOUNT_BITS | amount
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_word_without_an_amount_erases_no_counts() {
        let sum = |known: u64, other: u64| {
            let word = AtomicU64::new(known);
            add_word(&word, other);
            word.into_inner()
        };
        // Up to half of all numbers, and beyond: there 0 looks newer.
        for part in [1, TAGS / 2 - 1, TAGS / 2 + 1, 13_155_515, TAGS - 1] {
            assert_eq!(sum(pack(part, 4), 0), pack(part, 4), "{part}");
            assert_eq!(sum(pack(part, 4), pack(part + 61, 0)), pack(part, 4), "{part}");
            assert_eq!(sum(0, pack(part, 4)), pack(part, 4), "{part}");
            assert_eq!(sum(pack(part, 4), pack(part, 5)), pack(part, 9), "{part}");
            assert_eq!(sum(pack(part, 4), pack(part + 61, 5)), pack(part + 61, 5), "{part}");
            assert_eq!(sum(pack(part + 61, 5), pack(part, 4)), pack(part + 61, 5), "{part}");
        }
    }
}
