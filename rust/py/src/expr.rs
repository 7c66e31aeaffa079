//! Score expressions from Python: checks, and evaluation over numpy columns.
use crate::errors::{BadValueError, Result};
use lmetric_core::CoreError;
use lmetric_core::expr::{self, Inputs, Scratch, Type, nearest};
use lmetric_core::indicators::{INDICATORS, IndicatorSet, Named, declared, expressions};
use lmetric_core::registry;
use lmetric_study::REGISTRY;
use numpy::{PyArray1, PyReadonlyArrayDyn, PyUntypedArrayMethods};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};
use std::collections::HashMap;

/// With fewer values, releasing the interpreter lock costs more than it gains.
const RELEASE_FROM: usize = 1 << 14;

/// Adds its classes and functions to the module.
pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("MAX_EXPRESSION_LENGTH", expr::MAX_LENGTH)?;
    module.add_class::<Program>()?;
    module.add_function(wrap_pyfunction!(indicator_table, module)?)?;
    module.add_function(wrap_pyfunction!(declare_indicator, module)?)?;
    module.add_function(wrap_pyfunction!(check_expression, module)?)?;
    module.add_function(wrap_pyfunction!(nearest_name, module)?)
}

/// Returns the nearest indicator name, if it is near enough to be a likely typing error.
pub fn nearest_indicator(name: &str) -> Option<String> {
    nearest(name, Named::names())
}

/// The error for an unknown indicator name.
pub fn unknown_indicator(name: &str) -> CoreError {
    CoreError::UnknownName { kind: "indicator".into(), name: name.into(), nearest: nearest_indicator(name) }
}

/// Names of the indicators that a program reads: built-in indicators in table order, then others.
fn reads(program: &expr::Program) -> Vec<&'static str> {
    let (mut built_in, mut declared) = (IndicatorSet::EMPTY, Vec::new());
    for named in Named::read_by(program) {
        match named {
            Named::BuiltIn(id) => built_in.insert(id),
            Named::Declared(id) => declared.push(id.decl().name),
        }
    }
    built_in.iter().map(|id| id.decl().name).chain(declared).collect()
}

/// Declares an indicator: one number per instance, reported with `Router.report_load(...,
/// extra={name: value})`. The whole process knows it from then on. Raises `BadValueError` for a
/// name that is taken or not valid, and for attributes that differ from an earlier declaration.
#[pyfunction]
#[pyo3(signature = (name, unit = "", default = None, max_age_seconds = None))]
fn declare_indicator(
    name: &str,
    unit: &str,
    default: Option<f64>,
    max_age_seconds: Option<f64>,
) -> Result<()> {
    registry::declare_indicator(REGISTRY, name, unit, default, max_age_seconds)?;
    Ok(())
}

/// Returns the declarations of all indicators, in order: name, unit, scope (`instance`, `pair`,
/// `request`), owner, freshness, meaning of absence, description. Indicators declared by programs
/// come last; their owner is `declared`.
#[pyfunction]
fn indicator_table(py: Python<'_>) -> PyResult<Bound<'_, PyList>> {
    let table = PyList::empty(py);
    for decl in INDICATORS {
        let row = PyDict::new(py);
        row.set_item("name", decl.name)?;
        row.set_item("unit", decl.unit)?;
        row.set_item("scope", format!("{:?}", decl.scope).to_lowercase())?;
        row.set_item("owner", format!("{:?}", decl.owner).to_lowercase())?;
        row.set_item("freshness", decl.freshness)?;
        row.set_item("absent", decl.absent)?;
        row.set_item("about", decl.about)?;
        table.append(row)?;
    }
    for decl in declared::declared() {
        let row = PyDict::new(py);
        row.set_item("name", decl.name)?;
        row.set_item("unit", decl.unit)?;
        row.set_item("scope", "instance")?;
        row.set_item("owner", "declared")?;
        row.set_item(
            "freshness",
            match decl.max_age_seconds {
                Some(age) => format!("as old as the last report, at most {age} s"),
                None => "as old as the last report".into(),
            },
        )?;
        row.set_item(
            "absent",
            match decl.default {
                Some(value) => format!("never: {value} until it is reported"),
                None => "until it is reported".into(),
            },
        )?;
        row.set_item("about", "Declared by this program or its configuration.")?;
        table.append(row)?;
    }
    Ok(table)
}

/// Checks an expression and returns the names of the indicators it reads. `kind`: `score` or `then`
/// (a number), `filter` (a truth value) or `any`. Raises `ExpressionError`.
#[pyfunction]
#[pyo3(signature = (text, kind = "score", knobs = None))]
fn check_expression(
    text: &str,
    kind: &str,
    knobs: Option<HashMap<String, f64>>,
) -> Result<Vec<&'static str>> {
    Ok(reads(&compile(text, kind, knobs.as_ref())?))
}

/// Returns the name of `known` nearest to `name`, if it is near enough to be a likely typing error.
#[pyfunction]
fn nearest_name(name: &str, known: Vec<String>) -> Option<String> {
    nearest(name, known.iter().map(String::as_str))
}

fn compile(text: &str, kind: &str, knobs: Option<&HashMap<String, f64>>) -> Result<expr::Program> {
    let expect = match kind {
        "score" | "then" => Some(Type::Number),
        "filter" => Some(Type::Bool),
        "any" => None,
        _ => {
            return Err(CoreError::BadValue {
                what: "kind of expression".into(),
                got: format!("{kind:?}"),
                expected: "\"score\", \"then\", \"filter\" or \"any\"".into(),
            }
            .into());
        }
    };
    let knobs: Vec<(&str, f64)> = knobs.into_iter().flatten().map(|(name, x)| (name.as_str(), *x)).collect();
    Ok(expressions::compile(text, expect, &knobs).map_err(CoreError::Expression)?)
}

