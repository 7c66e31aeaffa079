//! A hash table that grows in small steps: many small segments, each sorted and open-addressed.
//!
//! The high bits of a key select a segment. The next 32 bits (`place`) select the home slot by
//! multiplication, so slots are sorted by place. A lookup, hit or miss, ends at the first greater
//! place, even at load 0.85. A sorted segment grows by one sequential pass to 5/4 of its size. So
//! no key is hashed again and no pause exceeds a few microseconds. On average, three quarters of
//! the memory is in use, while doubling would leave half of it empty.
use std::fmt;

/// Slots after the last home slot, for entries shifted past the end.
const PAD: usize = 16;
/// Maximum number of entries of one place, less for the last places of a segment. An engine
/// computes a block as often as it prefills requests with that block in one step, mostly a few
/// times. More entries of one place would not fit into a segment of ordinary size, and each
/// insertion passes all of them.
const MAX_SHARED: usize = 64;
/// Allocator overhead per memory block, in bytes.
const MALLOC_OVERHEAD: usize = 16;

/// Content of a slot.
pub(crate) trait Row: Copy {
    /// The empty slot.
    const EMPTY: Self;
    /// Whether nothing is stored here.
    fn is_empty(self) -> bool;
    /// Returns the 32 bits of the key after the bits that select the segment.
    fn place(self) -> u32;
}

/// Location of a hash in the table.
#[derive(Clone, Copy, Default, PartialEq)]
pub(crate) struct Key {
    segment: u32,
    place: u32,
}

impl Key {
    /// Returns the key of `hash` in a table of 2^`bits` segments.
    #[inline(always)]
    pub(crate) fn new(hash: u64, bits: u32) -> Key {
        let mixed = (hash ^ (hash >> 32)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        Key { segment: ((mixed >> 1) >> (63 - bits)) as u32, place: ((mixed << bits) >> 32) as u32 }
    }

    /// Returns the hash with these mixed bits.
    #[cfg(test)]
    pub(crate) fn unmixed(mixed: u64) -> u64 {
        let hash = mixed.wrapping_mul(0xf1de_83e1_9937_733d);
        hash ^ (hash >> 32)
    }

    /// Returns the bits that a slot of this key must return as its place.
    #[inline]
    pub(crate) fn place(self) -> u32 {
        self.place
    }
}

/// Result of an insertion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Inserted {
    /// There was no room for the entry.
    No,
    /// Too many entries have the same place, or are at the end of a segment.
    Crowded,
    /// No other entry has the same place.
    Alone,
    /// Other entries have the same place.
    Shared,
}

struct Segment<S> {
    slots: Box<[S]>,
    homes: u32,
    used: u32,
}

/// A segmented hash table of slots `S`.
pub(crate) struct Table<S> {
    segments: Box<[Segment<S>]>,
    bits: u32,
    entries: usize,
    bytes: usize,
}

impl<S> fmt::Debug for Table<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Table").field("entries", &self.entries).field("bytes", &self.bytes).finish()
    }
}

impl<S: Row> Table<S> {
    /// Bytes of a segment with its first few entries.
    pub(crate) const MIN_SEGMENT_BYTES: usize = (16 + PAD) * size_of::<S>() + MALLOC_OVERHEAD;

    /// Creates an empty table of 2^`bits` segments.
    pub(crate) fn new(bits: u32) -> Table<S> {
        let segments =
            (0..1usize << bits).map(|_| Segment { slots: Box::default(), homes: 0, used: 0 }).collect();
        Table { segments, bits, entries: 0, bytes: (size_of::<Segment<S>>() << bits) + MALLOC_OVERHEAD }
    }

    /// Returns the number of entries.
    pub(crate) fn len(&self) -> usize {
        self.entries
    }

    /// Returns the bytes in use, including the allocator's overhead.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Returns the key of `hash`. Hashes may be small numbers: a bijection mixes their bits first.
    #[inline(always)]
    pub(crate) fn key(&self, hash: u64) -> Key {
        Key::new(hash, self.bits)
    }

    /// Prefetches the cache line at which a lookup of `key` starts.
    #[inline(always)]
    pub(crate) fn prefetch(&self, key: Key) {
        let segment = &self.segments[key.segment as usize];
        prefetch(segment.slots.as_ptr().wrapping_add(home(key.place, segment.homes)));
    }

