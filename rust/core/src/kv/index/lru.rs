//! Recency: each instance has a queue of its chain ends, oldest first.
//!
//! Only the last block that an instance holds of a chain stands in its queue, with a stamp that the holder's entry repeats;
//! where they differ the queue's entry is stale and skipped. Touching a chain thus costs one stamp and one entry, whatever its
//! length. Eviction takes the oldest end and goes on towards the root while no other chain of the instance passes, so
//! leaves always go first. A queue holds at most twice as many entries as there are ends (plus a few).
use super::cells::{CHILDREN, CHUNK, Cell, Cells, Id, NEXT, PAIRS};
use super::{AHEAD, KvIndex};
use crate::ids::MAX_INSTANCES;

/// Cells that must be available before a block is placed: more than one block can take.
const RESERVE: usize = 80;
/// Blocks evicted at once where bytes run out, to look for the oldest end less often.
const BATCH: u32 = 64;
/// Bytes of table set aside per cell: 8 at a load of no less than 0.68.
const TABLE_BYTES_PER_CELL: usize = 12;
/// Cells are named by 28 bits in the table.
const MOST_CELLS: usize = (1 << 28) - CHUNK;

/// A queue of (node, stamp), three to a cell.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Queue {
    first: Id,
    last: Id,
    /// Entries of the first cell that are gone.
    skip: u8,
    /// Entries of the last cell.
    filled: u8,
    pub(super) len: u32,
}

impl Queue {
    pub(super) fn push_back(&mut self, cells: &mut Cells, node: Id, stamp: u32) {
        if self.last == 0 || self.filled as usize == PAIRS.len() {
            let cell = cells.take();
            if self.last == 0 {
                (self.first, self.skip) = (cell, 0);
            } else {
                cells[self.last].0[NEXT] = cell;
            }
            (self.last, self.filled) = (cell, 0);
        }
        self.write(cells, self.last, self.filled, node, stamp);
        self.filled += 1;
    }

    pub(super) fn push_front(&mut self, cells: &mut Cells, node: Id, stamp: u32) {
        if self.first == 0 || self.skip == 0 {
            let cell = cells.take();
            cells[cell].0[NEXT] = self.first;
            if self.first == 0 {
                (self.last, self.filled) = (cell, PAIRS.len() as u8);
            }
            (self.first, self.skip) = (cell, PAIRS.len() as u8);
        }
        self.skip -= 1;
        self.write(cells, self.first, self.skip, node, stamp);
    }

    fn write(&mut self, cells: &mut Cells, cell: Id, at: u8, node: Id, stamp: u32) {
        let word = PAIRS[at as usize];
        cells[cell].0[word] = node;
        cells[cell].0[word + 1] = stamp;
        self.len += 1;
    }

    pub(super) fn front(&self, cells: &Cells) -> Option<(Id, u32)> {
        let Cell(words) = cells[(self.first != 0).then_some(self.first)?];
        let word = PAIRS[self.skip as usize];
        Some((words[word], words[word + 1]))
    }

