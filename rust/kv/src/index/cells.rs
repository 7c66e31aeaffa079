//! A single kind of memory: numbered cells of 32 bytes, in chunks that never move.
//!
//! Nodes, holders of shared nodes and the recency queues all consist of cells. So any use can take
//! a cell that another has freed, and the byte bound covers one pool. The table lists the words of
//! a cell by use. Word 4 distinguishes nodes from other uses: a node has a kind in its two high
//! bits, and other uses keep these bits 0. Group n covers instances 64 n to 64 n + 63. All 8 words
//! of a directory and of a branch are numbers of cells, which have 28 bits; a directory marks
//! branches by the next bit.
//!
//! | word | node | entries | group |
//! | --- | --- | --- | --- |
//! | 0, 1 | hash | first pair | bits of up to 64 holders |
//! | 2, 3 | parent, child nodes | second pair | lists of entries |
//! | 4 | holder or summary of holders | pairs in use; queue: stamps' upper half | number, entries |
//! | 5, 6 | its other half; depth | third pair | lists of entries |
//! | 7 | start of its run | next cell | list of entries |
use crate::table::prefetch;

/// Number of a cell; 0: none.
pub(super) type Id = u32;

/// Cells per allocation (128 KiB).
pub(super) const CHUNK: usize = 4096;

pub(super) const PARENT: usize = 2;
pub(super) const CHILDREN: usize = 3;
pub(super) const WHO: usize = 4;
pub(super) const DEPTH: usize = 6;
pub(super) const BORN: usize = 7;
/// Pairs in use in a cell of entries, or the number and entries of a group.
pub(super) const COUNT: usize = 4;
/// Upper half of the stamps in a cell of a queue.
pub(super) const EPOCH: usize = 4;
/// First cell of a group's entries, if they are in one list.
pub(super) const ENTRIES: usize = 5;
/// First cells of a group's lists of entries.
pub(super) const LISTS: [usize; 5] = [2, 3, 5, 6, 7];
pub(super) const NEXT: usize = 7;
/// First words of the three pairs in a cell of entries.
pub(super) const PAIRS: [usize; 3] = [0, 2, 5];

#[derive(Clone, Copy, Default)]
#[repr(C, align(32))]
pub(super) struct Cell(pub(super) [u32; 8]);

impl Cell {
    /// Returns words 0 and 1: a node's hash, a group's bits.
    #[inline(always)]
    pub(super) fn wide(&self) -> u64 {
        u64::from(self.0[0]) | u64::from(self.0[1]) << 32
    }

    #[inline(always)]
    pub(super) fn set_wide(&mut self, value: u64) {
        self.0[0] = value as u32;
        self.0[1] = (value >> 32) as u32;
    }
}

/// All cells, used and free.
#[derive(Default)]
pub(super) struct Cells {
    chunks: Vec<Box<[Cell; CHUNK]>>,
    /// First freed cell; freed cells are linked by `NEXT`.
    free: Id,
    freed: usize,
    /// First cell never used; cell 0 means none.
    fresh: usize,
}

impl Cells {
    /// Returns the allocated bytes.
    pub(super) fn bytes(&self) -> usize {
        self.capacity() * size_of::<Cell>() + self.chunks.capacity() * size_of::<Box<[Cell; CHUNK]>>()
    }

    pub(super) fn capacity(&self) -> usize {
        self.chunks.len() * CHUNK
    }

    /// Returns the number of cells available before the next chunk is needed.
    pub(super) fn available(&self) -> usize {
        self.capacity() + self.freed - self.fresh.max(1).min(self.capacity())
    }

    pub(super) fn add_chunk(&mut self) {
        let chunk = vec![Cell::default(); CHUNK].into_boxed_slice();
        self.chunks.push(chunk.try_into().unwrap_or_else(|_| unreachable!("made with that length")));
    }

    /// Takes a cell of zeros. The caller must ensure that one is available.
    pub(super) fn take(&mut self) -> Id {
        if self.free != 0 {
            let id = self.free;
            self.free = self[id].0[NEXT];
            self.prefetch(self.free);
            self.freed -= 1;
            self[id] = Cell::default();
            return id;
        }
        self.fresh = self.fresh.max(1);
        if self.fresh == self.capacity().max(1) {
            self.add_chunk();
        }
        self.fresh += 1;
        (self.fresh - 1) as Id
    }

    /// Prefetches a cell.
    #[inline(always)]
    pub(super) fn prefetch(&self, id: Id) {
        if let Some(chunk) = self.chunks.get(id as usize / CHUNK) {
            prefetch(&raw const chunk[id as usize % CHUNK]);
        }
    }

    pub(super) fn give(&mut self, id: Id) {
        let mut cell = Cell::default();
        cell.0[NEXT] = self.free;
        self[id] = cell;
        self.free = id;
        self.freed += 1;
    }
}

impl std::ops::Index<Id> for Cells {
    type Output = Cell;

    #[inline(always)]
    fn index(&self, id: Id) -> &Cell {
        &self.chunks[id as usize / CHUNK][id as usize % CHUNK]
    }
}

impl std::ops::IndexMut<Id> for Cells {
    #[inline(always)]
    fn index_mut(&mut self, id: Id) -> &mut Cell {
        &mut self.chunks[id as usize / CHUNK][id as usize % CHUNK]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cells_are_counted_and_used_again() {
        let mut cells = Cells::default();
        assert_eq!((cells.available(), cells.bytes()), (0, 0));
        let first = cells.take();
        assert_eq!(first, 1);
        assert_eq!(cells.available(), CHUNK - 2);
        let more: Vec<Id> = (0..CHUNK).map(|_| cells.take()).collect();
        assert_eq!(cells.capacity(), 2 * CHUNK);
        cells[more[7]].set_wide(0x0123_4567_89ab_cdef);
        assert_eq!(cells[more[7]].wide(), 0x0123_4567_89ab_cdef);
        let before = cells.available();
        cells.give(more[7]);
        assert_eq!(cells.available(), before + 1);
        assert_eq!(cells.take(), more[7]);
        assert_eq!(cells[more[7]].0, [0; 8]);
        assert_eq!(cells.available(), before);
    }
}
