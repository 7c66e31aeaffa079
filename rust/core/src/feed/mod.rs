//! KV events: applies the engines' block events to the index, in parallel to decisions.
//!
//! A feeder (a subscriber's thread, an embedding program) calls the methods of [`KvFeed`]. The feed
//! hashes blocks without a lock, and stores their engine names under its own. It takes the caches
//! only for index changes of 16 blocks each, so that decisions wait no longer, even for large
//! events. It takes the router only for the names and properties of instances.
//!
//! No decision reads the feed: the index in [`Caches`](crate::router::Caches) is all that they
//! share.
mod event;
mod group;
mod place;
mod state;

pub use event::{Applied, Source, Stored};
pub use state::KvFeed;

use crate::error::CoreError;
use crate::fleet::InstanceId;
use crate::ids::Slot;
use crate::kv::keys::Keys;
pub use crate::kv::names::Means;
use crate::kv::names::{Cache, Names};
use crate::kv::tier::Tier;
use crate::router::ledger::Report;
use crate::router::{IndexFeed, SharedRouter, Writing};
use event::Refused;
use group::block_in;
use parking_lot::{Mutex, RwLock};
use place::PIECE;
use state::State;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Names get 1/3 of the bytes of an event-fed index: a name takes about 20 bytes, an index entry
/// about 44.
const NAMES_SHARE: usize = 3;

impl KvFeed {
    /// Creates a feed for the router. `index_bytes`: bytes of the index and of the blocks' names
    /// together. `exact`: events feed instances from the start; otherwise the first such instance
    /// reserves memory for names.
    pub fn new(router: SharedRouter, keys: Keys, index_bytes: usize, exact: bool) -> KvFeed {
        let state = State { names: Names::new(0), chain: Vec::new(), epochs: Vec::new() };
        let feed = KvFeed {
            caches: router.caches().clone(),
            router,
            keys: RwLock::new(keys),
            epoch: AtomicU64::new(0),
            index_bytes,
            has_names: AtomicBool::new(false),
            crowded: AtomicBool::new(false),
            copying: Mutex::new(()),
            state: Mutex::new(state),
        };
        if exact {
            feed.ensure_room_for_names();
        }
        feed
    }

    /// Returns the router.
    pub fn router(&self) -> &SharedRouter {
        &self.router
    }

    /// Returns the current key scheme.
    pub fn keys(&self) -> Keys {
        *self.keys.read()
    }

    /// Returns the feed's epoch. It changes whenever the event data of some instance is dropped,
    /// other than by events; see [`KvFeed::epoch_of`].
    pub fn epoch(&self) -> u64 {
        self.epoch.load(Ordering::Acquire)
    }

    /// Returns an instance's epoch. It changes when the instance's event data is dropped; the
    /// engine must then send its blocks again.
    pub fn epoch_of(&self, source: Source) -> u64 {
        self.state.lock().epoch_of(source.instance.slot())
    }

    /// Returns the epochs of many sources' instances ([`KvFeed::epoch_of`]); `None` if the instance
    /// is no longer in the router.
    pub fn epochs_of(&self, sources: &[Source]) -> Vec<Option<u64>> {
        let mut epochs = Vec::with_capacity(sources.len());
        for sources in sources.chunks(PIECE) {
            let (state, caches) = (self.state.lock(), self.caches.read());
            epochs.extend(sources.iter().map(|source| {
                let current = caches.is_current(source.instance);
                current.then(|| state.epoch_of(source.instance.slot()))
            }));
        }
        epochs
    }

    /// Applies a load report that an engine has pushed.
    ///
    /// # Errors
    /// `Broken`, `UnknownName`, or `BadValue` for an impossible number.
    pub fn report_load(&self, instance: &str, report: Report) -> Result<(), CoreError> {
        let mut router = self.router.lock_behind();
        self.router.check()?;
        router.engine_report(instance, report)
    }

