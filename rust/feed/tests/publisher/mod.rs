//! A publisher of these tests: ZMTP over blocking TCP. Tests in Python use libzmq's.
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};

/// A publisher and its subscribers.
pub struct Publisher {
    listener: TcpListener,
    /// Minor version of ZMTP 3.
    pub minor: u8,
    subscribers: Vec<TcpStream>,
}

impl Publisher {
    pub fn new() -> Publisher {
        Publisher { listener: TcpListener::bind("127.0.0.1:0").unwrap(), minor: 1, subscribers: Vec::new() }
    }

    pub fn endpoint(&self) -> String {
        format!("tcp://{}", self.listener.local_addr().unwrap())
    }

    /// Waits for a connection and its subscription to all topics.
    pub fn accept(&mut self) {
        let (mut peer, _) = self.listener.accept().unwrap();
        let mut hello = vec![0; 64];
        (hello[0], hello[9], hello[10], hello[11]) = (0xff, 0x7f, 3, self.minor);
        hello[12..16].copy_from_slice(b"NULL");
        hello.extend(b"\x04\x19\x05READY\x0bSocket-Type\0\0\0\x03PUB");
        peer.write_all(&hello).unwrap();
        let mut told = vec![0; 64 + b"\x04\x19\x05READY\x0bSocket-Type\0\0\0\x03SUB".len() + 3];
        peer.read_exact(&mut told).unwrap();
        assert!(told.ends_with(b"SUB\0\x01\x01"), "a subscription to all topics: {}", told.escape_ascii());
        self.subscribers.push(peer);
    }

    /// Returns the newest subscriber.
    #[allow(dead_code)] // not all tests do
    pub fn accepted(&mut self) -> &mut TcpStream {
        self.subscribers.last_mut().unwrap()
    }

    /// Sends a message to the newest subscriber, as far as it reads.
    pub fn send(&mut self, frames: &[&[u8]]) {
        let mut bytes = Vec::new();
        for (number, frame) in frames.iter().enumerate() {
            bytes.push(2 | u8::from(number + 1 < frames.len()));
            bytes.extend((frame.len() as u64).to_be_bytes());
            bytes.extend(*frame);
        }
        // A subscriber ends the connection in the middle of a message that is too large.
        let _ = self.accepted().write_all(&bytes);
    }
}
