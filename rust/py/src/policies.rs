//! Policies from Python: a registered name, expressions, or a callable over numpy columns.
use crate::errors::Result;
use lmetric_core::CoreError;
use lmetric_core::indicators::{Indicator, IndicatorSet, Scope, Snapshot};
use lmetric_core::policy::expression::{ExpressionPolicy, ExpressionSource};
use lmetric_core::policy::{KnobKind, Policy, PolicyRng, PolicySpec, Prefer, Scores, registry};
use lmetric_core::suggest::nearest;
use numpy::{PyArray1, PyArrayMethods};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyString};
use std::borrow::Cow;

/// Builds the policy that `policy` describes: `None` (lmetric), a name, the text of a score expression, an `lmetric.Expr`, an `lmetric.Policy` (texts),
/// or an `lmetric.policy_function` (a callable).
pub fn build(
    policy: Option<&Bound<'_, PyAny>>,
    knobs: Option<&Bound<'_, PyDict>>,
) -> Result<Box<dyn Policy>> {
    let mut given: Vec<(String, f64)> = match knobs {
        None => Vec::new(),
        Some(dict) => dict
            .iter()
            .map(|(name, value)| Ok((name.extract::<String>()?, value.extract::<f64>()?)))
            .collect::<PyResult<_>>()?,
    };
    let Some(policy) = policy.filter(|p| !p.is_none()) else {
        return Ok(registry::build("lmetric", &given)?);
    };
    if let Ok(text) = policy.cast::<PyString>() {
        return Ok(from_text(text.to_str()?, &given)?);
    }
    if let Ok(function) = policy.getattr("fn") {
        return Ok(Box::new(Callable::new(policy, function.unbind())?));
    }
    if policy.is_instance(&policy.py().import("lmetric.expr")?.getattr("Expr")?)? {
        let source = ExpressionSource { score: policy.str()?.extract()?, ..ExpressionSource::default() };
        return Ok(Box::new(ExpressionPolicy::custom(None, source, &given)?));
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
        return Ok(registry::build(name.as_deref().unwrap_or("lmetric"), &given)?);
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

/// A registered name, or the text of a score expression.
fn from_text(text: &str, knobs: &[(String, f64)]) -> std::result::Result<Box<dyn Policy>, CoreError> {
    let word = text.trim();
    let is_name = !word.is_empty() && word.chars().all(|c| c.is_ascii_alphanumeric() || c == '_' || c == '-');
    let is_number = word.starts_with(|c: char| c.is_ascii_digit());
    if is_name && !is_number && Indicator::from_name(word).is_none() {
        return registry::build(word, knobs).map_err(|error| match error {
            CoreError::UnknownName { kind, name, nearest: None } if kind == "policy" => {
                CoreError::UnknownName {
                    kind: "policy or indicator".into(),
                    nearest: nearest(&name, lmetric_core::indicators::INDICATORS.iter().map(|d| d.name)),
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

/// A Python function from numpy columns to an array of scores: the escape hatch.
struct Callable {
    spec: PolicySpec,
    function: Py<PyAny>,
    reads: Vec<Indicator>,
}

impl Callable {
    fn new(policy: &Bound<'_, PyAny>, function: Py<PyAny>) -> Result<Callable> {
        let names: Vec<String> = policy.getattr("reads")?.extract()?;
        let reads = names
            .iter()
            .map(|name| {
                Indicator::from_name(name).ok_or_else(|| {
                    CoreError::UnknownName {
                        kind: "indicator".into(),
                        name: name.clone(),
                        nearest: nearest(name, lmetric_core::indicators::INDICATORS.iter().map(|d| d.name)),
                    }
                    .into()
                })
            })
            .collect::<Result<Vec<_>>>()?;
        let name: Option<String> = policy.getattr("name")?.extract()?;
        let spec = PolicySpec {
            name: Cow::Owned(name.unwrap_or_else(|| "callable".into())),
            formula: Cow::Borrowed("a Python function over numpy columns"),
            source: Cow::Borrowed("the embedding program"),
            knobs: &[],
            symmetric: false,
            random: false,
            guard: policy.getattr("guard")?.extract()?,
        };
        Ok(Callable { spec, function, reads })
    }

    fn call(&self, py: Python<'_>, snapshot: &Snapshot<'_>, scores: &mut Scores) -> PyResult<()> {
        let slots: Vec<usize> = snapshot.eligible_slots().collect();
        let columns = PyDict::new(py);
        for &id in &self.reads {
            let decl = id.decl();
            if decl.scope == Scope::Request {
                columns.set_item(decl.name, snapshot.request(id))?;
            } else {
                let column = snapshot.column(id);
                columns.set_item(decl.name, PyArray1::from_iter(py, slots.iter().map(|&i| column[i])))?;
            }
        }
        let numpy = py.import("numpy")?;
        let result = numpy.call_method1("asarray", (self.function.call1(py, (columns,))?, "float64"))?;
        let result = result.cast::<PyArray1<f64>>()?.readonly();
        let values = result.as_slice()?;
        if values.len() != slots.len() {
            return Err(crate::errors::BadValueError::new_err(format!(
                "policy {}: returned {} scores for {} instances; expected one each",
                self.spec.name,
                values.len(),
                slots.len()
            )));
        }
        for (&slot, &value) in slots.iter().zip(values) {
            scores.score[slot] = value;
        }
        Ok(())
    }
}

impl Policy for Callable {
    fn spec(&self) -> &PolicySpec {
        &self.spec
    }

    fn reads(&self) -> IndicatorSet {
        IndicatorSet::of(&self.reads)
    }

    fn score(
        &self,
        snapshot: &Snapshot<'_>,
        _rng: &mut PolicyRng,
        scores: &mut Scores,
    ) -> std::result::Result<(), CoreError> {
        Python::attach(|py| {
            self.call(py, snapshot, scores).map_err(|error| CoreError::Policy {
                policy: self.spec.name.to_string(),
                problem: error.to_string(),
            })
        })
    }
}

/// What the registered policies declare of themselves: dictionaries of `name`, `formula`, `source`, `guard` (whether the hot-spot
/// guard filters their candidates), `knobs` (name, type, min, max, default, about) and `reads` (indicators).
#[pyfunction]
pub fn policy_table(py: Python<'_>) -> PyResult<Bound<'_, PyList>> {
    let table = PyList::empty(py);
    for spec in registry::specs() {
        let row = PyDict::new(py);
        row.set_item("name", &*spec.name)?;
        row.set_item("formula", &*spec.formula)?;
        row.set_item("source", &*spec.source)?;
        row.set_item("guard", spec.guard == Some(true))?;
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
            let policy = registry::build(&spec.name, &[]).map_err(crate::errors::to_python)?;
            policy.reads().iter().map(|i| i.decl().name).collect::<Vec<_>>()
        })?;
        table.append(row)?;
    }
    Ok(table)
}
