//! The KV indexes of all tiers, the KV cache groups, and the instance of each slot.
use crate::fleet::{InstanceId, Member};
use crate::ids::{Seconds, Slot};
use crate::kv::expected::Expected;
use crate::kv::groups::Groups;
use crate::kv::index::KvIndex;
use crate::kv::names::Cache;
use crate::kv::predictions::Predictions;
use crate::kv::tier::Tier;
use crate::kv::tiers::{Prompt, TierUse, Tiers};
use crate::program::capacity::FullCache;
use crate::request::Request;
use crate::router::settings::{IndexFeed, RouterConfig};

/// The instance of a slot, as far as its cache is concerned.
#[derive(Clone, Copy, Debug, Default)]
struct Owner {
    /// The instance; none: the slot is free.
    instance: InstanceId,
    /// Source of its index entries.
    feed: IndexFeed,
    /// Blocks in its KV cache when its engine removes blocks.
    full: FullCache,
}

/// The engines' caches.
pub struct Caches {
    /// KV index of the GPUs' caches.
    gpu: KvIndex,
    /// KV indexes of the tiers below the GPU.
    tiers: Tiers,
    /// KV cache groups apart from full attention.
    groups: Groups,
    /// Bytes of the groups' index, taken from the GPUs' index once; 0: not taken yet.
    groups_share: usize,
    /// By slot.
    owners: Vec<Owner>,
    /// Lower tiers that count in matches.
    counted: TierUse,
    /// Whether engines keep partial last blocks.
    partial_blocks: bool,
    /// Predictions that are being entered.
    predictions: Predictions,
    /// Blocks of prompts that events will report.
    expected: Expected,
}

/// Lengths of a prompt's prefixes on each instance. Its buffers can be used again.
#[derive(Debug, Default)]
pub struct PrefixMatch {
    /// The caches' version of a match before the decision ([`Reading::match_ahead`]); `None`: there
    /// is no such match.
    ///
    /// [`Reading::match_ahead`]: super::Reading::match_ahead
    pub(in crate::router) version: Option<u64>,
    /// Blocks of the prompt's chain that each slot holds on the GPU.
    pub(in crate::router) hit_blocks: Vec<u32>,
    /// Blocks behind them that each slot can load from a lower tier; empty if no slot can.
    pub(in crate::router) tier_blocks: Vec<u32>,
    /// The tier of these blocks, by slot.
    pub(in crate::router) tiers: Vec<Tier>,
    /// Buffer for the blocks of one tier.
    scratch: Vec<u32>,
}

impl PrefixMatch {
    /// Returns the blocks that a slot holds on the GPU, and those that it can load behind them.
    #[inline]
    pub(in crate::router) fn blocks_on(&self, slot: usize) -> (u32, u32) {
        (self.hit_blocks[slot], self.tier_blocks.get(slot).copied().unwrap_or(0))
    }

    /// Returns the tier of the blocks that a slot can load.
    pub(in crate::router) fn tier_of(&self, slot: usize) -> Tier {
        self.tiers.get(slot).copied().unwrap_or_default()
    }

    /// Forgets the prefixes: no slot holds any.
    pub(in crate::router) fn clear(&mut self) {
        self.hit_blocks.fill(0);
        self.tier_blocks.clear();
        self.tiers.clear();
    }

    /// Takes the prefixes of another match.
    pub(in crate::router) fn copy_from(&mut self, other: &PrefixMatch) {
        self.hit_blocks.clone_from(&other.hit_blocks);
        self.tier_blocks.clone_from(&other.tier_blocks);
        self.tiers.clone_from(&other.tiers);
    }
}

impl Caches {
    /// Creates the caches of a router without instances.
    pub(super) fn new(config: &RouterConfig) -> Caches {
        Caches {
            gpu: KvIndex::new(config.index_bytes),
            tiers: Tiers::default(),
            groups: Groups::default(),
            groups_share: 0,
            owners: Vec::new(),
            counted: config.tiers.counted,
            partial_blocks: config.partial_blocks,
            predictions: Predictions::default(),
            expected: Expected::default(),
        }
    }

