//! Blocks of KV cache groups that do not attend to all tokens: sliding windows and states.
//!
//! Hybrid models keep one cache per group of layers. The index of a tier holds the blocks of full
//! attention, of which a hit needs all. Of a window, a hit needs only the last blocks before its
//! end; of a state (Mamba), only the last block. An instance can reuse the longest prefix that
//! satisfies all groups. It is found as vLLM finds it: each group shortens the candidate, until no
//! group does.
//!
//! One [`KvIndex`] keeps the blocks of all groups as a set without chains. It is made at the first
//! event of such a group; routers without hybrid models pay nothing for it.
use crate::Slot;
use crate::hash::narrowed;
use crate::index::KvIndex;
use crate::tier::Tier;

/// Maximum number of KV cache groups of an instance apart from full attention. Models have one or
/// two; engines choose the numbers.
pub const MAX_GROUPS: usize = 16;

/// A KV cache group of an engine, apart from full attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Group {
    /// The engine's number of the group.
    pub id: u32,
    /// Consecutive blocks of the group that a hit needs before its end.
    pub needed: u32,
    /// Blocks of the index per block of the group.
    pub every: u32,
}

/// A tier of a KV cache group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GroupTier {
    /// The tier.
    pub tier: Tier,
    /// The engine's number of the group.
    pub group: u32,
}

impl GroupTier {
    /// Returns the name of a block of this group in the common index.
    pub fn key(self, chain: u64) -> u64 {
        narrowed(chain, u64::from(self.group) << 8 | self.tier as u64)
    }
}

/// Groups of one instance.
#[derive(Clone, Debug, Default)]
struct Held {
    groups: Vec<Group>,
    /// Whether the engine also has a group of full attention.
    full: bool,
}

/// The KV cache groups of all instances.
#[derive(Debug, Default)]
pub struct Groups {
    index: Option<Box<KvIndex>>,
    held: Vec<Held>,
}

impl Groups {
    /// Returns whether no instance has such a group.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.index.is_none()
    }

    /// Returns the blocks of all groups; their names are [`GroupTier::key`].
    pub fn index_mut(&mut self) -> Option<&mut KvIndex> {
        self.index.as_deref_mut()
    }

    /// Returns the number of blocks of an instance, over all groups.
    pub fn blocks(&self, id: Slot) -> u32 {
        self.index.as_ref().map_or(0, |index| index.blocks(id))
    }

    /// Returns the groups of an instance.
    pub fn of(&self, id: Slot) -> &[Group] {
        self.held.get(id.index()).map_or(&[], |held| &held.groups)
    }

    /// Makes the index, with these instances.
    pub fn open(&mut self, byte_bound: usize, instances: impl Iterator<Item = Slot>) {
        let mut index = KvIndex::new(byte_bound);
        instances.for_each(|id| {
            index.add_instance(id, None);
        });
        self.index = Some(Box::new(index));
    }

    /// Drops the index and forgets all groups. Returns the index, because dropping it takes time.
    pub fn take(&mut self) -> Groups {
        std::mem::take(self)
    }

    /// Adds an instance without groups.
    pub fn add_instance(&mut self, id: Slot) {
        if let Some(index) = &mut self.index {
            index.add_instance(id, None);
        }
    }

    /// Removes all state of an instance.
    pub fn remove_instance(&mut self, id: Slot) {
        self.forget(id);
        if let Some(index) = &mut self.index {
            index.remove_instance(id);
        }
    }

    /// Forgets the groups of an instance, so that only full attention counts.
    pub fn forget(&mut self, id: Slot) {
        if let Some(held) = self.held.get_mut(id.index()) {
            *held = Held::default();
        }
    }

    /// Adds or replaces a group of an instance. `full`: the engine also has full attention. Returns
    /// false if the instance has [`MAX_GROUPS`] other groups.
    pub fn note(&mut self, id: Slot, group: Group, full: bool) -> bool {
        if self.held.len() <= id.index() {
            self.held.resize_with(id.index() + 1, Held::default);
        }
        let held = &mut self.held[id.index()];
        held.full |= full;
        let room = held.groups.len() < MAX_GROUPS;
        match held.groups.iter_mut().find(|known| known.id == group.id) {
            Some(known) => *known = group,
            None if room => held.groups.push(group),
            None => return false,
        }
        true
    }

    /// Notes that the instance has full attention.
    pub fn note_full(&mut self, id: Slot) {
        if let Some(held) = self.held.get_mut(id.index()) {
            held.full = true;
        }
    }

    /// Shortens `hit_blocks` to the prefixes that all groups have. `most`: blocks that a hit may
    /// have at most, since engines compute the last token of every prompt.
    #[inline]
    pub fn shorten(&self, chain: &[u64], most: u32, hit_blocks: &mut [u32]) {
        let Some(index) = &self.index else { return };
        for (slot, (held, hit)) in self.held.iter().zip(hit_blocks).enumerate() {
            if held.groups.is_empty() {
                continue;
            }
            let start = if held.full { *hit } else { chain.len() as u32 };
            let id = Slot(slot as u32);
            *hit = longest(index, id, &held.groups, chain, Tier::Gpu, (0, start.min(most)));
        }
    }

    /// Shortens the `more` blocks that an instance can load from `tier` behind its leading `gpu`
    /// blocks, so that the tier also holds what the groups need. Returns the remaining blocks.
    pub(crate) fn shorten_tier(
        &self,
        id: Slot,
        chain: &[u64],
        most: u32,
        tier: Tier,
        gpu: u32,
        more: u32,
    ) -> u32 {
        let groups = self.of(id);
        let Some(index) = self.index.as_deref().filter(|_| !groups.is_empty() && more > 0) else {
            return more;
        };
        longest(index, id, groups, chain, tier, (gpu, (gpu + more).min(most))).saturating_sub(gpu)
    }
}

