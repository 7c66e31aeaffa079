//! `Request`: a request's prompt and properties, checked when it is made.
use crate::buffers::{self, Ints};
use crate::errors::Result;
use lmetric_core::CoreError;
use lmetric_core::kv::hash::{self, Domain};
use lmetric_core::kv::keys::Keys;
use lmetric_core::kv::media::{self, Item};
use lmetric_core::request::{Allowed, Arm, Request as CoreRequest, Tenant};
use numpy::{PyArray1, PyUntypedArrayMethods};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyString, PyWeakrefReference};
use xxhash_rust::xxh3::xxh3_64;

/// Longer prompts count as this long, so that output positions fit into 32 bits.
const MAX_PROMPT_TOKENS: u32 = i32::MAX as u32;

/// Later blocks match no prefix. No engine computes such prompts (4 million tokens in blocks of
/// 16), and each block takes time under the router's lock.
const MAX_BLOCKS: usize = 1 << 18;

/// A request to route or score. It is immutable and can be used any number of times.
///
/// The prompt is exactly one of these:
///
/// - `token_ids`: integers from 0 to 2^32 - 1 (a list, tuple, range, array or buffer of any integer
///   type, or bytes of packed 32-bit integers)
/// - `text`: str or UTF-8 bytes
/// - `block_hashes`: 64-bit integers, one per block of `block_size` tokens, chained by the router
///
/// If no prefix can match, `prompt_tokens` alone is enough. `images` are the images in `token_ids`:
/// tuples of identity (vLLM's `mm_hash`), position of the first token, and number of tokens, in
/// their order in the prompt. Blocks with different images never match.
///
/// A contiguous numpy array of uint32 is read in place: do not change it while the request is in
/// use. Everything else is copied.
///
/// Raises `BadValueError` with the position and the value of a token that is out of range.
#[pyclass(frozen, freelist = 16, module = "lmetric")]
pub struct Request {
    prompt: Prompt,
    /// Prompt length in tokens, if known. None: the length of `token_ids`, or a quarter of the
    /// bytes of `text`.
    #[pyo3(get)]
    prompt_tokens: Option<u64>,
    /// Tokens of further prompts in the request; they count as load and match no prefix.
    #[pyo3(get)]
    extra_tokens: u64,
    /// Largest number of output tokens, or the exact number if it is known.
    #[pyo3(get)]
    max_tokens: Option<u64>,
    /// Leading output tokens that are hidden from the client, if known.
    #[pyo3(get)]
    reasoning_tokens: Option<u64>,
    /// Any key that requests with similar answer lengths share: tenant, endpoint, task.
    #[pyo3(get)]
    length_class: Text,
    /// Key of session affinity.
    #[pyo3(get)]
    session: Text,
    /// Name of the LoRA adapter. Prompts with different adapters never match.
    #[pyo3(get)]
    lora_name: Text,
    /// Salt of the prefix cache. Prompts with different salts never match.
    #[pyo3(get)]
    cache_salt: Text,
    /// Name of the request in the decision record.
    #[pyo3(get)]
    request_id: Text,
    /// Whether the router may split the request between instances, or move it.
    #[pyo3(get)]
    allow_split: bool,
    /// Why `allow_split` is false, for the decision record.
    #[pyo3(get)]
    split_reason: Text,
    /// Whether the router may fetch a prefix for the request from another instance.
    #[pyo3(get)]
    allow_fetch: bool,
    /// Why `allow_fetch` is false, for the decision record.
    #[pyo3(get)]
    fetch_reason: Text,
    instances: Option<Allowed>,
    /// Owner of the request, for `FairShares` (docs/how-to/overload.md).
    #[pyo3(get)]
    tenant: Text,
    /// The tenant's weight among all tenants, above 0.
    #[pyo3(get)]
    tenant_weight: f64,
    /// Delay in seconds that `UniBoost` adds to the arrival of the tenant's requests; negative:
    /// earlier.
    #[pyo3(get)]
    handicap_seconds: f64,
    /// Priority in the client's request, lower first, for policies (`lm.PRIORITY`).
    /// `Decision.priority` is the router's own priority.
    #[pyo3(get)]
    priority: Option<f64>,
    /// Whether the client says that this is the last request of its session: an agent program then
    /// frees its place in the cache at once.
    #[pyo3(get)]
    session_final: bool,
    /// Deadline of the first token in seconds after the arrival, for admission by load. None: that
    /// of the router's settings.
    #[pyo3(get)]
    ttft_slo_seconds: Option<f64>,
    /// Whether the answer comes whole: the router then expects no first token.
    #[pyo3(get)]
    whole_answer: bool,
}

