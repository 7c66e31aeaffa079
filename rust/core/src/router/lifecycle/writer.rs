//! What all files of the lifecycle write through.
use crate::ids::Seconds;
use crate::router::context::DecisionContext;
use crate::router::requests::Requests;
use crate::router::state::State;

/// Changes requests at one moment: the only writer of tickets, and of what they are to the ledger,
/// the index, the receipts and the totals.
pub struct Lifecycle<'a> {
    pub state: &'a mut State,
    /// Where segments are planned.
    pub context: &'a mut DecisionContext,
    pub requests: &'a mut Requests,
    /// The router's clock.
    pub now: Seconds,
}
