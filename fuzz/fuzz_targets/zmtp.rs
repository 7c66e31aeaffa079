//! Bytes of publishers: the same messages, answers and verdict in one piece as in small ones, and
//! never more bytes kept than a message may have.
#![no_main]
// Only the module: fuzzing needs nothing else of its crate.
#[allow(dead_code)]
#[path = "../../rust/feed/src/zmtp.rs"]
mod zmtp;

use libfuzzer_sys::fuzz_target;
use zmtp::{Item, MAX_MESSAGE_BYTES, Reader, Talk};

#[derive(Debug, Default, PartialEq)]
struct Found {
    messages: Vec<Vec<Vec<u8>>>,
    is_ready: bool,
    is_refused: bool,
}

fn read(bytes: &[u8], piece: usize) -> Found {
    let (mut reader, mut found) = (Reader::new(Talk::Subscribe), Found::default());
    for piece in bytes.chunks(piece) {
        reader.push(piece);
        loop {
            match reader.read() {
                Ok(Item::Nothing) => break,
                Ok(Item::Ready) => found.is_ready = true,
                Ok(Item::Message) => {
                    found.messages.push(reader.message().iter().map(|frame| frame.to_vec()).collect());
                }
                Err(_) => {
                    found.is_refused = true;
                    return found;
                }
            }
        }
        assert!(reader.waiting_bytes() <= MAX_MESSAGE_BYTES + piece.len());
        assert!(reader.replies().len() < 300);
    }
    found
}

fuzz_target!(|data: &[u8]| {
    // The first byte is the size of the pieces. Most inputs would end in the handshake: they begin
    // behind it, or with it.
    let Some((first, data)) = data.split_first() else { return };
    let mut bytes = Vec::new();
    if first & 1 == 0 {
        bytes = vec![0; 64];
        (bytes[0], bytes[9], bytes[10]) = (0xff, 0x7f, 3);
        bytes[12..16].copy_from_slice(b"NULL");
        bytes.extend_from_slice(b"\x04\x19\x05READY\x0bSocket-Type\0\0\0\x03PUB");
    }
    bytes.extend_from_slice(data);
    assert_eq!(read(&bytes, bytes.len().max(1)), read(&bytes, usize::from(*first) / 2 + 1));
});
