//! One response, from the engine's bytes to the client's.
//!
//! The scanner withholds a response until it can be committed, so that the router can try another
//! engine until then. It commits a plain JSON answer or an error when it is whole, an event stream
//! at its first token or error, and other responses at the head. A body with a content-encoding is
//! not read. Comments before the commit are no sign of life: they are dropped (callers may pass
//! them on, [`Scanner::take_comments`]), and later comments pass.
//!
//! After [`Scanner::commit`] bytes pass as they arrive. A piece that starts and ends between chunks
//! and events passes unchanged; other pieces get a new frame. So a client sees whole events only,
//! and a broken stream can end cleanly.
use crate::WireError;
use crate::body::{Body, Framing};
use crate::head::{self, Head};
use crate::json::{Finish, Found, Probe, Usage};
use crate::observe::{OBSERVED_LIMIT, Observer};
use crate::rename::{Rename, write_events};
use crate::sse::{Event, Events, MARK};
use std::ops::Range;

/// Longest response head, bytes.
pub const HEAD_LIMIT: usize = 64 * 1024;
/// Capacity that a connection's empty buffers keep, in bytes.
const BUFFER_LIMIT: usize = 16 * 1024;
/// Longest plain answer that is withheld until it is whole, and longest event that is withheld
/// until its end, in bytes. Observed streams and answers without a client have [`OBSERVED_LIMIT`]
/// for events.
pub const HOLD_LIMIT: usize = 256 * 1024;

/// Bytes of a stream without a part of the answer, from which on the stream is refused.
pub const QUIET_LIMIT: usize = 1024 * 1024;
/// Bytes kept of the comments that came before an event stream could be committed.
const COMMENT_LIMIT: usize = 1024;

/// The result of reading one piece of input.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Step {
    /// The answer can be committed; [`Scanner::commit`] may be called.
    pub ready: bool,
    /// The message ended.
    pub end: bool,
    /// The client receives the input unchanged.
    pub pass: bool,
    /// [`Scanner::take`] has bytes for the client.
    pub out: bool,
    /// The engine reported an error inside the body.
    pub error: bool,
    /// The stream ended without any `finish_reason`; its end is withheld, and later bytes are
    /// dropped.
    pub incomplete: bool,
    /// The stream can no longer be observed; [`Observer::lost`] has the reason.
    pub unseen: bool,
    /// Output tokens of the events that ended in this piece.
    pub tokens: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Out {
    Chunked,
    Length(u64),
    Close,
}

/// Values found in the answer so far.
#[derive(Debug, Default)]
struct Said {
    ready: bool,
    finish: Finish,
    error: bool,
    error_code: Option<u64>,
    usage: Usage,
    tokens: u64,
    /// Events with a part of the answer, its end or an error.
    progress: u64,
    /// Bytes of the stream since the last such event.
    quiet: usize,
}

impl Said {
    fn event(&mut self, found: &Found, step: &mut Step) {
        let tokens = found.tokens();
        self.tokens += tokens;
        if found.progress() {
            self.progress += 1;
            self.quiet = 0;
        }
        step.tokens = step.tokens.saturating_add(u32::try_from(tokens).unwrap_or(u32::MAX));
        self.note(found, step);
        // A chat stream opens with a chunk that only names the role, a response with events that
        // repeat the request: not yet a sign of life from the model.
        let opening = found.choices || found.opening;
        self.ready |= !opening || tokens > 0 || found.finish != Finish::Open || found.error;
    }

    fn note(&mut self, found: &Found, step: &mut Step) {
        // A message may report its usage after its end, without a reason.
        let ended = self.finish != Finish::Open && found.aborted_message();
        if found.finish != Finish::Open && !ended {
            self.finish = found.finish;
        }
        if found.error {
            step.error = true;
            self.error = true;
            self.error_code = found.error_code;
        }
        let Usage { prompt, cached, output } = found.usage;
        self.usage.prompt = prompt.or(self.usage.prompt);
        self.usage.cached = cached.or(self.usage.cached);
        self.usage.output = output.or(self.usage.output);
    }
}

/// Ends of events in a piece of payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Ends {
    /// The end of the last whole event.
    last: Option<usize>,
    /// The start of an event that the client must not get: a `[DONE]` that arrives too early, the
    /// engine's failure in an observed stream, or the end of an aborted message.
    halt: Option<usize>,
    /// It is the engine's failure.
    failed: bool,
}

