//! Blocks of lower tiers that arrive before the block that precedes them.
use crate::event::Stored;
use lmetric_core::feed::{Means, Stored as Blocks};
use lmetric_core::kv::hash::Domain;
use lmetric_core::kv::tier::Tier;
use std::collections::HashMap;

/// Maximum number of blocks that wait in one batch. Engines report the copies of one step in one
/// batch; further blocks count as blocks with an unknown parent.
const MAX_BLOCKS: usize = 4096;

/// Blocks of a lower tier that were reported before the block that precedes them.
pub(crate) struct Early {
    pub tier: Tier,
    parent: Option<u64>,
    pub hashes: Vec<u64>,
    tokens: Vec<u32>,
    domain: Domain,
    narrowing: Vec<u64>,
}

impl Early {
    /// Returns the blocks, to store them.
    pub fn blocks(&self) -> Blocks<'_> {
        Blocks {
            parent: self.parent,
            engine_hashes: &self.hashes,
            token_ids: &self.tokens,
            domain: self.domain,
            narrowing: &self.narrowing,
            means: Means::Report,
        }
    }
}

/// The early events of a batch, found by the block that precedes them and by their own blocks.
#[derive(Default)]
pub(crate) struct EarlyEvents {
    events: HashMap<usize, Early>,
    by_parent: HashMap<(Tier, u64), Vec<usize>>,
    by_block: HashMap<(Tier, u64), Vec<usize>>,
    blocks: usize,
    added: usize,
}

impl EarlyEvents {
    /// Returns whether no event waits.
    pub fn is_empty(&self) -> bool {
        self.events.is_empty()
    }

    /// Copies an event. Returns false if it has no parent, or if too many blocks wait.
    pub fn add(&mut self, tier: Tier, event: &Stored<'_>, domain: Domain, narrowing: &[u64]) -> bool {
        let Some(parent) = event.parent.filter(|_| self.blocks + event.hashes.len() <= MAX_BLOCKS) else {
            return false;
        };
        self.blocks += event.hashes.len();
        self.added += 1;
        self.by_parent.entry((tier, parent)).or_default().push(self.added);
        for hash in event.hashes {
            self.by_block.entry((tier, *hash)).or_default().push(self.added);
        }
        let early = Early {
            tier,
            parent: event.parent,
            hashes: event.hashes.to_vec(),
            tokens: event.tokens.to_vec(),
            domain,
            narrowing: narrowing.to_vec(),
        };
        self.events.insert(self.added, early);
        true
    }

    /// Removes and returns the events behind a block.
    pub fn behind(&mut self, tier: Tier, block: u64) -> Vec<Early> {
        let numbers = self.by_parent.remove(&(tier, block)).unwrap_or_default();
        numbers.into_iter().filter_map(|number| self.events.remove(&number)).collect()
    }

    /// Drops the events that hold a block.
    pub fn drop_with(&mut self, tier: Tier, block: u64) {
        for number in self.by_block.remove(&(tier, block)).unwrap_or_default() {
            self.events.remove(&number);
        }
    }

    /// Removes and returns all events.
    pub fn take(&mut self) -> impl Iterator<Item = Early> + use<> {
        std::mem::take(self).events.into_values()
    }
}
