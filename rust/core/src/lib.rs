//! Decides where each request of a fleet of LLM engines runs.
//!
//! No I/O, no clock, no global state but the names of declared indicators, no Python: time and randomness come in as arguments, so the same inputs
//! give the same decisions in the server, in the simulator and in a test.
//!
//! Arrows point one way: `policy -> estimate, kv, indicators -> ids`; only `router` sees all.

// The tests' hand-made snapshots are shared with the integration tests, which know this crate by its name.
#[cfg(test)]
extern crate self as lmetric_core;

pub mod error;
pub mod estimate;
pub mod expr;
pub mod fleet;
pub mod guard;
pub mod ids;
pub mod indicators;
pub mod kv;
pub mod maturity;
pub mod plan;
pub mod policy;
pub mod priority;
pub mod receipt;
pub mod registry;
pub mod request;
pub mod reschedule;
pub mod router;
pub mod settings;
pub mod split;
pub mod suggest;
mod wide;

pub use error::CoreError;
pub use ids::InstanceId;
pub use maturity::Maturity;
pub use registry::Registry;
