//! The Python face of `expr`.
use pyo3::prelude::*;

/// Adds its classes and functions to the module.
pub fn register(_module: &Bound<'_, PyModule>) -> PyResult<()> {
    Ok(())
}
