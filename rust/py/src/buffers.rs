//! Integers from Python: numpy arrays, `array.array` and memoryviews are read in place, other
//! sequences are copied.
use crate::errors::{BadValueError, Result};
use lmetric_core::CoreError;
use numpy::{Element, PyArray1, PyArrayMethods, PyUntypedArrayMethods};
use pyo3::buffer::PyBuffer;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyByteArray, PyBytes, PyDict, PyMemoryView, PyString};
use std::borrow::Cow;

/// Integers: a C-contiguous buffer, or any other sequence. The buffer is held for the lifetime of
/// this value.
pub enum Ints<'py> {
    /// A numpy array of token IDs. The numpy API is several times as fast as the buffer protocol.
    Tokens(Bound<'py, PyArray1<u32>>),
    /// A numpy array of 64-bit hashes.
    Hashes(Bound<'py, PyArray1<u64>>),
    /// A buffer of 32-bit integers (or of raw bytes, read as 32-bit integers).
    Narrow(PyBuffer<u32>),
    /// Raw bytes.
    Bytes(PyBuffer<u8>),
    /// Signed 32-bit integers.
    Signed(PyBuffer<i32>),
    /// A buffer of 64-bit integers.
    Wide(PyBuffer<u64>),
    /// Signed 64-bit integers.
    SignedWide(PyBuffer<i64>),
    /// Any other sequence, whose elements are copied one by one.
    Sequence(Bound<'py, PyAny>),
}

impl<'py> Ints<'py> {
    /// Takes `value`'s buffer. `what` names the argument in errors.
    pub fn take(value: &Bound<'py, PyAny>, what: &str) -> Result<Ints<'py>> {
        if let Ok(array) = value.cast::<PyArray1<u32>>()
            && is_a_slice(array)
        {
            return Ok(Ints::Tokens(array.clone()));
        }
        if let Ok(array) = value.cast::<PyArray1<u64>>()
            && is_a_slice(array)
        {
            return Ok(Ints::Hashes(array.clone()));
        }
        if value.is_instance_of::<PyString>() {
            return Err(bad(value, what, SEQUENCE));
        }
        let packed = value.is_instance_of::<PyBytes>()
            || value.is_instance_of::<PyByteArray>()
            || value.is_instance_of::<PyMemoryView>();
        let taken = PyBuffer::<u32>::get(value)
            .map(Ints::Narrow)
            .or_else(|_| PyBuffer::<u64>::get(value).map(Ints::Wide))
            .or_else(|_| PyBuffer::<i64>::get(value).map(Ints::SignedWide))
            .or_else(|_| PyBuffer::<i32>::get(value).map(Ints::Signed));
        let taken = match taken {
            Err(_) if packed => PyBuffer::<u8>::get(value).map(Ints::Bytes).ok(),
            other => other.ok(),
        };
        let in_place = taken.filter(|taken| match taken {
            Ints::Narrow(b) => b.is_c_contiguous() && b.dimensions() == 1,
            Ints::Bytes(b) => b.is_c_contiguous() && b.dimensions() == 1,
            Ints::Signed(b) => b.is_c_contiguous() && b.dimensions() == 1,
            Ints::Wide(b) => b.is_c_contiguous() && b.dimensions() == 1,
            Ints::SignedWide(b) => b.is_c_contiguous() && b.dimensions() == 1,
            Ints::Tokens(_) | Ints::Hashes(_) | Ints::Sequence(_) => true,
        });
        match in_place {
            Some(taken) => Ok(taken),
            None if is_sequence(value) => Ok(Ints::Sequence(value.clone())),
            None => Err(bad(value, what, SEQUENCE)),
        }
    }

    /// Returns token IDs: 32-bit buffers in place, other integers checked and narrowed.
    pub fn tokens<'a>(&'a self, py: Python<'a>, what: &str) -> Result<Cow<'a, [u32]>> {
        Ok(match self {
            Ints::Tokens(array) => Cow::Borrowed(slice(array)),
            Ints::Hashes(array) => Cow::Owned(narrowed(slice(array), what)?),
            Ints::Narrow(b) => Cow::Borrowed(in_place(py, b)),
            Ints::Sequence(values) => Cow::Owned(elements(values, what, TOKEN_IDS)?),
            Ints::Bytes(b) => {
                let bytes = in_place(py, b);
                if bytes.len() % 4 != 0 {
                    return Err(CoreError::BadValue {
                        what: what.into(),
                        got: format!("{} bytes", bytes.len()),
                        expected: "32-bit token ids: a multiple of 4 bytes".into(),
                    }
                    .into());
                }
                Cow::Owned(
                    bytes.chunks_exact(4).map(|c| u32::from_ne_bytes([c[0], c[1], c[2], c[3]])).collect(),
                )
            }
            Ints::Signed(b) => Cow::Owned(narrowed(in_place(py, b), what)?),
            Ints::Wide(b) => Cow::Owned(narrowed(in_place(py, b), what)?),
            Ints::SignedWide(b) => Cow::Owned(narrowed(in_place(py, b), what)?),
        })
    }

    /// Returns 64-bit hashes: 64-bit buffers in place, other integers converted.
    pub fn hashes<'a>(&'a self, py: Python<'a>, what: &str) -> Result<Cow<'a, [u64]>> {
        Ok(match self {
            Ints::Hashes(array) => Cow::Borrowed(slice(array)),
            Ints::Tokens(array) => Cow::Owned(slice(array).iter().map(|h| u64::from(*h)).collect()),
            Ints::Wide(b) => Cow::Borrowed(in_place(py, b)),
            Ints::SignedWide(b) => Cow::Owned(in_place(py, b).iter().map(|h| *h as u64).collect()),
            Ints::Narrow(b) => Cow::Owned(in_place(py, b).iter().map(|h| u64::from(*h)).collect()),
            Ints::Signed(b) => Cow::Owned(in_place(py, b).iter().map(|h| *h as u64).collect()),
            Ints::Sequence(values) => Cow::Owned(elements(values, what, HASHES)?),
            Ints::Bytes(b) => {
                let bytes = in_place(py, b);
                if bytes.len() % 8 != 0 {
                    return Err(CoreError::BadValue {
                        what: what.into(),
                        got: format!("{} bytes", bytes.len()),
                        expected: "64-bit hashes: a multiple of 8 bytes".into(),
                    }
                    .into());
                }
                let word = |c: &[u8]| u64::from_ne_bytes(c.try_into().expect("8 bytes"));
                Cow::Owned(bytes.chunks_exact(8).map(word).collect())
            }
        })
    }
}

pub fn bad(value: &Bound<'_, PyAny>, what: &str, expected: &str) -> crate::errors::Error {
    let kind = value.get_type().name().map_or_else(|_| "?".into(), |n| n.to_string());
    BadValueError::new_err(format!("{what}: {kind} is not valid; expected {expected}")).into()
}

/// Borrows the buffer's elements in place.
fn in_place<'a, T: pyo3::buffer::Element>(_py: Python<'a>, buffer: &'a PyBuffer<T>) -> &'a [T] {
    let count = buffer.item_count();
    if count == 0 {
        return &[];
    }
    // SAFETY: the buffer is C-contiguous (checked in `take`), its format matches `T` (checked by
    // `get`), and it stays exported for the slice's lifetime. The interpreter lock is held
    // throughout, so no Python code changes it meanwhile.
    unsafe { std::slice::from_raw_parts(buffer.buf_ptr().cast::<T>(), count) }
}

/// Longest sequence that is copied: ranges and objects of other types may claim any length.
const MAX_ELEMENTS: usize = 1 << 28;
const SEQUENCE: &str = "a sequence of integers (list, tuple, range, array, numpy array or bytes)";
const TOKEN_IDS: &str = "an integer from 0 to 4294967295";
const HASHES: &str = "an integer from -2^63 to 2^64 - 1";

fn is_sequence(value: &Bound<'_, PyAny>) -> bool {
    let indexed = value.hasattr("__getitem__").unwrap_or(false) && !value.is_instance_of::<PyDict>();
    indexed && value.len().is_ok()
}

/// The error for an invalid element, with its position.
fn bad_element(what: &str, position: usize, got: &str, expected: &str) -> crate::errors::Error {
    CoreError::BadValue { what: format!("{what}[{position}]"), got: got.into(), expected: expected.into() }
        .into()
}

/// Converts the elements to token IDs.
fn narrowed<T: Copy + std::fmt::Display>(values: &[T], what: &str) -> Result<Vec<u32>>
where
    u32: TryFrom<T>,
{
    let one = |(position, value): (usize, &T)| {
        u32::try_from(*value).map_err(|_| bad_element(what, position, &value.to_string(), TOKEN_IDS))
    };
    values.iter().enumerate().map(one).collect()
}

/// Conversion of a sequence's element.
trait FromElement: Sized {
    fn of(value: &Bound<'_, PyAny>) -> Option<Self>;
}

impl FromElement for u32 {
    fn of(value: &Bound<'_, PyAny>) -> Option<u32> {
        value.extract().ok()
    }
}

impl FromElement for u64 {
    /// Negative values become their two's complement: engines send signed and unsigned hashes.
    fn of(value: &Bound<'_, PyAny>) -> Option<u64> {
        value.extract().ok().or_else(|| value.extract::<i64>().ok().map(|hash| hash as u64))
    }
}

/// Returns one hash of an engine.
pub fn hash_of(value: &Bound<'_, PyAny>, what: &str) -> Result<u64> {
    let one = if value.is_instance_of::<PyBool>() { None } else { u64::of(value) };
    one.ok_or_else(|| bad(value, what, HASHES))
}

/// Copies the elements of a sequence.
fn elements<T: FromElement>(values: &Bound<'_, PyAny>, what: &str, expected: &str) -> Result<Vec<T>> {
    let length = values.len()?;
    if length > MAX_ELEMENTS {
        return Err(CoreError::BadValue {
            what: what.into(),
            got: format!("{length} integers"),
            expected: format!("at most {MAX_ELEMENTS}"),
        }
        .into());
    }
    let mut all = Vec::with_capacity(length);
    for (position, value) in values.try_iter()?.enumerate() {
        let value = value?;
        let one = if value.is_instance_of::<PyBool>() { None } else { T::of(&value) };
        all.push(one.ok_or_else(|| {
            let got = value.repr().map_or_else(|_| "?".into(), |text| text.to_string());
            bad_element(what, position, &shortened(got), expected)
        })?);
    }
    Ok(all)
}

/// Returns at most 60 characters of a text.
fn shortened(text: String) -> String {
    match text.char_indices().nth(60) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text,
    }
}

/// Returns whether [`slice`] can borrow the array's elements: they are contiguous and aligned. An
/// array over a buffer with an odd offset is not aligned.
pub fn is_a_slice<T: Element>(array: &Bound<'_, PyArray1<T>>) -> bool {
    array.is_c_contiguous() && array.data().is_aligned()
}

/// Borrows the elements of an array in place, if [`is_a_slice`] is true.
pub fn slice<'a, T: Element>(array: &'a Bound<'_, PyArray1<T>>) -> &'a [T] {
    // SAFETY: the interpreter lock is held as long as the slice lives, so no Python code changes
    // the array. A batch pins it instead: its elements stay in their place, and the caller of
    // Python changes none while the request is in use. `as_slice` checks the rest.
    unsafe { array.as_slice() }.expect("checked when the array was taken")
}
