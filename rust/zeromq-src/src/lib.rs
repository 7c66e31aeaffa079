//! `zeromq-src` 0.3 under the version number of 0.2: see this crate's `Cargo.toml`.
pub use zeromq_src_0_3::*;
