//! The KV index: for each instance, the number of leading blocks of a prompt that it holds.
//!
//! The index is a trie of blocks without the walk of a trie. It consists of parts (`part`) of
//! 4,096 instances, each with its own blocks. A small fleet has one part. A prompt is searched
//! in the parts that have its first block. The byte bound is divided by the numbers of instances.
//!
//! - `search`: sets of holders only shrink along a chain, so a query probes a few dozen positions
//!   of it, not all.
//! - `holes`: an engine may evict an inner block first. The blocks behind it are kept but do not
//!   count until the block is back. Queries whose chain crosses no hole pay nothing for this.
//! - `lru`: eviction order if an instance's capacity (approximate feed) or the byte bound (both
//!   feeds) is reached: the least recently used chain, from its end.
mod blocks;
mod cells;
pub mod copy;
mod holders;
mod holes;
mod lru;
mod part;
mod search;

use crate::{MAX_INSTANCES, Slot};
use part::{PART, Part};
use std::fmt;
use std::ops::Range;

/// A part counts as at least this many instances when the byte bound is divided.
const MIN_WEIGHT: usize = PART / 16;
/// If parts have less than this fraction of their shares, a part with more is copied to a smaller
/// one.
const MIN_LEFT: f64 = 0.5;

/// Index of the prefixes that instances hold, with a byte bound that can be lowered.
pub struct KvIndex {
    /// At least one.
    parts: Vec<Part>,
    byte_bound: usize,
    crowded: bool,
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
    /// No effect either. Blocks that were not present are only expected: the next report of the
    /// same copy makes it a physical one.
    Expect,
}

impl fmt::Debug for KvIndex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut out = f.debug_struct("KvIndex");
        out.field("pairs", &self.pairs()).field("nodes", &self.nodes()).field("bytes", &self.bytes()).finish()
    }
}

/// The index as a whole.
impl KvIndex {
    /// Minimum byte bound of each part; smaller bounds are raised to it.
    pub const MIN_BYTES: usize = Part::MIN_BYTES;

    /// Creates an empty index that never uses more than `byte_bound` bytes (least recently used
    /// leaves are evicted first).
    pub fn new(byte_bound: usize) -> KvIndex {
        let byte_bound = byte_bound.max(Self::MIN_BYTES);
        KvIndex { parts: vec![Part::new(byte_bound, 0)], byte_bound, crowded: false }
    }

    /// Returns an empty index with the same instances and byte bound.
    pub fn emptied(&self) -> KvIndex {
        let mut index = KvIndex::new(self.byte_bound);
        for (at, part) in self.parts.iter().enumerate() {
            for (number, capacity) in part.open() {
                index.add_instance(Slot((at * PART) as u32 + number), capacity);
            }
        }
        index
    }

    /// Adds an instance, or changes its capacity. `capacity_blocks`: size of its cache, which
    /// bounds the blocks that [`KvIndex::record`] keeps. Returns false if the slot is beyond
    /// [`MAX_INSTANCES`]; nothing is kept for it.
    pub fn add_instance(&mut self, instance: Slot, capacity_blocks: Option<u32>) -> bool {
        let (part, number) = (instance.index() / PART, (instance.index() % PART) as u32);
        if instance.index() >= MAX_INSTANCES {
            return false;
        }
        while self.parts.len() <= part {
            let expected = self.byte_bound / (self.parts.len() + 1);
            self.parts.push(Part::new(0, expected));
        }
        let before = self.parts[part].books.len();
        self.parts[part].add_instance(number, capacity_blocks);
        if self.parts.len() > 1 && self.parts[part].books.len() > before {
            self.divide();
        }
        true
    }

    /// Returns each part's share of `byte_bound`, by instances.
    fn shares(&self, byte_bound: usize) -> Vec<usize> {
        let weights: Vec<usize> = self.parts.iter().map(|part| part.books.len().max(MIN_WEIGHT)).collect();
        let all: usize = weights.iter().sum();
        let share = |weight| (byte_bound as f64 * weight as f64 / all as f64) as usize;
        match self.parts.len() {
            1 => vec![byte_bound.max(Self::MIN_BYTES)],
            _ => weights.into_iter().map(|weight| share(weight).max(Self::MIN_BYTES)).collect(),
        }
    }

