//! Rows of a board with the counts of budgets: what all workers together have used of each window
//! ([`crate::budget`]).
//!
//! A row serves one key at a time. A worker holds a row as long as it may write to the row. A row
//! that no worker holds, and whose counts have expired, is free for another key. Only a worker that
//! has the lock gives a row to a key, or becomes a holder of it. So two workers never have
//! different rows for a key, and no worker writes to the row of another key.
use super::{BUDGETS_AT, Board, lock, unlock};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering, fence};

/// Words of a row: one for each of the 61 sub-periods that a rolling window counts.
pub const BUDGET_WORDS: usize = 61;
/// Number of rows.
pub const BUDGET_ROWS: usize = 1 << 14;
/// Places in which a key's row may be.
const PLACES: usize = 64;
/// Words of this part: the lock, then the keys of all rows, their holders as masks, the numbers of
/// their changes, and their counts.
pub(super) const ALL_WORDS: usize = COUNTS + BUDGET_ROWS * BUDGET_WORDS;
const LOCK: usize = 0;
const KEYS: usize = 8;
const HOLDERS: usize = KEYS + BUDGET_ROWS;
const CHANGES: usize = HOLDERS + BUDGET_ROWS;
const COUNTS: usize = CHANGES + BUDGET_ROWS;
/// An odd number that spreads keys.
const MIX: u64 = 0x9e37_79b9_7f4a_7c15;

/// Why a key has no row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoRow {
    /// All places of the key's row are in use.
    Full,
    /// Another worker had the lock all the time.
    Locked,
}

/// A row that this worker holds. A worker has at most one such value for a row: the drop of one of
/// two values would end the hold of both.
#[derive(Debug)]
pub struct BudgetRow {
    board: Arc<Board>,
    row: usize,
}

impl BudgetRow {
    /// Holds the row of a key. `tries`: how often to try to get the lock. `counts`: whether a word
    /// of a row of the key still counts.
    ///
    /// # Errors
    /// `Full` or `Locked`; then nothing has changed.
    pub fn hold(
        board: &Arc<Board>,
        key: u64,
        tries: u32,
        counts: impl Fn(u64, u64) -> bool,
    ) -> Result<BudgetRow, NoRow> {
        let words = board.budget_words();
        if !lock(&words[LOCK], board.writer, tries) {
            return Err(NoRow::Locked);
        }
        let row = row_of(words, key.max(1), counts);
        if let Some(row) = row {
            words[HOLDERS + row].fetch_or(1 << board.writer, Ordering::AcqRel);
        }
        unlock(&words[LOCK], board.writer);
        Ok(BudgetRow { board: board.clone(), row: row.ok_or(NoRow::Full)? })
    }

    /// Returns the counts.
    pub fn words(&self) -> &[AtomicU64] {
        counts_of(self.board.budget_words(), self.row)
    }

    /// Returns the number of changes. It is raised after each change of the counts.
    pub fn changes(&self) -> &AtomicU64 {
        &self.board.budget_words()[CHANGES + self.row]
    }
}

impl Drop for BudgetRow {
    fn drop(&mut self) {
        let holders = &self.board.budget_words()[HOLDERS + self.row];
        holders.fetch_and(!(1 << self.board.writer), Ordering::AcqRel);
    }
}

/// A row as another worker sees it.
#[derive(Clone, Copy, Debug)]
pub struct RowView<'b> {
    /// The key at the time of the view.
    pub key: u64,
    /// The number of changes before [`RowView::read`].
    pub changes: u64,
    words: &'b [AtomicU64],
    key_now: &'b AtomicU64,
}

impl RowView<'_> {
    /// Returns the counts; `None`: another key has taken the row.
    pub fn read(&self) -> Option<[u64; BUDGET_WORDS]> {
        let counts = std::array::from_fn(|place| self.words[place].load(Ordering::Acquire));
        fence(Ordering::Acquire);
        (self.key_now.load(Ordering::Relaxed) == self.key).then_some(counts)
    }
}

