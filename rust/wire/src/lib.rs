//! Reads HTTP/1.1 bytes as they come: of requests heads, and bodies that are whole; of responses heads, body framing, SSE
//! events, and of the JSON inside only what a router needs (errors, tokens, usage). No I/O; memory is bounded whatever
//! arrives; every result is independent of how the bytes were cut into pieces.
#![forbid(unsafe_code)]
mod api;
mod body;
mod head;
mod json;
mod observe;
mod request;
mod scanner;
mod shape;
mod sse;
mod tree;

pub use api::{ApiRequest, CHAT, COMPLETIONS, INTERNAL_FIELDS, MAX_PROMPTS, Prompt, Refusal, check_object};
pub use json::{Finish, Found, MAX_TOKENS, Usage};
pub use observe::Observer;
pub use request::{Fields, Kind, Request, path, without_authorization};
pub use scanner::{HEAD_LIMIT, HOLD_LIMIT, OBSERVED_LIMIT, Scanner, Step};
pub use shape::{Excess, MAX_CONTAINERS, MAX_DEPTH, MAX_MEMBERS, MAX_VALUES, excess};
pub use sse::split;

/// What makes a message unusable.
#[derive(Debug, thiserror::Error, Clone, PartialEq, Eq)]
pub enum WireError {
    /// The bytes are not the HTTP/1.1 message they should be.
    #[error("malformed: {0}")]
    Malformed(String),
    /// The connection ended before the message did.
    #[error("response cut off: {0}")]
    CutOff(&'static str),
}

impl WireError {
    pub(crate) fn malformed(what: impl Into<String>) -> Self {
        Self::Malformed(what.into())
    }
}
