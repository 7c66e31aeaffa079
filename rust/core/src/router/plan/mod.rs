//! Plans: instances of the first and follow-up segments, cuts, and prefix fetches. Planning reads
//! [`State`] and writes [`DecisionContext`]; it places nothing.
mod derive;
mod explain;
mod fetch;
pub mod planners;
mod predict;
mod segments;
mod select;
#[cfg(test)]
mod tests;
mod tiers;

pub use predict::TtftSource;

use crate::error::CoreError;
use crate::fleet::Role;
use crate::ids::{Seconds, Slot};
use crate::plan::{Binding, Cuts, Segment};
use crate::record::{Next, Nexts};
use crate::request::Request;
use crate::router::context::DecisionContext;
use crate::router::parts::{Chosen, Follow, Rest, Turn};
use crate::router::state::{Planner, State, View};

impl State {
    /// Finds the length of the prompt's prefix on each instance, on the GPU and in lower tiers.
    pub fn match_prefix(&self, context: &mut DecisionContext, request: &Request<'_>) {
        context.arrived = None;
        self.caches.read().match_prefix(request, &mut context.matched);
    }

    /// Plans the segments after a first segment on `first`, and its prefix fetch. `failed`: slots
    /// to exclude.
    pub fn plan(
        &self,
        context: &mut DecisionContext,
        request: &Request<'_>,
        first: Slot,
        failed: &[u32],
        now: Seconds,
    ) -> Result<Chosen, CoreError> {
        // Requests that must not be split do not move either; the record shows the reason.
        context.split_reason = request.split_reason.filter(|_| self.forecast.is_some()).map(Into::into);
        context.balance = None;
        let rest = match self.fleet.role(first) {
            Role::Prefill => self.rest_of_prefill(context, request, first, failed, now)?,
            Role::Both => match &self.planner {
                Some(planner) => {
                    rest_of_split(&**planner, &mut View { state: self, context, request, first, failed, now })
                }
                None => Rest::new(),
            },
            Role::Decode => Rest::new(),
        };
        let fetch = self.fetch_for(context, request, first, &rest, failed, now);
        Ok(Chosen {
            first,
            rest,
            fetch,
            split_reason: context.split_reason.take(),
            balance: context.balance.take(),
        })
    }

    fn rest_of_prefill(
        &self,
        context: &mut DecisionContext,
        request: &Request<'_>,
        first: Slot,
        failed: &[u32],
        now: Seconds,
    ) -> Result<Rest, CoreError> {
        let none = match request.instances {
            None if failed.is_empty() => self.fleet.decoder_count() == 0,
            _ => self.mark_eligible(context, request, Turn::Later, failed) == 0,
        };
        if none {
            return match self.config.colocate {
                true => Ok(Rest::new()),
                false => Err(self.nobody(request, Turn::Later, failed)),
            };
        }
        let handoff = self.expected_handoff(context, request, first, now);
        let instance = match self.config.binding {
            Binding::Early => Some(self.choose(context, request, Turn::Later, failed, Some(handoff), now)?),
            Binding::Late => None,
        };
        Ok(Rest::from_iter([self.follow(context, request.prompt_tokens, instance, handoff)]))
    }

    /// Returns a segment on the last chosen instance, or on an instance to choose later.
    fn follow(
        &self,
        context: &DecisionContext,
        from_token: u32,
        instance: Option<Slot>,
        start_seconds: Seconds,
    ) -> Follow {
        let score = instance.and_then(|id| context.later.scores.score.get(id.index()).copied());
        Follow { from_token, instance, start_seconds, score: score.unwrap_or(f64::NAN) }
    }

    /// Returns whether the segment after this one runs on a peer of the same role, not in a pool of
    /// decode instances.
    pub fn peers(&self, segment: &Segment) -> bool {
        self.fleet.role(segment.instance) != Role::Prefill
    }

    /// Returns the follow-up instances for the decision record, as far as they are chosen.
    pub fn next_in(&self, rest: &Rest) -> Nexts {
        let chosen = rest.iter().filter_map(|follow| Some((follow, follow.instance?)));
        chosen
            .map(|(follow, instance)| Next {
                slot: instance.0,
                name: self.fleet.name(instance).clone(),
                score: follow.score,
                handoff_seconds: follow.start_seconds,
            })
            .collect()
    }
}

/// Plans the follow-up segments if roles do not split. If the request cannot be split, it stays
/// whole, with the reason.
fn rest_of_split(planner: &dyn Planner, view: &mut View<'_>) -> Rest {
    if let Some(reason) = view.request.split_reason {
        return view.leave_whole(reason);
    }
    if view.cuts_of(&[view.first]) == Cuts::Nowhere {
        return view.leave_whole("its instance cannot transfer KV");
    }
    planner.rest(view)
}
