//! The KV index: for each instance, the number of leading blocks of a prompt that it holds.
//!
//! The index is a trie of blocks without the walk of a trie. Each distinct block is one 32-byte
//! node, found by the chained hash of its prefix in a table of 8-byte slots. The node stores its
//! parent, its holders, and the number of its children that each holder holds. All memory is cells
//! of one kind (`cells`) plus the table, so the byte bound is exact and memory does not fragment.
//!
//! - `search`: sets of holders only shrink along a chain, so a query probes a few dozen positions
//!   of it, not all.
//! - `holes`: an engine may evict an inner block first. The blocks behind it are kept but do not
//!   count until the block is back. Queries whose chain crosses no hole pay nothing for this.
//! - `lru`: eviction order if an instance's capacity (approximate feed) or the byte bound (both
//!   feeds) is reached: the least recently used chain, from its end.
//!
//! Nodes without holders and without blocks behind them are freed at once.
mod blocks;
mod cells;
pub mod copy;
mod holders;
mod holes;
mod lru;
mod search;

use crate::ids::{InstanceId, MAX_INSTANCES};
use crate::kv::table::{Key, Slot, Table};
use cells::{CHUNK, Cell, Cells, Id};
use holes::Holes;
use lru::{Front, Queue};
use std::collections::BinaryHeap;
use std::fmt;

/// Number of blocks whose nodes are prefetched before placing or removing them. The lines of the
/// table that name these nodes are prefetched as many blocks earlier.
const AHEAD: usize = 8;

/// Index of the prefixes that instances hold, with a fixed byte bound.
pub struct KvIndex {
    cells: Cells,
    table: Table<NodeSlot>,
    /// Bytes of the table if each segment has its smallest size.
    table_start: usize,
    books: Vec<Book>,
    holes: Option<Holes>,
    byte_bound: usize,
    /// Last stamp issued.
    clock: u64,
    /// Heap for finding the oldest chain end.
    fronts: BinaryHeap<Front>,
    pairs: usize,
    evicted: u64,
    /// Changes that a copy in progress lacks.
    removals: u64,
}

/// State of an instance.
#[derive(Clone, Default)]
struct Book {
    open: bool,
    /// Maximum blocks that `record` keeps.
    capacity: u32,
    blocks: u32,
    /// Blocks held without any child.
    ends: u32,
    /// Blocks not held although a child is.
    holes: u32,
    queue: Queue,
    /// Whether the instance is in `fronts`.
    in_fronts: bool,
    /// Most blocks held when the engine evicted one, since [`KvIndex::take_full`].
    full: u32,
}

/// A table slot: 32 bits of the hash, 4 bits of the number of holders, 28 bits of the node. Count
/// 14 means 14 or more. Count 15 means that other nodes share the place, so the count is unknown.
#[derive(Clone, Copy, PartialEq)]
struct NodeSlot(u64);

impl NodeSlot {
    const MANY: u32 = 14;
    const UNSAID: u32 = 15;

    fn new(key: Key, holders: u32, node: Id) -> NodeSlot {
        NodeSlot(u64::from(key.place()) << 32 | u64::from(holders) << 28 | u64::from(node))
    }

    #[inline(always)]
    fn node(self) -> Id {
        self.0 as u32 & ((1 << 28) - 1)
    }

    #[inline(always)]
    fn holders(self) -> u32 {
        self.0 as u32 >> 28
    }
}

impl Slot for NodeSlot {
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

/// Effect of storing a block that is already present.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Copies {
    /// Adds a physical copy.
    Add,
    /// Reports the existing copy again: the count restarts at one.
    Reset,
    /// No effect: the router predicts that the block is present.
    Keep,
}

impl fmt::Debug for KvIndex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut out = f.debug_struct("KvIndex");
        out.field("pairs", &self.pairs).field("nodes", &self.nodes()).field("bytes", &self.bytes()).finish()
    }
}

