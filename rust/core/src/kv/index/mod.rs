//! The KV index: for each instance, how many leading blocks of a prompt it holds.
//!
//! A trie of blocks, without the trie's walk. Each distinct block is one 32-byte node, found by the chained hash of
//! its prefix in a table of 8-byte slots; it knows its parent, who holds it, and how many of its children each holder holds.
//! All memory is cells of one kind ([`cells`]) plus the table, so the byte bound is exact and nothing fragments.
//!
//! - [`search`]: sets of holders only shrink along a chain, so a query probes a few dozen positions of it, not all.
//! - [`holes`]: an engine may evict an inner block first. What stands behind is kept, does not count, and counts again when the
//!   block is back; queries whose chain crosses no hole pay nothing.
//! - [`lru`]: what goes first when an instance's capacity (approximate feed) or the byte bound (both feeds) is reached:
//!   the least recently used chain, from its end.
//!
//! Nodes that nobody holds and nothing stands behind are freed at once.
mod cells;
mod holders;
mod holes;
mod lru;
mod search;

use crate::ids::{InstanceId, MAX_INSTANCES};
use crate::kv::table::{Inserted, Key, Slot, Table};
use cells::{BORN, CHILDREN, CHUNK, Cell, Cells, DEPTH, Id, PARENT};
use holders::Holder;
use holes::Holes;
use lru::Queue;
use std::fmt;

/// Blocks whose table lines are asked for ahead of placing or evicting them.
const AHEAD: usize = 8;

/// Who holds how much of a prefix, bounded in bytes by construction.
pub struct KvIndex {
    cells: Cells,
    table: Table<NodeSlot>,
    /// Bytes of the table when each segment has its smallest size.
    table_start: usize,
    books: Vec<Book>,
    holes: Option<Holes>,
    byte_bound: usize,
    clock: u32,
    pairs: usize,
    evicted: u64,
    dropped: u64,
}

/// What is kept of an instance.
#[derive(Clone, Default)]
struct Book {
    open: bool,
    /// Blocks that `record` may remember.
    capacity: u32,
    blocks: u32,
    /// Blocks held without any child of theirs.
    ends: u32,
    /// Blocks not held although a child is.
    holes: u32,
    queue: Queue,
}

/// 32 bits of the hash, the number of holders (14: that many or more; 15: the place is not the node's alone, so nothing is
/// said), 28 bits of the node.
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

/// What storing a block that is already there means.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Copies {
    /// One more physical copy.
    Add,
    /// The same copy, reported again: the count starts over at one.
    Reset,
    /// Nothing: the router predicts that the block is there.
    Keep,
}

impl fmt::Debug for KvIndex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut out = f.debug_struct("KvIndex");
        out.field("pairs", &self.pairs).field("nodes", &self.nodes()).field("bytes", &self.bytes()).finish()
    }
}

impl KvIndex {
    /// The least byte bound; smaller ones are raised to it.
    pub const MIN_BYTES: usize = 1 << 20;
    /// Kept free of cells and table: books of all instances, tables of holes, the struct itself.
    const FIXED_BYTES: usize = MAX_INSTANCES * size_of::<Book>() + Holes::BYTES + size_of::<KvIndex>();

    /// An empty index that never takes more than `byte_bound` bytes (the least recently used leaves go first).
    pub fn new(byte_bound: usize) -> KvIndex {
        let byte_bound = byte_bound.max(Self::MIN_BYTES);
        // Segments of about 4,096 entries when all is full: growing one of them takes some microseconds.
        let bits = (byte_bound / (4096 * 43)).max(1).ilog2().min(16);
        let table = Table::new(bits);
        let table_start = table.bytes() + (Table::<NodeSlot>::LEAST_SEGMENT_BYTES << bits);
        KvIndex {
            cells: Cells::default(),
            table,
            table_start,
            books: Vec::new(),
            holes: None,
            byte_bound,
            clock: 0,
            pairs: 0,
            evicted: 0,
            dropped: 0,
        }
    }

