//! Python functions of `wire::api`.
use crate::errors::LmetricError;
use lmetric_wire::{ApiRequest, INTERNAL_FIELDS, Prompt, PromptReader, Refusal};
use numpy::PyArray1;
use pyo3::buffer::PyBuffer;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyFrozenSet, PyString};
use pyo3::{create_exception, ffi};
use std::borrow::Cow;

/// Larger bodies are read and copied without the interpreter lock, so that the event loop goes on.
/// Releasing the lock costs about 50 ns.
const DETACH_BYTES: usize = 64 << 10;

create_exception!(
    lmetric,
    BadRequestError,
    LmetricError,
    "A request body that the API does not accept. Its arguments: a message for the client, and the wrong field (None: the body)."
);

fn refused(Refusal { message, param }: Refusal) -> PyErr {
    BadRequestError::new_err((message, param))
}

/// Calls `with`, for many bytes without the interpreter lock.
fn apart<T: Send>(py: Python<'_>, bytes: usize, with: impl FnOnce() -> T + Send) -> T {
    if bytes > DETACH_BYTES { py.detach(with) } else { with() }
}

/// Copies parts into one `bytes`.
fn joined<'py>(py: Python<'py>, parts: &[&[u8]]) -> PyResult<Bound<'py, PyBytes>> {
    let size = parts.iter().map(|part| part.len()).sum::<usize>();
    let length = ffi::Py_ssize_t::try_from(size)?;
    // SAFETY: this returns a new object or null. Without a source, its bytes may be written until
    // others can see the object.
    let made = unsafe {
        let made = ffi::PyBytes_FromStringAndSize(std::ptr::null(), length);
        Bound::from_owned_ptr_or_err(py, made)?.cast_into_unchecked::<PyBytes>()
    };
    // SAFETY: the object has this many bytes, all of them initialized by the copies before anything
    // reads them, and nothing else refers to the object.
    let mut rest = unsafe {
        let start = ffi::PyBytes_AsString(made.as_ptr()).cast::<std::mem::MaybeUninit<u8>>();
        std::slice::from_raw_parts_mut(start, size)
    };
    apart(py, size, || {
        for part in parts {
            let (to, after) = std::mem::take(&mut rest).split_at_mut(part.len());
            // SAFETY: both have the part's length, and the object is new, so they do not overlap.
            unsafe { std::ptr::copy_nonoverlapping(part.as_ptr(), to.as_mut_ptr().cast(), part.len()) };
            rest = after;
        }
    });
    Ok(made)
}

/// Joins pieces of a body, without its first `skip` bytes, while other threads run.
///
/// `parts`: objects that nobody changes meanwhile.
#[pyfunction]
fn join_parts<'py>(py: Python<'py>, parts: Vec<PyBuffer<u8>>, skip: usize) -> PyResult<Bound<'py, PyBytes>> {
    let mut left = skip;
    let parts: Vec<&[u8]> = parts
        .iter()
        .map(|part| {
            // SAFETY: the buffer is exported until the end of this function, and its owner does not
            // write to it meanwhile.
            let bytes = unsafe { std::slice::from_raw_parts(part.buf_ptr().cast::<u8>(), part.len_bytes()) };
            let skipped = left.min(bytes.len());
            left -= skipped;
            &bytes[skipped..]
        })
        .collect();
    joined(py, &parts)
}

/// Returns an object's JSON without the members of the names `remove`, and with the members `front`
/// (JSON without braces) first. `body`: returned by `read_request`.
#[pyfunction]
fn edit_object<'py>(
    py: Python<'py>,
    body: &[u8],
    remove: Vec<String>,
    front: &[u8],
) -> PyResult<Bound<'py, PyBytes>> {
    let names: Vec<&str> = remove.iter().map(String::as_str).collect();
    let edited = apart(py, body.len(), || lmetric_wire::edited(body, &names, front));
    joined(py, &[&edited])
}

/// Returns an object's JSON without the members whose values have more than `longest` bytes.
/// `body`: returned by `read_request`.
#[pyfunction]
fn short_members<'py>(py: Python<'py>, body: &[u8], longest: usize) -> Bound<'py, PyBytes> {
    let short = apart(py, body.len(), || lmetric_wire::short_members(body, longest));
    PyBytes::new(py, &short)
}

/// Returns an object's JSON with short stand-ins for values of more than `longest` bytes.
/// `body`: returned by `read_request`.
#[pyfunction]
fn outline<'py>(py: Python<'py>, body: &[u8], longest: usize) -> Bound<'py, PyBytes> {
    let short = apart(py, body.len(), || lmetric_wire::outline(body, longest));
    PyBytes::new(py, &short)
}

/// Checks that a body is a JSON object within the bounds on depth, containers, members and values.
/// Raises `BadRequestError`.
#[pyfunction]
fn check_object(py: Python<'_>, body: &[u8]) -> PyResult<()> {
    apart(py, body.len(), || lmetric_wire::check_object(body)).map_err(refused)
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
    let given = body.as_bytes();
    let body = match apart(py, given.len(), || lmetric_wire::utf8(given)) {
        Cow::Borrowed(same) if same.len() == given.len() => body.clone(),
        other => joined(py, &[&other])?,
    };
    let bytes = body.as_bytes();
    let read = apart(py, bytes.len(), || ApiRequest::read(reader, bytes)).map_err(refused)?;
    let string = |text: Option<Cow<'_, str>>| text.map(|text| PyString::new(py, &text));
    let (text, tokens) = match read.prompt {
        Prompt::None => (None, None),
        Prompt::Text(text) => (Some(joined(py, &[text.as_bytes()])?), None),
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
    module.add_function(wrap_pyfunction!(edit_object, module)?)?;
    module.add_function(wrap_pyfunction!(join_parts, module)?)?;
    module.add_function(wrap_pyfunction!(outline, module)?)?;
    module.add_function(wrap_pyfunction!(short_members, module)?)?;
    module.add_function(wrap_pyfunction!(read_request, module)?)
}
