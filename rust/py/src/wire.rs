//! Python classes of `wire`.
use crate::errors::{LmetricError, Result};
use crate::ticket::Ticket;
use lmetric_core::plan::{Event, Usage};
use lmetric_core::program::Finish as EndedBy;
use lmetric_wire::{
    ChunkedBody as CoreChunkedBody, Fields, Finish, Kind, MAX_TOKENS, Observer, Peer as CorePeer, Request,
    Scanner, Step, WireError as CoreWireError, split,
};
use numpy::PyArray1;
use pyo3::create_exception;
use pyo3::exceptions::PyValueError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyBytes, PyDict, PyInt, PyList, PyString, PyTuple};
use std::borrow::Cow;
use std::collections::HashMap;
use std::fmt::Write;
use std::hash::Hasher;
use std::sync::atomic::{AtomicU64, Ordering};

create_exception!(
    lmetric,
    WireError,
    LmetricError,
    "Bytes that are not a valid HTTP/1.1 message, or a message that ends too early."
);

/// Bytes of a read that may not have been the last one of its turn of the event loop. Event loops
/// read up to 256 kB at once, and libuv up to 32 times before it reads another connection.
const FULL_READ: usize = 64 * 1024;
/// Reads of at least this size may have to wait for a turn of the event loop. Smaller ones, among
/// them all pieces of a usual stream, cost nothing more.
const LARGE_READ: usize = 16 * 1024;
const PASS: u64 = 4;
const OUT: u64 = 8;
/// Flags of a step of [`ResponseReader`].
const FLAGS: [(&str, u64); 7] = [
    ("READY", 1),
    ("END", 2),
    ("PASS", PASS),
    ("OUT", OUT),
    ("ENGINE_ERROR", 16),
    ("INCOMPLETE", 32),
    ("UNSEEN", 64),
];

fn flags(step: Step) -> u64 {
    let bits = [step.ready, step.end, step.pass, step.out, step.error, step.incomplete, step.unseen];
    bits.iter().zip(FLAGS).map(|(set, (_, bit))| if *set { bit } else { 0 }).sum()
}

