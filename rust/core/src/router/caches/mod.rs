//! The engines' caches, as the router knows them (`content`). They have a lock of their own
//! (`lock`): events change them beside decisions. Predictions are queued.
//!
//! The feed of the engines' events ([`crate::feed`]) changes the indexes through
//! [`SharedCaches::write_behind`]. It also opens and empties them ([`Caches::open_tier`],
//! [`Caches::open_groups`], [`Caches::empty`]) and notes what removals show
//! ([`Caches::note_removal`], [`Caches::forget_full`]). It never calls the router from there.
mod content;
mod lock;

pub use content::{Caches, PrefixMatch};
pub(super) use lock::check_free;
pub use lock::{Reading, SharedCaches, Writing};
