//! Policies from Python: a registered name, expressions, or a callable over numpy columns.
mod callable;
mod fallback;
mod watchdog;

use callable::Callable;
use fallback::WithFallback;

pub use watchdog::PolicyTimeout;

use crate::errors::Result;
use crate::expr::nearest_indicator;
use lmetric_core::indicators::Named;
use lmetric_core::policy::expression::{ExpressionPolicy, ExpressionSource};
use lmetric_core::policy::{KnobKind, Policy, Prefer};
use lmetric_core::registry::DEFAULT_POLICY;
use lmetric_core::{CoreError, Registry};
use lmetric_study::REGISTRY;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyString};
use std::time::Duration;

/// Builds the policy that `policy` describes.
///
/// `policy`: `None` (lmetric), a name, the text of a score expression, a reference to a Python
/// object (`file.py:name`), an `lmetric.Expr`, an `lmetric.Policy` (texts), an
/// `lmetric.policy_function`, or a function whose parameters are indicators. Named policies come
/// from `registry`.
pub fn build(
    registry: Registry,
    policy: Option<&Bound<'_, PyAny>>,
    knobs: Option<&Bound<'_, PyDict>>,
) -> Result<Box<dyn Policy>> {
    build_timed(registry, policy, knobs, true)
}

/// Returns whether a policy calls a Python function.
pub fn calls_python(policy: &dyn Policy) -> bool {
    policy.spec().source == callable::EMBEDDING
}

/// Builds a policy as [`build`] does. `timed`: whether time limits of Python policies apply.
/// Simulations have no time limits, because their results must not depend on the machine.
pub fn build_timed(
    registry: Registry,
    policy: Option<&Bound<'_, PyAny>>,
    knobs: Option<&Bound<'_, PyDict>>,
    timed: bool,
) -> Result<Box<dyn Policy>> {
    let mut given: Vec<(String, f64)> = match knobs {
        None => Vec::new(),
        Some(dict) => dict
            .iter()
            .map(|(name, value)| Ok((name.extract::<String>()?, value.extract::<f64>()?)))
            .collect::<PyResult<_>>()?,
    };
    let Some(policy) = policy.filter(|p| !p.is_none()) else {
        return Ok(registry.policy(DEFAULT_POLICY, &given)?);
    };
    if let Ok(text) = policy.cast::<PyString>() {
        let error = match from_text(registry, text.to_str()?, &given) {
            Ok(policy) => return Ok(policy),
            Err(error) => error,
        };
        // A text that is no policy and no expression may name a Python object.
        let found = policy.py().import("lmetric.policies")?.call_method1("referenced", (text,))?;
        return if found.is_none() {
            Err(error.into())
        } else {
            build_timed(registry, Some(&found), knobs, timed)
        };
    }
    if let Ok(function) = policy.getattr("fn") {
        if let Some((name, _)) = given.first() {
            return Err(CoreError::BadValue {
                what: "knobs".into(),
                got: format!("{name} of a Python policy"),
                expected: "none: keep constants in the function's module".into(),
            }
            .into());
        }
        return python_policy(registry, policy, function.unbind(), timed);
    }
    if policy.is_instance(&policy.py().import("lmetric.expr")?.getattr("Expr")?)? {
        let source = ExpressionSource { score: policy.str()?.extract()?, ..ExpressionSource::default() };
        return Ok(Box::new(ExpressionPolicy::custom(None, source, &given)?));
    }
    let policies = policy.py().import("lmetric.policies")?;
    if !policy.is_instance(&policies.getattr("Policy")?)? {
        let function = policies.call_method1("policy_function", (policy,))?;
        return build_timed(registry, Some(&function), knobs, timed);
    }
    let name: Option<String> = policy.getattr("name")?.extract()?;
    let score: Option<String> = policy.getattr("score")?.extract()?;
    let constants: Vec<(String, f64)> = policy
        .getattr("knobs")?
        .cast::<PyDict>()
        .map_err(PyErr::from)?
        .iter()
        .map(|(name, value)| Ok((name.extract::<String>()?, value.extract::<f64>()?)))
        .collect::<PyResult<_>>()?;
    given.extend(constants);
    let Some(score) = score else {
        return Ok(registry.policy(name.as_deref().unwrap_or(DEFAULT_POLICY), &given)?);
    };
    let then: Vec<(String, String)> = policy.getattr("then")?.extract()?;
    let source = ExpressionSource {
        filter: policy.getattr("filter")?.extract()?,
        score,
        prefer: prefer(&policy.getattr("prefer")?.extract::<String>()?)?,
        then: then.into_iter().map(|(text, end)| Ok((text, prefer(&end)?))).collect::<Result<_>>()?,
    };
    let guard: Option<bool> = policy.getattr("guard")?.extract()?;
    Ok(Box::new(ExpressionPolicy::custom(name.as_deref(), source, &given)?.with_guard(guard)))
}

