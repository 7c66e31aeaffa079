//! The hot-spot guard's settings, for routers and simulations alike.
use crate::buffers::bad;
use crate::errors::Result;
use lmetric_core::error::whole;
use lmetric_core::guard::{self, GuardConfig};
use lmetric_core::policy::Policy;
use pyo3::prelude::*;
use pyo3::types::PyBool;

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
    /// What a caller gives as `guard=`: nothing, a flag, or an `lmetric.Guard`.
    ///
    /// # Errors
    /// `BadValueError` for anything else.
    pub fn of(guard: Option<&Bound<'_, PyAny>>) -> Result<GuardSettings> {
        let plain = GuardConfig::default();
        let mut settings = GuardSettings {
            on: None,
            window_seconds: plain.window_seconds,
            period_seconds: plain.period_seconds,
            classes: plain.classes as i64,
            min_requests: i64::from(plain.min_requests),
            phase2_factor: plain.phase2_factor,
            release_factor: plain.release_factor,
        };
        let Some(guard) = guard else { return Ok(settings) };
        if let Ok(on) = guard.cast::<PyBool>() {
            settings.on = Some(on.is_true());
            return Ok(settings);
        }
        if !guard.is_instance(&guard.py().import("lmetric.options")?.getattr("Guard")?)? {
            return Err(bad(guard, "guard", "True, False, lmetric.Guard(...) or None"));
        }
        settings.on = guard.getattr("enabled")?.extract()?;
        settings.window_seconds = guard.getattr("window_seconds")?.extract()?;
        settings.period_seconds = guard.getattr("period_seconds")?.extract()?;
        settings.classes = guard.getattr("classes")?.extract()?;
        settings.min_requests = guard.getattr("min_requests")?.extract()?;
        settings.phase2_factor = guard.getattr("phase2_factor")?.extract()?;
        settings.release_factor = guard.getattr("release_factor")?.extract()?;
        Ok(settings)
    }

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
