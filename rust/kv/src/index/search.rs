//! Search for the positions along a chain at which the set of holders changes.
//!
//! Without holes, sets only shrink along a chain, so equal counts mean equal sets. The search finds
//! the ends of runs of equal sets by cutting ranges into eighths, with all probes of a round
//! prefetched together. A probe reads one cache line of the table, which stores small counts beside
//! the node's number. Nodes and sets are read only at the ends of runs. Each node stores where its
//! run began when the node was created. That guess is checked first and mostly correct.
//!
//! A hole cuts the chain: sets shrink up to it and again from the block after it. An instance's
//! depth ends at its first missing block.
use super::cells::{BORN, Id};
use super::part::{NodeSlot, PART, Part};
use crate::table::Key;

/// Number of parts that a range is cut into.
const WAYS: usize = 8;
const GROUPS: usize = PART / 64;

impl Part {
    /// Returns whether an instance may hold a prefix of the chain.
    pub(super) fn may_match(&self, chain: &[u64]) -> bool {
        chain.first().is_some_and(|first| self.probe(self.table.key(*first)).is_some())
    }

    /// Writes the number of leading blocks of `chain` that each instance holds to
    /// `hit_blocks[instance]`. `guess`: the end of the longest prefix, if the caller can guess it.
    /// Returns the least number of blocks above 0 that an instance holds; 0 if it is not known.
    pub(super) fn search(&self, chain: &[u64], guess: usize, hit_blocks: &mut [u32]) -> usize {
        let mut known = [0u64; GROUPS];
        let mut shortest = 0;
        if chain.is_empty() || self.holes.as_ref().is_some_and(|h| !h.is_empty()) {
            hit_blocks.fill(0);
            self.search_with_holes(chain, hit_blocks);
            return 0;
        }
        self.runs(chain, (0, chain.len()), guess, |depth, group, bits| {
            let first = known[group] == 0;
            let new = bits & !known[group];
            known[group] |= bits;
            shortest = depth;
            write_depth(hit_blocks, group, new, depth as u32, first);
        });
        // A group is cleared with its first holder: a large fleet's depths are written once.
        let known = known.into_iter().chain(std::iter::repeat(0)); // more slots than a part has
        for (hits, _) in hit_blocks.chunks_mut(64).zip(known).filter(|(_, known)| *known == 0) {
            hits.fill(0);
        }
        shortest
    }

    fn search_with_holes(&self, chain: &[u64], hit_blocks: &mut [u32]) {
        let Some(holes) = &self.holes else { return };
        let mut alive = [u64::MAX; GROUPS];
        let mut from = 0;
        while from < chain.len() {
            let candidate = |&d: &usize| holes.may_be(d, chain[d]) && self.is_hole_or_end(chain[d]);
            let to = (from..chain.len()).find(candidate).map_or(chain.len(), |d| d + 1);
            let mut known = [0u64; GROUPS];
            let mut whole = [0u64; GROUPS];
            self.runs(chain, (from, to), 0, |depth, group, bits| {
                let new = bits & alive[group] & !known[group];
                known[group] |= bits;
                for_each_bit(new, |bit| {
                    if let Some(hit) = hit_blocks.get_mut(group * 64 + bit) {
                        *hit = depth as u32;
                    }
                });
                if depth == to {
                    whole[group] |= new;
                }
            });
            if whole == [0; GROUPS] {
                return;
            }
            alive = whole;
            from = to;
        }
    }

    /// Returns whether the block is a hole on some instance, or absent, so that nothing behind it
    /// is present.
    fn is_hole_or_end(&self, hash: u64) -> bool {
        self.find(hash).is_none_or(|node| self.cells.has_hole(node))
    }

    /// Calls `each` with (blocks, group, bits of the holders of the first `blocks` blocks), deepest
    /// run first. In `from..to`, sets must only shrink. `guess`: where the deepest run may end.
    fn runs(
        &self,
        chain: &[u64],
        (from, to): (usize, usize),
        guess: usize,
        mut each: impl FnMut(usize, usize, u64),
    ) {
        // Needed later in any case, so it is prefetched now.
        self.table.prefetch(self.table.key(chain[from]));
        let mut end = self.matched(chain, (from, to), guess);
        while end > from {
            let Some(node) = self.find(chain[end - 1]) else { return };
            self.cells.for_each_group(node, |group, bits| each(end, group, bits));
            // `min`: each round must get shorter, even with wrong counts.
            end = self.run_start(chain, from, end - 1, node).min(end - 1);
        }
    }

    /// Returns the first position of `from..to` without holders (`to` if there is none). `guess` is
    /// tried first.
    fn matched(&self, chain: &[u64], (from, to): (usize, usize), guess: usize) -> usize {
        let may_hold = |key, _| self.probe(key).is_some_and(|s| s.holders() != 0);
        let (mut low, mut high) = (from, to);
        if from < guess && guess < to {
            let keys = [guess - 1, guess].map(|at| self.table.key(chain[at]));
            keys.iter().for_each(|key| self.table.prefetch(*key));
            match keys.map(|key| may_hold(key, 0)) {
                [false, _] => high = guess - 1,
                [true, false] => (low, high) = (guess, guess),
                [true, true] => low = guess + 1,
            }
        }
        let end = self.bisect(chain, low, high, may_hold);
        // Places have 32 bits, so an absent block may have matched another block's place, but then
        // only as the last block.
        if end == from || self.find(chain[end - 1]).is_some() {
            return end;
        }
        self.bisect(chain, from, to, |key, hash| {
            self.find_at(key, hash).is_some_and(|n| self.cells.holders(n) > 0)
        })
    }