    /// Returns the first entry at the key's place for which `is` is true.
    #[inline(always)]
    pub(crate) fn find(&self, key: Key, is: impl FnMut(S) -> bool) -> Option<S> {
        let segment = &self.segments[key.segment as usize];
        segment.position(key.place, is).map(|at| segment.slots[at])
    }

    /// Returns a mutable entry at the key's place for which `is` is true. Its place must not
    /// change.
    #[inline]
    pub(crate) fn find_mut(&mut self, key: Key, is: impl FnMut(S) -> bool) -> Option<&mut S> {
        let segment = &mut self.segments[key.segment as usize];
        segment.position(key.place, is).map(|at| &mut segment.slots[at])
    }

    /// Returns whether several entries have the place of `key`, so that the place alone does not
    /// identify an entry.
    pub(crate) fn is_shared(&self, key: Key) -> bool {
        let mut seen = 0;
        self.find(key, |_| {
            seen += 1;
            seen == 2
        })
        .is_some()
    }

    /// Applies `change` to all entries at the key's place.
    pub(crate) fn for_each_at(&mut self, key: Key, mut change: impl FnMut(&mut S)) {
        let segment = &mut self.segments[key.segment as usize];
        if let Some(first) = segment.position(key.place, |_| true) {
            let same =
                segment.slots[first..].iter_mut().take_while(|s| !s.is_empty() && s.place() == key.place);
            same.for_each(&mut change);
        }
    }

    /// Stores `slot` at `key`. The table grows to at most `byte_limit` bytes.
    #[inline]
    pub(crate) fn insert(&mut self, key: Key, slot: S, byte_limit: usize) -> Inserted {
        debug_assert_eq!(slot.place(), key.place);
        // If the segment may not grow, it is filled further.
        let no_room = !self.segments[key.segment as usize].has_room(17);
        if no_room && self.segments[key.segment as usize].is_crowded(key.place) {
            return Inserted::Crowded; // more slots do not help
        }
        let full = no_room && !self.grow(key, byte_limit);
        let segment = &mut self.segments[key.segment as usize];
        if full && !segment.has_room(19) {
            return Inserted::No;
        }
        let inserted = segment.insert(slot);
        self.entries += usize::from(inserted != Inserted::Crowded);
        inserted
    }

    /// Grows the segment of `key`, unless the table would exceed `byte_limit`.
    fn grow(&mut self, key: Key, byte_limit: usize) -> bool {
        let segment = &mut self.segments[key.segment as usize];
        let before = segment.bytes();
        let grown = segment.grow((before + byte_limit).saturating_sub(self.bytes));
        self.bytes = self.bytes + segment.bytes() - before;
        grown
    }

    /// Removes and returns the first entry at the key's place for which `is` is true.
    pub(crate) fn remove(&mut self, key: Key, is: impl FnMut(S) -> bool) -> Option<S> {
        let segment = &mut self.segments[key.segment as usize];
        let at = segment.position(key.place, is)?;
        let slot = segment.slots[at];
        segment.remove(at);
        self.entries -= 1;
        Some(slot)
    }

    /// Checks up to `most` slots of the key's segment, starting at slot `at`, and keeps the entries
    /// for which `keep` is true. Returns the number removed, and the slot to continue at (`None`:
    /// the segment's end was reached).
    pub(crate) fn retain_some(
        &mut self,
        key: Key,
        mut at: usize,
        most: usize,
        mut keep: impl FnMut(S) -> bool,
    ) -> (usize, Option<usize>) {
        let segment = &mut self.segments[key.segment as usize];
        let (before, end) = (segment.used, segment.slots.len().min(at.saturating_add(most)));
        while at < end {
            let slot = segment.slots[at];
            if slot.is_empty() || keep(slot) {
                at += 1;
            } else {
                segment.remove(at);
            }
        }
        let gone = (before - segment.used) as usize;
        self.entries -= gone;
        (gone, (at < segment.slots.len()).then_some(at))
    }

    /// Returns the number of entries in the key's segment.
    pub(crate) fn near(&self, key: Key) -> usize {
        self.segments[key.segment as usize].used as usize
    }

    /// Returns all entries.
    pub(crate) fn into_iter(self) -> impl Iterator<Item = S> {
        self.segments.into_iter().flat_map(|s| s.slots).filter(|s| !s.is_empty())
    }
}

#[inline(always)]
fn home(place: u32, homes: u32) -> usize {
    ((u64::from(place) * u64::from(homes)) >> 32) as usize
}

impl<S: Row> Segment<S> {
    fn bytes(&self) -> usize {
        if self.slots.is_empty() { 0 } else { size_of_val(&*self.slots) + MALLOC_OVERHEAD }
    }

