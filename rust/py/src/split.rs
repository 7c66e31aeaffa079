//! How requests are split, by name and settings.
use crate::errors::Result;
use lmetric_core::CoreError;
use lmetric_core::router::Split;
use lmetric_core::router::planners as registry;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use std::collections::BTreeMap;

/// The names of the planners, of which `split` takes one.
#[pyfunction]
pub fn planners() -> Vec<&'static str> {
    registry::specs().iter().map(|spec| spec.name).collect()
}

/// The split of this name with its settings.
///
/// # Errors
/// `BadValue` for an unknown name or a value out of range, `UnknownName` for an unknown setting.
pub fn split_of(kind: &str, settings: Option<&Bound<'_, PyDict>>) -> Result<Split> {
    let given = match settings {
        Some(settings) => settings.extract::<BTreeMap<String, f64>>()?.into_iter().collect(),
        None => Vec::new(),
    };
    let planner = (kind != "none").then(|| kind.to_string());
    let names = planners();
    if planner.is_some() && !names.contains(&kind) {
        return Err(bad("split", format!("{kind:?}"), format!("none, {}", names.join(", "))));
    }
    if let (None, Some((name, _))) = (&planner, given.first()) {
        return Err(bad("split", format!("{name} with {kind:?}"), "no settings".into()));
    }
    let split = Split { planner, settings: given };
    split.check()?;
    Ok(split)
}

fn bad(what: &str, got: String, expected: String) -> crate::errors::Error {
    CoreError::BadValue { what: what.into(), got, expected }.into()
}
