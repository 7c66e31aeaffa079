//! Hot-spot guard settings for routers and simulations.
use crate::buffers::bad;
use crate::errors::Result;
use crate::settings;
use lmetric_core::guard::{self, GuardConfig};
use lmetric_core::policy::Policy;
use pyo3::prelude::*;
use pyo3::types::PyBool;

/// Guard settings given in Python.
#[derive(Clone, Copy, Default)]
pub struct GuardSettings {
    /// Whether the guard is on; `None`: the policy decides.
    pub on: Option<bool>,
    config: GuardConfig,
}

impl GuardSettings {
    /// Reads the `guard=` argument: nothing, a flag, or an `lmetric.Guard`.
    ///
    /// # Errors
    /// `BadValueError` for any other value, and for a count that is not an integer.
    pub fn of(guard: Option<&Bound<'_, PyAny>>) -> Result<GuardSettings> {
        let Some(guard) = guard else { return Ok(GuardSettings::default()) };
        if let Ok(on) = guard.cast::<PyBool>() {
            return Ok(GuardSettings { on: Some(on.is_true()), ..GuardSettings::default() });
        }
        let py = guard.py();
        if !guard.is_instance(&py.import("lmetric.options")?.getattr("Guard")?)? {
            return Err(bad(guard, "guard", "True, False, lmetric.Guard(...) or None"));
        }
        let given = guard.call_method0("model_dump")?;
        let mut reader = settings::reader("hot-spot guard", Some(given.cast().map_err(PyErr::from)?))?;
        let settings = GuardSettings { on: reader.one("enabled")?, config: reader.read()? };
        reader.finish()?;
        Ok(settings)
    }

    /// Returns the core's settings under `policy`, and the reason why the guard is on or off.
    pub fn under(self, policy: &dyn Policy) -> (GuardConfig, String) {
        let (on, reason) = guard::applies(policy, self.on);
        (GuardConfig { on, ..self.config }, reason)
    }
}
