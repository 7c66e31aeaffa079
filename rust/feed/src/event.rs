//! The engines' KV cache events, in each format that engine versions send.
//!
//! A batch is `[moment, events, rank]` or a map of these fields. An event is a map with its `type`.
//! Older vLLM sends an array instead: the name first, then the fields in the order of their
//! declaration. Unknown keys and unknown events are skipped.
use crate::decode::{DecodeError, Decoded, Reader, utf8};
use std::ops::Range;

/// Maximum work of one batch in steps ([`Batch::steps`]). A step takes about a microsecond. No
/// engine comes near it: a step of the engine stores and removes some thousand blocks.
pub const MAX_STEPS: u64 = 1 << 16;

/// Buffers for the content of an event, reused for each event.
#[derive(Debug, Default)]
pub struct Scratch {
    hashes: Vec<u64>,
    tokens: Vec<u32>,
    /// Position of each block's extra keys in the message.
    extra_keys: Vec<Range<usize>>,
}

/// Most values for which a buffer keeps room after a batch.
const MAX_KEPT: usize = 1 << 16;
/// Bytes that are read or skipped in about a microsecond.
const STEP_BYTES: usize = 256;

impl Scratch {
    fn clear(&mut self) {
        self.hashes.clear();
        self.tokens.clear();
        self.extra_keys.clear();
    }

    /// Returns the work of the content, in steps.
    fn steps(&self) -> usize {
        self.hashes.len() + self.tokens.len() / 64 + self.extra_keys.len() / 16
    }

    /// Gives back the room that only a huge event needed.
    fn shrink(&mut self) {
        self.clear();
        self.hashes.shrink_to(MAX_KEPT);
        self.tokens.shrink_to(MAX_KEPT);
        self.extra_keys.shrink_to(MAX_KEPT);
    }
}

/// One cache event.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Event<'a> {
    /// Blocks were stored.
    Stored(Stored<'a>),
    /// Blocks were removed.
    Removed(Removed<'a>),
    /// The whole cache was cleared.
    Cleared,
    /// An event of an unknown type, with the type's name.
    Other(&'a str),
}

/// Blocks that the engine stored.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Stored<'a> {
    /// The engine's hashes of the blocks.
    pub hashes: &'a [u64],
    /// The engine's hash of the block before the first one.
    pub parent: Option<u64>,
    /// Token ids, one block's worth for each hash. Empty if a connector reports blocks by hash
    /// alone.
    pub tokens: &'a [u32],
    /// Tokens per block.
    pub block_size: u64,
    /// The storage tier: `GPU`, or the tier of a copy.
    pub medium: Option<&'a str>,
    /// Name of the LoRA adapter.
    pub lora_name: Option<&'a str>,
    /// Number of the LoRA adapter. Old versions report only the number.
    pub lora_id: Option<u64>,
    /// The cache salt, if it has a field of its own (SGLang).
    pub cache_salt: Option<&'a str>,
    /// The message. `extra_keys` are positions in it: the inputs of each block's hash besides
    /// tokens (vLLM).
    message: &'a [u8],
    extra_keys: &'a [Range<usize>],
    /// Index of the KV cache group (a group of layers).
    pub group: Option<u64>,
    /// Attention kind of the group.
    pub kind: Option<&'a str>,
    /// Tokens of the group's sliding window, if it has one.
    pub window: Option<u64>,
    /// The session of the request that stored the blocks.
    pub session_id: Option<&'a str>,
    /// Whether the blocks were cached already (`true`) or are new (`false`), if the engine reports
    /// it.
    pub reused: Option<bool>,
}

/// Blocks that the engine removed.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Removed<'a> {
    /// The engine's hashes of the blocks.
    pub hashes: &'a [u64],
    /// The storage tier.
    pub medium: Option<&'a str>,
    /// Index of the KV cache group (a group of layers).
    pub group: Option<u64>,
}

impl<'a> Stored<'a> {
    /// Returns the MessagePack bytes of the extra keys of block `at`: nil or an array.
    pub fn extra_keys(&self, at: usize) -> Option<&'a [u8]> {
        self.message.get(self.extra_keys.get(at)?.clone())
    }
}

/// Rank and event counts of a batch.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Batch {
    /// The data-parallel rank, if the batch has one.
    pub rank: Option<u64>,
    /// Events in the batch, malformed events included.
    pub events: u64,
    /// Events that do not have the shape of their type.
    pub malformed: u64,
    /// Work of the batch: an event, a block, 64 tokens, 16 extra keys and 256 bytes are a step
    /// each.
    pub steps: u64,
}

impl Batch {
    /// Adds work.
    fn spend(&mut self, steps: usize) -> Decoded<()> {
        self.steps += steps as u64;
        if self.steps > MAX_STEPS { Err(DecodeError::TooMuch(MAX_STEPS)) } else { Ok(()) }
    }
}