    /// Divides the byte bound. A part that uses more than its share keeps it, and the other parts
    /// share the rest.
    fn divide(&mut self) {
        let shares = self.shares(self.byte_bound);
        let bytes: Vec<usize> = self.parts.iter().map(Part::bytes).collect();
        let mut keeps = vec![false; self.parts.len()];
        let left = loop {
            let sum = |of: &[usize], kept| -> usize {
                of.iter().zip(&keeps).filter(|(_, keeps)| **keeps == kept).map(|(bytes, _)| bytes).sum()
            };
            let rest = self.byte_bound.saturating_sub(sum(&bytes, true));
            let left = (rest as f64 / sum(&shares, false).max(1) as f64).min(1.0);
            let is_over = |at: usize| bytes[at] as f64 > shares[at] as f64 * left;
            match (0..keeps.len()).find(|at| !keeps[*at] && is_over(*at)) {
                Some(over) => keeps[over] = true,
                None => break left,
            }
        };
        for (at, part) in self.parts.iter_mut().enumerate() {
            let bound = if keeps[at] { bytes[at] } else { (shares[at] as f64 * left) as usize };
            part.byte_bound = bound.max(Self::MIN_BYTES);
        }
        self.crowded = left < MIN_LEFT && keeps.contains(&true);
    }

    /// Returns whether parts use so much more than their shares that other parts lack memory.
    /// Copies ([`KvIndex::copy_within`]) make it smaller.
    pub fn is_crowded(&self) -> bool {
        self.crowded
    }

    /// Lowers the byte bound if no more bytes are in use, and returns whether it did.
    pub fn lower_bound(&mut self, byte_bound: usize) -> bool {
        let fits = self.bytes() <= byte_bound;
        if fits {
            self.byte_bound = self.byte_bound.min(byte_bound.max(Self::MIN_BYTES));
            self.divide();
        }
        fits
    }

    /// Writes the number of leading blocks of `chain` that each instance holds to
    /// `hit_blocks[slot]`. Entries of unknown slots are 0.
    pub fn match_prefix(&self, chain: &[u64], hit_blocks: &mut [u32]) {
        match &*self.parts {
            [part] => _ = part.search(chain, 0, hit_blocks),
            parts => match_parts(parts, chain, hit_blocks),
        }
    }

    /// Returns whether a block of this instance can be stored after the block: some instance of the
    /// same part has it, or a block behind it.
    pub fn knows(&self, instance: Slot, hash: u64) -> bool {
        self.part(instance).is_some_and(|(part, _)| part.find(hash).is_some())
    }

    /// Returns the block before a block of the index (`Some(None)`: the block starts a prompt);
    /// `None` if the index does not know the block.
    pub fn parent_of(&self, hash: u64) -> Option<Option<u64>> {
        self.parts.iter().find_map(|part| part.parent_of(hash))
    }

    /// Appends the instances that hold the block (and all blocks before it) to `out`, in order.
    pub fn holders(&self, hash: u64, out: &mut Vec<Slot>) {
        for (at, part) in self.parts.iter().enumerate() {
            part.holders(hash, (at * PART) as u32, out);
        }
    }

    /// Returns the number of (instance, block) pairs held.
    pub fn pairs(&self) -> usize {
        self.parts.iter().map(|part| part.pairs).sum()
    }

    /// Returns the number of blocks in the index, distinct in each part, including blocks kept only
    /// for the blocks behind them.
    pub fn nodes(&self) -> usize {
        self.parts.iter().map(Part::nodes).sum()
    }

    /// Returns the bytes in use, including allocations.
    pub fn bytes(&self) -> usize {
        self.parts.iter().map(Part::bytes).sum()
    }

    /// Returns the bound on [`KvIndex::bytes`], if it is at least [`KvIndex::MIN_BYTES`] for each
    /// part.
    pub fn byte_bound(&self) -> usize {
        self.byte_bound
    }

    /// Returns the total number of blocks evicted because of a capacity or the byte bound.
    pub fn evicted_blocks(&self) -> u64 {
        self.parts.iter().map(|part| part.evicted).sum()
    }
}

/// One instance.
impl KvIndex {
    #[inline(always)]
    fn part(&self, instance: Slot) -> Option<(&Part, u32)> {
        Some((self.parts.get(instance.index() / PART)?, (instance.index() % PART) as u32))
    }

    #[inline(always)]
    fn part_mut(&mut self, instance: Slot) -> Option<(&mut Part, u32)> {
        Some((self.parts.get_mut(instance.index() / PART)?, (instance.index() % PART) as u32))
    }

    /// Changes the capacity of an instance without evicting blocks beyond it; [`KvIndex::trim`]
    /// evicts them.
    pub fn set_capacity(&mut self, instance: Slot, capacity_blocks: Option<u32>) {
        if let Some((part, instance)) = self.part_mut(instance) {
            part.set_capacity(instance, capacity_blocks);
        }
    }

