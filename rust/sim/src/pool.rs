//! The KV blocks of one engine: their users, their contents, and their order of eviction.
//!
//! As in vLLM, a block in use is pinned. A free one waits in a queue, least recently used first,
//! and can be found by its hash until it is taken for something else. A request's blocks are found,
//! named and released together, so the pool keeps *runs*: consecutive blocks of a chain with the
//! same users, whose tail is evicted first. An operation costs runs, not blocks.
//!
//! Two requests may compute one block at the same time. Copies of a block are in runs of equal
//! blocks; where one of them is cut, all are. The newest copy is found.
//!
//! Hashes are chained, and a request holds all blocks before those that it names. So the pool has a
//! block only if it has the blocks before it, and a run ends where the blocks of any request end.
use crate::events::KvLog;
use crate::hash::ChainHasher;
use hashbrown::HashMap;
use lmetric_core::kv::tier::Tier;
use std::hash::BuildHasherDefault;

/// A fixed number of blocks.
#[derive(Clone, Debug)]
pub struct BlockPool {
    /// The first entry closes the queue of free runs to a ring: its `newer` is the oldest run, its
    /// `older` the newest.
    runs: Vec<Run>,
    vacant: Vec<u32>,
    /// Runs by their first block: of several copies, the newest.
    by_first: HashMap<u64, u32, BuildHasherDefault<ChainHasher>>,
    capacity: u32,
    /// Free blocks without a hash: they are taken first.
    empty: u32,
    /// All free blocks.
    free: u32,
    /// The runs of the request that releases them.
    released: Vec<u32>,
}

#[derive(Clone, Debug, Default)]
struct Run {
    hashes: Vec<u64>,
    users: u32,
    /// The next older copy of the same blocks, or none.
    twin: u32,
    /// If it was cut, the run with the blocks behind the cut. Only users that had the whole run
    /// follow it: without them, that run may be gone.
    rest: u32,
    older: u32,
    newer: u32,
}

const RING: u32 = 0;
/// No run: the ring is never a copy.
const NONE: u32 = RING;

/// Leading blocks of a run, and of the runs that were cut off it since.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    run: u32,
    /// Number of blocks.
    pub blocks: u32,
}

/// The blocks of a request: first those with a hash, then those without.
#[derive(Clone, Debug, Default)]
pub struct Held {
    pieces: Vec<Piece>,
    named: u32,
    unnamed: u32,
    /// Whether the request has named the last piece itself, so that the run may get longer.
    own: bool,
}

impl Held {
    /// Returns the number of blocks.
    pub fn len(&self) -> usize {
        (self.named + self.unnamed) as usize
    }

    /// Whether the request has no block.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the number of leading blocks with a hash.
    pub fn named(&self) -> usize {
        self.named as usize
    }

    fn push(&mut self, piece: Piece, own: bool) {
        self.pieces.push(piece);
        self.named += piece.blocks;
        self.own = own;
    }
}

