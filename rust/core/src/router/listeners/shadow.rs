//! The shadow policy: it scores requests without placing them.
use crate::ids::{Seconds, Slot};
use crate::indicators::{Indicator, IndicatorSet, Kernels};
use crate::record::Shadow;
use crate::request::{Arm, Request};
use crate::router::context::DecisionContext;
use crate::router::parts::Turn;
use crate::router::state::{Selector, State};

/// Seed of the shadow's random choices. They are apart from the router's own, which stay the same
/// with and without a shadow.
const SHADOW_SEED: u64 = 0x5eed;

/// Buffers and random choices of the shadow.
pub struct ShadowChoices(Box<DecisionContext>);

impl ShadowChoices {
    /// Creates the buffers for `slots` slots.
    pub fn new(slots: usize) -> ShadowChoices {
        let mut context = Box::new(DecisionContext::new(SHADOW_SEED));
        context.resize(slots);
        ShadowChoices(context)
    }

    /// Scores a request under the shadow's policy, and counts its decision. `chosen`: the instance
    /// that really gets the request, whose prefix match is in `decided`.
    pub fn score(
        &mut self,
        state: &mut State,
        decided: &DecisionContext,
        request: &Request<'_>,
        chosen: Slot,
        now: Seconds,
    ) -> Option<Box<Shadow>> {
        let context = &mut *self.0;
        context.resize(state.fleet.slots());
        context.matched.copy_from(&decided.matched);
        context.roomy.clone_from(&decided.roomy);
        context.excluded.clone_from(&decided.excluded);
        context.unscored = 0;
        let seen = choice(state, context, state.shadow.as_ref()?, request, chosen, now);
        state.shadow.iter_mut().for_each(|each| each.made += 1);
        Some(Box::new(seen))
    }
}

/// Returns the decisions that the fallback of a selector's policy made.
fn failures(selector: &Selector) -> u64 {
    let fallbacks = selector.policy.fallbacks();
    fallbacks.errors + fallbacks.overruns + fallbacks.paused
}

fn choice(
    state: &State,
    context: &mut DecisionContext,
    by: &Selector,
    request: &Request<'_>,
    chosen: Slot,
    now: Seconds,
) -> Shadow {
    let failures_before = failures(by);
    let asked = Request { arm: Arm::Shadow, ..request.clone() };
    let choice = state.choose(context, &asked, Turn::First, &[], None, now);
    let failed = failures(by) > failures_before || context.unscored > 0;
    let choice = choice.ok().filter(|_| !failed);
    let reads = IndicatorSet::of(&[Indicator::PredictedTtftSeconds]);
    let DecisionContext { matched, first, .. } = context;
    let kernels = state.kernels(matched, request, reads, None, &[], now);
    let mut of = |id: Slot| {
        let (hit, _) = state.reusable_tokens(request, matched.blocks_on(id.index()));
        let ttft = first.scores.scratch.computed();
        kernels.fill(reads, id.index()..id.index() + 1, 0, ttft);
        (hit as u32, ttft.get(Indicator::PredictedTtftSeconds)[0])
    };
    let choice = choice.map(|id| {
        let (hit_tokens, ttft_seconds) = of(id);
        (state.fleet.name(id).clone(), hit_tokens, ttft_seconds)
    });
    Shadow { policy: by.name.clone(), choice, chosen_ttft_seconds: of(chosen).1 }
}
