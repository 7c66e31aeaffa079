//! Places stored blocks in the index of their tier, and makes room for their names.
use super::event::{Applied, Refused, Source};
use super::state::{KvFeed, State};
use crate::ids::Slot;
use crate::kv::index::copy::CopyStatus;
use crate::kv::index::{Copies, KvIndex};
use crate::kv::names::{Cache, Means};
use crate::kv::tier::Tier;
use crate::router::Caches;
use hashbrown::HashMap;
use std::collections::VecDeque;
use std::sync::atomic::Ordering;

/// Blocks per lock of the caches: about 2 µs, or twice as much for blocks that many instances hold.
pub(super) const PIECE: usize = 16;
/// Blocks of an event per lock of the feed: about a millisecond.
pub(super) const PER_LOCK: usize = 64 * PIECE;
/// Maximum blocks beyond an instance's capacity that are evicted per stored piece.
const TRIMMED: u32 = 128;
/// Cells of the index per lock of the caches.
const CELLS: u32 = 1024;
/// If fewer than this fraction of names belong to evicted blocks, more blocks are evicted.
const SWEPT_SHARE: f64 = 0.0625;
/// Fraction of an instance's blocks to evict then.
const EVICTED_SHARE: u32 = 8;

/// A block with its position.
struct Named {
    engine: u64,
    chain: u64,
    parent: Option<u64>,
}

/// Blocks of a lower tier whose names are known.
#[derive(Default)]
struct NamedBlocks {
    /// Blocks that can be placed now, in order.
    ready: VecDeque<Named>,
    /// Blocks whose previous block must be placed first, by that block.
    behind: HashMap<u64, Vec<Named>>,
    applied: Applied,
}

impl NamedBlocks {
    /// Returns the number of blocks that are not placed yet.
    fn left(&self) -> usize {
        self.ready.len() + self.behind.values().map(Vec::len).sum::<usize>()
    }

    /// Returns the result: the blocks before the remaining ones are unknown.
    fn end(mut self) -> Applied {
        self.applied.unknown_parent += self.left();
        self.applied
    }
}

impl KvFeed {
    /// Ensures that a lower tier has an index. Otherwise returns the result for `blocks` blocks.
    pub(super) fn tier_refuses(&self, source: Source, tier: Tier, blocks: usize) -> Option<Applied> {
        self.refuses(source, blocks, |caches| caches.open_tier(tier))
    }

    /// Calls `open`, which makes another index. If it returns false, the GPUs' index becomes
    /// smaller first. Returns the result for `blocks` blocks if there is no room.
    pub(super) fn refuses(
        &self,
        source: Source,
        blocks: usize,
        mut open: impl FnMut(&mut Caches) -> bool,
    ) -> Option<Applied> {
        let mut applied = Applied::default();
        let mut opened = self.take(source).map(|mut caches| open(&mut caches));
        if matches!(opened, Ok(false)) {
            let half = self.caches.read().gpu().byte_bound() / 2;
            if half / 2 >= KvIndex::MIN_BYTES && self.shrink_index(half) {
                opened = self.take(source).map(|mut caches| open(&mut caches));
            }
        }
        match opened {
            Ok(true) => return None,
            Ok(false) => applied.unplaced = blocks,
            Err(why) => applied.refuse(why, blocks),
        }
        Some(applied)
    }

    /// Reduces the GPUs' index to at most `bytes`, if it uses more, and keeps the recently used
    /// blocks. Takes about 0.1 µs per block, and the caches only for microseconds at a time; for
    /// that time, the index takes up to `bytes` more. Returns false if a copy has failed
    /// ([`CopyStatus::Failed`]); blocks stored meanwhile are copied, too.
    pub(super) fn shrink_index(&self, bytes: usize) -> bool {
        self.copy_parts(Some(bytes), |index| index.bytes() <= bytes)
    }

    /// Divides the memory of the GPUs' index anew, if instances were added beside those that have
    /// filled it. Costs the same as a smaller index.
    pub fn even_out(&self) {
        self.copy_parts(None, |index| !index.is_crowded());
    }

    /// Copies parts of the GPUs' index to smaller ones, as if the index had this byte bound, until
    /// it `fits`. Returns whether it does. One thread copies at a time: a second copy of the same
    /// part would make the first one fail.
    fn copy_parts(&self, bytes: Option<usize>, fits: impl Fn(&KvIndex) -> bool) -> bool {
        let _alone = self.copying.lock();
        loop {
            let mut copy = {
                let caches = self.caches.read();
                let index = caches.gpu();
                if fits(index) {
                    return true;
                }
                match index.copy_within(bytes.unwrap_or(index.byte_bound())) {
                    Some(copy) => copy,
                    None => return false,
                }
            };
            if !self.caches.write_behind().gpu_mut().begin_copy(&mut copy) {
                return false;
            }
            while copy.look(self.caches.read().gpu(), CELLS) {}
            copy.order();
            // The old part is dropped without the caches.
            let mut replaced = CopyStatus::NotYet;
            while replaced == CopyStatus::NotYet {
                while copy.read(self.caches.read().gpu()) {
                    copy.store();
                }
                replaced = self.caches.write_behind().gpu_mut().replace(&mut copy);
            }
            if replaced == CopyStatus::Failed {
                return false;
            }
        }
    }