    /// Opens the books of an instance, or changes its capacity. `capacity_blocks`: what its cache holds; bounds what
    /// [`KvIndex::record`] remembers of it. False: the slot is beyond [`MAX_INSTANCES`], and nothing is kept of it.
    pub fn add_instance(&mut self, instance: InstanceId, capacity_blocks: Option<u32>) -> bool {
        let slot = instance.index();
        if slot >= MAX_INSTANCES {
            return false;
        }
        if slot >= self.books.len() {
            self.books.reserve_exact(slot + 1 - self.books.len());
            self.books.resize(slot + 1, Book::default());
        }
        let book = &mut self.books[slot];
        (book.open, book.capacity) = (true, capacity_blocks.unwrap_or(u32::MAX));
        let over = book.blocks.saturating_sub(book.capacity);
        self.evict_from(instance, over);
        true
    }

    /// Forgets everything of an instance.
    pub fn remove_instance(&mut self, instance: InstanceId) {
        self.cleared(instance);
        if let Some(book) = self.books.get_mut(instance.index()) {
            *book = Book::default();
        }
    }

    /// Whether books of the instance are kept.
    pub fn is_open(&self, instance: InstanceId) -> bool {
        self.books.get(instance.index()).is_some_and(|b| b.open)
    }

    /// For each instance, how many leading blocks of `chain` it holds: `hit_blocks[slot]`. Entries of unknown slots are 0.
    pub fn match_prefix(&self, chain: &[u64], hit_blocks: &mut [u32]) {
        self.search(chain, hit_blocks);
    }

    /// Approximate feed: this prompt was placed on `instance`, so its blocks will be there. Of a chain longer than the
    /// instance's capacity the front is kept.
    pub fn record(&mut self, instance: InstanceId, chain: &[u64]) {
        if self.is_open(instance) {
            let held = self.held(chain, instance.0);
            self.record_behind(instance.0, chain, held);
        }
    }

    /// As [`KvIndex::record`], given the instance's `hit_blocks` from [`KvIndex::match_prefix`], which saves the search where it
    /// still holds.
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

    /// Exact feed: `instance` stored these consecutive blocks behind `parent` (None: they start the chain). Each call
    /// counts one physical copy of each block. Returns how many blocks were placed: none where the parent is unknown.
    pub fn stored(&mut self, instance: InstanceId, parent: Option<u64>, chain: &[u64]) -> usize {
        self.store(instance, parent, chain, Copies::Add)
    }

    /// As [`KvIndex::stored`], with the meaning of blocks that are already there given.
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

    /// Exact feed: one physical copy of a block is gone. Returns whether the index knew it.
    pub fn removed(&mut self, instance: InstanceId, hash: u64) -> bool {
        let Some(node) = self.find(hash) else { return false };
        let Some((at, holder)) = self.cells.entry(node, instance.0) else { return false };
        match holder.copies() {
            0 => return false,
            1 => {
                let end = self.lose(node, instance.0);
                if end != 0 {
                    self.queue_first(end, instance.0);
                }
            }
            more => self.cells.set_entry(node, at, holder.with_copies(more - 1)),
        }
        true
    }

    /// Exact feed: the whole cache of `instance` was cleared.
    pub fn cleared(&mut self, instance: InstanceId) {
        if self.is_open(instance) {
            self.evict(instance.0, u32::MAX, true);
            debug_assert_eq!(self.books[instance.index()].blocks, 0);
        }
    }

    /// Evicts up to `blocks` blocks of the instance, least recently used leaves first; returns how many went.
    pub fn evict_from(&mut self, instance: InstanceId, blocks: u32) -> u32 {
        let gone = if self.is_open(instance) { self.evict(instance.0, blocks, false) } else { 0 };
        self.evicted += u64::from(gone);
        gone
    }

    /// Whether the instance holds the block, whatever it holds before it.
    pub fn holds(&self, instance: InstanceId, hash: u64) -> bool {
        self.find(hash).is_some_and(|node| self.cells.holds(node, instance.0))
    }

