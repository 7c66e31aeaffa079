//! Policies and planners that a router offers.
use crate::errors::Result;
use lmetric_core::policy::Policy;
use lmetric_core::router::Split;
use lmetric_core::{CoreError, Maturity, Registry};
use lmetric_study::REGISTRY;
use pyo3::prelude::*;
use pyo3::types::PyDict;

/// Returns the registry of a router that offers parts up to a maturity. Registries up to `stable`
/// and `experimental`, which servers use, do not contain the parts for studies.
///
/// # Errors
/// `BadValue` for an unknown maturity.
pub fn offering(maturity: &str) -> Result<Registry> {
    Ok(match Maturity::named(maturity) {
        Some(Maturity::Stable) => Registry::product(),
        Some(Maturity::Experimental) => Registry::product().with_experimental(),
        Some(Maturity::Study) => REGISTRY,
        None => {
            let expected = Maturity::ALL.map(|maturity| format!("{:?}", maturity.name())).join(", ");
            let got = format!("{maturity:?}");
            return Err(CoreError::BadValue { what: "offers".into(), got, expected }.into());
        }
    })
}

/// Builds the policy with this name and these parameters.
///
/// # Errors
/// The errors of [`Registry::policy`]; `Immature` for a policy that only studies offer.
pub fn policy(
    registry: Registry,
    name: &str,
    knobs: &[(String, f64)],
) -> std::result::Result<Box<dyn Policy>, CoreError> {
    let studied = || REGISTRY.policies().any(|spec| spec.name == name);
    registry.policy(name, knobs).map_err(|error| for_studies(error, studied))
}

/// Builds the split of the planner with this name and these settings.
///
/// # Errors
/// The errors of [`Registry::split`]; `Immature` for a planner that only studies offer.
pub fn split(
    registry: Registry,
    name: &str,
    settings: &[(&str, f64)],
) -> std::result::Result<Split, CoreError> {
    let studied = || REGISTRY.planners().any(|spec| spec.name == name);
    registry.split(name, settings).map_err(|error| for_studies(error, studied))
}

/// Replaces the error for an unknown name if the studies' registry knows the name.
fn for_studies(error: CoreError, studied: impl Fn() -> bool) -> CoreError {
    match error {
        CoreError::UnknownName { kind, name, .. } if matches!(&*kind, "policy" | "split") && studied() => {
            CoreError::Immature { kind, name, maturity: Maturity::Study }
        }
        error => error,
    }
}

/// Checks a policy by its name. `offers`: the least mature policies that are accepted (`stable`,
/// `experimental`, `study`). Raises `UnknownNameError`, and `BadValueError` for a policy that is
/// not offered or a parameter out of its range.
#[pyfunction]
pub fn check_policy(name: &str, knobs: &Bound<'_, PyDict>, offers: &str) -> Result<()> {
    let knobs: Vec<(String, f64)> = knobs
        .iter()
        .map(|(name, value)| Ok((name.extract::<String>()?, value.extract::<f64>()?)))
        .collect::<PyResult<_>>()?;
    policy(offering(offers)?, name, &knobs)?;
    Ok(())
}

/// Returns the names of the planners for `split`. `offers`: the least mature planners that are
/// returned (`stable`, `experimental`, `study`).
#[pyfunction]
#[pyo3(signature = (offers="study"))]
pub fn planners(offers: &str) -> Result<Vec<&'static str>> {
    Ok(offering(offers)?.planners().map(|spec| spec.name).collect())
}
