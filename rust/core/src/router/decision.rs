//! Where a request goes, and what is counted of all of them.
use super::tickets::TicketId;
use crate::plan::{Failure, Pull, Segment};
use crate::priority::Priority;

/// Where a request goes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Decision {
    /// Number of the decision and of its receipt.
    pub id: u64,
    /// Its ticket.
    pub ticket: TicketId,
    /// The first segment. Where it ends before the request does, another follows.
    pub segment: Segment,
    /// The one that follows it, where its instance is chosen already.
    pub next: Option<Segment>,
    /// What its instance is to fetch before it begins.
    pub pull: Option<Pull>,
    /// Leading prompt tokens that the instance is believed to hold.
    pub predicted_hit_tokens: u32,
    /// What it is given for its engine's queue, where requests are ordered.
    pub priority: Option<Priority>,
}

/// Counters since the start.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Totals {
    /// Decisions made.
    pub decisions: u64,
    /// Requests that no instance could take.
    pub no_instance: u64,
    /// Requests moved to the next of the ranking before their first token.
    pub retries: u64,
    /// Instances left out of a decision because an indicator was absent or the score was not a
    /// number.
    pub left_out: u64,
    /// Choices in which the policy scored no candidate, so that the fewest requests decided.
    pub unscored: u64,
    /// Decisions whose filter left nothing and was waived.
    pub filter_waived: u64,
    /// Requests cut at other places than where roles cut them.
    pub split: u64,
    /// Running requests moved to another instance.
    pub moved: u64,
    /// Prefixes that were to be pulled.
    pub pulls: u64,
    /// Prompt tokens that were pulled.
    pub pulled_tokens: u64,
    /// Requests ended well.
    pub finished: u64,
    /// Tickets dropped while open.
    pub dropped: u64,
    /// Requests failed for good, by [`Failure::NAMES`].
    pub failed: [u64; Failure::NAMES.len()],
    /// Prompt tokens of requests ended well, as reported or estimated.
    pub prompt_tokens: u64,
    /// Cached tokens predicted for requests whose engine reported the real number.
    pub predicted_cached_tokens: u64,
    /// Cached tokens that those engines reported.
    pub cached_tokens: u64,
    /// Output tokens seen.
    pub output_tokens: u64,
}