    /// Changes the key scheme. Drops blocks cached under another scheme, which are unreachable.
    pub fn set_keys(&self, keys: Keys) {
        if self.keys() == keys {
            return;
        }
        let (_names, _index); // dropped last: decisions and events do not wait for it
        let mut state = self.state.lock();
        *self.keys.write() = keys;
        let mut caches = self.caches.write();
        _names = state.names.empty();
        for slot in 0..caches.slots() {
            state.begin_anew(Slot(slot as u32), &self.epoch);
        }
        _index = caches.empty();
    }

    /// Returns the event source for a rank of an instance.
    ///
    /// # Errors
    /// `UnknownName`.
    pub fn source(&self, instance: &str, rank: u32) -> Result<Source, CoreError> {
        let router = self.router.lock_behind();
        let instance = router.fleet().find(instance)?;
        Ok(Source { instance: router.fleet().id_of(instance), rank })
    }

    /// Returns whether the source's instance is still in the router.
    fn is_current(&self, source: Source) -> bool {
        self.caches.read().is_current(source.instance)
    }

    /// Sets the source of an instance's index entries. A change to events drops approximate
    /// entries. A change from events keeps the entries as approximate ones.
    ///
    /// # Errors
    /// `UnknownName`.
    pub fn set_index_feed(&self, instance: &str, feed: IndexFeed) -> Result<(), CoreError> {
        let mut state = self.state.lock();
        if feed == IndexFeed::Exact {
            self.reserve_names(&mut state);
        }
        let instance = {
            let mut router = self.router.lock_behind();
            let id = router.fleet().find(instance)?;
            if router.index_feed(id) == feed {
                return Ok(());
            }
            router.set_index_feed(id, feed)?;
            router.fleet().id_of(id)
        };
        state.begin_anew(instance.slot(), &self.epoch);
        match feed {
            IndexFeed::Exact => self.clear_index(instance),
            // The names are dropped, so blocks of lower tiers and groups could never be removed.
            IndexFeed::Approximate => {
                Tier::LOWER.iter().for_each(|tier| self.clear_tier(instance, *tier));
                self.clear_groups(instance);
                self.caches.write_behind().groups_mut().forget(instance.slot());
            }
        }
        Ok(())
    }

    /// Sets the number of blocks in an instance's cache, over all ranks; `None`: unknown. The index
    /// holds no more blocks of the instance.
    ///
    /// # Errors
    /// `UnknownName`, or `BadValue` for 0 blocks.
    pub fn set_cache_blocks(&self, instance: &str, blocks: Option<u32>) -> Result<(), CoreError> {
        let id = {
            let mut router = self.router.lock_behind();
            let id = router.fleet().find(instance)?;
            router.set_cache_blocks(id, blocks)?;
            id
        };
        while self.caches.write_behind().gpu_mut().trim(id, PIECE as u32) > 0 {}
        Ok(())
    }

    /// Stores blocks on the GPU.
    pub fn stored(&self, source: Source, stored: &Stored<'_>) -> Applied {
        self.stored_in(source, Tier::Gpu, stored)
    }

