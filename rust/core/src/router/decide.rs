//! Decisions: match, score, plan, commit.
use super::caches::PrefixMatch;
use super::decision::Decision;
use super::listeners::Before;
use super::parts::{Chosen, Turn};
use super::router::Router;
use crate::error::CoreError;
use crate::ids::{Seconds, Slot};
use crate::record::DecisionRecord;
use crate::request::Request;
use std::borrow::Cow;

impl Router {
    /// Chooses an instance for `request`, places the request there and opens its ticket.
    ///
    /// # Errors
    /// `NoInstance` if no instance is eligible; the ledger is unchanged. `BadValue` for an invalid
    /// request, or for one without an arrival if requests are admitted ([`Router::arrive`]).
    pub fn route(&mut self, request: &Request<'_>, now: Seconds) -> Result<Decision, CoreError> {
        let now = self.clock(now);
        let request = &*self.prepared(request, now)?;
        let (chosen, record) = self.decide(request, None, now)?;
        Ok(self.commit_plan(request, chosen, record, now))
    }

    /// [`Router::route`] without a copy of the prompt's chain. The ticket takes `chain` and leaves
    /// a spare buffer in its place. `request.chain` is not read. `found`: the prefixes that
    /// [`Reading::match_ahead`] found for the same chain, without the router. They are found
    /// again if instances have changed since. `request_id`: the request's own id, for its record.
    ///
    /// [`Reading::match_ahead`]: super::Reading::match_ahead
    ///
    /// # Errors
    /// The errors of [`Router::route`]; `chain` is then unchanged.
    pub fn route_matched(
        &mut self,
        request: &Request<'_>,
        chain: &mut Vec<u64>,
        found: &mut PrefixMatch,
        request_id: Option<&str>,
        now: Seconds,
    ) -> Result<Decision, CoreError> {
        let now = self.clock(now);
        let whole = Request { chain, ..*request };
        let whole = self.prepared(&whole, now)?;
        if found.version.take().is_some_and(|version| version == self.state.caches.version()) {
            self.context.take_match(found);
        }
        let (chosen, record) = self.decide(&whole, request_id, now)?;
        let mut lifecycle = self.lifecycle(now);
        let decision = lifecycle.commit(&whole, chosen, record);
        let spare = lifecycle.requests.tickets.spare_chain();
        lifecycle.keep_chain(decision.ticket, std::mem::replace(chain, spare));
        Ok(decision)
    }

    /// Plans a request; returns the plan and a decision record of the first choice. An error ends
    /// the request's arrival.
    fn decide(
        &mut self,
        request: &Request<'_>,
        request_id: Option<&str>,
        now: Seconds,
    ) -> Result<(Chosen, Box<DecisionRecord>), CoreError> {
        self.plan(request, request_id, now).inspect_err(|_| self.listeners.not_placed(request, now))
    }

    /// Returns the request as the listeners complete it before its decision.
    #[inline]
    fn prepared<'r>(
        &mut self,
        request: &'r Request<'r>,
        now: Seconds,
    ) -> Result<Cow<'r, Request<'r>>, CoreError> {
        self.read_workers(now);
        let Router { state, context, listeners, calls, .. } = self;
        listeners.prepare(&mut Before { state, context, calls: *calls, now }, request)
    }

    fn plan(
        &mut self,
        request: &Request<'_>,
        request_id: Option<&str>,
        now: Seconds,
    ) -> Result<(Chosen, Box<DecisionRecord>), CoreError> {
        request.check()?;
        if !std::mem::take(&mut self.context.is_matched) {
            self.match_prefix(request);
        }
        let first = self.score(request, now).inspect_err(|_| {
            self.context.roomy.clear();
            self.requests.totals.no_instance += 1;
        })?;
        let mut record = self.explained(request, request_id, first, now);
        if request.shadow {
            let shadow = self.listeners.shadow.as_mut();
            record.shadow =
                shadow.and_then(|by| by.score(&mut self.state, &self.context, request, first, now));
        }
        self.context.roomy.clear();
        let chosen = self.state.plan(&mut self.context, request, first, &[], now);
        self.context.count_unscored(&mut self.requests.totals);
        match chosen {
            Ok(chosen) => Ok((chosen, record)),
            Err(error) => {
                self.requests.records.put_back(record);
                self.requests.totals.no_instance += 1;
                Err(error)
            }
        }
    }

    /// Returns the decision record of the last choice of a first segment.
    pub(super) fn explained(
        &mut self,
        request: &Request<'_>,
        request_id: Option<&str>,
        chosen: Slot,
        now: Seconds,
    ) -> Box<DecisionRecord> {
        let mut record = self.requests.records.take();
        record.at = now;
        record.request_id = request_id.map(Into::into);
        self.state.explain(&mut self.context, request, chosen, now, &mut record);
        record
    }

    /// First stage of a decision: finds the length of the prompt's prefix on each instance.
    pub fn match_prefix(&mut self, request: &Request<'_>) {
        self.state.match_prefix(&mut self.context, request);
    }

    /// Second stage: scores every instance and returns the best one. The ledger is unchanged.
    ///
    /// # Errors
    /// The errors of [`Router::route`].
    pub fn score(&mut self, request: &Request<'_>, now: Seconds) -> Result<Slot, CoreError> {
        self.listeners.restrict(request, &mut self.context);
        let chosen = self.state.choose(&mut self.context, request, Turn::First, &[], None, now);
        self.context.count_unscored(&mut self.requests.totals);
        chosen
    }

    /// Places a planned request.
    pub(super) fn commit_plan(
        &mut self,
        request: &Request<'_>,
        chosen: Chosen,
        record: Box<DecisionRecord>,
        now: Seconds,
    ) -> Decision {
        let mut lifecycle = self.lifecycle(now);
        let decision = lifecycle.commit(request, chosen, record);
        let mut chain = lifecycle.requests.tickets.spare_chain();
        chain.extend_from_slice(request.chain);
        lifecycle.keep_chain(decision.ticket, chain);
        decision
    }
}
