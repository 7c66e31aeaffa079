//! Second readers for the fuzz targets: short and slow, written from the standards and not from the
//! router's readers.
use lmetric_wire::{Finish, Scanner, Usage};

pub mod json;

/// The results of a response for the router and its client.
#[derive(Debug, Default, PartialEq)]
pub struct Outcome {
    pub status: u16,
    /// The body that the client reads; empty without a commit.
    pub payload: Vec<u8>,
    pub committed: bool,
    pub tokens: u64,
    pub usage: Usage,
    pub finish: Finish,
    pub error: Option<Option<u64>>,
    pub ended: bool,
    pub incomplete: bool,
}

/// Sends a response to a scanner in pieces of `size` bytes, commits as soon as possible, and
/// returns the outcome. `None` if the response is malformed or cut off.
pub fn play(response: &[u8], size: usize, http11: bool, require_finish: bool) -> Option<Outcome> {
    let mut scanner = Scanner::default();
    scanner.begin(http11, require_finish, false);
    play_begun(scanner, response, size)
}

/// [`play`] with a scanner that began the response.
pub fn play_begun(mut scanner: Scanner, response: &[u8], size: usize) -> Option<Outcome> {
    let (mut outcome, mut sent) = (Outcome::default(), Vec::new());
    for piece in response.chunks(size.max(1)).map(Some).chain([None]) {
        let step = match piece {
            Some(piece) => scanner.feed(piece),
            None => scanner.eof(),
        }
        .ok()?;
        if step.error {
            outcome.error = Some(scanner.error_code());
        }
        if step.ready {
            assert!(!step.pass && !step.out && !outcome.committed);
            outcome.committed = true;
            sent.extend_from_slice(scanner.commit(b"x-extra: 1\r\n", false));
        } else if step.pass {
            sent.extend_from_slice(piece.unwrap_or_default());
        } else if step.out {
            sent.extend_from_slice(scanner.take());
        }
        (outcome.ended, outcome.incomplete) = (step.end, step.incomplete);
        if step.end || step.incomplete {
            break;
        }
    }
    outcome.status = scanner.status();
    outcome.tokens = scanner.tokens();
    outcome.usage = scanner.usage();
    outcome.finish = scanner.finish();
    if outcome.committed {
        outcome.payload = body_of(&sent, outcome.ended);
    }
    Some(outcome)
}

/// Returns the body that a strict client reads.
fn body_of(sent: &[u8], ended: bool) -> Vec<u8> {
    let start = sent.windows(4).position(|w| w == b"\r\n\r\n").expect("a head") + 4;
    let head = sent[..start].to_ascii_lowercase();
    assert_eq!(head.windows(14).filter(|w| w == b"\r\nx-extra: 1\r\n").count(), 1);
    let mut rest = &sent[start..];
    if !head.windows(28).any(|w| w == b"\r\ntransfer-encoding: chunked") {
        return rest.to_vec();
    }
    let mut body = Vec::new();
    while let Some(line) = rest.windows(2).position(|w| w == b"\r\n") {
        let size =
            usize::from_str_radix(std::str::from_utf8(&rest[..line]).expect("a size"), 16).expect("a size");
        let (chunk, after) = rest[line + 2..].split_at(size);
        body.extend_from_slice(chunk);
        rest = after.strip_prefix(b"\r\n").expect("the end of a chunk");
        if size == 0 {
            assert!(rest.is_empty() && ended);
            return body;
        }
    }
    assert!(rest.is_empty() && !ended, "the body was cut inside a chunk");
    body
}

/// Returns the lines of an event stream, each with its end (WHATWG HTML, 9.2.6).
pub fn lines(stream: &str) -> Vec<(&str, &str)> {
    let (mut found, mut rest) = (Vec::new(), stream);
    while let Some(at) = rest.find(['\n', '\r']) {
        let end = at + if rest[at..].starts_with("\r\n") { 2 } else { 1 };
        found.push((&rest[..at], &rest[at..end]));
        rest = &rest[end..];
    }
    if !rest.is_empty() {
        found.push((rest, ""));
    }
    found
}

/// Returns the data of the events of a stream, as the standard dispatches them.
pub fn events(stream: &str) -> Vec<String> {
    let (mut found, mut data): (Vec<String>, Option<String>) = (Vec::new(), None);
    for (line, end) in lines(stream) {
        if line.is_empty() {
            found.extend(data.take());
        } else if let (Some(value), false) = (line.strip_prefix("data:"), end.is_empty()) {
            let value = value.strip_prefix(' ').unwrap_or(value);
            data = Some(data.map_or(value.to_string(), |before| format!("{before}\n{value}")));
        }
    }
    found
}

/// Returns a stream without comments, and without the blank lines that follow nothing else.
pub fn without_comments(stream: &str) -> String {
    let (mut kept, mut bare) = (String::new(), true);
    for (line, end) in lines(stream) {
        let comment = line.starts_with(':');
        if !comment && !(line.is_empty() && bare) {
            kept += line;
            kept += end;
        }
        bare = line.is_empty() || (bare && comment);
    }
    kept
}