    /// Appends the instances that hold the block (and everything before it) to `out`, in order.
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

    /// How many instances hold the block (and everything before it).
    pub fn holders_count(&self, hash: u64) -> usize {
        if self.holes.as_ref().is_none_or(Holes::is_empty) {
            return self.find(hash).map_or(0, |node| self.cells.holders(node) as usize);
        }
        let mut holders = Vec::new();
        self.holders(hash, &mut holders);
        holders.len()
    }

    /// Blocks held for `instance`.
    pub fn blocks(&self, instance: InstanceId) -> u32 {
        self.books.get(instance.index()).map_or(0, |b| b.blocks)
    }

    /// (instance, block) pairs held.
    pub fn pairs(&self) -> usize {
        self.pairs
    }

    /// Distinct blocks known, those included that are kept only for what stands behind them.
    pub fn nodes(&self) -> usize {
        self.table.len()
    }

    /// Bytes taken now, allocations included.
    pub fn bytes(&self) -> usize {
        let holes = if self.holes.is_some() { Holes::BYTES } else { 0 };
        let books = self.books.capacity() * size_of::<Book>();
        size_of::<KvIndex>() + self.cells.bytes() + self.table.bytes() + books + holes
    }

    /// The bound on [`KvIndex::bytes`].
    pub fn byte_bound(&self) -> usize {
        self.byte_bound
    }

    /// Blocks that went because a capacity or the byte bound was reached, since the start.
    pub fn evicted_blocks(&self) -> u64 {
        self.evicted
    }

    /// Blocks that were not taken because nothing could be evicted for them, since the start.
    pub fn dropped_blocks(&self) -> u64 {
        self.dropped
    }
}

/// Blocks come.
impl KvIndex {
    #[inline(always)]
    fn find(&self, hash: u64) -> Option<Id> {
        self.find_at(self.table.key(hash), hash)
    }

    #[inline(always)]
    fn find_at(&self, key: Key, hash: u64) -> Option<Id> {
        self.table.find(key, |slot| self.cells.hash(slot.node()) == hash).map(NodeSlot::node)
    }

    /// Records `chain`, whose first `held` blocks the instance holds.
    fn record_behind(&mut self, instance: u32, chain: &[u64], held: usize) {
        let book = &self.books[instance as usize];
        let chain = &chain[..chain.len().min(book.capacity as usize)];
        let held = held.min(chain.len());
        let last = held.checked_sub(1).and_then(|at| self.find(chain[at])).unwrap_or(0);
        let over = (book.blocks as usize + chain.len() - held).saturating_sub(book.capacity as usize);
        if over > 0 {
            let pin = self.pin(last, instance);
            let gone = self.evict(instance, over as u32, false);
            self.evicted += u64::from(gone);
            self.unpin(last, instance, pin);
            self.touch_open(last, instance);
        }
        if held == chain.len() {
            if last != 0 && self.make_room(last, instance) {
                self.touch_node(last, instance);
            }
        } else {
            self.place(instance, last, &chain[held..], Copies::Keep);
        }
    }

    /// Places consecutive blocks behind `prev`; returns how many found room.
    fn place(&mut self, instance: u32, mut prev: Id, chain: &[u64], copies: Copies) -> usize {
        let mut placed = 0;
        while placed < chain.len() {
            if let Some(ahead) = chain.get(placed + AHEAD) {
                self.table.prefetch(self.table.key(*ahead));
            }
            if !self.make_room(prev, instance) {
                break;
            }
            let node = match self.find(chain[placed]) {
                Some(node) => {
                    self.gain(node, instance, copies);
                    placed += 1;
                    node
                }
                None => {
                    let (last, made) = self.grow(&chain[placed..], prev, instance);
                    if made == 0 {
                        break;
                    }
                    placed += made;
                    prev = last;
                    continue;
                }
            };
            if self.cells.parent(node) != prev {
                // A feed that says so is wrong; the blocks stay where they first were.
                self.touch_open(prev, instance);
            }
            prev = node;
        }
        self.touch_open(prev, instance);
        self.prune(prev);
        self.dropped += (chain.len() - placed) as u64;
        placed
    }

