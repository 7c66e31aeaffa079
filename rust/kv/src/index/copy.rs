//! Copies of a part of the index into one with fewer bytes.
//!
//! A part never gives memory back: its chunks do not move. To get smaller, it is copied: chain by
//! chain, the least recently used first, so that a full copy has dropped these. The index may be
//! used and changed between the steps: the part notes the blocks that it stores meanwhile, and the
//! copy gets them last.
use super::cells::Id;
use super::part::Part;
use super::{Copies, KvIndex};
use std::ops::Range;

/// Most notes of stored blocks. A copy that takes longer fails.
const MAX_NOTES: usize = 1 << 16;
/// Number of noted blocks that are copied at once, when the copy replaces the part: about 25 µs.
const LAST_BLOCKS: u32 = 256;

/// Consecutive blocks that a part has stored while it is copied.
#[derive(Clone, Copy, Debug)]
pub(super) struct Note {
    instance: u32,
    /// The last block.
    last: u64,
    blocks: u32,
}

/// The blocks that a part has stored since a copy began.
#[derive(Debug)]
pub(super) struct Notes {
    /// The part's number of removals when the copy began. The copy fails if it has changed.
    removals: u64,
    notes: Vec<Note>,
}

/// Result of [`KvIndex::replace`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CopyStatus {
    /// The copy has replaced the part.
    Yes,
    /// The part has stored many blocks meanwhile: read and store these, too.
    NotYet,
    /// The copy lacks a change. Blocks were removed other than by eviction, an instance was added,
    /// removed or given another capacity, or another copy began. Or the part has stored more than
    /// it can note.
    Failed,
}

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
    /// Hashes and physical copies of blocks that the copy holds already.
    again: Vec<(u64, u32)>,
}

/// Copy of a part of an index. Call [`KvIndex::begin_copy`], [`PartCopy::look`] until it returns
/// false, [`PartCopy::order`], then [`PartCopy::read`] and [`PartCopy::store`] until reading
/// returns false, then [`KvIndex::replace`]. Only some of the calls need the index.
pub struct PartCopy {
    part: usize,
    copy: Part,
    /// The part's number of removals once the copy had begun.
    removals: u64,
    /// Cells that remain to be searched for ends of chains.
    cells: Range<u32>,
    ends: Vec<ChainEnd>,
    /// Blocks stored meanwhile, in reverse order.
    notes: Vec<Note>,
    suffix: Suffix,
}

impl KvIndex {
    /// Makes an empty copy of a part with more than its share, as if the index had this byte bound;
    /// `None` if no part has more. [`KvIndex::begin_copy`] begins it.
    pub fn copy_within(&self, byte_bound: usize) -> Option<PartCopy> {
        let shares = self.shares(byte_bound);
        let (part, of) = self.parts.iter().enumerate().find(|(at, part)| part.bytes() > shares[*at])?;
        let mut copy = Part::new(shares[part], 0);
        of.open().for_each(|(instance, capacity)| copy.add_instance(instance, capacity));
        Some(PartCopy {
            part,
            copy,
            removals: of.removals,
            cells: 0..0,
            ends: Vec::new(),
            notes: Vec::new(),
            suffix: Suffix::default(),
        })
    }

    /// Begins a copy: the part notes from now on what it stores. Another copy of the part fails.
    /// Returns false if the part has changed since the copy was made.
    pub fn begin_copy(&mut self, copy: &mut PartCopy) -> bool {
        let part = self.parts.get_mut(copy.part).filter(|part| part.removals == copy.removals);
        let Some(part) = part else { return false };
        part.removals += 1;
        part.notes = Some(Box::new(Notes { removals: part.removals, notes: Vec::new() }));
        copy.removals = part.removals;
        copy.cells = 0..part.cells.capacity() as u32;
        true
    }

