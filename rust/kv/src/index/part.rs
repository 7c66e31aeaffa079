//! A part of the index: up to [`PART`] instances, by their numbers in the part.
//!
//! Each distinct block is one 32-byte node, found by the chained hash of its prefix in a table of
//! 8-byte slots. The node stores its parent, its holders, and the number of its children that each
//! holder holds. All memory is cells of one kind (`cells`) plus the table, so the byte bound is
//! exact and memory does not fragment.
//!
//! Nodes without holders and without blocks behind them are freed at once.
use super::Copies;
use super::cells::{CHUNK, Cell, Cells, Id};
use super::copy::Notes;
use super::holes::Holes;
use super::lru::{Front, Queue};
use super::search;
use crate::Slot;
use crate::table::{Key, Row, Table};
use std::collections::BinaryHeap;
use std::ops::Range;

/// Instances of a part: entries name instances by 12 bits.
pub(super) const PART: usize = 1 << 12;
/// Number of blocks whose nodes are prefetched before placing or removing them. The lines of the
/// table that name these nodes are prefetched as many blocks earlier.
pub(super) const AHEAD: usize = 8;

/// Part of the index, with a byte bound of its own.
pub(super) struct Part {
    pub(super) cells: Cells,
    pub(super) table: Table<NodeSlot>,
    /// Bytes of the table if each segment has its smallest size.
    pub(super) table_start: usize,
    pub(super) books: Vec<Book>,
    pub(super) holes: Option<Holes>,
    pub(super) byte_bound: usize,
    /// Last stamp issued.
    pub(super) clock: u64,
    /// Heap for finding the oldest chain end.
    pub(super) fronts: BinaryHeap<Front>,
    pub(super) pairs: usize,
    pub(super) evicted: u64,
    /// Changes that a copy in progress lacks.
    pub(super) removals: u64,
    /// Stored blocks that a copy in progress lacks.
    pub(super) notes: Option<Box<Notes>>,
}

/// State of an instance.
#[derive(Clone, Default)]
pub(super) struct Book {
    pub(super) open: bool,
    /// Maximum blocks that `record` keeps.
    pub(super) capacity: u32,
    pub(super) blocks: u32,
    /// Blocks held without any child.
    pub(super) ends: u32,
    /// Blocks not held although a child is.
    pub(super) holes: u32,
    pub(super) queue: Queue,
    /// Whether the instance is in `fronts`.
    pub(super) in_fronts: bool,
    /// Most blocks held when the engine evicted one, since [`Part::take_full`].
    pub(super) full: u32,
}

/// A table slot: 32 bits of the hash, 4 bits of the number of holders, 28 bits of the node. Count
/// 14 means 14 or more. Count 15 means that other nodes share the place, so the count is unknown.
#[derive(Clone, Copy, PartialEq)]
pub(super) struct NodeSlot(u64);

impl NodeSlot {
    pub(super) const MANY: u32 = 14;
    pub(super) const UNSAID: u32 = 15;

    pub(super) fn new(key: Key, holders: u32, node: Id) -> NodeSlot {
        NodeSlot(u64::from(key.place()) << 32 | u64::from(holders) << 28 | u64::from(node))
    }

    #[inline(always)]
    pub(super) fn node(self) -> Id {
        self.0 as u32 & ((1 << 28) - 1)
    }

    #[inline(always)]
    pub(super) fn holders(self) -> u32 {
        self.0 as u32 >> 28
    }
}

impl Row for NodeSlot {
    const EMPTY: NodeSlot = NodeSlot(0);

    #[inline(always)]
    fn is_empty(self) -> bool {
        self.0 == 0
    }

    #[inline(always)]
    fn place(self) -> u32 {
        (self.0 >> 32) as u32
    }
}

impl Part {
    /// Minimum byte bound; smaller bounds are raised to it.
    pub(super) const MIN_BYTES: usize = 1 << 20;
    /// Bytes reserved outside cells and table: state and fronts of all instances, tables of holes,
    /// the struct itself.
    pub(super) const FIXED_BYTES: usize =
        PART * (size_of::<Book>() + size_of::<Front>()) + Holes::BYTES + size_of::<Part>();