/// A Python function as a policy, with its fallback if it has one.
fn python_policy(
    registry: Registry,
    policy: &Bound<'_, PyAny>,
    function: Py<PyAny>,
    timed: bool,
) -> Result<Box<dyn Policy>> {
    let callable = Callable::new(policy, function)?;
    let fallback = policy.getattr("fallback")?;
    if fallback.is_none() {
        return Ok(Box::new(callable));
    }
    let limit: Option<f64> = policy.getattr("time_limit_seconds")?.extract()?;
    let limit = limit.filter(|_| timed).map(Duration::from_secs_f64);
    let fallback = build_timed(registry, Some(&fallback), None, timed)?;
    Ok(Box::new(WithFallback::new(callable, fallback, limit)))
}

/// Builds a policy from a registered name or the text of a score expression.
fn from_text(
    registry: Registry,
    text: &str,
    knobs: &[(String, f64)],
) -> std::result::Result<Box<dyn Policy>, CoreError> {
    let word = text.trim();
    let is_name = !word.is_empty() && word.chars().all(|c| c.is_ascii_alphanumeric() || c == '_' || c == '-');
    let is_number = word.starts_with(|c: char| c.is_ascii_digit());
    if is_name && !is_number && Named::find(word).is_none() {
        return registry.policy(word, knobs).map_err(|error| match error {
            CoreError::UnknownName { kind, name, nearest: None } if kind == "policy" => {
                CoreError::UnknownName {
                    kind: "policy or indicator".into(),
                    nearest: nearest_indicator(&name),
                    name,
                }
            }
            other => other,
        });
    }
    let source = ExpressionSource { score: text.into(), ..ExpressionSource::default() };
    Ok(Box::new(ExpressionPolicy::custom(None, source, knobs)?))
}

fn prefer(end: &str) -> Result<Prefer> {
    match end {
        "min" => Ok(Prefer::Min),
        "max" => Ok(Prefer::Max),
        other => Err(CoreError::BadValue {
            what: "prefer".into(),
            got: format!("{other:?}"),
            expected: "\"min\" or \"max\"".into(),
        }
        .into()),
    }
}

/// Returns the declarations of the registered policies as dictionaries.
///
/// Keys: `name`, `formula`, `source`, `maturity` (`stable`, `experimental` or `study`), `knobs`
/// (name, type, min, max, default, about) and `reads` (indicators).
#[pyfunction]
pub fn policy_table(py: Python<'_>) -> PyResult<Bound<'_, PyList>> {
    let table = PyList::empty(py);
    for spec in REGISTRY.policies() {
        let row = PyDict::new(py);
        row.set_item("name", &*spec.name)?;
        row.set_item("formula", &*spec.formula)?;
        row.set_item("source", &*spec.source)?;
        row.set_item("maturity", spec.maturity.name())?;
        let knobs = PyList::empty(py);
        for knob in spec.knobs {
            let entry = PyDict::new(py);
            entry.set_item("name", knob.name)?;
            entry.set_item("default", knob.default)?;
            entry.set_item("about", knob.about)?;
            let (kind, min, max) = match knob.kind {
                KnobKind::Float { min, max } => ("float", min, max),
                KnobKind::Int { min, max } => ("int", min as f64, max as f64),
                KnobKind::Bool => ("bool", 0.0, 1.0),
            };
            entry.set_item("type", kind)?;
            entry.set_item("min", min)?;
            entry.set_item("max", max)?;
            knobs.append(entry)?;
        }
        row.set_item("knobs", knobs)?;
        row.set_item("reads", {
            let policy = REGISTRY.policy(&spec.name, &[]).map_err(crate::errors::to_python)?;
            policy.reads().iter().map(|i| i.decl().name).collect::<Vec<_>>()
        })?;
        table.append(row)?;
    }
    Ok(table)
}
