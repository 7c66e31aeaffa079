//! Receives the engines' KV cache events over ZMQ and applies them to a router's index, on its own
//! thread.
//!
//! `decode` reads MessagePack, and `event` reads the engines' events from it. `stream` keeps each
//! engine's batches in order and complete. `apply` turns events into blocks of the index. `zmtp`
//! reads the protocol of ZMQ's sockets. These modules do no I/O; `connection` does, on the thread
//! that `subscriber` runs.
#![forbid(unsafe_code)]
pub mod apply;
mod connection;
pub mod decode;
mod early;
pub mod event;
mod extra;
pub mod fork;
mod groups;
mod heartbeat;
pub mod load;
pub mod source;
pub mod status;
pub mod stream;
pub mod subscriber;
pub mod weights;
pub mod zmtp;

pub use subscriber::{EventFeed, Subscription, rank_endpoint};
