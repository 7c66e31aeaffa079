//! The engine model: continuous batching, chunked prefill under a token budget, a block prefix cache, preemption.
//!
//! [`Engine`] is one instance, without a clock: the caller says what time it is, so that the simulator's event loop and
//! the emulated engine's real time play the same model. [`Generator`] gives the text of the emulated engines.

pub mod engine;
pub mod events;
pub mod hash;
pub mod pool;
pub mod profile;
mod sequence;
pub mod text;

pub use engine::{Admission, Engine, Order, Prompt, Request, Settings};
pub use events::{Counters, KvEvent, KvLog, Load, StepEvents};
pub use profile::{Profile, StepWork};
pub use text::Generator;
