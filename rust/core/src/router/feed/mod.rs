//! KV events: applies the engines' block events to the index, in parallel to decisions.
//!
//! A feeder (a subscriber's thread, an embedding program) calls the methods of [`KvFeed`]. The feed
//! hashes blocks and stores their engine names under its own lock. It takes the router only for
//! index changes of a few dozen blocks each, so that decisions wait no longer, even for large
//! events.
mod event;
mod state;

pub use event::{Applied, Source, Stored};

use super::router::Router;
use super::settings::IndexFeed;
use super::shared::{Held, SharedRouter};
use crate::error::CoreError;
use crate::ids::InstanceId;
use crate::kv::index::Copies;
use crate::kv::keys::Keys;
pub use crate::kv::names::Means;
use crate::kv::names::Names;
use event::Refused;
use parking_lot::{Mutex, RwLock};
use state::State;
use std::sync::atomic::{AtomicU64, Ordering};

/// Blocks per lock of the router.
const PIECE: usize = 64;
/// If fewer than this fraction of names belong to evicted blocks, more blocks are evicted.
const SWEPT_SHARE: f64 = 0.0625;
/// Fraction of an instance's blocks to evict then.
const EVICTED_SHARE: u32 = 8;
/// Names get 1/3 of the bytes of an event-fed index: a name takes about 20 bytes, an index entry
/// about 44.
const NAMES_SHARE: usize = 3;

/// Applies KV events to a router's index.
pub struct KvFeed {
    router: SharedRouter,
    keys: RwLock<Keys>,
    epoch: AtomicU64,
    index_bytes: usize,
    state: Mutex<State>,
}