/// Token IDs of a prompt and its answer, the answer's text, and the fields that all events share.
type Observed<'py> =
    (Option<Bound<'py, PyArray1<u32>>>, Bound<'py, PyArray1<u32>>, String, Bound<'py, PyAny>);

create_exception!(
    lmetric,
    HeadTooLargeError,
    WireError,
    "A request head above a limit on its bytes or fields. The message names a field and no value."
);

fn error(error: CoreWireError) -> PyErr {
    let text = error.to_string();
    match error {
        CoreWireError::HeadTooLarge(_) => HeadTooLargeError::new_err(text),
        _ => WireError::new_err(text),
    }
}

/// Reads an engine's HTTP/1.1 responses and frames them for the client. Base class of an asyncio
/// protocol.
///
/// Bytes for the client are written at once, unchanged or in a new frame, and their tokens are
/// reported to the ticket; no Python code runs for them. Everything else goes to the sink.
#[pyclass(module = "lmetric._core", subclass)]
#[derive(Default)]
struct ResponseReader {
    scanner: Scanner,
    ticket: Option<Py<Ticket>>,
    /// Output tokens reported to the ticket so far.
    told: u64,
    first_token_at: Option<f64>,
    sink: Option<Py<PyAny>>,
    /// The client's `transport.write`, after the commit of the answer.
    write: Option<Py<PyAny>>,
    #[pyo3(get)]
    pieces: u64,
}

impl ResponseReader {
    fn stepped(&mut self, py: Python<'_>, step: std::result::Result<Step, CoreWireError>) -> Result<u64> {
        let step = step.map_err(error)?;
        if step.pass || step.out {
            self.tell(py)?;
        }
        Ok(flags(step))
    }

    /// Reads data and writes it to the client, or gives it to the sink.
    fn read(slf: &Bound<'_, Self>, data: &Bound<'_, PyBytes>) -> PyResult<()> {
        let py = slf.py();
        let mut this = slf.borrow_mut();
        let Some(sink) = this.sink.as_ref().map(|sink| sink.clone_ref(py)) else {
            drop(this);
            return slf.call_method0("unasked").map(drop);
        };
        this.pieces += 1;
        let step = this.scanner.feed(data.as_bytes());
        let step = this.stepped(py, step);
        let write = this.write.as_ref().map(|write| write.clone_ref(py));
        if step.is_err() && write.is_some() {
            this.tell(py)?;
        }
        let framed = match (&step, &write) {
            (Ok(OUT), Some(_)) => Some(this.take(py)),
            // The events before the fault are observed, so the client must get them.
            (Err(_), Some(_)) => Some(this.take(py)).filter(|framed| !framed.as_bytes().is_empty()),
            _ => None,
        };
        // The callee may call back into this object.
        drop(this);
        let done = match (step, write) {
            (Ok(PASS | OUT), Some(write)) => write.call1(py, (framed.as_ref().unwrap_or(data),)),
            (Err(error), Some(write)) => match framed {
                Some(framed) => write.call1(py, (framed,)).and(Err(error.into())),
                None => Err(error.into()),
            },
            (Ok(flags), _) => return sink.call_method1(py, intern!(py, "received"), (flags, data)).map(drop),
            (Err(error), _) => Err(error.into()),
        };
        match done {
            Ok(_) => Ok(()),
            Err(error) => sink.call_method1(py, "failed", (error,)).map(drop),
        }
    }

    /// Reports tokens that the client is about to receive to the ticket.
    fn tell(&mut self, py: Python<'_>) -> Result<()> {
        let Some(ticket) = &self.ticket else { return Ok(()) };
        let mut new = self.scanner.tokens() - self.told;
        if new == 0 {
            return Ok(());
        }
        let now = ticket.get().now();
        if self.told == 0 {
            self.first_token_at = Some(now);
            ticket.get().advance(py, Event::FirstToken, Some(now))?;
            new -= 1;
        }
        if new > 0 {
            let new = u32::try_from(new).unwrap_or(u32::MAX);
            ticket.get().advance(py, Event::Tokens(new), Some(now))?;
        }
        self.told = self.scanner.tokens();
        Ok(())
    }
}

#[pymethods]
impl ResponseReader {
    #[new]
    #[pyo3(signature = (*_args))]
    fn new(_args: &Bound<'_, PyTuple>) -> Self {
        Self::default()
    }

    #[pyo3(signature = (sink, ticket=None, http11=true, require_finish=false, observe=false, hide_ids=false))]
    fn begin(
        &mut self,
        sink: Py<PyAny>,
        ticket: Option<Py<Ticket>>,
        http11: bool,
        require_finish: bool,
        observe: bool,
        hide_ids: bool,
    ) {
        self.scanner.begin(http11, require_finish, false);
        if observe {
            self.scanner.observe(hide_ids);
        }
        (self.sink, self.write, self.pieces) = (Some(sink), None, 0);
        (self.ticket, self.told, self.first_token_at) = (ticket, 0, None);
    }

    /// Withholds the end of an aborted message in the answer that `begin` started.
    fn withhold_abort(&mut self) {
        self.scanner.withhold_abort();
    }

    /// Gives the client another name of the model in the answer that `begin` started.
    fn rename(&mut self, served: &str, shown: &str) {
        self.scanner.rename(served, shown);
    }

    /// Receives data from the event loop. Data of at least `LARGE_READ` bytes goes to `large_read`.
    fn data_received(slf: &Bound<'_, Self>, data: &Bound<'_, PyBytes>) -> PyResult<()> {
        if data.as_bytes().len() >= LARGE_READ {
            return slf.call_method1("large_read", (data,)).map(drop);
        }
        Self::read(slf, data)
    }

    /// Receives a large read. Calls `process`.
    fn large_read(slf: &Bound<'_, Self>, data: &Bound<'_, PyBytes>) -> PyResult<()> {
        Self::process(slf, data)
    }

    /// Reads data now.
    fn process(slf: &Bound<'_, Self>, data: &Bound<'_, PyBytes>) -> PyResult<()> {
        Self::read(slf, data)?;
        if data.as_bytes().len() >= FULL_READ {
            slf.borrow_mut().scanner.shrink();
        }
        Ok(())
    }

    /// Whether a sink gets the data.
    #[getter]
    fn attached(&self) -> bool {
        self.sink.is_some()
    }

    fn eof(&mut self, py: Python<'_>) -> Result<u64> {
        let step = self.scanner.eof();
        self.stepped(py, step)
    }

    #[pyo3(signature = (extra, close, write=None))]
    fn commit<'py>(
        &mut self,
        py: Python<'py>,
        extra: &[u8],
        close: bool,
        write: Option<Py<PyAny>>,
    ) -> Result<Bound<'py, PyBytes>> {
        self.tell(py)?;
        self.write = write;
        Ok(PyBytes::new(py, self.scanner.commit(extra, close)))
    }

    /// Commits the answer without its head, as the rest of a stream whose head the client has.
    /// Returns the withheld bytes.
    fn continue_stream<'py>(&mut self, py: Python<'py>, write: Py<PyAny>) -> Result<Bound<'py, PyBytes>> {
        self.tell(py)?;
        self.write = Some(write);
        Ok(PyBytes::new(py, self.scanner.continue_stream()))
    }

    /// Returns the withheld bytes of the body, without framing. The client gets none of them.
    fn payload<'py>(&mut self, py: Python<'py>) -> Bound<'py, PyBytes> {
        self.scanner.commit_alone();
        PyBytes::new(py, self.scanner.take_payload())
    }

    /// The withheld bytes of the body, without framing. They stay withheld.
    #[getter]
    fn held(&self) -> &[u8] {
        self.scanner.held()
    }

    /// Commits the answer for Python itself, without a client. Returns the events so far, as
    /// `events`.
    fn commit_events<'py>(&mut self, py: Python<'py>) -> Result<Bound<'py, PyList>> {
        self.tell(py)?;
        self.write = None;
        self.scanner.commit_alone();
        Ok(self.events(py)?)
    }

    /// Takes the texts of comments that came before the commit, each as a line.
    fn take_comments<'py>(&mut self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.scanner.take_comments())
    }

    /// Returns the data of each new event, and each comment line.
    fn events<'py>(&mut self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let mut events = Vec::new();
        split(self.scanner.take_payload(), |event| events.push(PyBytes::new(py, event)));
        PyList::new(py, events)
    }

    /// Returns the observed values: the prompt's token IDs, the answer's token IDs and text, and
    /// the fields that all events share.
    fn observed<'py>(&self, py: Python<'py>) -> PyResult<Observed<'py>> {
        let observer = self.scanner.observer();
        let frame = match self.scanner.observed_frame() {
            Some(frame) => py.import("json")?.call_method1("loads", (frame,))?,
            None => PyDict::new(py).into_any(),
        };
        let ids = PyArray1::from_slice(py, observer.map_or(&[], Observer::ids));
        Ok((self.observed_prompt(py), ids, observer.map_or("", Observer::text).to_owned(), frame))
    }

    /// Returns the number of token IDs in each observed event that has some.
    fn observed_pieces(&self) -> Vec<u32> {
        self.scanner.observer().map_or_else(Vec::new, |observer| observer.pieces().to_vec())
    }

    /// Returns the observed reasoning, and the lists of tool calls as JSON; `None`: the answer has
    /// neither.
    fn observed_parsed(&self) -> Option<(String, Vec<String>)> {
        let observer = self.scanner.observer().filter(|observer| observer.parsed())?;
        Some((observer.reasoning().to_owned(), observer.calls().to_vec()))
    }

    /// Token IDs of the prompt, if the engine reports them.
    #[getter]
    fn observed_prompt<'py>(&self, py: Python<'py>) -> Option<Bound<'py, PyArray1<u32>>> {
        let prompt = self.scanner.observer()?.prompt()?;
        Some(PyArray1::from_slice(py, prompt))
    }

    #[getter]
    fn observed_tokens(&self) -> usize {
        self.scanner.observer().map_or(0, |observer| observer.ids().len())
    }

    #[getter]
    fn observed_over(&self) -> bool {
        self.scanner.observer().is_some_and(Observer::over)
    }

    /// Whether the usage followed the observed end.
    #[getter]
    fn observed_usage(&self) -> bool {
        self.scanner.observer().is_some_and(Observer::usage_sent)
    }

    /// Whether the event `[DONE]` was observed.
    #[getter]
    fn observed_done(&self) -> bool {
        self.scanner.observer().is_some_and(Observer::done_sent)
    }

    /// The data of the event with which the engine failed in an observed stream; empty without one.
    #[getter]
    fn withheld<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        let mut data = PyBytes::new(py, b"");
        split(self.scanner.withheld(), |event| {
            if data.as_bytes().is_empty() && !event.starts_with(b":") {
                data = PyBytes::new(py, event);
            }
        });
        data
    }

    /// A count that grows with each part of the answer: events of a stream (not comments or empty
    /// events), else pieces.
    #[getter]
    fn progress(&self) -> u64 {
        if self.scanner.event_stream() { self.scanner.progress() } else { self.pieces }
    }

    /// Why the stream is no longer observed.
    #[getter]
    fn unseen(&self) -> Option<&str> {
        self.scanner.observer()?.lost()
    }

    /// Removes the sink and returns it.
    fn detach(&mut self) -> Option<Py<PyAny>> {
        self.scanner.shrink();
        self.write = None;
        self.sink.take()
    }

    /// Closes the ticket as finished, with the usage in the answer, and drops the ticket.
    fn finish_ticket(&mut self, py: Python<'_>) -> Result<()> {
        if let Some(ticket) = self.ticket.take() {
            let usage = self.scanner.usage();
            let narrow = |n: Option<u64>| n.map(|n| u32::try_from(n).unwrap_or(u32::MAX));
            let counted = Some(self.scanner.tokens()).filter(|n| *n > 0);
            let usage = Usage {
                prompt_tokens: narrow(usage.prompt),
                cached_tokens: narrow(usage.cached),
                output_tokens: narrow(usage.output.or(counted)),
                finish: match self.scanner.finish() {
                    Finish::Stopped => EndedBy::Stop,
                    Finish::CalledTools => EndedBy::ToolCalls,
                    Finish::AtLimit => EndedBy::Length,
                    Finish::Open | Finish::Done | Finish::Aborted => EndedBy::Unknown,
                },
            };
            ticket.get().advance(py, Event::Finished(usage), None)?;
        }
        Ok(())
    }

    fn take<'py>(&mut self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, self.scanner.take())
    }

    fn end_with<'py>(&mut self, py: Python<'py>, events: &[u8]) -> Bound<'py, PyBytes> {
        PyBytes::new(py, self.scanner.end_with(events))
    }

    #[getter]
    fn status(&self) -> u16 {
        self.scanner.status()
    }

    #[getter]
    fn keep_alive(&self) -> bool {
        self.scanner.keep_alive()
    }

    #[getter]
    fn event_stream(&self) -> bool {
        self.scanner.event_stream()
    }

    #[getter]
    fn closes_client(&self) -> bool {
        self.scanner.closes_client()
    }

    #[getter]
    fn load(&self) -> Option<&str> {
        self.scanner.load()
    }

    /// Status line and end-to-end fields of the engine's head, each with its line end.
    #[getter]
    fn head_lines(&self) -> &[u8] {
        self.scanner.head_lines()
    }

    /// The content-encoding of the answer, which is not read; None: it has none.
    #[getter]
    fn coding(&self) -> Option<&str> {
        self.scanner.coding()
    }

    #[getter]
    fn aborted(&self) -> bool {
        self.scanner.finish() == Finish::Aborted
    }

    #[getter]
    fn error_code(&self) -> Option<u64> {
        self.scanner.error_code()
    }

    #[getter]
    fn first_token_at(&self) -> Option<f64> {
        self.first_token_at
    }

    #[getter]
    fn tokens(&self) -> u64 {
        self.scanner.tokens()
    }

    /// Tokens of the prompt, of its cached part, and of the output. Then the time of the first one,
    /// in seconds on the monotonic clock, and whether a count was impossible and was dropped.
    #[getter]
    fn usage(&self) -> (Option<u64>, Option<u64>, u64, Option<f64>, bool) {
        let usage = self.scanner.usage();
        let implausible = self.scanner.implausible_usage();
        (usage.prompt, usage.cached, self.output_tokens(), self.first_token_at, implausible)
    }

    #[getter]
    fn prompt_tokens(&self) -> Option<u64> {
        self.scanner.usage().prompt
    }

    #[getter]
    fn cached_tokens(&self) -> Option<u64> {
        self.scanner.usage().cached
    }

    /// Output tokens of the usage. Without usage, counted from events; a plain answer has no
    /// events.
    #[getter]
    fn output_tokens(&self) -> u64 {
        self.scanner.usage().output.unwrap_or_else(|| self.scanner.tokens())
    }
}

