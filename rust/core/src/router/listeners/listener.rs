//! The trait of listeners, and the events that it receives.
use crate::fleet::{Fleet, Member};
use crate::ids::{Seconds, Slot};
use crate::plan::Usage;
use crate::record::DecisionRecord;
use crate::request::Request;
use crate::router::context::DecisionContext;
use crate::router::state::State;
use crate::router::tickets::{Kept, TicketState};

/// The core before a decision: what a listener may read and change then.
pub struct Before<'a> {
    pub state: &'a mut State,
    pub context: &'a mut DecisionContext,
    /// Calls of the router until now, this one included.
    pub calls: u64,
    pub now: Seconds,
}

/// A request that the core has decided and is about to place. The ledger does not count it yet.
pub struct Placement<'a> {
    pub state: &'a State,
    /// Scores, candidates and prefix matches of the choice.
    pub context: &'a DecisionContext,
    pub request: &'a Request<'a>,
    /// Instance of the first segment.
    pub first: Slot,
    /// Prompt tokens that the instance is predicted to hold.
    pub hit_tokens: f64,
    pub now: Seconds,
}

/// A request whose ticket was closed.
pub struct Ended<'a> {
    pub ticket: &'a TicketState,
    /// Whether the request succeeded.
    pub finished: bool,
    /// Usage that the engine reported for a request that succeeded.
    pub usage: Usage,
    /// Output tokens, as reported or else as counted.
    pub made: u32,
    pub now: Seconds,
}

/// A feature. Each method is one event of the core; the default ignores it.
#[allow(unused_variables)]
pub trait Listener {
    /// A request was decided, and the ledger counts it next. The listener may add its part to the
    /// decision record, and keep something with the ticket.
    fn placed(&mut self, placement: &Placement<'_>, record: &mut DecisionRecord, kept: &mut Kept) {}

    /// A request whose first segment failed was placed again, or a running request has moved.
    /// `ticket` has the new segment.
    fn placed_again(&mut self, ticket: &TicketState, now: Seconds) {}

    /// A request ended: it succeeded, failed, or was dropped.
    fn ended(&mut self, ended: &Ended<'_>) {}

    /// An instance was added or removed.
    fn member(&mut self, member: Member, fleet: &Fleet) {}
}
