//! Heaviest prefixes, by Space-Saving over a sliding window.
//!
//! Space-Saving (Metwally, Agrawal, El Abbadi 2005) keeps a fixed number of counters. A new key
//! takes over the smallest counter. Here, each counter is a ring of sub-windows, so requests older
//! than the window expire. The count that a new key takes over is kept separately (`inherited`): it
//! determines which class is replaced next, but never counts as observed work. Shares are
//! therefore lower bounds: a class is never estimated hotter than it is.
//!
//! Inherited requests expire by their own time, not by the time of the takeover. Otherwise, the
//! inherited count would grow with every takeover, until the tail replaces heavy classes.
//!
//! A class is heavy by the *work* of its requests: the blocks of their prompts. Engines read a
//! prompt's context at each step of its answer, so requests of 16,000 tokens weigh more than
//! requests of 100.
//!
//! Prefixes nest: a request belongs to one class at each power-of-two depth of its matched part. If
//! each request added all of its classes, long unique prompts would flush the counters. So a
//! request adds at most one new class, the shallowest: a deep class cannot be heavier than the
//! shallow class that contains it.
use hashbrown::HashTable;

/// Number of sub-windows: the sliding window moves in steps of one twelfth.
pub const SUBWINDOWS: usize = 12;

/// Iterates over a prompt's classes: chain hash and depth in blocks, at each power-of-two depth of
/// its first `matched_blocks`.
pub fn classes_of(chain: &[u64], matched_blocks: u32) -> impl Iterator<Item = (u64, u32)> + '_ {
    let blocks = chain.len().min(matched_blocks as usize);
    (0..usize::BITS)
        .map(|k| 1 << k)
        .take_while(move |&depth| depth <= blocks)
        .map(|d: usize| (chain[d - 1], d as u32))
}

/// A counted class.
#[derive(Clone, Debug)]
pub struct Class {
    /// Chain hash of its last block.
    pub hash: u64,
    /// Number of blocks that its requests share.
    pub depth: u32,
    /// The enclosing class at half the depth.
    pub parent: Option<u64>,
    /// Requests observed in the window.
    pub requests: u32,
    /// Work of these requests: the blocks of their prompts.
    pub work: u64,
    ring: [Counts; SUBWINDOWS],
    /// Work of the counter's earlier classes in the window.
    inherited: u64,
    inherited_ring: [u64; SUBWINDOWS],
}

/// Counts of one sub-window.
#[derive(Clone, Copy, Debug, Default)]
struct Counts {
    requests: u32,
    work: u64,
}

impl Counts {
    fn add(&mut self, work: u64) {
        self.requests += 1;
        self.work += work;
    }
}

impl Class {
    /// Returns the replacement rank: the class with the least work is replaced first, the deepest
    /// among equals.
    fn rank(&self) -> u64 {
        (self.work + self.inherited) * ONE_BLOCK + u64::from(self.depth.leading_zeros())
    }
}

/// Rank that each block of work adds to its class: above all ranks of depths.
const ONE_BLOCK: u64 = 64;

/// Returns the work of a prompt in blocks: its context, which an engine reads at each step of the
/// answer. A part of a block counts as a block.
#[inline]
fn work_of(chain: &[u64]) -> u64 {
    chain.len() as u64 + 1
}

/// The heaviest classes of the last window, and the total number of requests.
#[derive(Clone, Debug)]
pub struct HeavyClasses {
    capacity: usize,
    step_seconds: f64,
    classes: Vec<Class>,
    /// One rank per class, contiguous: searching for the lowest rank is most of the cost of a new
    /// entry.
    ranks: Vec<u64>,
    by_hash: HashTable<u16>,
    all: Counts,
    ring: [Counts; SUBWINDOWS],
    step: i64,
    step_ends: f64,
}

impl HeavyClasses {
    /// Counts at most `capacity` classes (1 to 65,535) over `window_seconds`.
    pub fn new(capacity: usize, window_seconds: f64) -> HeavyClasses {
        HeavyClasses {
            capacity,
            step_seconds: window_seconds / SUBWINDOWS as f64,
            classes: Vec::with_capacity(capacity),
            ranks: Vec::with_capacity(capacity),
            by_hash: HashTable::with_capacity(capacity + 1),
            all: Counts::default(),
            ring: [Counts::default(); SUBWINDOWS],
            step: 0,
            step_ends: f64::NEG_INFINITY,
        }
    }

    /// Returns the number of requests in the window.
    pub fn requests(&self) -> u32 {
        self.all.requests
    }

    /// Returns the work of all requests in the window, in blocks.
    pub fn work(&self) -> u64 {
        self.all.work
    }

    /// Returns the counted classes, in no particular order.
    pub fn classes(&self) -> &[Class] {
        &self.classes
    }

