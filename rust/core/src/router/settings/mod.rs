//! What a router is set up with.
mod fetch;
mod rescheduling;

pub use fetch::PullConfig;
pub use rescheduling::{RescheduleConfig, Rescheduling, Rule};

use crate::estimate::StepTime;
use crate::guard::GuardConfig;
use crate::plan::Binding;

/// Who feeds the KV index.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum IndexFeed {
    /// The router itself: what it placed somewhere is believed to be cached there.
    #[default]
    Approximate,
    /// The engines' own events.
    Exact,
}

/// Settings of a router.
#[derive(Clone, Debug)]
pub struct RouterConfig {
    /// Who feeds the KV index.
    pub index_feed: IndexFeed,
    /// Most bytes that the KV index may take.
    pub index_bytes: usize,
    /// Most bytes that the receipts may take.
    pub receipt_bytes: usize,
    /// Seed of every random choice.
    pub seed: u64,
    /// Whether queued prefill tokens drain between events by the learned cost of prefills (off
    /// where progress is reported exactly).
    pub drain: bool,
    /// The hot-spot guard.
    pub guard: GuardConfig,
    /// Step-time model behind `predicted_ttft_seconds`; without one, what is learned serves.
    pub step_time: Option<StepTime>,
    /// Prefill rate assumed until one was learned, in tokens/s.
    pub prior_prefill_tokens_per_second: f64,
    /// Whether engines keep the partial last block of a prompt too, so that all but one token may
    /// be cached. (vLLM does not.)
    pub partial_blocks: bool,
    /// When the instance of a second segment is chosen.
    pub binding: Binding,
    /// Whether an instance takes a whole request, whatever its role, where nobody of the other role
    /// is there.
    pub colocate: bool,
    /// Whether a prefill never waits for others on its instance, so that the expected hand-over
    /// counts no queue (SIBYL, Algorithm 2).
    pub unlimited_prefill: bool,
    /// When prefixes are pulled from other instances; `None`: never.
    pub pull: Option<PullConfig>,
}

impl Default for RouterConfig {
    fn default() -> Self {
        RouterConfig {
            index_feed: IndexFeed::Approximate,
            index_bytes: 512 << 20,
            receipt_bytes: 16 << 20,
            seed: 0,
            drain: true,
            guard: GuardConfig::default(),
            step_time: None,
            prior_prefill_tokens_per_second: 8000.0,
            partial_blocks: false,
            binding: Binding::Early,
            colocate: true,
            unlimited_prefill: false,
            pull: None,
        }
    }
}
