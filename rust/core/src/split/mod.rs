//! Where to cut a request between two instances: Libra (NSDI 2026), sections 3.1 and 4.1.
//!
//! Pure: loads and step times come in as plain numbers, a cut and its reason come out. Nothing is allocated.
//!
//! **The measure** is work, as in the paper's Figure 5: an instance's seconds `T` are those until it has done all that is assigned to it,
//! each step's fixed cost shared by the batch that it runs with ([`predict`]). Where `T1 = T2`, neither waits for the other in the long run.
//!
//! **Whether it pays** is left open by the paper ("when the system is underutilized ... FPS may avoid partitioning", 3.1). The two parts of one
//! request never run at the same time. So a cut gains only where the second instance has other work until the first part is handed over;
//! on two idle instances the request takes as long as whole, and the transfer besides. [`libra::search`] counts that wait in.
pub mod apart;
pub mod libra;
pub mod predict;

pub use libra::{force_at, search};

use crate::ids::Seconds;
use crate::plan::Cuts;

/// What is assigned to an instance already, decoding or not yet begun, bound there or running.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Load {
    /// Prompt tokens still to be computed.
    pub queued_prefill_tokens: f64,
    /// Their attention pairs ([`crate::estimate::attention_pairs`]).
    pub queued_prefill_pairs: f64,
    /// Sequences that decode together: now, or in the instance's recent batches.
    pub decoding: f64,
    /// Context tokens of them all.
    pub context_tokens: f64,
    /// Output tokens that all requests assigned there have yet to get.
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

/// The request that may be cut.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Whole {
    /// P: prompt tokens.
    pub prompt_tokens: u32,
    /// Leading prompt tokens cached on the first instance.
    pub first_hit_tokens: u32,
    /// The same on the second.
    pub second_hit_tokens: u32,
    /// D: output tokens that it is expected to get; the caller adds a margin, if any.
    pub expected_output_tokens: u32,
}

impl Whole {
    /// P + D.
    pub fn tokens(&self) -> u32 {
        self.prompt_tokens.saturating_add(self.expected_output_tokens)
    }
}

/// How to search.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Settings {
    /// K: probes at most (the paper's 6); 1 to 32.
    pub probes: u32,
    /// Gap of `T1` and `T2` that counts as balance, as a share of the request's own seconds; 0 to 1. 0.05 by default: six probes of a request of
    /// any length leave a gap of 0.03 on equal instances, and figures of loads and lengths are not better than that. A share of `T` itself
    /// would be met at once wherever queues are long.
    pub epsilon: f64,
    /// What a cut must gain over the whole request on the better of both, as a share of its own seconds; at most 1. On equal instances that have work
    /// enough, a balanced cut gains a half. `None`: every balance found is a cut, as in Algorithm 1.
    pub least_gain: Option<f64>,
    /// Tokens that each part has to compute or make at least; 1 or more. 32 by default: fewer do not pay for the hand-over's messages.
    pub least_tokens: u32,
    /// Seconds of a hand-over that do not overlap with the first part, for each token moved; 0 or more.
    pub transfer_seconds_per_token: Seconds,
    /// Seconds that each hand-over takes besides; 0 or more.
    pub transfer_fixed_seconds: Seconds,
    /// Where both engines are able to cut.
    pub cuts: Cuts,
}

impl Default for Settings {
    fn default() -> Settings {
        Settings {
            probes: 6,
            epsilon: 0.05,
            least_gain: Some(0.05),
            least_tokens: 32,
            transfer_seconds_per_token: 0.0,
            transfer_fixed_seconds: 0.0,
            cuts: Cuts::Anywhere,
        }
    }
}

/// Why a request is cut or left whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Why {
    /// Balanced within epsilon.
    Balanced,
    /// The best of the probes; balance lies between two of them, or outside of what the engines are able to.
    Nearest,
    /// Whole: it would end sooner, or as soon.
    NoGain,
    /// Whole: a part would be too small.
    TooShort,
    /// Whole: the engines cannot hand over.
    Unable,
    /// Whole: nothing is known of the instances' speed (the paper's cold start, erratum 9), or a figure is none.
    Unknown,
}

impl Why {
    /// For receipts.
    pub fn text(self) -> &'static str {
        match self {
            Why::Balanced => "balanced",
            Why::Nearest => "as near to balance as it gets",
            Why::NoGain => "a cut gains nothing",
            Why::TooShort => "too short to be cut",
            Why::Unable => "its instances cannot hand over",
            Why::Unknown => "speeds or loads are not known",
        }
    }
}

/// What a search found.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Found {
    /// s: tokens of the first part; `None`: not cut.
    pub cut_token: Option<u32>,
    /// s / (P + D) of the best probe, cut or not; NaN where none was made.
    pub phi: f64,
    /// Probes made.
    pub probes: u32,
    /// T1: seconds until the first instance has done all that it has, the first part included; NaN where no probe was made.
    pub seconds_first: Seconds,
    /// T2: the same of the second instance.
    pub seconds_second: Seconds,
    /// When the pair is done, the second part's wait for the first counted in.
    pub seconds_cut: Seconds,
    /// The same with the request whole, on the better of both.
    pub seconds_whole: Seconds,
    /// Whether the better of both is the second one.
    pub whole_on_second: bool,
    /// Why.
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
