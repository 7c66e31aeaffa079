//! What engines tell of their caches, in whatever form their version sends it.
//!
//! A batch is `[moment, events, rank]` or a map of these; an event a map with its `type`, or (older vLLM) an array with its name first and
//! the fields in the order of their declaration. Keys that are not known are skipped, and so are events.
use crate::decode::{DecodeError, Decoded, Reader};
use std::ops::Range;

/// Room for what an event holds, used again for each.
#[derive(Debug, Default)]
pub struct Scratch {
    hashes: Vec<u64>,
    tokens: Vec<u32>,
    /// Where each block's extra keys stand in the message.
    extra_keys: Vec<Range<usize>>,
}

/// One event.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Event<'a> {
    /// Blocks came.
    Stored(Stored<'a>),
    /// Blocks went.
    Removed(Removed<'a>),
    /// All blocks went.
    Cleared,
    /// Of a type that is not known.
    Other(&'a str),
}

/// Blocks came.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Stored<'a> {
    /// The engine's hashes of them.
    pub hashes: &'a [u64],
    /// That of the block before them.
    pub parent: Option<u64>,
    /// A block's worth to each (none where a connector tells of blocks by hash alone).
    pub tokens: &'a [u32],
    /// Tokens a block.
    pub block_size: u64,
    /// The tier: `GPU`, or where a copy was put.
    pub medium: Option<&'a str>,
    /// The adapter's name.
    pub lora_name: Option<&'a str>,
    /// Its number, which is all that old versions tell.
    pub lora_id: Option<u64>,
    /// The cache salt, where it has a field of its own (SGLang).
    pub cache_salt: Option<&'a str>,
    /// The message, and in it what went into each block's hash besides tokens (vLLM).
    message: &'a [u8],
    extra_keys: &'a [Range<usize>],
    /// The group of layers.
    pub group: Option<u64>,
    /// Its kind of attention.
    pub kind: Option<&'a str>,
    /// Whether the engine says that the blocks are new (`false`) or were there and are told of again (`true`).
    pub reused: Option<bool>,
}

/// Blocks went.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Removed<'a> {
    /// The engine's hashes of them.
    pub hashes: &'a [u64],
    /// The tier.
    pub medium: Option<&'a str>,
    /// The group of layers.
    pub group: Option<u64>,
}

impl<'a> Stored<'a> {
    /// MessagePack of the extra keys of block `at`: nil or an array.
    pub fn extra_keys(&self, at: usize) -> Option<&'a [u8]> {
        self.message.get(self.extra_keys.get(at)?.clone())
    }
}

/// What a batch says besides its events.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Batch {
    /// The data-parallel rank, where it is told.
    pub rank: Option<u64>,
    /// Events in it, malformed ones included.
    pub events: u64,
    /// Events that were not of the shape that their type demands.
    pub malformed: u64,
}

/// Fields of events in the order of their declaration, which the array form relies on.
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

