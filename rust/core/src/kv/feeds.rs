//! Exact feed: the engines' own block events, whatever hash they use.
//!
//! An engine names blocks by its own hash. For each block it stores, the event carries the tokens, from which the router's hash
//! follows; the engine's hash is only remembered to find the block again when it is someone's parent or is removed. 16 bytes an
//! entry, in tables that grow in small steps, one per instance.
use super::hash::{Domain, hash_tokens_after};
use super::index::{Copies, KvIndex};
use super::table::{Inserted, Key, Slot, Table};
use crate::ids::InstanceId;

/// Segments of an instance's table, as a power of two.
const SEGMENT_BITS: u32 = 4;
/// Where fewer names than this share are of evicted blocks, more blocks are evicted.
const SWEPT_SHARE: f64 = 0.0625;
/// What goes at once, as a share of an instance's blocks, when the map is full.
const EVICTED_SHARE: u32 = 8;

/// One physical copy of a block: two copies are two equal entries.
#[derive(Clone, Copy, Debug)]
struct Entry {
    engine: u64,
    chain: u64,
}

impl Slot for Entry {
    const EMPTY: Entry = Entry { engine: 0, chain: 0 };

    fn is_empty(self) -> bool {
        self.engine == 0 && self.chain == 0
    }

    fn place(self) -> u32 {
        Key::new(self.engine, SEGMENT_BITS).place()
    }
}

/// Counts of what a feed could not use, since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FeedCounts {
    /// Blocks whose parent was not known.
    pub unknown_parent: u64,
    /// Blocks without tokens, or of an instance that is not open, or for which there was no room.
    pub unplaced: u64,
    /// Removals of blocks that were not known.
    pub unknown_removed: u64,
}

/// Maps each engine's hashes to the index's, bounded in bytes. See the module.
#[derive(Debug)]
pub struct ExactFeed {
    names: Vec<Option<Table<Entry>>>,
    byte_bound: usize,
    table_bytes: usize,
    counts: FeedCounts,
    chain: Vec<u64>,
}

impl ExactFeed {
    /// An empty map that never takes more than `byte_bound` bytes. When it is full, what the index has evicted is
    /// forgotten here as well, and if that is too little, the index evicts the instance's least recently used blocks. A
    /// name takes about 20 bytes, a pair in the index about 44: half of the index's bound is the right size.
    pub fn new(byte_bound: usize) -> ExactFeed {
        ExactFeed {
            names: Vec::new(),
            byte_bound,
            table_bytes: 0,
            counts: FeedCounts::default(),
            chain: Vec::new(),
        }
    }

    /// The instance stored these consecutive blocks: one physical copy more of each. `parent`: the engine's hash of the
    /// block before the first (`None`: they start the prompt); `engine_hashes`: its hashes of the blocks; `token_ids`:
    /// `block_size` ids to each; `domain`: the prompt's, with salt and adapter. Returns how many were not placed.
    pub fn stored(
        &mut self,
        index: &mut KvIndex,
        instance: InstanceId,
        parent: Option<u64>,
        engine_hashes: &[u64],
        token_ids: &[u32],
        block_size: usize,
        domain: Domain,
    ) -> usize {
        self.store(index, instance, parent, engine_hashes, token_ids, block_size, domain, Copies::Add)
    }

    /// As [`ExactFeed::stored`], for a full report of what is there: the copies of each block start over at one, so that
    /// repeating it changes nothing.
    pub fn reported(
        &mut self,
        index: &mut KvIndex,
        instance: InstanceId,
        parent: Option<u64>,
        engine_hashes: &[u64],
        token_ids: &[u32],
        block_size: usize,
        domain: Domain,
    ) -> usize {
        self.store(index, instance, parent, engine_hashes, token_ids, block_size, domain, Copies::Reset)
    }