    #[inline(always)]
    fn position(&self, place: u32, mut is: impl FnMut(S) -> bool) -> Option<usize> {
        let mut at = home(place, self.homes);
        loop {
            let slot = *self.slots.get(at)?;
            if slot.is_empty() || slot.place() > place {
                return None;
            }
            if slot.place() == place && is(slot) {
                return Some(at);
            }
            at += 1;
        }
    }

    /// Returns whether one more entry leaves at most `twentieths` / 20 of the home slots used, and
    /// the last slot free, which ends every shift.
    #[inline(always)]
    fn has_room(&self, twentieths: u32) -> bool {
        u64::from(self.used) * 20 < u64::from(self.homes) * u64::from(twentieths)
            && self.slots.last().is_some_and(|s| s.is_empty())
    }

    /// Returns whether as many entries as possible have the place.
    #[cold]
    fn is_crowded(&self, place: u32) -> bool {
        let mut shared = 0;
        self.position(place, |_| {
            shared += 1;
            shared == MAX_SHARED
        })
        .is_some()
    }

    /// Inserts a slot, unless too many have its place. There must be room.
    #[inline(always)]
    fn insert(&mut self, slot: S) -> Inserted {
        let mut at = home(slot.place(), self.homes);
        let mut shared = 0;
        while !self.slots[at].is_empty() && self.slots[at].place() <= slot.place() {
            shared += usize::from(self.slots[at].place() == slot.place());
            at += 1;
        }
        if shared >= MAX_SHARED || (shared > 0 && self.fills_the_end(at)) {
            return Inserted::Crowded;
        }
        let mut moved = slot;
        while !moved.is_empty() {
            std::mem::swap(&mut self.slots[at], &mut moved);
            at += 1;
        }
        self.used += 1;
        if shared > 0 { Inserted::Shared } else { Inserted::Alone }
    }

    /// Returns whether an entry at `at` would shift others into the last slot. Growth moves no
    /// entries of one place apart, so they alone could fill it for good.
    fn fills_the_end(&self, at: usize) -> bool {
        self.slots[at..self.slots.len() - 1].iter().all(|s| !s.is_empty())
    }

    #[inline(always)]
    fn remove(&mut self, at: usize) {
        let homes = self.homes;
        let mut at = at;
        while let Some(&next) = self.slots.get(at + 1)
            && !next.is_empty()
            && home(next.place(), homes) <= at
        {
            self.slots[at] = next;
            at += 1;
        }
        self.slots[at] = S::EMPTY;
        self.used -= 1;
    }

    /// Grows to 5/4 of the slots, if that stays within `byte_limit`.
    fn grow(&mut self, byte_limit: usize) -> bool {
        let mut homes = self.homes;
        loop {
            homes = (homes / 4 * 5).max(homes + 16);
            let slots = homes as usize + PAD;
            // Nearly empty but without room: the keys are not mixed, so more slots would not help.
            if slots * size_of::<S>() + MALLOC_OVERHEAD > byte_limit || homes > 64 * (self.used + 1) {
                return false;
            }
            let mut next =
                Segment { slots: vec![S::EMPTY; slots].into_boxed_slice(), homes, used: self.used };
            let mut free = 0;
            let fits = self.slots.iter().filter(|s| !s.is_empty()).all(|s| {
                let at = home(s.place(), homes).max(free);
                free = at + 1;
                next.slots.get_mut(at).map(|to| *to = *s).is_some()
            });
            if fits && next.has_room(19) {
                *self = next;
                return true;
            }
        }
    }
}