type Text = Option<Py<PyString>>;

enum Prompt {
    Absent,
    /// Contiguous and aligned; read in place.
    Array(Py<PyArray1<u32>>),
    Tokens(Vec<u32>),
    /// Tokens with images between them.
    Images(Vec<u32>, Vec<Item>),
    Text(Py<PyString>),
    Bytes(Py<PyBytes>),
    Hashes(Vec<u64>),
}

impl Prompt {
    /// Reads the prompt from the three arguments.
    ///
    /// # Errors
    /// `BadValue` for several prompts, for no prompt without a length, and for a value of another
    /// type.
    fn of(
        py: Python<'_>,
        token_ids: Option<&Bound<'_, PyAny>>,
        text: Option<&Bound<'_, PyAny>>,
        block_hashes: Option<&Bound<'_, PyAny>>,
        images: Vec<(String, usize, usize)>,
        has_length: bool,
    ) -> Result<Prompt> {
        let tokens = |ids| -> Result<Vec<u32>> {
            Ok(Ints::take(ids, "token_ids")?.tokens(py, "token_ids")?.into_owned())
        };
        if !images.is_empty() {
            return match (token_ids, text, block_hashes) {
                (Some(ids), None, None) => Ok(Prompt::Images(tokens(ids)?, in_order(images)?)),
                _ => Err(bad_images("a prompt without token_ids", "token_ids alone")),
            };
        }
        match (token_ids, text, block_hashes) {
            (None, None, None) if has_length => Ok(Prompt::Absent),
            (Some(ids), None, None) => match ids.cast::<PyArray1<u32>>() {
                Ok(array) if buffers::is_a_slice(array) => Ok(Prompt::Array(array.clone().unbind())),
                _ => Ok(Prompt::Tokens(tokens(ids)?)),
            },
            (None, Some(text), None) => match (text.cast::<PyString>(), text.cast::<PyBytes>()) {
                (Ok(text), _) => Ok(Prompt::Text(text.clone().unbind())),
                (_, Ok(text)) => Ok(Prompt::Bytes(text.clone().unbind())),
                _ => Err(buffers::bad(text, "text", "str or bytes")),
            },
            (None, None, Some(hashes)) => {
                let ints = Ints::take(hashes, "block_hashes")?;
                Ok(Prompt::Hashes(ints.hashes(py, "block_hashes")?.into_owned()))
            }
            _ => {
                let given = [token_ids.is_some(), text.is_some(), block_hashes.is_some()];
                let count = given.iter().filter(|given| **given).count();
                Err(CoreError::BadValue {
                    what: "prompt".into(),
                    got: format!("{count} of token_ids=, text= and block_hashes="),
                    expected: "exactly one of them, or prompt_tokens= alone if no prefix can match".into(),
                }
                .into())
            }
        }
    }
}

/// Returns the images.
///
/// # Errors
/// `BadValue` if one begins before the end of the one before it, or ends beyond 2^63.
fn in_order(images: Vec<(String, usize, usize)>) -> Result<Vec<Item>> {
    let mut free = 0;
    let item = |(identifier, offset, length): (String, usize, usize)| {
        let end = offset.checked_add(length).filter(|end| i64::try_from(*end).is_ok());
        let (true, Some(end)) = (offset >= free, end) else {
            return Err(bad_images(
                &format!("an image at token {offset}"),
                "images in order, which do not overlap",
            ));
        };
        free = end;
        Ok(Item { identifier, offset, length })
    };
    images.into_iter().map(item).collect()
}

