//! Simulations: the engine model (continuous batching, chunked prefill under a token budget, a
//! block prefix cache, preemption), and clusters of such engines around the real router.
//!
//! [`Engine`] is one instance without a clock: the caller gives the time. So the simulator's event
//! loop and the emulated engine's real time use the same model. [`Generator`] makes the text of the
//! emulated engines.
#![forbid(unsafe_code)]

pub mod cache;
pub mod cluster;
pub mod engine;
pub mod events;
pub mod gaps;
pub mod hash;
pub mod hash_ids;
pub mod pool;
pub mod profile;
pub mod record;
mod routers;
mod sequence;
pub mod signals;
pub mod text;
pub mod transfer;
pub mod workload;

pub use cluster::{
    ChangeRecord, ClusterConfig, FleetChange, MoveBy, Outcome, Recompute, SimulatedFetch, simulate,
};
pub use engine::order::{Order, OrderSpec, TOKEN_SECONDS};
pub use engine::{Admission, Engine, HostTier, Preempt, Prompt, Request, Settings};
pub use events::{Counters, KvEvent, KvLog, Load, StepEvents};
pub use gaps::{DEFAULT_TOKEN_SLO_SECONDS, GapHistogram, Gaps, Makes, TokenSlo};
pub use hash_ids::HashIds;
pub use profile::{DecodeThroughput, Profile, StepWork};
pub use record::{Quantity, Records, Timeline};
pub use routers::Policies;
pub use signals::Signals;
pub use text::Generator;
pub use transfer::{Overlap, Transfer};
pub use workload::{Trace, Workload};
