//! Where inner blocks were evicted before what stands behind them.
//!
//! Only behind such a *hole* can an instance hold a block whose parent it does not hold, so only there may the set of
//! holders grow along a chain. Two counting tables, by depth and by hash, tell a search where to cut its chain; both are of fixed size and
//! err on the side of a needless cut.

const DEPTHS: usize = 4096;
const FILTER: usize = 1 << 14;

pub(super) struct Holes {
    /// Holes at each depth; the last counts all deeper ones.
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

    /// Whether the block at this depth may be a hole somewhere.
    #[inline]
    pub(super) fn may_be(&self, depth: usize, hash: u64) -> bool {
        self.by_depth[depth.min(DEPTHS - 1)] != 0 && self.by_hash[Self::slot(hash)] != 0
    }
}