/// The sender of requests: a client, or a trusted proxy that describes its client in header fields.
///
/// `address`: IP address; empty for clients of a unix socket. `secure`: the connection uses TLS.
#[pyclass(frozen, module = "lmetric._core")]
struct Peer {
    inner: CorePeer,
    #[pyo3(get)]
    address: Py<PyString>,
    #[pyo3(get)]
    trusted: Py<PyBool>,
}

#[pymethods]
impl Peer {
    #[new]
    fn new(address: &Bound<'_, PyString>, secure: bool, trusted: &Bound<'_, PyBool>) -> PyResult<Self> {
        let inner =
            CorePeer { address: address.to_str()?.as_bytes().to_vec(), secure, trusted: trusted.is_true() };
        Ok(Self { inner, address: address.clone().unbind(), trusted: trusted.clone().unbind() })
    }
}

/// The head of a client's request. Fields that are Python objects cost as little to read as slots.
#[pyclass(frozen, module = "lmetric._core")]
struct RequestHead {
    #[pyo3(get)]
    plain: Py<PyBool>,
    #[pyo3(get)]
    framed: bool,
    #[pyo3(get)]
    chunked: bool,
    #[pyo3(get)]
    start: Py<PyInt>,
    #[pyo3(get)]
    length: Py<PyInt>,
    #[pyo3(get)]
    keep_alive: Py<PyBool>,
    #[pyo3(get)]
    request_id: Py<PyString>,
    #[pyo3(get)]
    target: Py<PyBytes>,
    /// The target without its query.
    #[pyo3(get)]
    path: Py<PyString>,
    /// The value of the path in the reader's table; `None`: the table lacks the path.
    #[pyo3(get)]
    relayed: Py<PyAny>,
    #[pyo3(get)]
    session: Py<PyAny>,
    /// Whether `x-session-final` is `true` or `1`.
    #[pyo3(get)]
    session_final: Py<PyBool>,
    /// `request_id`: visible ASCII.
    id: String,
    fields: Fields,
}

