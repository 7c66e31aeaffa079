//! The router's Python face.
use pyo3::prelude::*;

/// Adds the classes to the module.
pub fn register(_module: &Bound<'_, PyModule>) -> PyResult<()> {
    Ok(())
}
