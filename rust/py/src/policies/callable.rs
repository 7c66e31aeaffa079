//! Policies that are Python functions from numpy columns to scores.
use crate::errors::Result;
use crate::expr::unknown_indicator;
use lmetric_core::indicators::{DeclaredId, Indicator, IndicatorSet, Named, Scope, Snapshot};
use lmetric_core::policy::{Policy, PolicyRng, PolicySpec, Scores};
use lmetric_core::{CoreError, Maturity};
use numpy::{PyArray1, PyArrayMethods};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use std::borrow::Cow;

/// Source of the policies that are Python functions.
pub const EMBEDDING: &str = "the embedding program";

/// A Python function from numpy columns to an array of scores, for policies that expressions cannot
/// describe.
pub struct Callable {
    spec: PolicySpec,
    function: Py<PyAny>,
    reads: Vec<Indicator>,
    declared: Vec<DeclaredId>,
}

impl Callable {
    pub fn new(policy: &Bound<'_, PyAny>, function: Py<PyAny>) -> Result<Callable> {
        let names: Vec<String> = policy.getattr("reads")?.extract()?;
        let (mut reads, mut declared) = (Vec::new(), Vec::new());
        for name in &names {
            match Named::find(name) {
                Some(Named::BuiltIn(id)) => reads.push(id),
                Some(Named::Declared(id)) => declared.push(id),
                None => return Err(unknown_indicator(name).into()),
            }
        }
        let name: Option<String> = policy.getattr("name")?.extract()?;
        let spec = PolicySpec {
            name: Cow::Owned(name.unwrap_or_else(|| "callable".into())),
            formula: Cow::Borrowed("a Python function over numpy columns"),
            source: Cow::Borrowed(EMBEDDING),
            maturity: Maturity::Stable,
            knobs: &[],
            symmetric: false,
            random: false,
            guard: policy.getattr("guard")?.extract()?,
        };
        Ok(Callable { spec, function, reads, declared })
    }

    /// Fills `scores`. The inner error is what is wrong with the function's result.
    fn call(
        &self,
        py: Python<'_>,
        snapshot: &Snapshot<'_>,
        scores: &mut Scores,
    ) -> PyResult<std::result::Result<(), String>> {
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
        for id in &self.declared {
            let column = snapshot.declared(*id);
            let values = PyArray1::from_iter(py, slots.iter().map(|&slot| column[slot]));
            columns.set_item(id.decl().name, values)?;
        }
        let result = self.function.call1(py, (columns,))?;
        let array = py.import("numpy")?.call_method1("asarray", (&result, "float64")).ok();
        let array = array.and_then(|array| array.cast_into::<PyArray1<f64>>().ok());
        let Some(array) = array.filter(|array| array.len().is_ok_and(|length| length == slots.len())) else {
            let problem = (&self.function, result, slots.len());
            return Ok(Err(plugins(py)?.call_method1("bad_scores", problem)?.extract()?));
        };
        let array = array.readonly();
        for (&slot, &value) in slots.iter().zip(array.as_array()) {
            scores.score[slot] = value;
        }
        Ok(Ok(()))
    }
}

impl Policy for Callable {
    fn spec(&self) -> &PolicySpec {
        &self.spec
    }

    fn reads(&self) -> IndicatorSet {
        IndicatorSet::of(&self.reads)
    }

    fn declared(&self) -> &[DeclaredId] {
        &self.declared
    }

    fn score(
        &self,
        snapshot: &Snapshot<'_>,
        _rng: &mut PolicyRng,
        scores: &mut Scores,
    ) -> std::result::Result<(), CoreError> {
        Python::attach(|py| {
            self.call(py, snapshot, scores)
                .unwrap_or_else(|error| Err(described(py, error)))
                .map_err(|problem| CoreError::Policy { policy: self.spec.name.to_string(), problem })
        })
    }
}

fn plugins(py: Python<'_>) -> PyResult<Bound<'_, PyModule>> {
    py.import("lmetric.plugins")
}

/// An exception of the function with its file and line.
///
/// Ctrl-C is raised again in the caller's code, which could catch the error of the policy.
fn described(py: Python<'_>, error: PyErr) -> String {
    let text = error.to_string();
    let error = error.into_value(py); // with its traceback
    let is_ctrl_c = plugins(py).and_then(|module| module.call_method1("is_ctrl_c", (&error,))?.extract());
    let interrupted = is_ctrl_c.unwrap_or(false);
    let described = plugins(py).and_then(|module| module.call_method1("described", (error,))?.extract());
    if interrupted {
        // SAFETY: it only marks a signal, which Python handles when its main thread runs again.
        unsafe { ffi::PyErr_SetInterrupt() };
    }
    described.unwrap_or(text)
}
