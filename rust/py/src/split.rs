//! How requests are cut, by name and settings.
use crate::errors::Result;
use lmetric_core::CoreError;
use lmetric_core::router::Split;
use pyo3::prelude::*;
use pyo3::types::PyDict;

/// The split of this name with its settings.
///
/// # Errors
/// `BadValue` for a name or a setting that there is not, or a value out of range.
pub fn split_of(kind: &str, settings: Option<&Bound<'_, PyDict>>) -> Result<Split> {
    let mut given: Vec<(String, f64)> = match settings {
        Some(settings) => {
            settings.extract::<std::collections::BTreeMap<String, f64>>()?.into_iter().collect()
        }
        None => Vec::new(),
    };
    let mut take = |name: &str| {
        let place = given.iter().position(|(known, _)| known == name)?;
        Some(given.remove(place).1)
    };
    let split = match kind {
        "none" => Split::None,
        "force" => Split::ForceAt(take("at").unwrap_or(f64::NAN)),
        other => return Err(bad("split", format!("{other:?}"), "\"none\" or \"force\"")),
    };
    if let Some((name, _)) = given.first() {
        let known = if kind == "force" { "at" } else { "nothing" };
        return Err(bad("split", format!("{name} with {kind:?}"), known));
    }
    split.check()?;
    Ok(split)
}

fn bad(what: &str, got: String, expected: &str) -> crate::errors::Error {
    CoreError::BadValue { what: what.into(), got, expected: expected.into() }.into()
}