/// Reads the responses of one connection, one after the other.
#[derive(Debug)]
pub struct Scanner {
    http11: bool,
    require_finish: bool,
    withholds_abort: bool,
    bodiless: bool,
    raw_head: Vec<u8>,
    head: Option<Head>,
    body: Body,
    out: Out,
    events: Events,
    probe: Probe,
    /// Positions of comments to drop in the current piece.
    fillers: Vec<Range<usize>>,
    /// The end of the comments dropped so far.
    comments: Vec<u8>,
    /// Payload after the last whole event.
    pending: Vec<u8>,
    /// Payload that may go to the client.
    released: Vec<u8>,
    written: Vec<u8>,
    said: Said,
    observer: Option<Box<Observer>>,
    /// The change of the model's name; `None`: it stays.
    rename: Option<Box<Rename>>,
    /// A value in the current piece may have changed.
    rewritten: bool,
    /// The engine's failure in an observed stream: an event that the client did not get.
    withheld: Vec<u8>,
    committed: bool,
    /// There is no client: the payload is taken without framing.
    alone: bool,
    halted: bool,
    /// The message's end was returned.
    closed: bool,
    extra: bool,
}

impl Default for Scanner {
    fn default() -> Self {
        Self {
            http11: true,
            require_finish: false,
            withholds_abort: false,
            bodiless: false,
            raw_head: Vec::new(),
            head: None,
            body: Body::new(Framing::Close),
            out: Out::Close,
            events: Events::default(),
            probe: Probe::default(),
            fillers: Vec::new(),
            comments: Vec::new(),
            pending: Vec::new(),
            released: Vec::new(),
            written: Vec::new(),
            said: Said::default(),
            observer: None,
            rename: None,
            rewritten: false,
            withheld: Vec::new(),
            committed: false,
            alone: false,
            halted: false,
            closed: false,
            extra: false,
        }
    }
}

impl Scanner {
    /// Starts the next response. `http11`: the client speaks HTTP/1.1 (else nothing is chunked for
    /// it). `require_finish`: a stream without any `finish_reason` is incomplete. `bodiless`: the
    /// request was HEAD.
    pub fn begin(&mut self, http11: bool, require_finish: bool, bodiless: bool) {
        let (mut pending, mut released) =
            (std::mem::take(&mut self.pending), std::mem::take(&mut self.released));
        let (mut raw_head, mut written) =
            (std::mem::take(&mut self.raw_head), std::mem::take(&mut self.written));
        for buffer in [&mut pending, &mut released, &mut raw_head, &mut written] {
            buffer.clear();
            buffer.shrink_to(BUFFER_LIMIT);
        }
        *self = Self {
            http11,
            require_finish,
            bodiless,
            raw_head,
            pending,
            released,
            written,
            ..Self::default()
        };
    }

    /// Observes the response that [`Scanner::begin`] started, if it is a stream of status 200: the
    /// observer records its events, and `kv_transfer_params` become null. `hide_ids`:
    /// `prompt_token_ids` and `token_ids` become null, too. After the first token, the engine's
    /// failure ([`Scanner::withheld`]) ends the stream as incomplete.
    pub fn observe(&mut self, hide_ids: bool) {
        self.observer = Some(Box::new(Observer::new(hide_ids)));
    }

    /// Withholds the end of a message of Anthropic's API if the engine aborted it, in the response
    /// that [`Scanner::begin`] started: a `message_delta` without a reason. The engine must send no
    /// such event before the end.
    pub fn withhold_abort(&mut self) {
        self.withholds_abort = true;
    }

    /// Gives the client `shown` as the model's name where the response that [`Scanner::begin`]
    /// started has `served`: in events and in JSON. A body with a content-encoding does not change.
    pub fn rename(&mut self, served: &str, shown: &str) {
        self.rename = Some(Box::new(Rename::new(served, shown)));
    }

    /// [`Observer::frame`] with the model's name as the client gets it.
    pub fn observed_frame(&self) -> Option<String> {
        let frame = self.observer()?.frame()?;
        let Some(rename) = &self.rename else { return Some(frame.to_owned()) };
        let mut shown = Vec::with_capacity(frame.len());
        rename.write(frame.as_bytes(), &mut shown);
        Some(String::from_utf8_lossy(&shown).into_owned())
    }

    /// The observer; `None` if the response is not observed.
    pub fn observer(&self) -> Option<&Observer> {
        self.observer.as_deref()
    }