impl BlockPool {
    /// Makes a pool of `capacity` empty blocks.
    pub fn new(capacity: u32) -> BlockPool {
        BlockPool {
            runs: vec![Run::default()],
            vacant: Vec::new(),
            by_first: HashMap::default(),
            capacity,
            empty: capacity,
            free: capacity,
            released: Vec::new(),
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

    /// Returns the blocks with these hashes, up to the first that is missing. They are valid until
    /// the pool changes.
    pub fn find<'a>(&'a self, chain: &'a [u64]) -> impl Iterator<Item = Piece> + 'a {
        let mut rest = chain;
        std::iter::from_fn(move || {
            let run = *self.by_first.get(rest.first()?)?;
            let equal = equal_blocks(&self.runs[run as usize].hashes, rest);
            // Other runs may begin behind any block of this one.
            rest = &rest[equal..];
            Some(Piece { run, blocks: equal as u32 })
        })
    }

    /// Returns how many of the blocks found are free.
    pub fn free_among(&self, found: &[Piece]) -> u32 {
        let free = found.iter().filter(|piece| self.runs[piece.run as usize].users == 0);
        free.map(|piece| piece.blocks).sum()
    }

    /// Returns how many of a request's blocks no other request uses, without those found.
    pub fn own_blocks(&self, held: &Held, found: &[Piece]) -> u32 {
        let mut own = held.unnamed;
        for piece in &held.pieces {
            self.each_run(*piece, |run| {
                let Run { users, hashes, .. } = &self.runs[run as usize];
                let among = found.iter().find(|piece| piece.run == run).map_or(0, |piece| piece.blocks);
                own += if *users > 1 { 0 } else { hashes.len() as u32 - among };
            });
        }
        own
    }

    /// Gives a request the blocks that were found for it.
    pub fn share(&mut self, found: &[Piece], held: &mut Held) {
        for piece in found {
            if (piece.blocks as usize) < self.runs[piece.run as usize].hashes.len() {
                self.cut(piece.run, piece.blocks as usize);
            }
            if self.runs[piece.run as usize].users == 0 {
                self.free -= piece.blocks;
                self.unlink(piece.run);
            }
            self.runs[piece.run as usize].users += 1;
            held.push(*piece, false);
        }
    }

    /// Gives a request up to this many free blocks, the least recently used, and drops their
    /// contents. Returns their number: 0 if every block is in use.
    pub fn take(&mut self, blocks: u32, held: &mut Held, log: &mut KvLog) -> u32 {
        let taken = blocks.min(self.free);
        let empty = taken.min(self.empty);
        let mut left = taken - empty;
        while left > 0 {
            left -= self.evict(left, log);
        }
        self.empty -= empty;
        self.free -= taken;
        held.unnamed += taken;
        taken
    }

    /// Drops the least recently used blocks, up to `most` of one run. Returns their number.
    fn evict(&mut self, most: u32, log: &mut KvLog) -> u32 {
        let oldest = self.runs[RING as usize].newer;
        let run = &self.runs[oldest as usize];
        let stay = run.hashes.len().saturating_sub(most as usize);
        let out = run.hashes.len() - stay;
        run.hashes[stay..].iter().rev().for_each(|&hash| log.removed(Tier::Gpu, hash));
        if stay == 0 {
            self.drop_run(oldest);
        } else if self.is_single(oldest) {
            self.runs[oldest as usize].hashes.truncate(stay);
        } else {
            let newest = self.by_first[&self.runs[oldest as usize].hashes[0]];
            self.cut(newest, stay);
            self.drop_run(self.runs[oldest as usize].rest);
        }
        out as u32
    }

    /// Names the first blocks of a request that have no hash.
    pub fn name(&mut self, held: &mut Held, hashes: &[u64]) {
        let mut left = hashes;
        held.unnamed -= hashes.len() as u32;
        while let Some(&first) = left.first() {
            let Some(&twin) = self.by_first.get(&first) else {
                return self.name_new(held, left);
            };
            let whole = self.runs[twin as usize].hashes.len();
            let equal = equal_blocks(&self.runs[twin as usize].hashes, left);
            if equal < whole {
                self.cut(twin, equal);
            }
            let run = self.add(left[..equal].to_vec(), 1);
            self.runs[run as usize].twin = twin;
            self.by_first.insert(first, run);
            held.push(Piece { run, blocks: equal as u32 }, true);
            left = &left[equal..];
        }
    }

    /// Names blocks without a copy in the pool.
    fn name_new(&mut self, held: &mut Held, hashes: &[u64]) {
        let blocks = hashes.len() as u32;
        if let Some(last) = held.pieces.last_mut().filter(|_| held.own) {
            let run = &self.runs[last.run as usize];
            if run.users == 1 && run.hashes.len() == last.blocks as usize && self.is_single(last.run) {
                self.runs[last.run as usize].hashes.extend_from_slice(hashes);
                last.blocks += blocks;
                held.named += blocks;
                return;
            }
        }
        let run = self.add(hashes.to_vec(), 1);
        self.by_first.insert(hashes[0], run);
        held.push(Piece { run, blocks }, true);
    }

    /// Takes all blocks from a request, the last first. Blocks without users are evicted last, or
    /// first if they have no hash.
    pub fn release(&mut self, held: &mut Held) {
        let mut released = std::mem::take(&mut self.released);
        for piece in held.pieces.drain(..) {
            self.each_run(piece, |run| released.push(run));
        }
        self.empty += held.unnamed;
        self.free += held.unnamed;
        (held.named, held.unnamed, held.own) = (0, 0, false);
        // Neighbors without users and copies become one run.
        let mut front = NONE;
        for run in &mut released {
            let Run { users, hashes, .. } = &mut self.runs[*run as usize];
            *users -= 1;
            if *users > 0 {
                (front, *run) = (NONE, NONE);
                continue;
            }
            self.free += hashes.len() as u32;
            let single = self.is_single(*run);
            if single && front != NONE {
                let back = std::mem::replace(run, NONE);
                let hashes = std::mem::take(&mut self.runs[back as usize].hashes);
                self.by_first.remove(&hashes[0]);
                self.runs[front as usize].hashes.extend(hashes);
                self.vacant.push(back);
            } else {
                front = if single { *run } else { NONE };
            }
        }
        for run in released.drain(..).rev().filter(|&run| run != NONE) {
            self.link_older(RING, run);
        }
        self.released = released;
    }

    /// Empties all blocks. Returns false and does nothing while any block is in use.
    pub fn clear(&mut self) -> bool {
        let idle = self.free == self.capacity;
        if idle {
            *self = BlockPool::new(self.capacity);
        }
        idle
    }

    /// Calls `each` with the runs of a piece that a request holds, in order.
    fn each_run(&self, piece: Piece, mut each: impl FnMut(u32)) {
        let Piece { mut run, blocks } = piece;
        let mut left = blocks as usize;
        loop {
            each(run);
            left -= self.runs[run as usize].hashes.len();
            if left == 0 {
                return;
            }
            run = self.runs[run as usize].rest;
        }
    }

    /// Whether no other run has the same blocks.
    fn is_single(&self, run: u32) -> bool {
        let Run { hashes, twin, .. } = &self.runs[run as usize];
        *twin == NONE && self.by_first.get(&hashes[0]) == Some(&run)
    }

    /// Cuts a run and all its older copies behind their first blocks.
    fn cut(&mut self, newest: u32, blocks: usize) {
        let (mut front, mut newer) = (newest, NONE);
        while front != NONE {
            let Run { hashes, users, twin, rest, .. } = &mut self.runs[front as usize];
            let (users, twin, behind) = (*users, *twin, *rest);
            let hashes = hashes.split_off(blocks);
            let first = hashes[0];
            let back = self.add(hashes, users);
            self.runs[back as usize].rest = behind;
            self.runs[front as usize].rest = back;
            if users == 0 {
                self.link_older(front, back);
            }
            if newer == NONE {
                self.by_first.insert(first, back);
            } else {
                self.runs[newer as usize].twin = back;
            }
            (front, newer) = (twin, back);
        }
    }

    /// Removes a run without users.
    fn drop_run(&mut self, run: u32) {
        self.unlink(run);
        let first = std::mem::take(&mut self.runs[run as usize].hashes)[0];
        let (newest, twin) = (self.by_first[&first], self.runs[run as usize].twin);
        if newest != run {
            let mut newer = newest;
            while self.runs[newer as usize].twin != run {
                newer = self.runs[newer as usize].twin;
            }
            self.runs[newer as usize].twin = twin;
        } else if twin != NONE {
            self.by_first.insert(first, twin);
        } else {
            self.by_first.remove(&first);
        }
        self.vacant.push(run);
    }

    /// Adds a run that is not in the queue.
    fn add(&mut self, hashes: Vec<u64>, users: u32) -> u32 {
        let run = Run { hashes, users, ..Run::default() };
        if let Some(vacant) = self.vacant.pop() {
            self.runs[vacant as usize] = run;
            return vacant;
        }
        self.runs.push(run);
        self.runs.len() as u32 - 1
    }

    fn unlink(&mut self, run: u32) {
        let Run { older, newer, .. } = self.runs[run as usize];
        self.runs[older as usize].newer = newer;
        self.runs[newer as usize].older = older;
    }

    /// Links a run right before `newer` (before the ring's start: as the newest).
    fn link_older(&mut self, newer: u32, run: u32) {
        let older = std::mem::replace(&mut self.runs[newer as usize].older, run);
        self.runs[older as usize].newer = run;
        (self.runs[run as usize].older, self.runs[run as usize].newer) = (older, newer);
    }
}

/// Returns the number of leading blocks that are equal.
fn equal_blocks(hashes: &[u64], chain: &[u64]) -> usize {
    let both = hashes.len().min(chain.len());
    // Whole slices are compared several blocks at a time.
    if hashes[..both] == chain[..both] {
        return both;
    }
    hashes.iter().zip(chain).take_while(|(a, b)| a == b).count()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::events::KvEvent;
    use crate::hash;
    use proptest::prelude::*;

    fn log() -> KvLog {
        KvLog { on: true, ..Default::default() }
    }

    fn taken(pool: &mut BlockPool, blocks: u32, log: &mut KvLog) -> Held {
        let mut held = Held::default();
        assert_eq!(pool.take(blocks, &mut held, log), blocks);
        held
    }

    fn found(pool: &BlockPool, chain: &[u64]) -> u32 {
        pool.find(chain).map(|piece| piece.blocks).sum()
    }

    #[test]
    fn the_least_recently_used_block_goes_first() {
        let (mut pool, mut log) = (BlockPool::new(3), log());
        let mut held = taken(&mut pool, 3, &mut log);
        assert_eq!(pool.take(1, &mut Held::default(), &mut log), 0);
        pool.name(&mut held, &[10, 11, 12]);
        // The tail is released first, so it is evicted first.
        pool.release(&mut held);
        taken(&mut pool, 1, &mut log);
        assert_eq!(
            (&log.events[..], &log.hashes[..]),
            (&[KvEvent::Removed { tier: Tier::Gpu, hashes: 0..1 }][..], &[12][..])
        );
        assert_eq!((found(&pool, &[10, 11, 12]), found(&pool, &[12])), (2, 0));
    }

    #[test]
    fn a_block_in_use_stays_and_an_empty_one_goes_first() {
        let (mut pool, mut log) = (BlockPool::new(2), log());
        let (mut a, mut b) = (taken(&mut pool, 1, &mut log), taken(&mut pool, 1, &mut log));
        pool.name(&mut a, &[1]);
        let (mut other, same) = (Held::default(), pool.find(&[1]).collect::<Vec<_>>());
        pool.share(&same, &mut other);
        pool.release(&mut other);
        assert_eq!((pool.free(), pool.free_among(&same)), (0, 0));
        pool.release(&mut a);
        pool.release(&mut b);
        taken(&mut pool, 1, &mut log);
        assert_eq!((found(&pool, &[1]), pool.free()), (1, 1));
        assert!(log.events.is_empty());
    }

    #[test]
    fn every_copy_of_a_block_is_found_until_the_last_is_gone() {
        let (mut pool, mut log) = (BlockPool::new(3), log());
        let mut held: Vec<Held> = (0..3).map(|_| taken(&mut pool, 1, &mut log)).collect();
        held.iter_mut().for_each(|held| pool.name(held, &[7]));
        // Taken in this order: the middle of the list of twins, then its head, then the last copy.
        [1, 2, 0].iter().for_each(|&i: &usize| pool.release(&mut held[i]));
        for copies_left in [2, 1, 0] {
            taken(&mut pool, 1, &mut log);
            assert_eq!(found(&pool, &[7]) > 0, copies_left > 0);
        }
        assert_eq!(
            (&log.events[..], &log.hashes[..]),
            (&[KvEvent::Removed { tier: Tier::Gpu, hashes: 0..3 }][..], &[7; 3][..])
        );
    }

    #[test]
    fn clearing_needs_an_idle_pool() {
        let (mut pool, mut log) = (BlockPool::new(1), log());
        let mut held = taken(&mut pool, 1, &mut log);
        pool.name(&mut held, &[7]);
        assert!(!pool.clear());
        pool.release(&mut held);
        assert!(pool.clear() && found(&pool, &[7]) == 0);
    }

    /// A pool of single blocks: (hash, users) of each.
    #[derive(Default)]
    struct Naive {
        blocks: Vec<(Option<u64>, u32)>,
        empty: Vec<usize>,
        /// Free blocks with a hash, least recently used first.
        queue: Vec<usize>,
        /// Blocks with a hash, in the order in which they got it.
        named: Vec<usize>,
    }

    impl Naive {
        fn new(capacity: usize) -> Naive {
            let (blocks, empty) = (vec![(None, 0); capacity], (0..capacity).collect());
            Naive { blocks, empty, ..Naive::default() }
        }

        fn find(&self, chain: &[u64]) -> Vec<usize> {
            let newest = |hash: &u64| {
                self.named.iter().rev().copied().find(|&block| self.blocks[block].0 == Some(*hash))
            };
            chain.iter().map_while(newest).collect()
        }

        fn share(&mut self, block: usize) {
            self.queue.retain(|&other| other != block);
            self.blocks[block].1 += 1;
        }

        fn take(&mut self, removed: &mut Vec<u64>) -> Option<usize> {
            let block = match self.empty.pop() {
                Some(block) => block,
                None if self.queue.is_empty() => return None,
                None => self.queue.remove(0),
            };
            removed.extend(self.blocks[block].0);
            self.named.retain(|&other| other != block);
            self.blocks[block] = (None, 1);
            Some(block)
        }

        fn name(&mut self, block: usize, hash: u64) {
            self.blocks[block].0 = Some(hash);
            self.named.push(block);
        }

        fn release(&mut self, held: &mut Vec<usize>) {
            while let Some(block) = held.pop() {
                self.blocks[block].1 -= 1;
                match self.blocks[block] {
                    (None, 0) => self.empty.push(block),
                    (_, 0) => self.queue.push(block),
                    _ => {}
                }
            }
        }

        fn free(&self) -> usize {
            self.empty.len() + self.queue.len()
        }
    }

    /// A chain of a family whose members differ from block `5 * fork` on.
    fn chain(family: u64, fork: u64, member: u64) -> Vec<u64> {
        let mut previous = 0;
        // Few forks, so that requests meet again behind them.
        let id = |i| if i < 5 * fork { family } else { 100 + 10 * fork + member };
        (0..40)
            .map(|i| {
                previous = hash::own(previous, id(i));
                previous
            })
            .collect()
    }

    proptest! {
        #[test]
        fn runs_do_what_single_blocks_would(
            capacity in 1u32..150,
            steps in prop::collection::vec((0usize..5, 0u8..4, (0u64..2, 0u64..4, 0u64..2), 0usize..30), 1..120),
        ) {
            let (mut pool, mut naive) = (BlockPool::new(capacity), Naive::new(capacity as usize));
            let mut requests: Vec<(Held, Vec<usize>, Vec<u64>)> = vec![Default::default(); 5];
            for (request, action, (family, fork, member), blocks) in steps {
                let (mut log, mut removed) = (log(), Vec::new());
                let (held, single, hashes) = &mut requests[request];
                if action == 0 {
                    pool.release(held);
                    naive.release(single);
                } else if held.is_empty() {
                    *hashes = chain(family, fork, member);
                    let (runs, alone): (Vec<Piece>, _) =
                        (pool.find(&hashes[..blocks]).collect(), naive.find(&hashes[..blocks]));
                    prop_assert_eq!(runs.iter().map(|piece| piece.blocks as usize).sum::<usize>(), alone.len());
                    let free = alone.iter().filter(|&&block| naive.blocks[block].1 == 0).count();
                    prop_assert_eq!(pool.free_among(&runs) as usize, free);
                    for (held, single, _) in &requests {
                        let own = |&(i, block): &(usize, &usize)| {
                            naive.blocks[*block].1 == 1 && alone.get(i) != Some(block)
                        };
                        let own = single.iter().enumerate().filter(own).count();
                        prop_assert_eq!(pool.own_blocks(held, &runs) as usize, own);
                    }
                    let (held, single, _) = &mut requests[request];
                    pool.share(&runs, held);
                    alone.iter().for_each(|&block| naive.share(block));
                    single.extend(alone);
                    let more: Vec<usize> = (0..blocks).map_while(|_| naive.take(&mut removed)).collect();
                    prop_assert_eq!(pool.take(blocks as u32, held, &mut log) as usize, more.len());
                    single.extend(more);
                } else if action == 1 {
                    // Some of its blocks get a hash.
                    let (from, to) = (held.named(), held.len().min(held.named() + blocks).min(hashes.len()));
                    pool.name(held, &hashes[from..to]);
                    (from..to).for_each(|i| naive.name(single[i], hashes[i]));
                    prop_assert_eq!(held.named(), to);
                } else {
                    let more: Vec<usize> = (0..blocks).map_while(|_| naive.take(&mut removed)).collect();
                    prop_assert_eq!(pool.take(blocks as u32, held, &mut log) as usize, more.len());
                    single.extend(more);
                }
                prop_assert_eq!(&log.hashes, &removed);
                prop_assert_eq!(pool.free() as usize, naive.free());
                for (held, single, _) in &requests {
                    prop_assert_eq!(held.len(), single.len());
                }
            }
        }
    }
}
