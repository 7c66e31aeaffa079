//! Policies on trial: a canary decides some requests, a shadow scores requests without placing
//! them.
use super::context::DecisionContext;
use super::parts::Turn;
use super::plan::Matched;
use super::router::Router;
use super::state::{Selector, State};
use crate::error::CoreError;
use crate::ids::{InstanceId, Seconds};
use crate::indicators::{Indicator, IndicatorSet, Kernels};
use crate::policy::Policy;
use crate::record::Shadow;
use crate::request::{Arm, Request};

/// Seed of the shadow's random choices. They are apart from the router's own, which stay the same
/// with and without a shadow.
const SHADOW_SEED: u64 = 0x5eed;

impl Router {
    /// Sets the policy of requests in [`Arm::Canary`]; `None`: the router's policy decides them.
    /// `guarded`: whether the hot-spot guard filters the canary's candidates. Requests in flight
    /// stay on their instances.
    ///
    /// # Errors
    /// The errors of [`Router::set_policy`]; nothing changes then.
    pub fn set_canary(&mut self, canary: Option<(Box<dyn Policy>, bool)>) -> Result<(), CoreError> {
        let canary = canary.map(|(policy, guarded)| Selector { guarded, ..Selector::new(policy) });
        let old = std::mem::replace(&mut self.state.canary, canary);
        if let Err(error) = self.look_ahead() {
            self.state.canary = old;
            return Err(error);
        }
        if let Some(old) = old {
            self.fallbacks = std::mem::take(&mut self.fallbacks).and(old.policy.fallbacks());
        }
        self.switch_guard();
        Ok(())
    }

    /// Sets the policy that scores requests with [`Request::shadow`]; `None`: no policy does.
    /// `guarded`: whether the hot-spot guard filters its candidates, if the guard is on.
    ///
    /// # Errors
    /// The errors of [`Router::set_policy`]; nothing changes then.
    pub fn set_shadow(&mut self, shadow: Option<(Box<dyn Policy>, bool)>) -> Result<(), CoreError> {
        let shadow = shadow.map(|(policy, guarded)| Selector { guarded, ..Selector::new(policy) });
        let old = std::mem::replace(&mut self.state.shadow, shadow);
        if let Err(error) = self.look_ahead() {
            self.state.shadow = old;
            return Err(error);
        }
        let slots = self.state.fleet.slots();
        self.shadow = self.state.shadow.is_some().then(|| {
            let mut context = Box::new(DecisionContext::new(SHADOW_SEED));
            context.resize(slots);
            context
        });
        Ok(())
    }

    /// Returns the policy of the canary, if there is one.
    pub fn canary(&self) -> Option<&dyn Policy> {
        self.state.canary.as_ref().map(|canary| &*canary.policy)
    }

    /// Scores a request under the shadow's policy. `chosen`: the instance that really gets the
    /// request, whose prefix match is in the router's context.
    pub(super) fn shadow_of(
        &mut self,
        request: &Request<'_>,
        chosen: InstanceId,
        now: Seconds,
    ) -> Option<Box<Shadow>> {
        let Router { state, context, shadow, .. } = self;
        let shadow = shadow.as_deref_mut()?;
        shadow.resize(state.fleet.slots());
        shadow.hit_blocks.clone_from(&context.hit_blocks);
        shadow.tier_blocks.clone_from(&context.tier_blocks);
        shadow.tiers.clone_from(&context.tiers);
        shadow.roomy.clone_from(&context.roomy);
        shadow.excluded.clone_from(&context.excluded);
        shadow.unscored = 0;
        let seen = state.shadow_of(shadow, state.shadow.as_ref()?, request, chosen, now);
        state.shadow.iter_mut().for_each(|each| each.made += 1);
        Some(Box::new(seen))
    }
}

/// Returns the decisions that the fallback of a selector's policy made.
fn failures(selector: &Selector) -> u64 {
    let fallbacks = selector.policy.fallbacks();
    fallbacks.errors + fallbacks.overruns + fallbacks.paused
}

impl State {
    fn shadow_of(
        &self,
        context: &mut DecisionContext,
        by: &Selector,
        request: &Request<'_>,
        chosen: InstanceId,
        now: Seconds,
    ) -> Shadow {
        let failures_before = failures(by);
        let asked = Request { arm: Arm::Shadow, ..request.clone() };
        let choice = self.choose(context, &asked, Turn::First, &[], None, now);
        let failed = failures(by) > failures_before || context.unscored > 0;
        let choice = choice.ok().filter(|_| !failed);
        let reads = IndicatorSet::of(&[Indicator::PredictedTtftSeconds]);
        let DecisionContext { hit_blocks, tier_blocks, tiers, first, .. } = context;
        let matched = Matched { hit_blocks, tier_blocks, tiers };
        let kernels = self.kernels(matched, request, reads, None, &[], now);
        let mut of = |id: InstanceId| {
            let (hit, _) = self.reusable_tokens(request, matched.blocks_on(id.index()));
            let ttft = first.scores.scratch.computed();
            kernels.fill(reads, id.index()..id.index() + 1, 0, ttft);
            (hit as u32, ttft.get(Indicator::PredictedTtftSeconds)[0])
        };
        let choice = choice.map(|id| {
            let (hit_tokens, ttft_seconds) = of(id);
            (self.fleet.name(id).clone(), hit_tokens, ttft_seconds)
        });
        Shadow { policy: by.name.clone(), choice, chosen_ttft_seconds: of(chosen).1 }
    }
}
