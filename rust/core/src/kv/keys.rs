//! How a router's prompts become block hashes: block sizes and domains.
use super::hash::Domain;
use crate::error::CoreError;

/// The key scheme of one router: prompts and engines' events are hashed by the same one, so that they meet.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Keys {
    /// Tokens a block.
    pub block_size: usize,
    /// Bytes a block, where prompts are text.
    pub text_block_bytes: usize,
    /// Of prompts given as token ids, and of the engines' events.
    pub tokens: Domain,
    /// Of prompts given as text.
    pub text: Domain,
    /// Of prompts given as hashes of blocks.
    pub hashes: Domain,
}

impl Keys {
    /// The scheme of prompts that share `parts` (model, tokenizer).
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