    /// The event with which the engine failed after a token of an observed stream, or aborted a
    /// message ([`Scanner::withhold_abort`]); empty if there is none. The client did not get it. An
    /// error that is the request's fault (status 4xx) passes.
    pub fn withheld(&self) -> &[u8] {
        &self.withheld
    }

    /// Status of the answer; 0 before its head.
    pub fn status(&self) -> u16 {
        self.head.as_ref().map_or(0, |head| head.status)
    }

    /// Whether the connection may serve another request after this message.
    pub fn keep_alive(&self) -> bool {
        self.body.done() && !self.extra && self.head.as_ref().is_some_and(|head| head.keep_alive)
    }

    /// Whether the answer is an event stream.
    pub fn event_stream(&self) -> bool {
        self.head.as_ref().is_some_and(|head| head.event_stream)
    }

    /// Whether the client's connection must close to end this answer.
    pub fn closes_client(&self) -> bool {
        self.out == Out::Close
    }

    /// The engine's `endpoint-load-metrics` header.
    pub fn load(&self) -> Option<&str> {
        self.head.as_ref().and_then(|head| head.load.as_deref())
    }

    /// Status line and end-to-end fields of the engine's head, each with its line end; empty before
    /// the head.
    pub fn head_lines(&self) -> &[u8] {
        self.head.as_ref().map_or(b"", |head| &head.lines)
    }

    /// The content-encoding of the body, except `identity`: its values cannot be read.
    pub fn coding(&self) -> Option<&str> {
        self.head.as_ref().and_then(|head| head.coding.as_deref())
    }

    /// How the generation ended, by the answer so far.
    pub fn finish(&self) -> Finish {
        self.said.finish
    }

    /// Numeric code of the error in the body, if it has one.
    pub fn error_code(&self) -> Option<u64> {
        self.said.error_code
    }

    /// The last usage, without impossible counts.
    pub fn usage(&self) -> Usage {
        self.said.usage.plausible().0
    }

    /// Whether the last usage has an impossible count.
    pub fn implausible_usage(&self) -> bool {
        !self.said.usage.plausible().1
    }

    /// Output tokens counted from a stream's events.
    pub fn tokens(&self) -> u64 {
        self.said.tokens
    }

    /// Events of a stream with a part of the answer, its end or an error. Comments and empty events
    /// do not count.
    pub fn progress(&self) -> u64 {
        self.said.progress
    }

    /// Takes the texts of the comments that were dropped since the last call, each as a line. Only
    /// the last [`COMMENT_LIMIT`] bytes of them are kept. Returns nothing inside a comment.
    pub fn take_comments(&mut self) -> Vec<u8> {
        let mut texts = Vec::new();
        if !self.events.inside_filler() {
            let dropped = std::mem::take(&mut self.comments);
            let comments = dropped.strip_prefix(MARK).unwrap_or(&dropped);
            for line in comments.split(|byte| matches!(byte, b'\n' | b'\r')) {
                if !line.is_empty() {
                    let text = line.strip_prefix(b":").unwrap_or(line); // its start may be lost
                    texts.extend_from_slice(text.strip_prefix(b" ").unwrap_or(text));
                    texts.push(b'\n');
                }
            }
        }
        texts
    }

