//! Heads of requests: compares the router's reader with a line-by-line reader.
//! `tests/test_request_heads.py` compares it with aiohttp's parser (llhttp).
#![no_main]
use libfuzzer_sys::fuzz_target;
use lmetric_wire::{Kind, Request};

fn fields(head: &[u8]) -> Vec<(Vec<u8>, &[u8])> {
    let lines =
        head.split(|byte| *byte == b'\n').skip(1).map(<[u8]>::trim_ascii).filter(|line| !line.is_empty());
    lines
        .map(|line| {
            let colon = line.iter().position(|byte| *byte == b':').expect("a colon");
            (line[..colon].to_ascii_lowercase(), line[colon + 1..].trim_ascii())
        })
        .collect()
}

fuzz_target!(|data: &[u8]| {
    let Ok(Some(request)) = Request::read(data, false, 65_536) else { return };
    let head = &data[..request.start];
    // Leading empty lines are allowed.
    let text = head.trim_ascii_start();
    assert!(head.ends_with(b"\r\n\r\n"));
    assert_eq!(
        text.windows(4).position(|w| w == b"\r\n\r\n"),
        Some(text.len() - 4),
        "the head is the first one"
    );
    assert!(Request::read(&data[..request.start - 1], false, 65_536).is_ok_and(|early| early.is_none()));
    assert_eq!(
        Request::read(head, false, 65_536).as_ref(),
        Ok(&Some(request.clone())),
        "the body does not matter"
    );

    let first = text.split(|byte| *byte == b'\r').next().expect("a first line");
    let words: Vec<&[u8]> = first.split(|byte| *byte == b' ').collect();
    assert_eq!((words.len(), words[1]), (3, request.target.as_slice()));
    let fields = fields(text);
    let of = |name: &[u8]| -> Vec<&[u8]> { fields.iter().filter(|f| f.0 == name).map(|f| f.1).collect() };
    let lengths = of(b"content-length");
    let codings = of(b"transfer-encoding");
    match request.kind {
        Kind::Plain | Kind::Framed => {
            assert!(codings.is_empty() && lengths.len() <= 1);
            let length = lengths.first().map(|n| std::str::from_utf8(n).expect("digits"));
            assert!(length.is_none_or(|n| n.bytes().all(|byte| byte.is_ascii_digit())));
            assert_eq!(length.map_or(0, |n| n.parse().expect("a length")), request.length);
        }
        Kind::Chunked => {
            assert_eq!((words[2], codings.len(), lengths.len()), (b"HTTP/1.1".as_slice(), 1, 0));
            assert!(codings[0].eq_ignore_ascii_case(b"chunked"));
            assert_eq!(request.length, 0);
        }
        Kind::Other => assert_eq!(request.length, 0),
    }
    if request.kind == Kind::Plain {
        assert_eq!(words[2], b"HTTP/1.1");
        assert!(of(b"upgrade").is_empty());
        assert_eq!((words[0], lengths.len(), of(b"host").len()), (b"POST".as_slice(), 1, 1));
        assert!(of(b"expect").is_empty() && of(b"content-encoding").is_empty());
        assert!(request.target.starts_with(b"/") && request.target.iter().all(u8::is_ascii_graphic));
    }
    // No byte of a client can begin another field or request at the engine.
    for line in request.fields.lines.split_inclusive(|byte| *byte == b'\n') {
        assert!(line.ends_with(b"\r\n"));
        let line = &line[..line.len() - 2];
        assert!(!line.contains(&b'\r') && !line.contains(&0) && line.contains(&b':'));
        let name = line.split(|byte| *byte == b':').next().expect("a name").to_ascii_lowercase();
        let ours: [&[u8]; 4] = [b"host", b"content-length", b"transfer-encoding", b"connection"];
        assert!(!ours.contains(&name.as_slice()));
    }
});
