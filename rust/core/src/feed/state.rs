//! The feed and the data received by events.
use super::event::{Refused, Source, Stored};
use crate::ids::Slot;
use crate::kv::keys::Keys;
use crate::kv::names::Names;
use crate::router::{SharedCaches, SharedRouter};
use parking_lot::{Mutex, MutexGuard, RwLock};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Applies KV events to a router's index.
pub struct KvFeed {
    pub(super) router: SharedRouter,
    pub(super) caches: SharedCaches,
    pub(super) keys: RwLock<Keys>,
    pub(super) epoch: AtomicU64,
    pub(super) index_bytes: usize,
    /// Whether the names have their fraction of the bytes.
    pub(super) has_names: AtomicBool,
    /// Whether an event met a crowded index; the next one divides its memory anew.
    pub(super) crowded: AtomicBool,
    /// Held while parts of the index are copied.
    pub(super) copying: Mutex<()>,
    pub(super) state: Mutex<State>,
}

/// Data received by events about the engines' blocks.
pub(super) struct State {
    pub names: Names,
    pub chain: Vec<u64>,
    /// Epoch of each slot.
    pub epochs: Vec<u64>,
}

impl State {
    /// Returns the epoch of a slot.
    pub fn epoch_of(&self, instance: Slot) -> u64 {
        self.epochs.get(instance.index()).copied().unwrap_or(0)
    }

    /// Drops an instance's event data; the engine must send its blocks again.
    pub fn begin_anew(&mut self, instance: Slot, epoch: &AtomicU64) {
        self.names.take_all(instance);
        if self.epochs.len() <= instance.index() {
            self.epochs.resize(instance.index() + 1, 0);
        }
        self.epochs[instance.index()] = epoch.fetch_add(1, Ordering::AcqRel) + 1;
    }
}

/// The feed's lock, the hashes of stored blocks, and that of the block before them.
pub(super) type Hashed<'a> = (MutexGuard<'a, State>, Vec<u64>, Option<u64>);

impl KvFeed {
    /// Takes the feed's lock for an event of a source. Refuses events of an instance that is gone:
    /// the next instance in its slot may have blocks of the same names.
    pub(super) fn lock_for(&self, source: Source) -> Result<MutexGuard<'_, State>, Refused> {
        let state = self.state.lock();
        if self.is_current(source) { Ok(state) } else { Err(Refused::Gone) }
    }

    /// Lets other users of the feed go first, if any wait. Returns whether the instance is still in
    /// the router with the event data of this epoch.
    pub(super) fn give_way(&self, state: &mut MutexGuard<'_, State>, source: Source, epoch: u64) -> bool {
        MutexGuard::bump(state);
        self.is_current(source) && state.epoch_of(source.instance.slot()) == epoch
    }

    /// Returns the number of a result that counts the other blocks of an event, after
    /// [`KvFeed::give_way`] has returned false: their names are unknown by now, or the instance is
    /// gone.
    pub(super) fn lost<'a>(
        &self,
        source: Source,
        unknown: &'a mut usize,
        gone: &'a mut usize,
    ) -> &'a mut usize {
        if self.is_current(source) { unknown } else { gone }
    }

    /// Hashes stored blocks without the feed's lock. Returns the lock, the hashes, and that of the
    /// block before them, which `begin` finds. Begins again if the instance's data is dropped
    /// meanwhile. `gone`: the error if the instance is no longer in the router.
    pub(super) fn hashed<E>(
        &self,
        source: Source,
        stored: &Stored<'_>,
        begin: impl Fn(&mut State) -> Result<Option<u64>, E>,
        gone: impl Fn(Refused) -> E,
    ) -> Result<Hashed<'_>, E> {
        loop {
            let (last, epoch, mut chain) = {
                let state = &mut *self.lock_for(source).map_err(&gone)?;
                (begin(state)?, state.epoch_of(source.instance.slot()), std::mem::take(&mut state.chain))
            };
            chain.clear();
            stored.hash(self.keys().block_size, last, &mut chain);
            let state = self.lock_for(source).map_err(&gone)?;
            if state.epoch_of(source.instance.slot()) == epoch {
                return Ok((state, chain, last));
            }
        }
    }
}
