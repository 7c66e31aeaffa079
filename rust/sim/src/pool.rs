//! The KV blocks of one engine: their users, their contents, and their order of eviction.
use crate::events::KvLog;
use crate::names::{NONE, Names};
use lmetric_core::kv::prefetch;
use lmetric_core::kv::tier::Tier;
use std::collections::VecDeque;

/// In `Block::twin`: the block has no hash under which it could be found.
const UNNAMED: u32 = NONE - 1;
/// Number of blocks ahead at which what an operation reads is prefetched: a chain has thousands of
/// blocks, each somewhere else in memory.
const AHEAD: usize = 8;

/// A fixed number of blocks. A block in use is pinned. A free one waits in a queue, least recently
/// used first, and can be found by its hash until it is taken for something else (as in vLLM).
#[derive(Clone, Debug)]
pub struct BlockPool {
    capacity: u32,
    /// The blocks that were in use at least once.
    blocks: Vec<Block>,
    names: Names,
    /// Those of them that are free and without a hash: they are taken first.
    empty: Vec<u32>,
    /// Free blocks with a hash, least recently used first. An entry is stale if its block was used
    /// after it.
    queue: VecDeque<Turn>,
    free: u32,
}

#[derive(Clone, Debug)]
struct Block {
    hash: u64,
    users: u32,
    /// Number of times that it came into the queue.
    turns: u32,
    /// The next block with the same hash (two requests may compute one block at the same time), or
    /// a mark.
    twin: u32,
}

/// A block's entry in the queue, with the block's `turns` at that time.
#[derive(Clone, Copy, Debug)]
struct Turn {
    block: u32,
    turns: u32,
}

impl Turn {
    /// Whether the block has waited since then.
    fn is_current(self, blocks: &[Block]) -> bool {
        let block = &blocks[self.block as usize];
        block.users == 0 && block.turns == self.turns
    }
}

impl BlockPool {
    /// Makes a pool of `capacity` empty blocks.
    pub fn new(capacity: u32) -> BlockPool {
        BlockPool {
            capacity,
            blocks: Vec::with_capacity(capacity as usize),
            names: Names::new(capacity),
            empty: Vec::new(),
            queue: VecDeque::new(),
            free: capacity,
        }
    }

    /// Returns the number of blocks in the pool.
    pub fn capacity(&self) -> u32 {
        self.capacity
    }

    /// Returns the number of blocks that no request uses.
    pub fn free(&self) -> u32 {
        self.free
    }

    /// Returns the blocks with these hashes, up to the first that is missing.
    pub fn find<'a>(&'a self, chain: &'a [u64]) -> impl Iterator<Item = u32> + 'a {
        chain.iter().enumerate().map_while(|(i, &hash)| {
            if let Some(&ahead) = chain.get(i + 2 * AHEAD) {
                self.names.prefetch(ahead);
            }
            if let Some(block) = chain.get(i + AHEAD).and_then(|&ahead| self.names.first(ahead)) {
                self.prefetch(block);
            }
            self.block_of(hash)
        })
    }

    #[inline]
    fn block_of(&self, hash: u64) -> Option<u32> {
        self.names.find(hash, |block| self.blocks[block as usize].hash == hash)
    }

    #[inline]
    fn prefetch(&self, block: u32) {
        prefetch(&raw const self.blocks[block as usize]);
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
        let users = &mut self.blocks[block as usize].users;
        self.free -= u32::from(*users == 0);
        *users += 1;
    }

    /// Takes the least recently used free block for a new use and drops its contents. None: every
    /// block is in use.
    pub fn take(&mut self, log: &mut KvLog) -> Option<u32> {
        if self.free == 0 {
            return None;
        }
        let block = self.empty.pop().or_else(|| self.add()).unwrap_or_else(|| self.pop_oldest(log));
        self.share(block);
        Some(block)
    }

    /// Adds a block that was never in use. None: there is none.
    fn add(&mut self) -> Option<u32> {
        let block = self.blocks.len() as u32;
        (block < self.capacity).then(|| {
            self.blocks.push(Block { hash: 0, users: 0, turns: 0, twin: UNNAMED });
            block
        })
    }

    /// Takes the least recently used block off the queue, which has one, and drops its contents.
    fn pop_oldest(&mut self, log: &mut KvLog) -> u32 {
        loop {
            if let Some(ahead) = self.queue.get(2 * AHEAD) {
                self.prefetch(ahead.block);
            }
            if let Some(ahead) = self.queue.get(AHEAD) {
                self.names.prefetch(self.blocks[ahead.block as usize].hash);
            }
            let turn = self.queue.pop_front().expect("free blocks with a hash are in the queue");
            if turn.is_current(&self.blocks) {
                self.unname(turn.block);
                log.removed(Tier::Gpu, self.blocks[turn.block as usize].hash);
                return turn.block;
            }
        }
    }