    /// Stores blocks in a tier. Blocks of a lower tier take the position of the equally named
    /// blocks of another tier; their tokens count only if a name is unknown.
    pub fn stored_in(&self, source: Source, tier: Tier, stored: &Stored<'_>) -> Applied {
        self.ensure_room_for_names();
        let cache = Cache::new(source.rank, tier);
        let (all, mut applied) = (stored.engine_hashes.len(), Applied::default());
        if tier != Tier::Gpu
            && let Some(applied) = self.tier_refuses(source, tier, all)
        {
            return applied;
        }
        let begin = |state: &mut State| {
            if tier != Tier::Gpu {
                let known =
                    |engine: &u64| state.names.find_in_any(source.instance.slot(), cache, *engine).is_some();
                if stored.token_ids.is_empty() || stored.engine_hashes.iter().all(known) {
                    return Err(self.place_named(state, source, cache, stored.engine_hashes));
                }
            }
            let Some(parent) = stored.parent else { return Ok(None) };
            match state.names.find_in_any(source.instance.slot(), cache, parent) {
                Some(last) if tier == Tier::Gpu || self.knows(source.instance.slot(), tier, last) => {
                    Ok(Some(last))
                }
                _ => Err(Applied { unknown_parent: all, ..Applied::default() }),
            }
        };
        let (mut state, mut chain, mut last) =
            match self.hashed(source, stored, begin, |why| Applied::refused(why, all)) {
                Ok(hashed) => hashed,
                Err(applied) => return applied,
            };
        let state = &mut *state;
        chain.truncate(all);
        for (engines, chain) in stored.engine_hashes.chunks(PIECE).zip(chain.chunks(PIECE)) {
            match self.place(state, source, cache, last, engines, chain, stored.means) {
                Ok(placed) => {
                    applied.done += placed;
                    if placed < chain.len() {
                        break;
                    }
                    last = chain.last().copied();
                }
                Err(why) => {
                    applied.refuse(why, all - applied.done);
                    break;
                }
            }
        }
        state.chain = chain;
        applied.unplaced = all - applied.done - applied.gone - applied.not_exact;
        applied
    }

    /// Removes one physical copy of each block from the GPU.
    pub fn removed(&self, source: Source, engine_hashes: &[u64]) -> Applied {
        self.removed_from(source, Tier::Gpu, engine_hashes)
    }

    /// Removes one physical copy of each block from a tier.
    pub fn removed_from(&self, source: Source, tier: Tier, engine_hashes: &[u64]) -> Applied {
        let mut state = match self.lock_for(source) {
            Ok(state) => state,
            Err(why) => return Applied::refused(why, engine_hashes.len()),
        };
        let state = &mut *state;
        let mut applied = Applied::default();
        let cache = Cache::new(source.rank, tier);
        for engines in engine_hashes.chunks(PIECE) {
            let instance = source.instance.slot();
            state.chain.clear();
            state.chain.extend(engines.iter().filter_map(|e| state.names.remove(instance, cache, *e)));
            let mut caches = match self.take(source) {
                Ok(caches) => caches,
                Err(why) => {
                    applied.refuse(why, engine_hashes.len() - applied.done - applied.unknown_removed);
                    return applied;
                }
            };
            caches.note_removal(tier, instance);
            let index = caches.index_mut(tier);
            // One of several caches may be full before the others.
            let alone = !state.names.has_others(instance, source.rank);
            let known = index.map_or(0, |index| match alone {
                true => index.evicted_all(instance, &state.chain),
                false => index.removed_all(instance, &state.chain),
            });
            applied.done += known;
            applied.unknown_removed += engines.len() - known;
        }
        applied
    }

    /// Removes all blocks of a rank whose cache was cleared or whose engine was replaced. Engines
    /// do not report whether their lower tiers were cleared, too; these count as cleared.
    pub fn cleared(&self, source: Source) {
        let state = &mut *self.state.lock();
        let (instance, rank) = (source.instance.slot(), source.rank);
        if !self.is_current(source) {
            return;
        }
        let caches = state.names.caches(instance, rank);
        if !state.names.has_others(instance, rank) {
            caches.into_iter().for_each(|cache| drop(state.names.take(instance, cache)));
            // If events do not feed the instance, its entries are predictions from sent requests
            // and stay.
            let counts = matches!(self.caches.read().feed(instance), IndexFeed::Exact);
            if counts {
                self.clear_index(source.instance);
            }
            return;
        }
        for cache in caches {
            let Some(hashes) = state.names.take(instance, cache) else { continue };
            let mut hashes = hashes.map(|hash| block_in(cache, hash)).peekable();
            while hashes.peek().is_some() {
                state.chain.clear();
                state.chain.extend(hashes.by_ref().take(PIECE));
                let Ok(mut caches) = self.take(source) else { return };
                let Some(index) = caches.index_of(cache) else { break };
                index.removed_all(instance, &state.chain);
            }
        }
    }

