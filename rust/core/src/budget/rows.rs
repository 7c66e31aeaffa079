//! Rows of counts by window. Rows that count no longer are dropped.
use super::exchange::Sum;
use super::message::Kind;
use super::ring::WORDS;
use super::{Board, Now};
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
    Shared(Arc<Board>, usize),
    /// A row of this worker.
    Own(Arc<[AtomicU64; WORDS]>),
}

impl Row {
    /// Returns its words.
    pub fn words(&self) -> &[AtomicU64] {
        match self {
            Row::Shared(board, row) => board.budget(*row),
            Row::Own(words) => &words[..],
        }
    }

    /// Returns whether anything in the row may still count, or a reservation may still change it.
    fn is_used(&self, kind: Kind, now: Now) -> bool {
        match self {
            Row::Shared(..) => true,
            Row::Own(words) => {
                Arc::strong_count(words) > 1
                    || words.iter().any(|word| kind.counts(word.load(Ordering::Acquire), now))
            }
        }
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
    /// Memory with the counts of all workers.
    pub board: Option<Arc<Board>>,
    by_key: HashMap<u64, Entry>,
    /// Keys of this worker's own rows, in the order of their checks.
    checks: VecDeque<u64>,
}

impl Rows {
    /// Creates no rows.
    pub fn new(board: Option<Arc<Board>>) -> Rows {
        Rows { board, ..Rows::default() }
    }

    /// Returns the counts of a window. Without room on the board, new counts are this worker's own.
    pub fn entry(&mut self, key: u64, now: Now) -> &mut Entry {
        if !self.by_key.contains_key(&key) {
            self.check(now);
            self.add(key);
        }
        self.by_key.get_mut(&key).expect("it was added")
    }

    /// Adds the rows of the board that other workers have added.
    pub fn follow_board(&mut self) {
        let Some(board) = self.board.clone() else { return };
        for (key, _) in board.budgets() {
            if !self.by_key.contains_key(&key) {
                self.add(key);
            }
        }
    }

    fn add(&mut self, key: u64) {
        let board = self.board.as_ref();
        let shared = board.and_then(|board| Some(Row::Shared(board.clone(), board.budget_row(key)?)));
        let row = shared.unwrap_or_else(|| {
            self.checks.push_back(key);
            Row::Own(Arc::new(std::array::from_fn(|_| AtomicU64::new(0))))
        });
        self.by_key.insert(key, Entry { row, others: Sum::default() });
    }

    /// Checks the next rows, and drops those that count no longer. Few at a time: no request waits
    /// for a check of all rows.
    fn check(&mut self, now: Now) {
        for _ in 0..CHECKS {
            let Some(key) = self.checks.pop_front() else { return };
            if self.by_key.get(&key).is_some_and(|entry| entry.row.is_used(Kind::of(key), now)) {
                self.checks.push_back(key);
            } else {
                self.by_key.remove(&key);
            }
        }
    }

    /// Returns whether a window has counts.
    pub fn contains(&self, key: u64) -> bool {
        self.by_key.contains_key(&key)
    }

    /// Yields all rows with their keys.
    pub fn iter(&self) -> impl Iterator<Item = (u64, &Row)> {
        self.by_key.iter().map(|(key, entry)| (*key, &entry.row))
    }
}