fn latin1(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| char::from(*byte)).collect()
}

#[pymethods]
impl RequestHead {
    #[getter]
    fn authorization(&self) -> Option<&[u8]> {
        self.fields.authorization.as_deref()
    }

    #[getter]
    fn x_api_key(&self) -> Option<&[u8]> {
        self.fields.x_api_key.as_deref()
    }

    #[getter]
    fn api_key(&self) -> Option<&[u8]> {
        self.fields.api_key.as_deref()
    }

    #[getter]
    fn tenant(&self) -> Option<String> {
        self.fields.tenant.as_deref().map(latin1)
    }

    /// All `x-forwarded-for` fields, as one list.
    #[getter]
    fn forwarded_for(&self) -> Option<&[u8]> {
        self.fields.forwarded_for.as_deref()
    }

    /// Returns the first field for engines with this name in lower case; None: there is none.
    fn field(&self, name: &[u8]) -> Option<&[u8]> {
        lmetric_wire::field(&self.fields.lines, name)
    }

    /// `x-vllm-priority`; NaN if the field is not a whole number.
    #[getter]
    fn priority(&self) -> Option<f64> {
        let number = |value: &[u8]| std::str::from_utf8(value).ok()?.trim().parse::<i64>().ok();
        self.fields.priority.as_deref().map(|value| number(value).map_or(f64::NAN, |value| value as f64))
    }

