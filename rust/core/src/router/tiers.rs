//! KV indexes of the tiers below the GPU.
use super::router::Router;
use super::settings::TierConfig;
use crate::error::CoreError;
use crate::ids::InstanceId;
use crate::kv::groups::Groups;
use crate::kv::index::KvIndex;
use crate::kv::names::Cache;
use crate::kv::tier::Tier;
use crate::kv::tiers::Tiers;

impl Router {
    /// Returns the KV index of a tier, if there is one.
    pub fn index_of(&self, tier: Tier) -> Option<&KvIndex> {
        if tier == Tier::Gpu { Some(&self.state.index) } else { self.state.tiers.get(tier) }
    }

    /// Returns the KV index of a tier, for changes.
    pub fn index_of_mut(&mut self, tier: Tier) -> Option<&mut KvIndex> {
        if tier == Tier::Gpu { Some(&mut self.state.index) } else { self.state.tiers.get_mut(tier) }
    }

    /// Makes the index of a tier, if there is none. The first lower tier halves the bytes of the
    /// GPUs' index, and each lower tier gets a quarter. Returns false if the GPUs' index has
    /// already grown beyond its half, or if a quarter is below [`KvIndex::MIN_BYTES`].
    pub fn open_tier(&mut self, tier: Tier) -> bool {
        if self.index_of(tier).is_some() {
            return true;
        }
        let state = &mut self.state;
        if state.tiers.share == 0 {
            let bound = state.index.byte_bound();
            if bound / 4 < KvIndex::MIN_BYTES || !state.index.lower_bound(bound / 2) {
                return false;
            }
            state.tiers.share = bound / 4;
        }
        let live = state.ids().filter(|id| state.fleet.is_live(*id));
        state.tiers.open(tier, live);
        true
    }

    /// Makes the index of KV cache groups, if there is none: it takes half the bytes of the GPUs'
    /// index. Returns false if the GPUs' index has already grown beyond its half, or if the half is
    /// below [`KvIndex::MIN_BYTES`].
    pub(super) fn open_groups(&mut self) -> bool {
        let state = &mut self.state;
        if !state.groups.is_empty() {
            return true;
        }
        let half = state.index.byte_bound() / 2;
        if half < KvIndex::MIN_BYTES || !state.index.lower_bound(half) {
            return false;
        }
        let live = state.ids().filter(|id| state.fleet.is_live(*id));
        state.groups.open(half, live);
        true
    }

    /// Returns the KV cache groups of all instances, for changes.
    pub(super) fn groups_mut(&mut self) -> &mut Groups {
        &mut self.state.groups
    }

    /// Returns the KV cache groups of all instances.
    pub fn groups(&self) -> &Groups {
        &self.state.groups
    }

    /// Returns the index that holds the blocks of a cache.
    pub(super) fn index_of_cache(&mut self, cache: Cache) -> Option<&mut KvIndex> {
        match cache.group {
            None => self.index_of_mut(cache.tier),
            Some(_) => self.state.groups.index_mut(),
        }
    }

    /// Drops the indexes of all lower tiers and returns them, because dropping them takes time.
    pub fn drop_tiers(&mut self) -> Tiers {
        self.state.tiers.take()
    }

    /// Notes that a tier of the instance reports removals, so that its blocks are no hints.
    pub fn note_removal(&mut self, tier: Tier, id: InstanceId) {
        self.state.tiers.note_removal(tier, id);
    }

    /// Returns the lower tiers of an instance with blocks, each with the number of its blocks and
    /// whether they are hints: the tier has reported no removal.
    pub fn tiers_of(&self, id: InstanceId) -> impl Iterator<Item = (Tier, u32, bool)> {
        Tier::LOWER.into_iter().filter_map(move |tier| {
            let blocks = self.state.tiers.get(tier)?.blocks(id);
            (blocks > 0).then(|| (tier, blocks, !self.state.tiers.removes(tier, id)))
        })
    }

    /// Returns an instance's loads from a tier: the cost of a loaded token relative to a computed
    /// one, the number of loads behind it, and the tokens loaded.
    pub fn tier_loads_of(&self, id: InstanceId, tier: Tier) -> (f64, u64, u64) {
        let ratio = self.state.tier_load_ratio(id.index(), tier);
        let loads = self.state.ledger.loads(id.index()).of(tier);
        loads.map_or((ratio, 0, 0), |loads| (ratio, loads.cost.observed(), loads.hit_tokens as u64))
    }

    /// Sets how lower tiers count in scores.
    ///
    /// # Errors
    /// `BadValue` for a setting out of its range.
    pub fn set_tiers(&mut self, tiers: TierConfig) -> Result<(), CoreError> {
        self.state.config.tiers = tiers.checked()?;
        Ok(())
    }
}
