//! Python class of the engine model, for the emulated engines.
use crate::errors::to_python;
use crate::settings;
use lmetric_core::CoreError;
use lmetric_sim::text::Rolling;
use lmetric_sim::{
    Admission, Generator, HostTier, KvEvent, Order, Preempt, Profile, Prompt, Request, Settings,
    TOKEN_SECONDS, TokenSlo,
};
use pyo3::buffer::PyBuffer;
use pyo3::exceptions::PyBufferError;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyTuple};

/// Flags of a token: the request's last token; a token that came out of a prefill (the first token,
/// or the first after a preemption).
const LAST: u8 = 1;
const FROM_PREFILL: u8 = 2;

pub fn unknown(what: &str, got: &str, expected: &str) -> PyErr {
    to_python(CoreError::BadValue { what: what.into(), got: format!("{got:?}"), expected: expected.into() })
}

fn tokens(buffer: &Bound<'_, PyAny>) -> PyResult<Vec<u32>> {
    match PyBuffer::<u32>::get(buffer) {
        Ok(tokens) => tokens.to_vec(buffer.py()),
        // An empty buffer may point anywhere, so it can count as misaligned.
        Err(error) if error.is_instance_of::<PyBufferError>(buffer.py()) && buffer.len()? == 0 => {
            Ok(Vec::new())
        }
        Err(error) => Err(error),
    }
}

pub fn profile(constants: &Bound<'_, PyAny>) -> PyResult<Profile> {
    let constants = constants.cast::<PyDict>()?;
    let profile: Profile = settings::reader("profile", Some(constants))?.read().map_err(to_python)?;
    let curve = constants.get_item("decode_throughput")?.filter(|curve| !curve.is_none());
    let read = |curve: Bound<'_, PyAny>| {
        let mut reader = settings::reader("profile: decode_throughput", Some(curve.cast()?))?;
        reader.read().map_err(to_python)
    };
    Ok(Profile { decode_throughput: curve.map(read).transpose()?, ..profile })
}

/// Returns the name of the local order in `text`, which may have settings. Raises `BadValueError`.
#[pyfunction]
fn check_local_order(text: &str) -> PyResult<&str> {
    Order::named(text, 0, TokenSlo::same(TOKEN_SECONDS)).map_err(to_python)?;
    Ok(text.split('(').next().unwrap_or(text).trim())
}

/// Returns the names of the local orders.
#[pyfunction]
fn local_orders() -> Vec<&'static str> {
    Order::names()
}

/// Handling of preempted requests: recompute (None), or swap with (seconds per token, tokens that
/// the host holds).
pub fn preempt(swap: Option<(f64, u64)>) -> Preempt {
    swap.map_or(Preempt::Recompute, |(seconds_per_token, host_tokens)| Preempt::Swap {
        seconds_per_token,
        host_tokens,
    })
}

/// A host-memory tier from its (capacity relative to the GPU's, seconds to load a token, seconds
/// that the next step takes longer per second of a load).
pub fn host_tier(constants: Option<(f64, f64, f64)>) -> Option<HostTier> {
    constants.map(|(capacity_ratio, seconds_per_token, step_ratio)| HostTier {
        capacity_ratio,
        seconds_per_token,
        step_ratio,
    })
}

/// One emulated engine: queue, batch, KV cache and steps. It has no clock: callers give times in
/// seconds.
#[pyclass(module = "lmetric._core")]
struct Engine {
    engine: lmetric_sim::Engine,
    submitted: u64,
}

