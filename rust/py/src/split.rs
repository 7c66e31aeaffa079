//! How requests are split, by name and settings.
use crate::errors::Result;
use crate::registry;
use lmetric_core::router::Split;
use lmetric_core::{CoreError, Registry};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use std::collections::BTreeMap;

/// The split of this name with its settings. `parts` of `libra` is a planner of its own: 3 is
/// `libra_three`.
///
/// # Errors
/// `BadValue` for an unknown name or a value out of range, `UnknownName` for an unknown setting,
/// `Immature` for what the registry does not offer.
pub fn split_of(registry: Registry, kind: &str, settings: Option<&Bound<'_, PyDict>>) -> Result<Split> {
    let mut given = match settings {
        Some(settings) => settings.extract::<BTreeMap<String, f64>>()?,
        None => BTreeMap::new(),
    };
    if kind == "none" {
        return match given.into_keys().next() {
            Some(name) => Err(bad("split", format!("{name} with {kind:?}"), "no settings".into())),
            None => Ok(Split::NONE),
        };
    }
    let parts = if kind == "libra" { given.remove("parts") } else { None };
    let planner = match parts {
        None | Some(2.0) => kind,
        Some(3.0) => "libra_three",
        Some(parts) => return Err(bad("parts of split libra", parts.to_string(), "2 or 3".into())),
    };
    let settings: Vec<(&str, f64)> = given.iter().map(|(name, value)| (&**name, *value)).collect();
    let split = registry::split(registry, planner, &settings);
    Ok(split.map_err(|error| match error {
        CoreError::UnknownName { kind, name, .. } if kind == "split" => {
            let names: Vec<_> = registry.planners().map(|spec| spec.name).collect();
            let expected = format!("none, {}", names.join(", "));
            CoreError::BadValue { what: kind, got: format!("{name:?}"), expected }
        }
        error => error,
    })?)
}

fn bad(what: &str, got: String, expected: String) -> crate::errors::Error {
    CoreError::BadValue { what: what.into(), got, expected }.into()
}
