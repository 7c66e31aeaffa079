//! An engine's JSON: compares the probe, which builds no tree, with serde_json.
#![no_main]
use libfuzzer_sys::fuzz_target;
use lmetric_fuzz::{json, play};

fuzz_target!(|data: &[u8]| {
    let plain = [b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\r\n", data].concat();
    let answer = play(&plain, plain.len(), true, false).expect("it ends with the connection");
    assert_eq!(play(&plain, 1, true, false).as_ref(), Some(&answer));
    assert_eq!(answer.payload, data);
    let Some(found) = std::str::from_utf8(data).ok().and_then(json::read) else { return };
    assert_eq!((answer.usage, answer.finish), (found.usage.plausible().0, found.finish));
    assert_eq!(
        (answer.error.is_some(), answer.error.flatten()),
        (found.error, found.error_code.filter(|_| found.error))
    );
    if !data.contains(&b'\n') && !data.contains(&b'\r') {
        let event =
            [b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\ndata:", data, b"\n\n"].concat();
        let event = play(&event, event.len(), true, false).expect("it ends with the connection");
        assert_eq!(
            (event.tokens, event.usage, event.finish),
            (found.tokens(), found.usage.plausible().0, found.finish)
        );
    }
});