    /// Touches a node that may be an end without a place in the queue.
    fn touch_open(&mut self, node: Id, instance: u32) {
        if node != 0 {
            self.touch_node(node, instance);
        }
    }

    /// Makes nodes for blocks that are not known yet, each behind the other, held by the instance: as many as there is room for
    /// right now. Returns the last of them and their number. Only the first is known to be new; that the others are follows,
    /// as a block is known only if all before it are.
    fn grow(&mut self, hashes: &[u64], prev: Id, instance: u32) -> (Id, usize) {
        let hashes = &hashes[..hashes.len().min(self.room())];
        let (mut depth, mut born) = (0, 0);
        if prev != 0 {
            depth = self.cells.depth(prev) as u32 + 1;
            let extends = self.cells[prev].0[CHILDREN] == 0
                && self.cells.single(prev).is_some_and(|h| h.instance() == instance && h.copies() > 0);
            born = if extends { self.cells[prev].0[BORN] } else { depth };
        }
        let table_limit = self.byte_bound.saturating_sub(self.bytes() - self.table.bytes());
        let (mut last, mut made) = (prev, 0);
        for (i, &hash) in hashes.iter().enumerate() {
            if let Some(ahead) = hashes.get(i + AHEAD) {
                self.table.prefetch(self.table.key(*ahead));
            }
            let key = self.table.key(hash);
            let node = self.cells.take();
            let inserted = self.table.insert(key, NodeSlot::new(key, 1, node), table_limit);
            let known = |n: Id| n != node && self.cells.hash(n) == hash;
            if inserted == Inserted::Shared && self.table.find(key, |s| known(s.node())).is_some() {
                // A feed that says so is wrong; the caller takes the block for the known one it is.
                self.table.remove(key, |s| s.node() == node);
                self.cells.give(node);
                break;
            }
            match inserted {
                Inserted::No => {
                    self.cells.give(node);
                    break;
                }
                Inserted::Alone => {}
                Inserted::Shared => {
                    self.table.for_each_at(key, |s| *s = NodeSlot::new(key, NodeSlot::UNSAID, s.node()));
                }
            }
            let cell = &mut self.cells[node];
            cell.set_wide(hash);
            (cell.0[PARENT], cell.0[CHILDREN], cell.0[DEPTH], cell.0[BORN]) = (last, 1, depth, born);
            Holder::end(instance).with_children(1).write(cell);
            (last, made, depth) = (node, made + 1, depth + 1);
        }
        if made > 0 {
            let cell = &mut self.cells[last];
            cell.0[CHILDREN] = 0;
            Holder::end(instance).write(cell);
            let book = &mut self.books[instance as usize];
            book.blocks += made as u32;
            book.ends += 1;
            self.pairs += made;
            if prev != 0 {
                self.cells[prev].0[CHILDREN] += 1;
                self.child_gained(prev, instance);
            }
        }
        (last, made)
    }

    /// The instance stores a block that is known.
    fn gain(&mut self, node: Id, instance: u32, copies: Copies) {
        let Some((at, holder)) = self.cells.entry(node, instance) else {
            self.hold_end(node, instance);
            self.count_holders(node);
            return;
        };
        match (holder.copies(), copies) {
            (0, _) => {
                self.cells.set_entry(node, at, holder.with_copies(1));
                self.hole_closed(node, instance);
                self.books[instance as usize].blocks += 1;
                self.pairs += 1;
                self.child_gained(self.cells.parent(node), instance);
                self.count_holders(node);
            }
            (have, Copies::Add) => self.cells.set_entry(node, at, holder.with_copies(have + 1)),
            (_, Copies::Reset) => self.cells.set_entry(node, at, holder.with_copies(1)),
            (_, Copies::Keep) => {}
        }
    }

