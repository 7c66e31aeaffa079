//! Policies and planners that a router offers.
use crate::errors::Result;
use lmetric_core::{CoreError, Maturity, Registry};
use lmetric_study::REGISTRY;
use pyo3::prelude::*;
use pyo3::types::PyDict;

/// Returns the registry of a router that offers parts up to a maturity. Servers use `stable` and
/// `experimental`.
///
/// # Errors
/// `BadValue` for an unknown maturity.
pub fn offering(maturity: &str) -> Result<Registry> {
    let Some(offers) = Maturity::named(maturity) else {
        let expected = Maturity::ALL.map(|maturity| format!("{:?}", maturity.name())).join(", ");
        let got = format!("{maturity:?}");
        return Err(CoreError::BadValue { what: "offers".into(), got, expected }.into());
    };
    Ok(REGISTRY.offering(offers))
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
    offering(offers)?.policy(name, &knobs)?;
    Ok(())
}

/// Returns the names of the planners for `split`. `offers`: the least mature planners that are
/// returned (`stable`, `experimental`, `study`).
#[pyfunction]
#[pyo3(signature = (offers="study"))]
pub fn planners(offers: &str) -> Result<Vec<&'static str>> {
    Ok(offering(offers)?.planners().map(|spec| spec.name).collect())
}
