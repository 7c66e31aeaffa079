//! Decisions and router totals.
use super::tickets::TicketId;
use crate::plan::{Failure, PrefixFetch, Segment};
use crate::priority::Priority;

/// The placement of a request.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Decision {
    /// Number of the decision and of its decision record.
    pub id: u64,
    /// Ticket of the request.
    pub ticket: TicketId,
    /// First segment. If it ends before the request does, another segment follows.
    pub segment: Segment,
    /// Second segment, if its instance is already chosen.
    pub next: Option<Segment>,
    /// Prefix fetch before the request begins.
    pub fetch: Option<PrefixFetch>,
    /// Predicted number of leading prompt tokens in the instance's cache, lower tiers included.
    pub predicted_hit_tokens: u32,
    /// How many of them come from a tier below the GPU.
    pub predicted_tier_tokens: u32,
    /// Priority for the engine's queue, if requests are ordered.
    pub priority: Option<Priority>,
}

/// Counters since the start.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Totals {
    /// Decisions made.
    pub decisions: u64,
    /// Requests that no instance could take.
    pub no_instance: u64,
    /// Requests that failed over to the next-best instance before their first token.
    pub retries: u64,
    /// Instances left out of a decision because an indicator was absent or the score was not
    /// finite.
    pub left_out: u64,
    /// Choices in which the policy scored no candidate, so that the fewest requests decided.
    pub unscored: u64,
    /// Decisions whose filter passed no instance and was waived.
    pub filter_waived: u64,
    /// Requests split by a planner, not by roles.
    pub split: u64,
    /// Running requests moved to another instance.
    pub moved: u64,
    /// Planned prefix fetches.
    pub fetches: u64,
    /// Fetched prompt tokens.
    pub fetched_tokens: u64,
    /// Successful requests.
    pub finished: u64,
    /// Tickets dropped while open.
    pub dropped: u64,
    /// Requests that failed without another attempt, by [`Failure::NAMES`].
    pub failed: [u64; Failure::NAMES.len()],
    /// Prompt tokens of successful requests, as reported or estimated.
    pub prompt_tokens: u64,
    /// Prompt tokens of the successful requests whose engines reported cached tokens.
    pub reported_prompt_tokens: u64,
    /// Cached tokens predicted for successful requests.
    pub predicted_cached_tokens: u64,
    /// Cached tokens that engines reported of successful requests.
    pub cached_tokens: u64,
    /// Output tokens received.
    pub output_tokens: u64,
}
