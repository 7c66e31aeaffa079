//! Batches that an engine published before its new weights were announced: their blocks are of the
//! old weights.
//!
//! The clocks of engine and router may differ. A batch's delay, from its timestamp (engine's clock)
//! to its arrival (router's clock), is this difference plus the time in transit. So the timestamp
//! plus the shortest delay is the latest time, on the router's clock, at which the batch was made.
//! Batches made before the announcement are recognized, except those of the last moment before it:
//! the shortest time in transit. Before the first batch, the clocks count as equal.

/// Length of a window in seconds: a clock that is set, or drifts, is followed after two windows.
const WINDOW_SECONDS: f64 = 30.0;

/// Announcement of new weights, and the delays that date batches against it.
#[derive(Debug, Default)]
pub struct NewWeights {
    /// Time of the announcement, in seconds since 1970 on this machine's clock.
    announced_at: Option<f64>,
    /// Shortest delays in seconds, of the current window and of the window before.
    delays: [Option<f64>; 2],
    window_began: f64,
}

impl NewWeights {
    /// Records an announcement at this time, in seconds since 1970.
    pub fn announce(&mut self, at: f64) {
        self.announced_at = Some(at);
    }

    /// Records the delay of a batch that arrived at `now`, both in seconds.
    pub fn note_delay(&mut self, delay: f64, now: f64) {
        if now - self.window_began >= WINDOW_SECONDS {
            (self.delays, self.window_began) = ([None, self.delays[0]], now);
        }
        let least = &mut self.delays[0];
        *least = Some(least.map_or(delay, |known| known.min(delay)));
    }

    /// Returns the timestamp, on the engine's clock, before which batches are of old weights.
    pub fn old_before(&self) -> Option<f64> {
        let delay = self.delays.into_iter().flatten().reduce(f64::min);
        Some(self.announced_at? - delay.unwrap_or(0.0))
    }
}
