//! Settings that can change while a router serves.
use super::fetch_cost::Fetches;
use super::listeners::shadow::ShadowChoices;
use super::plan::planners::Split;
use super::router::Router;
use super::settings::{FetchConfig, IndexFeed};
use super::state::{Selector, State, check_cache_blocks};
use super::tickets;
use crate::error::CoreError;
use crate::estimate::StepTime;
use crate::ids::Slot;
use crate::plan::{Binding, Cuts};
use crate::policy::Policy;

impl Router {
    /// Replaces the policy that chooses the instances of first segments. Requests in flight stay on
    /// their instances; the index, the ledger and learned values stay.
    ///
    /// # Errors
    /// `BadValue` if the new policy and the other policy need different survival curves; nothing
    /// changes then.
    pub fn set_policy(&mut self, policy: Box<dyn Policy>) -> Result<(), CoreError> {
        self.replace(policy, |state| &mut state.first)
    }

    /// Replaces the policy that chooses the instances of follow-up segments, such as decodes after
    /// a prefill on another instance. Keeps the same state as [`Router::set_policy`].
    ///
    /// # Errors
    /// The errors of [`Router::set_policy`].
    pub fn set_decode_policy(&mut self, policy: Box<dyn Policy>) -> Result<(), CoreError> {
        self.replace(policy, |state| &mut state.later)
    }

    fn replace(
        &mut self,
        policy: Box<dyn Policy>,
        place: impl Fn(&mut State) -> &mut Selector,
    ) -> Result<(), CoreError> {
        let Selector { made, guarded, .. } = *place(&mut self.state);
        let old = self.swap(place, Selector { made, guarded, ..Selector::new(policy) })?;
        self.fallbacks = std::mem::take(&mut self.fallbacks).and(old.policy.fallbacks());
        Ok(())
    }

    /// Puts a policy in a place, and returns the old one. Nothing changes on an error.
    fn swap<T>(&mut self, place: impl Fn(&mut State) -> &mut T, new: T) -> Result<T, CoreError> {
        let old = std::mem::replace(place(&mut self.state), new);
        if let Err(error) = self.look_ahead() {
            *place(&mut self.state) = old;
            return Err(error);
        }
        Ok(old)
    }

    /// Sets the policy of requests in the canary ([`Request::arm`](crate::request::Request::arm));
    /// `None`: the router's policy decides them. `guarded`: whether the hot-spot guard filters the
    /// canary's candidates. Requests in flight stay on their instances.
    ///
    /// # Errors
    /// The errors of [`Router::set_policy`]; nothing changes then.
    pub fn set_canary(&mut self, canary: Option<(Box<dyn Policy>, bool)>) -> Result<(), CoreError> {
        if let Some(old) = self.swap(|state| &mut state.canary, canary.map(Selector::on_trial))? {
            self.fallbacks = std::mem::take(&mut self.fallbacks).and(old.policy.fallbacks());
        }
        self.switch_guard();
        Ok(())
    }

    /// Sets the policy of the shadow ([`Request::shadow`](crate::request::Request::shadow));
    /// `None`: there is no shadow. `guarded`: whether the hot-spot guard filters its candidates, if
    /// the guard is on.
    ///
    /// # Errors
    /// The errors of [`Router::set_policy`]; nothing changes then.
    pub fn set_shadow(&mut self, shadow: Option<(Box<dyn Policy>, bool)>) -> Result<(), CoreError> {
        self.swap(|state| &mut state.shadow, shadow.map(Selector::on_trial))?;
        let slots = self.state.fleet.slots();
        self.listeners.shadow = self.state.shadow.is_some().then(|| ShadowChoices::new(slots));
        Ok(())
    }

    /// Starts to keep predicted loads, if needed, and adds the requests in flight.
    pub(super) fn look_ahead(&mut self) -> Result<(), CoreError> {
        if !self.state.look_ahead()? {
            return Ok(());
        }
        let now = self.latest;
        for (id, request) in self.requests.tickets.iter() {
            for placed in std::iter::once(&request.open).chain(&request.later) {
                self.state.foresee(tickets::slot(id), placed, now);
            }
        }
        Ok(())
    }

