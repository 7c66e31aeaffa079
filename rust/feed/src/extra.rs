//! Extra keys of blocks: what their hashes contain besides tokens.
use crate::decode::Reader;
use xxhash_rust::xxh3::Xxh3;

/// A block's extra keys without the adapter's name.
pub(crate) struct Rest<'a> {
    /// The only remaining key, if it is a string: in a prompt's first block, the cache salt.
    pub salt: Option<&'a str>,
    /// Hash of the remaining keys; 0 if there are none.
    pub narrowing: u64,
}

impl<'a> Rest<'a> {
    /// Reads the extra keys of a block.
    pub fn of(keys: &'a [u8], lora_name: Option<&str>) -> Rest<'a> {
        let mut rest = Rest { salt: None, narrowing: 0 };
        let mut reader = Reader::new(keys);
        if reader.nil() {
            return rest;
        }
        let mut hasher = Xxh3::new();
        let (mut left, mut named) = (0, lora_name.is_none());
        let Ok(length) = reader.array() else {
            hasher.update(keys);
            rest.narrowing = hasher.digest() | 1;
            return rest;
        };
        for _ in 0..length {
            let Ok(raw) = reader.raw() else { break };
            let text = Reader::new(raw).text().ok();
            if !named && text == lora_name {
                named = true;
                continue;
            }
            left += 1;
            hasher.update(raw);
            rest.salt = text.filter(|_| left == 1);
        }
        if left > 0 {
            rest.narrowing = hasher.digest() | 1;
        }
        rest
    }
}
