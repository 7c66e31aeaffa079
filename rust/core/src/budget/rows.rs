//! Rows of counts by window. Rows that count no longer are dropped.
use super::message::Kind;
use super::ring::{WORDS, add_word};
use super::{Board, Now};
use crate::board::{BUDGET_ROWS, BudgetRow, NoRow, RowView};
use hashbrown::HashMap;
use parking_lot::Mutex;
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

/// Rows checked for each new row: more than one, so that rows are dropped sooner than they come.
const CHECKS: usize = 2;
/// Tries to get the board's lock: for some 20 ms. No request waits longer for a worker that has
/// stopped.
const TRIES: u32 = 640;
/// Tries after all of these were in vain, until the board is free again: for about a microsecond.
const FEW_TRIES: u32 = 64;

/// The last known use of a window at the other routers.
#[derive(Clone, Copy, Debug, Default)]
pub struct Sum {
    pub(super) changes: u64,
    pub(super) part: i64,
    pub(super) used: u64,
}

/// Words of a window's counts.
#[derive(Clone, Debug)]
pub enum Row {
    /// A row of the board.
    Shared(Arc<BudgetRow>),
    /// A row of this worker.
    Own(Arc<Own>),
}

/// Words of this worker, until the board has room for them. Reservations that have the row follow
/// it to the board.
#[derive(Debug)]
pub struct Own {
    words: [AtomicU64; WORDS],
    /// The number of their changes.
    changes: AtomicU64,
    /// The row of the board that has the counts.
    moved: OnceLock<Arc<BudgetRow>>,
    /// Locked during each change, and during the move: no change is lost in between.
    changing: Mutex<()>,
}

impl Own {
    pub(super) fn new() -> Own {
        let words = std::array::from_fn(|_| AtomicU64::new(0));
        Own { words, changes: AtomicU64::new(0), moved: OnceLock::new(), changing: Mutex::new(()) }
    }

    fn words(&self) -> &[AtomicU64] {
        self.moved.get().map_or(&self.words[..], |row| row.words())
    }

    /// Moves the counts to a row of the board, which has them from now on.
    pub(super) fn move_to(&self, row: Arc<BudgetRow>) {
        let _changing = self.changing.lock();
        for (own, all) in self.words.iter().zip(row.words()) {
            add_word(all, own.swap(0, Ordering::AcqRel));
        }
        row.changes().fetch_add(1, Ordering::AcqRel);
        self.moved.get_or_init(|| row);
    }
}

/// A row of this router: of this worker, or of any.
pub enum AnyRow<'r> {
    /// A row of the board.
    Shared(RowView<'r>),
    /// A row of this worker: its key, the number of changes so far, and its counts.
    Own(u64, u64, &'r Own),
}

impl AnyRow<'_> {
    /// Returns its key.
    pub fn key(&self) -> u64 {
        match self {
            AnyRow::Shared(row) => row.key,
            AnyRow::Own(key, ..) => *key,
        }
    }

    /// Returns the number of changes: the counts that [`AnyRow::read`] returns have at least these.
    pub fn changes(&self) -> u64 {
        match self {
            AnyRow::Shared(row) => row.changes,
            AnyRow::Own(_, changes, _) => *changes,
        }
    }

    /// Returns its counts; `None`: another key has taken the row.
    pub fn read(&self) -> Option<[u64; WORDS]> {
        match self {
            AnyRow::Shared(row) => row.read(),
            AnyRow::Own(.., own) => {
                Some(std::array::from_fn(|place| own.words[place].load(Ordering::Acquire)))
            }
        }
    }
}

impl Row {
    /// Returns its words.
    pub fn words(&self) -> &[AtomicU64] {
        match self {
            Row::Shared(row) => row.words(),
            Row::Own(own) => own.words(),
        }
    }

    /// Returns its counts.
    pub(super) fn load(&self) -> [u64; WORDS] {
        let words = self.words();
        std::array::from_fn(|place| words[place].load(Ordering::Acquire))
    }

    /// Changes its words, also while they move to the board.
    pub fn change<T>(&self, change: impl FnOnce(&[AtomicU64]) -> T) -> T {
        let _changing = match self {
            Row::Shared(_) => None,
            Row::Own(own) => Some(own.changing.lock()),
        };
        let changed = change(self.words());
        // Then: whoever read the number before, and some of the new words, reads them again.
        self.changes().fetch_add(1, Ordering::AcqRel);
        changed
    }

    /// Returns the number of its changes.
    pub(super) fn changes(&self) -> &AtomicU64 {
        match self {
            Row::Shared(row) => row.changes(),
            Row::Own(own) => own.moved.get().map_or(&own.changes, |row| row.changes()),
        }
    }