impl KvFeed {
    /// Creates a feed for the router. `index_bytes`: bytes of the index and of the blocks' names
    /// together. `exact`: events feed instances from the start; otherwise the first such instance
    /// reserves memory for names.
    pub fn new(router: SharedRouter, keys: Keys, index_bytes: usize, exact: bool) -> KvFeed {
        let state = State { names: Names::new(0), chain: Vec::new(), epochs: Vec::new() };
        let feed = KvFeed {
            router,
            keys: RwLock::new(keys),
            epoch: AtomicU64::new(0),
            index_bytes,
            state: Mutex::new(state),
        };
        if exact {
            feed.room_for_names(&mut feed.state.lock());
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
        self.state.lock().epochs.get(source.instance.index()).copied().unwrap_or(0)
    }

    /// Changes the key scheme. Drops blocks cached under another scheme, which are unreachable.
    pub fn set_keys(&self, keys: Keys) {
        if self.keys() == keys {
            return;
        }
        let mut state = self.state.lock();
        *self.keys.write() = keys;
        let mut router = self.router.lock_behind();
        for slot in 0..router.fleet().slots() {
            state.begin_anew(InstanceId(slot as u32), &self.epoch);
        }
        let bound = router.index().byte_bound();
        let old = router.renew_index(bound);
        drop(router);
        drop(old);
    }

    /// Returns the event source for a rank of an instance.
    ///
    /// # Errors
    /// `UnknownName`.
    pub fn source(&self, instance: &str, rank: u32) -> Result<Source, CoreError> {
        let router = self.router.lock_behind();
        let instance = router.fleet().find(instance)?;
        Ok(Source { instance, generation: router.fleet().generation(instance), rank })
    }

    /// Returns whether the source's instance is still in the router.
    pub fn is_current(&self, source: Source) -> bool {
        self.router.lock_behind().fleet().is_current(source.instance, source.generation)
    }

    /// Sets the source of an instance's index entries. A change to events drops approximate
    /// entries. A change from events keeps the entries as approximate ones.
    ///
    /// # Errors
    /// `UnknownName`.
    pub fn set_index_feed(&self, instance: &str, feed: IndexFeed) -> Result<(), CoreError> {
        let mut state = self.state.lock();
        if feed == IndexFeed::Exact {
            self.room_for_names(&mut state);
        }
        let id = {
            let mut router = self.router.lock_behind();
            let id = router.fleet().find(instance)?;
            if router.index_feed(id) == feed {
                return Ok(());
            }
            router.set_index_feed(id, feed)?;
            id
        };
        state.begin_anew(id, &self.epoch);
        if feed == IndexFeed::Exact {
            self.clear_index(id, None);
        }
        Ok(())
    }

    /// Sets the number of blocks in an instance's cache, over all ranks; `None`: unknown. The index
    /// holds no more blocks of the instance.
    ///
    /// # Errors
    /// `UnknownName`.
    pub fn set_cache_blocks(&self, instance: &str, blocks: Option<u32>) -> Result<(), CoreError> {
        let id = {
            let mut router = self.router.lock_behind();
            let id = router.fleet().find(instance)?;
            router.set_cache_blocks(id, blocks)?;
            id
        };
        while self.router.lock_behind().index_mut().trim(id, PIECE as u32) > 0 {}
        Ok(())
    }

    /// Stores blocks.
    pub fn stored(&self, source: Source, stored: &Stored<'_>) -> Applied {
        let state = &mut *self.state.lock();
        let (all, mut applied) = (stored.engine_hashes.len(), Applied::default());
        let mut last = None;
        if let Some(parent) = stored.parent {
            last = state.names.find(source.instance, source.rank, parent);
            if last.is_none() {
                return Applied { unknown_parent: all, ..applied };
            }
        }
        let mut chain = std::mem::take(&mut state.chain);
        chain.clear();
        stored.hash(self.keys().block_size, last, &mut chain);
        chain.truncate(all);
        for (engines, chain) in stored.engine_hashes.chunks(PIECE).zip(chain.chunks(PIECE)) {
            match self.place(state, source, last, engines, chain, stored.means) {
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

    /// Places up to [`PIECE`] blocks; returns the number of placed blocks.
    fn place(
        &self,
        state: &mut State,
        source: Source,
        parent: Option<u64>,
        engines: &[u64],
        chain: &[u64],
        means: Means,
    ) -> Result<usize, Refused> {
        let Source { instance, rank, .. } = source;
        // Names first: a block without a name could never be removed. New names need no index
        // access.
        let mut named = 0;
        while named < chain.len()
            && state.names.find(instance, rank, engines[named]).is_none()
            && state.names.insert(instance, rank, engines[named], chain[named])
        {
            named += 1;
        }
        let stored = self.take(source).map(|mut router| {
            let placed = router.index_mut().store(instance, parent, &chain[..named], Copies::Add);
            trim(&mut router, instance);
            placed
        });
        let mut placed = *stored.as_ref().unwrap_or(&0);
        for engine in &engines[placed..named] {
            state.names.remove(instance, rank, *engine);
        }
        let stuck = stored? < named;
        // The remaining blocks already have a name, or there is no room: place them one by one.
        while placed < chain.len() && !stuck {
            let (engine, hash) = (engines[placed], chain[placed]);
            let before = placed.checked_sub(1).map_or(parent, |at| Some(chain[at]));
            let mut entered = self.enter(state, source, before, engine, hash, means)?;
            if !entered && self.make_room(state, source, engine) {
                entered = self.enter(state, source, before, engine, hash, means)?;
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
        before: Option<u64>,
        engine: u64,
        hash: u64,
        means: Means,
    ) -> Result<bool, Refused> {
        let Source { instance, rank, .. } = source;
        let mut router = self.take(source)?;
        let index = router.index_mut();
        let Some(copies) = state.names.enter_known(index, instance, rank, engine, hash, means) else {
            return Ok(false);
        };
        let placed = index.store(instance, before, &[hash], copies) == 1;
        if !placed {
            state.names.remove(instance, rank, engine);
        }
        trim(&mut router, instance);
        Ok(placed)
    }

    /// Removes one physical copy of each block.
    pub fn removed(&self, source: Source, engine_hashes: &[u64]) -> Applied {
        let state = &mut *self.state.lock();
        let mut applied = Applied::default();
        for engines in engine_hashes.chunks(PIECE) {
            let Source { instance, rank, .. } = source;
            state.chain.clear();
            state.chain.extend(engines.iter().filter_map(|e| state.names.remove(instance, rank, *e)));
            let mut router = match self.take(source) {
                Ok(router) => router,
                Err(why) => {
                    applied.refuse(why, engine_hashes.len() - applied.done - applied.unknown_removed);
                    return applied;
                }
            };
            let known = router.index_mut().removed_all(instance, &state.chain);
            applied.done += known;
            applied.unknown_removed += engines.len() - known;
        }
        applied
    }

    /// Removes all blocks of a rank whose cache was cleared or whose engine was replaced.
    pub fn cleared(&self, source: Source) {
        let state = &mut *self.state.lock();
        let Source { instance, rank, .. } = source;
        if !self.is_current(source) {
            return;
        }
        if !state.names.has_others(instance, rank) {
            drop(state.names.take(instance, rank));
            // If events do not feed the instance, its entries are predictions from sent requests
            // and stay.
            let counts = matches!(self.router.lock_behind().index_feed(instance), IndexFeed::Exact);
            if counts {
                self.clear_index(instance, Some(source.generation));
            }
            return;
        }
        let Some(hashes) = state.names.take(instance, rank) else { return };
        let mut hashes = hashes.peekable();
        while hashes.peek().is_some() {
            state.chain.clear();
            state.chain.extend(hashes.by_ref().take(PIECE));
            let Ok(mut router) = self.take(source) else { return };
            router.index_mut().removed_all(instance, &state.chain);
        }
    }

    /// Drops all index entries of an instance, over all ranks.
    ///
    /// # Errors
    /// `UnknownName`.
    pub fn forget(&self, instance: &str) -> Result<(), CoreError> {
        let mut state = self.state.lock();
        let id = self.router.lock_behind().fleet().find(instance)?;
        state.begin_anew(id, &self.epoch);
        self.clear_index(id, None);
        Ok(())
    }

    /// Removes an instance from the router.
    ///
    /// # Errors
    /// `UnknownName`.
    pub fn remove_instance(&self, instance: &str) -> Result<(), CoreError> {
        let mut state = self.state.lock();
        let id = self.router.lock_behind().fleet().find(instance)?;
        state.names.take_all(id);
        self.clear_index(id, None);
        self.router.lock_behind().remove_instance(instance)
    }

    /// Returns the number of names of all instances and their bytes.
    pub fn names(&self) -> (usize, usize) {
        let state = self.state.lock();
        (state.names.len(), state.names.bytes())
    }

    /// Locks the router, if the source's instance is still there and fed by events.
    fn take(&self, source: Source) -> Result<Held<'_>, Refused> {
        let router = self.router.lock_behind();
        let broken = self.router.check().is_err();
        if broken || !router.fleet().is_current(source.instance, source.generation) {
            return Err(Refused::Gone);
        }
        match router.index_feed(source.instance) {
            IndexFeed::Exact => Ok(router),
            IndexFeed::Approximate => Err(Refused::NotExact),
        }
    }

    /// Removes an instance's blocks in pieces, while the instance has this generation.
    fn clear_index(&self, instance: InstanceId, generation: Option<u32>) {
        loop {
            let mut router = self.router.lock_behind();
            if generation.is_some_and(|g| !router.fleet().is_current(instance, g))
                || router.index_mut().clear_some(instance, PIECE as u32) == 0
            {
                return;
            }
        }
    }

    /// Drops names of evicted blocks. If this frees too little, also evicts the instance's least
    /// recently used blocks. Returns whether names were dropped.
    fn make_room(&self, state: &mut State, source: Source, engine: u64) -> bool {
        let names = state.names.near(source.instance, source.rank, engine);
        let mut gone = self.sweep(state, source, engine);
        if (gone as f64) < SWEPT_SHARE * names as f64 {
            let mut left = self.router.lock_behind().index().blocks(source.instance) / EVICTED_SHARE + 1;
            while left > 0 {
                let most = left.min(PIECE as u32);
                let evicted = self.router.lock_behind().index_mut().evict_from(source.instance, most);
                left = if evicted == 0 { 0 } else { left - most };
            }
            gone += self.sweep(state, source, engine);
        }
        gone > 0
    }

    fn sweep(&self, state: &mut State, source: Source, engine: u64) -> usize {
        let (mut gone, mut at) = (0, Some(0));
        while let Some(from) = at {
            let router = self.router.lock_behind();
            let of = (source.instance, source.rank);
            let (went, next) = state.names.sweep(router.index(), of, engine, from, PIECE);
            (gone, at) = (gone + went, next);
        }
        gone
    }

    /// Reserves the names' fraction of the bytes, once.
    fn room_for_names(&self, state: &mut State) {
        if state.names.byte_bound() > 0 {
            return;
        }
        let names = self.index_bytes / NAMES_SHARE;
        state.names.set_byte_bound(names);
        let mut router = self.router.lock_behind();
        let index = self.index_bytes - names;
        let old = (!router.index_mut().lower_bound(index)).then(|| router.renew_index(index));
        drop(router);
        drop(old);
    }
}

/// Limits the blocks of an engine that reports more than its cache holds.
fn trim(router: &mut Router, instance: InstanceId) {
    router.index_mut().trim(instance, 2 * PIECE as u32);
}
