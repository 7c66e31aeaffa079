//! Encodes prompts as token IDs. A text is cut at special tokens into segments whose IDs do not
//! depend on their neighbors (checked when a tokenizer is loaded). A cached segment costs a hash
//! and a copy. No I/O, no Python.
#![forbid(unsafe_code)]
mod cache;
mod cuts;
mod encoder;
mod fast;
mod libraries;

pub use cache::CacheStats;
pub use encoder::Encoder;

/// Whether the feature `fast-tokenizer` is compiled in.
pub const FAST_TOKENIZER: bool = cfg!(feature = "fast-tokenizer");

/// An error in loading a tokenizer or in tokenizing a text.
#[derive(Debug, thiserror::Error, Clone, PartialEq, Eq)]
pub enum TokensError {
    /// The file is not a tokenizer that can be used.
    #[error("{0}")]
    Unusable(String),
    /// The tokenizer cannot encode a text.
    #[error("the tokenizer failed: {0}")]
    Failed(String),
}
