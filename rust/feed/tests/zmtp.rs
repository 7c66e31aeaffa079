//! Bytes of a publisher, read in any pieces.
use lmetric_feed::zmtp::{Item, MAX_FRAMES, MAX_MESSAGE_BYTES, Reader, Talk};
use proptest::prelude::*;

const MORE: u8 = 1;
const COMMAND: u8 = 4;

fn frame(out: &mut Vec<u8>, flags: u8, body: &[u8]) {
    match u8::try_from(body.len()) {
        Ok(size) => out.extend([flags, size]),
        Err(_) => {
            out.push(flags | 2);
            out.extend((body.len() as u64).to_be_bytes());
        }
    }
    out.extend(body);
}

/// Greeting and READY of a publisher.
fn hello(mechanism: &[u8], kind: &[u8]) -> Vec<u8> {
    let mut out = vec![0; 64];
    (out[0], out[9], out[10], out[11]) = (0xff, 0x7f, 3, 1);
    out[12..12 + mechanism.len()].copy_from_slice(mechanism);
    let mut ready = b"\x05READY\x0bSocket-Type".to_vec();
    ready.extend((kind.len() as u32).to_be_bytes());
    ready.extend(kind);
    frame(&mut out, COMMAND, &ready);
    out
}

/// Findings of a reader: the messages, its answers, and the reason for its end.
#[derive(Debug, Default, PartialEq)]
struct Found {
    ready: bool,
    messages: Vec<Vec<Vec<u8>>>,
    replies: Vec<u8>,
    refused: Option<String>,
}

fn read(talk: Talk, bytes: &[u8], piece: usize) -> Found {
    let (mut reader, mut found) = (Reader::new(talk), Found::default());
    for piece in bytes.chunks(piece.max(1)) {
        reader.push(piece);
        loop {
            match reader.read() {
                Ok(Item::Nothing) => break,
                Ok(Item::Ready) => found.ready = true,
                Ok(Item::Message) => {
                    found.messages.push(reader.message().iter().map(|frame| frame.to_vec()).collect());
                }
                Err(reason) => {
                    found.refused = Some(reason);
                    return found;
                }
            }
        }
        found.replies.append(reader.replies());
        assert!(reader.waiting_bytes() <= MAX_MESSAGE_BYTES + piece.len() + 9);
    }
    found
}

fn refused(bytes: &[u8]) -> String {
    read(Talk::Subscribe, bytes, 1 << 16).refused.unwrap()
}

#[test]
fn messages_in_any_pieces() {
    let mut bytes = hello(b"NULL", b"PUB");
    frame(&mut bytes, COMMAND, b"\x04PING\0\0abc");
    frame(&mut bytes, COMMAND, b"\x06FUTURE?");
    frame(&mut bytes, 0, b"one");
    frame(&mut bytes, MORE, b"");
    frame(&mut bytes, MORE, &[7; 300]);
    frame(&mut bytes, COMMAND, b"\x04PING\0\0"); // libzmq answers and asks between frames, too
    frame(&mut bytes, 0, &[8; 70_000]);
    frame(&mut bytes, 0, b"");
    let expected = vec![vec![b"one".to_vec()], vec![vec![], vec![7; 300], vec![8; 70_000]], vec![Vec::new()]];
    for piece in [1, 2, 3, 7, 64, 65, 1000, bytes.len()] {
        let found = read(Talk::Subscribe, &bytes, piece);
        assert!(found.ready);
        assert_eq!(found.refused, None);
        assert!(found.messages == expected, "pieces of {piece}");
        assert_eq!(found.replies, b"\x04\x08\x04PONGabc\x04\x05\x04PONG");
    }
}

#[test]
fn a_message_is_bounded_in_bytes_and_in_frames() {
    let begun = || hello(b"NULL", b"XPUB");
    let too_large = format!("a message of more than {MAX_MESSAGE_BYTES} bytes");
    // One frame: its size is enough, its body need not come.
    let mut bytes = begun();
    bytes.push(2);
    bytes.extend((MAX_MESSAGE_BYTES as u64 + 1).to_be_bytes());
    assert_eq!(refused(&bytes), too_large);
    // Several frames.
    let mut bytes = begun();
    for _ in 0..5 {
        frame(&mut bytes, MORE, &vec![0; MAX_MESSAGE_BYTES / 4]);
    }
    assert_eq!(refused(&bytes), too_large);
    // Commands within a message count; between messages, they are gone.
    let mut bytes = begun();
    let commands = |bytes: &mut Vec<u8>| {
        for _ in 0..MAX_MESSAGE_BYTES / 200 + 1 {
            frame(bytes, COMMAND, &[0; 255]);
        }
    };
    commands(&mut bytes);
    assert_eq!(read(Talk::Subscribe, &bytes, 1 << 16).refused, None);
    frame(&mut bytes, MORE, b"");
    commands(&mut bytes);
    assert_eq!(refused(&bytes), too_large);
    // Frames without bytes.
    let mut bytes = begun();
    for _ in 0..MAX_FRAMES {
        frame(&mut bytes, MORE, b"");
    }
    assert_eq!(read(Talk::Subscribe, &bytes, 1 << 16).refused, None);
    frame(&mut bytes, 0, b"");
    assert_eq!(refused(&bytes), format!("a message of more than {MAX_FRAMES} frames"));
}

