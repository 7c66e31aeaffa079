//! The KV blocks of one engine: their users, their contents, and their order of eviction.
use crate::events::KvLog;
use hashbrown::HashMap;
use lmetric_core::kv::tiers::Tier;
use std::hash::{BuildHasherDefault, Hasher};

const NONE: u32 = u32::MAX;
/// In `Block::twin`: the block has no hash under which it could be found.
const UNNAMED: u32 = u32::MAX - 1;

/// A fixed number of blocks. A block in use is pinned. A free one waits in a list, least recently
/// used first, and can be found by its hash until it is taken for something else (as in vLLM).
#[derive(Clone, Debug)]
pub struct BlockPool {
    /// The blocks. One more entry closes the free list to a ring: its `next` is evicted first, its
    /// `previous` last.
    blocks: Vec<Block>,
    by_hash: HashMap<u64, u32, BuildHasherDefault<ChainHasher>>,
    free: u32,
}

#[derive(Clone, Debug)]
struct Block {
    hash: u64,
    users: u32,
    previous: u32,
    next: u32,
    /// The next block with the same hash (two requests may compute one block at the same time), or
    /// a mark.
    twin: u32,
}

impl BlockPool {
    /// Makes a pool of `capacity` empty blocks.
    pub fn new(capacity: u32) -> BlockPool {
        let block = |i: u32| Block {
            hash: 0,
            users: 0,
            previous: if i == 0 { capacity } else { i - 1 },
            next: if i == capacity { 0 } else { i + 1 },
            twin: UNNAMED,
        };
        BlockPool { blocks: (0..=capacity).map(block).collect(), by_hash: HashMap::default(), free: capacity }
    }

    /// Returns the number of blocks in the pool.
    pub fn capacity(&self) -> u32 {
        self.blocks.len() as u32 - 1
    }

    /// Returns the number of blocks that no request uses.
    pub fn free(&self) -> u32 {
        self.free
    }

    /// Returns the block with this hash.
    #[inline]
    pub fn find(&self, hash: u64) -> Option<u32> {
        self.by_hash.get(&hash).copied()
    }

    /// Whether a request uses the block.
    pub fn in_use(&self, block: u32) -> bool {
        self.blocks[block as usize].users > 0
    }

    /// Whether several requests use the block.
    pub fn is_shared(&self, block: u32) -> bool {
        self.blocks[block as usize].users > 1
    }

    /// Adds a user to a block that was found.
    pub fn share(&mut self, block: u32) {
        if self.blocks[block as usize].users == 0 {
            self.unlink(block);
            self.free -= 1;
        }
        self.blocks[block as usize].users += 1;
    }

    /// Takes the least recently used free block for a new use and drops its contents. None: every
    /// block is in use.
    pub fn take(&mut self, log: &mut KvLog) -> Option<u32> {
        if self.free == 0 {
            return None;
        }
        let block = self.blocks[self.capacity() as usize].next;
        if self.blocks[block as usize].twin != UNNAMED {
            self.unname(block);
            log.removed(Tier::Gpu, self.blocks[block as usize].hash);
        }
        self.share(block);
        Some(block)
    }

    /// Gives a block in use its hash.
    pub fn name(&mut self, block: u32, hash: u64) {
        let twin = self.by_hash.insert(hash, block).unwrap_or(NONE);
        let entry = &mut self.blocks[block as usize];
        (entry.hash, entry.twin) = (hash, twin);
    }

    /// Removes a user of a block. A block without users is evicted last, or first if it has no
    /// hash.
    pub fn release(&mut self, block: u32) {
        let entry = &mut self.blocks[block as usize];
        entry.users -= 1;
        if entry.users == 0 {
            self.free += 1;
            let ring = self.capacity();
            let before = if self.blocks[block as usize].twin == UNNAMED {
                ring
            } else {
                self.blocks[ring as usize].previous
            };
            self.link_behind(before, block);
        }
    }

    /// Empties all blocks. Returns false and does nothing while any block is in use.
    pub fn clear(&mut self) -> bool {
        let idle = self.free == self.capacity();
        if idle {
            self.by_hash.clear();
            self.blocks.iter_mut().for_each(|block| block.twin = UNNAMED);
        }
        idle
    }

