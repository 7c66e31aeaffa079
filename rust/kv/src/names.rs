//! Engine names of blocks.
//!
//! An engine names blocks by its own hash. The event of each stored block carries the tokens, from
//! which the router computes its own hash. The router keeps the engine's hash only to find the
//! block again when it is a parent or is removed.
//!
//! Each physical copy takes 16 bytes, in tables that grow in small steps. Each rank of an instance
//! has its own table, because each rank has its own cache: another rank may still hold a block that
//! one rank evicts. Each tier of a rank has its own table for the same reason.
use crate::Slot;
use crate::index::{Copies, KvIndex};
use crate::table::{Inserted, Key, Row, Table};
use crate::tier::Tier;
use std::hash::{BuildHasher, RandomState};

/// Number of segments of a rank's table, as a power of two.
const SEGMENT_BITS: u32 = 4;

/// One physical copy of a block. Two copies are two equal entries.
#[derive(Clone, Copy, Debug)]
struct Entry {
    engine: u64,
    chain: u64,
}

impl Row for Entry {
    const EMPTY: Entry = Entry { engine: 0, chain: 0 };

    fn is_empty(self) -> bool {
        self.engine == 0 && self.chain == 0
    }

    fn place(self) -> u32 {
        Key::new(self.engine, SEGMENT_BITS).place()
    }
}

/// Effect of a stored block on the number of its physical copies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Means {
    /// Adds one copy.
    NewCopy,
    /// Reports a block: adds a copy if none is known, else nothing.
    Report,
}

/// A cache of an instance: one tier of one data-parallel rank, or of one KV cache group there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cache {
    /// The data-parallel rank.
    pub rank: u32,
    /// The tier.
    pub tier: Tier,
    /// The KV cache group; `None`: full attention.
    pub group: Option<u32>,
}

impl Cache {
    /// Returns a tier of a rank, with the blocks of full attention.
    pub fn new(rank: u32, tier: Tier) -> Cache {
        Cache { rank, tier, group: None }
    }
}

struct Rank {
    cache: Cache,
    table: Table<Entry>,
}

/// Engine names of all known blocks, bounded in bytes.
///
/// Engines choose the names. A secret permutes them, so that no engine can choose names that crowd
/// one part of a table, where each look-up would pass all of them.
pub struct Names {
    secret: (u64, u64),
    ranks: Vec<Vec<Rank>>,
    byte_bound: usize,
    table_bytes: usize,
    /// Bytes of the lists of tables.
    list_bytes: usize,
}

impl Names {
    /// Creates a table of at most `byte_bound` bytes.
    pub fn new(byte_bound: usize) -> Names {
        let random = RandomState::new();
        let secret = (random.hash_one(0), random.hash_one(1) | 1);
        Names { secret, ranks: Vec::new(), byte_bound, table_bytes: 0, list_bytes: 0 }
    }

    /// Returns the name under which a block is stored: a permutation of the engine's names.
    #[inline(always)]
    fn stored(&self, engine: u64) -> u64 {
        (engine ^ self.secret.0).wrapping_mul(self.secret.1)
    }

    /// Changes the bound on [`Names::bytes`]. A table with more keeps its names.
    pub fn set_byte_bound(&mut self, byte_bound: usize) {
        self.byte_bound = byte_bound;
    }

    /// Returns the number of known physical copies, over all instances.
    pub fn copies(&self) -> usize {
        self.ranks.iter().flatten().map(|r| r.table.len()).sum()
    }

    /// Returns the bytes in use, including allocations.
    pub fn bytes(&self) -> usize {
        self.table_bytes + self.list_bytes
    }

    fn table(&self, instance: Slot, cache: Cache) -> Option<&Table<Entry>> {
        self.ranks.get(instance.index())?.iter().find(|r| r.cache == cache).map(|r| &r.table)
    }

    fn table_mut(&mut self, instance: Slot, cache: Cache) -> Option<&mut Table<Entry>> {
        self.ranks.get_mut(instance.index())?.iter_mut().find(|r| r.cache == cache).map(|r| &mut r.table)
    }

    /// Returns whether another rank of the instance is known.
    pub fn has_others(&self, instance: Slot, rank: u32) -> bool {
        self.ranks.get(instance.index()).is_some_and(|ranks| ranks.iter().any(|r| r.cache.rank != rank))
    }

    /// Returns the index's hash of the block that the cache calls `engine`.
    pub fn find(&self, instance: Slot, cache: Cache, engine: u64) -> Option<u64> {
        let (table, engine) = (self.table(instance, cache)?, self.stored(engine));
        table.find(table.key(engine), |e| e.engine == engine).map(|e| e.chain)
    }

    /// Returns the index's hash of the block that the cache, or else another tier of its rank,
    /// calls `engine`.
    pub fn find_in_any(&self, instance: Slot, cache: Cache, engine: u64) -> Option<u64> {
        let found = self.find(instance, cache, engine);
        if found.is_some() || cache.tier == Tier::Gpu {
            return found;
        }
        let others = Tier::MEDIA.iter().filter(|(_, tier)| *tier != cache.tier);
        others.map(|(_, tier)| Cache { tier: *tier, ..cache }).find_map(|c| self.find(instance, c, engine))
    }

    /// Adds a copy. Returns false if there is no room for it.
    pub fn insert(&mut self, instance: Slot, cache: Cache, engine: u64, chain: u64) -> bool {
        matches!(self.add(instance, cache, engine, chain), Inserted::Alone | Inserted::Shared)
    }

