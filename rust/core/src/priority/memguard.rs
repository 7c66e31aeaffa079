//! MEMGUARD (UniBoost, section 3.3): a running request keeps its slot until its work has doubled.
//!
//! Preemption is expensive because it moves KV memory. So a priority depends on work in bins of a
//! geometric series. A dispatched request is not preempted before it reaches the next bin: at most
//! `1 + log2(S / k)` times for S tokens. The bin is rounded down, as in the appendix and the
//! paper's worked examples; Eq. (8) rounds up (erratum 8).
use super::bad;
use crate::error::CoreError;
use crate::ids::Seconds;
use serde::Deserialize;

/// Settings: when priorities change, and the minimum gain of a preemption.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
#[serde(default)]
pub struct MemGuard {
    /// k: tokens of the first bin, 1 or more. At 1, a priority changes each time the work doubles.
    pub bin_tokens: u32,
    /// delta: seconds of boosted arrival by which a waiting request must be ahead of the request
    /// that it preempts (Eq. 7); 0 or more. The paper gives 0.1 without a unit.
    pub hysteresis_seconds: Seconds,
}

impl Default for MemGuard {
    fn default() -> MemGuard {
        MemGuard { bin_tokens: 256, hysteresis_seconds: 0.1 }
    }
}

impl MemGuard {
    /// # Errors
    /// `BadValue` for a setting out of its range.
    pub fn check(&self) -> Result<(), CoreError> {
        if self.bin_tokens == 0 {
            return bad("bin tokens", "0".into(), "1 or more");
        }
        if !(0.0..=1e6).contains(&self.hysteresis_seconds) {
            return bad("hysteresis", self.hysteresis_seconds.to_string(), "0 to 1e6 seconds");
        }
        Ok(())
    }

    /// Returns the tokens of the bin: k below 2 k, 2 k below 4 k, and so on.
    pub fn bin(&self, tokens: u32) -> u32 {
        let bins = (tokens / self.bin_tokens).max(1);
        self.bin_tokens << bins.ilog2()
    }

    /// Returns the tokens at which the next bin starts.
    pub fn next(&self, tokens: u32) -> u32 {
        self.bin(tokens).saturating_mul(2)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bins_by_hand() {
        let guard = MemGuard::default();
        for (tokens, bin, next) in [
            (1, 256, 512),
            (255, 256, 512),
            (256, 256, 512),
            (511, 256, 512),
            (512, 512, 1024),
            (1023, 512, 1024),
            (10_000, 8192, 16_384),
            (u32::MAX, 1 << 31, u32::MAX),
        ] {
            assert_eq!((guard.bin(tokens), guard.next(tokens)), (bin, next), "{tokens}");
        }
        assert_eq!(MemGuard { bin_tokens: 1, ..guard }.bin(1000), 512);
    }

    #[test]
    fn ten_thousand_tokens_change_their_priority_six_times_at_most() {
        let guard = MemGuard::default();
        let mut bins: Vec<u32> = (1..=10_000).map(|tokens| guard.bin(tokens)).collect();
        bins.dedup();
        assert_eq!(bins, [256, 512, 1024, 2048, 4096, 8192]);
    }

    #[test]
    fn settings_out_of_range_are_named() {
        let guard = MemGuard::default();
        for (guard, what) in [
            (MemGuard { bin_tokens: 0, ..guard }, "bin tokens"),
            (MemGuard { hysteresis_seconds: -0.1, ..guard }, "hysteresis"),
            (MemGuard { hysteresis_seconds: f64::NAN, ..guard }, "hysteresis"),
        ] {
            let message = guard.check().unwrap_err().to_string();
            assert!(message.contains(what), "{message}");
        }
    }
}