    /// Reads a piece of input.
    ///
    /// # Errors
    /// [`WireError::Malformed`] if the bytes are no HTTP/1.1 response; the connection is then
    /// unusable.
    pub fn feed(&mut self, input: &[u8]) -> Result<Step, WireError> {
        let clean = self.committed
            && !self.alone
            && self.body.at_boundary()
            && self.pending.is_empty()
            && self.released.is_empty();
        let mut step = Step::default();
        self.rewritten = false;
        // Engines mostly send a chunk of whole events at a time: it is read in place, and passes.
        if clean
            && self.out == Out::Chunked
            && self.event_stream()
            && !self.halted
            && let Some(payload) = self.body.whole_chunk(input)
        {
            self.said.quiet += input.len();
            if let Some(rewritten) = self.read_quickly(payload, &mut step) {
                (step.pass, step.out) = (!rewritten, rewritten);
                return Ok(step);
            }
            let ends = self.read_events(payload, &mut step);
            if ends != (Ends { last: Some(payload.len()), halt: None, failed: false }) {
                self.keep_events(payload, &ends, &mut step);
            } else if self.rename.is_some() {
                self.release(payload);
            } else if let Some(observer) = &mut self.observer
                && observer.read(payload)
            {
                observer.write(payload, &mut self.released);
            } else {
                step.pass = true;
            }
            step.out = !self.released.is_empty();
            step.unseen = self.newly_unseen();
            return self.within_limits(step);
        }
        let mut rest = input;
        // The head's bytes move aside so that payload can be read while the scanner changes.
        let mut held = std::mem::take(&mut self.raw_head);
        if self.head.is_none() {
            if !held.is_empty() {
                held.extend_from_slice(input);
                rest = &held;
            }
            let Some(after) = self.read_head(rest)? else {
                if rest.len() > HEAD_LIMIT {
                    return Err(WireError::malformed(format!("head longer than {HEAD_LIMIT} bytes")));
                }
                self.raw_head = rest.to_vec();
                return Ok(step);
            };
            rest = after;
        }
        if self.event_stream() {
            self.said.quiet += rest.len();
        }
        let used = self.payload(rest, &mut step)?;
        self.extra |= used < rest.len();
        if self.body.done() {
            self.end(&mut step);
        }
        step.ready = self.judge_ready();
        step.unseen = self.newly_unseen();
        if self.committed {
            let aligned = clean
                && !self.extra
                && !self.halted
                && !self.rewritten
                && !self.body.trailers
                && self.pending.is_empty()
                && self.body.at_boundary()
                && self.same_framing();
            if aligned {
                step.pass = !input.is_empty();
                self.released.clear();
                self.closed = self.body.done();
            } else {
                step.out =
                    !self.released.is_empty() || (step.end && !self.closed && self.out == Out::Chunked);
            }
        }
        self.within_limits(step)
    }

    /// Refuses a stream that has sent too much without a part of the answer: comments, empty lines
    /// and events, or chunks of single bytes cost time of all requests. Without a client, it also
    /// refuses an event that is too long: its reader needs whole events.
    fn within_limits(&mut self, step: Step) -> Result<Step, WireError> {
        self.said.quiet = self.said.quiet.saturating_sub(self.events.take_long());
        if self.said.quiet > QUIET_LIMIT {
            return Err(WireError::malformed(format!("{QUIET_LIMIT} bytes of a stream without a token")));
        }
        if self.alone && self.events.longest() > OBSERVED_LIMIT {
            return Err(WireError::malformed(format!("an event of more than {OBSERVED_LIMIT} bytes")));
        }
        Ok(step)
    }

    /// Frees buffers that a long answer has made large.
    pub fn shrink(&mut self) {
        for buffer in [&mut self.pending, &mut self.released, &mut self.written] {
            buffer.shrink_to(BUFFER_LIMIT);
        }
    }

    /// Ends the response at the end of the connection. Returns the step that a last piece of input
    /// would return.
    ///
    /// # Errors
    /// [`WireError::CutOff`] if the message is incomplete.
    pub fn eof(&mut self) -> Result<Step, WireError> {
        if self.head.is_none() {
            let inside = !self.raw_head.is_empty();
            let place = if inside {
                "connection closed inside the head"
            } else {
                "connection closed before an answer"
            };
            return Err(WireError::CutOff(place));
        }
        self.body.eof()?;
        let mut step = Step::default();
        self.end(&mut step);
        step.ready = self.judge_ready();
        step.unseen = self.newly_unseen();
        step.out = self.committed && (!self.released.is_empty() || (step.end && self.out == Out::Chunked));
        Ok(step)
    }

    /// Commits to this answer. Returns the head for the client, with `extra` header lines, and the
    /// withheld bytes. `close`: the client's connection closes after the answer.
    pub fn commit(&mut self, extra: &[u8], close: bool) -> &[u8] {
        self.committed = true;
        self.written.clear();
        if self.rename.is_some() && matches!(self.out, Out::Length(_)) {
            self.out = match (self.body.done(), self.http11) {
                (true, _) => Out::Length(self.released.len() as u64),
                (false, true) => Out::Chunked,
                (false, false) => Out::Close,
            };
        }
        if let Some(head) = &self.head {
            self.written.extend_from_slice(&head.lines);
            self.written.extend_from_slice(extra);
            match self.out {
                Out::Chunked => self.written.extend_from_slice(b"transfer-encoding: chunked\r\n"),
                Out::Length(_) if head.status == 204 || head.status == 304 => {}
                Out::Length(n) => {
                    self.written.extend_from_slice(format!("content-length: {n}\r\n").as_bytes())
                }
                Out::Close => {}
            }
            if close || self.out == Out::Close {
                self.written.extend_from_slice(b"connection: close\r\n");
            }
            self.written.extend_from_slice(b"\r\n");
        }
        self.frame();
        &self.written
    }

