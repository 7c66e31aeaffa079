//! What the router knows of a request when it decides.
use crate::error::CoreError;

/// A request to be placed. Borrowed: nothing is copied on the way to the decision.
#[derive(Clone, Debug, Default)]
pub struct Request<'a> {
    /// Chained hashes of the prompt's full blocks (see [`crate::kv::hash`]), in order; its partial last block's too, where engines
    /// keep that one. Empty: nothing can match.
    pub chain: &'a [u64],
    /// Prompt length in tokens; where the prompt is text, the caller's estimate.
    pub prompt_tokens: u32,
    /// Tokens that one block of `chain` stands for (a fraction where blocks are made of text).
    pub tokens_per_block: f64,
    /// Output tokens the request may or will produce, where known (`max_tokens`, or the oracle of a simulation).
    pub expected_output_tokens: Option<u32>,
    /// Of these, the first that nobody reads as they come: what a reasoning model thinks before it answers. `None`: nothing is known of it.
    pub think_tokens: Option<u32>,
    /// Hash of whatever says that answers get about as long as those of others, beside the prompt's length: tenant, endpoint, task.
    pub length_class: Option<u64>,
    /// Hash of the session key, where the request has one.
    pub session: Option<u64>,
    /// Why it must stay in one piece, where it must: stands in the receipt. Pools of prefill and decode instances cut it all the same.
    pub uncut: Option<&'a str>,
    /// Why nothing must be pulled for it, where that is so: stands in the receipt where prefixes are pulled.
    pub unpulled: Option<&'a str>,
    /// Whose it is, where requests are ordered.
    pub tenant: Tenant,
    /// Hash of the name of its LoRA adapter, where it names one.
    pub lora: Option<u64>,
    /// The priority that it brings, lower first; the router's own order is another.
    pub priority: Option<f64>,
}

/// The number that stands for a text with this hash in expressions: whole, and exact in `f64`.
pub fn text_number(hash: u64) -> f64 {
    (hash >> 11) as f64
}

impl Request<'_> {
    /// # Errors
    /// `BadValue` for tokens per block that are no number.
    pub(crate) fn check(&self) -> Result<(), CoreError> {
        if self.tokens_per_block.is_finite() && self.tokens_per_block >= 0.0 {
            return Ok(());
        }
        Err(CoreError::BadValue {
            what: "tokens_per_block".into(),
            got: self.tokens_per_block.to_string(),
            expected: "a finite number, at least 0".into(),
        })
    }
}

/// Whose a request is, and what it is entitled to.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Tenant {
    /// Hash of its name; all requests without one are of the same.
    pub id: u64,
    /// Its share of the service beside others (virtual token counters); above 0.
    pub weight: f64,
    /// Its requests go behind all that arrive within so many seconds after them and have none (boosted arrivals); below 0: before as many.
    pub handicap_seconds: f64,
}

impl Tenant {
    /// Whose requests without a tenant are.
    pub const NOBODY: Tenant = Tenant { id: 0, weight: 1.0, handicap_seconds: 0.0 };
}

impl Default for Tenant {
    fn default() -> Tenant {
        Tenant::NOBODY
    }
}
