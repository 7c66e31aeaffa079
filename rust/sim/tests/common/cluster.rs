//! A base configuration for tests: round constants, so that times can be worked out by hand, and no
//! optional features.
#![allow(dead_code)]
use lmetric_core::guard::GuardConfig;
use lmetric_core::router::{IndexFeed, RouterConfig, Split};
use lmetric_sim::{
    Admission, ClusterConfig, MoveBy, Order, Preempt, Profile, Signals, SimulatedFetch, TokenSlo, Transfer,
};

/// A step takes 1 s, 0.1 s per decode, 0.001 s per context token and 0.01 s per prompt token.
pub fn round() -> Profile {
    Profile {
        fixed_seconds: 1.0,
        decode_seconds_per_sequence: 0.1,
        decode_seconds_per_context_token: 0.001,
        prefill_seconds_per_token: 0.01,
        prefill_seconds_per_attention_pair: 0.0,
        max_batch_tokens: 64,
        max_sequences: 8,
        block_tokens: 16,
        cache_blocks: 32,
        decode_throughput: None,
    }
}

/// Instances that take whole requests, with exact signals to the router.
pub fn config(profiles: Vec<Profile>) -> ClusterConfig {
    ClusterConfig {
        profiles,
        step_times: Vec::new(),
        roles: Vec::new(),
        transfer: Transfer::default(),
        fetching: SimulatedFetch::default(),
        admission: Admission::Reserve,
        cached_answers: false,
        session_final: false,
        reported_cache_ratio: 1.0,
        order: Order::default(),
        preempt: Preempt::Recompute,
        host: None,
        priorities: None,
        load: None,
        sharing_seconds: None,
        signals: Signals::EXACT,
        router: RouterConfig {
            index_feed: IndexFeed::Exact,
            guard: GuardConfig { on: false, ..GuardConfig::default() },
            ..RouterConfig::default()
        },
        split: Split::NONE,
        silent_segments: false,
        output_known: true,
        rebalance: None,
        move_by: MoveBy::Kv,
        changes: Vec::new(),
        timeline_seconds: 10.0,
        token_slo: TokenSlo::same(0.1),
    }
}