    fn unname(&mut self, block: u32) {
        let Block { hash, twin, .. } = self.blocks[block as usize];
        self.blocks[block as usize].twin = UNNAMED;
        let first = self.by_hash[&hash];
        if first != block {
            let mut at = first;
            while self.blocks[at as usize].twin != block {
                at = self.blocks[at as usize].twin;
            }
            self.blocks[at as usize].twin = twin;
        } else if twin == NONE {
            self.by_hash.remove(&hash);
        } else {
            self.by_hash.insert(hash, twin);
        }
    }

    fn unlink(&mut self, block: u32) {
        let Block { previous, next, .. } = self.blocks[block as usize];
        self.blocks[previous as usize].next = next;
        self.blocks[next as usize].previous = previous;
    }

    fn link_behind(&mut self, previous: u32, block: u32) {
        let next = std::mem::replace(&mut self.blocks[previous as usize].next, block);
        self.blocks[next as usize].previous = block;
        let entry = &mut self.blocks[block as usize];
        (entry.previous, entry.next) = (previous, next);
    }
}

/// Hasher for block hashes, which are hashes already: one multiplication spreads them over the
/// table, whatever their source.
#[derive(Clone, Copy, Debug, Default)]
pub struct ChainHasher(u64);

impl Hasher for ChainHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|&byte| self.write_u64(self.0 ^ u64::from(byte)));
    }

    fn write_u64(&mut self, hash: u64) {
        let wide = u128::from(hash) * 0x9e37_79b9_7f4a_7c15_u128;
        self.0 = wide as u64 ^ (wide >> 64) as u64;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::events::KvEvent;

    fn log() -> KvLog {
        KvLog { on: true, ..Default::default() }
    }

    #[test]
    fn the_least_recently_used_block_goes_first() {
        let (mut pool, mut log) = (BlockPool::new(3), log());
        let blocks: Vec<u32> = (0..3).map(|_| pool.take(&mut log).unwrap()).collect();
        assert_eq!(pool.take(&mut log), None);
        (0..3).for_each(|i| pool.name(blocks[i], 10 + i as u64));
        // The tail is released first, so it is evicted first.
        blocks.iter().rev().for_each(|&block| pool.release(block));
        pool.share(blocks[2]);
        pool.release(blocks[2]);
        pool.take(&mut log).unwrap();
        assert_eq!(
            (&log.events[..], &log.hashes[..]),
            (&[KvEvent::Removed { tier: Tier::Gpu, hashes: 0..1 }][..], &[11][..])
        );
        assert_eq!((pool.find(10), pool.find(11), pool.find(12)), (Some(blocks[0]), None, Some(blocks[2])));
    }

    #[test]
    fn a_block_in_use_stays_and_an_empty_one_goes_first() {
        let (mut pool, mut log) = (BlockPool::new(2), log());
        let (a, b) = (pool.take(&mut log).unwrap(), pool.take(&mut log).unwrap());
        pool.name(a, 1);
        pool.share(a);
        pool.release(a);
        assert!(pool.in_use(a));
        pool.release(a);
        pool.release(b);
        assert_eq!((pool.take(&mut log), pool.free()), (Some(b), 1));
        assert!(log.events.is_empty());
    }

    #[test]
    fn every_copy_of_a_block_is_found_until_the_last_is_gone() {
        let (mut pool, mut log) = (BlockPool::new(3), log());
        let blocks: Vec<u32> = (0..3).map(|_| pool.take(&mut log).unwrap()).collect();
        blocks.iter().for_each(|&block| pool.name(block, 7));
        // Taken in this order: the middle of the list of twins, then its head, then the last copy.
        [1, 2, 0].iter().for_each(|&i: &usize| pool.release(blocks[i]));
        for copies_left in [2, 1, 0] {
            pool.take(&mut log).unwrap();
            assert_eq!(pool.find(7).is_some(), copies_left > 0);
        }
        assert_eq!(
            (&log.events[..], &log.hashes[..]),
            (&[KvEvent::Removed { tier: Tier::Gpu, hashes: 0..3 }][..], &[7; 3][..])
        );
    }

    #[test]
    fn clearing_needs_an_idle_pool() {
        let (mut pool, mut log) = (BlockPool::new(1), log());
        let block = pool.take(&mut log).unwrap();
        pool.name(block, 7);
        assert!(!pool.clear());
        pool.release(block);
        assert!(pool.clear() && pool.find(7).is_none());
    }
}
