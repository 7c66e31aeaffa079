//! Extra keys of blocks: what their hashes contain besides tokens.
use crate::decode::Reader;
use lmetric_core::kv::media::Part;

/// A block's extra keys without the adapter's name.
pub(crate) struct Rest<'a> {
    /// The cache salt: the only string that remains, in a prompt's first block.
    pub salt: Option<&'a str>,
    /// Hash of the remaining keys; 0 if there are none.
    pub narrowing: u64,
}

impl<'a> Rest<'a> {
    /// Reads the extra keys of a block. `first`: the block starts the prompt.
    pub fn of(keys: &'a [u8], lora_name: Option<&str>, first: bool) -> Rest<'a> {
        let mut reader = Reader::new(keys);
        if reader.nil() {
            return Rest { salt: None, narrowing: 0 };
        }
        let mut part = Part::default();
        let Ok(length) = reader.array() else {
            part.other(keys);
            return Rest { salt: None, narrowing: part.hash() };
        };
        let (mut salt, mut salts, mut named) = (None, 0, lora_name.is_none());
        for _ in 0..length {
            let Ok(raw) = reader.raw() else { break };
            let text = Reader::new(raw).text().ok();
            if !named && text == lora_name {
                named = true;
                continue;
            }
            match (text, image(raw)) {
                (Some(_), _) if first && salts == 0 => (salt, salts) = (text, 1),
                (None, Some((identifier, offset))) => part.image(identifier, offset),
                _ => {
                    salts += usize::from(text.is_some());
                    part.other(raw);
                }
            }
        }
        if salts > 1 {
            salt.take().into_iter().for_each(|text| part.other(text.as_bytes()));
        }
        Rest { salt, narrowing: part.hash() }
    }
}

/// Reads vLLM's key of an image: its identity, and its offset from the block's start.
fn image(raw: &[u8]) -> Option<(&str, i64)> {
    let mut reader = Reader::new(raw);
    let length = reader.array().ok()?;
    let key = (reader.text().ok()?, reader.signed().ok()?);
    (length == 2).then_some(key)
}
