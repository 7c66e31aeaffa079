//! ZMTP 3, the protocol of ZMQ's sockets (<https://rfc.zeromq.org/spec/23/>, with the heartbeats of
//! <https://rfc.zeromq.org/spec/37/>), without security: the bytes that a SUB or DEALER
//! socket sends, and a reader of those that it receives. This module does no I/O.
//!
//! The peer is not trusted: a message is bounded in its bytes *and* in its frames, with the
//! commands between them. (libzmq bounds each frame and the number of whole messages, so one
//! message without end fills its memory.)
use std::ops::{Deref, Range};

/// Maximum size of a message in bytes. A larger message ends the connection. The largest messages
/// report the cached blocks of a prompt; 4 MiB hold 500,000 tokens.
pub const MAX_MESSAGE_BYTES: usize = 4 << 20;
/// Maximum number of frames of a message; engines send three or four.
pub const MAX_FRAMES: usize = 16;
/// Maximum size of the command that ends the handshake.
const MAX_READY_BYTES: usize = 8 << 10;
/// Capacity that the buffer of a silent peer keeps. Most of 10,000 engines are silent at a time.
const KEPT_BYTES: usize = 8 << 10;
/// Maximum bytes of answers to the peer's heartbeats that wait to be sent. Answers beyond are left
/// out, for a peer that does not read them.
const REPLY_BYTES: usize = 256;
const GREETING_BYTES: usize = 64;
/// Bytes of a frame's header that count as part of the message.
const HEADER_BYTES: usize = 9;

const MORE: u8 = 1;
const LONG: u8 = 2;
const COMMAND: u8 = 4;

/// A socket that talks to a publisher.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Talk {
    /// A SUB socket, which subscribes to all topics.
    Subscribe,
    /// A DEALER socket, which asks for the batches from this number on.
    Ask(u64),
}

impl Talk {
    /// Returns what the socket says first: the greeting and READY.
    pub fn opening(self) -> Vec<u8> {
        let mut out = vec![0; GREETING_BYTES];
        (out[0], out[9], out[10], out[11]) = (0xff, 0x7f, 3, 1);
        out[12..16].copy_from_slice(b"NULL");
        let mut ready = b"\x05READY".to_vec();
        let properties: &[(&[u8], &[u8])] = match self {
            Talk::Subscribe => &[(b"Socket-Type", b"SUB")],
            Talk::Ask(_) => &[(b"Socket-Type", b"DEALER"), (b"Identity", b"")],
        };
        for (name, value) in properties {
            ready.push(name.len() as u8);
            ready.extend_from_slice(name);
            ready.extend_from_slice(&(value.len() as u32).to_be_bytes());
            ready.extend_from_slice(value);
        }
        frame(&mut out, COMMAND, &ready);
        out
    }

    /// Writes the socket's one message, after the handshake: libzmq refuses it before.
    pub fn message(self, out: &mut Vec<u8>) {
        match self {
            Talk::Subscribe => frame(out, 0, &[1]),
            Talk::Ask(from) => {
                frame(out, MORE, &[]);
                frame(out, 0, &from.to_be_bytes());
            }
        }
    }

    fn peers(self) -> &'static [&'static [u8]] {
        match self {
            Talk::Subscribe => &[b"PUB", b"XPUB"],
            Talk::Ask(_) => &[b"ROUTER", b"REP", b"DEALER"],
        }
    }
}

/// Writes a heartbeat.
pub fn ping(out: &mut Vec<u8>) {
    frame(out, COMMAND, b"\x04PING\0\0");
}

/// Writes a frame of at most 255 bytes.
fn frame(out: &mut Vec<u8>, flags: u8, body: &[u8]) {
    out.extend_from_slice(&[flags, body.len() as u8]);
    out.extend_from_slice(body);
}

/// A message: its frames.
#[derive(Clone, Copy, Debug, Default)]
pub struct Message<'a> {
    frames: [&'a [u8]; MAX_FRAMES],
    count: usize,
}

impl<'a> Deref for Message<'a> {
    type Target = [&'a [u8]];

    fn deref(&self) -> &[&'a [u8]] {
        &self.frames[..self.count]
    }
}

/// Finding of a reader.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Item {
    /// The handshake is over.
    Ready,
    /// A message, [`Reader::message`].
    Message,
    /// Nothing yet: it needs more bytes.
    Nothing,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Greeting,
    Handshake,
    Traffic,
}

/// Reader of what a publisher sends.
#[derive(Debug)]
pub struct Reader {
    talk: Talk,
    phase: Phase,
    /// The peer's version is 3.1 or later.
    answers_heartbeats: bool,
    bytes: Vec<u8>,
    /// End of the bytes that are handled.
    start: usize,
    /// Position of the next frame's header.
    at: usize,
    /// Frames of the message so far, and the bytes that the message takes, commands included.
    frames: [Range<usize>; MAX_FRAMES],
    count: usize,
    size: usize,
    /// The message was handed out: its bytes are free.
    is_over: bool,
    replies: Vec<u8>,
}

