//! Hashes of prompts for records of requests.
use crate::errors::BadValueError;
use blake2b_simd::Params;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

/// Bytes of a hash.
const HASH_BYTES: usize = 8;

/// Adds the function to the module.
pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(chained_hashes, module)?)
}

/// Returns the chained hashes of all whole blocks of ``data``, 8 bytes each.
///
/// A hash is BLAKE2b of `key`, the hash before it (of the first block: `first`), and the block of
/// `block` bytes. The interpreter lock is released meanwhile. Raises `BadValueError` if `block` is
/// 0.
#[pyfunction]
fn chained_hashes<'py>(
    py: Python<'py>,
    key: &[u8],
    first: &[u8],
    data: &[u8],
    block: usize,
) -> PyResult<Bound<'py, PyBytes>> {
    if block == 0 {
        return Err(BadValueError::new_err("block: 0 is not valid; expected a size in bytes, at least 1"));
    }
    let hashes = py.detach(|| {
        let mut params = Params::new();
        params.hash_length(HASH_BYTES);
        // The state after the key: each block begins with it.
        let mut keyed = params.to_state();
        keyed.update(key);
        let mut hashes = Vec::with_capacity(data.len() / block * HASH_BYTES);
        for part in data.chunks_exact(block) {
            let last = hashes.len().checked_sub(HASH_BYTES).map_or(first, |begin| &hashes[begin..]);
            let hash = keyed.clone().update(last).update(part).finalize();
            hashes.extend_from_slice(hash.as_bytes());
        }
        hashes
    });
    Ok(PyBytes::new(py, &hashes))
}
