//! The size of an instance's cache, as its engine shows it: engines remove blocks when the cache is
//! full.
//!
//! A reported size may be wrong: by hand, by another number of blocks per token, or because the
//! engine keeps a part for itself. An error to the high side lets programs evict each other. The
//! most blocks present at a removal are a measurement. Blocks that an engine holds without
//! reporting them, such as those of running answers on SGLang, make the measurement too low by
//! some percent; so only a large difference counts.
use crate::ids::Seconds;

/// Length of a window of the measurement.
const WINDOW_SECONDS: Seconds = 60.0;
/// Relative difference from which the measurement replaces the reported size.
const TOLERANCE: f64 = 0.05;

/// Most blocks present at removals, by window.
#[derive(Clone, Copy, Debug, Default)]
pub struct FullCache {
    /// Of the last whole window, and of the running one; 0: no removals.
    last: u32,
    now: u32,
    began: Seconds,
}

impl FullCache {
    /// Records the most blocks present at a removal since the last call, if there was one.
    pub fn note(&mut self, blocks: Option<u32>, now: Seconds) {
        if self.now > 0 && now - self.began >= WINDOW_SECONDS {
            (self.last, self.now) = (self.now, 0);
        }
        if let Some(blocks) = blocks {
            // A window begins with a removal: without removals, the last measurement stays.
            self.began = if self.now == 0 { now } else { self.began };
            self.now = self.now.max(blocks);
        }
    }

    /// Returns the measured size in blocks if it differs from the reported one;
    /// `reported`: by the engine or its operator.
    pub fn measured(&self, reported: Option<u32>) -> Option<u32> {
        let seen = self.last; // a whole window: its most crowded moment
        let equal = |reported: u32| f64::from(seen.abs_diff(reported)) <= TOLERANCE * f64::from(reported);
        (seen > 0 && !reported.is_some_and(equal)).then_some(seen)
    }

    /// Returns the blocks that the cache holds; `None`: unknown.
    pub fn blocks(&self, reported: Option<u32>) -> Option<u32> {
        self.measured(reported).or(reported)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_large_difference_from_the_reported_size_counts() {
        let mut full = FullCache::default();
        assert_eq!((full.blocks(Some(1200)), full.blocks(None)), (Some(1200), None));
        for (at, blocks) in [(0.0, Some(1000)), (30.0, Some(960)), (70.0, None)] {
            full.note(blocks, at);
        }
        assert_eq!((full.blocks(Some(1200)), full.blocks(None)), (Some(1000), Some(1000)));
        assert_eq!((full.blocks(Some(1050)), full.blocks(Some(800))), (Some(1050), Some(1000)));
        // Without removals it stays; the next whole window replaces it.
        full.note(None, 500.0);
        full.note(Some(1180), 510.0);
        full.note(None, 600.0);
        assert_eq!(full.blocks(Some(1200)), Some(1200));
    }
}
