//! The lifecycle of a request, from its commit through its segments to its end. The table in
//! `machine` maps events to effects; `Lifecycle` applies them.
mod commit;
mod events;
mod fetch;
mod machine;
mod moves;
mod segments;
mod writer;

pub use moves::Carry;
pub(super) use writer::Lifecycle;
