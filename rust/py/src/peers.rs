//! `LoadMessage`: a message between peer routers, as it arrives. `encode_load` makes them.
use crate::errors::{BadValueError, Result};
use lmetric_core::router::{LOAD_FORMAT as FORMAT, LoadMessage as CoreMessage, MessageError};
use pyo3::create_exception;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

create_exception!(
    lmetric,
    LoadFormatError,
    BadValueError,
    "A load message of a router of another version. The message has both formats."
);

/// A load message of a peer router, in the form that `encode_load` returns: the load on all
/// instances, or the changes since the version `base`. Raises `BadValueError`, also for an
/// impossible number, or `LoadFormatError`.
#[pyclass(frozen, module = "lmetric")]
pub struct LoadMessage {
    inner: CoreMessage,
}

impl LoadMessage {
    /// The message of the core.
    pub fn inner(&self) -> &CoreMessage {
        &self.inner
    }
}

#[pymethods]
impl LoadMessage {
    /// The format of the messages.
    #[classattr]
    const FORMAT: u8 = FORMAT;

    #[new]
    fn new(py: Python<'_>, body: &[u8]) -> Result<LoadMessage> {
        match py.detach(|| CoreMessage::decode(body)) {
            Ok(inner) => Ok(LoadMessage { inner }),
            Err(MessageError::Number(error)) => Err(error.into()),
            Err(error @ MessageError::Format(_)) => Err(LoadFormatError::new_err(error.to_string()).into()),
            Err(error) => Err(BadValueError::new_err(error.to_string()).into()),
        }
    }

    /// Id of the router that sent it.
    #[getter]
    fn sender(&self) -> &str {
        &self.inner.sender
    }

    /// Version of the load.
    #[getter]
    fn version(&self) -> u64 {
        self.inner.version
    }

    /// Version that the message changes; None: it has the whole load.
    #[getter]
    fn base(&self) -> Option<u64> {
        self.inner.base
    }

    /// Counts of budgets, for `Budgets.merge`.
    #[getter]
    fn budgets<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.inner.budgets)
    }

    /// Number of instances in it.
    fn __len__(&self) -> usize {
        self.inner.models.iter().map(|(_, load)| load.instances.len()).sum()
    }
}

/// Adds the class and the exception to the module.
pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("LoadFormatError", module.py().get_type::<LoadFormatError>())?;
    module.add_class::<LoadMessage>()
}
