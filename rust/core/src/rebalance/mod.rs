//! Rebalancing of running decodes: STAR's rule. Other crates add rules with [`Rebalancer`].
//!
//! A round compares all decode instances and returns a few moves. It is pure: the router decides
//! when a round runs (STAR Table 4: every [`INTERVAL_STEPS`] steps) and how a request moves. The
//! remaining lengths come from a [`Forecast`].
pub mod forecast;
pub mod grid;
mod settings;
pub mod star;
#[cfg(test)]
mod tests;

use crate::error::CoreError;
use crate::estimate::Remaining;
use crate::ids::Slot;
pub use forecast::{Curve, Forecast, Running};
pub use settings::{RebalanceConfig, Rebalancing};
pub use star::{Star, StarSettings, Weights};
use std::fmt::Debug;

/// Decode steps between two rounds: the best value in STAR's Table 4. Until lengths are predicted
/// again, a new round has no new input.
pub const INTERVAL_STEPS: u32 = 20;

/// A request that decodes on an instance.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RunningRequest {
    /// The caller's id of the request, unique in a round.
    pub id: u64,
    /// N(r): current context tokens, prompt and generated.
    pub tokens: u32,
    /// Output tokens still to come.
    pub remaining: Remaining,
    /// Whether the request may be moved.
    pub movable: bool,
}

/// Input of a round: one decode instance.
#[derive(Clone, Copy, Debug)]
pub struct InstanceLoad<'a> {
    /// Id of the instance.
    pub instance: Slot,
    /// C_mem: tokens that the KV cache can hold, above 0.
    pub capacity_tokens: u64,
    /// Tokens in the KV cache outside `requests` (external load), assumed to stay.
    pub other_tokens: u64,
    /// Tokens that the first waiting request needs.
    pub queued_tokens: u64,
    /// T_exec: current time of one decode step, in seconds, above 0.
    pub step_seconds: f64,
    /// Whether the instance may be a target: false if it is draining or unhealthy.
    pub accepts: bool,
    /// Running requests on the instance.
    pub requests: &'a [RunningRequest],
}

impl InstanceLoad<'_> {
    /// Returns N_i(B_i): tokens in the KV cache now.
    pub fn tokens(&self) -> u64 {
        self.other_tokens + self.requests.iter().map(|r| u64::from(r.tokens)).sum::<u64>()
    }

    fn check(&self) -> Result<(), CoreError> {
        let at = self.instance.0;
        if self.capacity_tokens == 0 {
            return Err(bad(format!("capacity_tokens of instance {at}"), 0, "at least 1 token"));
        }
        if !(self.step_seconds > 0.0 && self.step_seconds.is_finite()) {
            return Err(bad(format!("step_seconds of instance {at}"), self.step_seconds, "seconds above 0"));
        }
        for r in self.requests {
            let named = [("remaining tokens", r.remaining.tokens), ("deviation", r.remaining.deviation)];
            if let Some((what, got)) = named.into_iter().find(|(_, x)| !(*x >= 0.0 && x.is_finite())) {
                return Err(bad(
                    format!("{what} of request {} on instance {at}", r.id),
                    got,
                    "0 or more tokens",
                ));
            }
        }
        Ok(())
    }
}

/// A request to move, and the numbers that explain the move.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Move {
    /// The request.
    pub request: u64,
    /// Instance on which it runs.
    pub source: Slot,
    /// Instance to which it moves, never `source`.
    pub target: Slot,
    /// Load of the source before the move, in the unit of the rule: for STAR, the weighted workload
    /// w_i in tokens.
    pub source_load: f64,
    /// Load of the target before the move, in the unit of `source_load`.
    pub target_load: f64,
    /// Mean load over all instances, in the unit of `source_load`.
    pub mean_load: f64,
    /// Variance of loads over the instances before the move, in tokens squared: for STAR, that of
    /// Eq. (4).
    pub variance_before: f64,
    /// Variance of loads after the move, in tokens squared.
    pub variance_after: f64,
}

/// Reason why a round ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stop {
    /// The round reached its maximum number of moves.
    MaxMoves,
    /// Rebalancing is off.
    Off,
    /// Fewer than two instances.
    FewInstances,
    /// No instance is overloaded.
    NoneOverloaded,
    /// No instance that accepts requests is underloaded.
    NoneUnderloaded,
    /// No request of an overloaded instance may move and also runs longer than its move takes.
    NoneMovable,
    /// No movable request fits into an underloaded instance.
    NoRoom,
    /// No move makes loads more even.
    NoGain,
}

impl Stop {
    /// Returns the reason as text, for decision records and logs.
    pub fn reason(self) -> &'static str {
        match self {
            Stop::MaxMoves => "the round reached its maximum number of moves",
            Stop::Off => "rebalancing is off",
            Stop::FewInstances => "fewer than two instances",
            Stop::NoneOverloaded => "no instance is overloaded",
            Stop::NoneUnderloaded => "no instance is underloaded",
            Stop::NoneMovable => "no movable request of an overloaded instance outlasts its move",
            Stop::NoRoom => "no underloaded instance has room",
            Stop::NoGain => "no move makes loads more even",
        }
    }
}

/// Result of a round.
#[derive(Clone, Debug, PartialEq)]
pub struct Round {
    /// Moves, in the order in which they were found. Each move assumes that the previous moves are
    /// done. A request moves at most once.
    pub moves: Vec<Move>,
    /// Reason why there are no more moves.
    pub stop: Stop,
}

/// A rule that moves running requests between instances.
pub trait Rebalancer: Debug + Send + Sync {
    /// Returns the rule's name.
    fn name(&self) -> &'static str;

    /// Runs one round. The order of `loads` and of their requests does not matter. Ties go to the
    /// lowest request, then the lowest instances.
    ///
    /// # Errors
    /// `BadValue`: a duplicate instance, a capacity of 0, a step time that is not above 0, or
    /// remaining tokens that are negative or not finite.
    fn round(&mut self, loads: &[InstanceLoad]) -> Result<Round, CoreError>;

    /// Creates the same rule for another router.
    fn fresh(&self) -> Box<dyn Rebalancer>;
}

/// Returns the indices of `loads`, sorted by instance: sums and ties then do not depend on the
/// input order.
///
/// # Errors
/// The errors of [`Rebalancer::round`].
pub fn ordered(loads: &[InstanceLoad]) -> Result<Vec<usize>, CoreError> {
    loads.iter().try_for_each(InstanceLoad::check)?;
    let mut order: Vec<usize> = (0..loads.len()).collect();
    order.sort_unstable_by_key(|&i| loads[i].instance);
    match order.windows(2).find(|w| loads[w[0]].instance == loads[w[1]].instance) {
        Some(w) => Err(bad("instances of a round", loads[w[0]].instance.0, "each instance once")),
        None => Ok(order),
    }
}

fn bad(what: impl Into<String>, got: impl ToString, expected: &str) -> CoreError {
    CoreError::BadValue { what: what.into(), got: got.to_string(), expected: expected.into() }
}

/// Returns a setting's value.
///
/// # Errors
/// `BadValue` with the setting and its range unless the value is finite and in `least..=most`.
pub fn setting(name: &str, value: f64, least: f64, most: f64) -> Result<f64, CoreError> {
    if value.is_finite() && value >= least && value <= most {
        return Ok(value);
    }
    let expected = if most.is_finite() {
        format!("a number from {least} to {most}")
    } else {
        format!("a number of at least {least}")
    };
    Err(bad(format!("rebalancing setting {name}"), value, &expected))
}
