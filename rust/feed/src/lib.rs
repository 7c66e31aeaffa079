//! Receives the engines' KV cache events over ZMQ and applies them to a router's index, on its own
//! thread.
//!
//! `decode` reads MessagePack, and `event` reads the engines' events from it. `stream` keeps each
//! engine's batches in order and complete. `apply` turns events into blocks of the index. These
//! modules do no I/O; `subscriber` runs the thread that does.
#![forbid(unsafe_code)]
pub mod apply;
pub mod decode;
mod early;
pub mod event;
mod extra;
mod groups;
mod heartbeat;
mod peers;
pub mod source;
pub mod status;
pub mod stream;
pub mod subscriber;

pub use subscriber::{EventFeed, Subscription, rank_endpoint};
