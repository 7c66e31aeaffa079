//! Arrivals, and admission by load: settings and snapshots.
use crate::errors::Result;
use crate::request::Request;
use crate::settings;
use lmetric_core::CoreError;
use lmetric_core::admission::{HeldFor, LoadConfig, LoadSnapshot, RefusedFor, TenantLimits, Verdict};
use lmetric_core::ids::ArrivalId;
use lmetric_core::kv::keys::Keys;
use lmetric_core::program::Hold;
use lmetric_core::router::shared::Waiting;
use parking_lot::Mutex;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use xxhash_rust::xxh3::xxh3_64;

/// Released requests for Python: those that may run (id, seconds held), and those that are refused
/// (id, reason, seconds to try again after).
pub type Released = (Vec<(u64, f64)>, Vec<(u64, &'static str, f64)>);

/// Reads the settings of admission by load; None: off. `tenants`: limits by the tenant's name.
///
/// # Errors
/// `BadValue` for an unknown setting or a value out of range.
pub fn load_of(settings: Option<&Bound<'_, PyDict>>) -> Result<Option<LoadConfig>> {
    let Some(settings) = settings else { return Ok(None) };
    let tenants = settings.get_item("tenants")?;
    let mut reader = settings::reader("admission", Some(settings))?;
    reader.skip("tenants");
    let mut config: LoadConfig = reader.read()?;
    reader.finish()?;
    if let Some(tenants) = tenants.filter(|tenants| !tenants.is_none()) {
        for (name, limits) in tenants.cast::<PyDict>().map_err(PyErr::from)? {
            let name: String = name.extract()?;
            let limits = limits.cast::<PyDict>().map_err(PyErr::from)?;
            let mut reader = settings::reader(&format!("limits of tenant {name:?}"), Some(limits))?;
            let limits: TenantLimits = reader.read()?;
            reader.finish()?;
            config.tenants.insert(xxh3_64(name.as_bytes()), limits);
        }
    }
    Ok(Some(config.checked()?))
}

/// A request from its arrival to its placement: whether it runs now, waits or is refused.
///
/// Pass it to `Router.route`, at once or, if it is held, when `Router.release_held` returns its
/// `id`. Drop it if its client leaves.
#[pyclass(frozen, module = "lmetric")]
pub struct Arrival {
    /// None if the request was refused.
    waiting: Option<Waiting>,
    verdict: Verdict,
    /// Whether its prompt was matched on arrival.
    is_matched: bool,
    /// None if the request was refused, or its chain was taken.
    hashed: Mutex<Option<Hashed>>,
}

/// A request with the chain of its prompt.
pub struct Hashed {
    pub request: Py<Request>,
    pub keys: Keys,
    pub chain: Vec<u64>,
}

impl Arrival {
    pub fn new(
        waiting: Option<Waiting>,
        verdict: Verdict,
        is_matched: bool,
        hashed: Option<Hashed>,
    ) -> Arrival {
        Arrival { waiting, verdict, is_matched, hashed: Mutex::new(hashed) }
    }

    /// Takes the chain of the prompt, so that the decision need not hash it. None if `request` is
    /// another request, or if the keys have changed.
    pub fn take_chain(&self, request: &Request, keys: &Keys) -> Option<Vec<u64>> {
        let hashed = self.hashed.lock().take()?;
        (std::ptr::eq(hashed.request.get(), request) && hashed.keys == *keys).then_some(hashed.chain)
    }

    /// Returns whether the request's prompt was matched on arrival.
    pub fn is_matched(&self) -> bool {
        self.is_matched
    }

    /// Takes the arrival for a decision.
    ///
    /// # Errors
    /// `BadValue` if the arrival was used before, or refused.
    pub fn take(&self) -> std::result::Result<ArrivalId, CoreError> {
        let used = || CoreError::BadValue {
            what: "arrival".into(),
            got: "an arrival that was routed, dropped or refused".into(),
            expected: "a new arrival from arrive()".into(),
        };
        self.waiting.as_ref().and_then(Waiting::take).ok_or_else(used)
    }

    fn hold(&self) -> Option<Hold> {
        match self.verdict {
            Verdict::Held { by: HeldFor::Program(hold), .. } => Some(hold),
            _ => None,
        }
    }
}

#[pymethods]
impl Arrival {
    /// Number of the arrival, as in `Router.release_held`; 0 if the request was refused.
    #[getter]
    fn id(&self) -> u64 {
        self.waiting.as_ref().map_or(0, |waiting| waiting.id().number())
    }

    /// The decision: `"free"` (route it now; the policy chooses), `"run"` (route it now; it goes to
    /// its program's instance), `"held"` (wait), `"refused"` (answer 429).
    #[getter]
    fn verdict(&self) -> &'static str {
        match self.verdict {
            Verdict::Free => "free",
            Verdict::Run(_) => "run",
            Verdict::Held { .. } => "held",
            Verdict::Refused { .. } => "refused",
        }
    }

    /// Why the request is held: `"programs"` (its program has no place in a cache), `"room"` (no
    /// instance has room, or other tenants are next), `"concurrency"` (its tenant's limit). Why it
    /// is refused: `"programs"`, `"deadline"`, `"queue"` or `"rate"`. None otherwise.
    #[getter]
    fn reason(&self) -> Option<&'static str> {
        match self.verdict {
            Verdict::Held { by: HeldFor::Program(_), .. } => Some("programs"),
            Verdict::Held { by: HeldFor::Room, .. } => Some("room"),
            Verdict::Held { by: HeldFor::Concurrency, .. } => Some("concurrency"),
            Verdict::Refused { by, .. } => Some(by.name()),
            Verdict::Free | Verdict::Run(_) => None,
        }
    }

    /// Predicted seconds until a refused request would be admitted; None unless refused.
    #[getter]
    fn retry_after_seconds(&self) -> Option<f64> {
        match self.verdict {
            Verdict::Refused { retry_after_seconds, .. } => Some(retry_after_seconds),
            _ => None,
        }
    }

    /// Predicted seconds for which a held request waits (infinite: unknown); None unless held.
    #[getter]
    fn expected_seconds(&self) -> Option<f64> {
        match self.verdict {
            Verdict::Held { expected_seconds, .. } => Some(expected_seconds),
            _ => None,
        }
    }

    /// Tokens that a held program needs on an instance; None unless its program is held.
    #[getter]
    fn needed_tokens(&self) -> Option<f64> {
        self.hold().map(|hold| hold.needed_tokens)
    }

    /// Expected working set of the instance with the most room, over its cache; None unless its
    /// program is held.
    #[getter]
    fn working_set_ratio(&self) -> Option<f64> {
        self.hold().map(|hold| hold.working_set_ratio)
    }

    /// Number of held programs of all routers, this one included; None unless its program is held.
    #[getter]
    fn held_programs(&self) -> Option<usize> {
        self.hold().map(|hold| hold.held_programs)
    }

    /// Ends the arrival without a decision, for example because the client left. Does nothing if
    /// the request was routed.
    #[pyo3(name = "drop")]
    fn end(&self) {
        if let Some(waiting) = &self.waiting {
            waiting.close();
        }
    }
}

