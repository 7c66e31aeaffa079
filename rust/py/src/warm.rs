//! Warm fleet changes: the fetches to make.
use crate::errors::Result;
use lmetric_core::fleet::InstanceId;
use lmetric_core::router::SharedRouter;
use lmetric_core::warm::{Fetch, Warming as CoreWarming};
use parking_lot::Mutex;
use pyo3::prelude::*;
use std::collections::BTreeMap;

/// A fetch to begin: its number, the prompt, its leading tokens, the source and the target.
type Planned = (u64, u64, u32, String, String);

/// The prefix fetches of a fleet change (`Router.begin_join`, `Router.begin_leave`).
#[pyclass(frozen, module = "lmetric._core")]
pub struct Warming {
    inner: Mutex<(CoreWarming, BTreeMap<u64, Fetch>)>,
    shared: SharedRouter,
}

impl Warming {
    pub fn new(inner: CoreWarming, shared: SharedRouter) -> Warming {
        Warming { inner: Mutex::new((inner, BTreeMap::new())), shared }
    }
}

#[pymethods]
impl Warming {
    /// Returns the next fetch to begin at `now`: its number, the prompt (`Ticket.prompt_key`), the
    /// leading tokens to fetch, and the names of the source and the target. None: no fetch may
    /// begin now. Fetches from and to removed instances are dropped, even if an instance with the
    /// same name has joined.
    fn begin(&self, py: Python<'_>, now: f64) -> Result<Option<Planned>> {
        crate::held::with_router(&self.shared, py, |router| {
            let mut inner = self.inner.lock();
            let Some((number, fetch)) = inner.0.begin(router.fleet(), now) else { return Ok(None) };
            let name = |id: InstanceId| router.fleet().name(id.slot()).to_string();
            let told = (number, fetch.prompt, fetch.tokens, name(fetch.source), name(fetch.target));
            inner.1.insert(number, fetch);
            Ok(Some(told))
        })
    }

    /// Records the end of a fetch. `tokens`: tokens that the target has now; 0: it failed. Raises
    /// `LmetricError`.
    fn ended(&self, py: Python<'_>, number: u64, tokens: u32, now: f64) -> Result<()> {
        let fetch = {
            let mut inner = self.inner.lock();
            inner.0.ended(number, tokens, now);
            inner.1.remove(&number)
        };
        match fetch.filter(|_| tokens > 0) {
            Some(fetch) => crate::held::with_router(&self.shared, py, |router| {
                router.prefix_fetched(&fetch, tokens);
                Ok(())
            }),
            None => Ok(()),
        }
    }

    /// Whether no fetch is left at `now`.
    fn is_over(&self, now: f64) -> bool {
        self.inner.lock().0.is_over(now)
    }

    /// Time at which to call `begin` again if no fetch ends before it; None: only the end of a
    /// fetch changes something.
    fn wakes(&self, now: f64) -> Option<f64> {
        self.inner.lock().0.wakes(now)
    }

    /// Time at which the change ends; later fetches are dropped.
    #[getter]
    fn until(&self) -> f64 {
        self.inner.lock().0.until()
    }

    /// Fetches that have not begun.
    #[getter]
    fn planned(&self) -> usize {
        self.inner.lock().0.planned()
    }

    /// Number of fetches that ended, and the tokens that arrived.
    #[getter]
    fn fetched(&self) -> (u64, u64) {
        self.inner.lock().0.fetched()
    }
}

/// Adds its class to the module.
pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<Warming>()
}
