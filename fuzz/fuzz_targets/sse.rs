//! Event streams: the same tokens, usage and ends as a reader of whole lines, and unchanged bytes
//! for the client. Both leave out token counts that are impossible.
#![no_main]
use libfuzzer_sys::fuzz_target;
use lmetric_fuzz::{Outcome, events, json, lines, play, without_comments};
use lmetric_wire::{Finish, Found};

const HEAD: &[u8] = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n";

fn check(stream: &str, got: &Outcome) {
    let mut done = 0;
    let starts = lines(stream).into_iter().map(|(line, end)| {
        done += line.len() + end.len();
        done
    });
    // Comments are dropped up to the event that commits the answer, and pass after it.
    let possible =
        |at: usize| got.payload == [&without_comments(&stream[..at]), &stream[at..]].concat().as_bytes();
    assert!(starts.chain([0]).any(possible), "{:?} of {stream:?}", String::from_utf8_lossy(&got.payload));

    let (mut tokens, mut last) = (0, Found::default());
    for data in events(stream) {
        if data == "[DONE]" {
            continue;
        }
        let Some(found) = json::read(&data) else { return };
        tokens += found.tokens();
        last.finish = if found.finish == Finish::Open { last.finish } else { found.finish };
        last.usage.prompt = found.usage.prompt.or(last.usage.prompt);
        last.usage.cached = found.usage.cached.or(last.usage.cached);
        last.usage.output = found.usage.output.or(last.usage.output);
        if found.error {
            (last.error, last.error_code) = (true, found.error_code);
        }
    }
    assert_eq!((got.tokens, got.usage, got.finish), (tokens, last.usage.plausible().0, last.finish));
    assert_eq!(got.error.is_some(), last.error);
    assert_eq!(got.error.flatten(), last.error_code.filter(|_| last.error));
}

fuzz_target!(|data: &[u8]| {
    let [size, stream @ ..] = data else { return };
    let Ok(stream) = std::str::from_utf8(stream) else { return };
    let response = [HEAD, stream.as_bytes()].concat();
    let whole = play(&response, response.len(), true, false).expect("it ends with the connection");
    assert_eq!(play(&response, (*size).into(), true, false).as_ref(), Some(&whole));
    check(stream, &whole);
});
