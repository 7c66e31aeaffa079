//! Recency: each instance has a queue of its chain ends, oldest first.
//!
//! Only the last block that an instance holds of a chain is in its queue, with a stamp. The
//! holder's entry repeats the stamp's low half. If they differ, the queue's entry is stale and
//! skipped. So touching a chain costs one stamp and one entry, whatever its length.
//!
//! A heap of the queues' first stamps finds the oldest queue. A stamp in the heap may be older than
//! the queue's current first entry, but never newer, so only the top of the heap is updated.
//! Eviction takes the oldest end and continues towards the root as long as no other chain of the
//! instance passes, so leaves always go first. A queue holds at most twice as many entries as there
//! are ends (plus a few).
use super::cells::{CHILDREN, CHUNK, Cell, Cells, EPOCH, Id, NEXT, PAIRS};
use super::part::{AHEAD, PART, Part};
use std::cmp::Reverse;

/// Cells that must be available before a block is placed: more than one block can take.
const RESERVE: usize = 80;
/// Blocks evicted at once if memory runs out, to search for the oldest end less often.
const BATCH: u32 = 64;
/// Table bytes reserved per cell: 8 at a load of at least 0.68.
const TABLE_BYTES_PER_CELL: usize = 12;
/// Maximum number of cells: the table has 28 bits per cell number.
const MAX_CELLS: usize = (1 << 28) - CHUNK;

/// First stamp of an instance's queue, ordered oldest first, then by the highest instance number.
pub(super) type Front = Reverse<(u64, Reverse<u32>)>;

/// A queue of (node, stamp), three per cell. The entries of a cell share the upper half of their
/// stamps.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Queue {
    first: Id,
    last: Id,
    /// Removed entries of the first cell.
    skip: u8,
    /// Entries of the last cell.
    filled: u8,
    pub(super) len: u32,
}

impl Queue {
    pub(super) fn push_back(&mut self, cells: &mut Cells, node: Id, stamp: u64) {
        if self.last != 0 && cells[self.last].0[EPOCH] != epoch(stamp) {
            // Once in 2^32 stamps: the rest of the cell is filled with entries without a node.
            let last = cells[self.last].0[PAIRS[self.filled as usize - 1] + 1];
            while (self.filled as usize) < PAIRS.len() {
                self.write(cells, self.last, self.filled, 0, last);
                self.filled += 1;
            }
        }
        if self.last == 0 || self.filled as usize == PAIRS.len() {
            let cell = cells.take();
            if self.last == 0 {
                (self.first, self.skip) = (cell, 0);
            } else {
                cells[self.last].0[NEXT] = cell;
            }
            cells[cell].0[EPOCH] = epoch(stamp);
            (self.last, self.filled) = (cell, 0);
        }
        self.write(cells, self.last, self.filled, node, stamp as u32);
        self.filled += 1;
    }

    /// Adds an entry at the front. `stamp`: stamp of the current first entry, if there is one.
    pub(super) fn push_front(&mut self, cells: &mut Cells, node: Id, stamp: u64) {
        if self.first == 0 || self.skip == 0 {
            let cell = cells.take();
            cells[cell].0[EPOCH] = epoch(stamp);
            cells[cell].0[NEXT] = self.first;
            if self.first == 0 {
                (self.last, self.filled) = (cell, PAIRS.len() as u8);
            }
            (self.first, self.skip) = (cell, PAIRS.len() as u8);
        }
        self.skip -= 1;
        self.write(cells, self.first, self.skip, node, stamp as u32);
    }

    fn write(&mut self, cells: &mut Cells, cell: Id, at: u8, node: Id, stamp: u32) {
        let word = PAIRS[at as usize];
        cells[cell].0[word] = node;
        cells[cell].0[word + 1] = stamp;
        self.len += 1;
    }