    /// Returns the head for an engine: `first` (request line and fields of the router's own), the
    /// client's fields, the end.
    ///
    /// `priority` replaces the client's priority. `own_key`: `first` has an `authorization`, so the
    /// client's credentials are left out. `own_priority`: the client's priority is left out.
    /// `peer`: the request's sender, which forwarding fields describe; None: the head has no such
    /// fields.
    #[pyo3(signature = (first, length, priority=None, own_key=false, own_priority=false, peer=None))]
    #[allow(clippy::too_many_arguments)]
    fn for_engine<'py>(
        &self,
        py: Python<'py>,
        first: &[u8],
        length: usize,
        priority: Option<i64>,
        own_key: bool,
        own_priority: bool,
        peer: Option<&Peer>,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let given = priority.map(|priority| priority.to_string().into_bytes());
        let field = given.as_ref().or(self.fields.priority.as_ref().filter(|_| !own_priority));
        let lines = if own_key && lmetric_wire::has_credentials(&self.fields) {
            Cow::Owned(lmetric_wire::without_credentials(&self.fields.lines))
        } else {
            Cow::Borrowed(&self.fields.lines)
        };
        let priority: [&[u8]; 3] = match field {
            Some(value) => [b"x-vllm-priority: ", value, b"\r\n"],
            None => [b""; 3],
        };
        let mut forwarded = Vec::with_capacity(if peer.is_some() { 128 } else { 0 });
        if let Some(peer) = peer {
            self.fields.write_forwarded(&peer.inner, &mut forwarded);
        }
        let length = length.to_string();
        let parts: [&[u8]; 11] = [
            first,
            &lines,
            &forwarded,
            priority[0],
            priority[1],
            priority[2],
            b"x-request-id: ",
            self.id.as_bytes(),
            b"\r\ncontent-length: ",
            length.as_bytes(),
            b"\r\n\r\n",
        ];
        PyBytes::new_with(py, parts.iter().map(|part| part.len()).sum(), |mut out| {
            for part in parts {
                let (here, rest) = out.split_at_mut(part.len());
                here.copy_from_slice(part);
                out = rest;
            }
            Ok(())
        })
    }
}

