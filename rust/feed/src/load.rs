//! The engines' load reports: SGLang's messages, and the event of the schedulers of `lmetric-vllm`.
use crate::decode::{DecodeError, Decoded, Reader};

/// Type of the event with an engine's load. It is the first event of its batch.
pub(crate) const LOAD: &str = "LmetricLoad";
/// Maximum size of a batch with a load event, in bytes. The schedulers send about 120.
const MAX_BATCH_BYTES: usize = 1024;
/// Maximum number of a load report: no engine runs as many requests or holds as many tokens.
const MAX_LOAD: f64 = 1e9;
const NUMBERS: DecodeError = DecodeError::Unexpected("numbers of 0 to 1e9");

/// An engine's load.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Load {
    /// Running requests.
    pub running: f64,
    /// Queued requests.
    pub waiting: f64,
    /// Share of the KV cache in use, if the engine reports it.
    pub kv_usage: Option<f64>,
    /// Prompt tokens still to compute, of queued and running requests, if the engine reports them.
    pub prefill_tokens: Option<f64>,
}

/// Reads SGLang's `["LoadStat", running, waiting, tokens, most tokens, ...]`.
///
/// # Errors
/// Fails if the message has another shape, or a number that is negative or above 1e9.
pub fn read_load(message: &[u8]) -> Decoded<Load> {
    let mut reader = Reader::new(message);
    if reader.array()? < 5 || reader.text()? != "LoadStat" {
        return Err(DecodeError::Unexpected("[\"LoadStat\", ...] of five or more"));
    }
    let mut next = || number(&mut reader);
    let (running, waiting, tokens, most) = (next()?, next()?, next()?, next()?);
    let kv_usage = (most > 0.0).then(|| tokens / most);
    Ok(Load { running, waiting, kv_usage, prefill_tokens: None })
}

/// Reads the load event `{"type": "LmetricLoad", ...}`, the first event of its batch. `None` if the
/// batch has no such event. Takes constant time.
///
/// # Errors
/// Fails if the event lacks `running` or `waiting`, or has a number that is negative or above 1e9,
/// or a `kv_usage` above 1.
pub fn read_load_event(batch: &[u8]) -> Decoded<Option<Load>> {
    let mut reader = Reader::new(batch);
    match fields_of(&mut reader) {
        Some(fields) if batch.len() <= MAX_BATCH_BYTES => read_fields(&mut reader, fields).map(Some),
        Some(_) => Err(DecodeError::Unexpected("a load event of at most 1,024 bytes")),
        None => Ok(None),
    }
}

/// Reads up to the fields of a load event. Returns their number; `None` if this is another batch.
fn fields_of(reader: &mut Reader<'_>) -> Option<usize> {
    reader.array().ok()?;
    reader.float().ok()?;
    reader.array().ok().filter(|events| *events > 0)?;
    let fields = reader.map().ok()?.checked_sub(1)?;
    let is_load = reader.text().ok()? == "type" && reader.text().ok()? == LOAD;
    is_load.then_some(fields)
}

fn read_fields(reader: &mut Reader<'_>, fields: usize) -> Decoded<Load> {
    let (mut running, mut waiting, mut kv_usage, mut prefill_tokens) = (None, None, None, None);
    for _ in 0..fields {
        match reader.text()? {
            "running" => running = Some(number(reader)?),
            "waiting" => waiting = Some(number(reader)?),
            "kv_usage" => kv_usage = Some(number(reader)?),
            "prefill_tokens" => prefill_tokens = Some(number(reader)?),
            _ => reader.skip()?,
        }
    }
    if kv_usage.is_some_and(|usage| usage > 1.0) {
        return Err(DecodeError::Unexpected("a kv_usage of 0 to 1"));
    }
    match (running, waiting) {
        (Some(running), Some(waiting)) => Ok(Load { running, waiting, kv_usage, prefill_tokens }),
        _ => Err(DecodeError::Unexpected("a load with running and waiting")),
    }
}

fn number(reader: &mut Reader<'_>) -> Decoded<f64> {
    let number = reader.float()?;
    if (0.0..=MAX_LOAD).contains(&number) { Ok(number) } else { Err(NUMBERS) }
}
