//! Forecasts of remaining lengths by a predictor in Python: a trained network, or a function.
use crate::errors::Result;
use lmetric_core::CoreError;
use lmetric_core::estimate::{Remaining, RemainingCurve};
use lmetric_core::expr::nearest;
use lmetric_core::rebalance::{Forecast, Running};
use numpy::{PyArray1, PyArrayMethods, PyReadonlyArray1};
use parking_lot::Mutex;
use pyo3::prelude::*;
use std::collections::{HashMap, HashSet};
use std::f64::consts::PI;
use std::fmt::{self, Debug, Formatter};
use std::sync::Arc;

/// A column that a predictor can read: its name, whether it is of the request's conversation, and
/// its value.
type Column = (&'static str, bool, fn(&Running) -> f64);

/// Names that begin with `log_` are log(1 + x), as in the samples of `train_lengths.from_trace`.
static COLUMNS: &[Column] = &[
    ("generated_tokens", false, |r| r.output_tokens),
    ("log_generated_tokens", false, |r| r.output_tokens.ln_1p()),
    ("prompt_tokens", false, |r| r.prompt_tokens),
    ("log_prompt_tokens", false, |r| r.prompt_tokens.ln_1p()),
    ("max_tokens", false, |r| r.expected_output_tokens.filter(|_| r.expected_is_limit).unwrap_or(f64::NAN)),
    ("ticket", false, |r| r.ticket as f64),
    ("new_prompt_tokens", true, |r| r.turn.new_prompt_tokens),
    ("log_new_prompt_tokens", true, |r| r.turn.new_prompt_tokens.ln_1p()),
    ("turns", true, |r| f64::from(r.turn.turns)),
    ("turn", true, |r| f64::from(r.turn.turns).ln_1p()),
    ("previous_answer_tokens", true, |r| r.turn.previous_answer_tokens),
    ("log_previous_answer_tokens", true, |r| r.turn.previous_answer_tokens.ln_1p()),
    ("mean_answer_tokens", true, |r| r.turn.mean_answer_tokens),
    ("log_mean_answer_tokens", true, |r| r.turn.mean_answer_tokens.ln_1p()),
    ("seconds_since_previous", true, |r| r.turn.seconds_since_previous),
    ("log_seconds_since_previous", true, |r| r.turn.seconds_since_previous.ln_1p()),
];

/// The latest prediction of a request.
#[derive(Clone, Copy)]
struct Kept {
    interval: u64,
    output_tokens: f64,
    remaining: Remaining,
}

/// A predictor in Python. It predicts once per request and interval, for all due requests in one
/// call.
#[derive(Clone)]
pub struct PythonForecast {
    predictor: Arc<Py<PyAny>>,
    name: String,
    columns: Vec<&'static Column>,
    /// Whether it predicts during a round, as in simulations. Else [`PythonForecast::refresh`]
    /// predicts before the round, without the router's lock; requests that arrive in between count
    /// as about to end.
    in_rounds: bool,
    kept: Arc<Mutex<HashMap<u64, Kept>>>,
}

impl Debug for PythonForecast {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        write!(f, "PythonForecast({})", self.name)
    }
}

impl PythonForecast {
    /// Wraps an object with `feature_names` and `predict`, the protocol of
    /// `lmetric.lengths.LengthPredictor`.
    ///
    /// # Errors
    /// `BadValue` for another object, `UnknownName` for a feature that the router does not know.
    pub fn new(predictor: &Bound<'_, PyAny>, in_rounds: bool) -> Result<PythonForecast> {
        let names = predictor.getattr("feature_names").and_then(|names| names.extract::<Vec<String>>());
        let (Ok(names), true) = (names, predictor.hasattr("predict")?) else {
            return Err(CoreError::BadValue {
                what: "forecast of lengths".into(),
                got: predictor.repr()?.to_string(),
                expected: "a name, a predictor's file, or an object with feature_names and predict".into(),
            }
            .into());
        };
        let columns = names
            .iter()
            .map(|name| {
                COLUMNS.iter().find(|column| column.0 == name).ok_or_else(|| CoreError::UnknownName {
                    kind: "feature of a forecast".into(),
                    name: name.clone(),
                    nearest: nearest(name, COLUMNS.iter().map(|column| column.0)),
                })
            })
            .collect::<std::result::Result<Vec<&Column>, CoreError>>()?;
        Ok(PythonForecast {
            name: match predictor.getattr("name").and_then(|name| name.extract::<String>()) {
                Ok(name) => name,
                Err(_) => predictor.get_type().name()?.to_string(),
            },
            predictor: Arc::new(predictor.clone().unbind()),
            columns,
            in_rounds,
            kept: Arc::default(),
        })
    }

