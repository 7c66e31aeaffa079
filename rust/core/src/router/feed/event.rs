//! Events of an engine's cache, and what becomes of them.
use crate::ids::InstanceId;
use crate::kv::hash::{Domain, hash_tokens_after, narrowed};
use crate::kv::names::Means;

/// Who stores blocks: a rank of an instance. Ranks have caches of their own; a block is held where
/// one of them holds it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Source {
    /// The instance.
    pub instance: InstanceId,
    /// Its generation: events of an instance that is gone reach nobody.
    pub generation: u32,
    /// The data-parallel rank.
    pub rank: u32,
}

/// Consecutive blocks that an engine stored.
#[derive(Clone, Copy, Debug)]
pub struct Stored<'a> {
    /// The engine's hash of the block before the first (`None`: they start the prompt).
    pub parent: Option<u64>,
    /// The engine's hashes of the blocks, whatever they are made of.
    pub engine_hashes: &'a [u64],
    /// A block's worth of ids to each.
    pub token_ids: &'a [u32],
    /// The prompt's domain; blocks behind a parent need no word of salt and adapter.
    pub domain: Domain,
    /// What a block is besides its tokens, hashed; 0: nothing. Empty where that holds for all.
    pub narrowing: &'a [u64],
    /// What it means where blocks are known already.
    pub means: Means,
}

/// What became of the blocks of an event.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Applied {
    /// Blocks taken in or out.
    pub done: usize,
    /// Blocks whose parent was not known.
    pub unknown_parent: usize,
    /// Blocks without tokens, or for which there was no room.
    pub unplaced: usize,
    /// Removals of blocks that were not known.
    pub unknown_removed: usize,
    /// Blocks of an instance that the router does not have (any more).
    pub gone: usize,
    /// Blocks of an instance that does not learn by events.
    pub not_exact: usize,
}

/// Why an event reaches nobody.
pub(super) enum Refused {
    Gone,
    NotExact,
}

impl Applied {
    pub(super) fn refuse(&mut self, why: Refused, blocks: usize) {
        *match why {
            Refused::Gone => &mut self.gone,
            Refused::NotExact => &mut self.not_exact,
        } += blocks;
    }
}

impl Stored<'_> {
    /// Appends the chained hashes of the blocks; `last`: that of the block before them.
    pub(super) fn hash(&self, block_size: usize, last: Option<u64>, chain: &mut Vec<u64>) {
        let domain = self.domain;
        if self.narrowing.iter().all(|part| *part == 0) {
            return hash_tokens_after(domain, block_size, last, self.token_ids, chain);
        }
        let mut last = last.unwrap_or_else(|| domain.token_start());
        for (at, block) in self.token_ids.chunks_exact(block_size).enumerate() {
            if let Some(part) = self.narrowing.get(at).filter(|part| **part != 0) {
                last = narrowed(last, *part);
            }
            hash_tokens_after(domain, block_size, Some(last), block, chain);
            last = chain.last().copied().unwrap_or(last);
        }
    }
}
