//! The writer that all lifecycle modules use.
use crate::ids::Seconds;
use crate::router::context::DecisionContext;
use crate::router::listeners::Listeners;
use crate::router::requests::Requests;
use crate::router::state::State;

/// Changes requests at a given time. Only this type writes tickets and their entries in the ledger,
/// the index, the decision records and the totals.
pub struct Lifecycle<'a> {
    pub state: &'a mut State,
    /// Buffers to plan segments.
    pub context: &'a mut DecisionContext,
    pub requests: &'a mut Requests,
    pub listeners: &'a mut Listeners,
    /// Current time of the router.
    pub now: Seconds,
}