/// Returns the longest prefix of at most `end` blocks of which `tier` holds what the groups need
/// behind the first `start` blocks. 0: none is longer than `start`.
fn longest(
    index: &KvIndex,
    id: Slot,
    groups: &[Group],
    chain: &[u64],
    tier: Tier,
    (start, mut end): (u32, u32),
) -> u32 {
    loop {
        let before = end;
        for group in groups {
            let of = GroupTier { tier, group: group.id };
            end = of_group(end, start, group, |block| index.holds(id, of.key(chain[block as usize])));
        }
        if end <= start || end == before {
            return end;
        }
    }
}

/// Returns the longest prefix of at most `end` blocks of which a group holds what it needs.
/// `holds`: whether the group has a block that ends with this block of the index.
fn of_group(mut end: u32, start: u32, group: &Group, holds: impl Fn(u32) -> bool) -> u32 {
    let every = group.every.max(1);
    end -= end % every;
    while end > start {
        // The first missing block is the farthest possible end of a shorter prefix.
        let first = end.saturating_sub(group.needed.saturating_mul(every)).max(start) / every * every;
        let missing = (first..end).step_by(every as usize).find(|block| !holds(block + every - 1));
        match missing {
            None => break,
            Some(block) => end = block,
        }
    }
    end
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// The search finds the same prefix as a test of every prefix by the definition.
        #[test]
        fn the_longest_prefix_has_all_that_each_group_needs(
            held in prop::collection::vec((0u32..5, 1u32..4, prop::collection::vec(any::<bool>(), 24)), 1..4),
            full in 0u32..24,
        ) {
            let id = Slot(0);
            let chain: Vec<u64> = (1..=24u64).map(|at| at.wrapping_mul(0x9e37_79b9_7f4a_7c15)).collect();
            let mut groups = Groups::default();
            groups.open(KvIndex::MIN_BYTES, [id].into_iter());
            let mut all = Vec::new();
            for (number, (needed, every, blocks)) in held.iter().enumerate() {
                let group = Group { id: number as u32, needed: *needed, every: *every };
                assert!(groups.note(id, group, true));
                let of = GroupTier { tier: Tier::Gpu, group: group.id };
                let ends = (0..24 / every).map(|block| (block + 1) * every - 1);
                for end in ends.filter(|end| blocks[*end as usize]) {
                    let index = groups.index_mut().unwrap();
                    index.store(id, None, &[of.key(chain[end as usize])], crate::index::Copies::Add);
                }
                all.push((group, blocks));
            }
            let reusable = |length: u32| all.iter().all(|(group, blocks)| {
                let ends = (1..=length / group.every).map(|block| block * group.every - 1);
                length.is_multiple_of(group.every)
                    && ends.rev().take(group.needed as usize).all(|end| blocks[end as usize])
            });
            let expected = (0..=full).rev().find(|length| reusable(*length)).unwrap();
            let mut hits = [full];
            groups.shorten(&chain, u32::MAX, &mut hits);
            prop_assert_eq!(hits[0], expected);
        }
    }
}
