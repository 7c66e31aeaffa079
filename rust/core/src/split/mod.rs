//! Request splitting between two instances: Libra (NSDI 2026), sections 3.1 and 4.1.
//!
//! The functions are pure: loads and step times are plain numbers, the result is a split and its
//! reason. They do not allocate.
//!
//! **Measure.** As in the paper's Figure 5, `T` is the seconds until an instance has done all its
//! assigned work. The batch shares each step's fixed cost ([`predict`]). If `T1 = T2`, neither
//! instance waits for the other in the long run.
//!
//! **When a split pays** is left open by the paper ("when the system is underutilized ... FPS may
//! avoid partitioning", 3.1). The two parts of a request never run at the same time. So a split
//! gains only if the second instance has other work until the KV of the first part arrives. On two
//! idle instances the request takes as long as whole, plus the transfer. [`libra::search`] includes
//! that wait.
pub mod apart;
pub mod libra;
pub mod predict;

pub use libra::search;

use crate::ids::Seconds;
use crate::plan::Cuts;

/// Work already assigned to an instance: running, waiting or bound to it.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Load {
    /// Prompt tokens not yet computed.
    pub queued_prefill_tokens: f64,
    /// Attention pairs of these tokens ([`crate::estimate::attention_pairs`]).
    pub queued_prefill_pairs: f64,
    /// Sequences that decode together: now, or in the instance's recent batches.
    pub decoding: f64,
    /// Context tokens of all these sequences.
    pub context_tokens: f64,
    /// Output tokens that all assigned requests have yet to generate.
    pub remaining_output_tokens: f64,
}

impl Load {
    fn check(&self) -> bool {
        let Load {
            queued_prefill_tokens,
            queued_prefill_pairs,
            decoding,
            context_tokens,
            remaining_output_tokens,
        } = *self;
        [queued_prefill_tokens, queued_prefill_pairs, decoding, context_tokens, remaining_output_tokens]
            .iter()
            .all(|x| (0.0..1e15).contains(x))
    }
}

/// A request that may be split.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Whole {
    /// P: prompt tokens.
    pub prompt_tokens: u32,
    /// Leading prompt tokens cached on the first instance.
    pub first_hit_tokens: u32,
    /// Leading prompt tokens cached on the second instance.
    pub second_hit_tokens: u32,
    /// D: expected output tokens, including the caller's margin, if any.
    pub expected_output_tokens: u32,
}

impl Whole {
    /// Returns P + D.
    pub fn tokens(&self) -> u32 {
        self.prompt_tokens.saturating_add(self.expected_output_tokens)
    }
}

/// Settings of the search.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Settings {
    /// K: maximum number of probes (the paper: 6); 1 to 32.
    pub probes: u32,
    /// Gap of `T1` and `T2` that counts as balance, as a fraction of the request's own seconds; 0
    /// to 1. Default 0.05: six probes leave a gap of 0.03 on equal instances for any request
    /// length, and load and length estimates are less accurate than that. With a fraction of `T`
    /// itself, any split would count as balanced if queues are long.
    pub epsilon: f64,
    /// Minimum gain of a split over the whole request on the better instance, as a fraction of the
    /// request's own seconds; at most 1. On equal instances with enough work, a balanced split
    /// gains one half. `None`: split at every balance found, as in Algorithm 1.
    pub min_gain: Option<f64>,
    /// Minimum tokens that each part computes or generates; 1 or more. Default 32: fewer tokens do
    /// not pay for the handoff's messages.
    pub min_tokens: u32,
    /// Seconds of a KV transfer that do not overlap with the first part, per transferred token; 0
    /// or more.
    pub transfer_seconds_per_token: Seconds,
    /// Fixed seconds per KV transfer; 0 or more.
    pub transfer_fixed_seconds: Seconds,
    /// Positions at which both engines can split.
    pub cuts: Cuts,
}

impl Default for Settings {
    fn default() -> Settings {
        Settings {
            probes: 6,
            epsilon: 0.05,
            min_gain: Some(0.05),
            min_tokens: 32,
            transfer_seconds_per_token: 0.0,
            transfer_fixed_seconds: 0.0,
            cuts: Cuts::Anywhere,
        }
    }
}

/// Reason why a request is split or left whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Why {
    /// Balanced within epsilon.
    Balanced,
    /// The best of the probes: balance lies between two probes, or outside the range that the
    /// engines support.
    Nearest,
    /// Whole: it would end no later.
    NoGain,
    /// Whole: one part would be too small.
    TooShort,
    /// Whole: the engines cannot transfer KV.
    Unable,
    /// Whole: an instance's speed is unknown (the paper's cold start, erratum 9), or a figure is
    /// not a valid number.
    Unknown,
}

impl Why {
    /// Returns the text for decision records.
    pub fn text(self) -> &'static str {
        match self {
            Why::Balanced => "balanced",
            Why::Nearest => "the nearest to balance",
            Why::NoGain => "a split gains nothing",
            Why::TooShort => "too short to split",
            Why::Unable => "its instances cannot transfer KV",
            Why::Unknown => "speeds or loads are unknown",
        }
    }
}

/// Result of a search.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Found {
    /// s: tokens of the first part; `None`: not split.
    pub cut_token: Option<u32>,
    /// s / (P + D) of the best probe, whether split or not; NaN if no probe was made.
    pub phi: f64,
    /// Number of probes made.
    pub probes: u32,
    /// T1: seconds until the first instance has done all its work, including the first part; NaN if
    /// no probe was made.
    pub seconds_first: Seconds,
    /// T2: seconds until the second instance has done all its work, including the second part; NaN
    /// if no probe was made.
    pub seconds_second: Seconds,
    /// Seconds until the pair is done with a split, including the second part's wait for the first.
    pub seconds_cut: Seconds,
    /// Seconds until the pair is done with the whole request on the better instance.
    pub seconds_whole: Seconds,
    /// Whether the second instance is the better one for the whole request.
    pub whole_on_second: bool,
    /// Reason for the result.
    pub why: Why,
}

impl Found {
    fn whole(why: Why) -> Found {
        Found {
            cut_token: None,
            phi: f64::NAN,
            probes: 0,
            seconds_first: f64::NAN,
            seconds_second: f64::NAN,
            seconds_cut: f64::NAN,
            seconds_whole: f64::NAN,
            whole_on_second: false,
            why,
        }
    }
}