    /// Creates an empty part that never uses more than `byte_bound` bytes (least recently used
    /// leaves are evicted first). `expected_bytes`: its bound in the end, if it grows.
    pub(super) fn new(byte_bound: usize, expected_bytes: usize) -> Part {
        let byte_bound = byte_bound.max(Self::MIN_BYTES);
        // Segments of about 4,096 entries if the part is full: growing one takes a few
        // microseconds.
        let bits = (byte_bound.max(expected_bytes) / (4096 * 43)).max(1).ilog2().min(16);
        let table = Table::new(bits);
        let table_start = table.bytes() + (Table::<NodeSlot>::MIN_SEGMENT_BYTES << bits);
        Part {
            cells: Cells::default(),
            table,
            table_start,
            books: Vec::new(),
            holes: None,
            byte_bound,
            clock: 0,
            fronts: BinaryHeap::new(),
            pairs: 0,
            evicted: 0,
            removals: 0,
            notes: None,
        }
    }

    /// Adds an instance, or changes its capacity. `capacity_blocks`: size of its cache, which
    /// bounds the blocks that [`Part::record`] keeps.
    pub(super) fn add_instance(&mut self, instance: u32, capacity_blocks: Option<u32>) {
        let slot = instance as usize;
        if slot >= self.books.len() {
            self.books.reserve_exact(slot + 1 - self.books.len());
            self.books.resize(slot + 1, Book::default());
        }
        self.removals += 1;
        let book = &mut self.books[slot];
        (book.open, book.capacity) = (true, capacity_blocks.unwrap_or(u32::MAX));
        let over = book.blocks.saturating_sub(book.capacity);
        self.evict_from(instance, over);
    }

    /// Yields the instances, each with its capacity.
    pub(super) fn open(&self) -> impl Iterator<Item = (u32, Option<u32>)> {
        let books = (0..).zip(&self.books).filter(|(_, book)| book.open);
        books.map(|(number, book)| (number, (book.capacity != u32::MAX).then_some(book.capacity)))
    }

    /// Changes the capacity of an instance without evicting blocks beyond it; [`Part::trim`]
    /// evicts them.
    pub(super) fn set_capacity(&mut self, instance: u32, capacity_blocks: Option<u32>) {
        let capacity = capacity_blocks.unwrap_or(u32::MAX);
        if let Some(book) = self.books.get_mut(instance as usize)
            && book.capacity != capacity
        {
            book.capacity = capacity;
            self.removals += 1;
        }
    }

    /// Evicts up to `most` blocks beyond the instance's capacity and returns the number left beyond
    /// it.
    pub(super) fn trim(&mut self, instance: u32, most: u32) -> u32 {
        let Some(book) = self.books.get(instance as usize) else { return 0 };
        let over = book.blocks.saturating_sub(book.capacity);
        over - self.evict_from(instance, over.min(most))
    }

    /// Removes all state of an instance.
    pub(super) fn remove_instance(&mut self, instance: u32) {
        self.cleared(instance);
        if let Some(book) = self.books.get_mut(instance as usize) {
            *book = Book { in_fronts: book.in_fronts, ..Book::default() };
        }
    }

    /// Returns whether the instance is in the index.
    pub(super) fn is_open(&self, instance: u32) -> bool {
        self.books.get(instance as usize).is_some_and(|b| b.open)
    }

    /// Approximate feed: records that this prompt was placed on `instance`, so its blocks will be
    /// there. If the chain is longer than the instance's capacity, its front is kept.
    pub(super) fn record(&mut self, instance: u32, chain: &[u64]) {
        self.record_hit(instance, chain, 0);
    }

    /// Records a prompt like [`Part::record`], given the instance's `hit_blocks` from
    /// [`Part::search`]. This saves the search if `hit_blocks` is still correct.
    pub(super) fn record_hit(&mut self, instance: u32, chain: &[u64], hit_blocks: u32) {
        let left = self.record_some(instance, chain, hit_blocks, usize::MAX);
        debug_assert_eq!(left, None);
    }

    /// Records a prompt like [`Part::record_hit`], but evicts and places at most `most` blocks.
    /// Returns the number of leading blocks held then, if more is left to do.
    pub(super) fn record_some(
        &mut self,
        instance: u32,
        chain: &[u64],
        hit_blocks: u32,
        most: usize,
    ) -> Option<u32> {
        if !self.is_open(instance) {
            return None;
        }
        let held = self.held_behind(instance, chain, hit_blocks as usize);
        self.record_behind(instance, chain, held, most).map(|held| held as u32)
    }

    /// Returns the number of leading blocks of a chain that the instance holds; `hit`: its number
    /// some time ago.
    fn held_behind(&self, instance: u32, chain: &[u64], hit: usize) -> usize {
        let holds = |at: usize| chain.get(at).is_some_and(|h| self.holds(instance, *h));
        let is_hit = hit <= chain.len() && (hit == 0 || holds(hit - 1)) && !holds(hit);
        if is_hit { hit } else { self.held(chain, instance) }
    }

