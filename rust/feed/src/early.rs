//! Blocks of a tier that arrive before the block that precedes them.
use crate::event::Stored;
use lmetric_core::kv::hash::Domain;
use lmetric_core::kv::tiers::Tier;
use lmetric_core::router::feed::{Means, Stored as Blocks};

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
    /// Copies the event.
    pub fn of(tier: Tier, event: &Stored<'_>, domain: Domain, narrowing: &[u64]) -> Early {
        Early {
            tier,
            parent: event.parent,
            hashes: event.hashes.to_vec(),
            tokens: event.tokens.to_vec(),
            domain,
            narrowing: narrowing.to_vec(),
        }
    }

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
