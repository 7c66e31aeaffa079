//! Server-sent events (WHATWG HTML, section 9.2): lines, comments, data, event ends.
use crate::json::{Found, Probe};
use std::borrow::Cow;
use std::ops::Range;

/// An element that ended in a piece of a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Event {
    /// Bytes without content, up to `end` in the input: a piece of a comment line, or of the blank
    /// line after comments alone. Engines send comments to keep the connection alive.
    Filler { end: usize },
    /// Bytes of the stream's byte order mark, up to `end` in the input.
    Mark { end: usize },
    /// An event with data, and the values found in its JSON.
    Data(Found),
    /// The event `[DONE]`.
    Done,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Line {
    /// Number of bytes of `data:` matched.
    Prefix(usize),
    AfterColon,
    Data,
    Comment,
    Skip,
}

/// Bytes of one event's data that count as a part of a quiet stream. Events without a token may be
/// long for a good reason: the first one of an observed stream repeats the prompt.
const LONG_DATA: usize = 64 * 1024;

/// Some servers write a byte order mark before the first event.
pub(crate) const MARK: &[u8; 3] = b"\xef\xbb\xbf";
const DATA: &[u8; 5] = b"data:";
const DONE: &[u8; 6] = b"[DONE]";

/// The state of one event stream.
#[derive(Debug)]
pub(crate) struct Events {
    line: Line,
    /// Number of bytes of the stream's byte order mark that may follow.
    mark: usize,
    /// A line feed after this carriage return belongs to it.
    after_cr: bool,
    /// The line before `after_cr` was filler.
    after_filler: bool,
    /// No byte of the next event was read.
    idle: bool,
    /// The event has no line yet, except comments.
    bare: bool,
    has_data: bool,
    /// Bytes of the event's data so far.
    length: usize,
    /// Bytes of the longest event's data so far.
    longest: usize,
    /// Bytes of long data, see [`Events::take_long`].
    long: usize,
    /// Number of bytes of the event's data that equal `[DONE]`; `None`: they differ.
    done: Option<usize>,
    probe: Probe,
}

impl Default for Events {
    fn default() -> Self {
        let probe = Probe::default();
        Self {
            line: Line::Prefix(0),
            mark: MARK.len(),
            after_cr: false,
            after_filler: false,
            idle: true,
            bare: true,
            has_data: false,
            length: 0,
            longest: 0,
            long: 0,
            done: Some(0),
            probe,
        }
    }
}

impl Events {
    /// Reads `input` and calls `on(event, start)` at the end of each event and for all filler.
    /// Returns the end of the last whole event (or blank line) in `input`, if there is one.
    /// `start`: start of the event or filler in `input`, 0 if before it.
    pub(crate) fn feed(&mut self, input: &[u8], mut on: impl FnMut(Event, usize)) -> Option<usize> {
        let (mut at, mut boundary) = (0, None);
        while at < input.len() {
            let byte = input[at];
            if self.mark > 0 {
                let marked = byte == MARK[MARK.len() - self.mark];
                self.mark = if marked { self.mark - 1 } else { 0 };
                at += usize::from(marked);
                if marked {
                    on(Event::Mark { end: at }, at - 1);
                }
                continue;
            }
            if self.after_cr {
                self.after_cr = false;
                if byte == b'\n' {
                    if self.after_filler {
                        on(Event::Filler { end: at + 1 }, at);
                    }
                    at += 1;
                    if self.idle {
                        boundary = Some(at);
                    }
                    continue;
                }
            }
            match self.line {
                Line::Prefix(n) if byte != b'\n' && byte != b'\r' => {
                    self.idle = false;
                    if (n, byte) == (0, b':') {
                        self.line = Line::Comment;
                        continue;
                    }
                    self.bare = false;
                    if n == 0 && input[at..].starts_with(DATA) {
                        self.line = Line::AfterColon;
                        at += DATA.len();
                        continue;
                    }
                    self.line = match (n, byte) {
                        (4, b':') => Line::AfterColon,
                        _ if byte == DATA[n] => Line::Prefix(n + 1),
                        _ => Line::Skip,
                    };
                    at += 1;
                    continue;
                }
                Line::AfterColon => {
                    self.line = Line::Data;
                    if std::mem::replace(&mut self.has_data, true) {
                        self.data(b"\n");
                    }
                    if byte == b' ' {
                        at += 1;
                        continue;
                    }
                }
                _ => {}
            }
            let rest = &input[at..];
            let end = memchr::memchr2(b'\n', b'\r', rest);
            let n = end.unwrap_or(rest.len());
            if self.line == Line::Data {
                self.data(&rest[..n]);
            }
            let filler = self.line == Line::Comment || (self.line == Line::Prefix(0) && self.bare);
            if filler {
                on(Event::Filler { end: at + n + usize::from(end.is_some()) }, at);
            }
            at += n;
            let Some(n) = end else { break };
            at += 1;
            self.after_cr = rest[n] == b'\r';
            self.after_filler = filler;
            if self.line == Line::Prefix(0) {
                // A blank line: the event ends here.
                let start = boundary.replace(at).unwrap_or(0);
                (self.idle, self.bare) = (true, true);
                if std::mem::take(&mut self.has_data) {
                    let found = self.probe.take();
                    let done = self.done == Some(DONE.len());
                    on(if done { Event::Done } else { Event::Data(found) }, start);
                }
                self.done = Some(0);
                self.length = 0;
            }
            self.line = Line::Prefix(0);
        }
        boundary
    }