#[pymethods]
impl Engine {
    #[new]
    #[pyo3(signature = (profile, words, vocabulary, *, admission="vllm", order="fcfs", order_slo_seconds=0.1,
        swap=None, host_tier=None, kv_events=false))]
    fn new(
        #[pyo3(from_py_with = profile)] profile: Profile,
        #[pyo3(from_py_with = tokens)] words: Vec<u32>,
        vocabulary: u32,
        admission: &str,
        order: &str,
        order_slo_seconds: f64,
        swap: Option<(f64, u64)>,
        host_tier: Option<(f64, f64, f64)>,
        kv_events: bool,
    ) -> PyResult<Engine> {
        let admission = match admission {
            "vllm" => Admission::Vllm,
            "reserve" => Admission::Reserve,
            other => return Err(unknown("admission", other, "vllm or reserve")),
        };
        let order = Order::named(order, 0, TokenSlo::same(order_slo_seconds)).map_err(to_python)?;
        let generator = Generator::new(words, vocabulary).map_err(to_python)?;
        let settings = Settings {
            admission,
            order,
            preempt: preempt(swap),
            host: self::host_tier(host_tier),
            kv_events,
        };
        let engine = lmetric_sim::Engine::new(profile, settings, Some(generator)).map_err(to_python)?;
        Ok(Engine { engine, submitted: 0 })
    }

    #[pyo3(signature = (prompt, output_tokens, now, *, priority=0, salt=None, report_cached=false,
        fetched_tokens=0, token_slo_seconds=None))]
    fn submit(
        &mut self,
        #[pyo3(from_py_with = tokens)] prompt: Vec<u32>,
        output_tokens: u32,
        now: f64,
        priority: i64,
        salt: Option<&str>,
        report_cached: bool,
        fetched_tokens: u32,
        token_slo_seconds: Option<f64>,
    ) -> PyResult<u64> {
        let id = self.submitted;
        let prompt = Prompt::Tokens(&prompt);
        let request = Request {
            id,
            prompt,
            output_tokens,
            priority,
            salt,
            report_cached,
            fetched_tokens,
            think_tokens: 0,
        };
        self.engine.submit(&request, now).map_err(to_python)?;
        self.submitted += 1;
        token_slo_seconds.map_or(Ok(()), |slo| self.engine.set_own_slo(id, slo)).map_err(to_python)?;
        Ok(id)
    }

    fn abort(&mut self, id: u64) -> bool {
        self.engine.abort(id)
    }

    fn next_load(&self) -> Option<f64> {
        self.engine.next_load()
    }

    fn start_step(&mut self, now: f64) -> Option<f64> {
        self.engine.start_step(now)
    }

    /// Returns `(tokens, admitted, preempted, prompt tokens computed)`.
    fn finish_step<'py>(&mut self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        let events = self.engine.finish_step();
        let tokens = PyList::new(
            py,
            events.tokens.iter().map(|t| {
                let flags = if t.last { LAST } else { 0 } | if t.from_prefill { FROM_PREFILL } else { 0 };
                (t.id, t.token, flags)
            }),
        )?;
        let admitted =
            PyList::new(py, events.admitted.iter().map(|a| (a.id, a.cached_tokens, a.first_time)))?;
        let preempted = PyList::new(py, &events.preempted)?;
        let prefill_tokens: u32 = events.prefilled.iter().map(|p| p.tokens).sum();
        (tokens, admitted, preempted, prefill_tokens).into_pyobject(py)
    }

    fn take_kv_events<'py>(&mut self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let log = self.engine.kv_log();
        let list = PyList::empty(py);
        for event in &log.events {
            match event {
                KvEvent::Stored { tier, parent, hashes, tokens, salt } => {
                    let (hashes, tokens) =
                        (log.hashes[hashes.clone()].to_vec(), log.tokens[tokens.clone()].to_vec());
                    list.append(("stored", tier.medium(), *parent, hashes, tokens, salt.as_deref()))?;
                }
                KvEvent::Removed { tier, hashes } => {
                    let mut gone = log.hashes[hashes.clone()].iter();
                    gone.try_for_each(|hash| list.append(("removed", tier.medium(), *hash)))?;
                }
                KvEvent::Cleared => list.append(("cleared",))?,
            }
        }
        log.clear();
        Ok(list)
    }

    fn reset_cache(&mut self) -> bool {
        self.engine.reset_cache()
    }

    fn load<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let (load, counters) = (self.engine.load(), self.engine.load().counters);
        let dict = PyDict::new(py);
        dict.set_item("waiting", load.waiting)?;
        dict.set_item("running", load.running)?;
        dict.set_item("kv_usage", load.kv_usage)?;
        for (name, count) in [
            ("remaining_prefill_tokens", load.remaining_prefill_tokens),
            ("context_tokens", load.context_tokens),
            ("submitted", counters.submitted),
            ("finished", counters.finished),
            ("aborted", counters.aborted),
            ("preemptions", counters.preemptions),
            ("prompt_tokens", counters.prompt_tokens),
            ("cached_prompt_tokens", counters.cached_prompt_tokens),
            ("generation_tokens", counters.generation_tokens),
            ("prefix_cache_queries", counters.prefix_cache_queries),
            ("prefix_cache_hits", counters.prefix_cache_hits),
            ("fetched_prompt_tokens", counters.fetched_prompt_tokens),
            ("loaded_tokens", counters.loaded_tokens),
            ("steps", counters.steps),
        ] {
            dict.set_item(name, count)?;
        }
        Ok(dict)
    }
}

/// Returns the `n` tokens that an emulated engine answers `prompt` with.
#[pyfunction]
fn generate(
    #[pyo3(from_py_with = tokens)] words: Vec<u32>,
    vocabulary: u32,
    #[pyo3(from_py_with = tokens)] prompt: Vec<u32>,
    n: usize,
) -> PyResult<Vec<u32>> {
    let generator = Generator::new(words, vocabulary).map_err(to_python)?;
    let mut read = Rolling::default();
    read.read_all(&prompt);
    Ok((0..n)
        .map(|_| {
            let token = generator.next(read);
            read.read(token);
            token
        })
        .collect())
}

/// Adds its classes and functions to the module.
pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<Engine>()?;
    module.add_function(wrap_pyfunction!(check_local_order, module)?)?;
    module.add_function(wrap_pyfunction!(local_orders, module)?)?;
    module.add_function(wrap_pyfunction!(generate, module)?)
}
