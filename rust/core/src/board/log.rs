//! The log of a board: events that all workers apply in one order.
//!
//! A ring of words with one writer at a time. Each record has a position, which only grows. A
//! reader that has fallen behind by the length of the ring has lost events and must begin anew. A
//! writer that dies leaves a lock behind, which the supervisor takes from it; its unfinished record
//! was not visible to anyone.
//!
//! Each record belongs to a group: one model under one configuration. The log knows which workers
//! use a group, and which of them have its present state: its members. A group that no worker uses
//! is free for another model, whose workers read only later records.
use super::{Board, LOG_AT, WRITERS};
use crate::ids::Seconds;
use std::sync::atomic::{AtomicU64, Ordering, fence};

/// Most groups in use. A group takes a key, its users and its members as masks.
const GROUPS: usize = 1024;
/// Words of the ring: some 16,000 requests of 8,000 tokens.
const RING: usize = 1 << 23;
/// Most words in the parts of a record.
pub const MOST_WORDS: usize = RING / 4;
const HEAD: usize = 8;
const RECORD_HEAD: usize = 3;
/// Words of the log.
pub(super) const WORDS: usize = HEAD + 3 * GROUPS + RING;
/// Tries after which a lock counts as left behind although nobody has freed it: some 10 s.
const TRIES: u32 = 100_000;

const LOCK: usize = 0;
const END: usize = 1;
const RESERVED: usize = 2;

/// A record without its words.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Record {
    /// Its position.
    pub at: u64,
    /// The position of the next record.
    pub next: u64,
    /// The event; readers decide what it means.
    pub kind: u8,
    /// The worker that wrote it.
    pub writer: usize,
    /// Its group; [`ALL`]: all groups.
    pub group: u64,
    /// When it happened.
    pub now: Seconds,
}

/// The group of records for all groups.
pub const ALL: u64 = u64::MAX;
/// The kind of the record of a worker's end. Its word is the worker's number.
pub const LEFT: u8 = 0;

/// The find of a reader.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Read {
    /// No further record.
    End,
    /// A record.
    Record(Record),
    /// Records that are no longer in the ring.
    Lost,
}

impl Board {
    /// Begins to use a group, and returns its number; `None`: there are too many. `key`: a hash of
    /// its name.
    pub fn group(&self, key: u64) -> Option<u64> {
        let (log, key) = (self.log(), key.max(1));
        lock(log, self.writer);
        let find = |is_it: &dyn Fn(u64) -> bool| (0..GROUPS as u64).find(|group| is_it(*group));
        let known = find(&|group| key_of(log, group).load(Ordering::Relaxed) == key);
        let found = known.or_else(|| find(&|group| users(log, group).load(Ordering::Acquire) == 0));
        if let Some(group) = found {
            key_of(log, group).store(key, Ordering::Relaxed);
            users(log, group).fetch_or(1 << self.writer, Ordering::AcqRel);
        }
        unlock(log, self.writer);
        found
    }

    /// Ends the use of a group.
    pub fn end_group(&self, group: u64) {
        self.leave(group);
        users(self.log(), group).fetch_and(!(1 << self.writer), Ordering::AcqRel);
    }

    /// Returns the workers that have the present state of a group, as a mask.
    pub fn members(&self, group: u64) -> u64 {
        members(self.log(), group).load(Ordering::Acquire)
    }

    /// Adds this worker to the members of a group.
    pub fn enter(&self, group: u64) {
        members(self.log(), group).fetch_or(1 << self.writer, Ordering::AcqRel);
    }

    /// Removes this worker from the members of a group.
    pub fn leave(&self, group: u64) {
        members(self.log(), group).fetch_and(!(1 << self.writer), Ordering::AcqRel);
    }

    /// Makes this worker the first member of a group without members. Returns the end of the log
    /// then; `None`: there are other members.
    pub fn found(&self, group: u64) -> Option<u64> {
        let log = self.log();
        lock(log, self.writer);
        let members = members(log, group);
        let free = members.load(Ordering::Acquire) & !(1 << self.writer) == 0;
        if free {
            members.store(1 << self.writer, Ordering::Release);
        }
        let end = log[END].load(Ordering::Acquire);
        unlock(log, self.writer);
        free.then_some(end)
    }

