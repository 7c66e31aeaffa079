//! `Board`: memory that the worker processes of a server share.
use crate::errors::Result;
use lmetric_core::CoreError;
use lmetric_core::board::{BYTES, Board as CoreBoard, Memory};
use pyo3::buffer::PyBuffer;
use pyo3::prelude::*;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

/// Adds the class to the module.
pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<Board>()
}

/// A writable buffer, as words that several processes write.
struct Mapped {
    buffer: PyBuffer<u8>,
    /// Number of words: a request asks for them some fifty times.
    words: usize,
}

impl Memory for Mapped {
    fn words(&self) -> &[AtomicU64] {
        // SAFETY: the buffer is contiguous, writable and aligned (checked in `Board::new`), and
        // stays exported as long as this value. All access is atomic, by this type alone.
        unsafe { std::slice::from_raw_parts(self.buffer.buf_ptr().cast::<AtomicU64>(), self.words) }
    }
}

/// Memory that the worker processes of a server share: each writes its load there, and reads that
/// of the others before each decision (`Router.join`).
///
/// `memory`: a writable buffer of `Board.SIZE` bytes that all workers map, at first zeros.
/// `writer`: the number of this worker's area, which no other process uses. Raises `BadValueError`.
#[pyclass(frozen, module = "lmetric")]
pub struct Board {
    inner: Arc<CoreBoard>,
}

impl Board {
    /// The board of the core.
    pub fn inner(&self) -> &Arc<CoreBoard> {
        &self.inner
    }
}

#[pymethods]
impl Board {
    /// Size of the memory in bytes.
    #[classattr]
    const SIZE: usize = BYTES;
    /// Number of areas.
    #[classattr]
    const WRITERS: usize = lmetric_core::board::WRITERS;

    #[new]
    fn new(memory: PyBuffer<u8>, writer: usize) -> Result<Board> {
        let usable = memory.is_c_contiguous()
            && !memory.readonly()
            && memory.buf_ptr().addr().is_multiple_of(align_of::<AtomicU64>());
        if !usable {
            return Err(CoreError::BadValue {
                what: "shared memory of workers".into(),
                got: "a buffer that is read-only, not contiguous or not aligned".into(),
                expected: "mmap.mmap of a shared file".into(),
            }
            .into());
        }
        let mapped = Mapped { words: memory.item_count() / size_of::<AtomicU64>(), buffer: memory };
        Ok(Board { inner: Arc::new(CoreBoard::new(Box::new(mapped), writer)?) })
    }

    /// Empties the area of a worker that has ended: its load counts nowhere from then on. Raises
    /// `BadValueError`.
    fn clear(&self, writer: usize) -> Result<()> {
        Ok(self.inner.clear(writer)?)
    }

    /// Notes a text under a key, for all workers; None removes the note. The note outlives this
    /// worker. Of more than some 100,000 notes, old ones are lost.
    fn note(&self, key: &str, text: Option<&str>) {
        self.inner.note(hash(key), text.map_or(0, hash));
    }

    /// Returns the hash (`Board.hash`) of the text noted under a key; None: there is none.
    fn noted(&self, key: &str) -> Option<u64> {
        self.inner.noted(hash(key))
    }

    /// Returns a small number for a name, the same in all workers; None: over 4,096 names.
    fn number_of(&self, name: &str) -> Option<usize> {
        self.inner.number_of(hash(name))
    }

    /// Returns the hash that `noted` returns for a text.
    #[staticmethod]
    #[pyo3(name = "hash")]
    fn hash_of(text: &str) -> u64 {
        hash(text)
    }
}

/// Returns a hash that is not 0.
fn hash(text: &str) -> u64 {
    xxhash_rust::xxh3::xxh3_64(text.as_bytes()).max(1)
}