impl Board {
    /// Yields all rows that have a key.
    pub fn budgets(&self) -> impl Iterator<Item = RowView<'_>> {
        self.budgets_in(0..BUDGET_ROWS)
    }

    /// Yields the rows in a range that have a key.
    pub fn budgets_in(&self, range: Range<usize>) -> impl Iterator<Item = RowView<'_>> {
        let words = self.budget_words();
        range.filter_map(move |row| {
            let key_now = &words[KEYS + row];
            let key = key_now.load(Ordering::Acquire);
            let changes = words[CHANGES + row].load(Ordering::Acquire);
            (key != 0).then(|| RowView { key, changes, words: counts_of(words, row), key_now })
        })
    }

    fn budget_words(&self) -> &[AtomicU64] {
        &self.memory.words()[BUDGETS_AT..BUDGETS_AT + ALL_WORDS]
    }
}

/// Ends the holds of a worker that has ended, and frees its lock.
pub(super) fn clear(words: &[AtomicU64], writer: usize) {
    let words = &words[BUDGETS_AT..BUDGETS_AT + ALL_WORDS];
    for holders in &words[HOLDERS..HOLDERS + BUDGET_ROWS] {
        if holders.load(Ordering::Relaxed) & (1 << writer) != 0 {
            holders.fetch_and(!(1 << writer), Ordering::AcqRel);
        }
    }
    unlock(&words[LOCK], writer);
}

/// Finds the row of a key, or gives a free row to it. The caller has the lock.
fn row_of(words: &[AtomicU64], key: u64, counts: impl Fn(u64, u64) -> bool) -> Option<usize> {
    // The last bits of keys are those of few kinds of windows. With different steps, full places
    // do not form long runs: 13,000 keys have room.
    let hash = key.wrapping_mul(MIX);
    let (start, step) = ((hash >> 32) as usize, 2 * (hash >> 60) as usize + 1);
    let places = || (0..PLACES).map(|number| (start + number * step) % BUDGET_ROWS);
    let key_of = |row: usize| words[KEYS + row].load(Ordering::Relaxed);
    if let Some(row) = places().find(|row| key_of(*row) == key) {
        return Some(row);
    }
    // The last holder's counts are visible with the end of its hold.
    let is_held = |row: usize| words[HOLDERS + row].load(Ordering::Acquire) != 0;
    let row = places().find(|row| {
        let old = key_of(*row);
        let is_free = || counts_of(words, *row).iter().all(|word| !counts(old, word.load(Ordering::Acquire)));
        old == 0 || (!is_held(*row) && is_free())
    })?;
    // A worker that is killed in between leaves a free row.
    words[KEYS + row].store(0, Ordering::Relaxed);
    fence(Ordering::Release);
    counts_of(words, row).iter().for_each(|word| word.store(0, Ordering::Relaxed));
    words[KEYS + row].store(key, Ordering::Release);
    Some(row)
}

fn counts_of(words: &[AtomicU64], row: usize) -> &[AtomicU64] {
    &words[COUNTS + row * BUDGET_WORDS..][..BUDGET_WORDS]
}

#[cfg(test)]
mod tests {
    use super::super::tests::{SLEPT, board, memory};
    use super::*;
    use std::time::Duration;

    type Words = Arc<Box<[AtomicU64]>>;

    const TRIES: u32 = 640;

    fn boards() -> (Words, Arc<Board>, Arc<Board>) {
        let memory = memory();
        let (one, two) = (Arc::new(board(&memory, 0)), Arc::new(board(&memory, 1)));
        (memory, one, two)
    }

    /// Holds a row. Every word that is not 0 counts.
    fn hold(board: &Arc<Board>, key: u64) -> Result<BudgetRow, NoRow> {
        BudgetRow::hold(board, key, TRIES, |_, word| word != 0)
    }

    /// Yields keys with the same places.
    fn neighbors() -> impl Iterator<Item = u64> {
        let is_first = |key: &u64| (key.wrapping_mul(MIX) >> 32).is_multiple_of(BUDGET_ROWS as u64);
        (1_u64..).filter(is_first).filter(|key| key.wrapping_mul(MIX) >> 60 == 0)
    }

