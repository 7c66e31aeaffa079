//! Hashing scheme of a router's prompts: block sizes and domains.
use super::hash::Domain;
use crate::error::CoreError;

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
    /// `BadValue` for a block size out of range.
    pub fn new(
        parts: &[Option<String>],
        block_size: usize,
        text_block_bytes: usize,
    ) -> Result<Keys, CoreError> {
        for (what, value) in [("block_size", block_size), ("text_block_bytes", text_block_bytes)] {
            if value == 0 || value > 1 << 20 {
                return Err(CoreError::BadValue {
                    what: what.into(),
                    got: value.to_string(),
                    expected: "a whole number from 1 to 1048576".into(),
                });
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
