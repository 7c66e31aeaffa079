//! Memory that the worker processes of one server share. Each worker writes its load on each
//! instance there, and reads the load of the others.
//!
//! Each writer has an area: the number of its changes, a ring with the rows of the last changes,
//! and the rows. A row has a sequence number, which is odd while the row is written. A reader that
//! has followed the ring reads only the rows that have changed; otherwise it reads all of them.
//! Values are absolute, so a missed change is never more than a late one.
mod budgets;
pub mod log;

use crate::error::CoreError;
use crate::ids::{MAX_INSTANCES, Seconds};
pub use budgets::{BUDGET_ROWS, BUDGET_WORDS, BudgetRow, NoRow, RowView};
use parking_lot::Mutex;
use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::time::Duration;

/// Areas: twice the most workers, because a rolling restart starts the next worker first.
pub const WRITERS: usize = 16;
/// Numbers of a row.
pub const NUMBERS: usize = 16;
/// Rows of an area: one for each instance that the server may have.
const ROWS: usize = MAX_INSTANCES;
const RING: usize = 4096;
/// Words of the memory's head: layout, a mask of the areas in use, and the start of the clock.
const HEAD: usize = 8;
/// Words of an area's head: number of changes, and of rows in use.
const AREA_HEAD: usize = 8;
const ROW: usize = 24;
const AREA: usize = AREA_HEAD + RING + ROWS * ROW;
/// Start of the notes, in words, and their number. A note takes two words.
const NOTES_AT: usize = HEAD + WRITERS * AREA;
const NOTES: usize = 1 << 17;
/// Places in which a note may be: those of its group.
const PLACES: usize = 16;
const GROUPS: usize = NOTES / PLACES;
/// Start of the numbers of replaced notes, one for each group.
const REPLACED_AT: usize = NOTES_AT + 2 * NOTES;
/// Start of the tenants, in words, and their number. A tenant takes a key, and a number of requests
/// for each writer.
const TENANTS_AT: usize = REPLACED_AT + GROUPS;
const TENANTS: usize = 1 << 14;
const TENANT: usize = 1 + WRITERS;
/// Start of the names, in words, and their number.
const NAMES_AT: usize = TENANTS_AT + TENANTS * TENANT;
const NAMES: usize = 4096;
/// Start of the log of programs, in words.
const LOG_AT: usize = NAMES_AT + NAMES;
/// Start of the budgets, in words.
pub(crate) const BUDGETS_AT: usize = LOG_AT + log::WORDS;
/// Size of the memory in bytes. Pages that nobody writes take none.
pub const BYTES: usize = (BUDGETS_AT + budgets::ALL_WORDS) * size_of::<u64>();
/// The first word, which changes with the layout.
const LAYOUT: u64 = 0x6c6d_6574_7269_6337;
/// Attempts to read a row that is being written. A writer that stops meanwhile reports the change
/// afterwards.
const TRIES: u32 = 64;

const LAYOUT_WORD: usize = 0;
const USED_AREAS: usize = 1;
const CLOCK_START: usize = 2;
const CHANGES: usize = 0;
const USED_ROWS: usize = 1;

/// Memory that several processes, or several parts of one, may write at once.
pub trait Memory: Send + Sync {
    /// Returns the words; their number never changes.
    fn words(&self) -> &[AtomicU64];
}

impl Memory for Box<[AtomicU64]> {
    fn words(&self) -> &[AtomicU64] {
        self
    }
}

/// The shared memory, as one writer uses it.
pub struct Board {
    memory: Box<dyn Memory>,
    writer: usize,
    own: Mutex<Own>,
}

/// The writer's own area.
#[derive(Default)]
struct Own {
    changes: u64,
    used: u32,
    free: Vec<u32>,
}

