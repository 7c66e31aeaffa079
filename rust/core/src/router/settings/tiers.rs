//! Settings of the tiers below the GPU.
use crate::error::CoreError;
use crate::kv::tiers::TierUse;

/// How the tiers below the GPU count in scores.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TierConfig {
    /// Lower tiers that count.
    pub counted: TierUse,
    /// Seconds to load one token from a lower tier, divided by the seconds to prefill it.
    pub load_ratio: f64,
}

impl Default for TierConfig {
    /// 0.02: a token of 100 KB takes 2 µs from host memory (50 GB/s), and 100 µs to prefill.
    fn default() -> TierConfig {
        TierConfig { counted: TierUse::Auto, load_ratio: 0.02 }
    }
}

impl TierConfig {
    /// Returns the settings, if they are valid.
    ///
    /// # Errors
    /// `BadValue` for a ratio out of its range.
    pub fn checked(self) -> Result<TierConfig, CoreError> {
        if (0.0..=1.0).contains(&self.load_ratio) {
            return Ok(self);
        }
        Err(CoreError::bad_value("tier_load_ratio", self.load_ratio, "a number from 0 to 1"))
    }
}
