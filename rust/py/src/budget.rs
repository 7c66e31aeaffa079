//! `Budgets`: what tenants may use per period.
use crate::board::Board;
use crate::errors::Result;
use lmetric_core::CoreError;
use lmetric_core::budget::{
    Amounts, Budgets as CoreBudgets, MOST_SKEW, Now, Period, Refusal, Reservation, Scope, Unit, Window, Zone,
};
use parking_lot::{Mutex, MutexGuard};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};
use std::fmt::{self, Write as _};
use std::sync::Arc;
use xxhash_rust::xxh3::xxh3_64;

/// Adds the classes to the module.
pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<Budgets>()?;
    module.add_class::<BudgetReservation>()?;
    module.add_class::<BudgetRefusal>()
}

/// The windows of all tenants, and what they have used of them.
///
/// `clock_start`: Unix time minus the monotonic clock, in seconds. With a board, all workers of a
/// server share the counts and the first clock start. Times are seconds: `now` on the monotonic
/// clock, `unix` as Unix time.
#[pyclass(frozen, module = "lmetric")]
pub struct Budgets {
    inner: Mutex<CoreBudgets>,
    clock_start: f64,
}

#[derive(FromPyObject)]
#[pyo3(from_item_all)]
struct Given {
    name: String,
    counts: String,
    limit: u64,
    per: String,
    /// Name and offsets of the time zone: Unix times and seconds.
    time_zone: Option<(String, Vec<(f64, f64)>)>,
    cached_weight: f64,
    per_model: bool,
    per_key: bool,
    slo_class: Option<String>,
    shadow: bool,
}

impl Given {
    fn window(self, tenant: &str) -> Result<Window> {
        let Given {
            name,
            counts,
            limit,
            per,
            time_zone,
            cached_weight,
            per_model,
            per_key,
            slo_class,
            shadow,
        } = self;
        let zone = time_zone.as_ref().map_or("", |(zone, _)| zone);
        let class = slo_class.as_deref().unwrap_or_default();
        let key = xxh3_64([tenant, &name, &counts, &per, zone, class].join("\0").as_bytes());
        Ok(Window {
            key,
            unit: named("counts", &Unit::NAMES, &counts)?,
            period: named("per", &Period::NAMES, &per)?,
            zone: time_zone.map(|(_, offsets)| Arc::new(Zone::new(offsets))),
            name,
            limit,
            cached_weight,
            per_model,
            per_key,
            slo_class: slo_class.as_deref().map(hash),
            shadow,
        })
    }
}

#[pymethods]
impl Budgets {
    #[new]
    #[pyo3(signature = (clock_start, board=None))]
    fn new(clock_start: f64, board: Option<&Board>) -> Budgets {
        let board = board.map(|board| board.inner().clone());
        let clock_start = board.as_ref().map_or(clock_start, |board| board.clock_start(clock_start));
        Budgets { inner: Mutex::new(CoreBudgets::new(board)), clock_start }
    }

    /// Replaces the windows of all tenants: a list of settings by tenant. Counts stay, by name and
    /// kind of their windows. Raises `BadValueError`.
    fn set(&self, tenants: &Bound<'_, PyDict>) -> Result<()> {
        let mut accounts = Vec::with_capacity(tenants.len());
        for (tenant, windows) in tenants {
            let (tenant, given) = (tenant.extract::<String>()?, windows.extract::<Vec<Given>>()?);
            let windows: Result<Vec<Window>> = given.into_iter().map(|each| each.window(&tenant)).collect();
            accounts.push((hash(&tenant), windows?));
        }
        self.inner.lock().set(accounts);
        Ok(())
    }

    /// Reserves what a request may use at most. None: its tenant has no windows. `scope`: the
    /// model, the ID of the API key, and the SLO class.
    fn reserve(
        &self,
        py: Python<'_>,
        tenant: &str,
        scope: (&str, &str, &str),
        tokens: (u64, u64),
        times: (f64, f64),
    ) -> PyResult<Option<Py<PyAny>>> {
        let (input_tokens, output_tokens) = tokens;
        let asked = Amounts { requests: 1, input_tokens, cached_tokens: 0, output_tokens };
        let now = self.now(times);
        let scope = Scope { model: hash(scope.0), key: hash(scope.1), slo_class: hash(scope.2) };
        Ok(match self.inner.lock().reserve(hash(tenant), scope, asked, now) {
            Ok(made) => match made {
                Some(made) => Some(Py::new(py, BudgetReservation::new(made, self.clock_start))?.into_any()),
                None => None,
            },
            Err(refusal) => Some(Py::new(py, BudgetRefusal::new(&refusal))?.into_any()),
        })
    }

