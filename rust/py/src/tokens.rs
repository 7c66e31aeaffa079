//! Python class of `tokens`.
use crate::errors::{BadValueError, LmetricError};
use lmetric_tokens::{Encoder, FAST_TOKENIZER, TokensError};
use numpy::PyArray1;
use pyo3::create_exception;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyString};

create_exception!(
    lmetric,
    TokenizeError,
    LmetricError,
    "The tokenizer cannot encode a text, or cannot decode token IDs."
);

/// Adds the class to the module.
pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("TokenizeError", module.py().get_type::<TokenizeError>())?;
    module.add("FAST_TOKENIZER", FAST_TOKENIZER)?;
    module.add_class::<TokenEncoder>()
}

fn error(error: TokensError) -> PyErr {
    match error {
        TokensError::Unusable(why) => BadValueError::new_err(why),
        TokensError::Failed(_) => TokenizeError::new_err(error.to_string()),
    }
}

/// Encodes texts as token IDs. Parts of a text between special tokens are tokenized once and
/// cached.
///
/// `tokenizer_json`: the file's bytes. `added_tokens`: additional tokens, a JSON list of objects as
/// in that file. `around`: names of the tokens before and after a text, instead of the tokenizer's
/// own. `cache_bytes`: hard bound of the cache. Threads may share an encoder. Raises
/// `BadValueError`.
#[pyclass(frozen, module = "lmetric._core")]
struct TokenEncoder {
    encoder: Encoder,
}

#[pymethods]
impl TokenEncoder {
    #[new]
    #[pyo3(signature = (tokenizer_json, *, added_tokens=None, around=None, cache_bytes=268_435_456))]
    fn new(
        py: Python<'_>,
        tokenizer_json: &[u8],
        added_tokens: Option<&[u8]>,
        around: Option<(Vec<String>, Vec<String>)>,
        cache_bytes: usize,
    ) -> PyResult<Self> {
        let load = || Encoder::load(tokenizer_json, added_tokens.unwrap_or(b"[]"), around, cache_bytes);
        let encoder = py.detach(load).map_err(error)?;
        Ok(TokenEncoder { encoder })
    }

    /// Returns the token IDs of a text (uint32).
    ///
    /// `at_most`: returns None if more than this many bytes of the text (UTF-8) are not in the
    /// cache, and keeps the interpreter lock. Without `at_most`, the lock is released: call it in a
    /// thread. `scope`: texts of different scopes share no entry of the cache. Raises
    /// `TokenizeError`.
    #[pyo3(signature = (text, *, add_special_tokens=false, at_most=None, scope=0))]
    fn encode<'py>(
        &self,
        py: Python<'py>,
        text: &Bound<'py, PyString>,
        add_special_tokens: bool,
        at_most: Option<usize>,
        scope: u64,
    ) -> PyResult<Option<Bound<'py, PyArray1<u32>>>> {
        let text = text.to_str()?;
        let ids = match at_most {
            Some(at_most) => self.encoder.encode_in(scope, text, add_special_tokens, at_most),
            None => py.detach(|| self.encoder.encode_in(scope, text, add_special_tokens, usize::MAX)),
        };
        Ok(ids.map_err(error)?.map(|ids| PyArray1::from_vec(py, ids)))
    }

    /// Returns the text of token IDs (a list). Incomplete characters become U+FFFD. Raises
    /// `TokenizeError`.
    #[pyo3(signature = (ids, *, skip_special_tokens=true))]
    fn decode(&self, ids: Vec<u32>, skip_special_tokens: bool) -> PyResult<String> {
        self.encoder.decode(&ids, skip_special_tokens).map_err(error)
    }

    /// Why texts are tokenized whole; None: they are cut at special tokens.
    #[getter]
    fn whole_because(&self) -> Option<&str> {
        self.encoder.whole_because()
    }

    /// Whether the faster library is in use: it is compiled in (`FAST_TOKENIZER`) and returned the
    /// same IDs as the engines' library in all trials.
    #[getter]
    fn fast(&self) -> bool {
        self.encoder.is_fast()
    }

    /// Returns the ID of a token by its name, or None.
    fn id_of(&self, token: &str) -> Option<u32> {
        self.encoder.id_of(token)
    }

    /// Returns the cache's counts: `segments`, `bytes`, `evicted`, `found_bytes`, `new_bytes`.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let stats = self.encoder.stats();
        let dict = PyDict::new(py);
        dict.set_item("segments", stats.segments)?;
        dict.set_item("bytes", stats.bytes)?;
        dict.set_item("evicted", stats.evicted)?;
        dict.set_item("found_bytes", stats.found_bytes)?;
        dict.set_item("new_bytes", stats.new_bytes)?;
        Ok(dict)
    }
}