    pub(super) fn front(&self, cells: &Cells) -> Option<(Id, u64)> {
        let Cell(words) = cells[(self.first != 0).then_some(self.first)?];
        let word = PAIRS[self.skip as usize];
        Some((words[word], u64::from(words[EPOCH]) << 32 | u64::from(words[word + 1])))
    }

    pub(super) fn pop_front(&mut self, cells: &mut Cells) -> Option<(Id, u64)> {
        let front = self.front(cells)?;
        self.skip += 1;
        self.len -= 1;
        let only = self.first == self.last;
        if self.skip as usize == PAIRS.len() || only && self.skip == self.filled {
            let next = cells[self.first].0[NEXT];
            cells.give(self.first);
            (self.first, self.skip) = (next, 0);
            if only {
                *self = Queue::default();
            }
        }
        Some(front)
    }
}

/// Returns the upper half of a stamp. (Its two high bits stay 0 for any realistic run time; set
/// bits would mark a node.)
fn epoch(stamp: u64) -> u32 {
    (stamp >> 32) as u32
}

impl Part {
    /// Marks the node as just used on the instance.
    pub(super) fn touch_node(&mut self, node: Id, instance: u32) {
        let Some((at, holder)) = self.cells.entry(node, instance) else { return };
        if holder.is_end() {
            self.clock += 1;
            self.cells.set_entry(node, at, holder.stamped(self.clock as u32));
            let book = &mut self.books[instance as usize];
            book.queue.push_back(&mut self.cells, node, self.clock);
            if !std::mem::replace(&mut book.in_fronts, true) {
                self.fronts.push(Reverse((self.clock, Reverse(instance))));
            }
            if book.queue.len > 2 * book.ends + 16 {
                self.tidy(instance);
            }
        } else {
            self.cells.set_entry(node, at, holder.touched());
        }
    }

    /// Makes an end the first candidate for eviction.
    pub(super) fn queue_first(&mut self, node: Id, instance: u32) {
        let Some((at, holder)) = self.cells.entry(node, instance).filter(|(_, h)| h.is_end()) else { return };
        let book = &mut self.books[instance as usize];
        let queue = &mut book.queue;
        // Uses the stamp of the current oldest entry: a new age would make the instance look idle
        // or busy.
        let stamp = queue.front(&self.cells).map_or(self.clock, |(_, stamp)| stamp);
        self.cells.set_entry(node, at, holder.stamped(stamp as u32));
        queue.push_front(&mut self.cells, node, stamp);
        if !std::mem::replace(&mut book.in_fronts, true) {
            self.fronts.push(Reverse((stamp, Reverse(instance))));
        }
        if book.queue.len > 2 * book.ends + 16 {
            self.tidy(instance);
        }
    }

    fn is_current(&self, instance: u32, (node, stamp): (Id, u64)) -> bool {
        node != 0 && self.cells.entry(node, instance).is_some_and(|(_, h)| h.stamp() == Some(stamp as u32))
    }

    /// Drops stale entries from the queue.
    fn tidy(&mut self, instance: u32) {
        let mut queue = std::mem::take(&mut self.books[instance as usize].queue);
        let mut current = Queue::default();
        while let Some(entry) = queue.pop_front(&mut self.cells) {
            if self.is_current(instance, entry) {
                current.push_back(&mut self.cells, entry.0, entry.1);
            }
        }
        self.books[instance as usize].queue = current;
    }

    /// Evicts up to `quota` blocks of the instance, least recently used leaves first, and returns
    /// the number evicted. Spares an inner block once if it was matched by itself since, unless
    /// `all`.
    pub(super) fn evict(&mut self, instance: u32, quota: u32, all: bool) -> u32 {
        let mut gone = 0;
        while gone < quota {
            let Some(entry) = self.books[instance as usize].queue.pop_front(&mut self.cells) else { break };
            if !self.is_current(instance, entry) {
                continue;
            }
            let mut node = entry.0;
            let mut ahead = (0..AHEAD).fold(node, |ahead, _| self.prefetch_parent(ahead));
            while node != 0 && gone < quota {
                ahead = self.prefetch_parent(ahead);
                node = self.lose(node, instance);
                gone += 1;
                if node != 0 && !all && self.cells.entry(node, instance).is_some_and(|(_, h)| h.is_touched())
                {
                    self.touch_node(node, instance);
                    node = 0;
                }
            }
            if node != 0 {
                self.queue_first(node, instance);
            }
        }
        gone
    }

