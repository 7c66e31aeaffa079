//! Reads HTTP/1.1 response bytes as they come: heads, body framing, SSE events, and of the JSON inside only what a
//! router needs (errors, tokens, usage). No I/O; memory is bounded whatever arrives; every result is independent of how
//! the bytes were cut into pieces.
mod body;
mod head;
mod json;
mod scanner;
mod sse;

pub use json::{Finish, Found, Usage};
pub use scanner::{HEAD_LIMIT, HOLD_LIMIT, Scanner, Step};

/// What makes a response unusable.
#[derive(Debug, thiserror::Error, Clone, PartialEq, Eq)]
pub enum WireError {
    /// The bytes are not the HTTP/1.1 response they should be.
    #[error("malformed response: {0}")]
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