/// Most tenants in a snapshot.
const MAX_TENANTS: usize = 16;

/// Returns the numbers of admission by load as a dictionary.
pub fn dict<'py>(py: Python<'py>, snapshot: &LoadSnapshot) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    let counters = snapshot.counters;
    dict.set_item("waiting", snapshot.waiting)?;
    dict.set_item("expected_wait_seconds", snapshot.expected_seconds)?;
    dict.set_item("service_tokens_per_second", snapshot.work_per_second)?;
    for (name, count) in [("free", counters.free), ("held", counters.held), ("admitted", counters.admitted)] {
        dict.set_item(name, count)?;
    }
    dict.set_item("held_seconds", counters.held_seconds)?;
    let refused = PyDict::new(py);
    for ((name, _), count) in RefusedFor::NAMES.iter().zip(counters.refused) {
        refused.set_item(name, count)?;
    }
    dict.set_item("refused", refused)?;
    let longest: Vec<(u64, usize)> = snapshot.waiting_by_tenant.iter().take(MAX_TENANTS).copied().collect();
    dict.set_item("waiting_by_tenant", longest)?;
    let levels = snapshot.levels.iter().map(|each| {
        let level = PyDict::new(py);
        level.set_item("level", each.level)?;
        level.set_item("aged_levels", each.aged_levels)?;
        level.set_item("waiting", each.waiting)?;
        level.set_item("oldest_seconds", each.oldest_seconds)?;
        Ok(level)
    });
    dict.set_item("levels", levels.collect::<PyResult<Vec<_>>>()?)?;
    Ok(dict)
}

/// Adds its class to the module.
pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<Arrival>()
}
