//! Boards of several workers in one process.
use lmetric_core::board::{BYTES, Board, Memory};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

struct Shared(Arc<Box<[AtomicU64]>>);

impl Memory for Shared {
    fn words(&self) -> &[AtomicU64] {
        &self.0
    }
}

pub fn memory() -> Arc<Box<[AtomicU64]>> {
    Arc::new((0..BYTES / size_of::<u64>()).map(|_| AtomicU64::new(0)).collect())
}

pub fn board(memory: &Arc<Box<[AtomicU64]>>, writer: usize) -> Arc<Board> {
    Arc::new(Board::new(Box::new(Shared(memory.clone())), writer).unwrap())
}
