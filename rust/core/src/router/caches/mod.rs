//! The engines' caches, as the router knows them (`content`). They have a lock of their own
//! (`lock`): events change them beside decisions. Predictions are queued (`predictions`).
mod content;
mod lock;
mod predictions;

pub(super) use content::Hits;
pub use content::{Caches, PrefixMatch};
pub(super) use lock::check_free;
pub use lock::{Reading, SharedCaches, Writing};
pub(super) use predictions::Prediction;
