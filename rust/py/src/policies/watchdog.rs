//! Stops Python policies that exceed their time limits, even if they never return.
//!
//! A thread waits for the earliest limit and then raises [`PolicyTimeout`] in the policy's thread,
//! which Python does at the next bytecode. Code in C cannot be stopped.
use parking_lot::{Condvar, Mutex};
use pyo3::exceptions::PyBaseException;
use pyo3::prelude::*;
use pyo3::{create_exception, ffi};
use std::ffi::c_long;
use std::time::{Duration, Instant};

create_exception!(
    lmetric,
    PolicyTimeout,
    PyBaseException,
    "Raised inside a policy that exceeds its time limit. Do not catch it."
);

/// Time until a policy that continues is interrupted again.
const AGAIN: Duration = Duration::from_millis(20);

struct Run {
    id: u64,
    thread: c_long,
    due: Instant,
    /// Whether the exception was raised; it may still be pending.
    raised: bool,
}

#[derive(Default)]
struct Runs {
    running: Vec<Run>,
    last: u64,
}

/// The thread's part of a process, and what it shares with policies.
#[derive(Default)]
struct Watchdog {
    runs: Mutex<Runs>,
    changed: Condvar,
}

impl Watchdog {
    /// Returns the watchdog of this process. A child process has no thread of its parent, so it
    /// gets another one.
    fn of_process() -> &'static Watchdog {
        static CURRENT: Mutex<Option<(u32, &Watchdog)>> = Mutex::new(None);
        // Attached, since a fork needs the interpreter, too: so none leaves this locked in a child.
        Python::attach(|_| {
            let (mut current, process) = (CURRENT.lock(), std::process::id());
            if let Some((of, watchdog)) = *current
                && of == process
            {
                return watchdog;
            }
            let watchdog: &'static Watchdog = Box::leak(Box::default());
            let thread = std::thread::Builder::new().name("policy-watchdog".into());
            thread.spawn(|| wait(watchdog)).expect("a thread can be started");
            *current = Some((process, watchdog));
            watchdog
        })
    }
}

thread_local! {
    /// Python's identifier of this thread.
    static IDENT: c_long = Python::attach(|py| {
        let ident = py.import("threading").and_then(|module| module.call_method0("get_ident"));
        ident.and_then(|ident| ident.extract()).unwrap_or(0)
    });
}

/// A policy that runs on this thread until this value is dropped.
pub struct Watched {
    watchdog: &'static Watchdog,
    id: u64,
    thread: c_long,
}

/// Watches the policy that this thread runs next.
pub fn watch(due: Instant) -> Watched {
    let watchdog = Watchdog::of_process();
    let thread = IDENT.with(|ident| *ident);
    let mut runs = watchdog.runs.lock();
    runs.last += 1;
    let id = runs.last;
    let earliest = runs.running.iter().all(|run| due < run.due);
    runs.running.push(Run { id, thread, due, raised: false });
    if earliest {
        watchdog.changed.notify_one();
    }
    Watched { watchdog, id, thread }
}

impl Drop for Watched {
    fn drop(&mut self) {
        // Attached: only an attached thread raises the exception, and only while this run is
        // listed. So no exception is raised for it from here on.
        Python::attach(|_| {
            let mut runs = self.watchdog.runs.lock();
            let place = runs.running.iter().position(|run| run.id == self.id);
            if place.is_some_and(|place| runs.running.swap_remove(place).raised) {
                // SAFETY: this thread is attached to the interpreter. NULL cancels an exception
                // that has not been raised yet.
                unsafe { ffi::PyThreadState_SetAsyncExc(self.thread, std::ptr::null_mut()) };
            }
        });
    }
}

/// The watchdog's thread.
fn wait(watchdog: &Watchdog) {
    let mut runs = watchdog.runs.lock();
    loop {
        match runs.running.iter().map(|run| run.due).min() {
            None => watchdog.changed.wait(&mut runs),
            Some(due) if Instant::now() < due => drop(watchdog.changed.wait_until(&mut runs, due)),
            Some(_) => {
                drop(runs);
                // None: the interpreter is about to end.
                if Python::try_attach(|py| interrupt(py, watchdog)).is_none() {
                    return;
                }
                runs = watchdog.runs.lock();
            }
        }
    }
}

/// Raises the exception in all runs that are due.
fn interrupt(py: Python<'_>, watchdog: &Watchdog) {
    let exception = py.get_type::<PolicyTimeout>();
    let mut runs = watchdog.runs.lock();
    let now = Instant::now();
    for run in runs.running.iter_mut().filter(|run| run.due <= now) {
        (run.raised, run.due) = (true, now + AGAIN);
        // SAFETY: this thread is attached to the interpreter, and the exception's type lives as
        // long as the interpreter. For a thread that Python does not know, the call does nothing.
        unsafe { ffi::PyThreadState_SetAsyncExc(run.thread, exception.as_ptr()) };
    }
}