    /// Enters the instance as holder of a node of which it held nothing.
    fn hold_end(&mut self, node: Id, instance: u32) {
        self.cells.add_entry(node, Holder::end(instance));
        let book = &mut self.books[instance as usize];
        book.blocks += 1;
        book.ends += 1;
        self.pairs += 1;
        self.child_gained(self.cells.parent(node), instance);
    }

    fn child_gained(&mut self, parent: Id, instance: u32) {
        if parent == 0 {
            return;
        }
        match self.cells.entry(parent, instance) {
            Some((at, holder)) => {
                self.books[instance as usize].ends -= u32::from(holder.is_end());
                self.cells.set_entry(parent, at, holder.with_children(holder.children() + 1));
            }
            None => {
                self.cells.add_entry(parent, Holder::hole(instance));
                self.hole_opened(parent, instance);
            }
        }
    }

    /// Repeats the node's number of holders in its slot.
    fn count_holders(&mut self, node: Id) {
        let key = self.table.key(self.cells.hash(node));
        let holders = match self.table.is_shared(key) {
            true => NodeSlot::UNSAID,
            false => self.cells.holders(node).min(NodeSlot::MANY),
        };
        if let Some(slot) = self.table.find_mut(key, |s| s.node() == node) {
            *slot = NodeSlot::new(key, holders, node);
        }
    }
}

/// Blocks go.
impl KvIndex {
    /// The instance holds no copy of the node's block any more. Returns the parent, if that is now an end (without a place
    /// in the queue), else 0.
    fn lose(&mut self, node: Id, instance: u32) -> Id {
        let Some((at, holder)) = self.cells.entry(node, instance) else { return 0 };
        let parent = self.cells.parent(node);
        let book = &mut self.books[instance as usize];
        book.blocks -= 1;
        self.pairs -= 1;
        if holder.is_end() {
            book.ends -= 1;
            self.cells.remove_entry(node, at);
        } else {
            self.cells.set_entry(node, at, holder.with_copies(0));
            self.hole_opened(node, instance);
        }
        let is_end = self.child_lost(parent, instance);
        if self.cells.is_bare(node) {
            self.prune(node);
        } else {
            self.count_holders(node);
        }
        if is_end { parent } else { 0 }
    }

    /// Returns whether the parent is now an end of the instance's.
    fn child_lost(&mut self, parent: Id, instance: u32) -> bool {
        if parent == 0 {
            return false;
        }
        let Some((at, holder)) = self.cells.entry(parent, instance) else { return false };
        let children = holder.children() - 1;
        if children == 0 && holder.copies() == 0 {
            self.cells.remove_entry(parent, at);
            self.hole_closed(parent, instance);
            return false;
        }
        self.cells.set_entry(parent, at, holder.with_children(children));
        self.books[instance as usize].ends += u32::from(children == 0);
        children == 0
    }

    /// Frees the node and those before it that nothing keeps.
    fn prune(&mut self, mut node: Id) {
        while node != 0 && self.cells.is_bare(node) {
            let parent = self.cells.parent(node);
            let key = self.table.key(self.cells.hash(node));
            self.table.remove(key, |s| s.node() == node);
            self.cells.give(node);
            if parent != 0 {
                self.cells[parent].0[CHILDREN] -= 1;
            }
            node = parent;
        }
    }

    fn hole_opened(&mut self, node: Id, instance: u32) {
        self.books[instance as usize].holes += 1;
        self.holes.get_or_insert_with(Holes::new).opened(self.cells.depth(node), self.cells.hash(node));
    }

    fn hole_closed(&mut self, node: Id, instance: u32) {
        self.books[instance as usize].holes -= 1;
        if let Some(holes) = &mut self.holes {
            holes.closed(self.cells.depth(node), self.cells.hash(node));
        }
    }
}

const _: () = assert!(size_of::<Cell>() == 32 && CHUNK.is_power_of_two());