impl KvIndex {
    /// Minimum byte bound; smaller bounds are raised to it.
    pub const MIN_BYTES: usize = 1 << 20;
    /// Bytes reserved outside cells and table: state and fronts of all instances, tables of holes,
    /// the struct itself.
    const FIXED_BYTES: usize =
        MAX_INSTANCES * (size_of::<Book>() + size_of::<Front>()) + Holes::BYTES + size_of::<KvIndex>();

    /// Creates an empty index that never uses more than `byte_bound` bytes (least recently used
    /// leaves are evicted first).
    pub fn new(byte_bound: usize) -> KvIndex {
        let byte_bound = byte_bound.max(Self::MIN_BYTES);
        // Segments of about 4,096 entries if the index is full: growing one takes a few
        // microseconds.
        let bits = (byte_bound / (4096 * 43)).max(1).ilog2().min(16);
        let table = Table::new(bits);
        let table_start = table.bytes() + (Table::<NodeSlot>::MIN_SEGMENT_BYTES << bits);
        KvIndex {
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
        }
    }

    /// Adds an instance, or changes its capacity. `capacity_blocks`: size of its cache, which
    /// bounds the blocks that [`KvIndex::record`] keeps. Returns false if the slot is beyond
    /// [`MAX_INSTANCES`]; nothing is kept for it.
    pub fn add_instance(&mut self, instance: InstanceId, capacity_blocks: Option<u32>) -> bool {
        let slot = instance.index();
        if slot >= MAX_INSTANCES {
            return false;
        }
        if slot >= self.books.len() {
            self.books.reserve_exact(slot + 1 - self.books.len());
            self.books.resize(slot + 1, Book::default());
        }
        self.removals += 1;
        let book = &mut self.books[slot];
        (book.open, book.capacity) = (true, capacity_blocks.unwrap_or(u32::MAX));
        let over = book.blocks.saturating_sub(book.capacity);
        self.evict_from(instance, over);
        true
    }

    /// Changes the capacity of an instance without evicting blocks beyond it; [`KvIndex::trim`]
    /// evicts them.
    pub fn set_capacity(&mut self, instance: InstanceId, capacity_blocks: Option<u32>) {
        if let Some(book) = self.books.get_mut(instance.index()) {
            book.capacity = capacity_blocks.unwrap_or(u32::MAX);
        }
    }

    /// Evicts up to `most` blocks beyond the instance's capacity and returns the number left beyond
    /// it.
    pub fn trim(&mut self, instance: InstanceId, most: u32) -> u32 {
        let Some(book) = self.books.get(instance.index()) else { return 0 };
        let over = book.blocks.saturating_sub(book.capacity);
        over - self.evict_from(instance, over.min(most))
    }

    /// Lowers the byte bound if no more bytes are in use, and returns whether it did.
    pub fn lower_bound(&mut self, byte_bound: usize) -> bool {
        let fits = self.bytes() <= byte_bound;
        if fits {
            self.byte_bound = self.byte_bound.min(byte_bound.max(Self::MIN_BYTES));
        }
        fits
    }

    /// Removes all state of an instance.
    pub fn remove_instance(&mut self, instance: InstanceId) {
        self.cleared(instance);
        if let Some(book) = self.books.get_mut(instance.index()) {
            *book = Book { in_fronts: book.in_fronts, ..Book::default() };
        }
    }

    /// Returns whether the instance is in the index.
    pub fn is_open(&self, instance: InstanceId) -> bool {
        self.books.get(instance.index()).is_some_and(|b| b.open)
    }

    /// Writes the number of leading blocks of `chain` that each instance holds to
    /// `hit_blocks[slot]`. Entries of unknown slots are 0.
    pub fn match_prefix(&self, chain: &[u64], hit_blocks: &mut [u32]) {
        self.search(chain, hit_blocks);
    }

    /// Approximate feed: records that this prompt was placed on `instance`, so its blocks will be
    /// there. If the chain is longer than the instance's capacity, its front is kept.
    pub fn record(&mut self, instance: InstanceId, chain: &[u64]) {
        if self.is_open(instance) {
            let held = self.held(chain, instance.0);
            self.record_behind(instance.0, chain, held);
        }
    }