fn bad_images(got: &str, expected: &str) -> crate::errors::Error {
    CoreError::BadValue { what: "images".into(), got: got.into(), expected: expected.into() }.into()
}

#[pymethods]
impl Request {
    #[new]
    // Positional, too: the server makes every request with positional arguments, since each keyword
    // costs about 50 ns.
    #[pyo3(signature = (
        token_ids=None, text=None, block_hashes=None, prompt_tokens=None, max_tokens=None, session=None,
        request_id=None, lora_name=None, cache_salt=None, extra_tokens=0, tenant=None, tenant_weight=1.0,
        handicap_seconds=0.0, length_class=None, reasoning_tokens=None, allow_split=true,
        split_reason=None, allow_fetch=true, fetch_reason=None, priority=None, instances=None,
        session_final=false, ttft_slo_seconds=None, whole_answer=false, images=None
    ))]
    fn new(
        py: Python<'_>,
        token_ids: Option<&Bound<'_, PyAny>>,
        text: Option<&Bound<'_, PyAny>>,
        block_hashes: Option<&Bound<'_, PyAny>>,
        prompt_tokens: Option<u64>,
        max_tokens: Option<u64>,
        session: Text,
        request_id: Text,
        lora_name: Text,
        cache_salt: Text,
        extra_tokens: u64,
        tenant: Text,
        tenant_weight: f64,
        handicap_seconds: f64,
        length_class: Text,
        reasoning_tokens: Option<u64>,
        allow_split: bool,
        split_reason: Text,
        allow_fetch: bool,
        fetch_reason: Text,
        priority: Option<f64>,
        instances: Option<Vec<String>>,
        session_final: bool,
        ttft_slo_seconds: Option<f64>,
        whole_answer: bool,
        images: Option<Vec<(String, usize, usize)>>,
    ) -> Result<Request> {
        for (what, allowed, reason) in
            [("split_reason", allow_split, &split_reason), ("fetch_reason", allow_fetch, &fetch_reason)]
        {
            if let (true, Some(reason)) = (allowed, reason) {
                let expected = format!("None unless allow_{} is False", &what[..5]);
                let got = format!("'{}'", reason.bind(py).to_string_lossy());
                return Err(CoreError::BadValue { what: what.into(), got, expected }.into());
            }
        }
        Ok(Request {
            prompt: Prompt::of(
                py,
                token_ids,
                text,
                block_hashes,
                images.unwrap_or_default(),
                prompt_tokens.is_some(),
            )?,
            prompt_tokens,
            extra_tokens,
            max_tokens,
            reasoning_tokens,
            length_class,
            session,
            lora_name,
            cache_salt,
            request_id,
            allow_split,
            split_reason,
            allow_fetch,
            fetch_reason,
            instances: instances.map(|names| names.into_iter().map(Into::into).collect()),
            tenant,
            tenant_weight,
            handicap_seconds,
            priority,
            session_final,
            ttft_slo_seconds,
            whole_answer,
        })
    }

    /// Token IDs of the prompt, uint32; None for a prompt of another kind.
    #[getter]
    fn token_ids<'py>(&self, py: Python<'py>) -> Option<Bound<'py, PyArray1<u32>>> {
        match &self.prompt {
            Prompt::Array(array) => Some(array.bind(py).clone()),
            Prompt::Tokens(ids) | Prompt::Images(ids, _) => Some(PyArray1::from_slice(py, ids)),
            _ => None,
        }
    }

    /// Images in `token_ids`: identity, position of the first token, number of tokens.
    #[getter]
    fn images(&self) -> Vec<(&str, usize, usize)> {
        match &self.prompt {
            Prompt::Images(_, items) => {
                items.iter().map(|item| (item.identifier.as_str(), item.offset, item.length)).collect()
            }
            _ => Vec::new(),
        }
    }

    /// Text of the prompt, as given; None for a prompt of another kind.
    #[getter]
    fn text<'py>(&self, py: Python<'py>) -> Option<Bound<'py, PyAny>> {
        match &self.prompt {
            Prompt::Text(text) => Some(text.bind(py).clone().into_any()),
            Prompt::Bytes(text) => Some(text.bind(py).clone().into_any()),
            _ => None,
        }
    }

    /// Names of the only instances that may take the request. None: any instance may.
    #[getter]
    fn instances(&self) -> Option<Vec<&str>> {
        self.instances.as_ref().map(|names| names.iter().map(|name| &**name).collect())
    }

    /// Block hashes of the prompt, uint64; None for a prompt of another kind.
    #[getter]
    fn block_hashes<'py>(&self, py: Python<'py>) -> Option<Bound<'py, PyArray1<u64>>> {
        match &self.prompt {
            Prompt::Hashes(hashes) => Some(PyArray1::from_slice(py, hashes)),
            _ => None,
        }
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        let prompt = match &self.prompt {
            Prompt::Absent => None,
            Prompt::Array(array) => Some(format!("{} token IDs", array.bind(py).len())),
            Prompt::Tokens(ids) => Some(format!("{} token IDs", ids.len())),
            Prompt::Images(ids, items) => Some(format!("{} token IDs, {} images", ids.len(), items.len())),
            Prompt::Text(text) => Some(format!("text of {} characters", text.bind(py).len()?)),
            Prompt::Bytes(text) => Some(format!("text of {} bytes", text.bind(py).len()?)),
            Prompt::Hashes(hashes) => Some(format!("{} block hashes", hashes.len())),
        };
        let numbers = [
            ("prompt_tokens", self.prompt_tokens),
            ("extra_tokens", Some(self.extra_tokens).filter(|n| *n > 0)),
            ("max_tokens", self.max_tokens),
            ("reasoning_tokens", self.reasoning_tokens),
        ];
        let numbers = numbers.iter().filter_map(|(name, n)| n.map(|n| format!("{name}={n}")));
        let texts = [
            ("session", &self.session),
            ("lora_name", &self.lora_name),
            ("cache_salt", &self.cache_salt),
            ("request_id", &self.request_id),
            ("tenant", &self.tenant),
        ];
        let texts = texts.iter().filter_map(|(name, text)| {
            text.as_ref().map(|text| Ok(format!("{name}={}", text.bind(py).repr()?)))
        });
        let among = self.instances.as_ref().map(|names| Ok(format!("instances={names:?}")));
        let allowed = [("allow_split", self.allow_split), ("allow_fetch", self.allow_fetch)];
        let denied = allowed.iter().filter(|(_, allowed)| !allowed).map(|(name, _)| format!("{name}=False"));
        let last = self.session_final.then(|| Ok("session_final=True".to_string()));
        let slo = self.ttft_slo_seconds.map(|seconds| Ok(format!("ttft_slo_seconds={seconds}")));
        let whole = self.whole_answer.then(|| Ok("whole_answer=True".to_string()));
        let fields: Vec<String> = prompt
            .into_iter()
            .map(Ok)
            .chain(numbers.map(Ok))
            .chain(texts)
            .chain(among)
            .chain(denied.map(Ok))
            .chain(last)
            .chain(slo)
            .chain(whole)
            .collect::<PyResult<_>>()?;
        Ok(format!("Request({})", fields.join(", ")))
    }
}

