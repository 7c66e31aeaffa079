//! Cached prefixes: for each instance, the number of leading blocks of a prompt that it holds.
//!
//! A prompt is a chain of block hashes ([`hash`], [`media`], with the scheme of [`keys`]). The
//! [`index`] finds the prefix of a chain on each instance. Lower tiers ([`tier`], [`tiers`]) and
//! groups of layers ([`groups`]) have indexes of their own. Engines name blocks by hashes of their
//! own ([`names`]). [`predictions`] are entered between events. Computed prompts are [`expected`]
//! until events report them. The crate knows no requests and no policies.
#![warn(unreachable_pub)]
pub mod expected;
pub mod groups;
pub mod hash;
pub mod index;
mod instance;
pub mod keys;
mod lines;
pub mod media;
pub mod names;
pub mod predictions;
mod table;
pub mod tier;
pub mod tiers;

pub use instance::{MAX_INSTANCES, Slot};