    /// Whether the next byte starts an event.
    pub(crate) fn at_start(&self) -> bool {
        self.idle && !self.after_cr
    }

    /// Whether the next byte may belong to a comment that has begun.
    pub(crate) fn inside_filler(&self) -> bool {
        let inside_mark = self.mark > 0 && self.mark < MARK.len();
        inside_mark || self.line == Line::Comment || (self.after_cr && self.after_filler)
    }

    /// The length of the longest event's data so far, in bytes. The event may be incomplete.
    pub(crate) fn longest(&self) -> usize {
        self.longest
    }

    /// Takes the number of bytes since the last call that events have beyond [`LONG_DATA`] bytes of
    /// data each.
    pub(crate) fn take_long(&mut self) -> usize {
        std::mem::take(&mut self.long)
    }

    fn data(&mut self, bytes: &[u8]) {
        self.length += bytes.len();
        self.longest = self.longest.max(self.length);
        if self.length > LONG_DATA {
            self.long += bytes.len().min(self.length - LONG_DATA);
        }
        self.done = self.done.and_then(|n| DONE.get(n..)?.starts_with(bytes).then_some(n + bytes.len()));
        self.probe.feed(bytes);
    }
}

/// Returns the lines of `bytes` from `at` on, without their ends, and the start of the next line.
/// Bytes after the last line end are a line, too.
pub(crate) fn lines(bytes: &[u8], mut at: usize) -> impl Iterator<Item = (Range<usize>, usize)> {
    std::iter::from_fn(move || {
        let rest = bytes.get(at..).filter(|rest| !rest.is_empty())?;
        let start = at;
        let n = memchr::memchr2(b'\n', b'\r', rest).unwrap_or(rest.len());
        let ends = if rest[n..].starts_with(b"\r\n") { 2 } else { usize::from(n < rest.len()) };
        at += n + ends;
        Some((start..start + n, at))
    })
}

/// The value of a line that carries data.
pub(crate) fn data_of(line: &[u8]) -> Option<&[u8]> {
    let value = line.strip_prefix(DATA)?;
    Some(value.strip_prefix(b" ").unwrap_or(value))
}