impl Board {
    /// Takes the area `writer` of the memory and empties it.
    ///
    /// # Errors
    /// `BadValue` for a memory of another size or layout, or an area that does not exist.
    pub fn new(memory: Box<dyn Memory>, writer: usize) -> Result<Board, CoreError> {
        let words = memory.words();
        let bad = |what: &str, got: String, expected: String| {
            Err(CoreError::BadValue { what: what.into(), got, expected })
        };
        if size_of_val(words) != BYTES {
            return bad(
                "shared memory of workers",
                format!("{} bytes", size_of_val(words)),
                format!("{BYTES} bytes"),
            );
        }
        if writer >= WRITERS {
            return bad("number of a worker", writer.to_string(), format!("0 to {}", WRITERS - 1));
        }
        let layout = words[LAYOUT_WORD].compare_exchange(0, LAYOUT, Ordering::AcqRel, Ordering::Acquire);
        if let Err(other) = layout
            && other != LAYOUT
        {
            return bad(
                "shared memory of workers",
                format!("layout {other:#x}"),
                format!("{LAYOUT:#x}: all workers must run the same version"),
            );
        }
        clear(words, writer);
        words[USED_AREAS].fetch_or(1 << writer, Ordering::AcqRel);
        let changes = words[at(writer) + CHANGES].load(Ordering::Relaxed);
        let own = Mutex::new(Own { changes, ..Own::default() });
        Ok(Board { memory, writer, own })
    }

    /// Returns the number of this writer's area.
    pub fn writer(&self) -> usize {
        self.writer
    }

    /// Empties the area of a worker that has ended. Its load counts nowhere from then on.
    ///
    /// # Errors
    /// `BadValue` for the own area, or for an area that does not exist.
    pub fn clear(&self, writer: usize) -> Result<(), CoreError> {
        if writer >= WRITERS || writer == self.writer {
            return Err(CoreError::BadValue {
                what: "number of an ended worker".into(),
                got: writer.to_string(),
                expected: format!("0 to {}, but not {}", WRITERS - 1, self.writer),
            });
        }
        clear(self.memory.words(), writer);
        Ok(())
    }

    /// Takes a row for an instance; `None`: all are in use.
    pub fn take(&self) -> Option<u32> {
        let mut own = self.own.lock();
        if let Some(row) = own.free.pop() {
            return Some(row);
        }
        let row = (own.used < ROWS as u32).then_some(own.used)?;
        own.used += 1;
        self.memory.words()[at(self.writer) + USED_ROWS].store(own.used.into(), Ordering::Release);
        Some(row)
    }

    /// Gives a row back.
    pub fn give(&self, row: u32) {
        self.write(row, 0, &[0.0; NUMBERS]);
        self.own.lock().free.push(row);
    }

    /// Writes a row. `key`: the instance's key; 0: none.
    pub fn write(&self, row: u32, key: u64, numbers: &[f64; NUMBERS]) {
        let mut own = self.own.lock();
        let words = self.memory.words();
        put(words, self.writer, row as usize, key, numbers);
        let area = at(self.writer);
        let ring = area + AREA_HEAD + (own.changes % RING as u64) as usize;
        words[ring].store(row.into(), Ordering::Relaxed);
        own.changes += 1;
        words[area + CHANGES].store(own.changes, Ordering::Release);
    }

    /// Yields the areas of the other writers.
    #[inline]
    pub fn others(&self) -> impl Iterator<Item = usize> + use<> {
        let mut used = self.memory.words()[USED_AREAS].load(Ordering::Relaxed) & !(1 << self.writer);
        std::iter::from_fn(move || {
            let next = used.trailing_zeros() as usize;
            used &= used.wrapping_sub(1);
            (next < WRITERS).then_some(next)
        })
    }

    /// Returns the number of changes in a writer's area since the memory was made.
    #[inline]
    pub fn changes(&self, writer: usize) -> u64 {
        self.memory.words()[at(writer) + CHANGES].load(Ordering::Acquire)
    }

    /// Writes the rows of the changes `since..until` to `rows`. Returns false if the ring no longer
    /// has all of them.
    pub fn changed(&self, writer: usize, since: u64, until: u64, rows: &mut Vec<u32>) -> bool {
        rows.clear();
        if until.wrapping_sub(since) > RING as u64 {
            return false;
        }
        let (words, ring) = (self.memory.words(), at(writer) + AREA_HEAD);
        let entry = |change: u64| words[ring + (change % RING as u64) as usize].load(Ordering::Relaxed);
        rows.extend((since..until).map(|change| entry(change) as u32));
        fence(Ordering::Acquire);
        // An entry may be overwritten before its change is counted.
        self.changes(writer).wrapping_sub(since) < RING as u64
    }