    /// Returns the class with that hash, if it is counted.
    #[inline]
    pub fn get(&self, hash: u64) -> Option<&Class> {
        self.find(hash).map(|i| &self.classes[i])
    }

    /// Drops requests older than the window. Time that stands still or runs backwards changes
    /// nothing.
    #[inline]
    pub fn advance(&mut self, now: f64) {
        if now >= self.step_ends {
            self.turn(now);
        }
    }

    #[cold]
    fn turn(&mut self, now: f64) {
        let step = (now / self.step_seconds).floor() as i64;
        if self.step_ends != f64::NEG_INFINITY {
            let passed = (step - self.step).clamp(0, SUBWINDOWS as i64);
            for gone in (step - passed + 1)..=step {
                let at = Self::at(gone);
                let old = std::mem::take(&mut self.ring[at]);
                self.all.requests -= old.requests;
                self.all.work -= old.work;
                for class in &mut self.classes {
                    let old = std::mem::take(&mut class.ring[at]);
                    class.requests -= old.requests;
                    class.work -= old.work;
                    class.inherited -= std::mem::take(&mut class.inherited_ring[at]);
                }
            }
            for (class, rank) in self.classes.iter().zip(&mut self.ranks) {
                *rank = class.rank();
            }
        }
        self.step = step;
        self.step_ends = (step + 1) as f64 * self.step_seconds;
    }

    /// Counts a request in each counted class of its matched part, and in its shallowest uncounted
    /// class.
    pub fn count(&mut self, chain: &[u64], matched_blocks: u32) {
        let at = Self::at(self.step);
        let work = work_of(chain);
        self.all.add(work);
        self.ring[at].add(work);
        let mut parent = None;
        let mut may_enter = true;
        for (hash, depth) in classes_of(chain, matched_blocks) {
            if let Some(i) = self.find(hash) {
                let class = &mut self.classes[i];
                class.requests += 1;
                class.work += work;
                class.ring[at].add(work);
                self.ranks[i] += work * ONE_BLOCK;
            } else if may_enter {
                self.enter(hash, depth, parent, work);
                may_enter = false;
            }
            parent = Some(hash);
        }
    }

    fn enter(&mut self, hash: u64, depth: u32, parent: Option<u64>, work: u64) {
        let mut ring = [Counts::default(); SUBWINDOWS];
        ring[Self::at(self.step)].add(work);
        let (inherited, inherited_ring) = (0, [0; SUBWINDOWS]);
        let mut class = Class { hash, depth, parent, requests: 1, work, ring, inherited, inherited_ring };
        let i = if self.classes.len() < self.capacity {
            self.ranks.push(class.rank());
            self.classes.push(class);
            self.classes.len() - 1
        } else {
            let lowest = self.ranks.iter().enumerate().min_by_key(|(_, rank)| **rank);
            let i = lowest.expect("at least one counter").0;
            let out = &self.classes[i];
            class.inherited = out.work + out.inherited;
            class.inherited_ring = std::array::from_fn(|at| out.ring[at].work + out.inherited_ring[at]);
            let entry = self.by_hash.find_entry(out.hash, |&j| usize::from(j) == i);
            entry.expect("every class is in the table").remove();
            self.ranks[i] = class.rank();
            self.classes[i] = class;
            i
        };
        let classes = &self.classes;
        self.by_hash.insert_unique(hash, i as u16, |&j| classes[usize::from(j)].hash);
    }

    #[inline]
    fn find(&self, hash: u64) -> Option<usize> {
        self.by_hash.find(hash, |&i| self.classes[usize::from(i)].hash == hash).map(|&i| usize::from(i))
    }