    /// Returns the position behind the last record.
    #[inline]
    pub fn log_end(&self) -> u64 {
        self.log()[END].load(Ordering::Acquire)
    }

    /// Writes a record. Returns the position behind it. `parts`: its words, at most [`MOST_WORDS`].
    pub fn append(&self, group: u64, kind: u8, now: Seconds, parts: &[&[u64]]) -> u64 {
        append(self.log(), self.writer, group, kind, now, parts)
    }

    /// Reads the record at a position, and its words.
    pub fn read_log(&self, at: u64, words: &mut Vec<u64>) -> Read {
        let log = self.log();
        let left = log[END].load(Ordering::Acquire).wrapping_sub(at);
        if left == 0 {
            return Read::End;
        }
        let ring = ring(log);
        let word = |place: u64| ring[(place % RING as u64) as usize].load(Ordering::Relaxed);
        let (head, group, now) = (word(at), word(at + 1), word(at + 2));
        let length = head & 0xffff_ffff;
        words.clear();
        // Another process may write anything.
        if left <= RING as u64 && (RECORD_HEAD as u64..=left).contains(&length) {
            words.extend((at + RECORD_HEAD as u64..at + length).map(word));
        }
        fence(Ordering::Acquire);
        let reserved = log[RESERVED].load(Ordering::Relaxed);
        if reserved.wrapping_sub(at) > RING as u64 || words.len() as u64 + RECORD_HEAD as u64 != length {
            return Read::Lost;
        }
        let (kind, writer) = ((head >> 32) as u8, (head >> 40) as usize % WRITERS);
        Read::Record(Record { at, next: at + length, kind, writer, group, now: f64::from_bits(now) })
    }

    fn log(&self) -> &[AtomicU64] {
        &self.memory.words()[LOG_AT..LOG_AT + WORDS]
    }
}

/// Forgets a worker that has ended: its lock, its place in all groups, and its requests.
pub(super) fn clear(words: &[AtomicU64], writer: usize) {
    let log = &words[LOG_AT..LOG_AT + WORDS];
    unlock(log, writer);
    for group in 0..GROUPS as u64 {
        for workers in [members(log, group), users(log, group)] {
            if workers.load(Ordering::Acquire) & (1 << writer) != 0 {
                workers.fetch_and(!(1 << writer), Ordering::AcqRel);
            }
        }
    }
    append(log, writer, ALL, LEFT, 0.0, &[&[writer as u64]]);
}

fn key_of(log: &[AtomicU64], group: u64) -> &AtomicU64 {
    &log[HEAD + 3 * (group as usize % GROUPS)]
}

fn users(log: &[AtomicU64], group: u64) -> &AtomicU64 {
    &log[HEAD + 3 * (group as usize % GROUPS) + 1]
}

fn members(log: &[AtomicU64], group: u64) -> &AtomicU64 {
    &log[HEAD + 3 * (group as usize % GROUPS) + 2]
}

fn append(log: &[AtomicU64], writer: usize, group: u64, kind: u8, now: Seconds, parts: &[&[u64]]) -> u64 {
    let length = RECORD_HEAD + parts.iter().map(|part| part.len()).sum::<usize>();
    debug_assert!(length <= MOST_WORDS + RECORD_HEAD);
    let head = length as u64 | u64::from(kind) << 32 | (writer as u64) << 40;
    let ring = ring(log);
    lock(log, writer);
    let at = log[END].load(Ordering::Relaxed);
    let next = at + length as u64;
    log[RESERVED].store(next, Ordering::Relaxed);
    fence(Ordering::Release);
    let mut place = at;
    let mut put = |words: &[u64]| {
        for word in words {
            ring[(place % RING as u64) as usize].store(*word, Ordering::Relaxed);
            place += 1;
        }
    };
    put(&[head, group, now.to_bits()]);
    parts.iter().for_each(|part| put(part));
    log[END].store(next, Ordering::Release);
    unlock(log, writer);
    next
}