    /// Returns the first position of `from..=last` whose block has as many holders as the block at
    /// `last`, which is `node`.
    fn run_start(&self, chain: &[u64], from: usize, last: usize, node: Id) -> usize {
        let count = self.cells.holders(node);
        let born = (self.cells[node].0[BORN] as usize).clamp(from, last);
        let guesses = [from, born, born.saturating_sub(1)].map(|at| self.table.key(chain[at]));
        guesses.iter().for_each(|k| self.table.prefetch(*k));
        if self.has_count(guesses[0], chain[from], count) {
            return from;
        }
        // The position is not `from`, so there is a block before `born` unless the guess is `from`
        // itself.
        let (low, high) = if !self.has_count(guesses[1], chain[born], count) {
            (born + 1, last)
        } else if !self.has_count(guesses[2], chain[born - 1], count) {
            return born;
        } else {
            (from + 1, born - 1)
        };
        self.bisect(chain, low, high, |key, hash| !self.has_count(key, hash, count))
    }

    /// Returns the number of leading blocks of the chain that the instance holds.
    pub(super) fn held(&self, chain: &[u64], instance: u32) -> usize {
        let holds = |key, hash| self.find_at(key, hash).is_some_and(|n| self.cells.holds(n, instance));
        if self.books[instance as usize].holes > 0 {
            return chain.iter().take_while(|h| holds(self.table.key(**h), **h)).count();
        }
        self.bisect(chain, 0, chain.len(), holds)
    }

    /// Returns the first position of `low..high` at which `before` is false (`high` if there is
    /// none). `before` must be true up to that position and false from there.
    #[inline(always)]
    fn bisect(
        &self,
        chain: &[u64],
        mut low: usize,
        mut high: usize,
        before: impl Fn(Key, u64) -> bool,
    ) -> usize {
        while low < high {
            let probes = (high - low).min(WAYS - 1);
            let (start, span) = (low, high - low);
            let at = |i: usize| start + span * (i + 1) / (probes + 1);
            let mut keys = [Key::default(); WAYS - 1];
            for (i, key) in keys[..probes].iter_mut().enumerate() {
                *key = self.table.key(chain[at(i)]);
                self.table.prefetch(*key);
            }
            for (i, key) in keys[..probes].iter().enumerate() {
                if !before(*key, chain[at(i)]) {
                    high = at(i);
                    break;
                }
                low = at(i) + 1;
            }
        }
        low
    }

    #[inline(always)]
    fn probe(&self, key: Key) -> Option<NodeSlot> {
        self.table.find(key, |_| true)
    }

    /// Returns whether a block in the index has `count` holders. Reads the node only if the slot's
    /// count is not enough.
    #[inline(always)]
    fn has_count(&self, key: Key, hash: u64, count: u32) -> bool {
        match self.probe(key).map_or(0, NodeSlot::holders) {
            few if few < NodeSlot::MANY => few == count,
            NodeSlot::MANY if count < NodeSlot::MANY => false,
            _ => self.find_at(key, hash).is_some_and(|node| self.cells.holders(node) == count),
        }
    }
}

/// Sets the depth of the instances whose bit is set. Their depth must be 0 so far, or nothing is
/// written yet (`first`): then the others' depth becomes 0.
#[inline(always)]
fn write_depth(hit_blocks: &mut [u32], group: usize, bits: u64, depth: u32, first: bool) {
    const BITS: [u32; 32] = {
        let mut bits = [0; 32];
        let mut i = 0;
        while i < 32 {
            bits[i] = 1 << i;
            i += 1;
        }
        bits
    };
    if first
        && bits != u64::MAX
        && let Some(all) = hit_blocks.chunks_mut(64).nth(group)
    {
        all.fill(0);
    }
    match hit_blocks.get_mut(group * 64..group * 64 + 64) {
        Some(all) if bits == u64::MAX => all.fill(depth),
        Some(all) if bits.count_ones() > 16 => {
            for (half, word) in all.chunks_exact_mut(32).zip([bits as u32, (bits >> 32) as u32]) {
                for (hit, bit) in half.iter_mut().zip(BITS) {
                    *hit |= if word & bit != 0 { depth } else { 0 };
                }
            }
        }
        _ => for_each_bit(bits, |bit| {
            if let Some(hit) = hit_blocks.get_mut(group * 64 + bit) {
                *hit = depth;
            }
        }),
    }
}

#[inline(always)]
pub(super) fn for_each_bit(mut bits: u64, mut each: impl FnMut(usize)) {
    while bits != 0 {
        each(bits.trailing_zeros() as usize);
        bits &= bits - 1;
    }
}
