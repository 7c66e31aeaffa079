//! Hashing scheme of a router's prompts: block sizes and domains.
use crate::hash::Domain;
use thiserror::Error;

/// A block size out of range.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
#[error("{what}: {got} is not valid; expected {}", Self::EXPECTED)]
pub struct BlockSizeError {
    /// Name of the argument.
    pub what: &'static str,
    /// The given value.
    pub got: usize,
}

impl BlockSizeError {
    /// The valid values.
    pub const EXPECTED: &'static str = "a whole number from 1 to 1048576";
}

/// Key scheme of one router. Prompts and engine events use the same scheme, so that their hashes
/// match.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Keys {
    /// Tokens per block.
    pub block_size: usize,
    /// Bytes per block for text prompts.
    pub text_block_bytes: usize,
    /// Domain of prompts given as token ids, and of engine events.
    pub tokens: Domain,
    /// Domain of prompts given as text.
    pub text: Domain,
    /// Domain of prompts given as block hashes.
    pub hashes: Domain,
}

impl Keys {
    /// Builds the scheme of prompts that share `parts` (model, tokenizer).
    ///
    /// # Errors
    /// A block size out of range.
    pub fn new(
        parts: &[Option<String>],
        block_size: usize,
        text_block_bytes: usize,
    ) -> Result<Keys, BlockSizeError> {
        for (what, got) in [("block_size", block_size), ("text_block_bytes", text_block_bytes)] {
            if got == 0 || got > 1 << 20 {
                return Err(BlockSizeError { what, got });
            }
        }
        let domain = |kind, size| {
            let parts = parts.iter().map(Option::as_deref).chain([Some(kind)]);
            Domain::new(&parts.collect::<Vec<_>>(), size)
        };
        Ok(Keys {
            block_size,
            text_block_bytes,
            tokens: domain("tokens", block_size),
            text: domain("text", text_block_bytes),
            hashes: domain("hashes", block_size),
        })
    }
}