/// Returns the words of the records. The known length saves a check of each place.
fn ring(log: &[AtomicU64]) -> &[AtomicU64; RING] {
    log[WORDS - RING..].try_into().expect("the end of the log")
}

/// Takes the log's lock, in the end also from a writer that has stopped.
fn lock(log: &[AtomicU64], writer: usize) {
    if !super::lock(&log[LOCK], writer, TRIES) {
        log[LOCK].store(writer as u64 + 1, Ordering::Release);
    }
}

fn unlock(log: &[AtomicU64], writer: usize) {
    super::unlock(&log[LOCK], writer);
}

#[cfg(test)]
mod tests {
    use super::super::tests::{board, memory};
    use super::*;

    #[test]
    fn readers_see_all_records_in_one_order() {
        let memory = memory();
        let (one, two) = (board(&memory, 0), board(&memory, 1));
        let start = one.log_end();
        std::thread::scope(|scope| {
            for board in [&one, &two] {
                scope.spawn(move || {
                    for number in 0..5000_u64 {
                        board.append(number % 3, 7, number as f64, &[&[number], &[number; 5]]);
                    }
                });
            }
        });
        let read_all = |board: &Board| {
            let (mut at, mut words, mut all) = (start, Vec::new(), Vec::new());
            while let Read::Record(record) = board.read_log(at, &mut words) {
                assert_eq!(words, [record.now as u64; 6]);
                all.push(record);
                at = record.next;
            }
            assert_eq!(at, board.log_end());
            all
        };
        let all = read_all(&one);
        assert_eq!(all, read_all(&two));
        for writer in [0, 1] {
            let own = all.iter().filter(|record| record.writer == writer);
            assert!(own.map(|record| record.now).eq((0..5000).map(f64::from)));
        }
    }

    #[test]
    fn a_reader_that_was_overtaken_is_told_so() {
        let memory = memory();
        let (one, two) = (board(&memory, 0), board(&memory, 1));
        let (start, mut words) = (two.log_end(), Vec::new());
        one.append(0, 1, 0.0, &[&[3]]);
        assert!(matches!(two.read_log(start, &mut words), Read::Record(_)));
        let part = vec![9; MOST_WORDS];
        for _ in 0..4 {
            one.append(0, 1, 0.0, &[&part]);
        }
        assert_eq!(two.read_log(start, &mut words), Read::Lost);
        assert_eq!(two.read_log(one.log_end(), &mut words), Read::End);
    }

    #[test]
    fn a_group_that_no_worker_uses_is_free_for_another_model() {
        let memory = memory();
        let (one, two) = (board(&memory, 0), board(&memory, 1));
        let used = one.group(1).expect("a group");
        assert_eq!(two.group(1), Some(used));
        one.end_group(used);
        for key in 2..2 + 2 * GROUPS as u64 {
            let group = one.group(key).expect("a free group");
            assert_ne!(group, used, "another worker uses it");
            one.end_group(group);
        }
        (2..1 + GROUPS as u64).for_each(|key| assert!(one.group(key).is_some_and(|group| group != used)));
        assert_eq!((one.group(9999), two.group(7)), (None, one.group(7)));
        std::mem::forget(two);
        one.clear(1).expect("another area");
        assert_eq!(one.group(9999), Some(used));
    }

    #[test]
    fn a_killed_writer_leaves_no_lock_and_no_membership() {
        let memory = memory();
        let (one, two) = (board(&memory, 0), board(&memory, 1));
        assert_eq!((one.group(5), two.group(6), two.group(5)), (Some(0), Some(1), Some(0)));
        assert_eq!((two.found(0), one.found(0)), (Some(two.log_end()), None));
        lock(two.log(), 1); // killed while it writes
        std::mem::forget(two);
        let start = one.log_end();
        one.clear(1).expect("another area");
        assert!(one.found(0).is_some());
        let mut words = Vec::new();
        let Read::Record(record) = one.read_log(start, &mut words) else { panic!("no record") };
        assert_eq!((record.kind, record.group, &words[..]), (LEFT, ALL, &[1][..]));
    }
}
