//! Blocks of KV cache groups apart from full attention: windows and states.
use super::event::{Applied, Refused, Source, Stored};
use super::place::{PER_LOCK, PIECE};
use super::state::{KvFeed, State};
use crate::fleet::InstanceId;
use crate::kv::groups::{Group, GroupTier};
use crate::kv::index::Copies;
use crate::kv::names::Cache;
use crate::kv::tier::Tier;
use crate::router::Caches;
use parking_lot::MutexGuard;

/// Returns the name of a cache's block in the index that holds it.
pub(super) fn block_in(cache: Cache, hash: u64) -> u64 {
    match cache.group {
        None => hash,
        Some(group) => GroupTier { tier: cache.tier, group }.key(hash),
    }
}

impl KvFeed {
    /// Stores blocks of a KV cache group apart from full attention. A block takes the position of
    /// the equally named block of another cache of the rank, else of its tokens, if the event has
    /// all of them. `full`: the engine also has full attention. Appends blocks without a position
    /// to `unplaced`; other events of the batch may name them.
    pub fn stored_in_group(
        &self,
        source: Source,
        (tier, group): (Tier, Group),
        stored: &Stored<'_>,
        full: bool,
        unplaced: &mut Vec<u64>,
    ) -> Applied {
        self.ensure_room_for_names();
        let blocks = stored.engine_hashes.len();
        if let Some(refused) = self.refuses(source, blocks, Caches::open_groups) {
            return refused;
        }
        match self
            .take(source)
            .map(|mut caches| caches.groups_mut().note(source.instance.slot(), group, full))
        {
            Ok(true) => {}
            Ok(false) => return Applied { unplaced: blocks, ..Applied::default() },
            Err(why) => return Applied::refused(why, blocks),
        }
        let cache = Cache { rank: source.rank, tier, group: Some(group.id) };
        let (mut state, chain) = self.positions(source, group, stored);
        let epoch = state.epoch_of(source.instance.slot());
        let mut applied = Applied::default();
        for (at, engine) in stored.engine_hashes.iter().enumerate() {
            if at > 0 && at.is_multiple_of(PER_LOCK) && !self.give_way(&mut state, source, epoch) {
                *self.lost(source, &mut applied.unknown_name, &mut applied.gone) += blocks - at;
                return applied;
            }
            let known = state.names.find_on_rank(source.instance.slot(), source.rank, *engine);
            let Some(hash) = known.or_else(|| chain.get(at).copied()) else {
                unplaced.push(*engine);
                continue;
            };
            match self.enter_group(&mut state, source, cache, *engine, hash) {
                Ok(true) => applied.done += 1,
                Ok(false) => applied.unplaced += 1,
                Err(why) => {
                    applied.refuse(why, blocks - at);
                    break;
                }
            }
        }
        state.chain = chain;
        applied
    }

    /// Stores blocks of a group by their names in other caches of the rank.
    pub fn named_in_group(&self, source: Source, tier: Tier, group: u32, engine_hashes: &[u64]) -> Applied {
        let mut state = match self.lock_for(source) {
            Ok(state) => state,
            Err(why) => return Applied::refused(why, engine_hashes.len()),
        };
        let epoch = state.epoch_of(source.instance.slot());
        let cache = Cache { rank: source.rank, tier, group: Some(group) };
        let mut applied = Applied::default();
        for (at, engine) in engine_hashes.iter().enumerate() {
            if at > 0 && at.is_multiple_of(PER_LOCK) && !self.give_way(&mut state, source, epoch) {
                let left = engine_hashes.len() - at;
                *self.lost(source, &mut applied.unknown_name, &mut applied.gone) += left;
                break;
            }
            let Some(hash) = state.names.find_on_rank(source.instance.slot(), source.rank, *engine) else {
                applied.unknown_name += 1;
                continue;
            };
            match self.enter_group(&mut state, source, cache, *engine, hash) {
                Ok(true) => applied.done += 1,
                Ok(false) => applied.unplaced += 1,
                Err(why) => {
                    applied.refuse(why, engine_hashes.len() - at);
                    break;
                }
            }
        }
        applied
    }

