//! Message body framing (RFC 9112, section 6): length, chunked, until close.
use crate::WireError;

/// The end of a response's body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Framing {
    /// `content-length`, or 0 if the status allows no body.
    Length(u64),
    /// `transfer-encoding: chunked`.
    Chunked,
    /// The end of the connection.
    Close,
}

/// Bytes of chunk extensions or trailers that are skipped before the response counts as malformed.
const OVERHEAD_LIMIT: u32 = 16 * 1024;
/// Longest chunk extension of a client. Few clients send any; each byte costs time of the event loop.
const CLIENT_EXTENSION_LIMIT: u32 = 256;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Left(u64),
    UntilClose,
    Size { value: u64, digits: u8 },
    Extension { value: u64 },
    SizeLf { value: u64 },
    Chunk(u64),
    ChunkCr,
    ChunkLf,
    TrailerStart,
    Trailer,
    TrailerLf,
    LastLf,
    Done,
}

/// The framing state of one body.
#[derive(Debug)]
pub(crate) struct Body {
    state: State,
    overhead: u32,
    /// Bytes of `overhead` that a chunk extension begins with, if each has a limit of its own.
    extension: Option<u32>,
    /// Trailers were seen (and dropped).
    pub(crate) trailers: bool,
}

const START: State = State::Size { value: 0, digits: 0 };

impl Body {
    pub(crate) fn new(framing: Framing) -> Self {
        let state = match framing {
            Framing::Length(0) => State::Done,
            Framing::Length(n) => State::Left(n),
            Framing::Chunked => START,
            Framing::Close => State::UntilClose,
        };
        Self { state, overhead: 0, extension: None, trailers: false }
    }

    pub(crate) fn done(&self) -> bool {
        self.state == State::Done
    }

    /// Whether the next byte starts a chunk, or the body has no framing: the stream may be cut or
    /// extended here.
    pub(crate) fn at_boundary(&self) -> bool {
        matches!(self.state, State::Done | State::UntilClose | State::Left(_)) || self.state == START
    }

    /// Returns the payload of `input` if `input` is exactly one chunk, but not the last one.
    pub(crate) fn whole_chunk<'a>(&self, input: &'a [u8]) -> Option<&'a [u8]> {
        if self.state != START {
            return None;
        }
        let (mut size, mut at) = (0, 0);
        while *input.get(at)? != b'\r' && at < 8 {
            size = size * 16 + (input[at] as char).to_digit(16)? as usize;
            at += 1;
        }
        let payload = input.strip_suffix(b"\r\n")?.get(at..)?.strip_prefix(b"\r\n")?;
        (size > 0 && payload.len() == size).then_some(payload)
    }

    /// Ends the body at the end of the connection. Errors if the body may not end there.
    pub(crate) fn eof(&mut self) -> Result<(), WireError> {
        match self.state {
            State::Done | State::UntilClose => {
                self.state = State::Done;
                Ok(())
            }
            _ => Err(WireError::CutOff("connection closed inside the body")),
        }
    }

    /// Reads `input` and passes each piece of payload to `sink`. Returns the bytes read: fewer than
    /// given at the end of the body.
    pub(crate) fn feed(&mut self, input: &[u8], mut sink: impl FnMut(&[u8])) -> Result<usize, WireError> {
        let mut at = 0;
        while at < input.len() {
            let byte = input[at];
            match self.state {
                State::Done => break,
                State::UntilClose => {
                    sink(&input[at..]);
                    at = input.len();
                    continue;
                }
                State::Left(left) | State::Chunk(left) => {
                    let n = left.min((input.len() - at) as u64) as usize;
                    sink(&input[at..at + n]);
                    at += n;
                    let rest = left - n as u64;
                    self.state = match (self.state, rest) {
                        (State::Left(_), 0) => State::Done,
                        (State::Left(_), _) => State::Left(rest),
                        (_, 0) => State::ChunkCr,
                        _ => State::Chunk(rest),
                    };
                    continue;
                }
                State::Size { value, digits } => {
                    self.state = match (byte, digits) {
                        (b'0'..=b'9' | b'a'..=b'f' | b'A'..=b'F', 0..=14) => {
                            let digit = (byte as char).to_digit(16).map_or(0, u64::from);
                            State::Size { value: value * 16 + digit, digits: digits + 1 }
                        }
                        (b'\r', 1..) => State::SizeLf { value },
                        (b';' | b' ' | b'\t', 1..) => {
                            self.overhead = self.extension.unwrap_or(self.overhead);
                            State::Extension { value }
                        }
                        _ => return Err(WireError::malformed(format!("byte {byte:#04x} in a chunk size"))),
                    };
                }
                State::Extension { value } => match byte {
                    b'\r' => self.state = State::SizeLf { value },
                    _ => self.over()?,
                },
                State::SizeLf { value } => {
                    expect(byte, b'\n', "after a chunk size")?;
                    self.overhead = if self.extension.is_some() { 0 } else { self.overhead };
                    self.state = if value == 0 { State::TrailerStart } else { State::Chunk(value) };
                }
                State::ChunkCr => {
                    expect(byte, b'\r', "after a chunk")?;
                    self.state = State::ChunkLf;
                }
                State::ChunkLf => {
                    expect(byte, b'\n', "after a chunk")?;
                    self.state = START;
                }
                State::TrailerStart if byte == b'\r' => self.state = State::LastLf,
                State::TrailerStart | State::Trailer => {
                    self.trailers = true;
                    self.over()?;
                    self.state = if byte == b'\r' { State::TrailerLf } else { State::Trailer };
                }
                State::TrailerLf => {
                    expect(byte, b'\n', "after a trailer")?;
                    self.state = State::TrailerStart;
                }
                State::LastLf => {
                    expect(byte, b'\n', "after the last chunk")?;
                    self.state = State::Done;
                }
            }
            at += 1;
        }
        Ok(at)
    }

    fn over(&mut self) -> Result<(), WireError> {
        self.overhead += 1;
        if self.overhead > OVERHEAD_LIMIT {
            if matches!(self.state, State::Extension { .. }) && self.extension.is_some() {
                return Err(WireError::malformed(format!(
                    "a chunk extension of more than {CLIENT_EXTENSION_LIMIT} bytes"
                )));
            }
            return Err(WireError::malformed(format!(
                "more than {OVERHEAD_LIMIT} bytes of chunk extensions and trailers"
            )));
        }
        Ok(())
    }
}