    /// Enters at most `most` blocks of a computed prompt as expected, and returns their positions.
    pub(super) fn expect_some(
        &mut self,
        instance: u32,
        chain: &[u64],
        hit_blocks: u32,
        most: usize,
    ) -> Range<usize> {
        if !self.is_open(instance) {
            return 0..0;
        }
        let held = self.held_behind(instance, chain, hit_blocks as usize);
        let parent = held.checked_sub(1).map(|at| chain[at]);
        let new = &chain[held..held.saturating_add(most).min(chain.len())];
        let placed = if new.is_empty() { 0 } else { self.store(instance, parent, new, Copies::Expect) };
        held..held + placed
    }

    /// Removes the copies of these consecutive blocks that are only expected.
    pub(super) fn drop_expected(&mut self, instance: u32, chain: &[u64]) {
        let entry = |hash: &u64| self.cells.entry(self.find(*hash)?, instance);
        let is_expected = |hash: &u64| entry(hash).is_some_and(|(_, holder)| holder.is_expected());
        let unreported: Vec<u64> = chain.iter().rev().copied().filter(is_expected).collect();
        self.removed_all(instance, &unreported);
    }

    /// Marks the first `blocks` of the chain as just used on the instance.
    pub(super) fn touch(&mut self, instance: u32, chain: &[u64], blocks: u32) {
        let last = (blocks as usize).min(chain.len()).checked_sub(1);
        let node = last.and_then(|at| self.find(chain[at]));
        if let Some(node) = node
            && self.is_open(instance)
            && self.make_room(node, instance)
        {
            self.touch_node(node, instance);
        }
    }

    /// Exact feed: records that `instance` stored these consecutive blocks after `parent` (None:
    /// they start the chain). Each call counts one physical copy of each block. Returns the number
    /// of blocks placed: 0 if the parent is unknown.
    pub(super) fn stored(&mut self, instance: u32, parent: Option<u64>, chain: &[u64]) -> usize {
        self.store(instance, parent, chain, Copies::Add)
    }

    /// Records stored blocks like [`Part::stored`]. `copies` sets the effect on blocks that are
    /// already present.
    pub(super) fn store(
        &mut self,
        instance: u32,
        parent: Option<u64>,
        chain: &[u64],
        copies: Copies,
    ) -> usize {
        let parent = match parent {
            None => Some(0),
            Some(hash) => self.find(hash),
        };
        match parent {
            Some(parent) if self.is_open(instance) => self.place(instance, parent, chain, copies),
            _ => 0,
        }
    }

    /// Exact feed: removes one physical copy of a block. Returns whether the block was in the
    /// index.
    pub(super) fn removed(&mut self, instance: u32, hash: u64) -> bool {
        self.removed_all(instance, &[hash]) == 1
    }

    /// Removes a copy of many blocks and returns the number that were in the index. Blocks of one
    /// chain in order from its end skip the lookup of each block.
    pub(super) fn removed_all(&mut self, instance: u32, hashes: &[u64]) -> usize {
        let (mut known, mut end) = (0, 0);
        for (i, &hash) in hashes.iter().enumerate() {
            self.prefetch_behind(hashes, i);
            // `end` is the parent of the last removed block if it is an end now. It has no queue
            // entry yet.
            let expected = end != 0 && self.cells.hash(end) == hash;
            if !expected && end != 0 {
                self.queue_first(end, instance);
            }
            let found = if expected { Some(end) } else { self.find(hash) };
            end = 0;
            let Some(node) = found else { continue };
            let Some((at, holder)) = self.cells.entry(node, instance) else { continue };
            match holder.copies() {
                0 => continue,
                1 => end = self.lose(node, instance),
                more => {
                    self.cells.set_entry(node, at, holder.with_copies(more - 1));
                    if expected {
                        self.queue_first(node, instance);
                    }
                }
            }
            known += 1;
        }
        if end != 0 {
            self.queue_first(end, instance);
        }
        self.removals += u64::from(known > 0);
        known
    }

    /// Removes blocks that the engine has evicted: its cache was full. Returns the number that were
    /// in the index.
    pub(super) fn evicted_all(&mut self, instance: u32, hashes: &[u64]) -> usize {
        let held = self.blocks(instance);
        let known = self.removed_all(instance, hashes);
        if let (Some(book), true) = (self.books.get_mut(instance as usize), known > 0) {
            book.full = book.full.max(held);
        }
        known
    }

