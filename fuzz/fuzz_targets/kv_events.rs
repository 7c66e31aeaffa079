//! KV events of engines: a second reader must accept every batch as MessagePack, too, with the same
//! number of events.
#![no_main]
// Only the modules: fuzzing needs nothing else of their crate.
#[allow(dead_code)]
#[path = "../../rust/feed/src/decode.rs"]
mod decode;
#[allow(dead_code)]
#[path = "../../rust/feed/src/event.rs"]
mod event;
#[allow(dead_code)]
#[path = "../../rust/feed/src/load.rs"]
mod load;

use event::{Event, Scratch, moment_of, read_batch};
use libfuzzer_sys::fuzz_target;
use load::{read_load, read_load_event};
use rmpv::Value;

/// The events of a batch: a member, or the second value (the third behind a name).
fn events_of(batch: &Value) -> Option<usize> {
    let all = |value: &Value| value.as_array().map(Vec::len);
    match batch {
        Value::Map(members) => members
            .iter()
            .filter(|(name, _)| name.as_str() == Some("events"))
            .map(|(_, value)| all(value))
            .sum(),
        Value::Array(values) => all(values.get(if values[0].is_str() { 2 } else { 1 })?),
        _ => None,
    }
}

fuzz_target!(|data: &[u8]| {
    let (mut scratch, mut handed) = (Scratch::default(), 0);
    let _ = (moment_of(data), read_load(data), read_load_event(data));
    let batch = read_batch(data, &mut scratch, |event| {
        handed += 1;
        if let Event::Stored(stored) = event {
            for at in 0..stored.hashes.len() {
                let keys = stored.extra_keys(at).unwrap_or_default();
                assert!(keys.is_empty() || rmpv::decode::read_value(&mut &keys[..]).is_ok());
            }
        }
    });
    let Ok(batch) = batch else { return };
    assert_eq!(batch.events, handed + batch.malformed);
    // The second reader bounds the depth and refuses one unused marker.
    if let Ok(value) = rmpv::decode::read_value_with_max_depth(&mut &data[..], 60_000) {
        assert_eq!(events_of(&value), Some(batch.events as usize));
    }
});