    /// Drops all index entries of an instance and its KV cache groups, over all ranks.
    ///
    /// # Errors
    /// `UnknownName`.
    pub fn forget(&self, instance: &str) -> Result<(), CoreError> {
        let mut state = self.state.lock();
        let instance = self.find(instance)?;
        let id = instance.slot();
        state.begin_anew(id, &self.epoch);
        self.router.lock_behind().forget_loaded(id);
        self.clear_index(instance);
        self.caches.write_behind().groups_mut().forget(id);
        Ok(())
    }

    /// Removes an instance from the router.
    ///
    /// # Errors
    /// `UnknownName`.
    pub fn remove_instance(&self, instance: &str) -> Result<(), CoreError> {
        let mut state = self.state.lock();
        let found = self.find(instance)?;
        state.names.take_all(found.slot());
        self.clear_index(found);
        self.router.lock_behind().remove_instance(instance)
    }

    /// Returns the number of names of all instances and their bytes.
    pub fn names(&self) -> (usize, usize) {
        let state = self.state.lock();
        (state.names.copies(), state.names.bytes())
    }

    /// Takes the caches, if the source's instance is still there and fed by events.
    fn take(&self, source: Source) -> Result<Writing<'_>, Refused> {
        let caches = self.caches.write_behind();
        let broken = self.router.check().is_err();
        if broken || !caches.is_current(source.instance) {
            return Err(Refused::Gone);
        }
        match caches.feed(source.instance.slot()) {
            IndexFeed::Exact => Ok(caches),
            IndexFeed::Approximate => Err(Refused::NotExact),
        }
    }

    fn find(&self, name: &str) -> Result<InstanceId, CoreError> {
        let router = self.router.lock_behind();
        Ok(router.fleet().id_of(router.fleet().find(name)?))
    }

    /// Removes an instance's blocks from all tiers in pieces, while the instance is there.
    fn clear_index(&self, instance: InstanceId) {
        self.caches.write_behind().forget_full(instance.slot());
        Tier::MEDIA.iter().for_each(|(_, tier)| self.clear_tier(instance, *tier));
        self.clear_groups(instance);
    }

    fn clear_tier(&self, instance: InstanceId, tier: Tier) {
        loop {
            let (mut caches, id) = (self.caches.write_behind(), instance.slot());
            if !caches.is_current(instance)
                || caches.index_mut(tier).is_none_or(|index| index.clear_some(id, PIECE as u32) == 0)
            {
                return;
            }
        }
    }

    /// Reserves the names' fraction of the bytes, once, at the latest at the first stored block.
    /// The index becomes smaller if it has more than its own fraction. Also divides the memory of a
    /// crowded index anew.
    fn ensure_room_for_names(&self) {
        if self.crowded.load(Ordering::Relaxed) && self.crowded.swap(false, Ordering::Relaxed) {
            self.even_out();
        }
        if self.has_names.load(Ordering::Relaxed) {
            return;
        }
        // Blocks that are removed meanwhile make the copy wrong; then the next event tries again.
        if self.shrink_index(self.index_bytes - self.index_bytes / NAMES_SHARE) {
            self.reserve_names(&mut self.state.lock());
        }
    }

    /// Reserves the names' fraction of the bytes, if the index leaves it.
    fn reserve_names(&self, state: &mut State) {
        let names = self.index_bytes / NAMES_SHARE;
        if !self.has_names.load(Ordering::Relaxed)
            && self.caches.write_behind().gpu_mut().lower_bound(self.index_bytes - names)
        {
            state.names.set_byte_bound(names);
            self.has_names.store(true, Ordering::Relaxed);
        }
    }
}