    /// Returns whether blocks of the instance can be stored after the block in a tier.
    pub(super) fn knows(&self, instance: Slot, tier: Tier, hash: u64) -> bool {
        self.caches.read().index(tier).is_some_and(|index| index.knows(instance, hash))
    }

    /// Returns whether another cache of the source's rank, or the tier itself, names all blocks.
    pub fn names_all(&self, source: Source, tier: Tier, engine_hashes: &[u64]) -> bool {
        let (names, cache) = (&self.state.lock().names, Cache::new(source.rank, tier));
        engine_hashes.iter().all(|engine| names.find_in_any(source.instance.slot(), cache, *engine).is_some())
    }

    /// Stores blocks in a lower tier that the engine reports by name alone. Each block takes the
    /// position of the equally named block of another tier; blocks with unknown names are skipped.
    pub fn named_in(&self, source: Source, tier: Tier, engine_hashes: &[u64]) -> Applied {
        self.ensure_room_for_names();
        if let Some(applied) = self.tier_refuses(source, tier, engine_hashes.len()) {
            return applied;
        }
        let mut state = match self.lock_for(source) {
            Ok(state) => state,
            Err(why) => return Applied::refused(why, engine_hashes.len()),
        };
        let (epoch, cache) = (state.epoch_of(source.instance.slot()), Cache::new(source.rank, tier));
        let mut named = NamedBlocks::default();
        let (mut kept, mut left) = (true, engine_hashes.len());
        for engines in engine_hashes.chunks(PER_LOCK) {
            if !kept {
                break;
            }
            left -= engines.len();
            self.find_named(&mut state, source, cache, engines, &mut named);
            kept = self.give_way(&mut state, source, epoch);
        }
        while kept && self.place_some(&mut state, source, cache, &mut named, PER_LOCK) {
            kept = self.give_way(&mut state, source, epoch);
        }
        if kept {
            return named.end();
        }
        left += named.left();
        *self.lost(source, &mut named.applied.unknown_name, &mut named.applied.gone) += left;
        named.applied
    }

    /// Places blocks of a lower tier by their names in other tiers, in any order: a block is placed
    /// after the block before it.
    pub(super) fn place_named(
        &self,
        state: &mut State,
        source: Source,
        cache: Cache,
        engine_hashes: &[u64],
    ) -> Applied {
        let mut named = NamedBlocks::default();
        self.find_named(state, source, cache, engine_hashes, &mut named);
        while self.place_some(state, source, cache, &mut named, PER_LOCK) {}
        named.end()
    }

    /// Finds the positions of blocks of a lower tier by their names in other tiers.
    fn find_named(
        &self,
        state: &mut State,
        source: Source,
        cache: Cache,
        engine_hashes: &[u64],
        found: &mut NamedBlocks,
    ) {
        for engine in engine_hashes {
            let chain = state.names.find_in_any(source.instance.slot(), cache, *engine);
            // Any index that knows the block knows the block before it.
            let place = chain.and_then(|chain| {
                let caches = self.caches.read();
                let index = |tier: Tier| caches.index(tier)?.parent_of(chain);
                Some((chain, Tier::MEDIA.iter().find_map(|(_, tier)| index(*tier))?))
            });
            let Some((chain, parent)) = place else {
                found.applied.unknown_name += 1;
                continue;
            };
            let named = Named { engine: *engine, chain, parent };
            match parent.filter(|parent| !self.knows(source.instance.slot(), cache.tier, *parent)) {
                Some(parent) => found.behind.entry(parent).or_default().push(named),
                None => found.ready.push_back(named),
            }
        }
    }

    /// Places up to `most` blocks. Returns whether more can be placed.
    fn place_some(
        &self,
        state: &mut State,
        source: Source,
        cache: Cache,
        blocks: &mut NamedBlocks,
        most: usize,
    ) -> bool {
        for _ in 0..most {
            let Some(Named { engine, chain, parent }) = blocks.ready.pop_front() else { return false };
            match self.place(state, source, cache, parent, &[engine], &[chain], Means::Report) {
                Ok(0) => blocks.applied.unplaced += 1,
                Ok(_) => {
                    blocks.applied.done += 1;
                    for next in blocks.behind.remove(&chain).into_iter().flatten() {
                        blocks.ready.push_front(next);
                    }
                }
                Err(why) => {
                    let left = blocks.left() + 1;
                    blocks.applied.refuse(why, left);
                    (blocks.ready, blocks.behind) = Default::default();
                    return false;
                }
            }
        }
        !blocks.ready.is_empty()
    }

