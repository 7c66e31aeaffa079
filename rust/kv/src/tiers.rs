//! Storage tiers of the engines' KV caches, and the KV indexes of the tiers below the GPU.
//!
//! Each lower tier has an index of its own, made when the first event of that tier arrives. A
//! router without such events has no lower index and pays nothing for them. The prefix that an
//! instance can reuse is the run of the GPU, continued by the run of one lower tier behind it.
//! Engines may continue again in a third tier; the router does not count that, so it claims too
//! little.
use crate::Slot;
use crate::groups::Groups;
use crate::index::KvIndex;
use crate::tier::Tier;

/// Lower tiers whose blocks count in scores.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TierUse {
    /// None: only the GPU counts.
    Off,
    /// The CPU, and every other tier from the instance's first removal there. A tier without
    /// removals is a hint: its blocks may be gone.
    #[default]
    Auto,
    /// All lower tiers, hints included.
    All,
}

impl TierUse {
    /// All values, with their names.
    pub const NAMES: [(&'static str, TierUse); 3] =
        [("off", TierUse::Off), ("auto", TierUse::Auto), ("all", TierUse::All)];
}

/// A prompt to find in the tiers.
#[derive(Clone, Copy, Debug)]
pub struct Prompt<'a> {
    /// Chained hashes of its blocks.
    pub chain: &'a [u64],
    /// Blocks that a hit may have at most.
    pub max_blocks: u32,
}

/// The index of a lower tier.
#[derive(Debug)]
struct Lower {
    index: KvIndex,
    /// Whether the tier has reported a removal, by slot.
    removes: Vec<bool>,
}

/// KV indexes of the tiers below the GPU, as far as there are events of them.
#[derive(Debug, Default)]
pub struct Tiers {
    /// Byte bound of each lower index; 0 until the first index is made.
    pub share: usize,
    lower: [Option<Box<Lower>>; Tier::LOWER.len()],
}

/// Position of a lower tier.
fn place(tier: Tier) -> Option<usize> {
    (tier as usize).checked_sub(1)
}

impl Tiers {
    /// Returns whether there is no lower tier.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.lower.iter().all(Option::is_none)
    }

    /// Returns the index of a lower tier, if there are events of it.
    pub fn get(&self, tier: Tier) -> Option<&KvIndex> {
        Some(&self.lower[place(tier)?].as_ref()?.index)
    }

    /// Returns the index of a lower tier, for changes.
    pub fn get_mut(&mut self, tier: Tier) -> Option<&mut KvIndex> {
        Some(&mut self.lower[place(tier)?].as_mut()?.index)
    }

    /// Makes the index of a lower tier, with these instances.
    pub fn open(&mut self, tier: Tier, instances: impl Iterator<Item = Slot>) {
        let Some(place) = place(tier) else { return };
        let mut index = KvIndex::new(self.share);
        instances.for_each(|id| {
            index.add_instance(id, None);
        });
        self.lower[place] = Some(Box::new(Lower { index, removes: Vec::new() }));
    }

    /// Drops all indexes and returns them, because dropping them takes time.
    pub fn take(&mut self) -> Tiers {
        Tiers { share: self.share, lower: std::mem::take(&mut self.lower) }
    }

    /// Adds an instance of unknown capacity to all lower tiers.
    pub fn add_instance(&mut self, id: Slot) {
        self.lower.iter_mut().flatten().for_each(|lower| {
            lower.index.add_instance(id, None);
        });
    }

    /// Removes all state of an instance.
    pub fn remove_instance(&mut self, id: Slot) {
        for lower in self.lower.iter_mut().flatten() {
            lower.index.remove_instance(id);
            lower.removes.get_mut(id.index()).into_iter().for_each(|removes| *removes = false);
        }
    }

    /// Notes that a tier of the instance reports removals.
    pub fn note_removal(&mut self, tier: Tier, id: Slot) {
        let Some(lower) = place(tier).and_then(|place| self.lower[place].as_mut()) else { return };
        if lower.removes.len() <= id.index() {
            lower.removes.resize(id.index() + 1, false);
        }
        lower.removes[id.index()] = true;
    }

    /// Returns whether a tier of the instance has reported a removal.
    pub fn removes(&self, tier: Tier, id: Slot) -> bool {
        let lower = place(tier).and_then(|place| self.lower[place].as_ref());
        lower.is_some_and(|lower| lower.removes.get(id.index()) == Some(&true))
    }

    /// Marks the first `blocks` of the chain as just used in each lower tier.
    pub fn touch(&mut self, id: Slot, chain: &[u64], blocks: u32) {
        self.lower.iter_mut().flatten().for_each(|lower| lower.index.touch(id, chain, blocks));
    }

    /// Writes the number of blocks that an instance's lower tiers add to its leading `gpu_blocks`
    /// to `more[slot]`, and the tier to `tiers[slot]`. Leaves `more` empty if no lower tier adds a
    /// block. `scratch` is a buffer.
    #[inline]
    pub fn add_hits(
        &self,
        prompt: Prompt<'_>,
        counted: TierUse,
        groups: &Groups,
        gpu_blocks: &[u32],
        scratch: &mut Vec<u32>,
        (more, tiers): (&mut Vec<u32>, &mut Vec<Tier>),
    ) {
        more.clear();
        if !self.is_empty() && counted != TierUse::Off {
            self.add_hits_of_tiers(prompt, counted, groups, gpu_blocks, scratch, (more, tiers));
        }
    }

    fn add_hits_of_tiers(
        &self,
        prompt: Prompt<'_>,
        counted: TierUse,
        groups: &Groups,
        gpu_blocks: &[u32],
        scratch: &mut Vec<u32>,
        (more, tiers): (&mut Vec<u32>, &mut Vec<Tier>),
    ) {
        let Prompt { chain, max_blocks } = prompt;
        more.resize(gpu_blocks.len(), 0);
        tiers.clear();
        tiers.resize(gpu_blocks.len(), Tier::Gpu);
        scratch.resize(gpu_blocks.len(), 0);
        let mut any = false;
        for (tier, lower) in Tier::LOWER.iter().zip(&self.lower) {
            let Some(lower) = lower else { continue };
            let always = counted == TierUse::All || *tier == Tier::Cpu;
            lower.index.match_prefix(chain, scratch);
            for (slot, ((more, blocks), gpu)) in more.iter_mut().zip(&*scratch).zip(gpu_blocks).enumerate() {
                let id = Slot(slot as u32);
                // A run that begins with the GPU's blocks continues here.
                let behind = chain.get(*gpu as usize..).unwrap_or_default();
                let adds = match blocks.checked_sub(*gpu) {
                    Some(adds) => adds,
                    None => behind.iter().take_while(|hash| lower.index.holds(id, **hash)).count() as u32,
                };
                if adds <= *more || !(always || lower.removes.get(slot) == Some(&true)) {
                    continue;
                }
                let adds = groups.shorten_tier(id, chain, max_blocks, *tier, *gpu, adds);
                if adds > *more {
                    (*more, tiers[slot], any) = (adds, *tier, true);
                }
            }
        }
        if !any {
            tiers.clear();
            more.clear();
        }
    }
}
