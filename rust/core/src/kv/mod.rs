//! Cached prefixes: for each instance, the number of leading blocks of a prompt that it holds.
pub mod groups;
pub mod hash;
pub mod index;
pub mod keys;
pub mod media;
pub(crate) mod names;
mod table;
pub mod tier;
pub mod tiers;

pub use table::prefetch;