    /// Checks the next windows, so that the shared memory gets room for new ones. Call it some
    /// times a second. Returns why this worker counts some windows alone: `full` or `locked`.
    fn tidy(&self, times: (f64, f64)) -> Option<&'static str> {
        let mut budgets = self.inner.lock();
        let is_shared = budgets.tidy(self.now(times));
        (!is_shared).then(|| if budgets.lock_lost() { "locked" } else { "full" })
    }

    /// Most seconds between the clocks of two routers that share counts.
    #[classattr]
    const MOST_SKEW_SECONDS: f64 = MOST_SKEW;

    /// Shares the counts with other routers from now on. `router`: ID of this start of the router.
    fn share(&self, router: &str) {
        self.inner.lock().share(hash(router));
    }

    /// Enters the present counts as a new version, and returns its number.
    fn enter(&self) -> u64 {
        self.inner.lock().enter()
    }

    /// Returns a message for `merge` of other routers: the counts of the last `enter` that have
    /// changed since the version `base`. None: all counts, also those of other routers.
    #[pyo3(signature = (base, times))]
    fn encode<'py>(&self, py: Python<'py>, base: Option<u64>, times: (f64, f64)) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.inner.lock().encode(base, self.now(times)))
    }

    /// Applies a message of another router. Returns whether its version counts here now (else the
    /// next message must have all counts), and how many seconds the other clock is ahead. If that
    /// is above `MOST_SKEW_SECONDS`, in any direction, the message changes nothing. Raises
    /// `BadValueError` for other bytes; then nothing changes.
    fn merge(&self, message: &[u8], times: (f64, f64)) -> Result<(bool, f64)> {
        Ok(self.inner.lock().merge(message, self.now(times))?)
    }

    /// Returns the counts as bytes for `restore`. It takes some 0.1 s for 65,000 windows. Another
    /// thread may call it: requests wait for a step of it.
    fn save<'py>(&self, py: Python<'py>, times: (f64, f64)) -> Bound<'py, PyBytes> {
        let bytes = py.detach(|| {
            let mut saving = self.inner.lock().begin_save(self.now(times));
            saving.read_board();
            loop {
                let mut budgets = self.inner.lock();
                let has_more = budgets.save_rows(&mut saving);
                MutexGuard::unlock_fair(budgets); // those who wait come first
                if !has_more {
                    return saving.finish();
                }
            }
        });
        PyBytes::new(py, &bytes)
    }

    /// Adds saved counts, before the first request. Raises `BadValueError` for a broken file; then
    /// nothing is added.
    fn restore(&self, saved: &[u8], times: (f64, f64)) -> Result<()> {
        Ok(self.inner.lock().restore(saved, self.now(times))?)
    }
}

impl Budgets {
    fn now(&self, times: (f64, f64)) -> Now {
        now(self.clock_start, times)
    }
}

/// A request's part of its tenant's windows, until it is settled or released. Without either,
/// it is released when it is freed.
#[pyclass(frozen, module = "lmetric")]
pub struct BudgetReservation {
    inner: Mutex<Option<Reservation>>,
    clock_start: f64,
    lines: String,
    exceeded: Vec<String>,
}

impl BudgetReservation {
    fn new(made: Reservation, clock_start: f64) -> BudgetReservation {
        let (mut requests, mut tokens) = (None, None);
        let mut exceeded = Vec::new();
        for state in made.states() {
            let (window, left) = (state.window, state.window.limit.saturating_sub(state.used));
            if window.shadow {
                if state.used > window.limit {
                    exceeded.push(window.name.clone());
                }
                continue;
            }
            let least = if window.unit == Unit::Requests { &mut requests } else { &mut tokens };
            if least.is_none_or(|(_, other, _)| left < other) {
                *least = Some((window.limit, left, state.reset_seconds));
            }
        }
        let mut lines = String::with_capacity(256);
        for (names, found) in [(&OF_REQUESTS, requests), (&OF_TOKENS, tokens)] {
            if let Some((limit, left, reset)) = found {
                for (name, value) in fields(names, limit, left, reset) {
                    let _ = write!(lines, "{name}: {value}\r\n");
                }
            }
        }
        BudgetReservation { inner: Mutex::new(Some(made)), clock_start, lines, exceeded }
    }
}

