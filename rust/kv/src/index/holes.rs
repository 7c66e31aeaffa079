//! Holes: inner blocks that were evicted before the blocks behind them.
//!
//! Only behind a *hole* can an instance hold a block without its parent, so only there can the set
//! of holders grow along a chain. Two counting tables, by depth and by hash, show a search where to
//! cut its chain. Both have a fixed size, and their errors only cause needless cuts.

const DEPTHS: usize = 4096;
const FILTER: usize = 1 << 14;

pub(super) struct Holes {
    /// Holes at each depth; the last entry counts all deeper holes.
    by_depth: Box<[u32; DEPTHS]>,
    by_hash: Box<[u32; FILTER]>,
    total: usize,
}

impl Holes {
    pub(super) const BYTES: usize = (DEPTHS + FILTER) * size_of::<u32>();

    pub(super) fn new() -> Holes {
        Holes { by_depth: Box::new([0; DEPTHS]), by_hash: Box::new([0; FILTER]), total: 0 }
    }

    fn slot(hash: u64) -> usize {
        ((hash ^ (hash >> 32)).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (64 - FILTER.ilog2())) as usize
    }

    pub(super) fn opened(&mut self, depth: usize, hash: u64) {
        self.by_depth[depth.min(DEPTHS - 1)] += 1;
        self.by_hash[Self::slot(hash)] += 1;
        self.total += 1;
    }

    pub(super) fn closed(&mut self, depth: usize, hash: u64) {
        self.by_depth[depth.min(DEPTHS - 1)] -= 1;
        self.by_hash[Self::slot(hash)] -= 1;
        self.total -= 1;
    }

    pub(super) fn is_empty(&self) -> bool {
        self.total == 0
    }

    /// Returns whether the block at this depth may be a hole on some instance.
    #[inline]
    pub(super) fn may_be(&self, depth: usize, hash: u64) -> bool {
        self.by_depth[depth.min(DEPTHS - 1)] != 0 && self.by_hash[Self::slot(hash)] != 0
    }
}