/// Header of a frame.
struct Header {
    flags: u8,
    body: Range<usize>,
}

impl Reader {
    /// Creates a reader for the answers to [`Talk::opening`].
    pub fn new(talk: Talk) -> Reader {
        Reader {
            talk,
            phase: Phase::Greeting,
            answers_heartbeats: false,
            bytes: Vec::new(),
            start: 0,
            at: 0,
            frames: std::array::from_fn(|_| 0..0),
            count: 0,
            size: 0,
            is_over: false,
            replies: Vec::new(),
        }
    }

    /// Returns whether the handshake is over.
    pub fn is_ready(&self) -> bool {
        self.phase == Phase::Traffic
    }

    /// Returns whether the peer answers heartbeats. ZMTP 3.0 has none, so an idle peer is silent.
    pub fn answers_heartbeats(&self) -> bool {
        self.answers_heartbeats
    }

    /// Returns the number of bytes that wait.
    pub fn waiting_bytes(&self) -> usize {
        self.bytes.len() - self.start
    }

    /// Returns the answers to heartbeats, to be sent and removed.
    pub fn replies(&mut self) -> &mut Vec<u8> {
        &mut self.replies
    }

    /// Adds bytes from the peer. The messages handed out are gone.
    pub fn push(&mut self, bytes: &[u8]) {
        self.release();
        self.bytes.extend_from_slice(bytes);
    }

    /// Forgets the message that was handed out.
    fn pass(&mut self) {
        if self.is_over {
            (self.start, self.count, self.size, self.is_over) = (self.at, 0, 0, false);
        }
    }

    /// Frees the bytes that are handled.
    fn release(&mut self) {
        self.pass();
        let start = std::mem::take(&mut self.start);
        self.bytes.drain(..start);
        self.at -= start;
        for frame in &mut self.frames[..self.count] {
            *frame = frame.start - start..frame.end - start;
        }
    }

    /// Frees memory of a reader that waits for more bytes.
    pub fn shrink(&mut self) {
        self.release();
        if self.bytes.len() <= KEPT_BYTES {
            self.bytes.shrink_to(KEPT_BYTES);
        }
    }

    /// Returns the bytes that the buffer takes.
    pub fn capacity(&self) -> usize {
        self.bytes.capacity()
    }

    /// Returns what the bytes so far hold next.
    ///
    /// # Errors
    /// The reason for which the connection has to end.
    pub fn read(&mut self) -> Result<Item, String> {
        self.pass();
        match self.phase {
            Phase::Greeting => {
                if !self.greeting()? {
                    return Ok(Item::Nothing);
                }
                self.phase = Phase::Handshake;
                self.read()
            }
            Phase::Handshake => {
                if !self.handshake()? {
                    return Ok(Item::Nothing);
                }
                self.phase = Phase::Traffic;
                Ok(Item::Ready)
            }
            Phase::Traffic => {
                if !self.frames()? {
                    return Ok(Item::Nothing);
                }
                self.is_over = true;
                Ok(Item::Message)
            }
        }
    }

