//! Copies of an index into one with fewer bytes.
//!
//! An index never gives memory back: its chunks do not move. To get smaller, it is copied: chain by
//! chain, the least recently used first, so that a full copy has dropped these. The index may be
//! used and changed between the steps.
use super::cells::Id;
use super::{Copies, KvIndex};
use crate::ids::InstanceId;
use std::ops::Range;

/// The end of a chain of blocks of an instance.
#[derive(Clone, Copy, Debug)]
pub struct ChainEnd {
    /// Stamps of the index issued since its last use.
    pub age: u32,
    /// The instance that holds it.
    pub instance: InstanceId,
    node: Id,
}

/// Consecutive blocks of a chain.
#[derive(Debug, Default)]
pub struct Suffix {
    parent: Option<u64>,
    /// Hashes and physical copies.
    blocks: Vec<(u64, u32)>,
}

impl KvIndex {
    /// Returns a number that changes when blocks are removed other than by eviction, and when an
    /// instance is added or removed. A copy begun before lacks the change.
    pub fn removals(&self) -> u64 {
        self.removals
    }

    /// Returns the number of cells; see [`KvIndex::ends_among`].
    pub fn cells(&self) -> u32 {
        self.cells.capacity() as u32
    }

    /// Appends the ends of chains in these cells to `out`.
    pub fn ends_among(&self, cells: Range<u32>, out: &mut Vec<ChainEnd>) {
        for node in cells.start..cells.end.min(self.cells()) {
            self.cells.for_each_holder(node, |holder| {
                if let Some(stamp) = holder.stamp().filter(|_| holder.copies() > 0) {
                    let age = (self.clock as u32).wrapping_sub(stamp);
                    out.push(ChainEnd { age, instance: InstanceId(holder.instance()), node });
                }
            });
        }
    }

    /// Writes the blocks of a chain that `copy` lacks. Blocks behind a hole are left out, since the
    /// copy has no holes.
    pub fn missing_in(&self, copy: &KvIndex, end: ChainEnd, suffix: &mut Suffix) {
        suffix.blocks.clear();
        suffix.parent = None;
        let mut node = end.node;
        // The cell may be another node's by now, or none.
        while node != 0
            && let Some((_, holder)) = self.cells.entry(node, end.instance.0)
        {
            let hash = self.cells.hash(node);
            if holder.copies() == 0 {
                suffix.blocks.clear();
            } else if copy.holds(end.instance, hash) {
                suffix.parent = Some(hash);
                break;
            } else {
                suffix.blocks.push((hash, holder.copies()));
            }
            node = self.cells.parent(node);
        }
        suffix.blocks.reverse();
    }

    /// Stores the blocks that [`KvIndex::missing_in`] has found.
    pub fn store_copy(&mut self, instance: InstanceId, suffix: &Suffix) {
        let chain: Vec<u64> = suffix.blocks.iter().map(|(hash, _)| *hash).collect();
        let placed = self.store(instance, suffix.parent, &chain, Copies::Add);
        for (hash, copies) in suffix.blocks[..placed].iter().filter(|(_, copies)| *copies > 1) {
            if let Some(node) = self.find(*hash)
                && let Some((at, holder)) = self.cells.entry(node, instance.0)
            {
                self.cells.set_entry(node, at, holder.with_copies(*copies));
            }
        }
    }

    /// Returns the copy of an index with this byte bound, at least the bytes in use, and a new
    /// number of removals.
    pub fn in_place_of(mut self, index: &KvIndex, byte_bound: usize) -> KvIndex {
        self.byte_bound = byte_bound.max(self.bytes());
        self.removals = index.removals + 1;
        self
    }
}