/// The chunked body of a client's request.
#[pyclass(module = "lmetric._core")]
#[derive(Default)]
struct ChunkedBody {
    inner: CoreChunkedBody,
}

#[pymethods]
impl ChunkedBody {
    #[new]
    fn new() -> Self {
        Self::default()
    }

    /// Returns the payload in `data`, and the number of bytes read: fewer than given at the end.
    fn read<'py>(&mut self, py: Python<'py>, data: &[u8]) -> PyResult<(Bound<'py, PyBytes>, usize)> {
        let mut payload = Vec::with_capacity(data.len());
        let used = self.inner.read(data, &mut payload).map_err(error)?;
        Ok((PyBytes::new(py, &payload), used))
    }

    /// Whether the body has ended.
    #[getter]
    fn done(&self) -> bool {
        self.inner.done()
    }
}

/// A path of the table of a [`RequestReader`]: its objects, which the heads of its requests share.
struct KnownPath {
    path: Py<PyString>,
    /// The target of a request without a query.
    target: Py<PyBytes>,
    relayed: Py<PyAny>,
}

/// Reads heads of requests. `own_keys`: credentials are for the router. `id_prefix`: prefix of the
/// ids of requests that have no id. `limit`: most bytes of a head. `paths`: values by path.
#[pyclass(frozen, module = "lmetric._core")]
struct RequestReader {
    own_keys: bool,
    id_prefix: String,
    #[pyo3(get)]
    limit: usize,
    paths: HashMap<Vec<u8>, KnownPath>,
    count: AtomicU64,
}