    /// Sets when the instance of a follow-up segment is chosen. Bound segments stay bound.
    pub fn set_binding(&mut self, binding: Binding) {
        self.state.config.binding = binding;
    }

    /// Returns the source of an instance's KV index entries.
    pub fn index_feed(&self, id: Slot) -> IndexFeed {
        self.state
            .instances
            .get(id.index())
            .map_or(self.state.config.index_feed, |instance| instance.index_feed)
    }

    /// Sets the source of an instance's KV index entries; existing entries stay.
    ///
    /// # Errors
    /// `BadValue` if the router has no such slot.
    pub fn set_index_feed(&mut self, id: Slot, feed: IndexFeed) -> Result<(), CoreError> {
        self.state.instance_mut(id)?.index_feed = feed;
        self.state.caches.write().set_feed(id, feed);
        Ok(())
    }

    /// Returns the number of blocks in an instance's cache, if known.
    pub fn cache_blocks(&self, id: Slot) -> Option<u32> {
        self.state.instances.get(id.index())?.cache_blocks
    }

    /// Sets the number of blocks in an instance's cache, over all ranks.
    /// [`crate::kv::index::KvIndex::trim`] removes excess blocks from the index.
    ///
    /// # Errors
    /// `BadValue` if the router has no such slot, or for 0 blocks.
    pub fn set_cache_blocks(&mut self, id: Slot, cache_blocks: Option<u32>) -> Result<(), CoreError> {
        self.state.fleet.check(id)?;
        check_cache_blocks(self.state.fleet.name(id), cache_blocks)?;
        let old = std::mem::replace(&mut self.state.instance_mut(id)?.cache_blocks, cache_blocks);
        let mut caches = self.state.caches.write();
        if old != cache_blocks {
            caches.forget_full(id); // of another engine, or of another setting
        }
        caches.gpu_mut().set_capacity(id, cache_blocks);
        Ok(())
    }

    /// Sets the number of LoRA adapters that the instance's engine keeps loaded; `None`: unknown.
    ///
    /// # Errors
    /// `BadValue` if the router has no such slot.
    pub fn set_max_loras(&mut self, id: Slot, max_loras: Option<u32>) -> Result<(), CoreError> {
        self.state.fleet.check(id)?;
        self.state.ledger.parts_mut(id.index()).0.set_max_loras(max_loras);
        Ok(())
    }

    /// Forgets the LoRA adapters that the instance has loaded: its engine has restarted.
    pub(crate) fn forget_loaded(&mut self, id: Slot) {
        self.state.ledger.parts_mut(id.index()).0.forget_loaded();
    }

    /// Sets the step-time model of an instance whose hardware differs from the others. `None`: the
    /// model of the configuration, which is also the default.
    ///
    /// # Errors
    /// `BadValue` if the router has no such slot.
    pub fn set_step_time(&mut self, id: Slot, step_time: Option<StepTime>) -> Result<(), CoreError> {
        self.state.instance_mut(id)?.step_time = step_time;
        Ok(())
    }

    /// Sets the planner for requests that roles do not split.
    ///
    /// # Errors
    /// `BadValue` for a setting out of its range.
    pub fn set_split(&mut self, split: &Split) -> Result<(), CoreError> {
        let lengths = self.state.set_split(split)?;
        // A new planner uses what its predecessor has learned.
        self.state.ledger.answers.keep_lengths(lengths);
        Ok(())
    }

    /// Sets the positions at which an instance's engine can send or receive KV. The default is any
    /// position.
    ///
    /// # Errors
    /// `BadValue` if the router has no such slot.
    pub fn set_cuts(&mut self, id: Slot, cuts: Cuts) -> Result<(), CoreError> {
        self.state.instance_mut(id)?.cuts = cuts;
        Ok(())
    }

    /// Turns prefix fetches on or off and sets their parameters. Resets the learned cost.
    ///
    /// # Errors
    /// `BadValue` for a setting out of its range.
    pub fn set_fetch(&mut self, fetch: Option<FetchConfig>) -> Result<(), CoreError> {
        self.state.fetches = fetch.map(Fetches::new).transpose()?;
        Ok(())
    }
}
