//! Bindings of the laboratory: the simulator, the engine model of emulated engines, and timings of
//! decisions. No binding of the router needs them.
mod bench;
mod engine;
mod simulate;

use pyo3::prelude::*;

/// Adds the classes and functions of the laboratory to the module.
pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    engine::register(module)?;
    simulate::register(module)?;
    bench::register(module)
}
