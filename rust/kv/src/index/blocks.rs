//! Adding and removing blocks, with holders counted per node.
//!
//! An instance's entry on a node counts the children of the node that the instance holds. So one
//! lookup shows whether a block is the last of a chain there. Evicting an inner block leaves a hole
//! and needs no walk over the blocks behind it.
use super::Copies;
use super::cells::{BORN, CHILDREN, DEPTH, Id, PARENT};
use super::holders::Holder;
use super::holes::Holes;
use super::part::{AHEAD, NodeSlot, Part};
use crate::table::Inserted;

/// Adding blocks.
impl Part {
    /// Records `chain`; the instance holds its first `held` blocks. Evicts and places at most
    /// `most` blocks. Returns the number of leading blocks held then, if more is left to do.
    pub(super) fn record_behind(
        &mut self,
        instance: u32,
        chain: &[u64],
        held: usize,
        most: usize,
    ) -> Option<usize> {
        let book = &self.books[instance as usize];
        let chain = &chain[..chain.len().min(book.capacity as usize)];
        let held = held.min(chain.len());
        let last = held.checked_sub(1).and_then(|at| self.find(chain[at])).unwrap_or(0);
        let over = (book.blocks as usize + chain.len() - held).saturating_sub(book.capacity as usize);
        if over > 0 {
            let pin = self.pin(last, instance);
            let gone = self.evict(instance, over.min(most) as u32, false);
            self.evicted += u64::from(gone);
            self.unpin(last, instance, pin);
            let is_rest = gone > 0 && over > most;
            // Only an end needs a place in the queue before the rest is evicted.
            if !is_rest || self.cells.entry(last, instance).is_some_and(|(_, holder)| holder.is_end()) {
                self.touch_open(last, instance);
            }
            if is_rest {
                return Some(held);
            }
        }
        if held == chain.len() {
            if last != 0 && self.make_room(last, instance) {
                self.touch_node(last, instance);
            }
            return None;
        }
        let end = held.saturating_add(most).min(chain.len());
        let placed = self.place(instance, last, &chain[held..end], Copies::Keep);
        (end < chain.len() && placed == end - held).then_some(end)
    }

    /// Places consecutive blocks after `prev` and returns the number placed.
    pub(super) fn place(&mut self, instance: u32, mut prev: Id, chain: &[u64], copies: Copies) -> usize {
        let (mut placed, mut noted) = (0, 0);
        while placed < chain.len() {
            self.prefetch_behind(chain, placed);
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
                    let (last, made) = self.grow(&chain[placed..], prev, instance, copies);
                    if made == 0 {
                        break;
                    }
                    placed += made;
                    prev = last;
                    continue;
                }
            };
            if self.cells.parent(node) != prev {
                // The feed reported a wrong parent. The blocks keep their first position.
                self.touch_open(prev, instance);
                self.note(instance, prev, placed - 1 - noted);
                noted = placed - 1;
            }
            prev = node;
        }
        self.touch_open(prev, instance);
        self.note(instance, prev, placed - noted);
        self.prune(prev);
        placed
    }

    /// Touches a node that may be an end without an entry in the queue.
    fn touch_open(&mut self, node: Id, instance: u32) {
        if node != 0 {
            self.touch_node(node, instance);
        }
    }

    /// Creates a chain of nodes for unknown blocks, held by the instance, as far as there is room
    /// now. Returns the last node and the number created. Only the first block is known to be new.
    /// The others are new too, because a block is known only if all blocks before it are.
    fn grow(&mut self, hashes: &[u64], prev: Id, instance: u32, copies: Copies) -> (Id, usize) {
        let hashes = &hashes[..hashes.len().min(self.room())];
        let (mut depth, mut born) = (0, 0);
        if prev != 0 {
            depth = self.cells.depth(prev) as u32 + 1;
            let extends = self.cells[prev].0[CHILDREN] == 0
                && self.cells.single(prev).is_some_and(|h| h.instance() == instance && h.copies() > 0);
            born = if extends { self.cells[prev].0[BORN] } else { depth };
        }
        let table_limit = self.byte_bound.saturating_sub(self.bytes() - self.table.bytes());
        let end = Holder::first(instance, copies);
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
                // The feed is wrong. The caller treats the block as the known block.
                self.table.remove(key, |s| s.node() == node);
                self.cells.give(node);
                break;
            }
            match inserted {
                Inserted::No | Inserted::Crowded => {
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
            end.with_children(1).write(cell);
            (last, made, depth) = (node, made + 1, depth + 1);
        }
        if made > 0 {
            let cell = &mut self.cells[last];
            cell.0[CHILDREN] = 0;
            end.write(cell);
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

    /// Records that the instance stores a known block.
    pub(super) fn gain(&mut self, node: Id, instance: u32, copies: Copies) {
        let Some((at, holder)) = self.cells.entry(node, instance) else {
            self.hold_end(node, Holder::first(instance, copies));
            self.count_holders(node);
            return;
        };
        match (holder.copies(), copies) {
            (0, _) => {
                self.cells.set_entry(node, at, holder.with_first(copies));
                self.hole_closed(node, instance);
                self.books[instance as usize].blocks += 1;
                self.pairs += 1;
                self.child_gained(self.cells.parent(node), instance);
                self.count_holders(node);
            }
            (have, Copies::Add) if !holder.is_expected() => {
                self.cells.set_entry(node, at, holder.with_copies(have + 1));
            }
            (_, Copies::Add | Copies::Reset) => self.cells.set_entry(node, at, holder.with_copies(1)),
            (_, Copies::Keep | Copies::Expect) => {}
        }
    }

    /// Adds the instance as holder of a node on which it has no entry.
    fn hold_end(&mut self, node: Id, holder: Holder) {
        let instance = holder.instance();
        self.cells.add_entry(node, holder);
        let book = &mut self.books[instance as usize];
        book.blocks += 1;
        book.ends += 1;
        self.pairs += 1;
        self.child_gained(self.cells.parent(node), instance);
    }

    pub(super) fn child_gained(&mut self, parent: Id, instance: u32) {
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

    /// Copies the node's number of holders to its slot.
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

/// Removing blocks.
impl Part {
    /// Records that the instance holds no more copies of the node's block. Returns the parent if it
    /// is now an end (without a queue entry), else 0.
    pub(super) fn lose(&mut self, node: Id, instance: u32) -> Id {
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

    /// Returns whether the parent is now an end of the instance.
    pub(super) fn child_lost(&mut self, parent: Id, instance: u32) -> bool {
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

    /// Frees the node and its ancestors that nothing keeps.
    pub(super) fn prune(&mut self, mut node: Id) {
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
