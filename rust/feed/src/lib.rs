//! Hears the engines' KV cache events over ZMQ and applies them to a router's index, on a thread of its own.
//!
//! `decode` reads MessagePack, `event` what engines make of it, `stream` keeps each engine's batches in order and whole, `apply`
//! turns events into blocks of the index. None of them does I/O; `subscriber` is the thread that does.
#![forbid(unsafe_code)]
pub mod apply;
pub mod decode;
pub mod event;
mod heartbeat;
pub mod source;
pub mod status;
pub mod stream;
pub mod subscriber;

pub use subscriber::{EventFeed, Subscription, rank_endpoint};
