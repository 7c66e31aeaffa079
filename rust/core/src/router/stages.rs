//! A decision in three calls, for programs that measure or show each stage:
//! [`Router::match_prefix`], [`Router::score`] and [`Router::commit`].
use super::decision::Decision;
use super::parts::{Chosen, Rest};
use super::router::Router;
use crate::error::CoreError;
use crate::ids::{Seconds, Slot};
use crate::policy::Scores;
use crate::request::Request;

impl Router {
    /// Returns the scores of the last [`Router::score`], one per slot.
    pub fn last_scores(&self) -> &Scores {
        &self.context.first.scores
    }

    /// Third stage: places the whole request on `chosen`, writes the decision record and opens the
    /// ticket.
    ///
    /// # Errors
    /// `BadValue` if the last [`Router::score`] did not score the slot `chosen`, or if the request
    /// is invalid.
    pub fn commit(
        &mut self,
        request: &Request<'_>,
        request_id: Option<&str>,
        chosen: Slot,
        now: Seconds,
    ) -> Result<Decision, CoreError> {
        self.state.fleet.check(chosen)?;
        request.check()?;
        if self.context.first.scores.score.len() != self.state.fleet.slots() {
            let got = "a fleet that has changed since the last score";
            return Err(CoreError::bad_value("commit", got, "a request that was scored just before"));
        }
        let score = self.context.first.scores.score[chosen.index()];
        if !score.is_finite() {
            let got = format!("slot {}, whose score is {score}", chosen.0);
            return Err(CoreError::bad_value("commit", got, "a slot with a finite score"));
        }
        let record = self.explained(request, request_id, chosen, now);
        let fetch = self.state.fetch_for(&mut self.context, request, chosen, &Rest::default(), &[], now);
        Ok(self.commit_plan(request, Chosen::whole(chosen, fetch), record, now))
    }
}