impl RequestReader {
    fn head(&self, py: Python<'_>, request: Request) -> PyResult<RequestHead> {
        let Request { kind, start, length, target, keep_alive, fields } = request;
        let id = fields.request_id.as_deref().map_or_else(
            || format!("{}-{:x}", self.id_prefix, self.count.fetch_add(1, Ordering::Relaxed)),
            latin1,
        );
        let path = lmetric_wire::path(&target);
        let known = self.paths.get(path);
        let flag = |yes: bool| PyBool::new(py, yes).to_owned().unbind();
        let said = fields.session_final.as_deref().unwrap_or_default().trim_ascii();
        let session = fields.session.as_deref().map(latin1);
        Ok(RequestHead {
            plain: flag(kind == Kind::Plain),
            framed: matches!(kind, Kind::Plain | Kind::Framed),
            chunked: kind == Kind::Chunked,
            start: start.into_pyobject(py)?.unbind(),
            length: length.into_pyobject(py)?.unbind(),
            keep_alive: flag(keep_alive),
            request_id: PyString::new(py, &id).unbind(),
            target: match known {
                Some(known) if path.len() == target.len() => known.target.clone_ref(py),
                _ => PyBytes::new(py, &target).unbind(),
            },
            path: match known {
                Some(known) => known.path.clone_ref(py),
                None => PyString::new(py, &String::from_utf8_lossy(path)).unbind(),
            },
            relayed: known.map_or_else(|| py.None(), |known| known.relayed.clone_ref(py)),
            session: session.map_or_else(|| py.None(), |session| PyString::new(py, &session).into()),
            session_final: flag(said == b"1" || said.eq_ignore_ascii_case(b"true")),
            id,
            fields,
        })
    }
}

#[pymethods]
impl RequestReader {
    #[new]
    fn new(
        own_keys: bool,
        id_prefix: String,
        limit: usize,
        paths: HashMap<String, Bound<'_, PyAny>>,
    ) -> Self {
        let known = |(path, relayed): (String, Bound<'_, PyAny>)| {
            let py = relayed.py();
            let target = PyBytes::new(py, path.as_bytes()).unbind();
            let known =
                KnownPath { path: PyString::new(py, &path).unbind(), target, relayed: relayed.unbind() };
            (path.into_bytes(), known)
        };
        let paths = paths.into_iter().map(known).collect();
        Self { own_keys, id_prefix, limit, paths, count: AtomicU64::new(1) }
    }

    /// Reads the head at the start of `data`; None if it is incomplete.
    fn read(&self, py: Python<'_>, data: &[u8]) -> PyResult<Option<RequestHead>> {
        let request = Request::read(data, self.own_keys, self.limit).map_err(error)?;
        request.map(|request| self.head(py, request)).transpose()
    }