    fn at(step: i64) -> usize {
        step.rem_euclid(SUBWINDOWS as i64) as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::guard::testing::prompt;
    use proptest::prelude::*;
    use std::collections::HashMap;

    proptest! {
        /// Compared with an exact list: the total is exact, and a class counts all requests since
        /// it was last added, however often it was replaced before.
        #[test]
        fn counts_are_those_of_the_window_or_less(
            capacity in 1usize..6,
            requests in prop::collection::vec((0.0..9.0f64, 1u64..6, 1usize..5), 1..200),
        ) {
            let mut heavy = HeavyClasses::new(capacity, 12.0);
            let (mut now, mut seen, mut entered) = (0.0, Vec::new(), HashMap::new());
            for (gap, id, blocks) in requests {
                now += gap * gap / 20.0;
                heavy.advance(now);
                let chain = prompt(id, 1, blocks);
                heavy.count(&chain, blocks as u32);
                seen.push((now.floor(), chain));
                let recent = |from: usize| seen[from..].iter().filter(|(at, _)| *at > now.floor() - 12.0);
                prop_assert_eq!(heavy.requests() as usize, recent(0).count());
                prop_assert_eq!(heavy.work(), recent(0).map(|(_, c)| work_of(c)).sum::<u64>());
                entered.retain(|hash, _| heavy.get(*hash).is_some());
                let ranks: Vec<_> = heavy.classes().iter().map(Class::rank).collect();
                prop_assert_eq!(&ranks, &heavy.ranks);
                for class in heavy.classes() {
                    let from = *entered.entry(class.hash).or_insert(seen.len() - 1);
                    let is_in = |chain: &Vec<u64>| chain.get(class.depth as usize - 1) == Some(&class.hash);
                    prop_assert_eq!(class.requests as usize, recent(from).filter(|(_, c)| is_in(c)).count());
                    let work: u64 = recent(from).filter(|(_, c)| is_in(c)).map(|(_, c)| work_of(c)).sum();
                    prop_assert_eq!(class.work, work);
                }
            }
        }
    }

    #[test]
    fn classes_lie_at_powers_of_two_of_the_matched_part() {
        let chain: Vec<u64> = (100..120).collect();
        let of = |matched| classes_of(&chain, matched).collect::<Vec<_>>();
        assert_eq!(of(0), []);
        assert_eq!(of(1), [(100, 1)]);
        assert_eq!(of(7), [(100, 1), (101, 2), (103, 4)]);
        assert_eq!(of(8), [(100, 1), (101, 2), (103, 4), (107, 8)]);
        assert_eq!(of(1000).last(), Some(&(115, 16)), "no deeper than the chain");
    }

    #[test]
    fn the_window_slides() {
        let mut heavy = HeavyClasses::new(4, 60.0);
        for second in 0..120 {
            heavy.advance(f64::from(second));
            heavy.count(&[7], 1);
            let in_window = (second % 5 + 1) + 5 * (second / 5).min(11);
            assert_eq!(
                (heavy.requests(), heavy.get(7).unwrap().requests),
                (in_window as u32, in_window as u32)
            );
        }
        heavy.advance(50.0);
        assert_eq!(heavy.requests(), 60, "time that runs back is ignored");
        heavy.advance(1e6);
        assert_eq!((heavy.requests(), heavy.get(7).unwrap().requests), (0, 0));
    }

    #[test]
    fn a_class_is_found_among_a_long_unique_tail_and_never_overcounted() {
        let mut heavy = HeavyClasses::new(64, 60.0);
        heavy.advance(0.0);
        let hot = prompt(1, 2048, 2048);
        for i in 0..10_000 {
            if i % 20 == 0 {
                heavy.count(&hot, 2048);
            } else {
                heavy.count(&prompt(1000 + i, 1, 2048), 2048); // shares block 0 with all
            }
        }
        assert_eq!(heavy.get(hot[0]).unwrap().requests, 10_000);
        let deepest = heavy.get(hot[2047]).expect("5% of requests is heavy");
        assert!((450..=500).contains(&deepest.requests), "{}", deepest.requests);
        assert_eq!((deepest.depth, deepest.parent), (2048, Some(hot[1023])));
        assert_eq!(heavy.classes().len(), 64);
        let tail = heavy.classes().iter().filter(|c| !hot.contains(&c.hash));
        assert!(tail.clone().count() > 0 && tail.clone().all(|c| c.requests == 1), "lower bounds");
    }

    #[test]
    fn a_heavy_class_stays_while_the_tail_changes_for_many_windows() {
        let mut heavy = HeavyClasses::new(64, 15.0);
        let mut least = u32::MAX;
        for i in 0..60_000 {
            heavy.advance(i as f64 / 100.0);
            heavy.count(&[if i % 5 == 0 { 7 } else { 1000 + i }], 1);
            if i > 6000 {
                least = least.min(heavy.get(7).map_or(0, |class| class.requests));
            }
        }
        // A window has 1,500 requests, less at most one sub-window.
        assert!(least >= 250, "{least}");
        // The smallest counter has at most its part of the window's work.
        let smallest = heavy.classes().iter().map(|class| class.work + class.inherited).min();
        assert!(smallest.unwrap() <= heavy.work() / 64, "{smallest:?} of {}", heavy.work());
    }

    #[test]
    fn what_was_inherited_ends_with_the_window() {
        let mut heavy = HeavyClasses::new(1, 60.0);
        heavy.advance(0.0);
        (0..9).for_each(|_| heavy.count(&[1], 1));
        heavy.count(&[2], 1);
        // Work of a chain of one block: the block and a part of the next.
        assert_eq!((heavy.classes()[0].requests, heavy.classes()[0].inherited), (1, 18));
        heavy.advance(59.0);
        assert_eq!(heavy.classes()[0].inherited, 18);
        heavy.advance(60.0);
        assert_eq!((heavy.classes()[0].requests, heavy.classes()[0].inherited), (0, 0));
    }
}
