//! Parts of plans.
use super::tickets::{PlacedSegment, PlannedFetch};
use crate::ids::{Seconds, Slot};
use crate::record::{Balance, Nexts};
use smallvec::SmallVec;

/// A segment that follows another.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Follow {
    /// First token; the previous segment ends before it.
    pub from_token: u32,
    /// Instance; `None`: chosen when the previous segment ends.
    pub instance: Option<Slot>,
    /// Seconds until the expected start.
    pub start_seconds: Seconds,
    /// Score of the instance, if it is chosen.
    pub score: f64,
}

/// Follow-up segments, in order.
pub type Rest = SmallVec<[Follow; 2]>;

/// The segment of a plan to place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Turn {
    /// The first segment.
    First,
    /// A follow-up segment in a pool of its own.
    Later,
    /// A follow-up segment on another `both` instance. `Some(id)` excludes `id`.
    Peer(Option<Slot>),
}

/// The instances of a plan.
#[derive(Clone, Debug)]
pub(super) struct Chosen {
    pub first: Slot,
    pub rest: Rest,
    /// Prefix fetch before the first segment begins.
    pub fetch: Option<PlannedFetch>,
    /// Why the request is not split, if requests are split.
    pub split_reason: Option<Box<str>>,
    /// Expected times of the instances, if a cut was considered.
    pub balance: Option<Balance>,
}

impl Chosen {
    /// Plans all of a request on one instance.
    pub fn whole(first: Slot, fetch: Option<PlannedFetch>) -> Chosen {
        Chosen { first, rest: Rest::default(), fetch, split_reason: None, balance: None }
    }
}

/// The segments of a request that was placed again, the instances after the first segment, and the
/// new plan's reason and balance for its cut.
pub(super) type Replaced =
    (PlacedSegment, Vec<PlacedSegment>, Nexts, Option<(Option<Box<str>>, Option<Balance>)>);