    /// Records a prompt like [`KvIndex::record`], given the instance's `hit_blocks` from
    /// [`KvIndex::match_prefix`]. This saves the search if `hit_blocks` is still correct.
    pub fn record_hit(&mut self, instance: InstanceId, chain: &[u64], hit_blocks: u32) {
        let hit = hit_blocks as usize;
        let holds = |at: usize| chain.get(at).is_some_and(|h| self.holds(instance, *h));
        if hit <= chain.len() && (hit == 0 || holds(hit - 1)) && !holds(hit) && self.is_open(instance) {
            self.record_behind(instance.0, chain, hit);
        } else {
            self.record(instance, chain);
        }
    }

    /// Marks the first `blocks` of the chain as just used on the instance.
    pub fn touch(&mut self, instance: InstanceId, chain: &[u64], blocks: u32) {
        let last = (blocks as usize).min(chain.len()).checked_sub(1);
        let node = last.and_then(|at| self.find(chain[at]));
        if let Some(node) = node
            && self.is_open(instance)
            && self.make_room(node, instance.0)
        {
            self.touch_node(node, instance.0);
        }
    }

    /// Exact feed: records that `instance` stored these consecutive blocks after `parent` (None:
    /// they start the chain). Each call counts one physical copy of each block. Returns the number
    /// of blocks placed: 0 if the parent is unknown.
    pub fn stored(&mut self, instance: InstanceId, parent: Option<u64>, chain: &[u64]) -> usize {
        self.store(instance, parent, chain, Copies::Add)
    }

    /// Records stored blocks like [`KvIndex::stored`]. `copies` sets the effect on blocks that are
    /// already present.
    pub fn store(
        &mut self,
        instance: InstanceId,
        parent: Option<u64>,
        chain: &[u64],
        copies: Copies,
    ) -> usize {
        let parent = match parent {
            None => Some(0),
            Some(hash) => self.find(hash),
        };
        match parent {
            Some(parent) if self.is_open(instance) => self.place(instance.0, parent, chain, copies),
            _ => 0,
        }
    }

    /// Exact feed: removes one physical copy of a block. Returns whether the block was in the
    /// index.
    pub fn removed(&mut self, instance: InstanceId, hash: u64) -> bool {
        self.removed_all(instance, &[hash]) == 1
    }

    /// Removes a copy of many blocks and returns the number that were in the index. Blocks of one
    /// chain in order from its end skip the lookup of each block.
    pub fn removed_all(&mut self, instance: InstanceId, hashes: &[u64]) -> usize {
        let (mut known, mut end) = (0, 0);
        for (i, &hash) in hashes.iter().enumerate() {
            self.prefetch_behind(hashes, i);
            // `end` is the parent of the last removed block if it is an end now. It has no queue
            // entry yet.
            let expected = end != 0 && self.cells.hash(end) == hash;
            if !expected && end != 0 {
                self.queue_first(end, instance.0);
            }
            let found = if expected { Some(end) } else { self.find(hash) };
            end = 0;
            let Some(node) = found else { continue };
            let Some((at, holder)) = self.cells.entry(node, instance.0) else { continue };
            match holder.copies() {
                0 => continue,
                1 => end = self.lose(node, instance.0),
                more => {
                    self.cells.set_entry(node, at, holder.with_copies(more - 1));
                    if expected {
                        self.queue_first(node, instance.0);
                    }
                }
            }
            known += 1;
        }
        if end != 0 {
            self.queue_first(end, instance.0);
        }
        self.removals += u64::from(known > 0);
        known
    }

    /// Removes blocks that the engine has evicted: its cache was full. Returns the number that were
    /// in the index.
    pub fn evicted_all(&mut self, instance: InstanceId, hashes: &[u64]) -> usize {
        let held = self.blocks(instance);
        let known = self.removed_all(instance, hashes);
        if let (Some(book), true) = (self.books.get_mut(instance.index()), known > 0) {
            book.full = book.full.max(held);
        }
        known
    }

