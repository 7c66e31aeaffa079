//! Which running decodes move, and where: STAR's rescheduler, a Llumnix-style rival, and none.
//!
//! A round looks at all decode instances and names at most a few moves. It is pure: who calls it, how often (STAR Table 4: every [`INTERVAL_STEPS`] steps), and
//! how a move is made, is the router's matter. The remaining lengths come from a [`Forecast`].
pub mod forecast;
pub mod grid;
pub mod llumnix;
pub mod star;
#[cfg(test)]
mod tests;

use crate::error::CoreError;
use crate::estimate::remaining::Remaining;
use crate::ids::InstanceId;
pub use forecast::{Curve, Forecast, Running};
pub use llumnix::{Llumnix, LlumnixSettings};
pub use star::{Star, StarSettings, Weights};

/// Decode steps between two rounds: the best of STAR's Table 4. There is nothing to decide anew before lengths are predicted anew.
pub const INTERVAL_STEPS: u32 = 20;

/// One request that decodes on an instance.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RunningRequest {
    /// The caller's number for it, unique in a round.
    pub id: u64,
    /// Context tokens now, prompt and generated: N(r).
    pub tokens: u32,
    /// Output tokens still to come.
    pub remaining: Remaining,
    /// The lower, the sooner Llumnix moves it; STAR has no priorities.
    pub priority: i32,
    /// Whether it may be moved at all.
    pub movable: bool,
}

/// One decode instance as a round sees it.
#[derive(Clone, Copy, Debug)]
pub struct InstanceLoad<'a> {
    /// Which.
    pub instance: InstanceId,
    /// Tokens that its KV cache holds: C_mem, above 0.
    pub capacity_tokens: u64,
    /// Tokens in its KV cache that are of none of `requests` (others' load); taken to stay.
    pub other_tokens: u64,
    /// Tokens that the first waiting request asks for: Llumnix counts them as used.
    pub queued_tokens: u64,
    /// Time of one decode step there now, in seconds: T_exec, above 0.
    pub step_seconds: f64,
    /// Whether it may be a target: false where it drains or is unhealthy.
    pub accepts: bool,
    /// Its running requests.
    pub requests: &'a [RunningRequest],
}

impl InstanceLoad<'_> {
    /// N_i(B_i), in tokens: what is in its KV cache now.
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

/// One request to move, and the numbers that explain it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Move {
    /// The request.
    pub request: u64,
    /// Where it runs.
    pub source: InstanceId,
    /// Where it goes: never `source`.
    pub target: InstanceId,
    /// Load of the source before the move: for STAR its weighted workload w_i in tokens, for Llumnix its freeness in steps.
    pub source_load: f64,
    /// The same of the target.
    pub target_load: f64,
    /// Mean of that load over all instances; infinite for Llumnix where an instance is empty.
    pub mean_load: f64,
    /// Variance of loads over the instances before the move, in tokens squared: STAR's Eq. (4); for Llumnix that of current tokens.
    pub variance_before: f64,
    /// The same after the move.
    pub variance_after: f64,
}

/// Why a round ended where it did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stop {
    /// The most moves that a round may make were found.
    MostMoves,
    /// Rescheduling is off.
    Off,
    /// Fewer than two instances.
    FewInstances,
    /// No instance is overloaded.
    NoneOverloaded,
    /// No instance that accepts requests is underloaded.
    NoneUnderloaded,
    /// No request of an overloaded instance may be moved and lasts longer than its move takes.
    NoneMovable,
    /// None of these fits into an underloaded instance.
    NoRoom,
    /// No move makes loads more even.
    NoGain,
}

impl Stop {
    /// In words, for receipts and logs.
    pub fn reason(self) -> &'static str {
        match self {
            Stop::MostMoves => "the most moves of a round were found",
            Stop::Off => "rescheduling is off",
            Stop::FewInstances => "fewer than two instances",
            Stop::NoneOverloaded => "no instance is overloaded",
            Stop::NoneUnderloaded => "no instance is underloaded",
            Stop::NoneMovable => "no request of an overloaded instance may move and outlasts its move",
            Stop::NoRoom => "no underloaded instance has room",
            Stop::NoGain => "no move makes loads more even",
        }
    }
}

/// What a round decided.
#[derive(Clone, Debug, PartialEq)]
pub struct Round {
    /// Moves, in the order in which they were found; each takes those before it as done. A request moves at most once.
    pub moves: Vec<Move>,
    /// Why there are no more.
    pub stop: Stop,
}

/// A rule that moves running requests.
pub trait Rescheduler: Send {
    /// Its name.
    fn name(&self) -> &'static str;

    /// One round. The order of `loads` and of their requests does not matter; ties go to the lowest request, then the lowest instances.
    ///
    /// # Errors
    /// `BadValue`: an instance given twice, a capacity of 0, a step time that is not above 0, remaining tokens that are negative or not finite.
    fn round(&mut self, loads: &[InstanceLoad]) -> Result<Round, CoreError>;
}

/// Places of `loads` by instance: sums and ties then don't depend on the order in which they were given.
fn ordered(loads: &[InstanceLoad]) -> Result<Vec<usize>, CoreError> {
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

/// `value` where it is finite and in `least..=most`, else an error that names the setting.
fn setting(name: &str, value: f64, least: f64, most: f64) -> Result<f64, CoreError> {
    if value.is_finite() && value >= least && value <= most {
        return Ok(value);
    }
    let expected = if most.is_finite() {
        format!("a number from {least} to {most}")
    } else {
        format!("a number from {least} up")
    };
    Err(bad(format!("rescheduling setting {name}"), value, &expected))
}
