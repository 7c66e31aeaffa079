//! Listeners: features that react to the core. The core (fleet, index, ledger, policies, plans,
//! tickets, records) decides and places; it names no feature. A listener reads what has happened,
//! may exclude instances from the next choice, and adds its part to the decision record. Listeners
//! do not call each other. [`Listeners`] owns all of them and passes each event on, in one order.
pub mod admission;
pub mod guard;
mod listener;
pub mod message;
pub mod outgoing;
pub mod priorities;
pub mod published;
pub mod rebalancing;
pub mod replicas;
pub mod shadow;
pub mod warm;
pub mod workers;

pub use listener::{Before, Ended, Listener, Placement};

use super::context::DecisionContext;
use super::settings::RouterConfig;
use super::tickets::{Kept, TicketState};
use crate::admission::Admission;
use crate::error::CoreError;
use crate::fleet::{Fleet, Member};
use crate::guard::Guard;
use crate::ids::Seconds;
use crate::record::DecisionRecord;
use crate::request::Request;
use crate::warm::Demand;
use outgoing::Outgoing;
use priorities::Boosts;
use rebalancing::Rounds;
use replicas::Replicas;
use shadow::ShadowChoices;
use std::borrow::Cow;

/// All listeners. Optional ones exist only if they are configured.
pub struct Listeners {
    /// Hot-spot guard, while it is on or has events to report.
    pub guard: Option<Guard>,
    /// Order of requests.
    pub boosts: Option<Boosts>,
    /// Arrivals, with agent programs and admission by load.
    pub admission: Admission,
    /// Rounds of rebalancing.
    pub rebalancing: Option<Rounds>,
    /// Prompts of recent requests, for warm fleet changes.
    pub demand: Option<Demand>,
    /// Load of peer routers.
    pub replicas: Replicas,
    /// Changes of this router's load, for its peers.
    pub outgoing: Outgoing,
    /// Choices of the shadow policy, if there is one; it reacts to no event.
    pub shadow: Option<ShadowChoices>,
}

impl Listeners {
    /// Creates the listeners that the settings ask for.
    ///
    /// # Errors
    /// `BadValue` for a setting out of its range.
    pub fn new(config: &RouterConfig) -> Result<Listeners, CoreError> {
        let mut admission = Admission::default();
        admission.set_programs(config.programs.clone(), 0.0)?;
        config.warm.map_or(Ok(()), |warm| warm.check())?;
        Ok(Listeners {
            guard: Some(Guard::new(config.guard)?).filter(|guard| guard.config().on),
            boosts: None,
            admission,
            rebalancing: None,
            demand: config.warm.as_ref().map(Demand::new),
            replicas: Replicas::default(),
            outgoing: Outgoing::default(),
            shadow: None,
        })
    }

    /// Completes a request before its decision: its expected output length, its arrival, and the
    /// instances with room for it.
    ///
    /// # Errors
    /// `BadValue` for an invalid request, or for one without an arrival if requests are admitted.
    #[inline]
    pub fn prepare<'r>(
        &mut self,
        before: &mut Before<'_>,
        request: &'r Request<'r>,
    ) -> Result<Cow<'r, Request<'r>>, CoreError> {
        let request = match before.state.ledger.answers.lengths() {
            // The request's own maximum is a poor estimate.
            Some(lengths) => {
                let most = request.expected_output_tokens.unwrap_or(u32::MAX).max(1);
                let expected = lengths.expected_tokens(request.prompt_tokens, request.length_class);
                let expected_output_tokens = expected.map(|tokens| tokens.clamp(1, most));
                Cow::Owned(Request { expected_output_tokens, ..request.clone() })
            }
            None => Cow::Borrowed(request),
        };
        admission::prepare(&mut self.admission, before, request)
    }

    /// Ends the arrival of a request that no instance could take.
    pub fn not_placed(&mut self, request: &Request<'_>, now: Seconds) {
        if let Some(id) = request.arrival {
            self.admission.remove(id, now);
        }
    }

    /// Passes on which instances the next choice of a first segment must avoid because of the
    /// prompt's prefix. (A program's home and the instances with room: [`Listeners::prepare`].)
    #[inline]
    pub fn restrict(&self, request: &Request<'_>, context: &mut DecisionContext) {
        let guard = self.guard.as_ref();
        context.excluded = guard.and_then(|guard| guard.excluded(request.chain)).cloned();
    }

    /// Calls all listeners, in the order of the fields. The pattern names every field, so that no
    /// listener can be forgotten.
    #[inline]
    fn each(&mut self, mut call: impl FnMut(&mut dyn Listener)) {
        let Listeners { guard, boosts, admission, rebalancing, demand, replicas, outgoing, shadow: _ } = self;
        if let Some(guard) = guard {
            call(guard);
        }
        if let Some(boosts) = boosts {
            call(boosts);
        }
        call(admission);
        if let Some(rebalancing) = rebalancing {
            call(rebalancing);
        }
        if let Some(demand) = demand {
            call(demand);
        }
        call(replicas);
        call(outgoing);
    }
}

impl Listener for Listeners {
    fn placed(&mut self, placement: &Placement<'_>, record: &mut DecisionRecord, kept: &mut Kept) {
        self.each(|listener| listener.placed(placement, record, kept));
    }

    fn placed_again(&mut self, ticket: &TicketState, now: Seconds) {
        self.each(|listener| listener.placed_again(ticket, now));
    }

    fn ended(&mut self, ended: &Ended<'_>) {
        self.each(|listener| listener.ended(ended));
    }

    fn member(&mut self, member: Member, fleet: &Fleet) {
        self.each(|listener| listener.member(member, fleet));
    }
}