    /// Returns the number of rows that a writer has used.
    pub fn rows(&self, writer: usize) -> u32 {
        let used = self.memory.words()[at(writer) + USED_ROWS].load(Ordering::Acquire);
        used.min(ROWS as u64) as u32
    }

    /// Returns the key and the numbers of a row. `None`: it is being written, and a further change
    /// follows.
    pub fn read(&self, writer: usize, row: u32) -> Option<(u64, [f64; NUMBERS])> {
        // The number comes from another process.
        let row = row_at(writer, row as usize % ROWS);
        let words = &self.memory.words()[row..row + ROW];
        for _ in 0..TRIES {
            let before = words[0].load(Ordering::Acquire);
            if before.is_multiple_of(2) {
                let key = words[1].load(Ordering::Relaxed);
                let numbers =
                    std::array::from_fn(|number| f64::from_bits(words[2 + number].load(Ordering::Relaxed)));
                fence(Ordering::Acquire);
                if words[0].load(Ordering::Relaxed) == before {
                    return Some((key, numbers));
                }
            }
            std::hint::spin_loop();
        }
        None
    }
}

/// Notes: values that all workers may look up by a key. They outlive their writer. A note beyond
/// the places of its group usually replaces the group's oldest note: removals change the order.
impl Board {
    /// Notes a value; 0 removes the note. `key`: a hash, not 0.
    pub fn note(&self, key: u64, value: u64) {
        let own = self.places(key).find(|[at, _]| at.load(Ordering::Acquire) == key);
        if value == 0 {
            if let Some([at, held]) = own {
                held.store(0, Ordering::Release);
                let _ = at.compare_exchange(key, 0, Ordering::AcqRel, Ordering::Relaxed);
            }
            return;
        }
        let take = |[at, _]: &[&AtomicU64; 2]| {
            at.compare_exchange(0, key, Ordering::AcqRel, Ordering::Acquire)
                .map_or_else(|other| other == key, |_| true)
        };
        let [_, held] = own.or_else(|| self.places(key).find(take)).unwrap_or_else(|| {
            let replaced = &self.memory.words()[REPLACED_AT + key as usize % GROUPS];
            let next = replaced.fetch_add(1, Ordering::Relaxed) as usize % PLACES;
            let [at, held] = self.places(key).nth(next).expect("one of the places");
            held.store(0, Ordering::Release);
            at.store(key, Ordering::Release);
            [at, held]
        });
        // The value is stored with its key: a reader, and two writers of one place, can mix two
        // notes, and such a mixture must not look like a note.
        held.store(value ^ key, Ordering::Release);
    }

    /// Returns the value that a worker has noted for a key.
    pub fn noted(&self, key: u64) -> Option<u64> {
        let [_, held] = self.places(key).find(|[at, _]| at.load(Ordering::Acquire) == key)?;
        let sealed = held.load(Ordering::Acquire);
        (sealed != 0).then_some(sealed ^ key)
    }

    /// Yields the places in which a note may be.
    fn places(&self, key: u64) -> impl Iterator<Item = [&AtomicU64; 2]> {
        let group = NOTES_AT + key as usize % GROUPS * (2 * PLACES);
        self.memory.words()[group..][..2 * PLACES].chunks_exact(2).map(|place| [&place[0], &place[1]])
    }
}

/// Names: small numbers that are the same in all workers.
impl Board {
    /// Returns the number of a name, from 0 on; `None`: there are too many. `key`: a hash of it.
    pub fn number_of(&self, key: u64) -> Option<usize> {
        let key = key.max(1);
        self.memory.words()[NAMES_AT..LOG_AT].iter().position(|word| {
            let found = word.compare_exchange(0, key, Ordering::AcqRel, Ordering::Acquire);
            found.map_or_else(|other| other == key, |_| true)
        })
    }
}

/// Tenants with limits: what all workers together use of them. A place once taken stays. Methods
/// return `None` if there is no place; then each worker counts for itself.
impl Board {
    fn tenant(&self, key: u64) -> Option<&[AtomicU64]> {
        let key = key.max(1);
        let places = (0..PLACES).map(|step| (key as usize).wrapping_add(step) % TENANTS);
        let mut rows = places.map(|place| &self.memory.words()[TENANTS_AT + place * TENANT..][..TENANT]);
        rows.find(|row| {
            let found = row[0].load(Ordering::Acquire);
            found == key
                || (found == 0
                    && row[0]
                        .compare_exchange(0, key, Ordering::AcqRel, Ordering::Acquire)
                        .map_or_else(|other| other == key, |_| true))
        })
    }