    /// Predicts for requests that entered a new interval since their last prediction, and drops
    /// predictions of requests that have ended.
    ///
    /// # Errors
    /// `Policy` if the predictor raises, or if it does not return one finite number of at least 0
    /// per request.
    pub fn refresh(&self, py: Python<'_>, running: &[Running]) -> std::result::Result<(), CoreError> {
        let asked: Vec<&Running> = {
            let kept = self.kept.lock();
            let due = |request: &&Running| {
                kept.get(&request.ticket).is_none_or(|last| last.interval != request.interval)
            };
            running.iter().filter(due).collect()
        };
        let predicted = if asked.is_empty() { Vec::new() } else { self.ask(py, &asked)? };
        let mut kept = self.kept.lock();
        for (request, remaining) in asked.iter().zip(predicted) {
            let (interval, output_tokens) = (request.interval, request.output_tokens);
            kept.insert(request.ticket, Kept { interval, output_tokens, remaining });
        }
        if kept.len() > running.len() {
            let open: HashSet<u64> = running.iter().map(|request| request.ticket).collect();
            kept.retain(|ticket, _| open.contains(ticket));
        }
        Ok(())
    }

    fn ask(&self, py: Python<'_>, asked: &[&Running]) -> std::result::Result<Vec<Remaining>, CoreError> {
        self.call(py, asked).map_err(|error| CoreError::Policy {
            policy: format!("forecast {}", self.name),
            problem: error.to_string(),
        })
    }

    fn call(&self, py: Python<'_>, asked: &[&Running]) -> PyResult<Vec<Remaining>> {
        let values = asked.iter().flat_map(|request| self.columns.iter().map(|column| (column.2)(request)));
        let features = PyArray1::from_iter(py, values).reshape([asked.len(), self.columns.len()])?;
        let told = self.predictor.bind(py).call_method1("predict", (features,))?;
        let (remaining, sigma) = told.extract::<(Bound<'_, PyAny>, Bound<'_, PyAny>)>()?;
        let numbers = |what: &str, array: &Bound<'_, PyAny>| -> PyResult<Vec<f64>> {
            let array = py.import("numpy")?.call_method1("ascontiguousarray", (array, "float64"))?;
            let array: PyReadonlyArray1<'_, f64> = array.extract()?;
            let numbers = array.as_slice()?.to_vec();
            let good = |number: &f64| number.is_finite() && *number >= 0.0;
            if numbers.len() == asked.len() && numbers.iter().all(good) {
                return Ok(numbers);
            }
            let shown = numbers.iter().find(|number| !good(number));
            let got = shown.map_or(format!("{} numbers", numbers.len()), f64::to_string);
            Err(crate::errors::BadValueError::new_err(format!(
                "{what}: {got} is not valid; expected {} numbers, finite and at least 0",
                asked.len()
            )))
        };
        let remaining = numbers("remaining", &remaining)?;
        // A normal error's standard deviation is sqrt(pi / 2) times its mean absolute value.
        let deviations = numbers("sigma", &sigma)?;
        let both = remaining.into_iter().zip(deviations);
        Ok(both.map(|(tokens, sigma)| Remaining { tokens, deviation: sigma * (PI / 2.0).sqrt() }).collect())
    }
}

impl Forecast for PythonForecast {
    fn reads_turns(&self) -> bool {
        self.columns.iter().any(|column| column.1)
    }

    fn predict(
        &mut self,
        running: &[Running],
        _: Option<&RemainingCurve>,
        remaining: &mut Vec<Remaining>,
    ) -> std::result::Result<(), CoreError> {
        if self.in_rounds {
            Python::attach(|py| self.refresh(py, running))?;
        }
        let kept = self.kept.lock();
        remaining.extend(running.iter().map(|request| {
            kept.get(&request.ticket).map_or(Remaining::exact(0.0), |last| {
                let since = request.output_tokens - last.output_tokens;
                Remaining { tokens: (last.remaining.tokens - since).max(0.0), ..last.remaining }
            })
        }));
        Ok(())
    }

    /// Simulated routers each predict for themselves. A live router uses the predictions of the
    /// object on which [`PythonForecast::refresh`] is called.
    fn fresh(&self) -> Box<dyn Forecast> {
        let kept = if self.in_rounds { Arc::default() } else { self.kept.clone() };
        Box::new(PythonForecast { kept, ..self.clone() })
    }
}
