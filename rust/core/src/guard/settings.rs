//! Settings of the hot-spot guard.
use crate::error::CoreError;
use crate::ids::Seconds;
use serde::Deserialize;

/// Settings of the guard.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
#[serde(default)]
pub struct GuardConfig {
    /// Whether the guard is enabled.
    #[serde(skip)]
    pub on: bool,
    /// Sliding window over which shares of work are computed, seconds. The paper: 1 minute. Ours is
    /// shorter, because a surge's first seconds do the most harm.
    pub window_seconds: Seconds,
    /// Interval between two phase 1 checks, seconds. Ours.
    pub period_seconds: Seconds,
    /// Maximum number of classes counted at once, 1 to 65,535.
    pub classes: usize,
    /// Minimum requests of a class in the window before it can be suspected: the share of a few
    /// requests means nothing. Ours.
    pub min_requests: u32,
    /// Phase 2 starts after more than this factor times |M| consecutive requests (the paper: 2).
    pub phase2_factor: f64,
    /// Hysteresis, above 0 and at most 1: the alarm ends when the ratio falls below this fraction
    /// of its threshold. Ours: low, so that a filter spreads a hot prefix over nearly all
    /// instances. At 0.8 it stops at the share of the prefix, and its requests share batches with
    /// each other.
    pub release_factor: f64,
}

impl Default for GuardConfig {
    fn default() -> GuardConfig {
        GuardConfig {
            on: true,
            window_seconds: 15.0,
            period_seconds: 1.0,
            classes: 64,
            min_requests: 16,
            phase2_factor: 2.0,
            release_factor: 0.05,
        }
    }
}

impl GuardConfig {
    /// # Errors
    /// `BadValue` for a setting out of its range.
    pub(super) fn check(&self) -> Result<(), CoreError> {
        let refuse = |what: &str, got: f64, expected: &str| {
            Err(CoreError::BadValue {
                what: format!("hot-spot guard: {what}"),
                got: got.to_string(),
                expected: expected.into(),
            })
        };
        if !(self.window_seconds > 0.0 && self.window_seconds.is_finite()) {
            return refuse("window_seconds", self.window_seconds, "seconds above 0");
        }
        if !(self.period_seconds >= 0.01 && self.period_seconds.is_finite()) {
            return refuse("period_seconds", self.period_seconds, "seconds, at least 0.01");
        }
        if !(1..=usize::from(u16::MAX)).contains(&self.classes) {
            return refuse("classes", self.classes as f64, "a whole number from 1 to 65535");
        }
        if !(self.phase2_factor >= 0.0 && self.phase2_factor.is_finite()) {
            return refuse("phase2_factor", self.phase2_factor, "a number of at least 0");
        }
        if !(self.release_factor > 0.0 && self.release_factor <= 1.0) {
            return refuse("release_factor", self.release_factor, "a number above 0 and at most 1");
        }
        Ok(())
    }
}