    /// Changes this worker's number of a tenant's requests on engines.
    pub fn set_running(&self, key: u64, running: u32) -> Option<()> {
        self.tenant(key)?[1 + self.writer].store(running.into(), Ordering::Release);
        Some(())
    }

    /// Returns the number of a tenant's requests that the other workers have on engines.
    pub fn running_elsewhere(&self, key: u64) -> Option<u32> {
        let counts = &self.tenant(key)?[1..];
        let others = counts.iter().enumerate().filter(|(writer, _)| *writer != self.writer);
        Some(others.map(|(_, count)| count.load(Ordering::Acquire) as u32).sum())
    }
}

/// The clock that all workers share.
impl Board {
    /// Returns the start of the shared clock. `seconds`: the start if there is none
    /// yet.
    pub fn clock_start(&self, seconds: Seconds) -> Seconds {
        let start = &self.memory.words()[CLOCK_START];
        let set = start.compare_exchange(0, seconds.to_bits(), Ordering::AcqRel, Ordering::Acquire);
        f64::from_bits(set.err().unwrap_or(seconds.to_bits()))
    }
}

impl std::fmt::Debug for Board {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Board").field("writer", &self.writer).finish_non_exhaustive()
    }
}

impl Drop for Board {
    fn drop(&mut self) {
        clear(self.memory.words(), self.writer);
    }
}

fn at(writer: usize) -> usize {
    HEAD + writer * AREA
}

fn row_at(writer: usize, row: usize) -> usize {
    at(writer) + AREA_HEAD + RING + row * ROW
}

/// Writes a row. The area has one writer at a time.
fn put(words: &[AtomicU64], writer: usize, row: usize, key: u64, numbers: &[f64; NUMBERS]) {
    let row = row_at(writer, row);
    let words = &words[row..row + ROW];
    // A writer that was killed may have left an odd number.
    let odd = words[0].load(Ordering::Relaxed) | 1;
    words[0].store(odd, Ordering::Relaxed);
    fence(Ordering::Release);
    words[1].store(key, Ordering::Relaxed);
    for (word, number) in words[2..].iter().zip(numbers) {
        word.store(number.to_bits(), Ordering::Relaxed);
    }
    words[0].store(odd + 1, Ordering::Release);
}

/// Empties an area that nobody writes. Readers then read it anew.
fn clear(words: &[AtomicU64], writer: usize) {
    let area = at(writer);
    let used = words[area + USED_ROWS].load(Ordering::Acquire).min(ROWS as u64) as usize;
    for row in 0..used {
        put(words, writer, row, 0, &[0.0; NUMBERS]);
    }
    words[area + USED_ROWS].store(0, Ordering::Release);
    words[area + CHANGES].fetch_add(2 * RING as u64, Ordering::AcqRel);
    for tenant in words[TENANTS_AT..NAMES_AT].chunks_exact(TENANT) {
        if tenant[0].load(Ordering::Acquire) != 0 {
            tenant[1 + writer].store(0, Ordering::Release);
        }
    }
    budgets::clear(words, writer);
    log::clear(words, writer);
}

/// Takes a lock that one writer has at a time. Returns false if another writer keeps it for too
/// long. After some 500 tries, a try takes 0.1 ms.
fn lock(lock: &AtomicU64, writer: usize, most_tries: u32) -> bool {
    for tries in 0..most_tries {
        if lock.compare_exchange(0, writer as u64 + 1, Ordering::Acquire, Ordering::Relaxed).is_ok() {
            return true;
        }
        match tries {
            0..64 => std::hint::spin_loop(),
            64..512 => std::thread::yield_now(),
            _ => sleep(Duration::from_micros(100)),
        }
    }
    false
}

fn sleep(time: Duration) {
    #[cfg(test)]
    tests::SLEPT.set(tests::SLEPT.get() + time);
    std::thread::sleep(time);
}