    #[test]
    fn a_row_that_is_held_or_counts_serves_no_other_key() {
        let (_, one, two) = boards();
        let keys: Vec<u64> = neighbors().take(PLACES + 1).collect();
        let mut held: Vec<BudgetRow> =
            keys[..PLACES].iter().map(|key| hold(&one, *key).expect("room")).collect();
        assert_eq!(hold(&two, keys[PLACES]).err(), Some(NoRow::Full), "all are held");
        held[3].words()[60].store(5, Ordering::Relaxed);
        drop(held.remove(3));
        assert!(hold(&two, keys[PLACES]).is_err(), "it still counts");
        held.push(hold(&one, keys[3]).expect("its row"));
        let row = held.last().expect("rows");
        assert_eq!(row.words()[60].swap(0, Ordering::Relaxed), 5);
        let known: Vec<u64> = two.budgets().map(|row| row.key).collect();
        assert_eq!(known, keys[..PLACES]);
        // Two workers hold it.
        let other = hold(&two, keys[3]).expect("its row");
        drop(held.pop());
        assert!(hold(&one, keys[PLACES]).is_err(), "the other worker holds it");
        other.words()[7].store(9, Ordering::Relaxed);
        other.words()[7].store(0, Ordering::Relaxed);
        let place = other.row;
        drop(other);
        assert_eq!(hold(&one, keys[PLACES]).map(|row| row.row), Ok(place));
        assert!(one.budgets().all(|row| row.key != keys[3]));
    }

    #[test]
    fn most_rows_are_used_before_a_key_has_no_room() {
        let (_, one, _two) = boards();
        let kinds = 3;
        let held: Vec<_> = (1..=13_000_u64).map_while(|key| hold(&one, key << 4 | kinds).ok()).collect();
        assert_eq!(held.len(), 13_000);
    }

    #[test]
    fn the_rows_of_a_killed_worker_are_free_when_they_count_no_longer() {
        let (_, one, two) = boards();
        let keys: Vec<u64> = neighbors().take(PLACES + 1).collect();
        for key in &keys[..PLACES] {
            let row = hold(&two, *key).expect("room");
            row.words()[0].store(1, Ordering::Relaxed);
            std::mem::forget(row); // its worker is killed
        }
        std::mem::forget(two);
        let new = keys[PLACES];
        assert!(BudgetRow::hold(&one, new, 1, |_, _| false).is_err(), "the rows are held");
        one.clear(1).expect("another area");
        assert!(hold(&one, new).is_err(), "the rows count");
        let row = BudgetRow::hold(&one, new, 1, |_, _| false).expect("a free row");
        assert!(row.words().iter().all(|word| word.load(Ordering::Relaxed) == 0));
    }

    #[test]
    fn a_worker_that_stops_with_the_lock_delays_others_shortly_and_a_killed_one_leaves_no_lock() {
        let (memory, one, _two) = boards();
        assert!(lock(&memory[BUDGETS_AT + LOCK], 1, 1));
        SLEPT.set(Duration::ZERO);
        assert_eq!(hold(&one, 7).err(), Some(NoRow::Locked));
        let slept = SLEPT.get();
        assert!(slept > Duration::ZERO && slept <= Duration::from_millis(20), "{slept:?}");
        one.clear(1).expect("another area");
        assert!(hold(&one, 7).is_ok());
    }

    #[test]
    fn two_workers_get_the_same_row_for_a_new_key() {
        let (_, one, two) = boards();
        let barrier = std::sync::Barrier::new(2);
        let rows = |board: &Arc<Board>| -> Vec<BudgetRow> {
            let row = |key: u64| {
                barrier.wait();
                hold(board, key << 4).expect("room")
            };
            (1..=1000).map(row).collect()
        };
        let (first, second) = std::thread::scope(|scope| {
            let other = scope.spawn(|| rows(&two));
            (rows(&one), other.join().expect("no panic"))
        });
        assert!(first.iter().map(|row| row.row).eq(second.iter().map(|row| row.row)));
        assert_eq!(one.budgets().count(), 1000);
    }

    /// One thread gives a row to one key after the other. A reader sees no counts of another key.
    #[test]
    fn counts_are_never_read_under_another_key() {
        let (_, one, two) = boards();
        let keys: Vec<u64> = neighbors().take(50).collect();
        let done = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for key in keys.iter().cycle().take_while(|_| !done.load(Ordering::Acquire)) {
                    let row = BudgetRow::hold(&one, *key, 1, |_, _| false).expect("room");
                    row.words().iter().for_each(|word| word.store(*key, Ordering::Release));
                }
            });
            let mut read = 0;
            while read < 1000 {
                for (key, words) in two.budgets().filter_map(|row| Some((row.key, row.read()?))) {
                    if !words.iter().all(|word| [0, key].contains(word)) {
                        done.store(true, Ordering::Release);
                        panic!("{key}: {words:?}");
                    }
                    read += 1;
                }
            }
            done.store(true, Ordering::Release);
        });
    }
}
