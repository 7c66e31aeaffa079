//! Access to a shared router from Python threads, and its clock.
//!
//! Order of locks: first a router's lock, then the interpreter's. A Python policy takes the
//! interpreter's lock while its router is held. So a thread with the interpreter's lock never waits
//! or spins for a router: it takes a free one, or it releases the interpreter's lock and waits.
//! All other mutexes of this crate come last: their holders wait for no lock.
//!
//! A thread with the interpreter's lock and no router does not wait for the engines' caches either.
//! A thread with both may wait for them, for microseconds. Without the interpreter's lock it would
//! keep the router until it gets that lock back, which may take milliseconds. Such calls are
//! decisions after a change of the caches since their match, arrivals that are matched, and
//! releases of held requests. Rare and longer calls do not begin with the interpreter's lock.
use crate::errors::Result;
use lmetric_core::CoreError;
use lmetric_core::router::{Router as CoreRouter, SharedRouter};
use pyo3::prelude::*;
use std::time::{Duration, Instant};

/// Largest plausible difference, in seconds, between `now=` and the router's clocks.
const DAY: f64 = 86_400.0;
/// How long a policy function may wait for another router. That router's holder may wait for the
/// function's own router.
const MAX_NESTED_WAIT: Duration = Duration::from_secs(1);

/// Readings of Python's clock; the shortest reading counts. Rarely does each lose its turn.
const CLOCK_READINGS: usize = 3;

/// Python's monotonic clock, in seconds, read without calling Python.
#[derive(Clone, Copy)]
pub struct Clock {
    base: f64,
    origin: Instant,
}

impl Clock {
    /// Creates the clock. A thread that loses its turn between two readings would set the clock
    /// wrong by that time, so this takes the reading of Python's clock that took the shortest time.
    pub fn new(py: Python<'_>) -> PyResult<Clock> {
        let monotonic = py.import("time")?.getattr("monotonic")?;
        let reading = || -> PyResult<(Duration, Clock)> {
            let before = Instant::now();
            let base = monotonic.call0()?.extract()?;
            let took = before.elapsed();
            Ok((took, Clock { base, origin: before + took / 2 }))
        };
        let mut best = reading()?;
        for _ in 1..CLOCK_READINGS {
            let next = reading()?;
            if next.0 < best.0 {
                best = next;
            }
        }
        Ok(best.1)
    }

    /// Reads the clock, in seconds.
    pub fn read(&self) -> f64 {
        self.base + self.origin.elapsed().as_secs_f64()
    }

    /// Returns `now` if it is given, else reads the clock.
    ///
    /// # Errors
    /// `BadValue` if `now` is more than a day off both this clock and the latest time that the
    /// router received. (A program may have a clock of its own.)
    pub fn now(&self, now: Option<f64>, router: &CoreRouter) -> Result<f64> {
        let Some(now) = now else { return Ok(self.read()) };
        let near = |time: f64| (now - time).abs() <= DAY;
        if near(router.latest()) || near(self.read()) {
            return Ok(now);
        }
        Err(CoreError::BadValue {
            what: "now".into(),
            got: now.to_string(),
            expected: format!(
                "seconds on the monotonic clock, within a day of time.monotonic() ({:.0}); time.time() is another clock; \
                 without now= the router reads the clock itself",
                self.read()
            ),
        }
        .into())
    }
}

/// Calls `with` while holding a shared router. If the router is not free, the call waits and `with`
/// runs without the interpreter lock; see [`with_router_detached`].
///
/// # Errors
/// The errors of [`with_router_detached`].
pub fn with_router<T: Send>(
    shared: &SharedRouter,
    py: Python<'_>,
    with: impl FnOnce(&mut CoreRouter) -> Result<T> + Send,
) -> Result<T> {
    let Some(mut router) = shared.try_lock() else { return with_router_detached(shared, py, with) };
    shared.check()?;
    let result = with(&mut router);
    if router.release() && !shared.caches().try_enter() {
        py.detach(|| drop(shared.caches().write()));
    }
    result
}

/// Waits for a shared router and calls `with` while holding it, all without the interpreter lock.
/// `with` gets its turn as soon as the router is free.
///
/// # Errors
/// `Policy` in two cases: a policy function calls its own router, or waits too long for another
/// busy router. `Broken` after a panic.
pub fn with_router_detached<T: Send>(
    shared: &SharedRouter,
    py: Python<'_>,
    with: impl FnOnce(&mut CoreRouter) -> Result<T> + Send,
) -> Result<T> {
    let problem = |problem: &str| CoreError::Policy { policy: "function".into(), problem: problem.into() };
    if shared.is_held_here() {
        let own = "it called its own router, which waits for the function to return; read the columns passed to it instead";
        return Err(problem(own).into());
    }
    let nested = SharedRouter::any_is_held_here();
    py.detach(|| {
        let router = if nested { shared.lock_within(MAX_NESTED_WAIT) } else { Some(shared.lock_next()) };
        let busy = "it waited for another router, which stays busy: that router's holder may wait for the function's own router";
        let mut router = router.ok_or_else(|| problem(busy))?;
        shared.check()?;
        with(&mut router)
    })
}

/// Refuses calls that may wait for a router.
///
/// # Errors
/// `Policy` inside a policy function: its router is held while the function runs.
pub fn refuse_in_policy(what: &str) -> Result<()> {
    if !SharedRouter::any_is_held_here() {
        return Ok(());
    }
    let problem = format!("it {what}, which may wait for its own router; do that outside the function");
    Err(CoreError::Policy { policy: "function".into(), problem }.into())
}
