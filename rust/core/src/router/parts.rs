//! What plans are made of.
use super::tickets::{Leg, Pulling};
use crate::ids::{InstanceId, Seconds};
use crate::receipt::{Balance, Nexts};
use smallvec::SmallVec;

/// A segment that follows another.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Follow {
    /// Its first token: where the one before it ends.
    pub from_token: u32,
    /// Where it runs; `None`: chosen when its turn comes.
    pub instance: Option<InstanceId>,
    /// Seconds until it is expected to start.
    pub start_seconds: Seconds,
    /// Score of the instance, where it is chosen.
    pub score: f64,
}

/// What follows a first segment, in order.
pub type Rest = SmallVec<[Follow; 2]>;

/// Which of a plan's segments is placed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Turn {
    /// The one that begins with the request.
    First,
    /// One that follows another, in a pool of its own.
    Later,
    /// One that follows another on an equal of its instance, which may be that one itself only
    /// where it is not named.
    Peer(Option<InstanceId>),
}

/// The instances of a plan.
#[derive(Clone, Debug)]
pub(super) struct Chosen {
    pub first: InstanceId,
    pub rest: Rest,
    /// What the first fetches before it begins.
    pub pull: Option<Pulling>,
    /// Why the request stays in one piece, if others are cut.
    pub uncut: Option<Box<str>>,
    /// Expected times of its instances, if a cut was looked for.
    pub balance: Option<Balance>,
}

impl Chosen {
    /// All of a request on one instance.
    pub fn whole(first: InstanceId, pull: Option<Pulling>) -> Chosen {
        Chosen { first, rest: Rest::default(), pull, uncut: None, balance: None }
    }
}

/// The segments of a request that was placed anew, what follows the first of them, and what the new
/// plan says of its cut.
pub(super) type Replaced = (Leg, Vec<Leg>, Nexts, Option<(Option<Box<str>>, Option<Balance>)>);
