//! Work behind decisions lets them go first.
use std::sync::atomic::{AtomicU32, Ordering};

/// Spins for which such work waits while others wait for the same lock.
const PATIENCE: u32 = 64;

/// Waits a moment if others wait for a lock, so that they get it first. `waiting`: their number.
pub(super) fn give_way(waiting: &AtomicU32) {
    let waits = || waiting.load(Ordering::Relaxed) > 0;
    if waits() {
        for _ in 0..PATIENCE {
            std::hint::spin_loop();
            if !waits() {
                break;
            }
        }
        if waits() {
            // The waiting thread is not scheduled, or sleeps until the holder hands the lock on.
            std::thread::yield_now();
        }
    }
}