    /// Gives blocks in use their hashes.
    pub fn name(&mut self, blocks: &[u32], hashes: &[u64]) {
        for (i, (&block, &hash)) in blocks.iter().zip(hashes).enumerate() {
            if let (Some(&ahead), Some(&next)) = (hashes.get(i + AHEAD), blocks.get(i + AHEAD)) {
                self.names.prefetch(ahead);
                self.prefetch(next);
            }
            let twin = self.block_of(hash);
            if let Some(twin) = twin {
                self.names.replace(hash, twin, block);
            } else {
                self.names.insert(hash, block);
            }
            let entry = &mut self.blocks[block as usize];
            (entry.hash, entry.twin) = (hash, twin.unwrap_or(NONE));
        }
    }

    /// Removes a user of blocks, the last first. Blocks without users are evicted last, or first if
    /// they have no hash.
    pub fn release(&mut self, blocks: &mut Vec<u32>) {
        while let Some(block) = blocks.pop() {
            if let Some(ahead) = blocks.len().checked_sub(AHEAD) {
                self.prefetch(blocks[ahead]);
            }
            let entry = &mut self.blocks[block as usize];
            entry.users -= 1;
            if entry.users > 0 {
                continue;
            }
            self.free += 1;
            if entry.twin == UNNAMED {
                self.empty.push(block);
            } else {
                entry.turns = entry.turns.wrapping_add(1);
                self.queue.push_back(Turn { block, turns: entry.turns });
            }
        }
        if self.queue.len() > 64 + 4 * self.capacity as usize {
            let blocks = &self.blocks;
            self.queue.retain(|turn| turn.is_current(blocks));
        }
    }

    /// Empties all blocks. Returns false and does nothing while any block is in use.
    pub fn clear(&mut self) -> bool {
        let idle = self.free == self.capacity();
        if idle {
            *self = BlockPool::new(self.capacity());
        }
        idle
    }

    fn unname(&mut self, block: u32) {
        let Block { hash, twin, .. } = self.blocks[block as usize];
        self.blocks[block as usize].twin = UNNAMED;
        let next = (twin != NONE).then_some(twin);
        let is_first = match next {
            None => self.names.remove(hash, block),
            Some(next) => self.names.replace(hash, block, next),
        };
        if !is_first {
            let mut at = self.block_of(hash).expect("a twin is found by its hash");
            while self.blocks[at as usize].twin != block {
                at = self.blocks[at as usize].twin;
            }
            self.blocks[at as usize].twin = twin;
        }
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
        pool.name(&blocks, &[10, 11, 12]);
        // The tail is released first, so it is evicted first.
        pool.release(&mut blocks.clone());
        pool.share(blocks[2]);
        pool.release(&mut vec![blocks[2]]);
        pool.take(&mut log).unwrap();
        assert_eq!(
            (&log.events[..], &log.hashes[..]),
            (&[KvEvent::Removed { tier: Tier::Gpu, hashes: 0..1 }][..], &[11][..])
        );
        let found = [10, 11, 12].map(|hash| pool.find(&[hash]).next());
        assert_eq!(found, [Some(blocks[0]), None, Some(blocks[2])]);
        assert_eq!(pool.find(&[10, 11, 12]).count(), 1);
    }

    #[test]
    fn a_block_in_use_stays_and_an_empty_one_goes_first() {
        let (mut pool, mut log) = (BlockPool::new(2), log());
        let (a, b) = (pool.take(&mut log).unwrap(), pool.take(&mut log).unwrap());
        pool.name(&[a], &[1]);
        pool.share(a);
        pool.release(&mut vec![a]);
        assert!(pool.in_use(a));
        pool.release(&mut vec![a]);
        pool.release(&mut vec![b]);
        assert_eq!((pool.take(&mut log), pool.free()), (Some(b), 1));
        assert!(log.events.is_empty());
    }

    #[test]
    fn every_copy_of_a_block_is_found_until_the_last_is_gone() {
        let (mut pool, mut log) = (BlockPool::new(3), log());
        let blocks: Vec<u32> = (0..3).map(|_| pool.take(&mut log).unwrap()).collect();
        pool.name(&blocks, &[7; 3]);
        // Taken in this order: the middle of the list of twins, then its head, then the last copy.
        [1, 2, 0].iter().for_each(|&i: &usize| pool.release(&mut vec![blocks[i]]));
        for copies_left in [2, 1, 0] {
            pool.take(&mut log).unwrap();
            assert_eq!(pool.find(&[7]).next().is_some(), copies_left > 0);
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
        pool.name(&[block], &[7]);
        assert!(!pool.clear());
        pool.release(&mut vec![block]);
        assert!(pool.clear() && pool.find(&[7]).next().is_none());
    }
}