    fn store(
        &mut self,
        index: &mut KvIndex,
        instance: InstanceId,
        parent: Option<u64>,
        engine_hashes: &[u64],
        token_ids: &[u32],
        block_size: usize,
        domain: Domain,
        copies: Copies,
    ) -> usize {
        let all = engine_hashes.len();
        let parent_hash = parent.and_then(|p| self.find(instance, p));
        if parent.is_some() && parent_hash.is_none() {
            self.counts.unknown_parent += all as u64;
            return all;
        }
        self.chain.clear();
        hash_tokens_after(domain, block_size, parent_hash, token_ids, &mut self.chain);
        self.chain.truncate(all);
        // Names first: a block that could not be named could never be removed.
        let mut named = 0;
        while named < self.chain.len()
            && self.name(index, instance, engine_hashes[named], self.chain[named], copies)
        {
            named += 1;
        }
        let placed = index.store(instance, parent_hash, &self.chain[..named], copies);
        engine_hashes[placed..named].iter().for_each(|e| self.forget(instance, *e));
        self.counts.unplaced += (all - placed) as u64;
        all - placed
    }

    /// One physical copy of each of these blocks is gone. Returns how many were not known.
    pub fn removed(&mut self, index: &mut KvIndex, instance: InstanceId, engine_hashes: &[u64]) -> usize {
        let mut unknown = 0;
        for &engine in engine_hashes {
            let known = self.find(instance, engine).is_some_and(|hash| index.removed(instance, hash));
            self.forget(instance, engine);
            unknown += usize::from(!known);
        }
        self.counts.unknown_removed += unknown as u64;
        unknown
    }

    /// The instance's whole cache was cleared, or the instance goes.
    pub fn cleared(&mut self, index: &mut KvIndex, instance: InstanceId) {
        index.cleared(instance);
        if let Some(table) = self.names.get_mut(instance.index()).and_then(Option::take) {
            self.table_bytes -= table.bytes();
        }
    }

    /// The index's hash of what the instance calls `engine_hash`.
    pub fn find(&self, instance: InstanceId, engine_hash: u64) -> Option<u64> {
        let table = self.names.get(instance.index())?.as_ref()?;
        table.find(table.key(engine_hash), |e| e.engine == engine_hash).map(|e| e.chain)
    }

    /// Physical copies known, over all instances.
    pub fn entries(&self) -> usize {
        self.names.iter().flatten().map(Table::len).sum()
    }

    /// Bytes taken now, allocations included.
    pub fn bytes(&self) -> usize {
        let slots = self.names.capacity() * size_of::<Option<Table<Entry>>>();
        size_of::<ExactFeed>() + self.table_bytes + slots + self.chain.capacity() * size_of::<u64>()
    }

    /// What could not be used so far.
    pub fn counts(&self) -> FeedCounts {
        self.counts
    }

    /// Enters a copy; false if there is no room for it.
    fn name(
        &mut self,
        index: &mut KvIndex,
        instance: InstanceId,
        engine: u64,
        chain: u64,
        copies: Copies,
    ) -> bool {
        if !index.is_open(instance) || !self.open_table(instance.index()) {
            return false;
        }
        let others = self.bytes() - self.table_bytes;
        let Some(Some(table)) = self.names.get_mut(instance.index()) else { return false };
        let key = table.key(engine);
        // A name whose block the index does not hold (any more) says nothing about copies.
        let known = table.find(key, |e| e.engine == engine);
        if known.is_some_and(|e| e.chain != chain || copies == Copies::Reset || !index.holds(instance, chain))
        {
            while table.remove(key, |e| e.engine == engine).is_some() {}
        }
        let before = table.bytes();
        let limit = self.byte_bound.saturating_sub(others + self.table_bytes - before);
        let mut room = table.insert(key, Entry { engine, chain }, limit) != Inserted::No;
        if !room {
            if table.retain_near(key, |e| index.holds(instance, e.chain)) < SWEPT_SHARE {
                index.evict_from(instance, index.blocks(instance) / EVICTED_SHARE + 1);
                table.retain_near(key, |e| index.holds(instance, e.chain));
            }
            room = table.insert(key, Entry { engine, chain }, limit) != Inserted::No;
        }
        self.table_bytes = self.table_bytes + table.bytes() - before;
        room
    }