    /// Prefetches the table line of the node's parent and returns the parent.
    fn prefetch_parent(&self, node: Id) -> Id {
        let parent = if node == 0 { 0 } else { self.cells.parent(node) };
        if parent != 0 {
            self.table.prefetch(self.table.key(self.cells.hash(parent)));
        }
        parent
    }

    /// Returns whether a block can be placed now. Allocates another chunk of cells if the bound
    /// allows it.
    #[inline]
    pub(super) fn has_room(&mut self) -> bool {
        self.cells.available() >= RESERVE || self.add_chunk()
    }

    /// Returns the number of blocks that can be placed before the next call of
    /// [`Part::has_room`], at least one.
    pub(super) fn room(&self) -> usize {
        self.cells.available().saturating_sub(RESERVE) + 1
    }

    fn add_chunk(&mut self) -> bool {
        let cells = self.cells.capacity() + CHUNK;
        let table = self.table.bytes().max(self.table_start + cells * TABLE_BYTES_PER_CELL);
        let fixed = Self::FIXED_BYTES + self.cells.bytes() - self.cells.capacity() * size_of::<Cell>();
        let fits = cells <= MAX_CELLS && cells * size_of::<Cell>() + table + fixed <= self.byte_bound;
        if fits {
            self.cells.add_chunk();
        }
        fits
    }

    /// Evicts the least recently used blocks of all instances until a block can be placed after
    /// `prev`, which `instance` keeps.
    pub(super) fn make_room(&mut self, prev: Id, instance: u32) -> bool {
        if self.has_room() {
            return true;
        }
        let pin = self.pin(prev, instance);
        while !self.has_room() {
            let Some(oldest) = self.oldest() else { break };
            let gone = self.evict(oldest, BATCH, false);
            self.evicted += u64::from(gone);
        }
        self.unpin(prev, instance, pin);
        self.has_room()
    }

    /// Keeps a node, and the instance's copy of it if it has one, until [`Part::unpin`], by
    /// adding a placeholder child.
    pub(super) fn pin(&mut self, node: Id, instance: u32) -> bool {
        if node != 0 {
            self.cells[node].0[CHILDREN] += 1;
        }
        let held = node != 0 && self.cells.holds(node, instance);
        if held {
            self.child_gained(node, instance);
        }
        held
    }

    /// Releases the node. If it is an end, it stays without a queue entry: the caller extends or
    /// touches it next.
    pub(super) fn unpin(&mut self, node: Id, instance: u32, held: bool) {
        if node != 0 {
            self.cells[node].0[CHILDREN] -= 1;
        }
        if held {
            self.child_lost(node, instance);
        }
    }

    /// Returns the instance with the oldest chain end of all instances.
    fn oldest(&mut self) -> Option<u32> {
        loop {
            let Reverse((stamp, Reverse(instance))) = *self.fronts.peek()?;
            let front = loop {
                let Some(front) = self.books[instance as usize].queue.front(&self.cells) else { break None };
                if self.is_current(instance, front) {
                    break Some(front.1);
                }
                self.books[instance as usize].queue.pop_front(&mut self.cells);
            };
            if front == Some(stamp) {
                return Some(instance);
            }
            self.fronts.pop();
            match front {
                Some(stamp) => self.fronts.push(Reverse((stamp, Reverse(instance)))),
                None => self.books[instance as usize].in_fronts = false,
            }
        }
    }
}