    /// Evicts up to `most` blocks beyond the instance's capacity and returns the number left beyond
    /// it.
    pub fn trim(&mut self, instance: Slot, most: u32) -> u32 {
        self.part_mut(instance).map_or(0, |(part, instance)| part.trim(instance, most))
    }

    /// Removes all state of an instance.
    pub fn remove_instance(&mut self, instance: Slot) {
        if let Some((part, instance)) = self.part_mut(instance) {
            part.remove_instance(instance);
        }
    }

    /// Approximate feed: records that this prompt was placed on `instance`, so its blocks will be
    /// there. If the chain is longer than the instance's capacity, its front is kept.
    pub fn record(&mut self, instance: Slot, chain: &[u64]) {
        if let Some((part, instance)) = self.part_mut(instance) {
            part.record(instance, chain);
        }
    }

    /// Records a prompt like [`KvIndex::record`], given the instance's `hit_blocks` from
    /// [`KvIndex::match_prefix`]. This saves the search if `hit_blocks` is still correct.
    pub fn record_hit(&mut self, instance: Slot, chain: &[u64], hit_blocks: u32) {
        if let Some((part, instance)) = self.part_mut(instance) {
            part.record_hit(instance, chain, hit_blocks);
        }
    }

    /// Records a prompt like [`KvIndex::record_hit`], but evicts and places at most `most` blocks.
    /// Returns the number of leading blocks held then, if more is left to do; pass it as
    /// `hit_blocks` in the next call. After the last call, the index is as after one
    /// [`KvIndex::record_hit`].
    pub fn record_some(
        &mut self,
        instance: Slot,
        chain: &[u64],
        hit_blocks: u32,
        most: usize,
    ) -> Option<u32> {
        let (part, instance) = self.part_mut(instance)?;
        part.record_some(instance, chain, hit_blocks, most)
    }

    /// Exact feed: enters blocks of a prompt that the engine has computed, before it reports them.
    /// Places at most `most` blocks behind those that the instance holds, and returns their
    /// positions. `hit_blocks` saves the search, as in [`KvIndex::record_hit`]. The blocks are only
    /// expected: the next [`KvIndex::stored`] counts no further copy.
    pub fn expect_some(
        &mut self,
        instance: Slot,
        chain: &[u64],
        hit_blocks: u32,
        most: usize,
    ) -> Range<usize> {
        let part = self.part_mut(instance);
        part.map_or(0..0, |(part, instance)| part.expect_some(instance, chain, hit_blocks, most))
    }

    /// Removes the copies of these consecutive blocks that are only expected.
    pub fn drop_expected(&mut self, instance: Slot, chain: &[u64]) {
        if let Some((part, instance)) = self.part_mut(instance) {
            part.drop_expected(instance, chain);
        }
    }

    /// Marks the first `blocks` of the chain as just used on the instance.
    pub fn touch(&mut self, instance: Slot, chain: &[u64], blocks: u32) {
        if let Some((part, instance)) = self.part_mut(instance) {
            part.touch(instance, chain, blocks);
        }
    }

    /// Exact feed: records that `instance` stored these consecutive blocks after `parent` (None:
    /// they start the chain). Each call counts one physical copy of each block. Returns the number
    /// of blocks placed: 0 if the parent is unknown ([`KvIndex::knows`]).
    pub fn stored(&mut self, instance: Slot, parent: Option<u64>, chain: &[u64]) -> usize {
        self.part_mut(instance).map_or(0, |(part, instance)| part.stored(instance, parent, chain))
    }

    /// Records stored blocks like [`KvIndex::stored`]. `copies` sets the effect on blocks that are
    /// already present.
    pub fn store(&mut self, instance: Slot, parent: Option<u64>, chain: &[u64], copies: Copies) -> usize {
        self.part_mut(instance).map_or(0, |(part, instance)| part.store(instance, parent, chain, copies))
    }

    /// Exact feed: removes one physical copy of a block. Returns whether the block was in the
    /// index.
    pub fn removed(&mut self, instance: Slot, hash: u64) -> bool {
        self.part_mut(instance).is_some_and(|(part, instance)| part.removed(instance, hash))
    }

    /// Removes a copy of many blocks and returns the number that were in the index. Blocks of one
    /// chain in order from its end skip the lookup of each block.
    pub fn removed_all(&mut self, instance: Slot, hashes: &[u64]) -> usize {
        self.part_mut(instance).map_or(0, |(part, instance)| part.removed_all(instance, hashes))
    }

    /// Removes blocks that the engine has evicted: its cache was full. Returns the number that were
    /// in the index.
    pub fn evicted_all(&mut self, instance: Slot, hashes: &[u64]) -> usize {
        self.part_mut(instance).map_or(0, |(part, instance)| part.evicted_all(instance, hashes))
    }

