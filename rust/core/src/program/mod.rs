//! Agent programs: chains of requests that share a growing context.
//!
//! A program sends a request, waits for its answer, runs a tool and sends the next request, whose
//! prompt extends the last one. Between its requests it needs its context in a cache: computing a
//! long context again costs tens of seconds. If the contexts of all live programs exceed the
//! fleet's caches, every score collapses, because each return evicts the context of another
//! program. [`Programs`] follows the programs, counts their expected tokens on each instance, and
//! can hold requests so that the working set fits ("admission by working set").
//!
//! A program is found by the lineage of its prompts ([`lineage`]); no client has to name it. Its
//! probability to return is learned from the gaps between its requests ([`gaps`]). Each instance
//! has a ledger of expected tokens ([`ledger`]). The state machine of programs and turns is in
//! [`programs`], the choice of programs to pause and to admit in [`admission`]. `waste` measures
//! whether holding pays. [`Programs`] alone composes: it owns the other parts, which do not know
//! it. `admission`, `filing`, `copies` and `peers` add its methods. [`followed`] shares it
//! between the workers of a server, and [`exchange`] has what routers publish of their programs.
//!
//! A turn is one request of a program, from its arrival to its end.
pub mod admission;
pub mod capacity;
mod copies;
mod entry;
pub mod exchange;
mod filing;
pub mod followed;
pub mod gaps;
pub mod ledger;
pub mod lineage;
mod peers;
pub mod programs;
mod published;
mod queue;
mod rules;
mod sets;
pub mod settings;
#[cfg(test)]
pub(crate) mod tests;
#[cfg(test)]
mod tests_bounds;
#[cfg(test)]
mod tests_levels;
mod types;
mod waste;

pub use entry::Program;
pub use exchange::{MAX_PUBLISHED, PeerProgram, PeerPrograms};
pub use followed::Followed;
pub use gaps::{Finish, GapClass, Gaps};
pub use lineage::Prompt;
pub use programs::Programs;
pub use rules::{ProgramRules, Terms};
pub use settings::{AGING_SECONDS, ProgramConfig, ProgramMode};
pub use types::{Arrival, Hold, ProgramId, ProgramNote, Root, SOON_SECONDS, State, TurnId, Verdict, Work};
