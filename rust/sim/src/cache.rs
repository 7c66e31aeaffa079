//! The prefix cache of an engine that reserves: whole prompts enter, least recently used blocks
//! leave.
//!
//! A prompt's blocks are always touched together, the first as the most recently used. So a block
//! is never older than the blocks behind it, and the cache always holds the front of a prompt.
//! Blocks touched by the same prompts leave from the last to the first; the cache keeps them as one
//! *run*. An operation costs runs, not blocks, and a prompt has only a few runs. (If blocks
//! have users, as in vLLM, runs have users and copies: see `pool`.)
use crate::events::KvLog;
use crate::hash::ChainHasher;
use hashbrown::HashMap;
use lmetric_core::kv::tier::Tier;
use std::hash::BuildHasherDefault;

/// A prefix cache of a fixed number of blocks, with a list of runs from the least to the most
/// recently used.
#[derive(Clone, Debug)]
pub struct PrefixCache {
    /// The first entry closes the list to a ring: its `newer` is the oldest run, its `older` the
    /// newest.
    runs: Vec<Run>,
    vacant: Vec<u32>,
    /// Runs by their first block. Hashes are chained, so a block's hash covers all blocks before
    /// it.
    by_first: HashMap<u64, u32, BuildHasherDefault<ChainHasher>>,
    capacity: usize,
    /// The tier whose removals it reports.
    tier: Tier,
    held: usize,
    /// The runs of the current prompt.
    path: Vec<u32>,
}

#[derive(Clone, Debug, Default)]
struct Run {
    hashes: Vec<u64>,
    older: u32,
    newer: u32,
}

const RING: u32 = 0;

impl PrefixCache {
    /// An empty cache of `capacity` blocks in a tier.
    pub fn new(capacity: u32, tier: Tier) -> PrefixCache {
        PrefixCache {
            runs: vec![Run::default()],
            vacant: Vec::new(),
            by_first: HashMap::default(),
            capacity: capacity as usize,
            tier,
            held: 0,
            path: Vec::new(),
        }
    }

    /// Returns the number of blocks at the front of the chain that the cache holds.
    pub fn find(&self, chain: &[u64]) -> usize {
        let mut found = 0;
        while let Some((_, equal, whole)) = self.next_run(&chain[found..]) {
            found += equal;
            if !whole {
                break;
            }
        }
        found
    }

    /// Makes the held blocks of the chain the most recently used. Returns their number.
    pub fn touch(&mut self, chain: &[u64]) -> usize {
        let found = self.walk(chain);
        self.renew();
        found
    }

    /// Inserts all blocks of the chain (its front, if the capacity is smaller) as the most recently
    /// used. Returns the number of blocks held before, and the number held now.
    pub fn insert(&mut self, chain: &[u64], log: &mut KvLog) -> (usize, usize) {
        let chain = &chain[..chain.len().min(self.capacity)];
        let found = self.touch(chain);
        let new = &chain[found..];
        if !new.is_empty() {
            self.make_room(new.len(), log);
            self.held += new.len();
            let run = self.add(new.iter().copied());
            self.link_older(RING, run);
            self.renew();
        }
        (found, chain.len())
    }

    /// Empties the cache.
    pub fn clear(&mut self) {
        *self = PrefixCache::new(self.capacity as u32, self.tier);
    }

    /// Returns the run at the chain's begin, the number of its equal blocks, and whether the whole
    /// run is equal.
    fn next_run(&self, chain: &[u64]) -> Option<(u32, usize, bool)> {
        let run = *self.by_first.get(chain.first()?)?;
        let hashes = &self.runs[run as usize].hashes;
        let equal = hashes.iter().zip(chain).take_while(|(a, b)| a == b).count();
        Some((run, equal, equal == hashes.len()))
    }

    /// Records the runs of the held blocks of the chain. Cuts the last run if the chain leaves it.
    fn walk(&mut self, chain: &[u64]) -> usize {
        self.path.clear();
        let mut found = 0;
        while let Some((run, equal, whole)) = self.next_run(&chain[found..]) {
            found += equal;
            self.path.push(run);
            if !whole {
                let rest = self.runs[run as usize].hashes.split_off(equal);
                let rest = self.add(rest.into_iter());
                self.link_older(run, rest);
                break;
            }
        }
        found
    }