    /// Returns the message that was read last, until more is read.
    pub fn message(&self) -> Message<'_> {
        let count = if self.is_over { self.count } else { 0 };
        let mut frames = [&[][..]; MAX_FRAMES];
        for (frame, range) in frames.iter_mut().zip(&self.frames[..count]) {
            *frame = &self.bytes[range.clone()];
        }
        Message { frames, count }
    }

    /// Reads the greeting. Returns whether it is complete.
    fn greeting(&mut self) -> Result<bool, String> {
        let bytes = &self.bytes[..];
        let starts = |at: usize, right: fn(u8) -> bool| bytes.get(at).is_none_or(|byte| right(*byte));
        if !starts(0, |byte| byte == 0xff) || !starts(9, |byte| byte & 1 == 1) {
            return Err(format!("it does not speak ZMTP: it begins with {}", shown(bytes)));
        }
        if !starts(10, |major| major >= 3) {
            return Err("it speaks ZMTP of a version before 3 (libzmq 4)".into());
        }
        let Some(mechanism) = bytes.get(12..32) else { return Ok(false) };
        if mechanism[..4] != *b"NULL" || mechanism[4..].iter().any(|byte| *byte != 0) {
            let end = mechanism.iter().position(|byte| *byte == 0).unwrap_or(20);
            let name = shown(&mechanism[..end]);
            return Err(format!("its security mechanism is {name}: expected \"NULL\""));
        }
        if bytes.len() < GREETING_BYTES {
            return Ok(false);
        }
        self.answers_heartbeats = (bytes[10], bytes[11]) >= (3, 1);
        (self.start, self.at) = (GREETING_BYTES, GREETING_BYTES);
        Ok(true)
    }

    /// Reads the command that ends the handshake. Returns whether it is complete.
    fn handshake(&mut self) -> Result<bool, String> {
        let Some(header) = self.header(MAX_READY_BYTES)? else { return Ok(false) };
        if header.flags & COMMAND == 0 {
            return Err("it sends a message before the end of the handshake".into());
        }
        let Some(body) = self.bytes.get(header.body.clone()) else { return Ok(false) };
        if let Some(reason) = body.strip_prefix(b"\x05ERROR") {
            return Err(format!("it ends the handshake: {}", shown(reason.get(1..).unwrap_or_default())));
        }
        let Some(mut properties) = body.strip_prefix(b"\x05READY") else {
            return Err(format!("it ends the handshake with {} instead of READY", shown(body)));
        };
        let mut kind = None;
        while !properties.is_empty() {
            let Some((name, value, rest)) = property(properties) else {
                return Err("it sends a READY that cannot be read".into());
            };
            if name.eq_ignore_ascii_case(b"Socket-Type") {
                kind = Some(value);
            }
            properties = rest;
        }
        let expected = self.talk.peers();
        if !kind.is_some_and(|kind| expected.contains(&kind)) {
            let (kind, expected) = (shown(kind.unwrap_or_default()), shown(expected[0]));
            return Err(format!("its socket is of type {kind}: expected {expected}"));
        }
        (self.start, self.at) = (header.body.end, header.body.end);
        Ok(true)
    }

    /// Reads frames and commands up to the end of a message. Returns whether it is complete.
    fn frames(&mut self) -> Result<bool, String> {
        loop {
            let left = MAX_MESSAGE_BYTES.saturating_sub(self.size);
            let Some(header) = self.header(left)? else { return Ok(false) };
            let is_command = header.flags & COMMAND != 0;
            if !is_command && self.count == MAX_FRAMES {
                return Err(format!("a message of more than {MAX_FRAMES} frames"));
            }
            if self.bytes.len() < header.body.end {
                return Ok(false);
            }
            self.at = header.body.end;
            if is_command {
                self.command(header.body.clone());
                if self.count == 0 {
                    self.start = self.at;
                    continue;
                }
            } else {
                self.frames[self.count] = header.body.clone();
                self.count += 1;
            }
            self.size += header.body.len() + HEADER_BYTES;
            if !is_command && header.flags & MORE == 0 {
                return Ok(true);
            }
        }
    }

    /// Handles a command; unknown ones say nothing.
    fn command(&mut self, body: Range<usize>) {
        // PING: a time to live of two bytes, which asks for nothing, and a context of 16 or fewer.
        let Some(context) = self.bytes[body].strip_prefix(b"\x04PING").and_then(|rest| rest.get(2..)) else {
            return;
        };
        if context.len() <= 16 && self.replies.len() <= REPLY_BYTES {
            let pong = [b"\x04PONG", context].concat();
            frame(&mut self.replies, COMMAND, &pong);
        }
    }

    /// Reads the header of the next frame, whose body has at most `most` bytes; `None`: it is not
    /// complete.
    fn header(&self, most: usize) -> Result<Option<Header>, String> {
        let bytes = &self.bytes[self.at..];
        let Some(flags) = bytes.first().copied() else { return Ok(None) };
        if flags & !(MORE | LONG | COMMAND) != 0 || flags & (MORE | COMMAND) == MORE | COMMAND {
            return Err(format!("a frame with the flags {flags:#04x}, which ZMTP does not have"));
        }
        let (size, begin) = if flags & LONG != 0 {
            let Some(size) = bytes.get(1..9).and_then(|size| size.first_chunk()) else { return Ok(None) };
            (u64::from_be_bytes(*size), 9)
        } else {
            let Some(size) = bytes.get(1) else { return Ok(None) };
            (u64::from(*size), 2)
        };
        if size > most as u64 {
            let limit = if self.is_ready() { MAX_MESSAGE_BYTES } else { MAX_READY_BYTES };
            return Err(format!("a message of more than {limit} bytes"));
        }
        let begin = self.at + begin;
        Ok(Some(Header { flags, body: begin..begin + size as usize }))
    }
}

/// Reads a property: its name, its value, and the bytes after it.
fn property(bytes: &[u8]) -> Option<(&[u8], &[u8], &[u8])> {
    let (length, rest) = bytes.split_first()?;
    let (name, rest) = rest.split_at_checked(usize::from(*length))?;
    let (length, rest) = rest.split_first_chunk()?;
    let (value, rest) = rest.split_at_checked(u32::from_be_bytes(*length) as usize)?;
    Some((name, value, rest))
}

/// Returns the first bytes as quoted text.
fn shown(bytes: &[u8]) -> String {
    format!("\"{}\"", bytes[..bytes.len().min(32)].escape_ascii())
}