    /// Makes room for an instance that was added, or removes all data of a removed instance.
    /// `instance`: this instance; `feed`: the source of a new instance's index entries.
    pub(super) fn member(&mut self, member: Member, instance: InstanceId, feed: IndexFeed) {
        match member {
            Member::Added { id, cache_blocks } => {
                if self.owners.len() <= id.index() {
                    self.owners.resize(id.index() + 1, Owner::default());
                }
                let full = FullCache::default();
                self.owners[id.index()] = Owner { instance, feed, full };
                self.gpu.add_instance(id, cache_blocks);
                self.tiers.add_instance(id);
                self.groups.add_instance(id);
            }
            Member::Removed(id) => {
                self.owners[id.index()].instance = InstanceId::NONE;
                self.gpu.remove_instance(id);
                self.tiers.remove_instance(id);
                self.groups.remove_instance(id);
                self.expected.remove_instance(id);
            }
        }
    }

    /// Enters some predictions, after those taken before. `take` exchanges an empty queue for the
    /// queued ones.
    pub(super) fn enter_some(&mut self, take: impl FnOnce(&mut Predictions)) {
        if self.is_whole() {
            take(&mut self.predictions);
        }
        self.predictions.enter_some(&mut self.gpu, &mut self.tiers, &mut self.expected);
    }

    /// Returns whether all predictions taken are entered.
    pub(super) fn is_whole(&self) -> bool {
        self.predictions.is_empty()
    }

    /// Returns the number of slots, including free ones.
    pub(crate) fn slots(&self) -> usize {
        self.owners.len()
    }

    /// Returns whether an instance is still there.
    pub fn is_current(&self, instance: InstanceId) -> bool {
        let owner = self.owners.get(instance.slot().index());
        instance != InstanceId::NONE && owner.is_some_and(|owner| owner.instance == instance)
    }

    /// Returns the source of an instance's index entries.
    pub(crate) fn feed(&self, id: Slot) -> IndexFeed {
        self.owners.get(id.index()).map_or(IndexFeed::default(), |owner| owner.feed)
    }

    /// Sets the source of an instance's index entries; existing entries stay.
    pub(in crate::router) fn set_feed(&mut self, id: Slot, feed: IndexFeed) {
        if let Some(owner) = self.owners.get_mut(id.index()) {
            owner.feed = feed;
        }
    }

    /// Returns the slots with an instance.
    fn live(&self) -> Vec<Slot> {
        let live = self.owners.iter().filter(|owner| owner.instance != InstanceId::NONE);
        live.map(|owner| owner.instance.slot()).collect()
    }

    /// Finds the length of the prompt's prefix on each instance, on the GPU and in lower tiers.
    #[inline]
    pub(in crate::router) fn match_prefix(&self, request: &Request<'_>, found: &mut PrefixMatch) {
        let PrefixMatch { hit_blocks, tier_blocks, tiers, scratch, .. } = found;
        let chain = request.chain;
        hit_blocks.resize(self.owners.len(), 0);
        self.gpu.match_prefix(chain, hit_blocks);
        let most = match self.groups.is_empty() {
            true => u32::MAX,
            false => request.max_hit_blocks(self.partial_blocks),
        };
        self.groups.shorten(chain, most, hit_blocks);
        let prompt = Prompt { chain, max_blocks: most };
        let lower = (tier_blocks, tiers);
        self.tiers.add_hits(prompt, self.counted, &self.groups, hit_blocks, scratch, lower);
    }

    /// Returns the KV index of the GPUs' caches.
    #[inline]
    pub fn gpu(&self) -> &KvIndex {
        &self.gpu
    }

    /// Returns the KV index of the GPUs' caches, for changes.
    #[inline]
    pub fn gpu_mut(&mut self) -> &mut KvIndex {
        &mut self.gpu
    }

    /// Returns the KV index of a tier, if there is one.
    pub fn index(&self, tier: Tier) -> Option<&KvIndex> {
        if tier == Tier::Gpu { Some(&self.gpu) } else { self.tiers.get(tier) }
    }

    /// Returns the KV index of a tier, for changes.
    pub fn index_mut(&mut self, tier: Tier) -> Option<&mut KvIndex> {
        if tier == Tier::Gpu { Some(&mut self.gpu) } else { self.tiers.get_mut(tier) }
    }