    /// Makes the recorded runs the most recently used, the first run the most.
    fn renew(&mut self) {
        for i in (0..self.path.len()).rev() {
            let run = self.path[i];
            self.unlink(run);
            self.link_older(RING, run);
        }
    }

    fn make_room(&mut self, blocks: usize, log: &mut KvLog) {
        while self.held + blocks > self.capacity {
            let oldest = self.runs[RING as usize].newer;
            let hashes = &mut self.runs[oldest as usize].hashes;
            let stay = hashes.len().saturating_sub(self.held + blocks - self.capacity);
            self.held -= hashes.len() - stay;
            hashes[stay..].iter().rev().for_each(|&hash| log.removed(self.tier, hash));
            if stay > 0 {
                hashes.truncate(stay);
            } else {
                self.by_first.remove(&hashes[0]);
                hashes.clear();
                self.unlink(oldest);
                self.vacant.push(oldest);
            }
        }
    }

    /// Adds a run that is not in the list yet.
    fn add(&mut self, hashes: impl ExactSizeIterator<Item = u64>) -> u32 {
        let run = self.vacant.pop().unwrap_or_else(|| {
            self.runs.push(Run::default());
            self.runs.len() as u32 - 1
        });
        self.runs[run as usize].hashes.extend(hashes);
        self.by_first.insert(self.runs[run as usize].hashes[0], run);
        run
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::events::KvEvent;
    use proptest::prelude::*;

    /// A cache of single blocks: hashes from the least to the most recently used.
    #[derive(Default)]
    struct Naive {
        blocks: Vec<u64>,
        capacity: usize,
    }

    impl Naive {
        fn find(&self, chain: &[u64]) -> usize {
            chain.iter().take_while(|hash| self.blocks.contains(hash)).count()
        }

        fn touch(&mut self, chain: &[u64]) -> usize {
            let found = self.find(chain);
            self.blocks.retain(|hash| !chain[..found].contains(hash));
            self.blocks.extend(chain[..found].iter().rev());
            found
        }

        fn insert(&mut self, chain: &[u64]) -> Vec<u64> {
            let chain = &chain[..chain.len().min(self.capacity)];
            let found = self.touch(chain);
            let out = (self.blocks.len() + chain.len() - found).saturating_sub(self.capacity);
            let removed = self.blocks.drain(..out).collect();
            self.blocks.extend(chain[found..].iter().rev());
            self.touch(chain);
            removed
        }
    }

    /// A chain of a family whose members differ from `fork` on.
    fn chain(family: u64, fork: u64, member: u64, length: u64) -> Vec<u64> {
        let hash = |i| {
            if i < fork { family * 1000 + i } else { 100_000 + (family * 9 + member) * 1000 + fork * 50 + i }
        };
        (0..length).map(hash).collect()
    }

    proptest! {
        #[test]
        fn runs_do_what_single_blocks_would(
            capacity in 1u32..60,
            steps in prop::collection::vec((any::<bool>(), 0u64..3, 0u64..20, 0u64..3, 1u64..40), 1..80),
        ) {
            let mut cache = PrefixCache::new(capacity, Tier::Gpu);
            let mut naive = Naive { capacity: capacity as usize, ..Naive::default() };
            let mut log = KvLog { on: true, ..KvLog::default() };
            for (insert, family, fork, member, length) in steps {
                let chain = chain(family, fork, member, length);
                prop_assert_eq!(cache.find(&chain), naive.find(&chain));
                log.clear();
                if insert {
                    let found = naive.find(&chain[..chain.len().min(capacity as usize)]);
                    let kept = chain.len().min(capacity as usize);
                    let removed = naive.insert(&chain);
                    prop_assert_eq!(cache.insert(&chain, &mut log), (found, kept));
                    prop_assert_eq!(&log.hashes, &removed);
                    prop_assert_eq!(log.events.len(), usize::from(!removed.is_empty()));
                    let all_removals = log.events.iter().all(|e| matches!(e, KvEvent::Removed { .. }));
                    prop_assert!(all_removals);
                } else {
                    prop_assert_eq!(cache.touch(&chain), naive.touch(&chain));
                }
                prop_assert_eq!(cache.held, naive.blocks.len());
                let runs: usize = cache.by_first.values().map(|&run| cache.runs[run as usize].hashes.len()).sum();
                prop_assert_eq!(runs, cache.held);
            }
        }
    }
}