const _: () = assert!(PART <= 1 << 12, "entries name instances by 12 bits");

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::VecDeque;

    #[test]
    fn a_queue_pushes_at_both_ends_and_frees_its_cells() {
        let mut cells = Cells::default();
        let first = cells.take();
        cells.give(first);
        let empty = cells.available();
        let (mut queue, mut model) = (Queue::default(), VecDeque::new());
        for step in 0..1000u32 {
            // The stamps cross 2^32.
            let stamp = u64::from(u32::MAX) - 300 + u64::from(step);
            let entry = (step + 1, stamp);
            match step * 7 % 11 {
                0..4 => {
                    queue.push_back(&mut cells, entry.0, entry.1);
                    model.push_back(entry);
                }
                4..6 => {
                    let entry = (entry.0, model.front().map_or(stamp, |front| front.1));
                    queue.push_front(&mut cells, entry.0, entry.1);
                    model.push_front(entry);
                }
                _ => assert_eq!(next(&mut queue, &mut cells), model.pop_front()),
            }
            assert!(queue.len as usize <= model.len() + 2);
        }
        while let Some(entry) = next(&mut queue, &mut cells) {
            assert_eq!(Some(entry), model.pop_front());
        }
        assert!(model.is_empty());
        assert_eq!(cells.available(), empty);
    }

    /// Returns the next entry with a node.
    fn next(queue: &mut Queue, cells: &mut Cells) -> Option<(Id, u64)> {
        std::iter::from_fn(|| queue.pop_front(cells)).find(|entry| entry.0 != 0)
    }

    fn index(instances: u32) -> Part {
        let mut index = Part::new(Part::MIN_BYTES, 0);
        (0..instances).for_each(|i| index.add_instance(i, None));
        index
    }

    /// Rust section 6: a chain that was idle for 2^32 touches is the oldest, not as fresh as new.
    #[test]
    fn stamps_do_not_wrap() {
        let mut index = index(3);
        index.clock = 10;
        index.record(0, &[1, 2, 3]);
        index.clock = (1 << 32) + 5;
        index.record(1, &[4, 5, 6]);
        index.clock = (1 << 32) + 12;
        index.record(2, &[7, 8, 9]);
        for idle in 0..3 {
            assert_eq!(index.oldest(), Some(idle));
            index.evict(idle, u32::MAX, true);
        }
        assert_eq!(index.oldest(), None);
    }

    /// Rust B12: the heap finds the same queue as a scan of all queues.
    #[test]
    fn the_oldest_queue_is_found_without_looking_at_all() {
        use proptest::prelude::*;
        let step = (0u32..8, 0u64..12, 1usize..6, 0u32..10);
        proptest!(|(steps in prop::collection::vec(step, 1..120))| {
            let mut index = index(8);
            for (instance, chain, blocks, what) in steps {
                let hashes: Vec<u64> = (1..=blocks as u64).map(|b| chain * 100 + b).collect();
                match what {
                    0 => drop(index.removed(instance, hashes[blocks - 1])),
                    1 => drop(index.evict(instance, blocks as u32, false)),
                    2 => {
                        index.remove_instance(instance);
                        index.add_instance(instance, None);
                    }
                    3..6 => index.touch(instance, &hashes, blocks as u32),
                    _ => index.record(instance, &hashes),
                }
                let linear = (0..8u32)
                    .filter_map(|i| {
                        let mut queue = index.books[i as usize].queue;
                        // The cells are not freed in this scan.
                        loop {
                            let front = queue.front(&index.cells)?;
                            if index.is_current(i, front) {
                                break Some((front.1, Reverse(i)));
                            }
                            let only = queue.first == queue.last;
                            queue.skip += 1;
                            if only && queue.skip == queue.filled {
                                break None;
                            }
                            if queue.skip as usize == PAIRS.len() {
                                (queue.first, queue.skip) = (index.cells[queue.first].0[NEXT], 0);
                            }
                        }
                    })
                    .min()
                    .map(|(_, Reverse(i))| i);
                prop_assert_eq!(index.oldest(), linear);
                prop_assert!(index.fronts.len() <= 8);
            }
        });
    }
}
