//! KV cache groups of hybrid models: which blocks a prefix needs of each group.
use crate::event::Stored;
use lmetric_core::kv::groups::Group;
use lmetric_core::kv::tiers::Tier;
use std::collections::BTreeMap;

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
    /// Blocks of the present batch without a position.
    unnamed: Vec<(Tier, u32, Vec<u64>)>,
    /// Whether the router knows that the engine also has full attention.
    pub full_is_known: bool,
}

impl Others {
    /// Returns the number of such groups.
    pub fn count(&self) -> usize {
        self.known.len()
    }

    /// Returns whether this is such a group.
    pub fn knows(&self, group: u64) -> bool {
        self.known.contains_key(&group)
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
        let whole = |value: u64| u32::try_from(value).unwrap_or(u32::MAX);
        let group =
            Group { id: whole(number), needed: whole(needed), every: whole(event.block_size / block_size) };
        self.known.insert(number, group);
        Role::Other(group)
    }

    /// Returns the list for a group's blocks without a position.
    pub fn unnamed(&mut self, tier: Tier, group: u32) -> &mut Vec<u64> {
        let at = self.unnamed.iter().position(|(t, g, _)| (*t, *g) == (tier, group));
        let at = at.unwrap_or_else(|| {
            self.unnamed.push((tier, group, Vec::new()));
            self.unnamed.len() - 1
        });
        &mut self.unnamed[at].2
    }

    /// Drops a block without a position. Returns false if there is no such block.
    pub fn forget(&mut self, tier: Tier, group: u32, hash: u64) -> bool {
        let lists = self.unnamed.iter_mut().filter(|(t, g, _)| (*t, *g) == (tier, group));
        for (_, _, hashes) in lists {
            if let Some(at) = hashes.iter().position(|known| *known == hash) {
                hashes.swap_remove(at);
                return true;
            }
        }
        false
    }

    /// Returns the blocks without a position, and forgets them.
    pub fn take_unnamed(&mut self) -> Vec<(Tier, u32, Vec<u64>)> {
        std::mem::take(&mut self.unnamed)
    }
}

/// Returns whether a prefix needs all blocks of these layers. This holds for layers that attend to
/// all tokens.
fn is_full_attention(kind: &str) -> bool {
    matches!(kind, "full_attention" | "mla_attention" | "sink_full_attention")
}