    fn add(&mut self, instance: Slot, cache: Cache, engine: u64, chain: u64) -> Inserted {
        if self.table(instance, cache).is_none() && !self.open(instance, cache) {
            return Inserted::No;
        }
        let limit = self.byte_bound.saturating_sub(self.bytes());
        let engine = self.stored(engine);
        let Some(table) = self.table_mut(instance, cache) else { return Inserted::No };
        let (before, key) = (table.bytes(), table.key(engine));
        let inserted = table.insert(key, Entry { engine, chain }, before + limit);
        let grown = table.bytes() - before;
        self.table_bytes += grown;
        inserted
    }

    /// Removes a copy and returns the index's hash of it.
    pub fn remove(&mut self, instance: Slot, cache: Cache, engine: u64) -> Option<u64> {
        let engine = self.stored(engine);
        let table = self.table_mut(instance, cache)?;
        table.remove(table.key(engine), |e| e.engine == engine).map(|e| e.chain)
    }

    /// Adds a copy of a block whose name may be known already. Returns the copy's effect on the
    /// index; `None`: no room.
    pub fn enter_known(
        &mut self,
        index: &mut KvIndex,
        instance: Slot,
        cache: Cache,
        engine: u64,
        chain: u64,
        means: Means,
    ) -> Option<Copies> {
        let mut known = self.find(instance, cache, engine);
        if known.is_some_and(|c| c != chain || !index.holds(instance, chain)) {
            // The name now belongs to another block, or to a block that the index has evicted.
            // Neither says anything about copies.
            while let Some(old) = self.remove(instance, cache, engine) {
                if old != chain {
                    index.removed(instance, old);
                }
            }
            known = None;
        }
        match known {
            Some(_) if means == Means::Report => Some(Copies::Keep),
            _ => match self.add(instance, cache, engine, chain) {
                Inserted::Alone | Inserted::Shared => Some(Copies::Add),
                // Further copies are not counted.
                Inserted::Crowded if known.is_some() => Some(Copies::Keep),
                Inserted::Crowded | Inserted::No => None,
            },
        }
    }

    /// Checks up to `most` slots in the table segment of `engine`, starting at slot `at`, and
    /// removes entries that the index no longer holds. Returns the number removed, and the slot to
    /// continue at.
    pub fn sweep(
        &mut self,
        index: &KvIndex,
        (instance, cache): (Slot, Cache),
        engine: u64,
        at: usize,
        most: usize,
    ) -> (usize, Option<usize>) {
        let engine = self.stored(engine);
        let Some(table) = self.table_mut(instance, cache) else { return (0, None) };
        table.retain_some(table.key(engine), at, most, |e| index.holds(instance, e.chain))
    }

    /// Returns the number of names in the table segment of `engine`.
    pub fn near(&self, instance: Slot, cache: Cache, engine: u64) -> usize {
        let engine = self.stored(engine);
        self.table(instance, cache).map_or(0, |table| table.near(table.key(engine)))
    }

    /// Returns the caches of a rank.
    pub fn caches(&self, instance: Slot, rank: u32) -> Vec<Cache> {
        let ranks = self.ranks.get(instance.index()).map_or(&[][..], Vec::as_slice);
        ranks.iter().map(|r| r.cache).filter(|cache| cache.rank == rank).collect()
    }

    /// Returns the index's hash of the block that some cache of the rank calls `engine`.
    pub fn find_on_rank(&self, instance: Slot, rank: u32, engine: u64) -> Option<u64> {
        let engine = self.stored(engine);
        let of_rank = |r: &&Rank| r.cache.rank == rank;
        let mut tables = self.ranks.get(instance.index())?.iter().filter(of_rank).map(|r| &r.table);
        tables.find_map(|t| t.find(t.key(engine), |e| e.engine == engine).map(|e| e.chain))
    }

    /// Removes a cache and returns the index's hashes of its copies.
    pub fn take(&mut self, instance: Slot, cache: Cache) -> Option<impl Iterator<Item = u64>> {
        let ranks = self.ranks.get_mut(instance.index())?;
        let at = ranks.iter().position(|r| r.cache == cache)?;
        let table = ranks.swap_remove(at).table;
        self.table_bytes -= table.bytes();
        Some(table.into_iter().map(|e| e.chain))
    }

    /// Removes all caches of an instance.
    pub fn take_all(&mut self, instance: Slot) {
        if let Some(ranks) = self.ranks.get_mut(instance.index()) {
            let ranks = std::mem::take(ranks);
            self.table_bytes -= ranks.iter().map(|r| r.table.bytes()).sum::<usize>();
        }
    }

    /// Removes all caches. Returns the old names, because dropping them takes time.
    pub fn empty(&mut self) -> Names {
        let new = Names::new(self.byte_bound);
        std::mem::replace(self, new)
    }

    /// Ensures that the cache has a table. Returns false if there is no room for it.
    fn open(&mut self, instance: Slot, cache: Cache) -> bool {
        let slots = (instance.index() + 1).saturating_sub(self.ranks.len());
        let table = Table::new(SEGMENT_BITS);
        let more = slots * size_of::<Vec<Rank>>() + size_of::<Rank>() + table.bytes();
        let fits = self.bytes() + more <= self.byte_bound;
        if fits {
            self.ranks.reserve_exact(slots);
            self.ranks.resize_with(self.ranks.len() + slots, Vec::new);
            self.table_bytes += table.bytes();
            let ranks = &mut self.ranks[instance.index()];
            ranks.reserve_exact(1);
            ranks.push(Rank { cache, table });
            let listed: usize = self.ranks.iter().map(Vec::capacity).sum();
            self.list_bytes = self.ranks.capacity() * size_of::<Vec<Rank>>() + listed * size_of::<Rank>();
        }
        fits
    }
}
