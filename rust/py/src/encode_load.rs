//! `encode_load`: makes a message for peer routers.
use crate::errors::Result;
use crate::router::Router;
use lmetric_core::router::LoadMessage;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

/// Returns a message for peer routers: the load that `routers` placed, by model, as of the version
/// `version` of their `enter_load`.
///
/// `sender`: id of the sender, hexadecimal digits. `base`: the version that the receiver has; the
/// message has only the changes since then. None: the message has the whole load. `budgets`: of
/// `Budgets.encode`.
#[pyfunction]
#[pyo3(signature = (sender, version, base, routers, *, budgets=None, now=None))]
fn encode_load<'py>(
    py: Python<'py>,
    sender: &str,
    version: u64,
    base: Option<u64>,
    routers: Vec<(String, Bound<'py, Router>)>,
    budgets: Option<&[u8]>,
    now: Option<f64>,
) -> Result<Bound<'py, PyBytes>> {
    let (mut models, mut counts) = (Vec::new(), Vec::new());
    for (model, router) in &routers {
        let (load, programs) = router.get().load_since(py, base, now)?;
        models.push((model.as_str().into(), load));
        counts.push(programs);
    }
    let mut message = LoadMessage {
        sender: sender.into(),
        version,
        base,
        models,
        budgets: budgets.unwrap_or_default().into(),
    };
    message
        .add_programs(&counts, |place, bytes| routers[place].1.get().programs_since(py, base, bytes, now))?;
    Ok(PyBytes::new(py, &message.encode()))
}

/// Adds the function to the module.
pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(encode_load, module)?)
}
