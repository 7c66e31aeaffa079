//! Incremental readers of HTTP/1.1: request heads and whole bodies; response heads, body framing
//! and SSE events. Of the JSON inside, they read only the values that a router needs (errors,
//! tokens, usage). No I/O; memory is bounded for any input; no result depends on how the bytes were
//! cut into pieces.
#![forbid(unsafe_code)]
mod api;
mod body;
mod edit;
mod head;
mod json;
mod observe;
mod prompt_text;
mod rename;
mod request;
mod scanner;
mod shape;
mod sse;
mod template;
mod tree;

pub use api::{ApiRequest, INTERNAL_FIELDS, Prompt, PromptReader, Refusal, check_object, utf8};
pub use body::ChunkedBody;
pub use edit::{edited, outline, short_members};
pub use json::{Finish, Found, MAX_TOKENS, Usage};
pub use observe::{OBSERVED_LIMIT, Observer};
pub use request::{
    Fields, Kind, Peer, REQUEST_FIELDS_LIMIT, Request, field, has_credentials, path, without_credentials,
};
pub use scanner::{HEAD_LIMIT, HOLD_LIMIT, Scanner, Step};
pub use shape::{BYTES_EACH, Excess, MAX_CONTAINERS, MAX_DEPTH, MAX_MEMBERS, MAX_VALUES, excess};
pub use sse::split;

/// A reason why a message is unusable.
#[derive(Debug, thiserror::Error, Clone, PartialEq, Eq)]
pub enum WireError {
    /// The bytes are not a valid HTTP/1.1 message.
    #[error("malformed: {0}")]
    Malformed(String),
    /// A request head above a limit.
    #[error("{0}")]
    HeadTooLarge(String),
    /// The connection ended before the message did.
    #[error("response cut off: {0}")]
    CutOff(&'static str),
}

impl WireError {
    pub(crate) fn malformed(what: impl Into<String>) -> Self {
        Self::Malformed(what.into())
    }
}
