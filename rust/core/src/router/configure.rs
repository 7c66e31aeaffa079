//! The settings that can change while a router serves.
use super::fetch_cost::Pulls;
use super::plan::planners::Split;
use super::priorities::{Ordering, Priorities};
use super::router::Router;
use super::settings::{IndexFeed, PullConfig, Rescheduling};
use super::state::{Selector, State};
use super::tickets;
use crate::error::CoreError;
use crate::estimate::StepTime;
use crate::ids::{InstanceId, Seconds};
use crate::plan::{Binding, Cuts};
use crate::policy::Policy;

impl Router {
    /// Replaces the policy that chooses the instances of first segments. Requests in flight stay
    /// where they are; the index, the ledger and what was learned stay.
    ///
    /// # Errors
    /// `BadValue` if its curve of answer lengths does not suit the other policy; nothing changes
    /// then.
    pub fn set_policy(&mut self, policy: Box<dyn Policy>) -> Result<(), CoreError> {
        self.replace(policy, |state| &mut state.first)
    }

    /// Replaces the policy that chooses the instances of segments which follow others: where a
    /// request decodes whose prompt is prefilled elsewhere. What [`Router::set_policy`] keeps stays.
    ///
    /// # Errors
    /// As [`Router::set_policy`].
    pub fn set_decode_policy(&mut self, policy: Box<dyn Policy>) -> Result<(), CoreError> {
        self.replace(policy, |state| &mut state.later)
    }

    fn replace(
        &mut self,
        policy: Box<dyn Policy>,
        place: impl Fn(&mut State) -> &mut Selector,
    ) -> Result<(), CoreError> {
        let selector = place(&mut self.state);
        let new = Selector { made: selector.made, ..Selector::new(policy) };
        let old = std::mem::replace(selector, new);
        if let Err(error) = self.look_ahead() {
            *place(&mut self.state) = old;
            return Err(error);
        }
        self.fallbacks = std::mem::take(&mut self.fallbacks).and(old.policy.fallbacks());
        Ok(())
    }

    /// Keeps what the load will be, if anything asks for it, from the requests in flight on.
    fn look_ahead(&mut self) -> Result<(), CoreError> {
        if !self.state.look_ahead()? {
            return Ok(());
        }
        let now = self.latest;
        for (id, request) in self.requests.tickets.iter() {
            for leg in std::iter::once(&request.leg).chain(&request.later) {
                self.state.foresee(tickets::slot(id), leg, now);
            }
        }
        Ok(())
    }

    /// When the instance of a second segment is chosen; what is bound already stays so.
    pub fn set_binding(&mut self, binding: Binding) {
        self.state.config.binding = binding;
    }

    /// The feed of an instance's KV index.
    pub fn index_feed(&self, id: InstanceId) -> IndexFeed {
        self.state
            .instances
            .get(id.index())
            .map_or(self.state.config.index_feed, |instance| instance.index_feed)
    }

    /// Changes who feeds the index of an instance; what the index holds of it stays.
    ///
    /// # Errors
    /// `BadValue` if the router has no such slot.
    pub fn set_index_feed(&mut self, id: InstanceId, feed: IndexFeed) -> Result<(), CoreError> {
        self.state.instance_mut(id)?.index_feed = feed;
        Ok(())
    }

    /// Blocks that an instance's cache holds, where known.
    pub fn cache_blocks(&self, id: InstanceId) -> Option<u32> {
        self.state.instances.get(id.index())?.cache_blocks
    }

    /// Says what an instance's cache holds, all ranks together. What is beyond it leaves the index
    /// with [`crate::kv::index::KvIndex::trim`].
    ///
    /// # Errors
    /// `BadValue` if the router has no such slot.
    pub fn set_cache_blocks(&mut self, id: InstanceId, cache_blocks: Option<u32>) -> Result<(), CoreError> {
        self.state.instance_mut(id)?.cache_blocks = cache_blocks;
        self.state.index.set_capacity(id, cache_blocks);
        Ok(())
    }

    /// Switches the guard.
    pub fn set_guard(&mut self, on: bool) {
        self.state.guard.set_on(on);
    }

    /// Says what an instance's steps cost where its engine is not like the others (another GPU,
    /// more of them); `None`: as the configuration says. A new instance has none.
    ///
    /// # Errors
    /// `BadValue` if the router has no such slot.
    pub fn set_step_time(&mut self, id: InstanceId, step_time: Option<StepTime>) -> Result<(), CoreError> {
        self.state.instance_mut(id)?.step_time = step_time;
        Ok(())
    }

    /// Sets how requests are split from now on that no roles split.
    ///
    /// # Errors
    /// `BadValue` for a setting out of its range.
    pub fn set_split(&mut self, split: &Split) -> Result<(), CoreError> {
        self.state.set_split(split)
    }

    /// Says where an instance's engine can hand requests over and take them; a new one can
    /// anywhere.
    ///
    /// # Errors
    /// `BadValue` if the router has no such slot.
    pub fn set_cuts(&mut self, id: InstanceId, cuts: Cuts) -> Result<(), CoreError> {
        self.state.instance_mut(id)?.cuts = cuts;
        Ok(())
    }

    /// Says whether prefixes are pulled from now on, and when; what was learned of their cost is
    /// forgotten.
    ///
    /// # Errors
    /// `BadValue` for a setting out of its range.
    pub fn set_pull(&mut self, pull: Option<PullConfig>) -> Result<(), CoreError> {
        self.state.pulls = pull.map(Pulls::new).transpose()?;
        Ok(())
    }

    /// Orders requests by `priorities` from now on; `None`: they have none.
    ///
    /// # Errors
    /// `BadValue` for a setting out of its range.
    pub fn set_priorities(&mut self, priorities: Option<Priorities>) -> Result<(), CoreError> {
        self.requests.ordering = priorities.map(Ordering::new).transpose()?;
        Ok(())
    }

    /// Replaces `clock_offset_seconds` of [`Priorities::UniBoost`] and keeps what was learned: the
    /// wall clock was stepped, or drifted. Other orders have no clock.
    ///
    /// # Errors
    /// `BadValue` for an offset out of its range.
    pub fn set_clock_offset(&mut self, seconds: Seconds) -> Result<(), CoreError> {
        self.requests.ordering.as_mut().map_or(Ok(()), |ordering| ordering.set_clock_offset(seconds))
    }

    /// Sets how running requests are moved from now on; `None`: not at all. What its forecast reads is
    /// learned from now on.
    ///
    /// # Errors
    /// `BadValue` if the curves of answer lengths of the policies do not suit each other.
    pub fn set_rescheduling(&mut self, rescheduling: Option<Rescheduling>) -> Result<(), CoreError> {
        let turns = rescheduling.as_ref().is_some_and(|by| by.forecast.reads_turns());
        self.requests.turns = turns.then(|| self.requests.turns.take().unwrap_or_default());
        self.state.rescheduling = rescheduling;
        self.look_ahead()
    }
}
