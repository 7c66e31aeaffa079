//! Liveness of the feed's thread. Without it, a thread that has panicked or hangs looks like idle
//! engines.
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// The thread counts as hung if it records no beat for this long. An idle thread beats once a
/// second, and a turn takes milliseconds.
const HANGS: Duration = Duration::from_secs(10);

/// Liveness record that the feed's thread writes and other threads read.
#[derive(Clone)]
pub struct Heartbeat(Arc<Beats>);

struct Beats {
    origin: Instant,
    /// Milliseconds from the origin to the last beat.
    last: AtomicU64,
    panicked: AtomicBool,
}

impl Heartbeat {
    /// Creates the record with a first beat.
    pub fn start() -> Heartbeat {
        let beats =
            Beats { origin: Instant::now(), last: AtomicU64::new(0), panicked: AtomicBool::new(false) };
        Heartbeat(Arc::new(beats))
    }

    /// Records a beat. The thread calls this in each turn of its loop.
    pub fn beat(&self) {
        self.0.last.store(self.0.origin.elapsed().as_millis() as u64, Ordering::Relaxed);
    }

    /// Runs the thread's work and records whether it panicked.
    pub fn watch(&self, work: impl FnOnce()) {
        struct Watch<'a>(&'a Beats);
        impl Drop for Watch<'_> {
            fn drop(&mut self) {
                self.0.panicked.store(std::thread::panicking(), Ordering::Relaxed);
            }
        }
        let _watch = Watch(&self.0);
        work();
    }

    /// Returns the thread's problem, or `None` if it has not panicked and its last beat is recent.
    pub fn problem(&self) -> Option<String> {
        if self.0.panicked.load(Ordering::Relaxed) {
            return Some("the feed's thread has stopped after an internal error: close the feed, start another, and report the error".into());
        }
        let age = self
            .0
            .origin
            .elapsed()
            .saturating_sub(Duration::from_millis(self.0.last.load(Ordering::Relaxed)));
        (age >= HANGS).then(|| format!("the feed's thread has not come round for {} s", age.as_secs()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_that_hangs_is_seen_until_it_comes_round_again() {
        let origin = Instant::now().checked_sub(2 * HANGS).expect("a machine that runs for some seconds");
        let beats = Beats { origin, last: AtomicU64::new(0), panicked: AtomicBool::new(false) };
        let heartbeat = Heartbeat(Arc::new(beats));
        assert!(heartbeat.problem().is_some_and(|problem| problem.contains("20 s")));
        heartbeat.beat();
        assert_eq!(heartbeat.problem(), None);
        heartbeat.watch(|| ());
        assert_eq!(heartbeat.problem(), None);
    }
}
