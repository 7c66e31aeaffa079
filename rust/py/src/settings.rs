//! Settings in Python dictionaries.
use crate::errors::Result;
use lmetric_core::CoreError;
use lmetric_core::router::FetchConfig;
use lmetric_core::settings::SettingsReader;
use lmetric_core::warm::WarmConfig;
use pyo3::prelude::*;
use pyo3::types::PyDict;

/// Creates a reader of `settings`; None stands for the default. `what` names the settings in
/// errors.
pub fn reader(what: &str, settings: Option<&Bound<'_, PyDict>>) -> Result<SettingsReader> {
    let given = settings.into_iter().flatten().filter(|(_, value)| !value.is_none());
    let given = given.map(|(name, value)| {
        let number = value.extract::<f64>().map_err(|_| format!("{value:?}"));
        Ok((name.extract::<String>()?, number))
    });
    Ok(SettingsReader::new(what, given.collect::<PyResult<Vec<_>>>()?))
}

/// Returns the settings of fleet changes of this kind; `None` for `"none"`: cold.
///
/// # Errors
/// `BadValue` for an unknown kind or setting, or a value out of range.
pub fn warm_of(kind: &str, settings: Option<&Bound<'_, PyDict>>) -> Result<Option<WarmConfig>> {
    let mut reader = reader(&format!("fleet_changes {kind}"), settings)?;
    let warm = match kind {
        "none" => None,
        "warm" => Some(reader.read::<WarmConfig>()?),
        other => {
            let (what, got) = ("fleet_changes".into(), format!("{other:?}"));
            return Err(CoreError::BadValue { what, got, expected: "\"none\" or \"warm\"".into() }.into());
        }
    };
    reader.finish()?;
    warm.map_or(Ok(()), |warm| warm.check())?;
    Ok(warm)
}

/// Reads the settings of prefix fetches.
///
/// # Errors
/// `BadValue` for an unknown setting or a value out of range.
pub fn fetch_of(settings: Option<&Bound<'_, PyDict>>) -> Result<FetchConfig> {
    let mut reader = reader("prefix_fetch", settings)?;
    let fetch: FetchConfig = reader.read()?;
    reader.finish()?;
    fetch.check()?;
    Ok(fetch)
}