/// Borrows the text of an option.
fn of<'a>(py: Python<'a>, text: &'a Text) -> PyResult<Option<&'a str>> {
    text.as_ref().map(|text| text.bind(py).to_str()).transpose()
}

impl Request {
    /// Returns the core's request, with an empty chain, and the prompt to hash.
    pub fn core<'a>(&'a self, py: Python<'a>, keys: &Keys) -> Result<(CoreRequest<'a>, Unhashed<'a>)> {
        let prompt = self.unhashed(py, keys)?;
        let (prompt_tokens, tokens_per_block) = self.lengths(py, &prompt.source, keys);
        let key =
            |text: &Text| -> PyResult<Option<u64>> { Ok(of(py, text)?.map(|text| xxh3_64(text.as_bytes()))) };
        let denied = |allowed: bool, reason: &'a Text| -> PyResult<Option<&'a str>> {
            if allowed { Ok(None) } else { Ok(of(py, reason)?.or(Some(NOT_ALLOWED))) }
        };
        let request = CoreRequest {
            chain: &[],
            prompt_tokens: prompt_tokens.saturating_add(saturated(self.extra_tokens)).min(MAX_PROMPT_TOKENS),
            tokens_per_block,
            expected_output_tokens: self.max_tokens.map(saturated),
            think_tokens: self.reasoning_tokens.map(saturated),
            length_class: key(&self.length_class)?,
            session: key(&self.session)?,
            session_final: self.session_final,
            split_reason: denied(self.allow_split, &self.split_reason)?,
            fetch_reason: denied(self.allow_fetch, &self.fetch_reason)?,
            instances: self.instances.as_ref(),
            arrival: None,
            ttft_slo_seconds: self.ttft_slo_seconds,
            level: 0, // an argument of `Router.arrive`, as the next one
            sheddable: false,
            whole_answer: self.whole_answer,
            home: None,
            tenant: Tenant {
                id: key(&self.tenant)?.unwrap_or(0),
                weight: self.tenant_weight,
                handicap_seconds: self.handicap_seconds,
            },
            lora: key(&self.lora_name)?,
            priority: self.priority,
            arm: Arm::Stable,
            shadow: false,
        };
        Ok((request, prompt))
    }

    /// The name in the decision record.
    pub fn id<'a>(&'a self, py: Python<'a>) -> PyResult<Option<&'a str>> {
        of(py, &self.request_id)
    }

    fn unhashed<'a>(&'a self, py: Python<'a>, keys: &Keys) -> PyResult<Unhashed<'a>> {
        let (adapter, salt) = (of(py, &self.lora_name)?, of(py, &self.cache_salt)?);
        let (source, domain, size) = match &self.prompt {
            Prompt::Absent => (Source::Tokens(&[]), keys.tokens, keys.block_size),
            Prompt::Array(array) => (Source::Array(array), keys.tokens, keys.block_size),
            Prompt::Tokens(ids) => (Source::Tokens(ids), keys.tokens, keys.block_size),
            Prompt::Images(ids, items) => (Source::Images(ids, items), keys.tokens, keys.block_size),
            Prompt::Hashes(hashes) => (Source::Hashes(hashes), keys.hashes, 1),
            Prompt::Text(text) => {
                (Source::Text(text.bind(py).to_str()?.as_bytes()), keys.text, keys.text_block_bytes)
            }
            Prompt::Bytes(text) => (Source::Text(text.bind(py).as_bytes()), keys.text, keys.text_block_bytes),
        };
        Ok(Unhashed { source, domain: domain.of_request(adapter, salt), size })
    }

    /// Returns the prompt's length in tokens, and the tokens per block.
    fn lengths(&self, py: Python<'_>, source: &Source<'_>, keys: &Keys) -> (u32, f64) {
        let length = |tokens: usize| u32::try_from(tokens).unwrap_or(u32::MAX);
        let given = self.prompt_tokens.map(saturated);
        let by_tokens = |tokens: usize| (given.unwrap_or(length(tokens)), keys.block_size as f64);
        match source {
            Source::Array(array) => by_tokens(array.bind(py).len()),
            Source::Tokens(ids) | Source::Images(ids, _) => by_tokens(ids.len()),
            Source::Hashes(hashes) => by_tokens(hashes.len() * keys.block_size),
            Source::Text(text) => {
                // Four bytes per token is typical of English; callers that know better give the
                // length.
                let tokens = given.unwrap_or(length(text.len().div_ceil(4)));
                let per_byte = f64::from(tokens) / text.len().max(1) as f64;
                (tokens, per_byte * keys.text_block_bytes as f64)
            }
        }
    }
}

