//! The blocks of a pool by the hashes of their contents.
use lmetric_core::kv::prefetch;
use std::hash::Hasher;

/// No block.
pub const NONE: u32 = u32::MAX;

/// A table of blocks by hash, at most half full. The caller can prefetch what it will read: chains
/// are long, and a lookup waits for memory most of its time. An agent trace takes 20 to 35% longer
/// with hashbrown's table, which has no prefetch, or with the index's, which keeps entries sorted.
#[derive(Clone, Debug)]
pub struct Names {
    /// A block stands in its own slot, or in the next empty slot behind it. The length is a power
    /// of two.
    slots: Vec<Slot>,
    shift: u32,
}

/// The first 32 bits of the spread hash, and the block plus 1. The first bits select the slot.
type Slot = [u32; 2];

/// Zeros, so that a new table takes no memory before its use: an engine has hundreds of thousands
/// of blocks, and a short simulation uses few of them.
const EMPTY: Slot = [0, 0];

impl Names {
    /// An empty table for `capacity` blocks.
    pub fn new(capacity: u32) -> Names {
        let length = (2 * u64::from(capacity)).next_power_of_two().max(2);
        Names { slots: vec![EMPTY; length as usize], shift: 32 - length.ilog2().min(32) }
    }

    /// Prefetches the slot of a hash.
    #[inline]
    pub fn prefetch(&self, hash: u64) {
        prefetch(&raw const self.slots[self.home(place(hash))]);
    }

    /// The first block that may have the hash.
    #[inline]
    pub fn first(&self, hash: u64) -> Option<u32> {
        self.find(hash, |_| true)
    }

    /// Returns the block of the hash, for which `is` is true.
    #[inline]
    pub fn find(&self, hash: u64, is: impl Fn(u32) -> bool) -> Option<u32> {
        self.position(hash, is).map(|at| self.slots[at][1] - 1)
    }

    /// Adds a block whose hash no other block has.
    pub fn insert(&mut self, hash: u64, block: u32) {
        let place = place(hash);
        let mut at = self.home(place);
        while self.slots[at] != EMPTY {
            at = self.behind(at);
        }
        self.slots[at] = [place, block + 1];
    }

    /// Gives the place of a block to another one with the same hash. Returns false if the block has
    /// none.
    pub fn replace(&mut self, hash: u64, block: u32, by: u32) -> bool {
        let at = self.position(hash, |other| other == block);
        if let Some(at) = at {
            self.slots[at][1] = by + 1;
        }
        at.is_some()
    }

    /// Removes a block. Returns false if it is not in the table.
    pub fn remove(&mut self, hash: u64, block: u32) -> bool {
        let Some(mut gap) = self.position(hash, |other| other == block) else { return false };
        let mut at = self.behind(gap);
        while self.slots[at] != EMPTY {
            // An entry may fill the gap if the gap is not in front of the entry's own slot.
            let home = self.home(self.slots[at][0]);
            let mask = self.slots.len() - 1;
            if at.wrapping_sub(home) & mask >= at.wrapping_sub(gap) & mask {
                self.slots[gap] = self.slots[at];
                gap = at;
            }
            at = self.behind(at);
        }
        self.slots[gap] = EMPTY;
        true
    }

    #[inline]
    fn position(&self, hash: u64, is: impl Fn(u32) -> bool) -> Option<usize> {
        let place = place(hash);
        let mut at = self.home(place);
        loop {
            let slot = self.slots[at];
            if slot == EMPTY {
                return None;
            }
            if slot[0] == place && is(slot[1] - 1) {
                return Some(at);
            }
            at = self.behind(at);
        }
    }

    #[inline]
    fn home(&self, place: u32) -> usize {
        (place >> self.shift) as usize
    }

    #[inline]
    fn behind(&self, at: usize) -> usize {
        (at + 1) & (self.slots.len() - 1)
    }
}

#[inline]
fn place(hash: u64) -> u32 {
    (spread(hash) >> 32) as u32
}

/// Spreads a block's hash over all bits. It is a hash already, so one multiplication is enough,
/// whatever its source.
#[inline]
fn spread(hash: u64) -> u64 {
    let wide = u128::from(hash) * 0x9e37_79b9_7f4a_7c15_u128;
    wide as u64 ^ (wide >> 64) as u64
}

/// Hasher of maps by the hashes of blocks.
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
        self.0 = spread(hash);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::HashMap;

    proptest! {
        #[test]
        fn behaves_like_a_map(steps in prop::collection::vec((0u8..4, 0u64..24), 1..400)) {
            let mut names = Names::new(24);
            let mut model: HashMap<u64, u32> = HashMap::new();
            let mut hashes: HashMap<u32, u64> = HashMap::new();
            for (next, (step, hash)) in steps.into_iter().enumerate() {
                let next = next as u32;
                // Hashes in few places: many entries leave their own slot.
                let hash = (hash % 3) << 62 | hash;
                match (step, model.get(&hash).copied()) {
                    (0, Some(block)) => {
                        prop_assert!(names.remove(hash, block));
                        prop_assert!(!names.remove(hash, block));
                        model.remove(&hash);
                    }
                    (1, Some(block)) => {
                        prop_assert!(names.replace(hash, block, next));
                        model.insert(hash, next);
                        hashes.insert(next, hash);
                    }
                    (_, None) => {
                        names.insert(hash, next);
                        model.insert(hash, next);
                        hashes.insert(next, hash);
                    }
                    _ => {}
                }
                for hash in (0..24).map(|h| (h % 3) << 62 | h) {
                    let found = names.find(hash, |block| hashes[&block] == hash);
                    prop_assert_eq!(found, model.get(&hash).copied());
                }
            }
            let used = names.slots.iter().filter(|&&slot| slot != EMPTY).count();
            prop_assert_eq!(used, model.len());
        }
    }
}