/// Reads a batch and hands each event to `each`, in order.
///
/// # Errors
/// Where the batch is malformed; events before that were handed on. An event that is malformed by itself is skipped and counted.
pub fn read_batch(message: &[u8], scratch: &mut Scratch, mut each: impl FnMut(Event<'_>)) -> Decoded<Batch> {
    let mut reader = Reader::new(message);
    let mut batch = Batch::default();
    if let Ok(pairs) = reader.map() {
        for _ in 0..pairs {
            match reader.text()? {
                "events" => read_events(message, &mut reader, scratch, &mut batch, &mut each)?,
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
    read_events(message, &mut reader, scratch, &mut batch, &mut each)?;
    if left > 2 {
        batch.rank = optional(&mut reader)?;
    }
    Ok(batch)
}

/// When a batch was made: seconds since 1970 on the engine's clock, where it says so.
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

/// A whole number, or nothing.
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
        let before = *reader;
        match read_event(message, reader, scratch, each) {
            Ok(()) => {}
            Err(DecodeError::Truncated) => return Err(DecodeError::Truncated),
            Err(DecodeError::Unexpected(_)) => {
                *reader = before;
                reader.skip()?;
                batch.malformed += 1;
            }
        }
    }
    Ok(())
}

fn read_event<'a>(
    message: &'a [u8],
    reader: &mut Reader<'a>,
    scratch: &mut Scratch,
    each: &mut impl FnMut(Event<'_>),
) -> Decoded<()> {
    scratch.hashes.clear();
    scratch.tokens.clear();
    scratch.extra_keys.clear();
    let mut fields = Stored { message, ..Stored::default() };
    let name;
    if let Ok(pairs) = reader.map() {
        let mut tag = None;
        for _ in 0..pairs {
            match reader.text()? {
                "type" => tag = Some(reader.text()?),
                key => read_field(key, message, reader, scratch, &mut fields)?,
            }
        }
        name = tag.ok_or(DecodeError::Unexpected("an event with its type"))?;
    } else {
        let length = reader.array()?;
        name = reader.text()?;
        let keys: &[&str] = match name {
            "BlockStored" => &STORED,
            "BlockRemoved" => &REMOVED,
            _ => &[],
        };
        for at in 1..length {
            read_field(keys.get(at - 1).unwrap_or(&""), message, reader, scratch, &mut fields)?;
        }
    }
    let Scratch { hashes, tokens, extra_keys } = scratch;
    each(match name {
        "BlockStored" => Event::Stored(Stored { hashes, tokens, extra_keys, ..fields }),
        "BlockRemoved" => Event::Removed(Removed { hashes, medium: fields.medium, group: fields.group }),
        "AllBlocksCleared" => Event::Cleared,
        other => Event::Other(other),
    });
    Ok(())
}

fn read_field<'a>(
    key: &str,
    message: &[u8],
    reader: &mut Reader<'a>,
    scratch: &mut Scratch,
    fields: &mut Stored<'a>,
) -> Decoded<()> {
    match key {
        "block_hashes" => reader.hashes(&mut scratch.hashes)?,
        "token_ids" => reader.tokens(&mut scratch.tokens)?,
        "parent_block_hash" => fields.parent = if reader.nil() { None } else { Some(reader.hash()?) },
        "block_size" => fields.block_size = reader.unsigned()?,
        "medium" => fields.medium = reader.optional_text()?,
        "lora_name" => fields.lora_name = reader.optional_text()?,
        "lora_id" => fields.lora_id = optional(reader)?,
        "cache_salt" => fields.cache_salt = reader.optional_text()?,
        "group_idx" => fields.group = optional(reader)?,
        "kv_cache_spec_kind" => fields.kind = reader.optional_text()?,
        "origin" => {
            let origin = reader.optional_text()?;
            fields.reused = origin.map(|origin| origin.eq_ignore_ascii_case("reused"));
        }
        "extra_keys" if !reader.nil() => {
            for _ in 0..reader.array()? {
                let start = message.len() - reader.rest().len();
                reader.skip()?;
                scratch.extra_keys.push(start..message.len() - reader.rest().len());
            }
        }
        "extra_keys" => {}
        _ => reader.skip()?,
    }
    Ok(())
}

/// An engine's load, as SGLang pushes it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Load {
    /// Requests that run.
    pub running: f64,
    /// Requests that wait.
    pub waiting: f64,
    /// Share of the KV cache in use, where its size is told.
    pub kv_usage: Option<f64>,
}

/// Reads `["LoadStat", running, waiting, tokens, most tokens, ...]`.
///
/// # Errors
/// Where it is something else.
pub fn read_load(message: &[u8]) -> Decoded<Load> {
    let mut reader = Reader::new(message);
    if reader.array()? < 5 || reader.text()? != "LoadStat" {
        return Err(DecodeError::Unexpected("[\"LoadStat\", ...] of five or more"));
    }
    let mut next = || reader.float();
    let (running, waiting, tokens, most) = (next()?, next()?, next()?, next()?);
    let all = [running, waiting, tokens, most];
    if all.iter().any(|n| !n.is_finite() || *n < 0.0) {
        return Err(DecodeError::Unexpected("numbers of at least 0"));
    }
    Ok(Load { running, waiting, kv_usage: (most > 0.0).then(|| tokens / most) })
}