    /// Returns whether a reservation may still change the row here.
    fn is_open(&mut self) -> bool {
        match self {
            Row::Shared(row) => Arc::get_mut(row).is_none(),
            Row::Own(own) => Arc::get_mut(own).is_none(),
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

/// The board, and whether its lock can be had.
#[derive(Debug)]
struct Shared {
    board: Arc<Board>,
    /// Whether the last wait for the lock was in vain.
    lock_lost: bool,
}

impl Shared {
    /// Holds the row of a key.
    fn hold(&mut self, key: u64, now: Now) -> Result<Arc<BudgetRow>, NoRow> {
        let tries = if self.lock_lost { FEW_TRIES } else { TRIES };
        let counts = |key: u64, word: u64| Kind::of(key).counts(word, now);
        let row = BudgetRow::hold(&self.board, key, tries, counts);
        self.lock_lost = matches!(row, Err(NoRow::Locked));
        row.map(Arc::new)
    }
}

/// This router's counts by the keys of their windows. A window with counts for each API key has a
/// row for each key, so rows are dropped when they count no longer.
#[derive(Debug, Default)]
pub struct Rows {
    shared: Option<Shared>,
    by_key: HashMap<u64, Entry>,
    /// The keys, in the order of their checks.
    checks: VecDeque<u64>,
    /// Number of rows that the board lacks.
    unshared: usize,
}

impl Rows {
    /// Creates no rows.
    pub fn new(board: Option<Arc<Board>>) -> Rows {
        let shared = board.map(|board| Shared { board, lock_lost: false });
        Rows { shared, ..Rows::default() }
    }

    /// Returns the counts of a window. Without a row of the board, they are this worker's own.
    pub fn entry(&mut self, key: u64, now: Now) -> &mut Entry {
        if !self.by_key.contains_key(&key) {
            self.check(CHECKS, now);
            self.add(key, now);
        }
        self.by_key.get_mut(&key).expect("it was added")
    }

    fn add(&mut self, key: u64, now: Now) {
        let row = match self.shared.as_mut().and_then(|shared| shared.hold(key, now).ok()) {
            Some(row) => Row::Shared(row),
            None => {
                self.unshared += usize::from(self.shared.is_some());
                Row::Own(Arc::new(Own::new()))
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
            row.change(|words| add_word(&words[usize::from(place)], word));
        }
        if is_new && matches!(row, Row::Shared(_)) {
            self.by_key.remove(&key);
            self.checks.pop_back();
        }
    }

    /// Checks the next rows: those that count no longer are dropped, and counts move to the board
    /// when it has room again. Few at a time: no request waits for a check of all rows.
    pub fn check(&mut self, rows: usize, now: Now) {
        let mut may_move = true;
        for _ in 0..rows.min(self.checks.len()) {
            let Some(key) = self.checks.pop_front() else { return };
            let Some(Entry { row, .. }) = self.by_key.get_mut(&key) else { continue };
            let unshared = matches!(row, Row::Own(_)).then_some(self.shared.as_mut()).flatten();
            // Open reservations keep the row, and this worker must not hold it twice.
            if !row.is_open() && !row.counts(Kind::of(key), now) {
                self.unshared -= usize::from(unshared.is_some());
                self.by_key.remove(&key);
                continue;
            }
            if let (Row::Own(own), Some(shared), true) = (&*row, unshared, may_move) {
                match shared.hold(key, now) {
                    Ok(to) => {
                        own.move_to(to.clone());
                        *row = Row::Shared(to);
                        self.unshared -= 1;
                    }
                    Err(_) => may_move = false, // at most one search in vain
                }
            }
            self.checks.push_back(key);
        }
    }

    /// Returns the row of a window that this worker uses.
    pub(super) fn get(&self, key: u64) -> Option<&Row> {
        self.by_key.get(&key).map(|entry| &entry.row)
    }

    /// Yields the windows whose rows the board lacks.
    pub(super) fn own_keys(&self) -> impl Iterator<Item = u64> {
        let own = self.by_key.iter().filter(|(_, entry)| matches!(entry.row, Row::Own(_)));
        own.map(|(key, _)| *key)
    }

    /// Returns the board.
    pub(super) fn board(&self) -> Option<Arc<Board>> {
        self.shared.as_ref().map(|shared| shared.board.clone())
    }

    /// Returns the range of the board's rows.
    pub(super) fn board_rows(&self) -> Range<usize> {
        0..self.shared.as_ref().map_or(0, |_| BUDGET_ROWS)
    }

    /// Yields the rows in a range that have a key.
    pub(super) fn board_rows_in(&self, range: Range<usize>) -> impl Iterator<Item = RowView<'_>> {
        self.shared.iter().flat_map(move |shared| shared.board.budgets_in(range.clone()))
    }

    /// Returns whether the board has all rows, if there is a board.
    pub fn is_shared(&self) -> bool {
        self.unshared == 0
    }

    /// Returns whether the last wait for the board's lock was in vain.
    pub fn lock_lost(&self) -> bool {
        self.shared.as_ref().is_some_and(|shared| shared.lock_lost)
    }

    /// Yields all rows of this router, also those that only other workers use.
    pub fn iter(&self) -> impl Iterator<Item = AnyRow<'_>> {
        let own = self.by_key.iter().filter_map(|(key, entry)| match &entry.row {
            Row::Own(own) => Some(AnyRow::Own(*key, own.changes.load(Ordering::Acquire), own)),
            Row::Shared(_) => None,
        });
        self.shared.iter().flat_map(|shared| shared.board.budgets()).map(AnyRow::Shared).chain(own)
    }
}