    pub(super) fn pop_front(&mut self, cells: &mut Cells) -> Option<(Id, u32)> {
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

impl KvIndex {
    /// Marks the node as just used on the instance.
    pub(super) fn touch_node(&mut self, node: Id, instance: u32) {
        let Some((at, holder)) = self.cells.entry(node, instance) else { return };
        if holder.is_end() {
            self.clock = self.clock.wrapping_add(1);
            self.cells.set_entry(node, at, holder.stamped(self.clock));
            let book = &mut self.books[instance as usize];
            book.queue.push_back(&mut self.cells, node, self.clock);
            if book.queue.len > 2 * book.ends + 16 {
                self.tidy(instance);
            }
        } else {
            self.cells.set_entry(node, at, holder.touched());
        }
    }

    /// Puts an end first in line for eviction.
    pub(super) fn queue_first(&mut self, node: Id, instance: u32) {
        let Some((at, holder)) = self.cells.entry(node, instance).filter(|(_, h)| h.is_end()) else { return };
        let queue = &mut self.books[instance as usize].queue;
        // As old as what is now the oldest: an age of its own would make the instance look idle or busy.
        let stamp = queue.front(&self.cells).map_or(self.clock, |(_, stamp)| stamp);
        self.cells.set_entry(node, at, holder.stamped(stamp));
        queue.push_front(&mut self.cells, node, stamp);
        if queue.len > 2 * self.books[instance as usize].ends + 16 {
            self.tidy(instance);
        }
    }

    fn is_current(&self, instance: u32, (node, stamp): (Id, u32)) -> bool {
        self.cells.entry(node, instance).is_some_and(|(_, h)| h.stamp() == Some(stamp))
    }

    /// Drops what is stale in the queue.
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

    /// Evicts up to `quota` blocks of the instance, least recently used leaves first; returns how many went. An inner block
    /// matched on its own since is spared once, unless `all`.
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

    /// Asks for the table line of the node's parent; returns the parent.
    fn prefetch_parent(&self, node: Id) -> Id {
        let parent = if node == 0 { 0 } else { self.cells.parent(node) };
        if parent != 0 {
            self.table.prefetch(self.table.key(self.cells.hash(parent)));
        }
        parent
    }

    /// Whether a block can be placed as things are; takes a further chunk of cells where the bound allows it.
    #[inline]
    pub(super) fn has_room(&mut self) -> bool {
        self.cells.available() >= RESERVE || self.add_chunk()
    }

    /// Blocks that can be placed before [`KvIndex::has_room`] must be asked again, at least one.
    pub(super) fn room(&self) -> usize {
        self.cells.available().saturating_sub(RESERVE) + 1
    }

    fn add_chunk(&mut self) -> bool {
        let cells = self.cells.capacity() + CHUNK;
        let table = self.table.bytes().max(self.table_start + cells * TABLE_BYTES_PER_CELL);
        let fixed = Self::FIXED_BYTES + self.cells.bytes() - self.cells.capacity() * size_of::<Cell>();
        let fits = cells <= MOST_CELLS && cells * size_of::<Cell>() + table + fixed <= self.byte_bound;
        if fits {
            self.cells.add_chunk();
        }
        fits
    }

    /// Evicts the least recently used blocks of all instances until a block can be placed behind `prev` (which `instance` is
    /// about to extend, and keeps).
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

    /// Keeps a node, and where the instance holds it that too, until [`KvIndex::unpin`]: it gets a child that is not there.
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

    /// Leaves the node, where it is an end, without a place in the queue: the caller is about to extend or to touch it.
    pub(super) fn unpin(&mut self, node: Id, instance: u32, held: bool) {
        if node != 0 {
            self.cells[node].0[CHILDREN] -= 1;
        }
        if held {
            self.child_lost(node, instance);
        }
    }

    /// The instance whose oldest chain end is the oldest of all.
    fn oldest(&mut self) -> Option<u32> {
        let mut oldest = None;
        for instance in 0..self.books.len() as u32 {
            let age = loop {
                let Some(front) = self.books[instance as usize].queue.front(&self.cells) else { break None };
                if self.is_current(instance, front) {
                    break Some(self.clock.wrapping_sub(front.1));
                }
                self.books[instance as usize].queue.pop_front(&mut self.cells);
            };
            oldest = oldest.max(age.map(|age| (age, instance)));
        }
        oldest.map(|(_, instance)| instance)
    }
}

const _: () = assert!(MAX_INSTANCES <= 1 << 12, "entries name instances by 12 bits");

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
            let entry = (step + 1, step ^ 0xff);
            match step * 7 % 11 {
                0..4 => {
                    queue.push_back(&mut cells, entry.0, entry.1);
                    model.push_back(entry);
                }
                4..6 => {
                    queue.push_front(&mut cells, entry.0, entry.1);
                    model.push_front(entry);
                }
                _ => assert_eq!(queue.pop_front(&mut cells), model.pop_front()),
            }
            assert_eq!(queue.front(&cells), model.front().copied());
            assert_eq!(queue.len as usize, model.len());
        }
        while let Some(entry) = queue.pop_front(&mut cells) {
            assert_eq!(Some(entry), model.pop_front());
        }
        assert!(model.is_empty());
        assert_eq!(cells.available(), empty);
    }
}