    /// Returns the most blocks that the instance held when its engine evicted one, since the last
    /// call; `None`: it evicted none.
    pub(super) fn take_full(&mut self, instance: u32) -> Option<u32> {
        let full = self.books.get_mut(instance as usize).map_or(0, |book| std::mem::take(&mut book.full));
        (full > 0).then_some(full)
    }

    /// Drops up to `most` blocks of the instance and returns the number left.
    pub(super) fn clear_some(&mut self, instance: u32, most: u32) -> u32 {
        if self.is_open(instance) {
            self.removals += 1;
            self.evict(instance, most, true);
        }
        self.blocks(instance)
    }

    /// Exact feed: the whole cache of `instance` was cleared.
    pub(super) fn cleared(&mut self, instance: u32) {
        if self.is_open(instance) {
            self.removals += 1;
            self.evict(instance, u32::MAX, true);
            debug_assert_eq!(self.books[instance as usize].blocks, 0);
        }
    }

    /// Evicts up to `blocks` blocks of the instance, least recently used leaves first, and returns
    /// the number evicted.
    pub(super) fn evict_from(&mut self, instance: u32, blocks: u32) -> u32 {
        let gone = if self.is_open(instance) { self.evict(instance, blocks, false) } else { 0 };
        self.evicted += u64::from(gone);
        gone
    }

    /// Returns whether the instance holds the block, regardless of the blocks before it.
    pub(super) fn holds(&self, instance: u32, hash: u64) -> bool {
        self.find(hash).is_some_and(|node| self.cells.holds(node, instance))
    }

    /// Returns the block before a block of the index (`Some(None)`: the block starts a prompt);
    /// `None` if the index does not know the block.
    pub(super) fn parent_of(&self, hash: u64) -> Option<Option<u64>> {
        let parent = self.cells.parent(self.find(hash)?);
        Some((parent != 0).then(|| self.cells.hash(parent)))
    }

    /// Appends the instances that hold the block (and all blocks before it) to `out`, in order.
    /// `first`: number of the part's first instance.
    pub(super) fn holders(&self, hash: u64, first: u32, out: &mut Vec<Slot>) {
        let Some(node) = self.find(hash) else { return };
        let start = out.len();
        self.cells.for_each_group(node, |group, bits| {
            search::for_each_bit(bits, |bit| out.push(Slot(first + (group * 64 + bit) as u32)));
        });
        out[start..].sort_unstable();
        let mut before = self.cells.parent(node);
        while before != 0 && self.holes.as_ref().is_some_and(|h| !h.is_empty()) {
            let holds = |i: &Slot| self.cells.holds(before, i.0 - first);
            let kept = out[start..].iter().copied().filter(holds).collect::<Vec<_>>();
            out.truncate(start);
            out.extend(kept);
            before = self.cells.parent(before);
        }
    }

    /// Returns the number of blocks held by `instance`.
    pub(super) fn blocks(&self, instance: u32) -> u32 {
        self.books.get(instance as usize).map_or(0, |b| b.blocks)
    }

    /// Returns the number of distinct blocks in the part, including blocks kept only for the
    /// blocks behind them.
    pub(super) fn nodes(&self) -> usize {
        self.table.len()
    }

    /// Returns the bytes in use, including allocations.
    pub(super) fn bytes(&self) -> usize {
        let holes = if self.holes.is_some() { Holes::BYTES } else { 0 };
        let books = self.books.capacity() * size_of::<Book>() + self.fronts.capacity() * size_of::<Front>();
        size_of::<Part>() + self.cells.bytes() + self.table.bytes() + books + holes
    }
}

impl Part {
    /// Prefetches what a walk along `hashes` reads soon after position `at`.
    #[inline(always)]
    pub(super) fn prefetch_behind(&self, hashes: &[u64], at: usize) {
        if let Some(&hash) = hashes.get(at + 2 * AHEAD) {
            self.table.prefetch(self.table.key(hash));
        }
        if let Some(&hash) = hashes.get(at + AHEAD)
            && let Some(slot) = self.table.find(self.table.key(hash), |_| true)
        {
            self.cells.prefetch(slot.node());
        }
    }

    #[inline(always)]
    pub(super) fn find(&self, hash: u64) -> Option<Id> {
        self.find_at(self.table.key(hash), hash)
    }

    #[inline(always)]
    pub(super) fn find_at(&self, key: Key, hash: u64) -> Option<Id> {
        self.table.find(key, |slot| self.cells.hash(slot.node()) == hash).map(NodeSlot::node)
    }
}

const _: () = assert!(size_of::<Cell>() == 32 && CHUNK.is_power_of_two());
