//! Settings of agent programs, by mode.
use crate::errors::Result;
use crate::settings;
use lmetric_core::CoreError;
use lmetric_core::program::{ProgramConfig, ProgramMode};
use pyo3::prelude::*;
use pyo3::types::PyDict;

/// Returns the settings with this mode; `None` for `"none"`.
///
/// # Errors
/// `BadValue` for an unknown mode or setting, or a value out of range.
pub fn programs_of(kind: &str, settings: Option<&Bound<'_, PyDict>>) -> Result<Option<ProgramConfig>> {
    let mut reader = settings::reader(&format!("programs {kind}"), settings)?;
    let mode = ProgramMode::NAMES.iter().find(|(name, _)| *name == kind).map(|(_, mode)| *mode);
    let programs = match mode {
        Some(mode) => Some(ProgramConfig { mode, ..reader.read()? }.checked()?),
        None if kind == "none" => None,
        None => {
            let expected = "\"none\", \"observe\" or \"admit\"".into();
            let (what, got) = ("programs".into(), format!("{kind:?}"));
            return Err(CoreError::BadValue { what, got, expected }.into());
        }
    };
    reader.finish()?;
    Ok(programs)
}
