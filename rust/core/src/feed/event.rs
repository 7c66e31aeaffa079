//! KV cache events of an engine, and their results.
use crate::fleet::InstanceId;
use crate::kv::hash::Domain;
use crate::kv::media::hash_tokens_with;
use crate::kv::names::Means;

/// The source of an event: a rank of an instance. Each rank has its own cache; an instance holds a
/// block if one of its ranks holds it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Source {
    /// The instance; events of a removed instance are ignored.
    pub instance: InstanceId,
    /// The data-parallel rank.
    pub rank: u32,
}

/// Consecutive blocks that an engine stored.
#[derive(Clone, Copy, Debug)]
pub struct Stored<'a> {
    /// The engine's hash of the block before the first; `None`: the blocks start the prompt.
    pub parent: Option<u64>,
    /// The engine's hashes of the blocks, of any scheme.
    pub engine_hashes: &'a [u64],
    /// Token IDs, one block's worth per hash.
    pub token_ids: &'a [u32],
    /// The prompt's domain; blocks with a parent need no salt or adapter in it.
    pub domain: Domain,
    /// Hash of a block's other properties, per block; 0: none. Empty if no block has any.
    pub narrowing: &'a [u64],
    /// Meaning of the event for blocks that are already known.
    pub means: Means,
}

/// Result of an event: number of blocks by outcome.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Applied {
    /// Blocks stored or removed.
    pub done: usize,
    /// Blocks with an unknown parent.
    pub unknown_parent: usize,
    /// Blocks of a lower tier that the engine reported by name alone, with unknown names.
    pub unknown_name: usize,
    /// Blocks without tokens or without room in the index.
    pub unplaced: usize,
    /// Removals of unknown blocks.
    pub unknown_removed: usize,
    /// Blocks of an instance that is not, or no longer, in the router.
    pub gone: usize,
    /// Blocks of an instance whose index entries do not come from events.
    pub not_exact: usize,
}

/// Reason to ignore an event.
pub(super) enum Refused {
    Gone,
    NotExact,
}

impl Applied {
    /// Adds the result of another event.
    pub fn add(&mut self, other: Applied) {
        self.done += other.done;
        self.unknown_parent += other.unknown_parent;
        self.unknown_name += other.unknown_name;
        self.unplaced += other.unplaced;
        self.unknown_removed += other.unknown_removed;
        self.gone += other.gone;
        self.not_exact += other.not_exact;
    }

    /// Returns the result of an event whose blocks are all ignored.
    pub(super) fn refused(why: Refused, blocks: usize) -> Applied {
        let mut applied = Applied::default();
        applied.refuse(why, blocks);
        applied
    }

    pub(super) fn refuse(&mut self, why: Refused, blocks: usize) {
        *match why {
            Refused::Gone => &mut self.gone,
            Refused::NotExact => &mut self.not_exact,
        } += blocks;
    }
}

impl Stored<'_> {
    /// Appends the chained hashes of the blocks; `last`: hash of the previous block.
    pub(super) fn hash(&self, block_size: usize, last: Option<u64>, chain: &mut Vec<u64>) {
        hash_tokens_with(self.domain, block_size, last, self.token_ids, self.narrowing, chain);
    }
}