    /// Places up to [`PIECE`] blocks; returns the number of placed blocks.
    pub(super) fn place(
        &self,
        state: &mut State,
        source: Source,
        cache: Cache,
        parent: Option<u64>,
        engines: &[u64],
        chain: &[u64],
        means: Means,
    ) -> Result<usize, Refused> {
        let instance = source.instance.slot();
        // Names first: a block without a name could never be removed. New names need no index
        // access.
        let mut named = 0;
        while named < chain.len()
            && state.names.find(instance, cache, engines[named]).is_none()
            && state.names.insert(instance, cache, engines[named], chain[named])
        {
            named += 1;
        }
        let stored = self.take(source).map(|mut caches| {
            let Some(index) = caches.index_mut(cache.tier) else { return 0 };
            let placed = index.store(instance, parent, &chain[..named], Copies::Add);
            trim(index, instance);
            if cache.tier == Tier::Gpu && index.is_crowded() {
                self.crowded.store(true, Ordering::Relaxed);
            }
            placed
        });
        let mut placed = *stored.as_ref().unwrap_or(&0);
        for engine in &engines[placed..named] {
            state.names.remove(instance, cache, *engine);
        }
        let stuck = stored? < named;
        // The remaining blocks already have a name, or there is no room: place them one by one.
        while placed < chain.len() && !stuck {
            let (engine, hash) = (engines[placed], chain[placed]);
            let before = placed.checked_sub(1).map_or(parent, |at| Some(chain[at]));
            let mut entered = self.enter(state, source, cache, before, engine, hash, means)?;
            if !entered && self.make_room(state, source, cache, engine) {
                entered = self.enter(state, source, cache, before, engine, hash, means)?;
            }
            if !entered {
                break;
            }
            placed += 1;
        }
        Ok(placed)
    }

    /// Places a block whose name may already be known; returns false if there is no room.
    fn enter(
        &self,
        state: &mut State,
        source: Source,
        cache: Cache,
        before: Option<u64>,
        engine: u64,
        hash: u64,
        means: Means,
    ) -> Result<bool, Refused> {
        let instance = source.instance.slot();
        let mut caches = self.take(source)?;
        let Some(index) = caches.index_mut(cache.tier) else { return Ok(false) };
        let Some(copies) = state.names.enter_known(index, instance, cache, engine, hash, means) else {
            return Ok(false);
        };
        let placed = index.store(instance, before, &[hash], copies) == 1;
        if !placed {
            state.names.remove(instance, cache, engine);
        }
        trim(index, instance);
        Ok(placed)
    }

    /// Drops names of evicted blocks. If this frees too little, also evicts the instance's least
    /// recently used blocks. Returns whether names were dropped.
    fn make_room(&self, state: &mut State, source: Source, cache: Cache, engine: u64) -> bool {
        let (instance, tier) = (source.instance.slot(), cache.tier);
        let names = state.names.near(instance, cache, engine);
        let mut gone = self.sweep(state, source, cache, engine);
        if (gone as f64) < SWEPT_SHARE * names as f64 {
            let blocks = self.caches.read().index(tier).map_or(0, |index| index.blocks(instance));
            let mut left = blocks / EVICTED_SHARE + 1;
            while left > 0 {
                let most = left.min(PIECE as u32);
                let mut caches = self.caches.write_behind();
                let evicted = caches.index_mut(tier).map_or(0, |index| index.evict_from(instance, most));
                drop(caches);
                left = if evicted == 0 { 0 } else { left - most };
            }
            gone += self.sweep(state, source, cache, engine);
        }
        gone > 0
    }

    fn sweep(&self, state: &mut State, source: Source, cache: Cache, engine: u64) -> usize {
        let (mut gone, mut at) = (0, Some(0));
        while let Some(from) = at {
            let caches = self.caches.read();
            let Some(index) = caches.index(cache.tier) else { break };
            let of = (source.instance.slot(), cache);
            let (went, next) = state.names.sweep(index, of, engine, from, PIECE);
            (gone, at) = (gone + went, next);
        }
        gone
    }
}

/// Limits the blocks of an engine that reports more than its cache holds.
fn trim(index: &mut KvIndex, instance: Slot) {
    index.trim(instance, TRIMMED);
}