/// Prefetches the cache line at `address`. It is a hint, without effect on targets that have none.
#[inline(always)]
pub(crate) fn prefetch<T>(address: *const T) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch never faults, at any address; SSE is part of x86-64.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T0>(address.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = address;
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    #[derive(Clone, Copy, PartialEq, Debug)]
    struct Pair(u64, u32);

    impl Row for Pair {
        const EMPTY: Pair = Pair(0, 0);
        fn is_empty(self) -> bool {
            self.0 == 0
        }
        fn place(self) -> u32 {
            self.1
        }
    }

    proptest! {
        #[test]
        fn behaves_like_a_map(bits in 0u32..3, narrow in any::<bool>(),
                              steps in prop::collection::vec((any::<bool>(), 1u64..400), 1..1500)) {
            let mut table = Table::<Pair>::new(bits);
            let mut model = BTreeMap::new();
            // In the narrow case, many hashes share a place: the high bits that would select it are
            // cut off.
            let key = |table: &Table<Pair>, hash: u64| {
                let key = table.key(hash);
                if narrow { Key { place: key.place >> 28, ..key } } else { key }
            };
            for (insert, hash) in steps {
                let at = key(&table, hash);
                if insert && !model.contains_key(&hash) {
                    let shared = model.keys().any(|h| key(&table, *h) == at);
                    let expected = if shared { Inserted::Shared } else { Inserted::Alone };
                    prop_assert_eq!(table.insert(at, Pair(hash, at.place), usize::MAX / 4), expected);
                    model.insert(hash, ());
                } else if !insert {
                    let gone = table.remove(at, |s| s.0 == hash).is_some();
                    prop_assert_eq!(gone, model.remove(&hash).is_some());
                }
                prop_assert_eq!(table.len(), model.len());
            }
            for hash in 1..400 {
                let found = table.find(key(&table, hash), |s| s.0 == hash);
                prop_assert_eq!(found.is_some(), model.contains_key(&hash));
            }
            let known: usize = table.segments.iter().map(Segment::bytes).sum();
            prop_assert_eq!(table.bytes(), known + (size_of::<Segment<Pair>>() << bits) + MALLOC_OVERHEAD);
            let odd = |s: Pair| s.0 % 2 == 1;
            let all = table.len();
            for segment in 0..1u32 << bits {
                let key = Key { segment, place: 0 };
                let (mut at, mut left) = (Some(0), table.near(key));
                while let Some(from) = at {
                    let (gone, next) = table.retain_some(key, from, 7, odd);
                    prop_assert!(gone <= left && next.is_none_or(|next| next > from || gone > 0));
                    (at, left) = (next, left - gone);
                }
                prop_assert_eq!(table.near(key), left);
            }
            let gone = model.keys().filter(|h| *h % 2 == 0).count();
            prop_assert_eq!(table.len(), all - gone);
            for hash in 1..400 {
                let found = table.find(key(&table, hash), |s| s.0 == hash);
                prop_assert_eq!(found.is_some(), model.contains_key(&hash) && hash % 2 == 1);
            }
            let mut hashes: Vec<u64> = table.into_iter().map(|s| s.0).collect();
            hashes.sort_unstable();
            prop_assert!(hashes.iter().eq(model.keys().filter(|h| *h % 2 == 1)));
        }
    }

    #[test]
    fn a_full_table_refuses_and_keeps_what_it_has() {
        let mut table = Table::<Pair>::new(0);
        let limit = table.bytes() + 4096;
        let mut stored = 0;
        for hash in 1..10_000 {
            let key = table.key(hash);
            let inserted = table.insert(key, Pair(hash, key.place), limit);
            stored += usize::from(inserted != Inserted::No);
            assert!(table.bytes() <= limit);
        }
        assert_eq!(table.len(), stored);
        assert!(stored > 180, "{stored} of at most 256");
        assert_eq!(
            (1..10_000).filter(|h| table.find(table.key(*h), |s| s.0 == *h).is_some()).count(),
            stored
        );
    }

    #[test]
    fn entries_of_the_last_place_leave_room_for_others() {
        let mut table = Table::<Pair>::new(0);
        let insert = |table: &mut Table<Pair>, hash, place| {
            table.insert(Key { segment: 0, place }, Pair(hash, place), usize::MAX / 4)
        };
        let kept = (1..=100).filter(|&hash| insert(&mut table, hash, u32::MAX) != Inserted::Crowded).count();
        assert!((PAD..=MAX_SHARED).contains(&kept), "{kept}");
        for hash in 101..=500u64 {
            let place = (hash as u32).wrapping_mul(0x9e37_79b9);
            assert_eq!(insert(&mut table, hash, place), Inserted::Alone);
        }
        assert!(table.bytes() < 2 * 600 * size_of::<Pair>());
    }

    #[test]
    fn three_quarters_full_on_average() {
        let mut table = Table::<Pair>::new(4);
        let mut worst: f64 = 0.0;
        for hash in 1..200_000u64 {
            let key = table.key(hash.wrapping_mul(0x2545_f491_4f6c_dd1d));
            table.insert(key, Pair(hash, key.place), usize::MAX / 4);
            if hash > 20_000 {
                worst = worst.max(table.bytes() as f64 / table.len() as f64);
            }
        }
        assert!(worst <= 16.0 / 0.66, "{worst} bytes for entries of 16");
    }
}
