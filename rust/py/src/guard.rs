//! The hot-spot guard's settings, for routers and simulations alike.
use crate::errors::Result;
use lmetric_core::error::whole;
use lmetric_core::guard::{self, GuardConfig};
use lmetric_core::policy::Policy;

/// The settings as Python gives them.
#[derive(Clone, Copy)]
pub struct GuardSettings {
    pub on: Option<bool>,
    pub window_seconds: f64,
    pub period_seconds: f64,
    pub classes: i64,
    pub min_requests: i64,
    pub phase2_factor: f64,
    pub release_factor: f64,
}

impl GuardSettings {
    /// The core's settings under `policy`, and why the guard is on or off.
    ///
    /// # Errors
    /// `BadValue` for a count that is none.
    pub fn under(self, policy: &dyn Policy) -> Result<(GuardConfig, String)> {
        let (on, reason) = guard::applies(policy, self.on);
        let count = |name: &str, value: i64| whole(&format!("hot-spot guard: {name}"), value as f64);
        let config = GuardConfig {
            on,
            window_seconds: self.window_seconds,
            period_seconds: self.period_seconds,
            classes: count("classes", self.classes)? as usize,
            min_requests: count("min_requests", self.min_requests)?,
            phase2_factor: self.phase2_factor,
            release_factor: self.release_factor,
        };
        Ok((config, reason))
    }
}
