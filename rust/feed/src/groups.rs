//! KV cache groups of hybrid models: which blocks a prefix needs of each group.
use crate::event::Stored;
use lmetric_core::kv::groups::{Group, MAX_GROUPS};
use lmetric_core::kv::tier::Tier;
use std::collections::{BTreeMap, HashMap};

/// Role of a group's blocks.
pub(crate) enum Role {
    /// A prefix needs all blocks.
    Full,
    /// A prefix needs the last blocks.
    Other(Group),
    /// Unknown, for this reason.
    Unknown(&'static str),
}

/// The groups of an engine apart from full attention.
#[derive(Default)]
pub(crate) struct Others {
    /// Groups by their number. Events of lower tiers may have no kind.
    known: BTreeMap<u64, Group>,
    /// Blocks of the present batch without a position, each with its number of copies.
    unnamed: BTreeMap<(Tier, u32), HashMap<u64, u32>>,
    /// Whether the router knows that the engine also has full attention.
    pub full_is_known: bool,
}

impl Others {
    /// Returns the number of such groups.
    pub fn count(&self) -> usize {
        self.known.len()
    }

    /// Returns such a group by the engine's number.
    pub fn get(&self, group: u64) -> Option<Group> {
        self.known.get(&group).copied()
    }

    /// Returns the role of an event's group. `full`: the group of full attention, if it is known.
    /// `block_size`: tokens per block of the index.
    pub fn role(&mut self, event: &Stored<'_>, full: Option<u64>, block_size: u64) -> Role {
        let Some(kind) = event.kind else {
            return match event.group.and_then(|group| self.known.get(&group)) {
                Some(group) if event.group != full => Role::Other(*group),
                _ => Role::Full,
            };
        };
        if is_full_attention(kind) {
            return Role::Full;
        }
        let needed = match (kind, event.window) {
            ("sliding_window" | "sliding_window_mla", Some(window)) => {
                window.saturating_sub(1).div_ceil(event.block_size.max(1))
            }
            ("mamba", _) => 1,
            _ => return Role::Unknown("group"),
        };
        let Some(number) = event.group else { return Role::Unknown("group") };
        // Engines report parts of blocks with smaller sizes.
        if event.block_size == 0 || !event.block_size.is_multiple_of(block_size) {
            return Role::Unknown("group_block_size");
        }
        let Ok(id) = u32::try_from(number) else { return Role::Unknown("group") };
        if self.known.len() >= MAX_GROUPS && !self.known.contains_key(&number) {
            return Role::Unknown("too_many_groups");
        }
        let whole = |value: u64| u32::try_from(value).unwrap_or(u32::MAX);
        let group = Group { id, needed: whole(needed), every: whole(event.block_size / block_size) };
        self.known.insert(number, group);
        Role::Other(group)
    }

    /// Adds blocks without a position, and empties the list.
    pub fn add_unnamed(&mut self, tier: Tier, group: u32, hashes: &mut Vec<u64>) {
        if !hashes.is_empty() {
            let unnamed = self.unnamed.entry((tier, group)).or_default();
            hashes.drain(..).for_each(|hash| *unnamed.entry(hash).or_default() += 1);
        }
    }

    /// Drops a copy of a block without a position. Returns false if there is no such block.
    pub fn forget(&mut self, tier: Tier, group: u32, hash: u64) -> bool {
        let Some(unnamed) = self.unnamed.get_mut(&(tier, group)) else { return false };
        let Some(copies) = unnamed.get_mut(&hash) else { return false };
        *copies -= 1;
        if *copies == 0 {
            unnamed.remove(&hash);
        }
        true
    }

    /// Returns the blocks without a position, each as often as it has copies, and forgets them.
    pub fn take_unnamed(&mut self) -> impl Iterator<Item = (Tier, u32, Vec<u64>)> + use<> {
        std::mem::take(&mut self.unnamed).into_iter().map(|((tier, group), unnamed)| {
            let copies = unnamed.into_iter().flat_map(|(hash, copies)| (0..copies).map(move |_| hash));
            (tier, group, copies.collect())
        })
    }
}

/// Returns whether a prefix needs all blocks of these layers. This holds for layers that attend to
/// all tokens.
fn is_full_attention(kind: &str) -> bool {
    matches!(kind, "full_attention" | "mla_attention" | "sink_full_attention")
}