/// A prompt to hash.
pub struct Unhashed<'a> {
    source: Source<'a>,
    domain: Domain,
    /// Elements per block.
    size: usize,
}

/// A weak reference to an array: numpy does not resize an array that has one, so its elements stay
/// in their place.
pub type Pin<'a> = Bound<'a, PyWeakrefReference>;

/// The elements of a prompt. Only an array may change: Python code can write to it.
#[derive(Clone, Copy)]
enum Source<'a> {
    Array(&'a Py<PyArray1<u32>>),
    Tokens(&'a [u32]),
    Images(&'a [u32], &'a [Item]),
    Hashes(&'a [u64]),
    Text(&'a [u8]),
}

/// Bytes that are hashed at a time under the interpreter lock: about 10 us, as hashing and copying
/// take about 80 us per MB.
const BYTES_PER_PIECE: usize = 128 << 10;

impl<'a> Unhashed<'a> {
    /// Makes an array's elements readable without the interpreter lock, as long as the caller keeps
    /// the pin. A copy would take longer than the hash.
    pub fn pin(&mut self, py: Python<'a>) -> PyResult<Option<Pin<'a>>> {
        let Source::Array(array) = self.source else { return Ok(None) };
        let array = array.bind(py);
        let pin = PyWeakrefReference::new(array)?;
        self.source = Source::Tokens(buffers::slice(array));
        Ok(Some(pin))
    }

    /// Writes the prompt's chain to `chain`, a long prompt's without the interpreter lock. Of an
    /// array, other threads can take the lock between two pieces.
    pub fn hash(&self, py: Python<'_>, chain: &mut Vec<u64>) {
        chain.clear();
        let bytes = match self.source {
            Source::Array(array) => return self.hash_array(py, array, chain),
            Source::Tokens(ids) | Source::Images(ids, _) => size_of_val(ids),
            Source::Hashes(hashes) => size_of_val(hashes),
            Source::Text(text) => text.len(),
        };
        if bytes > BYTES_PER_PIECE {
            py.detach(|| self.hash_detached(chain))
        } else {
            self.hash_detached(chain)
        }
    }

    /// Appends the prompt's chain to `chain`. The chain of an array without a pin is left out.
    pub fn hash_detached(&self, chain: &mut Vec<u64>) {
        let Unhashed { domain, size, .. } = *self;
        match self.source {
            Source::Array(_) => {}
            Source::Tokens(ids) => hash::hash_tokens(domain, size, first(ids, size), chain),
            Source::Images(ids, items) => {
                let ids = first(ids, size);
                let parts = media::parts(items, size, ids.len());
                media::hash_tokens_with(domain, size, None, ids, &parts, chain);
            }
            Source::Hashes(hashes) => hash::chain(domain, first(hashes, size), chain),
            Source::Text(text) => hash::hash_text(domain, size, first(text, size), chain),
        }
    }

    fn hash_array(&self, py: Python<'_>, array: &Py<PyArray1<u32>>, chain: &mut Vec<u64>) {
        let Unhashed { domain, size, .. } = *self;
        let piece = (BYTES_PER_PIECE / size_of::<u32>() / size.max(1)).max(1) * size;
        let mut from = 0;
        loop {
            // Borrowed anew: other threads may have shortened the array.
            let array = array.bind(py);
            let ids = first(buffers::slice(array), size);
            let ids = ids.get(from..).unwrap_or(&[]);
            let now = &ids[..ids.len().min(piece)];
            hash::hash_tokens_after(domain, size, chain.last().copied(), now, chain);
            if now.len() == ids.len() {
                return;
            }
            from += piece;
            py.detach(|| ());
        }
    }
}

/// The part of a prompt that may match: at most `MAX_BLOCKS` blocks of `size` elements.
fn first<T>(prompt: &[T], size: usize) -> &[T] {
    &prompt[..prompt.len().min(MAX_BLOCKS.saturating_mul(size))]
}

/// Reason in the decision record if the caller gives none.
const NOT_ALLOWED: &str = "the caller does not allow it";

/// A token count as the core's type; larger counts become the largest value.
fn saturated(tokens: u64) -> u32 {
    u32::try_from(tokens).unwrap_or(u32::MAX)
}

/// Returns the caller's request. `what` names it in errors.
pub fn given<'py>(request: Bound<'py, PyAny>, what: &str) -> Result<Bound<'py, Request>> {
    request.cast_into::<Request>().map_err(|error| {
        let value = error.into_inner();
        buffers::bad(&value, what, "an lmetric.Request, such as lmetric.Request(token_ids)")
    })
}
