//! Routing decisions for fleets of LLM engines: the instance that runs each request.
//!
//! The crate has no I/O, no clock, no Python and no global state except the names of declared
//! indicators. Time and randomness are arguments. Equal inputs therefore give equal decisions in
//! the server, in the simulator and in tests.
//!
//! Dependencies go one way: `policy -> estimate, kv, indicators -> ids`. Only `router` uses all
//! modules.

// Unit tests and integration tests share fixtures that import this crate by its name.
#[cfg(test)]
extern crate self as lmetric_core;

pub mod admission;
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
pub mod program;
pub mod receipt;
pub mod registry;
pub mod request;
pub mod reschedule;
pub mod router;
pub mod settings;
pub mod split;
pub mod suggest;
pub mod warm;
mod wide;

pub use error::CoreError;
pub use ids::InstanceId;
pub use maturity::Maturity;
pub use registry::Registry;
