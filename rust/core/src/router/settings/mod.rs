//! Settings of a router.
mod fetch;
mod tiers;

pub use fetch::FetchConfig;
pub use tiers::TierConfig;

use crate::estimate::StepTime;
use crate::guard::GuardConfig;
use crate::plan::Binding;
use crate::program::ProgramConfig;
use crate::warm::WarmConfig;

/// Source of the entries in the KV index.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum IndexFeed {
    /// The router's own placements: placed prompts are assumed to be cached.
    #[default]
    Approximate,
    /// The engines' events.
    Exact,
}

/// Settings of a router.
#[derive(Clone, Debug)]
pub struct RouterConfig {
    /// Source of the entries in the KV index.
    pub index_feed: IndexFeed,
    /// Maximum bytes of the KV index.
    pub index_bytes: usize,
    /// Maximum bytes of the decision records.
    pub record_bytes: usize,
    /// Seed of every random choice.
    pub seed: u64,
    /// Whether queued prefill tokens drain between events at the learned rate (off if progress is
    /// reported exactly).
    pub drain: bool,
    /// The hot-spot guard.
    pub guard: GuardConfig,
    /// Step-time model behind `predicted_ttft_seconds`; `None`: learned models only.
    pub step_time: Option<StepTime>,
    /// Prefill rate until one is learned, in tokens/s.
    pub prior_prefill_tokens_per_second: f64,
    /// Whether engines cache the partial last block of a prompt, so that all but one token can be
    /// cached. (vLLM does not.)
    pub partial_blocks: bool,
    /// When the instance of a second segment is chosen.
    pub binding: Binding,
    /// Whether an instance takes a whole request, regardless of its role, if no instance of the
    /// other role is available.
    pub colocate: bool,
    /// Whether a prefill never waits for others on its instance, so that the expected handoff
    /// includes no queue (SIBYL, Algorithm 2).
    pub unlimited_prefill: bool,
    /// Settings of prefix fetches; `None`: off.
    pub fetch: Option<FetchConfig>,
    /// How agent programs are followed and admitted; `None`: not at all.
    pub programs: Option<ProgramConfig>,
    /// How the tiers below the GPU count in scores.
    pub tiers: TierConfig,
    /// How instances join and leave warm; `None`: they do so cold.
    pub warm: Option<WarmConfig>,
}

impl Default for RouterConfig {
    fn default() -> Self {
        RouterConfig {
            index_feed: IndexFeed::Approximate,
            index_bytes: 512 << 20,
            record_bytes: 16 << 20,
            seed: 0,
            drain: true,
            guard: GuardConfig::default(),
            step_time: None,
            prior_prefill_tokens_per_second: 8000.0,
            partial_blocks: false,
            binding: Binding::Early,
            colocate: true,
            unlimited_prefill: false,
            fetch: None,
            programs: None,
            tiers: TierConfig::default(),
            warm: None,
        }
    }
}