/// Field names in the order of their declaration, which the array form of events relies on.
const STORED: [&str; 14] = [
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
    "group_idx",
    "kv_cache_spec_kind",
    "kv_cache_spec_sliding_window",
    "locality",
    "ownership",
    "session_id",
];
const REMOVED: [&str; 3] = ["block_hashes", "medium", "group_idx"];

/// Reads a batch and passes each event to `each`, in order.
///
/// # Errors
/// Fails if the batch is malformed or takes more than [`MAX_STEPS`]; `each` has then received the
/// events before the error. A malformed event in a valid batch is skipped and counted.
pub fn read_batch(message: &[u8], scratch: &mut Scratch, mut each: impl FnMut(Event<'_>)) -> Decoded<Batch> {
    let read = read_whole(message, scratch, &mut each);
    scratch.shrink();
    read
}

fn read_whole(message: &[u8], scratch: &mut Scratch, each: &mut impl FnMut(Event<'_>)) -> Decoded<Batch> {
    let mut reader = Reader::new(message);
    let mut batch = Batch::default();
    batch.spend(message.len() / STEP_BYTES)?;
    if let Ok(pairs) = reader.map() {
        for _ in 0..pairs {
            match reader.text()? {
                "events" => read_events(message, &mut reader, scratch, &mut batch, each)?,
                "data_parallel_rank" | "attn_dp_rank" => batch.rank = optional(&mut reader)?,
                _ => reader.skip()?,
            }
        }
        return Ok(batch);
    }
    let mut left = reader.array()?;
    if reader.text().is_ok() {
        left = left.saturating_sub(1); // a name of the batch's type
    }
    if left < 2 {
        return Err(DecodeError::Unexpected("[moment, events, rank]"));
    }
    reader.float()?;
    read_events(message, &mut reader, scratch, &mut batch, each)?;
    if left > 2 {
        batch.rank = optional(&mut reader)?;
    }
    Ok(batch)
}

/// Returns the time when a batch was made, in seconds since 1970 on the engine's clock, if present.
pub fn moment_of(message: &[u8]) -> Option<f64> {
    let mut reader = Reader::new(message);
    if let Ok(pairs) = reader.map() {
        for _ in 0..pairs {
            match reader.text().ok()? {
                "ts" => return reader.float().ok(),
                _ => reader.skip().ok()?,
            }
        }
        return None;
    }
    reader.array().ok()?;
    let _ = reader.text(); // a name of the batch's type
    reader.float().ok()
}

/// Reads an integer or nil.
fn optional(reader: &mut Reader<'_>) -> Decoded<Option<u64>> {
    if reader.nil() { Ok(None) } else { reader.unsigned().map(Some) }
}

fn read_events<'a>(
    message: &'a [u8],
    reader: &mut Reader<'a>,
    scratch: &mut Scratch,
    batch: &mut Batch,
    each: &mut impl FnMut(Event<'_>),
) -> Decoded<()> {
    for _ in 0..reader.array()? {
        batch.events += 1;
        batch.spend(1)?;
        let before = *reader;
        match read_event(message, reader, scratch, batch, each) {
            Ok(()) => {}
            Err(error @ (DecodeError::Truncated | DecodeError::TooMuch(_))) => return Err(error),
            Err(DecodeError::Unexpected(_)) => {
                *reader = before;
                reader.skip()?;
                batch.malformed += 1;
                batch.spend(scratch.steps())?; // of the fields before the malformed one
            }
        }
    }
    Ok(())
}

fn read_event<'a>(
    message: &'a [u8],
    reader: &mut Reader<'a>,
    scratch: &mut Scratch,
    batch: &mut Batch,
    each: &mut impl FnMut(Event<'_>),
) -> Decoded<()> {
    scratch.clear();
    let mut fields = Stored { message, ..Stored::default() };
    let name;
    if let Ok(pairs) = reader.map() {
        let mut tag = None;
        for _ in 0..pairs {
            match reader.text_bytes()? {
                b"type" => tag = Some(reader.text_bytes()?),
                key => read_field(key, message, reader, scratch, &mut fields)?,
            }
        }
        name = tag.ok_or(DecodeError::Unexpected("an event with its type"))?;
    } else {
        let length = reader.array()?;
        name = reader.text_bytes()?;
        let keys: &[&str] = match name {
            b"BlockStored" => &STORED,
            b"BlockRemoved" => &REMOVED,
            _ => &[],
        };
        for at in 1..length {
            read_field(keys.get(at - 1).unwrap_or(&"").as_bytes(), message, reader, scratch, &mut fields)?;
        }
    }
    let other = if matches!(name, b"BlockStored" | b"BlockRemoved") { "" } else { utf8(name)? };
    batch.spend(scratch.steps())?;
    let Scratch { hashes, tokens, extra_keys } = scratch;
    each(match name {
        b"BlockStored" => Event::Stored(Stored { hashes, tokens, extra_keys, ..fields }),
        b"BlockRemoved" => Event::Removed(Removed { hashes, medium: fields.medium, group: fields.group }),
        b"AllBlocksCleared" => Event::Cleared,
        _ => Event::Other(other),
    });
    Ok(())
}

fn read_field<'a>(
    key: &[u8],
    message: &[u8],
    reader: &mut Reader<'a>,
    scratch: &mut Scratch,
    fields: &mut Stored<'a>,
) -> Decoded<()> {
    match key {
        b"block_hashes" => reader.hashes(&mut scratch.hashes)?,
        b"token_ids" => reader.tokens(&mut scratch.tokens)?,
        b"parent_block_hash" => fields.parent = if reader.nil() { None } else { Some(reader.hash()?) },
        b"block_size" => fields.block_size = reader.unsigned()?,
        b"medium" => fields.medium = reader.optional_text()?,
        b"lora_name" => fields.lora_name = reader.optional_text()?,
        b"lora_id" => fields.lora_id = optional(reader)?,
        b"cache_salt" => fields.cache_salt = reader.optional_text()?,
        b"group_idx" => fields.group = optional(reader)?,
        b"session_id" => fields.session_id = reader.optional_text()?,
        b"kv_cache_spec_sliding_window" => fields.window = optional(reader)?,
        b"kv_cache_spec_kind" => fields.kind = reader.optional_text()?,
        b"origin" => {
            let origin = reader.optional_text()?;
            fields.reused = origin.map(|origin| origin.eq_ignore_ascii_case("reused"));
        }
        b"extra_keys" if !reader.nil() => {
            for _ in 0..reader.array()? {
                let start = message.len() - reader.rest().len();
                // Most blocks have none.
                if !reader.nil() {
                    reader.skip()?;
                }
                scratch.extra_keys.push(start..message.len() - reader.rest().len());
            }
        }
        b"extra_keys" => {}
        _ => {
            utf8(key)?;
            reader.skip()?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use rmp::encode as pack;

    /// A valid event, or one whose last field is malformed, takes much room for its batch alone.
    #[test]
    fn a_huge_event_leaves_little_room_behind() {
        let mut scratch = Scratch::default();
        for is_valid in [true, false] {
            let mut message = Vec::new();
            pack::write_array_len(&mut message, 2).unwrap();
            pack::write_f64(&mut message, 1.0).unwrap();
            pack::write_array_len(&mut message, 1).unwrap();
            pack::write_map_len(&mut message, 4).unwrap();
            for (field, values) in
                [("block_hashes", 20_000), ("token_ids", 1_000_000), ("extra_keys", 200_000)]
            {
                pack::write_str(&mut message, field).unwrap();
                pack::write_array_len(&mut message, values).unwrap();
                let value = if field == "extra_keys" { 0xc0 } else { 1 };
                message.resize(message.len() + values as usize, value);
            }
            pack::write_str(&mut message, "type").unwrap();
            if is_valid {
                pack::write_str(&mut message, "BlockStored").unwrap();
            } else {
                pack::write_nil(&mut message).unwrap();
            }
            let mut events = 0;
            let batch = read_batch(&message, &mut scratch, |_| events += 1).expect("within the limit");
            assert_eq!((events, batch.malformed), if is_valid { (1, 0) } else { (0, 1) });
            assert_eq!(batch.steps, 1 + 20_000 + 1_000_000 / 64 + 200_000 / 16 + message.len() as u64 / 256);
            let Scratch { hashes, tokens, extra_keys } = &scratch;
            let room = [hashes.capacity(), tokens.capacity(), extra_keys.capacity()];
            assert!(room.iter().all(|room| *room <= MAX_KEPT), "{room:?}");
        }
    }

    /// Names of fields and types are compared as bytes: those that are no text are still refused.
    #[test]
    fn a_field_or_type_that_is_no_text_is_malformed() {
        let event = |field: &[u8], value: &[u8]| {
            let mut message = vec![0x92, 0xcb, 0, 0, 0, 0, 0, 0, 0, 0, 0x92, 0x82];
            for text in [b"type".as_slice(), value, field, b"x"] {
                message.push(0xa0 | text.len() as u8);
                message.extend(text);
            }
            message.extend(b"\x91\xb0AllBlocksCleared");
            let mut found = Vec::new();
            let batch =
                read_batch(&message, &mut Scratch::default(), |event| found.push(format!("{event:?}")));
            (found, batch.expect("the batch is read").malformed)
        };
        let cleared = || "Cleared".to_owned();
        assert_eq!(event(b"new", b"Later"), (vec!["Other(\"Later\")".into(), cleared()], 0));
        assert_eq!(event(b"\xff", b"Later"), (vec![cleared()], 1));
        assert_eq!(event(b"new", b"\xff"), (vec![cleared()], 1));
    }
}
