//! The Python face of `wire`.
use crate::errors::LmetricError;
use lmetric_wire::{Finish, Scanner, Step, WireError as CoreWireError};
use pyo3::create_exception;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

create_exception!(
    lmetric,
    WireError,
    LmetricError,
    "An engine's bytes are not the HTTP/1.1 response they should be, or end too early."
);

/// Bits of [`ResponseScanner::feed`]'s answer; the output tokens that came are above them.
const FLAGS: [(&str, u64); 6] =
    [("READY", 1), ("END", 2), ("PASS", 4), ("OUT", 8), ("ENGINE_ERROR", 16), ("INCOMPLETE", 32)];
const TOKEN_SHIFT: u32 = 8;

fn flags(step: Step) -> u64 {
    let bits = [step.ready, step.end, step.pass, step.out, step.error, step.incomplete];
    let low: u64 = bits.iter().zip(FLAGS).map(|(set, (_, bit))| if *set { bit } else { 0 }).sum();
    low | u64::from(step.tokens) << TOKEN_SHIFT
}

fn error(error: CoreWireError) -> PyErr {
    WireError::new_err(error.to_string())
}

/// Reads an engine's responses, one after the other, and frames them for the client.
#[pyclass(module = "lmetric._core")]
#[derive(Default)]
struct ResponseScanner(Scanner);

#[pymethods]
impl ResponseScanner {
    #[new]
    fn new() -> Self {
        Self::default()
    }

    #[pyo3(signature = (http11=true, require_finish=false, bodiless=false))]
    fn begin(&mut self, http11: bool, require_finish: bool, bodiless: bool) {
        self.0.begin(http11, require_finish, bodiless);
    }

    fn feed(&mut self, data: &[u8]) -> PyResult<u64> {
        self.0.feed(data).map(flags).map_err(error)
    }

    fn eof(&mut self) -> PyResult<u64> {
        self.0.eof().map(flags).map_err(error)
    }

    fn commit<'py>(&mut self, py: Python<'py>, extra: &[u8], close: bool) -> Bound<'py, PyBytes> {
        PyBytes::new(py, self.0.commit(extra, close))
    }

    fn take<'py>(&mut self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, self.0.take())
    }

    fn end_with<'py>(&mut self, py: Python<'py>, event: &[u8]) -> Bound<'py, PyBytes> {
        PyBytes::new(py, self.0.end_with(event))
    }

    #[getter]
    fn status(&self) -> u16 {
        self.0.status()
    }

    #[getter]
    fn keep_alive(&self) -> bool {
        self.0.keep_alive()
    }

    #[getter]
    fn event_stream(&self) -> bool {
        self.0.event_stream()
    }

    #[getter]
    fn closes_client(&self) -> bool {
        self.0.closes_client()
    }

    #[getter]
    fn load(&self) -> Option<&str> {
        self.0.load()
    }

    #[getter]
    fn aborted(&self) -> bool {
        self.0.finish() == Finish::Aborted
    }

    #[getter]
    fn error_code(&self) -> Option<u64> {
        self.0.error_code()
    }

    #[getter]
    fn tokens(&self) -> u64 {
        self.0.tokens()
    }

    #[getter]
    fn usage(&self) -> (Option<u64>, Option<u64>, Option<u64>) {
        let usage = self.0.usage();
        (usage.prompt, usage.cached, usage.output)
    }
}

/// Adds its classes and functions to the module.
pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("WireError", module.py().get_type::<WireError>())?;
    for (name, bit) in FLAGS {
        module.add(name, bit)?;
    }
    module.add("TOKEN_SHIFT", TOKEN_SHIFT)?;
    module.add_class::<ResponseScanner>()
}
