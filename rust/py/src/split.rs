//! How requests are split, by name and settings.
use crate::errors::Result;
use lmetric_core::router::Split;
use lmetric_core::{CoreError, Maturity, Registry};
use lmetric_study::planner::{self, LEARNERS};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use std::collections::BTreeMap;

/// Returns the split of this name with its settings. `parts` of `libra` is a planner of its own: 3
/// is `libra_three`. With `lengths_given`, requests bring their output length.
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
    let name = match parts {
        None | Some(2.0) => kind,
        Some(3.0) => "libra_three",
        Some(parts) => return Err(bad("parts of split libra", parts.to_string(), "2 or 3".into())),
    };
    let lengths_given = if LEARNERS.contains(&name) { given.remove("lengths_given") } else { None };
    let settings: Vec<(&str, f64)> = given.iter().map(|(name, value)| (&**name, *value)).collect();
    let split = registry.split(name, &settings).map_err(|error| match error {
        CoreError::UnknownName { kind, name, .. } if kind == "split" => {
            let names: Vec<_> = registry.planners().map(|spec| spec.name).collect();
            let expected = format!("none, {}", names.join(", "));
            CoreError::BadValue { what: kind, got: format!("{name:?}"), expected }
        }
        error => error,
    })?;
    match lengths_given {
        None | Some(0.0) => Ok(split),
        Some(1.0) if registry.offers() == Maturity::Study => Ok(planner::given(split)),
        Some(1.0) => {
            let (kind, name) = (format!("parameter of split {name}"), "lengths_given".into());
            Err(CoreError::Immature { kind, name, maturity: Maturity::Study }.into())
        }
        Some(other) => Err(bad(
            &format!("parameter lengths_given of split {name}"),
            other.to_string(),
            "0 (false) or 1 (true)".into(),
        )),
    }
}

fn bad(what: &str, got: String, expected: String) -> crate::errors::Error {
    CoreError::BadValue { what: what.into(), got, expected }.into()
}