    /// Makes a head of the fields that another parser read.
    fn sort(&self, py: Python<'_>, target: &[u8], fields: Vec<(Vec<u8>, Vec<u8>)>) -> PyResult<RequestHead> {
        let pairs = fields.iter().map(|(name, value)| (name.as_slice(), value.as_slice()));
        let fields = Fields::sort(pairs, self.own_keys);
        let target = target.to_vec();
        let request = Request { kind: Kind::Other, start: 0, length: 0, target, keep_alive: false, fields };
        self.head(py, request)
    }
}

/// Labels of decisions: a prefix, the id, a hyphen and a tag. The tag is SipHash-2-4 of id and
/// tenant under a key of 16 bytes. A label is valid for its tenant alone and cannot be guessed.
#[pyclass(frozen, module = "lmetric._core")]
struct DecisionLabels {
    prefix: String,
    key: (u64, u64),
}

impl DecisionLabels {
    fn write_label(&self, id: u64, tenant: &str, to: &mut String) {
        // Deprecated in favor of `DefaultHasher`, which takes no key.
        #[allow(deprecated)]
        let mut hasher = std::hash::SipHasher::new_with_keys(self.key.0, self.key.1);
        hasher.write_u64(id);
        hasher.write(tenant.as_bytes());
        to.push_str(&self.prefix);
        // Writing into a string never fails.
        let _ = write!(to, "{id}-{:016x}", hasher.finish());
    }
}

#[pymethods]
impl DecisionLabels {
    #[new]
    fn new(prefix: String, key: &[u8]) -> PyResult<Self> {
        let Ok(key) = <[u8; 16]>::try_from(key) else {
            return Err(PyValueError::new_err(format!("key has {} bytes; expected 16", key.len())));
        };
        let (first, second) = key.split_at(8);
        let word = |half: &[u8]| u64::from_le_bytes(half.try_into().expect("half of 16 bytes"));
        Ok(Self { prefix, key: (word(first), word(second)) })
    }

    /// Returns the label of a decision.
    fn label(&self, id: u64, tenant: &str) -> String {
        let mut label = String::with_capacity(self.prefix.len() + 40);
        self.write_label(id, tenant, &mut label);
        label
    }

    /// Returns the router's lines in the head of an answer. `engine`: the engine that answers.
    /// `prefill`: the engine that computed the prompt.
    #[pyo3(signature = (head, id, tenant, engine=None, prefill=None))]
    fn answer_lines<'py>(
        &self,
        py: Python<'py>,
        head: &RequestHead,
        id: u64,
        tenant: &str,
        engine: Option<&str>,
        prefill: Option<&str>,
    ) -> Bound<'py, PyBytes> {
        let mut lines = String::with_capacity(192);
        for part in engine.map_or([""; 3], |engine| ["x-lmetric-instance: ", engine, "\r\n"]) {
            lines.push_str(part);
        }
        lines.push_str("x-lmetric-decision: ");
        self.write_label(id, tenant, &mut lines);
        for part in ["\r\nx-request-id: ", &head.id, "\r\n"] {
            lines.push_str(part);
        }
        for part in prefill.map_or([""; 3], |prefill| ["x-lmetric-prefill: ", prefill, "\r\n"]) {
            lines.push_str(part);
        }
        PyBytes::new(py, lines.as_bytes())
    }
}

/// Adds its classes and functions to the module.
pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("MAX_TOKENS", MAX_TOKENS)?;
    module.add("FULL_READ", FULL_READ)?;
    module.add("WireError", module.py().get_type::<WireError>())?;
    for (name, bit) in FLAGS {
        module.add(name, bit)?;
    }
    module.add("HeadTooLargeError", module.py().get_type::<HeadTooLargeError>())?;
    module.add("MAX_REQUEST_FIELDS", lmetric_wire::REQUEST_FIELDS_LIMIT)?;
    module.add_class::<ChunkedBody>()?;
    module.add_class::<DecisionLabels>()?;
    module.add_class::<Peer>()?;
    module.add_class::<RequestHead>()?;
    module.add_class::<RequestReader>()?;
    module.add_class::<ResponseReader>()
}
