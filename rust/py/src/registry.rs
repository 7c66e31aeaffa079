//! Policies and planners that a router offers.
use crate::errors::Result;
use crate::policies;
use lmetric_core::{CoreError, Maturity, Registry};
use lmetric_study::REGISTRY;
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedStr;
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

/// Checks a policy: its name, an `lmetric.Policy` or an `lmetric.policy_function`. `offers`: the
/// least mature policies and indicators that are accepted (`stable`, `experimental`, `study`).
/// `knobs`: parameters of a name. Raises `UnknownNameError`, and `BadValueError` for a policy or
/// indicator that is not offered or a parameter out of its range.
#[pyfunction]
pub fn check_policy(policy: &Bound<'_, PyAny>, knobs: &Bound<'_, PyDict>, offers: &str) -> Result<()> {
    let registry = offering(offers)?;
    let Ok(name) = policy.extract::<PyBackedStr>() else {
        policies::build(registry, Some(policy), Some(knobs))?;
        return Ok(());
    };
    let knobs: Vec<(String, f64)> = knobs
        .iter()
        .map(|(name, value)| Ok((name.extract::<String>()?, value.extract::<f64>()?)))
        .collect::<PyResult<_>>()?;
    registry.policy(&name, &knobs)?;
    Ok(())
}

/// Returns the names of the planners for `split`. `offers`: the least mature planners that are
/// returned (`stable`, `experimental`, `study`).
#[pyfunction]
#[pyo3(signature = (offers="study"))]
pub fn planners(offers: &str) -> Result<Vec<&'static str>> {
    Ok(offering(offers)?.planners().map(|spec| spec.name).collect())
}
