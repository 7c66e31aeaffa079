//! Copies of a part of the index into one with fewer bytes.
//!
//! A part never gives memory back: its chunks do not move. To get smaller, it is copied: chain by
//! chain, the least recently used first, so that a full copy has dropped these. The index may be
//! used and changed between the steps.
use super::cells::Id;
use super::part::Part;
use super::{Copies, KvIndex};
use std::ops::Range;

/// The end of a chain of blocks of an instance.
#[derive(Clone, Copy, Debug)]
struct ChainEnd {
    /// Stamps of the part issued since its last use.
    age: u32,
    /// The instance that holds it.
    instance: u32,
    node: Id,
}

/// Consecutive blocks of a chain.
#[derive(Debug, Default)]
struct Suffix {
    instance: u32,
    parent: Option<u64>,
    /// Hashes and physical copies.
    blocks: Vec<(u64, u32)>,
}

/// Copy of a part of an index, in progress. Call [`PartCopy::look`] until it returns false,
/// [`PartCopy::order`], then [`PartCopy::read`] and [`PartCopy::store`] until reading returns
/// false, then [`KvIndex::replace`].
/// Only some of the calls need the index.
pub struct PartCopy {
    part: usize,
    copy: Part,
    /// The part's number of removals at the start.
    removals: u64,
    /// Cells that remain to be searched for ends of chains.
    cells: Range<u32>,
    ends: Vec<ChainEnd>,
    suffix: Suffix,
}

impl KvIndex {
    /// Begins a copy of a part with more than its share, as if the index had this byte bound;
    /// `None` if no part has more.
    pub fn copy_within(&self, byte_bound: usize) -> Option<PartCopy> {
        let shares = self.shares(byte_bound);
        let (part, of) = self.parts.iter().enumerate().find(|(at, part)| part.bytes() > shares[*at])?;
        let mut copy = Part::new(shares[part], 0);
        of.open().for_each(|(instance, capacity)| copy.add_instance(instance, capacity));
        Some(PartCopy {
            part,
            copy,
            removals: of.removals,
            cells: 0..of.cells.capacity() as u32,
            ends: Vec::new(),
            suffix: Suffix::default(),
        })
    }

    /// Replaces a part by its copy. The copy is then the old part, because dropping it takes time.
    /// Returns false if blocks were removed other than by eviction, or an instance was added or
    /// removed, since the copy began: it lacks the change.
    pub fn replace(&mut self, copy: &mut PartCopy) -> bool {
        let Some(part) = self.parts.get_mut(copy.part) else { return false };
        let unchanged = part.removals == copy.removals;
        if unchanged {
            std::mem::swap(part, &mut copy.copy);
            part.removals = copy.removals + 1;
            part.evicted += copy.copy.evicted;
            self.divide();
        }
        unchanged
    }
}

impl PartCopy {
    /// Looks for ends of chains in up to `most` cells. Returns whether cells remain.
    pub fn look(&mut self, index: &KvIndex, most: u32) -> bool {
        let Some(part) = index.parts.get(self.part) else { return false };
        let to = self.cells.end.min(self.cells.start.saturating_add(most));
        for node in self.cells.start..to {
            part.cells.for_each_holder(node, |holder| {
                if let Some(stamp) = holder.stamp().filter(|_| holder.copies() > 0) {
                    let age = (part.clock as u32).wrapping_sub(stamp);
                    self.ends.push(ChainEnd { age, instance: holder.instance(), node });
                }
            });
        }
        self.cells.start = to;
        !self.cells.is_empty()
    }

    /// Orders the chains: the last is copied first.
    pub fn order(&mut self) {
        self.ends.sort_unstable_by_key(|end| end.age);
    }

    /// Reads the next chain of the index. Returns whether there was one; then
    /// [`PartCopy::store`] stores it.
    pub fn read(&mut self, index: &KvIndex) -> bool {
        match (self.ends.pop(), index.parts.get(self.part)) {
            (Some(end), Some(part)) => {
                part.missing_in(&self.copy, end, &mut self.suffix);
                true
            }
            _ => false,
        }
    }

    /// Stores the chain that was read.
    pub fn store(&mut self) {
        self.copy.store_copy(&self.suffix);
    }
}

impl Part {
    /// Writes the blocks of a chain that `copy` lacks. Blocks behind a hole are left out, since the
    /// copy has no holes.
    fn missing_in(&self, copy: &Part, end: ChainEnd, suffix: &mut Suffix) {
        suffix.blocks.clear();
        (suffix.instance, suffix.parent) = (end.instance, None);
        let mut node = end.node;
        // The cell may be another node's by now, or none.
        while node != 0
            && let Some((_, holder)) = self.cells.entry(node, end.instance)
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

    /// Stores the blocks that [`Part::missing_in`] has found.
    fn store_copy(&mut self, suffix: &Suffix) {
        let chain: Vec<u64> = suffix.blocks.iter().map(|(hash, _)| *hash).collect();
        let placed = self.store(suffix.instance, suffix.parent, &chain, Copies::Add);
        for (hash, copies) in suffix.blocks[..placed].iter().filter(|(_, copies)| *copies > 1) {
            if let Some(node) = self.find(*hash)
                && let Some((at, holder)) = self.cells.entry(node, suffix.instance)
            {
                self.cells.set_entry(node, at, holder.with_copies(*copies));
            }
        }
    }
}
