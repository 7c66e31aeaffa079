//! Warm fleet changes: an instance that joins first fetches the prefixes that it will need, and the
//! prefixes of an instance that leaves are copied to other instances first.
//!
//! [`Demand`] remembers the prompts of recent requests. From them and from the KV index, [`plan`]
//! makes the list of prefixes to fetch. [`Warming`] starts these fetches one after another, within
//! limits. Nothing here does I/O: the simulator and the server make the fetches.
mod demand;
mod paths;
pub mod plan;
mod progress;
mod settings;
#[cfg(test)]
mod tests;

pub use demand::{Demand, Prompt};
pub use plan::{Fetch, Fleet};
pub use progress::Warming;
pub use settings::WarmConfig;
