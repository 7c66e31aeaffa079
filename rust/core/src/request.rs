//! The request data that a decision uses.
use crate::error::CoreError;
use crate::ids::{ArrivalId, Slot};
use std::sync::Arc;

/// Names of the only instances that may take a request.
pub type Allowed = Arc<[Box<str>]>;

/// A request to place. All data is borrowed: a decision copies nothing.
#[derive(Clone, Debug, Default)]
pub struct Request<'a> {
    /// Chained hashes of the prompt's full blocks (see [`crate::kv::hash`]), in order. Includes the
    /// partial last block if engines cache it. Empty: no prefix can match.
    pub chain: &'a [u64],
    /// Prompt length in tokens; for text prompts, the caller's estimate.
    pub prompt_tokens: u32,
    /// Tokens per block of `chain` (a fraction if blocks are made of text).
    pub tokens_per_block: f64,
    /// Maximum or expected output tokens, if known (`max_tokens`, or the oracle of a simulation).
    pub expected_output_tokens: Option<u32>,
    /// Leading output tokens that no client reads as they arrive: a model's reasoning tokens.
    /// `None`: unknown.
    pub think_tokens: Option<u32>,
    /// Hash of a label for requests with similar output lengths, such as tenant, endpoint or task.
    pub length_class: Option<u64>,
    /// Hash of the session key, if the request has a session.
    pub session: Option<u64>,
    /// Reason not to split the request, for the decision record. Pools of prefill and decode
    /// instances split it anyway.
    pub split_reason: Option<&'a str>,
    /// Reason not to fetch a prefix, if there is one. The decision record shows it if prefix
    /// fetches are on.
    pub fetch_reason: Option<&'a str>,
    /// The only instances that may take the request or a segment of it; `None`: all instances may.
    pub instances: Option<&'a Allowed>,
    /// Arrival of the request, as [`Router::arrive`](crate::router::Router::arrive) returned it.
    pub arrival: Option<ArrivalId>,
    /// Deadline of the first token after the arrival, for admission by load; `None`: that of the
    /// settings.
    pub ttft_slo_seconds: Option<f64>,
    /// Priority level while it waits ([`crate::levels::LEVELS`]).
    pub level: i8,
    /// Whether it is refused at its arrival if it would have to wait.
    pub sheddable: bool,
    /// Whether the answer comes whole, so that its first token is not seen.
    pub whole_answer: bool,
    /// Whether the client says that this is the last request of its session.
    pub session_final: bool,
    /// Instance that gets the request if it is eligible; else the policy chooses. The router sets
    /// it.
    pub home: Option<Slot>,
    /// Tenant, used if requests are ordered.
    pub tenant: Tenant,
    /// Hash of the LoRA adapter's name, if the request names an adapter.
    pub lora: Option<u64>,
    /// Priority that the request brings; lower values go first. Independent of the order set by the
    /// router.
    pub priority: Option<f64>,
    /// Policy that chooses the instance of the first segment.
    pub arm: Arm,
    /// Whether the shadow's policy scores the request, too.
    pub shadow: bool,
}

/// The policy that decides a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Arm {
    /// The router's policy.
    #[default]
    Stable,
    /// The canary's policy, while the router has a canary.
    Canary,
    /// The shadow's policy. It places nothing.
    Shadow,
}

impl Arm {
    /// Name in decision records.
    pub fn name(self) -> &'static str {
        match self {
            Arm::Stable => "stable",
            Arm::Canary => "canary",
            Arm::Shadow => "shadow",
        }
    }
}

impl Request<'_> {
    /// Returns the maximum number of prompt tokens that a cache can save. Every engine computes the
    /// last token, and caches hold whole blocks unless engines keep `partial` last blocks.
    #[inline]
    pub(crate) fn max_hit_tokens(&self, partial: bool) -> f64 {
        if self.tokens_per_block <= 0.0 || self.prompt_tokens == 0 {
            return 0.0;
        }
        let most = f64::from(self.prompt_tokens - 1);
        if partial { most } else { (most / self.tokens_per_block).floor() * self.tokens_per_block }
    }

    /// Returns the maximum number of whole blocks of the prompt that a cache can save.
    pub(crate) fn max_hit_blocks(&self, partial: bool) -> u32 {
        let most = self.max_hit_tokens(partial);
        if self.tokens_per_block > 0.0 { (most / self.tokens_per_block) as u32 } else { 0 }
    }

    /// # Errors
    /// `BadValue` if the tokens per block are not a finite number of at least 0, or the deadline is
    /// not above 0.
    pub fn check(&self) -> Result<(), CoreError> {
        self.tenant.check()?;
        if !(self.tokens_per_block.is_finite() && self.tokens_per_block >= 0.0) {
            return bad("tokens_per_block", self.tokens_per_block, "a finite number, at least 0");
        }
        match self.ttft_slo_seconds {
            Some(seconds) if seconds.is_nan() || seconds <= 0.0 => {
                bad("ttft_slo_seconds", seconds, "more than 0 seconds, or none")
            }
            _ => Ok(()),
        }
    }
}

fn bad(what: &str, got: f64, expected: &str) -> Result<(), CoreError> {
    Err(CoreError::BadValue { what: what.into(), got: got.to_string(), expected: expected.into() })
}

/// Tenant of a request and its entitlements.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Tenant {
    /// Hash of the tenant's name; all requests without a tenant share one id.
    pub id: u64,
    /// Share of the service relative to other tenants (virtual token counters); above 0.
    pub weight: f64,
    /// Requests of this tenant are ordered as if they arrived this many seconds later (boosted
    /// arrivals); negative values: earlier.
    pub handicap_seconds: f64,
}

impl Tenant {
    /// The tenant of requests without a tenant.
    pub const NOBODY: Tenant = Tenant { id: 0, weight: 1.0, handicap_seconds: 0.0 };

    /// # Errors
    /// `BadValue` for a weight out of its range.
    fn check(&self) -> Result<(), CoreError> {
        match (1e-3..=1e6).contains(&self.weight) {
            true => Ok(()),
            false => bad("priority: tenant's weight", self.weight, "0.001 to 1e6"),
        }
    }
}

impl Default for Tenant {
    fn default() -> Tenant {
        Tenant::NOBODY
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_weight_has_a_range() {
        for weight in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            let error = Tenant { weight, ..Tenant::NOBODY }.check().unwrap_err();
            assert!(error.to_string().contains("weight"));
        }
        assert!(Tenant::NOBODY.check().is_ok());
    }
}