    /// Removes one physical copy of each block from a group.
    pub fn removed_from_group(
        &self,
        source: Source,
        tier: Tier,
        group: u32,
        engine_hashes: &[u64],
    ) -> Applied {
        let mut state = match self.lock_for(source) {
            Ok(state) => state,
            Err(why) => return Applied::refused(why, engine_hashes.len()),
        };
        let epoch = state.epoch_of(source.instance.slot());
        let cache = Cache { rank: source.rank, tier, group: Some(group) };
        let mut applied = Applied::default();
        for (at, engines) in engine_hashes.chunks(PIECE).enumerate() {
            let at = at * PIECE;
            if at > 0 && at.is_multiple_of(PER_LOCK) && !self.give_way(&mut state, source, epoch) {
                let left = engine_hashes.len() - at;
                *self.lost(source, &mut applied.unknown_removed, &mut applied.gone) += left;
                break;
            }
            let state = &mut *state;
            state.chain.clear();
            let removed =
                engines.iter().filter_map(|e| state.names.remove(source.instance.slot(), cache, *e));
            state.chain.extend(removed.map(|hash| block_in(cache, hash)));
            match self.take(source) {
                Ok(mut caches) => {
                    let index = caches.groups_mut().index_mut();
                    let known =
                        index.map_or(0, |index| index.removed_all(source.instance.slot(), &state.chain));
                    applied.done += known;
                    applied.unknown_removed += engines.len() - known;
                }
                Err(why) => {
                    applied.refuse(why, engine_hashes.len() - applied.done - applied.unknown_removed);
                    break;
                }
            }
        }
        applied
    }

    /// Notes that the engine has full attention beside its other groups.
    pub fn note_full_attention(&self, source: Source) {
        if let Ok(mut caches) = self.take(source) {
            caches.groups_mut().note_full(source.instance.slot());
        }
    }

    /// Forgets the groups of the source's instance, so that only full attention counts until the
    /// next event of a group. For an engine that may have restarted: the groups of another rank
    /// come again with its next event.
    pub fn forget_groups(&self, source: Source) {
        if let Ok(mut caches) = self.take(source) {
            caches.groups_mut().forget(source.instance.slot());
        }
    }

    /// Returns the feed's lock, and the positions of the blocks if the event has all their tokens.
    /// Events of sparse groups leave out blocks, so their tokens cannot be assigned.
    fn positions(
        &self,
        source: Source,
        group: Group,
        stored: &Stored<'_>,
    ) -> (MutexGuard<'_, State>, Vec<u64>) {
        let every = group.every as usize;
        let narrowed = every > 1 && stored.narrowing.iter().any(|part| *part != 0);
        let begin = |state: &mut State| {
            let tokens = stored.engine_hashes.len() * self.keys().block_size * every;
            if narrowed || tokens == 0 || stored.token_ids.len() != tokens {
                return Err(());
            }
            let before = |engine| state.names.find_on_rank(source.instance.slot(), source.rank, engine);
            stored.parent.map(|parent| before(parent).ok_or(())).transpose()
        };
        match self.hashed(source, stored, begin, |_| ()) {
            Ok((state, mut chain, _)) => {
                let mut at = 0;
                chain.retain(|_| {
                    at += 1;
                    at % every == 0
                });
                (state, chain)
            }
            Err(()) => (self.state.lock(), Vec::new()),
        }
    }

    /// Adds a copy of a block to a group; returns false if there is no room.
    fn enter_group(
        &self,
        state: &mut State,
        source: Source,
        cache: Cache,
        engine: u64,
        hash: u64,
    ) -> Result<bool, Refused> {
        let instance = source.instance.slot();
        let mut caches = self.take(source)?;
        let Some(index) = caches.groups_mut().index_mut() else { return Ok(false) };
        let key = block_in(cache, hash);
        let known = state.names.find(instance, cache, engine);
        if known.is_some_and(|known| known != hash || !index.holds(instance, key)) {
            while let Some(old) = state.names.remove(instance, cache, engine) {
                index.removed(instance, block_in(cache, old));
            }
        }
        if !state.names.insert(instance, cache, engine, hash) {
            return Ok(false);
        }
        let placed = index.store(instance, None, &[key], Copies::Add) == 1;
        if !placed {
            state.names.remove(instance, cache, engine);
        }
        Ok(placed)
    }

    /// Removes an instance's blocks from all groups in pieces, while the instance is there.
    pub(super) fn clear_groups(&self, instance: InstanceId) {
        loop {
            let mut caches = self.caches.write_behind();
            if !caches.is_current(instance)
                || caches
                    .groups_mut()
                    .index_mut()
                    .is_none_or(|index| index.clear_some(instance.slot(), PIECE as u32) == 0)
            {
                return;
            }
        }
    }
}