/// Most engines are silent at a time: their buffers do not stay as large as their largest message.
#[test]
fn silent_peers_keep_small_buffers() {
    for rest in [&b""[..], b"\0\x05begun"] {
        let mut reader = Reader::new(Talk::Subscribe);
        let mut bytes = hello(b"NULL", b"PUB");
        frame(&mut bytes, 0, &vec![7; 1 << 20]);
        bytes.extend(&rest[..rest.len().min(4)]);
        bytes.chunks(1 << 16).for_each(|piece| reader.push(piece));
        while reader.read() != Ok(Item::Nothing) {}
        reader.shrink();
        assert!(reader.capacity() <= 8 << 10, "{} bytes", reader.capacity());
        reader.push(rest.get(4..).unwrap_or_default());
        if !rest.is_empty() {
            assert_eq!(reader.read(), Ok(Item::Message));
            assert_eq!(reader.message()[0], b"begun");
        }
    }
}

#[test]
fn answers_to_heartbeats_are_bounded() {
    let mut reader = Reader::new(Talk::Subscribe);
    let mut bytes = hello(b"NULL", b"PUB");
    for _ in 0..10_000 {
        frame(&mut bytes, COMMAND, b"\x04PING\0\0sixteen bytes...");
    }
    reader.push(&bytes);
    while reader.read() != Ok(Item::Nothing) {}
    assert!(reader.replies().len() < 300);
}

#[test]
fn peers_that_are_no_publishers_are_named() {
    for (bytes, expected) in [
        (&b"HTTP/1.1 400 Bad Request\r\n\r\n"[..], "it does not speak ZMTP: it begins with \"HTTP/1.1 400"),
        (b"\xff\0\0\0\0\0\0\0\x01\x7f\x01", "it speaks ZMTP of a version before 3 (libzmq 4)"),
        (&hello(b"CURVE", b"PUB"), "its security mechanism is \"CURVE\": expected \"NULL\""),
        (&hello(b"NULL", b"PULL"), "its socket is of type \"PULL\": expected \"PUB\""),
    ] {
        let found = refused(bytes);
        assert!(found.starts_with(expected), "{found}");
    }
    let mut bytes = hello(b"NULL", b"PUB");
    bytes.truncate(64);
    frame(&mut bytes, COMMAND, b"\x05ERROR\x03no\n");
    assert_eq!(refused(&bytes), "it ends the handshake: \"no\\n\"");
    bytes.truncate(64);
    frame(&mut bytes, 0, b"early");
    assert_eq!(refused(&bytes), "it sends a message before the end of the handshake");
    bytes.truncate(64);
    frame(&mut bytes, COMMAND, b"\x05READY\xffx");
    assert_eq!(refused(&bytes), "it sends a READY that cannot be read");
    let found = read(Talk::Ask(3), &hello(b"NULL", b"ROUTER"), 10);
    assert!(found.ready);
}

/// Bytes that are nearly right: frames of any flags and sizes behind a right or changed greeting.
fn sayings() -> impl Strategy<Value = Vec<u8>> {
    let frames = prop::collection::vec((0u8..10, prop::collection::vec(any::<u8>(), 0..300)), 0..30);
    let change = prop::option::of((0usize..100, any::<u8>()));
    (frames, change).prop_map(|(frames, change)| {
        let mut bytes = hello(b"NULL", b"PUB");
        for (flags, body) in &frames {
            // Mostly flags that exist.
            frame(&mut bytes, if *flags > 6 { 0 } else { *flags & !2 }, body);
        }
        if let Some((at, byte)) = change {
            let at = at % bytes.len();
            bytes[at] = byte;
        }
        bytes
    })
}

proptest! {
    #[test]
    fn pieces_do_not_matter(bytes in sayings(), piece in 1usize..200) {
        let (whole, pieces) =
            (read(Talk::Subscribe, &bytes, bytes.len()), read(Talk::Subscribe, &bytes, piece));
        prop_assert_eq!(&whole.messages, &pieces.messages);
        prop_assert_eq!(whole.refused.is_some(), pieces.refused.is_some());
    }

    #[test]
    fn any_bytes_are_read_without_harm(bytes in prop::collection::vec(any::<u8>(), 0..500), piece in 1usize..99) {
        read(Talk::Ask(0), &bytes, piece);
    }
}