/// Calls `on` with the data of each event of `payload` except `[DONE]`, and with each comment line,
/// which begins with a colon. An event that is incomplete at the end of `payload` counts as whole.
pub fn split(payload: &[u8], mut on: impl FnMut(&[u8])) {
    let mut event: Option<Cow<'_, [u8]>> = None;
    let mut whole = |event: &mut Option<Cow<'_, [u8]>>, comment: Option<&[u8]>| {
        if let Some(comment) = comment {
            on(comment);
        } else if let Some(data) = event.take().filter(|data| **data != DONE[..]) {
            on(&data);
        }
    };
    for (line, _) in lines(payload, 0) {
        let line = &payload[line];
        if line.is_empty() {
            whole(&mut event, None);
        } else if line.starts_with(b":") {
            whole(&mut event, Some(line));
        } else if let Some(value) = data_of(line) {
            event = Some(match event {
                None => Cow::Borrowed(value),
                Some(mut before) => {
                    let data = before.to_mut();
                    data.push(b'\n');
                    data.extend_from_slice(value);
                    before
                }
            });
        }
    }
    whole(&mut event, None);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(pieces: &[&[u8]]) -> Vec<String> {
        let (mut events, mut seen) = (Events::default(), Vec::new());
        for piece in pieces {
            events.feed(piece, |event, _| {
                seen.push(match event {
                    Event::Filler { .. } | Event::Mark { .. } => return,
                    Event::Done => "done".into(),
                    Event::Data(found) => format!("{}", found.tokens()),
                });
            });
        }
        seen
    }

    const TOKEN: &str = r#"{"choices":[{"text":"a"}]}"#;

    #[test]
    fn spaces_line_ends_comments_and_other_fields() {
        let text = format!(
            ": keep-alive\n\ndata:{TOKEN}\n\ndata: {TOKEN}\r\n\r\nid: 4\revent: x\rdata: {TOKEN}\r\rdatax: 1\n\n\ndata\n\ndata: [DONE]\n\n"
        );
        let expected = ["1", "1", "1", "done"];
        assert_eq!(read(&[text.as_bytes()]), expected);
        assert_eq!(read(&text.as_bytes().chunks(1).collect::<Vec<_>>()), expected);
    }

    #[test]
    fn a_byte_order_mark_hides_no_event() {
        for text in [format!("\u{feff}data: {TOKEN}\n\n"), format!("\u{feff}: a\n\ndata: {TOKEN}\n\n")] {
            assert_eq!(read(&[text.as_bytes()]), ["1"]);
            assert_eq!(read(&text.as_bytes().chunks(1).collect::<Vec<_>>()), ["1"]);
        }
        assert_eq!(read(&[format!("\u{feff}\u{feff}data: {TOKEN}\n\n").as_bytes()]), [""; 0]);
    }

    #[test]
    fn data_of_several_lines_is_one_event_and_a_cut_one_is_none() {
        assert_eq!(read(&[b"data: {\"choices\":[\ndata: {\"text\":\"a\"}]}\n\ndata: {\"ch"]), ["1"]);
        assert_eq!(read(&[b"data: [DO\ndata: NE]\n\n"]), ["0"]);
        assert_eq!(read(&[b"data: [DONE]x\n\n"]), ["0"]);
    }

    #[test]
    fn filler_is_comments_and_the_blank_lines_after_comments_alone() {
        let text = b"\n: a\r\n\r\n:\rdata: 1\n: b\n\n\r: c";
        for size in [1, 2, 3, text.len()] {
            let (mut events, mut kept) = (Events::default(), Vec::new());
            for piece in text.chunks(size) {
                let mut at = 0;
                events.feed(piece, |event, start| {
                    if let Event::Filler { end } = event {
                        kept.extend_from_slice(&piece[at..start]);
                        at = end;
                    }
                });
                kept.extend_from_slice(&piece[at..]);
            }
            assert_eq!(kept, b"data: 1\n\n", "in pieces of {size}");
        }
    }

    #[test]
    fn a_payload_is_split_into_events_and_comments() {
        let parts = |payload: &str| {
            let mut parts = Vec::new();
            split(payload.as_bytes(), |part| parts.push(String::from_utf8_lossy(part).into_owned()));
            parts
        };
        for end in ["\n", "\r", "\r\n"] {
            let payload =
                "\n: a\n\ndata: 1\nid: 4\n\ndata:2\n:b\ndata:  3\n\ndata:\n\ndata\n\ndata: [DONE]\n\ndata: 4";
            assert_eq!(parts(&payload.replace('\n', end)), [": a", "1", ":b", "2\n 3", "", "4"]);
        }
        assert_eq!(parts(""), [""; 0]);
        assert_eq!(parts("data: [DONE]\ndata: x\n\n"), ["[DONE]\nx"]);
    }

    /// The time was that of the lines so far for each line.
    #[test]
    fn an_event_of_many_lines_is_joined_once() {
        let (lines, start) = (1_000_000, std::time::Instant::now());
        let mut seen = Vec::new();
        split("data: x\n".repeat(lines).as_bytes(), |data| seen.push(data.to_vec()));
        assert!(start.elapsed().as_secs() < 2, "{:?}", start.elapsed());
        assert_eq!(seen, [vec!["x"; lines].join("\n").into_bytes()]);
    }

    #[test]
    fn boundaries_are_the_ends_of_whole_events() {
        let mut events = Events::default();
        assert_eq!(events.feed(b"data: 1\n\ndata: 2\n", |_, _| {}), Some(9));
        assert_eq!(events.feed(b"\n", |_, _| {}), Some(1));
        assert_eq!(events.feed(b"data: 3\r\n\r", |_, _| {}), Some(10));
        assert_eq!(events.feed(b"\n", |_, _| {}), Some(1));
        assert_eq!(events.feed(b"data", |_, _| {}), None);
    }
}
