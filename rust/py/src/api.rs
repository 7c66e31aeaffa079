//! Python functions of `wire::api`.
use crate::errors::LmetricError;
use lmetric_wire::{ApiRequest, INTERNAL_FIELDS, Prompt, PromptReader, Refusal};
use numpy::PyArray1;
use pyo3::create_exception;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyFrozenSet, PyString};
use std::borrow::Cow;

create_exception!(
    lmetric,
    BadRequestError,
    LmetricError,
    "A request body that the API does not accept. Its arguments: a message for the client, and the wrong field (None: the body)."
);

fn refused(Refusal { message, param }: Refusal) -> PyErr {
    BadRequestError::new_err((message, param))
}

/// Checks that a body is a JSON object within the bounds on depth, containers, members and values.
/// Raises `BadRequestError`.
#[pyfunction]
fn check_object(body: &[u8]) -> PyResult<()> {
    lmetric_wire::check_object(body).map_err(refused)
}

/// The fields of `ParsedRequest`, in its order.
#[derive(IntoPyObject)]
struct Parsed<'py>(
    Bound<'py, PyBytes>, // the body
    Option<Bound<'py, PyString>>,
    bool,
    Option<Bound<'py, PyString>>,
    Option<Bound<'py, PyString>>,
    Option<Bound<'py, PyString>>,
    Option<u32>,
    Option<Bound<'py, PyBytes>>,
    Option<Bound<'py, PyArray1<u32>>>,
    usize,
    usize,
    Option<f64>,
);

/// Reads the fields of a request. `reader`: the name of a prompt reader. The first field is the
/// body in UTF-8 without a byte order mark. Raises `BadRequestError`.
#[pyfunction]
fn read_request<'py>(reader: &str, body: Bound<'py, PyBytes>) -> PyResult<Parsed<'py>> {
    let py = body.py();
    let reader = PromptReader::named(reader)
        .ok_or_else(|| PyValueError::new_err(format!("no prompt reader has the name {reader:?}")))?;
    let body = match lmetric_wire::utf8(body.as_bytes()) {
        Cow::Borrowed(same) if same.len() == body.as_bytes().len() => body,
        other => PyBytes::new(py, &other),
    };
    let read = ApiRequest::read(reader, body.as_bytes()).map_err(refused)?;
    let string = |text: Option<Cow<'_, str>>| text.map(|text| PyString::new(py, &text));
    let (text, tokens) = match read.prompt {
        Prompt::None => (None, None),
        Prompt::Text(text) => (Some(PyBytes::new(py, text.as_bytes())), None),
        Prompt::Tokens(tokens) => (None, Some(PyArray1::from_vec(py, tokens))),
    };
    Ok(Parsed(
        body.clone(),
        string(read.model),
        read.stream,
        string(read.session),
        string(read.session_id),
        string(read.salt),
        read.max_tokens,
        text,
        tokens,
        read.more_bytes,
        read.more_tokens,
        read.priority,
    ))
}

/// Adds its functions, errors and constants to the module.
pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let py = module.py();
    module.add("INTERNAL_FIELDS", PyFrozenSet::new(py, INTERNAL_FIELDS)?)?;
    module.add("BadRequestError", py.get_type::<BadRequestError>())?;
    module.add_function(wrap_pyfunction!(check_object, module)?)?;
    module.add_function(wrap_pyfunction!(read_request, module)?)
}
