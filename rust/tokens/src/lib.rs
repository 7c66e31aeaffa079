//! Prompts to token ids. A text is cut at special tokens into segments whose ids do not depend on what stands around them
//! (checked when a tokenizer is loaded); a segment seen before costs a hash and a copy. No I/O, no Python.
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

/// What keeps a tokenizer from being loaded, or a text from being tokenised.
#[derive(Debug, thiserror::Error, Clone, PartialEq, Eq)]
pub enum TokensError {
    /// The file is not a tokenizer that can be used.
    #[error("{0}")]
    Unusable(String),
    /// The tokenizer has no ids for a text.
    #[error("the tokenizer failed: {0}")]
    Failed(String),
}
