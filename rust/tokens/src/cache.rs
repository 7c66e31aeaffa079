//! A cache of token IDs by segment, bounded in bytes. It evicts the least recently used segments
//! first.
use lru::LruCache;
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::Arc;

/// Bytes of an entry beside its IDs: its node (key, IDs and two links), the counts of the `Arc`,
/// and the allocator's overhead of both. A table at its emptiest (just doubled) adds two pointers.
const ENTRY_BYTES: usize = size_of::<(u128, Arc<[u32]>, [usize; 2])>() + 40 + 16 + 2 * 16;

/// Hasher for keys that are hashes already: the low half picks the bucket.
#[derive(Default)]
struct Low(u64);

impl Hasher for Low {
    fn finish(&self) -> u64 {
        self.0
    }
    fn write(&mut self, bytes: &[u8]) {
        self.0 = bytes.iter().fold(self.0, |h, b| h.rotate_left(8) ^ u64::from(*b));
    }
    fn write_u128(&mut self, key: u128) {
        self.0 = key as u64;
    }
}

/// Contents and use of a cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CacheStats {
    /// Segments held.
    pub segments: usize,
    /// Memory they take, in bytes; never above the bound.
    pub bytes: usize,
    /// Segments evicted to keep the bound.
    pub evicted: u64,
    /// Bytes of text whose IDs were found.
    pub found_bytes: u64,
    /// Bytes of text that had to be tokenized.
    pub new_bytes: u64,
}

/// The cache.
#[derive(Debug)]
pub(crate) struct Cache {
    entries: LruCache<u128, Arc<[u32]>, BuildHasherDefault<Low>>,
    limit: usize,
    pub(crate) stats: CacheStats,
}

fn size(ids: &[u32]) -> usize {
    ENTRY_BYTES + size_of_val(ids)
}

impl Cache {
    pub(crate) fn new(limit: usize) -> Cache {
        let entries = LruCache::unbounded_with_hasher(BuildHasherDefault::default());
        Cache { entries, limit, stats: CacheStats::default() }
    }

    /// Returns the IDs of a segment and makes it the newest entry.
    pub(crate) fn get(&mut self, key: u128) -> Option<Arc<[u32]>> {
        self.entries.get(&key).cloned()
    }

    /// Keeps a segment's IDs, unless they alone exceed the bound.
    pub(crate) fn put(&mut self, key: u128, ids: Arc<[u32]>) {
        let bytes = size(&ids);
        if bytes > self.limit || self.entries.contains(&key) {
            return;
        }
        while self.stats.bytes + bytes > self.limit {
            let Some((_, oldest)) = self.entries.pop_lru() else { break };
            self.stats.bytes -= size(&oldest);
            self.stats.segments -= 1;
            self.stats.evicted += 1;
        }
        self.entries.put(key, ids);
        self.stats.bytes += bytes;
        self.stats.segments += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn ids(count: usize) -> Arc<[u32]> {
        (0..count as u32).collect()
    }

    #[test]
    fn what_is_too_large_is_not_kept_and_pushes_nothing_out() {
        let mut cache = Cache::new(size(&ids(10)));
        cache.put(1, ids(10));
        cache.put(2, ids(11));
        assert_eq!((cache.get(1), cache.get(2)), (Some(ids(10)), None));
    }

    proptest! {
        /// Compares the cache with a plain list, newest first.
        #[test]
        fn it_is_a_bounded_list_of_the_most_recent(
            limit in 0usize..2000,
            steps in prop::collection::vec((0u128..12, 0usize..40, any::<bool>()), 0..200),
        ) {
            let mut cache = Cache::new(limit);
            let mut model: Vec<(u128, Arc<[u32]>)> = Vec::new();
            for (key, count, put) in steps {
                let at = model.iter().position(|(k, _)| *k == key);
                if !put {
                    let found = at.map(|at| model.remove(at));
                    prop_assert_eq!(cache.get(key), found.as_ref().map(|(_, ids)| ids.clone()));
                    model.splice(0..0, found);
                } else if at.is_none() && size(&ids(count)) <= limit {
                    cache.put(key, ids(count));
                    model.insert(0, (key, ids(count)));
                    while model.iter().map(|(_, ids)| size(ids)).sum::<usize>() > limit {
                        model.pop();
                    }
                } else {
                    cache.put(key, ids(count));
                }
                let bytes = model.iter().map(|(_, ids)| size(ids)).sum::<usize>();
                prop_assert_eq!((cache.stats.bytes, cache.stats.segments), (bytes, model.len()));
                prop_assert!(cache.stats.bytes <= limit);
            }
        }
    }
}