/// Frees a lock if the writer has it.
fn unlock(lock: &AtomicU64, writer: usize) {
    let _ = lock.compare_exchange(writer as u64 + 1, 0, Ordering::Release, Ordering::Relaxed);
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use std::cell::Cell;
    use std::sync::Arc;

    thread_local! {
        /// How long this thread has slept while it waited for locks, without the delays of a busy
        /// machine.
        pub(crate) static SLEPT: Cell<Duration> = const { Cell::new(Duration::ZERO) };
    }

    struct Shared(Arc<Box<[AtomicU64]>>);

    impl Memory for Shared {
        fn words(&self) -> &[AtomicU64] {
            &self.0
        }
    }

    pub(crate) fn memory() -> Arc<Box<[AtomicU64]>> {
        Arc::new((0..BYTES / size_of::<u64>()).map(|_| AtomicU64::new(0)).collect())
    }

    pub(crate) fn board(memory: &Arc<Box<[AtomicU64]>>, writer: usize) -> Board {
        Board::new(Box::new(Shared(memory.clone())), writer).expect("an area")
    }

    #[test]
    fn a_reader_finds_the_rows_that_have_changed() {
        let memory = memory();
        let (one, two) = (board(&memory, 0), board(&memory, 5));
        assert_eq!(two.others().collect::<Vec<_>>(), [0]);
        let before = two.changes(0);
        let rows: Vec<u32> = (0..3).map(|_| one.take().expect("a row")).collect();
        one.write(rows[2], 7, &[1.5; NUMBERS]);
        one.write(rows[0], 8, &[2.5; NUMBERS]);
        let mut changed = Vec::new();
        assert!(two.changed(0, before, two.changes(0), &mut changed));
        assert_eq!(changed, [2, 0]);
        assert_eq!(two.read(0, 2), Some((7, [1.5; NUMBERS])));
        one.give(rows[2]);
        assert_eq!((two.read(0, 2), one.take()), (Some((0, [0.0; NUMBERS])), Some(rows[2])));
        for _ in 0..RING {
            one.write(rows[0], 8, &[2.5; NUMBERS]);
        }
        assert!(!two.changed(0, before, two.changes(0), &mut changed));
    }

    #[test]
    fn the_area_of_a_killed_writer_is_emptied() {
        let memory = memory();
        let (one, two) = (board(&memory, 0), board(&memory, 1));
        let row = two.take().expect("a row");
        two.write(row, 9, &[4.0; NUMBERS]);
        memory[row_at(1, row as usize)].fetch_add(1, Ordering::Relaxed); // killed while it wrote
        assert_eq!(one.read(1, row), None);
        let before = one.changes(1);
        std::mem::forget(two);
        one.clear(1).expect("another area");
        assert!(one.clear(0).is_err() && one.clear(WRITERS).is_err());
        assert_eq!((one.rows(1), one.read(1, row)), (0, Some((0, [0.0; NUMBERS]))));
        assert!(!one.changed(1, before, one.changes(1), &mut Vec::new()));
        let next = board(&memory, 1);
        assert_eq!(next.take(), Some(0));
        next.write(0, 3, &[6.0; NUMBERS]);
        assert_eq!(one.read(1, 0), Some((3, [6.0; NUMBERS])));
    }

    #[test]
    fn a_memory_of_another_kind_is_refused() {
        let small: Box<[AtomicU64]> = Box::new([]);
        assert!(Board::new(Box::new(small), 0).is_err_and(|error| error.to_string().contains("0 bytes")));
        let memory = memory();
        memory[LAYOUT_WORD].store(3, Ordering::Relaxed);
        let refused = Board::new(Box::new(Shared(memory.clone())), 0).map(|_| ());
        assert!(refused.is_err_and(|error| error.to_string().contains("same version")));
        let outside = Board::new(Box::new(Shared(memory)), WRITERS).map(|_| ());
        assert!(outside.is_err_and(|error| error.to_string().contains("0 to 15")));
    }

    #[test]
    fn every_worker_finds_a_note_and_the_newest_value_counts() {
        let memory = memory();
        let (one, two) = (board(&memory, 0), board(&memory, 1));
        assert_eq!(two.noted(77), None);
        one.note(77, 5);
        two.note(78, 6);
        assert_eq!((two.noted(77), one.noted(78)), (Some(5), Some(6)));
        two.note(77, 9);
        assert_eq!(one.noted(77), Some(9));
        drop(two);
        assert_eq!(one.noted(78), Some(6));
        one.note(78, 0);
        one.note(79, 0);
        assert_eq!((one.noted(78), one.noted(79)), (None, None));
    }

    #[test]
    fn too_many_notes_of_the_same_places_replace_each_other() {
        let memory = memory();
        let one = board(&memory, 0);
        let keys: Vec<u64> = (1..=2 * PLACES as u64).map(|each| each * NOTES as u64).collect();
        keys.iter().for_each(|key| one.note(*key, key + 1));
        let found = keys.iter().filter(|key| one.noted(**key).is_some()).count();
        assert_eq!(found, PLACES);
        assert!(keys.iter().all(|key| one.noted(*key).is_none_or(|value| value == key + 1)));
    }

    /// A key of the note with this number.
    fn hashed(note: u64) -> u64 {
        xxhash_rust::xxh3::xxh3_64(&note.to_le_bytes())
    }

    #[test]
    fn of_too_many_notes_the_oldest_are_lost() {
        let memory = memory();
        let workers = [board(&memory, 0), board(&memory, 1)];
        let notes = 300_000;
        (0..notes).for_each(|note| workers[note as usize % 2].note(hashed(note), 7));
        let lost = |newest: u64| {
            (notes - newest..notes).filter(|note| workers[0].noted(hashed(*note)).is_none()).count()
        };
        assert_eq!(lost(40_000), 0);
        assert!(lost(100_000) < 3_000, "{}", lost(100_000));
    }

    #[test]
    fn a_removed_note_leaves_its_place_to_others() {
        let memory = memory();
        let one = board(&memory, 0);
        let live = 5_000;
        (0..live).for_each(|note| one.note(hashed(note), 7));
        for note in live..live + 200_000 {
            one.note(hashed(note), 8);
            one.note(hashed(note), 0);
        }
        assert!((0..live).all(|note| one.noted(hashed(note)) == Some(7)));
    }

    #[test]
    fn a_name_has_one_number_in_all_workers() {
        let memory = memory();
        let (one, two) = (board(&memory, 0), board(&memory, 1));
        assert_eq!([7, 8, 7].map(|key| one.number_of(key)), [Some(0), Some(1), Some(0)]);
        assert_eq!([9, 8].map(|key| two.number_of(key)), [Some(2), Some(1)]);
        (100..100 + NAMES as u64).for_each(|key| _ = one.number_of(key));
        assert_eq!((two.number_of(5000), two.number_of(9)), (None, Some(2)));
    }

    #[test]
    fn the_requests_of_a_tenant_on_other_workers_count_until_these_end() {
        let memory = memory();
        let (one, two) = (board(&memory, 0), board(&memory, 1));
        one.set_running(7, 2);
        two.set_running(7, 5);
        assert_eq!((one.running_elsewhere(7), two.running_elsewhere(7)), (Some(5), Some(2)));
        std::mem::forget(two); // killed
        one.clear(1).expect("another area");
        assert_eq!(one.running_elsewhere(7), Some(0));
    }

    #[test]
    fn without_a_place_each_worker_counts_for_itself() {
        let memory = memory();
        let one = board(&memory, 0);
        for key in 1..=PLACES as u64 {
            assert_eq!(one.set_running(key * TENANTS as u64, 1), Some(()));
        }
        let further = (PLACES as u64 + 1) * TENANTS as u64;
        assert_eq!((one.set_running(further, 1), one.running_elsewhere(further)), (None, None));
    }

    /// One thread writes rows whose numbers are equal; a reader never sees two different ones.
    #[test]
    fn a_row_is_never_read_in_half() {
        let memory = memory();
        let (one, two) = (board(&memory, 0), board(&memory, 1));
        let row = one.take().expect("a row");
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for value in 0..20_000 {
                    one.write(row, value, &[value as f64; NUMBERS]);
                }
            });
            for _ in 0..20_000 {
                if let Some((key, numbers)) = two.read(0, row) {
                    assert!(numbers.iter().all(|number| *number == key as f64), "{key} {numbers:?}");
                }
            }
        });
        assert_eq!(two.read(0, row), Some((19_999, [19_999.0; NUMBERS])));
    }
}
