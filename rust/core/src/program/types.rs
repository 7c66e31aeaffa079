//! The words of programs: ids, requests and verdicts, and states.
use super::waste::Measured;
use crate::ids::{Seconds, Slot};
use serde::{Deserialize, Serialize};
use slotmap::{Key, new_key_type};
use std::collections::BTreeSet;

/// Horizon of the return probability by which programs are paused.
pub const SOON_SECONDS: Seconds = 30.0;

new_key_type! {
    /// A live program.
    pub struct ProgramId;
    /// A request, from its arrival to its end.
    pub struct TurnId;
}

impl ProgramId {
    /// Returns a number that no other program of the router has.
    pub fn number(self) -> u64 {
        self.data().as_ffi()
    }
}

impl TurnId {
    /// Returns a number that no other turn of the router has.
    pub fn number(self) -> u64 {
        self.data().as_ffi()
    }
}

/// An arriving request.
#[derive(Clone, Copy, Debug, Default)]
pub struct Arrival<'a> {
    /// Chained hashes of the prompt's blocks.
    pub chain: &'a [u64],
    /// Prompt tokens.
    pub prompt_tokens: u32,
    /// Tokens per block of `chain`.
    pub tokens_per_block: f64,
    /// Hash of the session that the request names, if it does.
    pub session: Option<u64>,
    /// Hash of the tenant's name.
    pub tenant: u64,
    /// The tenant's share relative to other tenants.
    pub weight: f64,
    /// Priority level: programs of a higher level are admitted first.
    pub level: i8,
    /// Whether the client says that this is the last turn of its program.
    pub last: bool,
    /// Whether it is refused rather than held.
    pub sheddable: bool,
    /// Number of the worker that has the request, if the server has several.
    pub worker: u8,
}

/// Decision on an arriving request.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Verdict {
    /// Place it by the policy: it belongs to no program, or programs are only observed.
    Free,
    /// Send it to this instance now.
    Run(Slot),
    /// Keep it until [`Programs::released`](super::Programs::released) names it.
    Held(Hold),
    /// Refuse it: the client may try again after this many seconds.
    Refused {
        /// Predicted seconds until there is room.
        retry_after_seconds: Seconds,
    },
}

/// A request's program in a decision record.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ProgramNote {
    /// Number of the program.
    pub program: u64,
    /// Tokens of its context at the decision.
    pub context_tokens: f64,
    /// Seconds for which the request was held.
    pub held_seconds: Seconds,
}

/// State of a program. Its turns are `running` or `held`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub enum State {
    /// A turn is running; the program counts on its home.
    Running,
    /// Between two turns; counts on its home with the probability that it returns.
    Gap,
    /// Between two turns, without a place in a cache; counts nowhere.
    Paused,
    /// Its turns wait for admission; counts nowhere.
    Held,
}

impl State {
    /// All states, with their names in metrics.
    pub const NAMES: [(&'static str, State); 4] =
        [("running", State::Running), ("gap", State::Gap), ("paused", State::Paused), ("held", State::Held)];

    /// Returns whether the program counts on its home.
    pub fn has_place(self) -> bool {
        matches!(self, State::Running | State::Gap)
    }

    /// Returns whether the program is between two turns.
    pub fn rests(self) -> bool {
        matches!(self, State::Gap | State::Paused)
    }
}

/// An instance, until it is removed: its slot may then get another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Home {
    /// The instance.
    pub instance: Slot,
    pub(super) generation: u32,
}

/// Why a request is held.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Hold {
    /// Tokens that the program needs on an instance.
    pub needed_tokens: f64,
    /// Expected working set of the instance with the most room, over its capacity.
    pub working_set_ratio: f64,
    /// Held programs of all routers, this one included.
    pub held_programs: usize,
    /// Predicted seconds until the program is admitted.
    pub expected_seconds: Seconds,
}

/// The prefill of a placed request.
#[derive(Clone, Copy, Debug, Default)]
pub struct Work {
    /// Prompt tokens that the instance computes.
    pub new_tokens: f64,
    /// Prompt tokens that its cache holds.
    pub hit_tokens: f64,
    /// Predicted seconds.
    pub seconds: Seconds,
    /// Predicted seconds to compute the tokens that its cache holds.
    pub hit_seconds: Seconds,
}

/// A prefix that several programs share: the hash of its last block, and its tokens.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Root {
    /// Hash of the last shared block.
    pub hash: u64,
    /// Tokens up to the end of that block.
    pub tokens: f64,
}

/// The router that has a program, and what it published last.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Peer {
    /// Hash of the router's name.
    pub(super) router: u64,
    pub(super) state: State,
    pub(super) home: Option<Home>,
    /// Time of the first forecast that the router admits the program, since when it only held it.
    pub(super) forecast_at: Option<Seconds>,
}

/// The published state of a peer router.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) struct PeerRouter {
    /// Its measurements since its start.
    pub(super) measured: Measured,
    /// Its programs.
    pub(super) programs: BTreeSet<ProgramId>,
}
