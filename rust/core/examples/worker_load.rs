//! The cost of one worker's change of load for another worker: in shared memory, and over a Unix
//! socket that the other worker reads before its decision.
//!
//! ```text
//! cargo run --release -p lmetric-core --example worker_load
//! ```
use lmetric_core::board::{BYTES, Board, Memory, NUMBERS};
use std::os::unix::net::UnixDatagram;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Instant;

const CHANGES: u32 = 200_000;
const ROUNDS: usize = 9;

struct Shared(Arc<Box<[AtomicU64]>>);

impl Memory for Shared {
    fn words(&self) -> &[AtomicU64] {
        &self.0
    }
}

/// Returns the nanoseconds of one call.
fn timed(mut call: impl FnMut(u32)) -> f64 {
    let began = Instant::now();
    (0..CHANGES).for_each(&mut call);
    began.elapsed().as_nanos() as f64 / f64::from(CHANGES)
}

fn main() {
    let words: Arc<Box<[AtomicU64]>> =
        Arc::new((0..BYTES / size_of::<u64>()).map(|_| AtomicU64::new(0)).collect());
    let board = |writer| Board::new(Box::new(Shared(words.clone())), writer).expect("an area of the memory");
    let (one, two) = (board(0), board(1));
    let row = one.take().expect("a row");
    let (from, to) = UnixDatagram::pair().expect("a pair of sockets");
    to.set_nonblocking(true).expect("a socket");
    let mut buffer = [0_u8; NUMBERS * 8];
    let mut rows = Vec::new();
    println!("nanoseconds: median of {ROUNDS} rounds (least, most)");
    let mut cells: Vec<(&str, Vec<f64>)> = Vec::new();
    let mut note = |name, value| match cells.iter_mut().find(|(known, _)| *known == name) {
        Some((_, values)) => values.push(value),
        None => cells.push((name, vec![value])),
    };
    for _ in 0..ROUNDS {
        note(
            "memory: write a change, and read it",
            timed(|change| {
                let since = two.changes(0);
                one.write(row, 7, &[f64::from(change); NUMBERS]);
                assert!(two.changed(0, since, two.changes(0), &mut rows));
                assert!(two.read(0, rows[0]).is_some_and(|(key, _)| key == 7));
            }),
        );
        note(
            "memory: look for a change in vain",
            timed(|_| {
                two.others().for_each(|writer| _ = std::hint::black_box(two.changes(writer)));
            }),
        );
        note(
            "socket: send a change, and receive it",
            timed(|change| {
                buffer.fill(change as u8);
                from.send(&buffer).expect("room");
                to.recv(&mut buffer).expect("a message");
            }),
        );
        note(
            "socket: look for a change in vain",
            timed(|_| {
                assert!(to.recv(&mut buffer).is_err());
            }),
        );
    }
    for (name, mut values) in cells {
        values.sort_by(f64::total_cmp);
        println!("{:8.0} ({:.0}, {:.0})  {name}", values[ROUNDS / 2], values[0], values[ROUNDS - 1]);
    }
}