    /// Returns the most blocks that the instance held when its engine evicted one, since the last
    /// call; `None`: it evicted none.
    pub fn take_full(&mut self, instance: InstanceId) -> Option<u32> {
        let full = self.books.get_mut(instance.index()).map_or(0, |book| std::mem::take(&mut book.full));
        (full > 0).then_some(full)
    }

    /// Drops up to `most` blocks of the instance and returns the number left.
    pub fn clear_some(&mut self, instance: InstanceId, most: u32) -> u32 {
        if self.is_open(instance) {
            self.removals += 1;
            self.evict(instance.0, most, true);
        }
        self.blocks(instance)
    }

    /// Exact feed: the whole cache of `instance` was cleared.
    pub fn cleared(&mut self, instance: InstanceId) {
        if self.is_open(instance) {
            self.removals += 1;
            self.evict(instance.0, u32::MAX, true);
            debug_assert_eq!(self.books[instance.index()].blocks, 0);
        }
    }

    /// Evicts up to `blocks` blocks of the instance, least recently used leaves first, and returns
    /// the number evicted.
    pub fn evict_from(&mut self, instance: InstanceId, blocks: u32) -> u32 {
        let gone = if self.is_open(instance) { self.evict(instance.0, blocks, false) } else { 0 };
        self.evicted += u64::from(gone);
        gone
    }

    /// Returns whether the instance holds the block, regardless of the blocks before it.
    pub fn holds(&self, instance: InstanceId, hash: u64) -> bool {
        self.find(hash).is_some_and(|node| self.cells.holds(node, instance.0))
    }

    /// Returns the block before a block of the index (`Some(None)`: the block starts a prompt);
    /// `None` if the index does not know the block.
    pub fn parent_of(&self, hash: u64) -> Option<Option<u64>> {
        let parent = self.cells.parent(self.find(hash)?);
        Some((parent != 0).then(|| self.cells.hash(parent)))
    }

    /// Appends the instances that hold the block (and all blocks before it) to `out`, in order.
    pub fn holders(&self, hash: u64, out: &mut Vec<InstanceId>) {
        let Some(node) = self.find(hash) else { return };
        let start = out.len();
        self.cells.for_each_group(node, |group, bits| {
            search::for_each_bit(bits, |bit| out.push(InstanceId((group * 64 + bit) as u32)));
        });
        out[start..].sort_unstable();
        let mut before = self.cells.parent(node);
        while before != 0 && self.holes.as_ref().is_some_and(|h| !h.is_empty()) {
            let kept =
                out[start..].iter().copied().filter(|i| self.cells.holds(before, i.0)).collect::<Vec<_>>();
            out.truncate(start);
            out.extend(kept);
            before = self.cells.parent(before);
        }
    }

    /// Returns the number of blocks held by `instance`.
    pub fn blocks(&self, instance: InstanceId) -> u32 {
        self.books.get(instance.index()).map_or(0, |b| b.blocks)
    }

    /// Returns the number of (instance, block) pairs held.
    pub fn pairs(&self) -> usize {
        self.pairs
    }

    /// Returns the number of distinct blocks in the index, including blocks kept only for the
    /// blocks behind them.
    pub fn nodes(&self) -> usize {
        self.table.len()
    }

    /// Returns the bytes in use, including allocations.
    pub fn bytes(&self) -> usize {
        let holes = if self.holes.is_some() { Holes::BYTES } else { 0 };
        let books = self.books.capacity() * size_of::<Book>() + self.fronts.capacity() * size_of::<Front>();
        size_of::<KvIndex>() + self.cells.bytes() + self.table.bytes() + books + holes
    }

    /// Returns the bound on [`KvIndex::bytes`].
    pub fn byte_bound(&self) -> usize {
        self.byte_bound
    }

    /// Returns the total number of blocks evicted because of a capacity or the byte bound.
    pub fn evicted_blocks(&self) -> u64 {
        self.evicted
    }
}

