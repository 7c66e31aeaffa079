//! For the scheduler of an engine: `StepTable`, recorded step times, and `EngineBoost`, boosted
//! arrivals.
use crate::errors::Result;
use crate::router::step_time_of;
use crate::settings;
use lmetric_core::CoreError;
use lmetric_core::estimate::{StepLoad, StepTable as CoreTable};
use lmetric_core::priority::{Adaptive, EngineBoost as CoreBoost, Settings, Work};
use parking_lot::Mutex;
use pyo3::prelude::*;
use pyo3::types::PyDict;

/// Adds the classes to the module.
pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<StepTable>()?;
    module.add_class::<EngineBoost>()
}

/// Recorded step times of an engine, and the prompt tokens that a step may take within a time.
///
/// `profile`: the constants of the engine's profile (`fixed_seconds`, ..., `max_batch_tokens`),
/// which the recorded times correct. Without it, the recorded times make a model of their own, and
/// answers are None until they do. Raises `BadValueError`. Source: Libra, Algorithm 2.
#[pyclass(frozen, module = "lmetric")]
pub struct StepTable {
    table: Mutex<CoreTable>,
}

#[pymethods]
impl StepTable {
    #[new]
    #[pyo3(signature = (profile=None))]
    fn new(profile: Option<&Bound<'_, PyDict>>) -> Result<StepTable> {
        let profile = profile.map(step_time_of).transpose()?;
        Ok(StepTable { table: Mutex::new(CoreTable::new(profile)) })
    }

    /// Number of recorded steps.
    #[getter]
    fn recorded(&self) -> u64 {
        self.table.lock().recorded()
    }

    /// Records a step of `seconds`: sequences that decoded, their context tokens together, prompt
    /// tokens, and attention pairs of these (g x (n + g / 2) for g tokens behind n others).
    /// Impossible times are ignored.
    #[pyo3(signature = (seconds, *, decodes, context_tokens, prefill_tokens, prefill_pairs))]
    fn record(
        &self,
        seconds: f64,
        decodes: u32,
        context_tokens: u64,
        prefill_tokens: u32,
        prefill_pairs: f64,
    ) {
        let step = StepLoad { decodes, context_tokens, prefill_tokens, prefill_pairs };
        self.table.lock().record(&step, seconds);
    }

    /// Expected seconds of a step; None while nothing is known.
    #[pyo3(signature = (*, decodes, context_tokens, prefill_tokens=0, prefill_pairs=0.0))]
    fn seconds(
        &self,
        decodes: u32,
        context_tokens: u64,
        prefill_tokens: u32,
        prefill_pairs: f64,
    ) -> Option<f64> {
        let step = StepLoad { decodes, context_tokens, prefill_tokens, prefill_pairs };
        self.table.lock().seconds(&step)
    }

    /// Most prompt tokens, at most `most`, that a step with these decodes can take within
    /// `seconds`. `before`: tokens of the prompt that are computed already. None while nothing is
    /// known. Raises `BadValueError` for a time that is not above 0.
    #[pyo3(signature = (seconds, *, decodes, context_tokens, before, most))]
    fn prefill_within(
        &self,
        seconds: f64,
        decodes: u32,
        context_tokens: u64,
        before: u32,
        most: u32,
    ) -> Result<Option<u32>> {
        if seconds.is_nan() || seconds <= 0.0 {
            return Err(CoreError::BadValue {
                what: "seconds of a step".into(),
                got: seconds.to_string(),
                expected: "more than 0".into(),
            }
            .into());
        }
        let step = StepLoad { decodes, context_tokens, ..StepLoad::default() };
        Ok(self.table.lock().prefill_within(seconds, &step, before, most))
    }
}

/// Boosted arrivals of an engine's requests. The engine learns gamma and the seconds per token.
///
/// `settings`: `gamma`, `adaptive`, `bin_tokens`, `hysteresis_seconds`, and those of `UniBoost` for
/// learning gamma. `token_seconds`: seconds per token until they are measured. Raises
/// `BadValueError`. Source: UniBoost, section 3.
#[pyclass(frozen, module = "lmetric")]
pub struct EngineBoost {
    boost: Mutex<CoreBoost>,
}

#[pymethods]
impl EngineBoost {
    #[new]
    #[pyo3(signature = (settings=None, *, token_seconds=1e-4))]
    fn new(settings: Option<&Bound<'_, PyDict>>, token_seconds: f64) -> Result<EngineBoost> {
        let mut reader = settings::reader("boosted arrivals", settings)?;
        let adaptive = reader.one("adaptive")?.unwrap_or(true).then(Adaptive::default);
        let settings = Settings { adaptive, ..Settings::default() }.read(&mut reader)?;
        reader.finish()?;
        Ok(EngineBoost { boost: Mutex::new(CoreBoost::new(settings, token_seconds)?) })
    }

    /// Gamma, 1/s: a larger one boosts less.
    #[getter]
    fn gamma(&self) -> f64 {
        self.boost.lock().gamma()
    }

    /// Seconds of the engine's steps per token computed in them.
    #[getter]
    fn token_seconds(&self) -> f64 {
        self.boost.lock().token_seconds()
    }

    /// Lead in boosted arrival, in seconds, with which a waiting request
    /// replaces a running request.
    #[getter]
    fn hysteresis_seconds(&self) -> f64 {
        self.boost.lock().hysteresis()
    }

    /// Records a step of `seconds` that computed `tokens` tokens.
    fn stepped(&self, seconds: f64, tokens: u64) {
        self.boost.lock().stepped(seconds, tokens);
    }

    /// Records that a request ended `seconds` after its arrival.
    fn ended(&self, seconds: f64) {
        self.boost.lock().ended(seconds);
    }

    /// Takes a router's gamma, 1/s, at the next update instead of the learned one. Raises
    /// `BadValueError`.
    fn give(&self, gamma: f64) -> Result<()> {
        Ok(self.boost.lock().give(gamma)?)
    }

    /// Updates gamma and the seconds per token if that is due: call it after each step. Returns
    /// whether it was, so that all ranks may have changed.
    fn look(&self) -> bool {
        self.boost.lock().look()
    }

    /// Boosted arrival of a request, on the clock of `arrival` (seconds): lower goes first.
    /// `hit_tokens`: cached tokens of its prompt; `attained_tokens`: tokens computed for it so far,
    /// prompt and answer.
    #[pyo3(signature = (arrival, *, prompt_tokens, hit_tokens, attained_tokens))]
    fn rank(&self, arrival: f64, prompt_tokens: u32, hit_tokens: u32, attained_tokens: u32) -> f64 {
        self.boost.lock().rank(arrival, &Work { prompt_tokens, hit_tokens, attained_tokens })
    }

    /// Tokens of work at which a request's rank changes next.
    #[pyo3(signature = (*, prompt_tokens, hit_tokens, attained_tokens))]
    fn next_change(&self, prompt_tokens: u32, hit_tokens: u32, attained_tokens: u32) -> u32 {
        self.boost.lock().next_change(&Work { prompt_tokens, hit_tokens, attained_tokens })
    }
}
