//! The part of the fleet that this router has, together with the routers with which it exchanges
//! load.
//!
//! Other routers use the same caches. Their programs are unknown, but engines report their
//! requests. So a router takes its part of each cache, by requests, and takes the recomputation of
//! all routers from its own. Its held requests count: else a router that holds some would get less
//! and less.
use crate::estimate::decayed::Decayed;
use crate::ids::Seconds;

/// Time constant, seconds: parts of few requests vary.
const WINDOW_SECONDS: Seconds = 60.0;
/// Parts are multiples of this: each change is an event for other workers.
const STEP: f64 = 1.0 / 16.0;

/// The part of the fleet's requests that are known to this router.
#[derive(Clone, Copy, Debug, Default)]
pub struct RouterShare {
    known: Decayed,
    all: Decayed,
}

impl RouterShare {
    /// Records the present number of known requests, and of others.
    pub fn note(&mut self, known: f64, others: f64, now: Seconds) {
        self.known.add(known, now, WINDOW_SECONDS);
        self.all.add(known + others, now, WINDOW_SECONDS);
    }

    /// Returns the part, at least [`STEP`]; 1 without others.
    pub fn get(&self) -> f64 {
        // Both sums change at the same times.
        let (known, all) = (self.known.last(), self.all.last());
        if known < all { ((known / all / STEP).round() * STEP).max(STEP) } else { 1.0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn others_take_their_part_in_steps() {
        let mut share = RouterShare::default();
        assert_eq!(share.get(), 1.0);
        for second in 0..600 {
            share.note(3.0, 0.0, f64::from(second));
        }
        assert_eq!(share.get(), 1.0, "without others");
        for second in 600..1200 {
            share.note(3.0, 9.0, f64::from(second));
        }
        assert_eq!(share.get(), 0.25);
        for second in 1200..1800 {
            share.note(0.0, 9.0, f64::from(second));
        }
        assert_eq!(share.get(), STEP, "an idle router keeps a little");
    }
}