    /// Commits to this answer as the rest of a stream: the client has a head already, of a body in
    /// chunks, or for HTTP/1.0 until the connection closes. Returns the withheld bytes.
    pub fn continue_stream(&mut self) -> &[u8] {
        self.committed = true;
        self.out = if self.http11 { Out::Chunked } else { Out::Close };
        self.take()
    }

    /// Returns the bytes for the client, framed.
    pub fn take(&mut self) -> &[u8] {
        self.written.clear();
        self.frame();
        &self.written
    }

    /// Commits to this answer for the router's own use, without a client. From now on no step
    /// reports bytes that may pass, and [`Scanner::take_payload`] returns the whole payload.
    ///
    /// Before the head, this only declares that the answer has no client, and it stays withheld
    /// until the next call. No event of such an answer is cut: events are withheld until their end,
    /// and one with more than [`OBSERVED_LIMIT`] bytes of data is an error.
    pub fn commit_alone(&mut self) {
        self.alone = true;
        self.committed |= self.head.is_some();
    }

    /// Returns the payload so far, without framing.
    pub fn take_payload(&mut self) -> &[u8] {
        self.written.clear();
        self.written.append(&mut self.released);
        self.closed |= self.body.done() && !self.halted;
        &self.written
    }

    /// The withheld bytes of the body, without framing. They stay withheld.
    pub fn held(&self) -> &[u8] {
        &self.released
    }

    /// Ends a committed stream early with `events`, whole SSE events. Returns nothing if the
    /// framing does not allow it (a declared length); then only closing the client's connection
    /// ends the stream.
    pub fn end_with(&mut self, events: &[u8]) -> &[u8] {
        self.written.clear();
        if self.event_stream() && !matches!(self.out, Out::Length(_)) && !self.closed {
            self.pending.clear();
            self.released.extend_from_slice(events);
            self.halted = false;
            self.body = Body::new(Framing::Length(0));
            self.frame();
        }
        &self.written
    }

