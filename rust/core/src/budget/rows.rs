//! Rows of counts by window. Rows that count no longer are dropped.
use super::exchange::Sum;
use super::message::Kind;
use super::ring::{WORDS, add_word};
use super::{Board, Now};
use crate::board::BudgetRow;
use hashbrown::HashMap;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Rows checked for each new row: more than one, so that rows are dropped sooner than they come.
const CHECKS: usize = 2;

/// Words of a window's counts.
#[derive(Clone, Debug)]
pub enum Row {
    /// A row of the board.
    Shared(Arc<BudgetRow>),
    /// A row of this worker.
    Own(Arc<[AtomicU64; WORDS]>),
}

impl Row {
    /// Returns its words.
    pub fn words(&self) -> &[AtomicU64] {
        match self {
            Row::Shared(row) => row.words(),
            Row::Own(words) => &words[..],
        }
    }

    /// Returns whether a reservation may still change the row here.
    fn is_open(&mut self) -> bool {
        match self {
            Row::Shared(row) => Arc::get_mut(row).is_none(),
            Row::Own(words) => Arc::get_mut(words).is_none(),
        }
    }

    /// Returns whether anything in the row may still count.
    fn counts(&self, kind: Kind, now: Now) -> bool {
        self.words().iter().any(|word| kind.counts(word.load(Ordering::Acquire), now))
    }
}

/// This router's counts of a window.
#[derive(Debug)]
pub struct Entry {
    /// The counts.
    pub row: Row,
    /// The use at other routers.
    pub others: Sum,
}

/// This router's counts by the keys of their windows. A window with counts for each API key has a
/// row for each key, so rows are dropped when they count no longer.
#[derive(Debug, Default)]
pub struct Rows {
    board: Option<Arc<Board>>,
    by_key: HashMap<u64, Entry>,
    /// The keys, in the order of their checks.
    checks: VecDeque<u64>,
    /// Number of rows for which the board had no room.
    unshared: usize,
}

impl Rows {
    /// Creates no rows.
    pub fn new(board: Option<Arc<Board>>) -> Rows {
        Rows { board, ..Rows::default() }
    }

    /// Returns the counts of a window. Without room on the board, new counts are this worker's own.
    pub fn entry(&mut self, key: u64, now: Now) -> &mut Entry {
        if !self.by_key.contains_key(&key) {
            self.check(CHECKS, now);
            self.add(key, now);
        }
        self.by_key.get_mut(&key).expect("it was added")
    }

    fn add(&mut self, key: u64, now: Now) {
        let row = match hold(self.board.as_ref(), key, now) {
            Some(row) => Row::Shared(row),
            None => {
                self.unshared += usize::from(self.board.is_some());
                Row::Own(Arc::new(std::array::from_fn(|_| AtomicU64::new(0))))
            }
        };
        self.checks.push_back(key);
        self.by_key.insert(key, Entry { row, others: Sum::default() });
    }

    /// Adds counts of a file. Rows of the board stay there until they count no longer.
    pub fn restore(&mut self, key: u64, words: impl IntoIterator<Item = (u8, u64)>, now: Now) {
        let is_new = !self.by_key.contains_key(&key);
        let row = &self.entry(key, now).row;
        for (place, word) in words {
            add_word(&row.words()[usize::from(place)], word);
        }
        if is_new && matches!(row, Row::Shared(_)) {
            self.by_key.remove(&key);
            self.checks.pop_back();
        }
    }

    /// Checks the next rows: those that count no longer are dropped, and counts move to the board
    /// when it has room again. Few at a time: no request waits for a check of all rows.
    pub fn check(&mut self, rows: usize, now: Now) {
        let mut board = self.board.as_ref();
        for _ in 0..rows.min(self.checks.len()) {
            let Some(key) = self.checks.pop_front() else { return };
            let Some(Entry { row, .. }) = self.by_key.get_mut(&key) else { continue };
            // Open reservations keep the row, and this worker must not hold it twice.
            if !row.is_open() {
                let is_unshared = matches!(row, Row::Own(_)) && self.board.is_some();
                if !row.counts(Kind::of(key), now) {
                    self.by_key.remove(&key);
                    self.unshared -= usize::from(is_unshared);
                    continue;
                }
                if is_unshared && board.is_some() {
                    match hold(board, key, now) {
                        Some(shared) => {
                            let words = row.words().iter().zip(shared.words());
                            words.for_each(|(own, all)| add_word(all, own.load(Ordering::Acquire)));
                            *row = Row::Shared(shared);
                            self.unshared -= 1;
                        }
                        None => board = None, // at most one search in vain
                    }
                }
            }
            self.checks.push_back(key);
        }
    }

    /// Returns whether the board has all rows, if there is a board.
    pub fn is_shared(&self) -> bool {
        self.unshared == 0
    }

    /// Yields all rows of this router, also those that only other workers use: keys and words.
    pub fn iter(&self) -> impl Iterator<Item = (u64, [u64; WORDS])> {
        let own = self.by_key.iter().filter_map(|(key, entry)| match &entry.row {
            Row::Own(words) => {
                Some((*key, std::array::from_fn(|place| words[place].load(Ordering::Acquire))))
            }
            Row::Shared(_) => None,
        });
        self.board.iter().flat_map(|board| board.budgets()).chain(own)
    }
}

/// Holds the row of a key on the board.
fn hold(board: Option<&Arc<Board>>, key: u64, now: Now) -> Option<Arc<BudgetRow>> {
    let counts = |key: u64, word: u64| Kind::of(key).counts(word, now);
    BudgetRow::hold(board?, key, counts).map(Arc::new)
}