/// The chunked body of a client's request, without its framing.
#[derive(Debug)]
pub struct ChunkedBody(Body);

impl Default for ChunkedBody {
    fn default() -> Self {
        let extension = Some(OVERHEAD_LIMIT - CLIENT_EXTENSION_LIMIT);
        Self(Body { extension, ..Body::new(Framing::Chunked) })
    }
}

impl ChunkedBody {
    /// Appends the payload in `input` to `out`. Returns the bytes read: fewer than given at the end.
    ///
    /// # Errors
    /// [`WireError::Malformed`] if the framing is invalid, a chunk extension has more than 256 bytes,
    /// or the trailers have more than 16 KiB.
    pub fn read(&mut self, input: &[u8], out: &mut Vec<u8>) -> Result<usize, WireError> {
        self.0.feed(input, |bytes| out.extend_from_slice(bytes))
    }

    /// Whether the body has ended.
    pub fn done(&self) -> bool {
        self.0.done()
    }
}

fn expect(byte: u8, wanted: u8, place: &str) -> Result<(), WireError> {
    if byte == wanted {
        return Ok(());
    }
    Err(WireError::malformed(format!("byte {byte:#04x} {place}, expected {wanted:#04x}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(framing: Framing, pieces: &[&[u8]]) -> Result<(Vec<u8>, bool, usize), WireError> {
        let (mut body, mut out, mut used) = (Body::new(framing), Vec::new(), 0);
        for piece in pieces {
            used += body.feed(piece, |bytes| out.extend_from_slice(bytes))?;
        }
        Ok((out, body.done(), used))
    }

    #[test]
    fn each_framing_ends_where_it_should() {
        assert_eq!(read(Framing::Length(3), &[b"ab", b"cX"]), Ok((b"abc".to_vec(), true, 3)));
        assert_eq!(read(Framing::Close, &[b"ab", b"c"]), Ok((b"abc".to_vec(), false, 3)));
        let chunked: &[u8] = b"3;x=1\r\nabc\r\nA\r\n0123456789\r\n0\r\nt: 1\r\n\r\nNEXT";
        assert_eq!(
            read(Framing::Chunked, &[chunked]),
            Ok((b"abc0123456789".to_vec(), true, chunked.len() - 4))
        );
        let bytes: Vec<&[u8]> = chunked.chunks(1).collect();
        assert_eq!(read(Framing::Chunked, &bytes).map(|r| r.0), Ok(b"abc0123456789".to_vec()));
    }

    #[test]
    fn bad_chunks_are_refused() {
        for bad in ["x\r\n", "\r\n", "3\nabc", "3\r\nabcd\r\n", "ffffffffffffffff\r\n", "0\r\n\rX", "-1\r\n"]
        {
            assert!(
                matches!(read(Framing::Chunked, &[bad.as_bytes()]), Err(WireError::Malformed(_))),
                "{bad:?}"
            );
        }
        let endless = [b"1;".as_slice(), &vec![b'x'; 20_000]].concat();
        assert!(read(Framing::Chunked, &[&endless]).is_err());
    }

    /// Security F12: extensions of a client's chunks have a limit each, its trailers one together.
    #[test]
    fn a_client_has_short_chunk_extensions() {
        let read = |text: String| ChunkedBody::default().read(text.as_bytes(), &mut Vec::new());
        let chunks = |extension: usize| format!("1;{}\r\na\r\n", "x".repeat(extension)).repeat(500);
        assert!(read(chunks(256)).is_ok());
        let error = read(chunks(257)).unwrap_err().to_string();
        assert_eq!(error, "malformed: a chunk extension of more than 256 bytes");
        let trailers = |bytes| format!("0;{}\r\n{}", "x".repeat(256), "t".repeat(bytes));
        assert!(read(trailers(OVERHEAD_LIMIT as usize)).is_ok());
        assert!(read(trailers(OVERHEAD_LIMIT as usize + 1)).is_err());
    }

    #[test]
    fn only_a_body_without_a_length_may_end_with_the_connection() {
        assert!(Body::new(Framing::Close).eof().is_ok());
        assert!(Body::new(Framing::Length(0)).eof().is_ok());
        assert!(Body::new(Framing::Length(1)).eof().is_err());
        assert!(Body::new(Framing::Chunked).eof().is_err());
    }
}