#[pymethods]
impl BudgetReservation {
    /// Lines of the answer's head: limits, what is left of them, and until when.
    #[getter]
    fn lines<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, self.lines.as_bytes())
    }

    /// Names of the shadow windows that the request exceeds.
    #[getter]
    fn exceeded(&self) -> Vec<String> {
        self.exceeded.clone()
    }

    /// Replaces what was reserved by what the request used; the first call counts. `tokens`: input,
    /// the cached part of it, and output.
    fn settle(&self, tokens: (u64, u64, u64), times: (f64, f64)) {
        let (input_tokens, cached_tokens, output_tokens) = tokens;
        let used = Amounts { requests: 1, input_tokens, cached_tokens, output_tokens };
        if let Some(reservation) = self.inner.lock().take() {
            reservation.settle(&used, now(self.clock_start, times));
        }
    }

    /// Counts what was reserved as used.
    fn keep(&self) {
        if let Some(reservation) = self.inner.lock().take() {
            reservation.keep();
        }
    }

    /// Gives back what was reserved.
    fn release(&self) {
        self.inner.lock().take();
    }
}

/// A request that a window refuses.
#[pyclass(frozen, get_all, module = "lmetric")]
pub struct BudgetRefusal {
    /// Name of the window.
    window: String,
    counts: &'static str,
    per: &'static str,
    limit: u64,
    used: u64,
    asked: u64,
    /// Seconds until the request fits; None: it asks for more than the limit.
    retry_after_seconds: Option<f64>,
    /// Fields of the answer's head.
    fields: Vec<(&'static str, String)>,
}

impl BudgetRefusal {
    fn new(refusal: &Refusal) -> BudgetRefusal {
        let Refusal { window, used, asked, retry_after } = refusal;
        let names = if window.unit == Unit::Requests { &OF_REQUESTS } else { &OF_TOKENS };
        let left = window.limit.saturating_sub(*used);
        let retry_after_seconds = retry_after.is_finite().then_some(*retry_after);
        BudgetRefusal {
            window: window.name.clone(),
            counts: name_of(&Unit::NAMES, window.unit),
            per: name_of(&Period::NAMES, window.period),
            limit: window.limit,
            used: *used,
            asked: *asked,
            retry_after_seconds,
            fields: fields(names, window.limit, left, retry_after_seconds.unwrap_or(0.0))
                .map(|(name, value)| (name, value.to_string()))
                .into(),
        }
    }
}

/// Fields of an answer's head: limit, what is left of it, and the time until it is unused.
type FieldNames = [&'static str; 3];
const OF_REQUESTS: FieldNames =
    ["x-ratelimit-limit-requests", "x-ratelimit-remaining-requests", "x-ratelimit-reset-requests"];
const OF_TOKENS: FieldNames =
    ["x-ratelimit-limit-tokens", "x-ratelimit-remaining-tokens", "x-ratelimit-reset-tokens"];

enum FieldValue {
    Number(u64),
    Time(Duration),
}

impl fmt::Display for FieldValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            FieldValue::Number(number) => number.fmt(f),
            FieldValue::Time(time) => time.fmt(f),
        }
    }
}

fn fields(names: &FieldNames, limit: u64, left: u64, reset: f64) -> [(&'static str, FieldValue); 3] {
    let [of_limit, of_left, of_reset] = *names;
    [
        (of_limit, FieldValue::Number(limit)),
        (of_left, FieldValue::Number(left)),
        (of_reset, FieldValue::Time(Duration(reset))),
    ]
}

/// Seconds as OpenAI writes durations: `20ms`, `6m0s`, `1h30m0s`.
struct Duration(f64);

impl fmt::Display for Duration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0 < 1.0 {
            return write!(f, "{}ms", (self.0 * 1000.0).ceil() as u64);
        }
        let seconds = self.0.ceil() as u64;
        match (seconds / 3600, seconds / 60 % 60, seconds % 60) {
            (0, 0, seconds) => write!(f, "{seconds}s"),
            (0, minutes, seconds) => write!(f, "{minutes}m{seconds}s"),
            (hours, minutes, seconds) => write!(f, "{hours}h{minutes}m{seconds}s"),
        }
    }
}

fn now(clock_start: f64, (monotonic, unix): (f64, f64)) -> Now {
    Now { steady: clock_start + monotonic, unix }
}

fn hash(name: &str) -> u64 {
    xxh3_64(name.as_bytes())
}

fn named<T: Copy>(what: &str, names: &[(&'static str, T)], name: &str) -> Result<T> {
    let found = names.iter().find(|(each, _)| *each == name).map(|(_, value)| *value);
    let expected = || names.iter().map(|(each, _)| *each).collect::<Vec<_>>().join(", ");
    Ok(found.ok_or_else(|| CoreError::BadValue {
        what: format!("budgets: {what}"),
        got: name.into(),
        expected: expected(),
    })?)
}

fn name_of<T: PartialEq>(names: &[(&'static str, T)], value: T) -> &'static str {
    names.iter().find(|(_, each)| *each == value).map_or("", |(name, _)| name)
}