    fn read_head<'a>(&mut self, mut input: &'a [u8]) -> Result<Option<&'a [u8]>, WireError> {
        loop {
            let Some((head, length)) = head::parse(input, self.bodiless)? else { return Ok(None) };
            input = &input[length..];
            if head.status < 200 {
                continue;
            }
            self.body = Body::new(head.framing);
            self.out = match head.framing {
                Framing::Length(n) => Out::Length(n),
                _ if self.http11 => Out::Chunked,
                _ => Out::Close,
            };
            self.said.ready = head.event_stream && head.status != 200;
            self.rename =
                self.rename.take().filter(|_| head.coding.is_none() && (head.event_stream || head.json));
            let observable = head.event_stream || head.coding.is_some();
            self.observer = self.observer.take().filter(|_| observable && head.status == 200);
            if let Some(observer) = &mut self.observer {
                if head.coding.is_some() {
                    observer.coded();
                } else if let Out::Length(_) = self.out {
                    observer.declared();
                }
            }
            self.head = Some(head);
            return Ok(Some(input));
        }
    }

    fn payload(&mut self, input: &[u8], step: &mut Step) -> Result<usize, WireError> {
        let Some(head) = &self.head else { return Ok(0) };
        let (event_stream, json) = (head.event_stream, head.json);
        let mut body = std::mem::replace(&mut self.body, Body::new(Framing::Close));
        let used = body.feed(input, |piece| {
            if event_stream {
                if self.halted {
                    return;
                }
                if let Some(rewritten) = self.read_quickly(piece, step) {
                    if !rewritten {
                        self.released.extend_from_slice(piece);
                    }
                } else {
                    let ends = self.read_events(piece, step);
                    self.keep_events(piece, &ends, step);
                }
            } else {
                if json {
                    self.probe.feed(piece);
                }
                self.keep_json(piece);
            }
        });
        self.body = body;
        used
    }

    /// Reads whole events that the observer knows by their form. Returns `None` unless all are such
    /// events, else whether the client's bytes differ: then they are released.
    fn read_quickly(&mut self, piece: &[u8], step: &mut Step) -> Option<bool> {
        let observer = self.observer.as_mut()?;
        if !self.committed || !self.pending.is_empty() || !self.events.at_start() {
            return None;
        }
        let quick = observer.read_quickly(piece)?;
        let rewritten = observer.rewrites() || self.rename.is_some();
        if rewritten {
            write_events(self.observer.as_deref(), self.rename.as_deref(), piece, &mut self.released);
            self.rewritten = true;
        }
        self.said.tokens += quick.tokens;
        self.said.progress += quick.progress;
        if quick.progress > 0 {
            self.said.quiet = 0;
        }
        step.tokens = step.tokens.saturating_add(u32::try_from(quick.tokens).unwrap_or(u32::MAX));
        Some(rewritten)
    }

    /// Reads payload of an event stream.
    fn read_events(&mut self, piece: &[u8], step: &mut Step) -> Ends {
        let (said, require_finish, committed) = (&mut self.said, self.require_finish, self.committed);
        let fillers = &mut self.fillers;
        let (withholds, alone) = (!matches!(self.out, Out::Length(_)), self.alone);
        let (observed, withholds_abort) = (self.observer.is_some(), self.withholds_abort);
        let (mut halt, mut failed) = (None, false);
        let last = self.events.feed(piece, |event, start| match event {
            _ if halt.is_some() => {}
            Event::Done if require_finish && said.finish == Finish::Open && !said.error => halt = Some(start),
            Event::Done => said.ready = true,
            Event::Data(found)
                if withholds
                    && !said.error
                    && (observed && said.tokens > 0 && engine_failed(&found)
                        || withholds_abort && found.aborted_message()) =>
            {
                said.note(&found, step);
                (halt, failed) = (Some(start), true);
            }
            Event::Data(found) => said.event(&found, step),
            Event::Filler { .. } if said.ready || committed => {}
            // A stream with a client of its own is not the rest of another one.
            Event::Mark { .. } if committed && !alone => {}
            Event::Filler { end } | Event::Mark { end } => match fillers.last_mut() {
                Some(before) if before.end == start => before.end = end,
                _ => fillers.push(start..end),
            },
        });
        Ends { last, halt, failed }
    }

    /// Drops the comments found in a piece. Returns the rest of the piece, and the ends of its
    /// events.
    fn without_fillers(&mut self, piece: &[u8], ends: &Ends) -> (Vec<u8>, Ends) {
        let fillers = std::mem::take(&mut self.fillers);
        let moved = |at: usize| {
            let dropped = fillers.iter().map(|filler| filler.end.min(at).saturating_sub(filler.start));
            at - dropped.sum::<usize>()
        };
        let mut kept = Vec::with_capacity(moved(piece.len()));
        let mut at = 0;
        for filler in &fillers {
            kept.extend_from_slice(&piece[at..filler.start]);
            at = filler.end;
            let dropped = &piece[filler.clone()];
            self.comments.extend_from_slice(&dropped[dropped.len().saturating_sub(COMMENT_LIMIT)..]);
            let excess = self.comments.len().saturating_sub(COMMENT_LIMIT);
            self.comments.drain(..excess);
        }
        kept.extend_from_slice(&piece[at..]);
        if let Out::Length(n) = &mut self.out {
            *n -= (piece.len() - kept.len()) as u64;
        }
        (kept, Ends { last: ends.last.map(moved), halt: ends.halt.map(moved), ..*ends })
    }

    /// Keeps payload of an event stream; whole events may go to the client.
    fn keep_events(&mut self, piece: &[u8], ends: &Ends, step: &mut Step) {
        let kept;
        let (piece, ends) = if self.fillers.is_empty() {
            (piece, ends)
        } else {
            kept = self.without_fillers(piece, ends);
            (kept.0.as_slice(), &kept.1)
        };
        if let Some(start) = ends.halt {
            // All bytes before the event still go out; a part of them may be in `pending`.
            if start > 0 {
                self.release(&piece[..start]);
            }
            if ends.failed {
                self.withheld.append(&mut self.pending);
                self.withheld.extend_from_slice(&piece[start..]);
            }
            self.pending.clear();
            self.halt(step);
            return;
        }
        match ends.last {
            Some(end) => {
                self.release(&piece[..end]);
                self.pending.extend_from_slice(&piece[end..]);
            }
            None => self.pending.extend_from_slice(piece),
        }
        if self.pending.len() > self.hold_limit() && !self.alone {
            if let Some(observer) = &mut self.observer {
                observer.part(&self.pending);
            }
            self.release_unread();
        }
    }

    /// Keeps payload of an answer that is no event stream. If the model's name changes, the
    /// beginning waits: until the end, at most for [`HOLD_LIMIT`] bytes.
    fn keep_json(&mut self, piece: &[u8]) {
        let Some(rename) = &mut self.rename else { return self.released.extend_from_slice(piece) };
        rename.begun |= self.pending.len() + piece.len() > HOLD_LIMIT;
        if rename.begun {
            self.rewritten |= rename.write_piece(&mut self.pending, piece, &mut self.released);
        } else {
            self.pending.extend_from_slice(piece);
        }
    }

    /// Releases the pending bytes, which the observer does not read.
    fn release_unread(&mut self) {
        self.rewritten |= self.rename.is_some();
        write_events(None, self.rename.as_deref(), &self.pending, &mut self.released);
        self.pending.clear();
    }

    /// Releases the pending bytes and `more`, which ends an event.
    fn release(&mut self, more: &[u8]) {
        if self.observer.is_none() && self.rename.is_none() {
            self.released.append(&mut self.pending);
            self.released.extend_from_slice(more);
            return;
        }
        let events = if self.pending.is_empty() {
            more
        } else {
            self.pending.extend_from_slice(more);
            &self.pending
        };
        self.rewritten |= self.rename.is_some();
        if let Some(observer) = &mut self.observer {
            self.rewritten |= observer.read(events);
        }
        write_events(self.observer.as_deref(), self.rename.as_deref(), events, &mut self.released);
        self.pending.clear();
    }

    /// Longest event that is withheld until its end, in bytes.
    fn hold_limit(&self) -> usize {
        if self.alone || self.observer.is_some() { OBSERVED_LIMIT } else { HOLD_LIMIT }
    }

    fn newly_unseen(&mut self) -> bool {
        self.observer.as_mut().is_some_and(|observer| observer.newly_lost())
    }

    /// Ends the body.
    fn end(&mut self, step: &mut Step) {
        if self.event_stream() {
            if self.halted {
                return;
            }
            if self.require_finish
                && self.said.finish == Finish::Open
                && !self.said.error
                && self.status() == 200
            {
                self.pending.clear();
                self.halt(step);
                return;
            }
            self.release_unread();
        } else {
            self.release_unread();
            let found = self.probe.take();
            self.said.note(&found, step);
        }
        self.said.ready = true;
        step.end = true;
    }

    /// Ends a stream that ended too early.
    fn halt(&mut self, step: &mut Step) {
        self.halted = true;
        self.said.ready = true;
        step.incomplete = true;
    }

    fn judge_ready(&mut self) -> bool {
        if let Some(head) = &self.head
            && !self.said.ready
        {
            self.said.ready = if head.event_stream {
                // A comment that began earlier is dropped to its end.
                self.released.len() + self.pending.len() > self.hold_limit() && !self.events.inside_filler()
            } else {
                // An error answer is withheld, too: it may be the last word of the last engine.
                self.released.len() > HOLD_LIMIT || !(head.json || head.status >= 400)
            };
        }
        self.said.ready && !self.committed
    }

    fn same_framing(&self) -> bool {
        let framing = self.head.as_ref().map(|head| head.framing);
        matches!(
            (framing, self.out),
            (Some(Framing::Chunked), Out::Chunked)
                | (Some(Framing::Close), Out::Close)
                | (Some(Framing::Length(_)), Out::Length(_))
        )
    }

    fn frame(&mut self) {
        let chunked = self.out == Out::Chunked;
        if !self.released.is_empty() {
            if chunked {
                self.written.extend_from_slice(format!("{:x}\r\n", self.released.len()).as_bytes());
            }
            self.written.append(&mut self.released);
            if chunked {
                self.written.extend_from_slice(b"\r\n");
            }
        }
        if self.body.done() && !self.halted && !self.closed {
            self.closed = true;
            if chunked {
                self.written.extend_from_slice(b"0\r\n\r\n");
            }
        }
    }
}

/// Whether an event ends an answer because of the engine, not because of the request.
fn engine_failed(found: &Found) -> bool {
    let requests_fault = found.error_code.is_some_and(|code| (400..500).contains(&code));
    found.finish == Finish::Aborted || (found.error && !requests_fault)
}
