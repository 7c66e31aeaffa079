//! `lmetric._core`: the Python face of the core. Converts and exposes, decides nothing.
use pyo3::prelude::*;

mod router;

#[pymodule]
fn _core(module: &Bound<'_, PyModule>) -> PyResult<()> {
    router::register(module)
}
