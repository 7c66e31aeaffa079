//! Buffers in: numpy arrays, `array.array`, bytes, memoryviews, read in place.
use crate::errors::{BadValueError, Result};
use lmetric_core::CoreError;
use numpy::{Element, PyArray1, PyArrayMethods, PyUntypedArrayMethods};
use pyo3::buffer::PyBuffer;
use pyo3::prelude::*;
use pyo3::types::PyList;
use std::borrow::Cow;

/// A C-contiguous buffer of integers, held as long as this lives.
pub enum Ints<'py> {
    /// A numpy array of token ids: asked directly, which is several times as fast as the buffer protocol.
    Tokens(Bound<'py, PyArray1<u32>>),
    /// A numpy array of 64-bit hashes.
    Hashes(Bound<'py, PyArray1<u64>>),
    /// Of 32-bit integers (or raw bytes, read as such).
    Narrow(PyBuffer<u32>),
    /// Raw bytes.
    Bytes(PyBuffer<u8>),
    /// Signed 32-bit integers.
    Signed(PyBuffer<i32>),
    /// Of 64-bit integers.
    Wide(PyBuffer<u64>),
    /// Signed 64-bit integers.
    SignedWide(PyBuffer<i64>),
    /// An empty buffer of whatever kind: its pointer may be anything.
    Empty,
}

impl<'py> Ints<'py> {
    /// Takes `value`'s buffer. `what` names the argument in errors.
    pub fn take(value: &Bound<'py, PyAny>, what: &str) -> Result<Ints<'py>> {
        if let Ok(array) = value.cast::<PyArray1<u32>>() {
            return if array.is_c_contiguous() {
                Ok(Ints::Tokens(array.clone()))
            } else {
                Err(bad(value, what, CONTIGUOUS))
            };
        }
        if let Ok(array) = value.cast::<PyArray1<u64>>() {
            return if array.is_c_contiguous() {
                Ok(Ints::Hashes(array.clone()))
            } else {
                Err(bad(value, what, CONTIGUOUS))
            };
        }
        let taken = PyBuffer::<u32>::get(value)
            .map(Ints::Narrow)
            .or_else(|_| PyBuffer::<u64>::get(value).map(Ints::Wide))
            .or_else(|_| PyBuffer::<i64>::get(value).map(Ints::SignedWide))
            .or_else(|_| PyBuffer::<i32>::get(value).map(Ints::Signed))
            .or_else(|_| PyBuffer::<u8>::get(value).map(Ints::Bytes));
        let Ok(taken) = taken else {
            if value.len().is_ok_and(|n| n == 0) && !value.is_instance_of::<PyList>() {
                return Ok(Ints::Empty);
            }
            return Err(bad(
                value,
                what,
                "a buffer of 32- or 64-bit integers (numpy array, array.array, bytes), not a list",
            ));
        };
        let contiguous = match &taken {
            Ints::Narrow(b) => b.is_c_contiguous() && b.dimensions() == 1,
            Ints::Bytes(b) => b.is_c_contiguous() && b.dimensions() == 1,
            Ints::Signed(b) => b.is_c_contiguous() && b.dimensions() == 1,
            Ints::Wide(b) => b.is_c_contiguous() && b.dimensions() == 1,
            Ints::SignedWide(b) => b.is_c_contiguous() && b.dimensions() == 1,
            Ints::Empty | Ints::Tokens(_) | Ints::Hashes(_) => true,
        };
        if !contiguous {
            return Err(bad(value, what, CONTIGUOUS));
        }
        Ok(taken)
    }

    /// As token ids: in place where they are 32 bits wide, else checked and narrowed.
    pub fn tokens<'a>(&'a self, py: Python<'a>, what: &str) -> Result<Cow<'a, [u32]>> {
        let too_big = || -> crate::errors::Error {
            CoreError::BadValue {
                what: what.into(),
                got: "an element out of range".into(),
                expected: "token ids from 0 to 2^32 - 1".into(),
            }
            .into()
        };
        Ok(match self {
            Ints::Empty => Cow::Borrowed(&[]),
            Ints::Tokens(array) => Cow::Borrowed(slice(array)),
            Ints::Hashes(array) => {
                let all: Option<Vec<u32>> = slice(array).iter().map(|t| u32::try_from(*t).ok()).collect();
                Cow::Owned(all.ok_or_else(too_big)?)
            }
            Ints::Narrow(b) => Cow::Borrowed(in_place(py, b)),
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
            Ints::Signed(b) => {
                let all: Option<Vec<u32>> = in_place(py, b).iter().map(|t| u32::try_from(*t).ok()).collect();
                Cow::Owned(all.ok_or_else(too_big)?)
            }
            Ints::Wide(b) => {
                let all: Option<Vec<u32>> = in_place(py, b).iter().map(|t| u32::try_from(*t).ok()).collect();
                Cow::Owned(all.ok_or_else(too_big)?)
            }
            Ints::SignedWide(b) => {
                let all: Option<Vec<u32>> = in_place(py, b).iter().map(|t| u32::try_from(*t).ok()).collect();
                Cow::Owned(all.ok_or_else(too_big)?)
            }
        })
    }

    /// As 64-bit hashes: in place where they are 64 bits wide.
    pub fn hashes<'a>(&'a self, py: Python<'a>, what: &str) -> Result<Cow<'a, [u64]>> {
        Ok(match self {
            Ints::Empty => Cow::Borrowed(&[]),
            Ints::Hashes(array) => Cow::Borrowed(slice(array)),
            Ints::Tokens(array) => Cow::Owned(slice(array).iter().map(|h| u64::from(*h)).collect()),
            Ints::Wide(b) => Cow::Borrowed(in_place(py, b)),
            Ints::SignedWide(b) => Cow::Owned(in_place(py, b).iter().map(|h| *h as u64).collect()),
            Ints::Narrow(b) => Cow::Owned(in_place(py, b).iter().map(|h| u64::from(*h)).collect()),
            Ints::Signed(b) => Cow::Owned(in_place(py, b).iter().map(|h| *h as u64).collect()),
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

fn bad(value: &Bound<'_, PyAny>, what: &str, expected: &str) -> crate::errors::Error {
    let kind = value.get_type().name().map_or_else(|_| "?".into(), |n| n.to_string());
    BadValueError::new_err(format!("{what}: {kind} is not valid; expected {expected}")).into()
}

/// The buffer's elements, in place.
fn in_place<'a, T: pyo3::buffer::Element>(_py: Python<'a>, buffer: &'a PyBuffer<T>) -> &'a [T] {
    let count = buffer.item_count();
    if count == 0 {
        return &[];
    }
    // SAFETY: the buffer is C-contiguous (checked in `take`), its format matches `T` (checked by `get`), and it stays exported
    // for the slice's lifetime. The interpreter lock is held throughout, so no Python code changes it meanwhile.
    unsafe { std::slice::from_raw_parts(buffer.buf_ptr().cast::<T>(), count) }
}

const CONTIGUOUS: &str = "a C-contiguous buffer of one dimension";

/// The array's elements, in place.
fn slice<'a, T: Element>(array: &'a Bound<'_, PyArray1<T>>) -> &'a [T] {
    // SAFETY: contiguous (checked in `take`); the interpreter lock is held as long as the slice lives, so no Python code changes it.
    unsafe { array.as_slice() }.unwrap_or(&[])
}