    /// Replaces a part by its copy. The copy is then the old part, because dropping it takes time.
    pub fn replace(&mut self, copy: &mut PartCopy) -> CopyStatus {
        let Some(part) = self.parts.get_mut(copy.part) else { return CopyStatus::Failed };
        if part.removals != copy.removals {
            return CopyStatus::Failed;
        }
        let Some(notes) = &mut part.notes else { return CopyStatus::Failed };
        copy.notes = std::mem::take(&mut notes.notes);
        copy.notes.reverse();
        if copy.notes.iter().map(|note| note.blocks).fold(0, u32::saturating_add) > LAST_BLOCKS {
            return CopyStatus::NotYet;
        }
        while copy.read(self) {
            copy.store();
        }
        let part = &mut self.parts[copy.part];
        std::mem::swap(part, &mut copy.copy);
        part.removals = copy.removals + 1;
        part.evicted += copy.copy.evicted;
        self.divide();
        CopyStatus::Yes
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

    /// Reads the next chain of the index, or the next blocks stored meanwhile. Returns whether
    /// there were any; then [`PartCopy::store`] stores them.
    pub fn read(&mut self, index: &KvIndex) -> bool {
        let Some(part) = index.parts.get(self.part) else { return false };
        if let Some(end) = self.ends.pop() {
            part.missing_in(&self.copy, end, 0, &mut self.suffix);
            return true;
        }
        let Some(Note { instance, last, blocks }) = self.notes.pop() else { return false };
        // 0: the block has been evicted.
        let end = ChainEnd { age: 0, instance, node: part.find(last).unwrap_or(0) };
        part.missing_in(&self.copy, end, blocks, &mut self.suffix);
        true
    }

    /// Stores the chain that was read.
    pub fn store(&mut self) {
        self.copy.store_copy(&self.suffix);
    }
}

impl Part {
    /// Notes blocks that the part has stored, if it is copied.
    pub(super) fn note(&mut self, instance: u32, last: Id, blocks: usize) {
        let Some(notes) = &mut self.notes else { return };
        if notes.removals != self.removals || notes.notes.len() == MAX_NOTES {
            self.notes = None; // the copy will fail
        } else if last != 0 && blocks > 0 {
            notes.notes.push(Note { instance, last: self.cells.hash(last), blocks: blocks as u32 });
        }
    }

    /// Writes the blocks of a chain that `copy` lacks, and the last `blocks` of the chain that it
    /// holds. Expected blocks are left out, and blocks behind a hole, since the copy has no holes.
    fn missing_in(&self, copy: &Part, end: ChainEnd, blocks: u32, suffix: &mut Suffix) {
        suffix.blocks.clear();
        suffix.again.clear();
        (suffix.instance, suffix.parent) = (end.instance, None);
        let (mut node, mut left) = (end.node, blocks);
        // The cell may be another node's by now, or none.
        while node != 0
            && let Some((_, holder)) = self.cells.entry(node, end.instance)
        {
            let hash = self.cells.hash(node);
            if suffix.parent.is_some() || copy.holds(end.instance, hash) {
                suffix.parent = suffix.parent.or(Some(hash));
                if left == 0 {
                    break;
                }
                suffix.again.push((hash, holder.copies()));
            } else if holder.copies() == 0 || holder.is_expected() {
                suffix.blocks.clear();
            } else {
                suffix.blocks.push((hash, holder.copies()));
            }
            left = left.saturating_sub(1);
            node = self.cells.parent(node);
        }
        suffix.blocks.reverse();
    }

    /// Stores the blocks that [`Part::missing_in`] has found.
    fn store_copy(&mut self, suffix: &Suffix) {
        let chain: Vec<u64> = suffix.blocks.iter().map(|(hash, _)| *hash).collect();
        let placed = self.store(suffix.instance, suffix.parent, &chain, Copies::Add);
        let new = suffix.blocks[..placed].iter().filter(|(_, copies)| *copies > 1);
        for (hash, copies) in new.chain(&suffix.again) {
            if let Some(node) = self.find(*hash)
                && let Some((at, holder)) = self.cells.entry(node, suffix.instance)
                && holder.copies() > 0
            {
                self.cells.set_entry(node, at, holder.with_copies(*copies));
            }
        }
    }
}