    /// Makes sure of the instance's table; false if there is no room for it.
    fn open_table(&mut self, slot: usize) -> bool {
        if self.names.get(slot).is_some_and(Option::is_some) {
            return true;
        }
        let slots = (slot + 1).saturating_sub(self.names.len());
        let table = Table::new(SEGMENT_BITS);
        let fits =
            self.bytes() + slots * size_of::<Option<Table<Entry>>>() + table.bytes() <= self.byte_bound;
        if fits {
            self.names.reserve_exact(slots);
            self.names.resize_with(self.names.len() + slots, || None);
            self.table_bytes += table.bytes();
            self.names[slot] = Some(table);
        }
        fits
    }

    fn forget(&mut self, instance: InstanceId, engine: u64) {
        if let Some(Some(table)) = self.names.get_mut(instance.index()) {
            table.remove(table.key(engine), |e| e.engine == engine);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: InstanceId = InstanceId(0);
    const B: InstanceId = InstanceId(70);
    const BLOCK: usize = 16;

    fn domain() -> Domain {
        Domain::new(&[Some("model")], BLOCK)
    }

    /// Some engine's hash of block `n` of prompt `prompt`.
    fn engine(prompt: u64, n: u64) -> u64 {
        (prompt * 1_000_003 + n + 1).wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    struct Bed {
        index: KvIndex,
        feed: ExactFeed,
    }

    impl Bed {
        fn new(index_bytes: usize, feed_bytes: usize) -> Bed {
            let mut index = KvIndex::new(index_bytes);
            index.add_instance(A, None);
            index.add_instance(B, None);
            Bed { index, feed: ExactFeed::new(feed_bytes) }
        }

        fn tokens(prompt: u64, blocks: std::ops::Range<u64>) -> Vec<u32> {
            blocks.flat_map(|b| (0..BLOCK as u64).map(move |t| (prompt * 77 + b * 31 + t) as u32)).collect()
        }

        fn store(
            &mut self,
            instance: InstanceId,
            prompt: u64,
            blocks: std::ops::Range<u64>,
            full: bool,
        ) -> usize {
            let parent = blocks.start.checked_sub(1).map(|b| engine(prompt, b));
            let hashes: Vec<u64> = blocks.clone().map(|b| engine(prompt, b)).collect();
            let tokens = Self::tokens(prompt, blocks);
            let store = if full { ExactFeed::reported } else { ExactFeed::stored };
            store(&mut self.feed, &mut self.index, instance, parent, &hashes, &tokens, BLOCK, domain())
        }

        fn remove(&mut self, instance: InstanceId, prompt: u64, block: u64) -> usize {
            self.feed.removed(&mut self.index, instance, &[engine(prompt, block)])
        }

        fn hits(&self, prompt: u64, blocks: u64) -> (u32, u32) {
            let (mut chain, mut hits) = (Vec::new(), vec![0; 71]);
            super::super::hash::hash_tokens(domain(), BLOCK, &Self::tokens(prompt, 0..blocks), &mut chain);
            self.index.match_prefix(&chain, &mut hits);
            (hits[0], hits[70])
        }
    }

    #[test]
    fn events_of_any_hash_meet_the_routers_chains() {
        let mut bed = Bed::new(1 << 22, 1 << 20);
        assert_eq!(bed.store(A, 1, 0..4, false), 0);
        assert_eq!(bed.store(A, 1, 4..8, false), 0);
        assert_eq!(bed.store(B, 1, 0..2, false), 0);
        assert_eq!(bed.hits(1, 10), (8, 2));
        assert_eq!(bed.remove(A, 1, 5), 0);
        assert_eq!(bed.hits(1, 10), (5, 2));
        assert_eq!(bed.store(A, 1, 5..6, false), 0);
        assert_eq!(bed.hits(1, 10), (8, 2));
        bed.feed.cleared(&mut bed.index, A);
        assert_eq!(bed.hits(1, 10), (0, 2));
        assert_eq!(bed.feed.entries(), 2);
        assert_eq!(bed.store(A, 1, 4..8, false), 4, "the parent went with the rest");
    }

    #[test]
    fn a_copy_removed_is_not_all_copies_removed() {
        let mut bed = Bed::new(1 << 22, 1 << 20);
        bed.store(A, 1, 0..3, false);
        bed.store(A, 1, 0..3, false);
        bed.remove(A, 1, 1);
        assert_eq!(bed.hits(1, 3).0, 3);
        bed.remove(A, 1, 1);
        assert_eq!(bed.hits(1, 3).0, 1);
        assert_eq!(bed.remove(A, 1, 1), 1, "there is none left");

        // A full report means one copy, however often it comes.
        bed.store(A, 1, 0..3, true);
        bed.store(A, 1, 0..3, true);
        assert_eq!(bed.hits(1, 3).0, 3);
        assert_eq!(bed.remove(A, 1, 0), 0);
        assert_eq!(bed.hits(1, 3).0, 0);
        assert_eq!(bed.feed.entries(), 2);
    }

    #[test]
    fn what_cannot_be_placed_is_counted() {
        let mut bed = Bed::new(1 << 22, 1 << 20);
        assert_eq!(bed.store(A, 1, 3..5, false), 2);
        let one = [engine(1, 0), engine(1, 1)];
        let tokens = Bed::tokens(1, 0..1);
        assert_eq!(bed.feed.stored(&mut bed.index, A, None, &one, &tokens, BLOCK, domain()), 1);
        assert_eq!(bed.feed.stored(&mut bed.index, A, None, &one, &[], 0, domain()), 2);
        assert_eq!(bed.feed.stored(&mut bed.index, InstanceId(5), None, &one, &tokens, BLOCK, domain()), 2);
        assert_eq!(bed.remove(B, 1, 0), 1);
        let counts = FeedCounts { unknown_parent: 2, unplaced: 5, unknown_removed: 1 };
        assert_eq!(bed.feed.counts(), counts);
        assert_eq!(bed.hits(1, 2), (1, 0));
    }

    #[test]
    fn the_bound_holds_and_the_newest_stays() {
        let mut bed = Bed::new(1 << 22, 100_000);
        for prompt in 0..400 {
            assert_eq!(bed.store(A, prompt, 0..40, false), 0);
            assert!(bed.feed.bytes() <= 100_000);
            assert_eq!(bed.hits(prompt, 40).0, 40);
        }
        assert!(bed.index.blocks(A) > 3000, "{}", bed.index.blocks(A));
        assert!(bed.index.evicted_blocks() > 0);
    }

    #[test]
    fn what_the_index_evicts_is_forgotten_when_room_is_needed() {
        let mut bed = Bed::new(KvIndex::MIN_BYTES, 800_000);
        for prompt in 0..3000 {
            bed.store(A, prompt, 0..40, false);
            assert!(bed.feed.bytes() <= 800_000);
        }
        assert_eq!(bed.hits(2999, 40).0, 40);
        assert_eq!(bed.feed.counts().unplaced, 0);
    }

    #[test]
    fn a_name_costs_at_most_25_bytes() {
        let mut bed = Bed::new(1 << 26, 1 << 26);
        let mut worst: f64 = 0.0;
        for prompt in 0..3000 {
            bed.store(A, prompt, 0..40, false);
            if prompt > 100 {
                worst = worst.max(bed.feed.table_bytes as f64 / bed.feed.entries() as f64);
            }
        }
        assert!(worst <= 25.0, "{worst}");
    }
}