/// A checked expression that runs over numpy columns.
#[pyclass(frozen, module = "lmetric")]
pub struct Program {
    program: expr::Program,
}

#[pymethods]
impl Program {
    #[new]
    #[pyo3(signature = (text, kind = "any", knobs = None))]
    fn new(text: &str, kind: &str, knobs: Option<HashMap<String, f64>>) -> Result<Program> {
        Ok(Program { program: compile(text, kind, knobs.as_ref())? })
    }

    /// Names of the indicators that the expression reads.
    #[getter]
    fn reads(&self) -> Vec<&'static str> {
        reads(&self.program)
    }

    /// Evaluates the expression over C-contiguous float64 columns by indicator name.
    ///
    /// Shape of a column: `(instances,)` or `(requests, instances)`; `()` or `(requests,)` for an
    /// indicator of the request. `eligible`: bool, `(instances,)` or `(requests, instances)`.
    /// Returns the values, float64 or bool: `(requests, instances)` if an operand has requests,
    /// else `(instances,)`.
    #[pyo3(signature = (columns, eligible = None, groups = None))]
    fn evaluate<'py>(
        &self,
        py: Python<'py>,
        columns: HashMap<String, PyReadonlyArrayDyn<'py, f64>>,
        eligible: Option<PyReadonlyArrayDyn<'py, bool>>,
        groups: Option<Vec<u32>>,
    ) -> Result<Bound<'py, PyAny>> {
        let mut shape = Shape::default();
        let mut operands = Vec::new();
        for (name, array) in &columns {
            let named = Named::find(name).ok_or_else(|| unknown_indicator(name))?;
            let stride = shape.take(name, array.shape(), named.of_request())?;
            operands.push((named, stride, array.as_slice().map_err(|_| contiguous(name))?));
        }
        for name in reads(&self.program) {
            if !operands.iter().any(|operand| operand.0.name() == name) {
                return Err(BadValueError::new_err(format!(
                    "columns: {name:?} is missing; the expression reads it"
                ))
                .into());
            }
        }
        let mask = match &eligible {
            Some(mask) => {
                let stride = shape.take("eligible", mask.shape(), false)?;
                Some((stride, mask.as_slice().map_err(|_| contiguous("eligible"))?))
            }
            None => None,
        };
        let Some(slots) = shape.instances else {
            return Err(BadValueError::new_err(
                "columns: no column has a value per instance, so the number of instances is not known",
            )
            .into());
        };
        let groups = groups.unwrap_or_default();
        if !groups.is_empty()
            && (groups.len() != slots || groups.iter().any(|group| *group as usize >= slots))
        {
            return Err(BadValueError::new_err(format!(
                "groups: {} of {slots} instances; expected one for each instance",
                groups.len()
            ))
            .into());
        }
        let requests = shape.requests.unwrap_or(1);
        let everyone = if mask.is_none() { vec![true; slots] } else { Vec::new() };
        let mut out = vec![0.0; requests * slots];
        let mut run = || {
            let mut scratch = Scratch::default();
            for (request, out) in out.chunks_exact_mut(slots.max(1)).enumerate() {
                let eligible =
                    mask.map_or(&everyone[..], |(stride, mask)| &mask[request * stride..][..slots]);
                let mut inputs = Inputs::new(eligible);
                inputs.set_groups(&groups);
                for read in Named::read_by(&self.program) {
                    let operand = operands.iter().find(|operand| operand.0 == read);
                    let (_, stride, values) = operand.expect("every column is set");
                    let width = if read.of_request() { 1 } else { slots };
                    inputs.push(&values[request * stride..][..width]);
                }
                self.program.evaluate(inputs, None, &mut scratch, out);
            }
        };
        if requests * slots >= RELEASE_FROM {
            py.detach(run)
        } else {
            run()
        }
        let values = match self.program.result() {
            Type::Number | Type::Text => PyArray1::from_vec(py, out).into_any(),
            Type::Bool => PyArray1::from_iter(py, out.iter().map(|x| *x != 0.0)).into_any(),
        };
        match shape.requests {
            Some(requests) => Ok(values.call_method1("reshape", (requests, slots))?),
            None => Ok(values),
        }
    }
}

/// The numbers of requests and instances that the operands agree on.
#[derive(Default)]
struct Shape {
    requests: Option<usize>,
    instances: Option<usize>,
}

impl Shape {
    /// Checks one operand's shape. Returns the number of values between one request and the next.
    fn take(&mut self, name: &str, shape: &[usize], of_request: bool) -> Result<usize> {
        let (requests, instances, stride) = match (shape, of_request) {
            ([], true) => (None, None, 0),
            ([requests], true) => (Some(*requests), None, 1),
            ([instances], false) => (None, Some(*instances), 0),
            ([requests, instances], false) => (Some(*requests), Some(*instances), *instances),
            _ => {
                let expected =
                    if of_request { "() or (requests,)" } else { "(instances,) or (requests, instances)" };
                return Err(BadValueError::new_err(format!(
                    "{name}: shape {shape:?} is not valid; expected {expected}"
                ))
                .into());
            }
        };
        for (known, given, what) in
            [(&mut self.requests, requests, "requests"), (&mut self.instances, instances, "instances")]
        {
            match (*known, given) {
                (Some(known), Some(given)) if known != given => {
                    let message = format!("{name}: {given} {what}, but another column has {known}");
                    return Err(BadValueError::new_err(message).into());
                }
                (None, Some(_)) => *known = given,
                _ => {}
            }
        }
        Ok(stride)
    }
}

fn contiguous(name: &str) -> crate::errors::Error {
    BadValueError::new_err(format!("{name}: expected a C-contiguous array")).into()
}
