//! The exception tree, and the conversion of the core's errors.
use lmetric_core::CoreError;
use pyo3::create_exception;
use pyo3::exceptions::PyException;
use pyo3::prelude::*;

create_exception!(lmetric, LmetricError, PyException, "Base class of the router's errors.");
create_exception!(
    lmetric,
    ExpressionError,
    LmetricError,
    "A score expression that does not parse or type-check. `text` is the expression; `start` and `end` are the offsets (in \
     characters) of the offending part."
);
create_exception!(
    lmetric,
    UnknownNameError,
    LmetricError,
    "An unknown name. The message suggests the nearest known name."
);
create_exception!(lmetric, BadValueError, LmetricError, "A value out of its range or of the wrong type.");
create_exception!(lmetric, NoInstanceError, LmetricError, "No instance can take the request.");
create_exception!(lmetric, PolicyError, LmetricError, "A policy function of the embedding program failed.");
create_exception!(lmetric, TicketError, LmetricError, "An event that the ticket's state does not allow.");

/// An error of the module's functions: `?` converts the core's errors and Python's.
pub enum Error {
    /// From the core.
    Core(CoreError),
    /// From Python.
    Python(PyErr),
}

/// The result of a function of the module.
pub type Result<T> = std::result::Result<T, Error>;

impl From<CoreError> for Error {
    fn from(error: CoreError) -> Error {
        Error::Core(error)
    }
}

impl From<PyErr> for Error {
    fn from(error: PyErr) -> Error {
        Error::Python(error)
    }
}

impl From<Error> for PyErr {
    fn from(error: Error) -> PyErr {
        match error {
            Error::Core(error) => to_python(error),
            Error::Python(error) => error,
        }
    }
}

/// The exception for an error of the core.
pub fn to_python(error: CoreError) -> PyErr {
    let message = error.to_string();
    match error {
        CoreError::UnknownName { .. } => UnknownNameError::new_err(message),
        CoreError::BadValue { .. } | CoreError::Immature { .. } => BadValueError::new_err(message),
        CoreError::NoInstance(_) => NoInstanceError::new_err(message),
        CoreError::Policy { .. } => PolicyError::new_err(message),
        CoreError::Ticket { .. } => TicketError::new_err(message),
        CoreError::Broken => LmetricError::new_err(message),
        CoreError::Expression(place) => Python::attach(|py| {
            let chars = |bytes: usize| place.text.get(..bytes).map_or(0, |t| t.chars().count());
            let error = ExpressionError::new_err(message);
            let value = error.value(py);
            let set = value
                .setattr("text", &place.text)
                .and_then(|()| value.setattr("start", chars(place.start)))
                .and_then(|()| value.setattr("end", chars(place.end)));
            set.err().unwrap_or(error)
        }),
    }
}

/// Adds the exceptions to the module.
pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let py = module.py();
    module.add("LmetricError", py.get_type::<LmetricError>())?;
    module.add("ExpressionError", py.get_type::<ExpressionError>())?;
    module.add("UnknownNameError", py.get_type::<UnknownNameError>())?;
    module.add("BadValueError", py.get_type::<BadValueError>())?;
    module.add("NoInstanceError", py.get_type::<NoInstanceError>())?;
    module.add("PolicyError", py.get_type::<PolicyError>())?;
    module.add("TicketError", py.get_type::<TicketError>())
}