impl KvIndex {
    /// Prefetches what a walk along `hashes` reads soon after position `at`.
    #[inline(always)]
    fn prefetch_behind(&self, hashes: &[u64], at: usize) {
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
    fn find(&self, hash: u64) -> Option<Id> {
        self.find_at(self.table.key(hash), hash)
    }

    #[inline(always)]
    fn find_at(&self, key: Key, hash: u64) -> Option<Id> {
        self.table.find(key, |slot| self.cells.hash(slot.node()) == hash).map(NodeSlot::node)
    }
}

const _: () = assert!(size_of::<Cell>() == 32 && CHUNK.is_power_of_two());

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Removing many blocks at once equals removing each block.
        #[test]
        fn many_go_as_each_would(
            stores in prop::collection::vec((0u32..3, 0u64..4, 0u64..30, 1usize..30), 1..30),
            removals in prop::collection::vec((0u32..3, 0u64..4, 0usize..30, 1usize..30, any::<bool>()), 1..30),
        ) {
            // The chains of a family diverge at a fork.
            let chain = |family: u64, fork: u64| -> Vec<u64> {
                (0..30u64).map(|b| if b < fork { b + 1 } else { 1000 * (family + 1) + 100 * fork + b }).collect()
            };
            let mut indexes = [0, 1].map(|_| KvIndex::new(KvIndex::MIN_BYTES));
            for index in &mut indexes {
                (0..3).for_each(|i| assert!(index.add_instance(InstanceId(i), None)));
                for &(i, family, fork, blocks) in &stores {
                    index.stored(InstanceId(i), None, &chain(family, fork)[..blocks]);
                }
            }
            for (n, (i, family, from, blocks, backwards)) in removals.into_iter().enumerate() {
                let fork = stores[n % stores.len()].2;
                let mut gone = chain(family, fork)[from..(from + blocks).min(30)].to_vec();
                if backwards {
                    gone.reverse();
                }
                let known = gone.iter().filter(|h| indexes[0].removed(InstanceId(i), **h)).count();
                prop_assert_eq!(indexes[1].removed_all(InstanceId(i), &gone), known);
                for &(_, family, fork, _) in &stores {
                    let mut hits = [[0; 3]; 2];
                    indexes.iter().zip(&mut hits).for_each(|(index, hits)| index.match_prefix(&chain(family, fork), hits));
                    prop_assert_eq!(hits[0], hits[1]);
                }
                let [one, all] = &indexes;
                prop_assert_eq!((one.pairs(), one.nodes()), (all.pairs(), all.nodes()));
            }
            // In the end all remaining blocks are evicted, so every chain end was in its queue.
            for i in (0..3).map(InstanceId) {
                let left = indexes[1].blocks(i);
                prop_assert_eq!(indexes[1].evict_from(i, u32::MAX), left);
            }
        }

        /// Blocks with the same place in the table are still distinguished.
        #[test]
        fn crowded_places_do_not_mislead(
            steps in prop::collection::vec((0u32..20, 0u64..8, 1usize..40, any::<bool>()), 1..60),
        ) {
            let mut index = KvIndex::new(KvIndex::MIN_BYTES);
            (0..20).for_each(|i| assert!(index.add_instance(InstanceId(i), None)));
            // Eight chains whose blocks all have one of two places.
            let chain = |c: u64| -> Vec<u64> {
                (0..40).map(|b| Key::unmixed((b % 2 + 1) << 62 | if b < 8 { b } else { c * 40 + b })).collect()
            };
            prop_assert!(index.table.key(chain(1)[30]) == index.table.key(chain(2)[38]));
            for (i, c, blocks, store) in steps {
                let chain = chain(c);
                if store {
                    index.record(InstanceId(i), &chain[..blocks]);
                } else {
                    index.removed(InstanceId(i), chain[blocks]);
                }
                let mut hits = [0; 20];
                index.match_prefix(&chain, &mut hits);
                for (i, hit) in hits.iter().enumerate() {
                    let linear = chain.iter().take_while(|h| index.holds(InstanceId(i as u32), **h)).count();
                    prop_assert_eq!(*hit as usize, linear);
                }
            }
        }
    }
}