    /// Returns the most blocks that the instance held when its engine evicted one, since the last
    /// call; `None`: it evicted none.
    pub fn take_full(&mut self, instance: Slot) -> Option<u32> {
        let (part, instance) = self.part_mut(instance)?;
        part.take_full(instance)
    }

    /// Drops up to `most` blocks of the instance and returns the number left.
    pub fn clear_some(&mut self, instance: Slot, most: u32) -> u32 {
        self.part_mut(instance).map_or(0, |(part, instance)| part.clear_some(instance, most))
    }

    /// Exact feed: the whole cache of `instance` was cleared.
    pub fn cleared(&mut self, instance: Slot) {
        if let Some((part, instance)) = self.part_mut(instance) {
            part.cleared(instance);
        }
    }

    /// Evicts up to `blocks` blocks of the instance, least recently used leaves first, and returns
    /// the number evicted.
    pub fn evict_from(&mut self, instance: Slot, blocks: u32) -> u32 {
        self.part_mut(instance).map_or(0, |(part, instance)| part.evict_from(instance, blocks))
    }

    /// Returns whether the instance holds the block, regardless of the blocks before it.
    pub fn holds(&self, instance: Slot, hash: u64) -> bool {
        self.part(instance).is_some_and(|(part, instance)| part.holds(instance, hash))
    }

    /// Returns the number of blocks held by `instance`.
    pub fn blocks(&self, instance: Slot) -> u32 {
        self.part(instance).map_or(0, |(part, instance)| part.blocks(instance))
    }
}

/// Searches several parts, as far as they have the first block. Mostly, all parts hold the same
/// beginning of a prompt, and the rest is in one part: the shortest prefix of a part is a guess for
/// the next one.
#[inline(never)]
fn match_parts(parts: &[Part], chain: &[u64], hit_blocks: &mut [u32]) {
    let mut hits = hit_blocks.chunks_mut(PART);
    let mut guess = 0;
    for (part, hits) in parts.iter().zip(&mut hits) {
        if part.may_match(chain) {
            guess = part.search(chain, guess, hits);
        } else {
            hits.fill(0);
        }
    }
    hits.for_each(|hits| hits.fill(0));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::table::Key;
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
                (0..3).for_each(|i| assert!(index.add_instance(Slot(i), None)));
                for &(i, family, fork, blocks) in &stores {
                    index.stored(Slot(i), None, &chain(family, fork)[..blocks]);
                }
            }
            for (n, (i, family, from, blocks, backwards)) in removals.into_iter().enumerate() {
                let fork = stores[n % stores.len()].2;
                let mut gone = chain(family, fork)[from..(from + blocks).min(30)].to_vec();
                if backwards {
                    gone.reverse();
                }
                let known = gone.iter().filter(|h| indexes[0].removed(Slot(i), **h)).count();
                prop_assert_eq!(indexes[1].removed_all(Slot(i), &gone), known);
                for &(_, family, fork, _) in &stores {
                    let mut hits = [[0; 3]; 2];
                    indexes.iter().zip(&mut hits).for_each(|(index, hits)| index.match_prefix(&chain(family, fork), hits));
                    prop_assert_eq!(hits[0], hits[1]);
                }
                let [one, all] = &indexes;
                prop_assert_eq!((one.pairs(), one.nodes()), (all.pairs(), all.nodes()));
            }
            // In the end all remaining blocks are evicted, so every chain end was in its queue.
            for i in (0..3).map(Slot) {
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
            (0..20).for_each(|i| assert!(index.add_instance(Slot(i), None)));
            // Eight chains whose blocks all have one of two places.
            let chain = |c: u64| -> Vec<u64> {
                (0..40).map(|b| Key::unmixed((b % 2 + 1) << 62 | if b < 8 { b } else { c * 40 + b })).collect()
            };
            prop_assert!(index.parts[0].table.key(chain(1)[30]) == index.parts[0].table.key(chain(2)[38]));
            for (i, c, blocks, store) in steps {
                let chain = chain(c);
                if store {
                    index.record(Slot(i), &chain[..blocks]);
                } else {
                    index.removed(Slot(i), chain[blocks]);
                }
                let mut hits = [0; 20];
                index.match_prefix(&chain, &mut hits);
                for (i, hit) in hits.iter().enumerate() {
                    let linear = chain.iter().take_while(|h| index.holds(Slot(i as u32), **h)).count();
                    prop_assert_eq!(*hit as usize, linear);
                }
            }
        }
    }
}