    /// Returns the index that holds the blocks of a cache.
    pub(crate) fn index_of(&mut self, cache: Cache) -> Option<&mut KvIndex> {
        match cache.group {
            None => self.index_mut(cache.tier),
            Some(_) => self.groups.index_mut(),
        }
    }

    /// Returns the KV cache groups of all instances.
    pub fn groups(&self) -> &Groups {
        &self.groups
    }

    /// Returns the KV cache groups of all instances, for changes.
    pub(crate) fn groups_mut(&mut self) -> &mut Groups {
        &mut self.groups
    }

    /// Makes the index of a tier, if there is none. The first lower tier halves the bytes of the
    /// GPUs' index, and each lower tier gets a quarter. Returns false if the GPUs' index has
    /// already grown beyond its half, or if a quarter is below [`KvIndex::MIN_BYTES`].
    pub fn open_tier(&mut self, tier: Tier) -> bool {
        if self.index(tier).is_some() {
            return true;
        }
        if self.tiers.share == 0 {
            let bound = self.gpu.byte_bound();
            if bound / 4 < KvIndex::MIN_BYTES || !self.gpu.lower_bound(bound / 2) {
                return false;
            }
            self.tiers.share = bound / 4;
        }
        let live = self.live();
        self.tiers.open(tier, live.into_iter());
        true
    }

    /// Makes the index of KV cache groups, if there is none. The first one takes half the bytes of
    /// the GPUs' index; later ones, after [`Caches::empty`], get the same bytes. Returns false if
    /// the GPUs' index has already grown beyond its half, or if the half is below
    /// [`KvIndex::MIN_BYTES`].
    pub(crate) fn open_groups(&mut self) -> bool {
        if !self.groups.is_empty() {
            return true;
        }
        if self.groups_share == 0 {
            let half = self.gpu.byte_bound() / 2;
            if half < KvIndex::MIN_BYTES || !self.gpu.lower_bound(half) {
                return false;
            }
            self.groups_share = half;
        }
        let live = self.live();
        self.groups.open(self.groups_share, live.into_iter());
        true
    }

    /// Empties the GPUs' index and drops those of lower tiers and groups. Returns the old ones,
    /// because dropping them takes time.
    pub(crate) fn empty(&mut self) -> impl Sized + use<> {
        let gpu = self.gpu.emptied();
        (std::mem::replace(&mut self.gpu, gpu), self.tiers.take(), self.groups.take())
    }

    /// Notes that a tier of the instance reports removals, so that its blocks are no hints.
    pub fn note_removal(&mut self, tier: Tier, id: Slot) {
        self.tiers.note_removal(tier, id);
    }

    /// Returns whether a lower tier of the instance has reported a removal.
    pub(in crate::router) fn removes(&self, tier: Tier, id: Slot) -> bool {
        self.tiers.removes(tier, id)
    }

    /// Returns the lower tiers of an instance with blocks, each with the number of its blocks and
    /// whether they are hints: the tier has reported no removal.
    pub fn tiers_of(&self, id: Slot) -> impl Iterator<Item = (Tier, u32, bool)> {
        Tier::LOWER.into_iter().filter_map(move |tier| {
            let blocks = self.tiers.get(tier)?.blocks(id);
            (blocks > 0).then(|| (tier, blocks, !self.tiers.removes(tier, id)))
        })
    }

    /// Returns the blocks in an instance's KV cache as its engine's removals show them.
    pub(in crate::router) fn full(&self, id: Slot) -> FullCache {
        self.owners.get(id.index()).map_or(FullCache::default(), |owner| owner.full)
    }

    /// Notes the most blocks present at a removal since the last call.
    pub(in crate::router) fn note_full(&mut self, id: Slot, now: Seconds) {
        let seen = self.gpu.take_full(id);
        if let Some(owner) = self.owners.get_mut(id.index()) {
            owner.full.note(seen, now);
        }
    }

    /// Forgets the measured size of an instance's cache: its engine may be another one.
    pub(crate) fn forget_full(&mut self, id: Slot) {
        self.gpu.take_full(id);
        if let Some(owner) = self.owners.get_mut(id.index()) {
            owner.full = FullCache::default();
        }
    }
}
