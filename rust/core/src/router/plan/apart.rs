//! Where a request decodes: where it was prefilled, or cut at its prompt's end and elsewhere,
//! wherever all requests together lose least ([`crate::split::apart`]).
use super::parts::{Follow, Rest, Turn};
use crate::estimate::StepTime;
use crate::ids::{InstanceId, Seconds};
use crate::indicators::Indicator;
use crate::plan::Cuts;
use crate::policy::select;
use crate::receipt::Balance;
use crate::request::Request;
use crate::router::context::DecisionContext;
use crate::router::settings::Apart;
use crate::router::state::State;
use crate::split::apart::{Beside, lost_seconds};

/// Share of its KV cache from which on an engine fetches no more than it must: vLLM holds what a
/// request had that fetched the front of its prompt for a lease behind its end, and all of that is
/// of no use.
const MOST_KV_USAGE: f64 = 0.8;

/// A request that was prefilled on `first`, to decode anywhere.
struct Asked<'a> {
    request: &'a Request<'a>,
    output_tokens: f64,
    first: InstanceId,
    /// What the steps of an instance take of which nothing is known.
    any: StepTime,
    /// Seconds that a token takes on its way elsewhere, and that the way takes besides.
    way: (Seconds, Seconds),
    /// See [`crate::split::apart::Settings::most_stall_seconds`].
    most_stall_seconds: Seconds,
    now: Seconds,
}

impl State {
    /// What follows a first segment on `first`: nothing, or the answer on another instance.
    pub fn rest_apart(
        &self,
        context: &mut DecisionContext,
        apart: &Apart,
        request: &Request<'_>,
        first: InstanceId,
        failed: &[u32],
        now: Seconds,
    ) -> Rest {
        let Some(output_tokens) = request.expected_output_tokens else {
            return context.leave_whole("nothing is known of the length of answers");
        };
        if output_tokens < 2 {
            return context.leave_whole("its answer ends with its prefill");
        }
        // One of which nothing is known, or little that is sure, is taken for another, or it would
        // never be tried.
        let Some(any) = (0..self.fleet.slots()).find_map(|slot| self.step_time_of(slot)) else {
            return context.leave_whole("nothing is known of the instances' speed");
        };
        if self.admit(context, Turn::Peer(Some(first)), failed) == 0 {
            return context.leave_whole("no second instance takes over");
        }
        let settings = &apart.settings;
        let way = match self.pulls.map(|pulls| pulls.learned()) {
            Some((per_token, _, _)) => (per_token, settings.transfer_fixed_seconds),
            None => (settings.transfer_seconds_per_token, settings.transfer_fixed_seconds),
        };
        let asked = Asked {
            request,
            output_tokens: f64::from(output_tokens),
            first,
            any,
            way,
            most_stall_seconds: settings.most_stall_seconds,
            now,
        };
        let slots = self.fleet.slots();
        context.later.scores.reset(slots);
        for slot in (0..slots).filter(|slot| *slot != first.index()) {
            if context.later.eligible[slot] {
                context.later.scores.score[slot] = self.lost_on(context, &asked, slot);
            }
        }
        let stay_seconds = self.lost_on(context, &asked, first.index());
        let Some(best) = select::best(&context.later.scores, &context.later.eligible, &mut context.rng)
        else {
            return context.leave_whole("what the other instances would lose is no number");
        };
        let apart_seconds = context.later.scores.score[best];
        context.balance = Some(Balance { stay_seconds, apart_seconds, ..Balance::default() });
        if stay_seconds - apart_seconds <= settings.least_gain_seconds {
            return context.leave_whole("too little is lost where it is");
        }
        let start_seconds = self.expected_handoff(context, request, first, now);
        let instance = Some(InstanceId(best as u32));
        let from_token =
            request.prompt_tokens.saturating_add(u32::from(self.tells_early(context, &asked, best)));
        Rest::from_iter([Follow { from_token, instance, start_seconds, score: apart_seconds }])
    }

    /// What all requests together lose if it decodes on `slot`.
    fn lost_on(&self, context: &DecisionContext, asked: &Asked<'_>, slot: usize) -> Seconds {
        let Asked { request, now, .. } = *asked;
        let step = self.step_time_of(slot).unwrap_or(asked.any);
        let load = self.load_of(InstanceId(slot as u32), now);
        let beside = Beside {
            decoding: load.decoding,
            context_tokens: load.context_tokens,
            prefill_share: self.ledger.prefill_share_on(slot, &step, now),
            queued_prefill_seconds: step.prefills(load.queued_prefill_tokens, load.queued_prefill_pairs),
        };
        let prompt_tokens = f64::from(request.prompt_tokens);
        let lost = |steps| lost_seconds(&step, &beside, prompt_tokens, steps);
        if slot == asked.first.index() {
            return lost(asked.output_tokens - 1.0);
        }
        let made = f64::from(u8::from(self.tells_early(context, asked, slot)));
        lost(asked.output_tokens - made) + self.way(context, asked, slot)
    }

    /// Seconds that its KV takes to `slot`.
    fn way(&self, context: &DecisionContext, asked: &Asked<'_>, slot: usize) -> Seconds {
        let (per_token, fixed) = asked.way;
        let there = self.saved_tokens(asked.request, context.hit_blocks[slot]);
        fixed + per_token * (f64::from(asked.request.prompt_tokens) - there)
    }

    /// Whether the client gets the prefill's own token where it goes on at `slot`: once it has one,
    /// the way there is a gap in its answer.
    fn tells_early(&self, context: &DecisionContext, asked: &Asked<'_>, slot: usize) -> bool {
        let able =
            [asked.first.index(), slot].iter().all(|slot| self.instances[*slot].cuts == Cuts::Anywhere);
        let full = self.ledger.get(Indicator::KvUsage)[slot] >= MOST_KV_USAGE; // never, where it is not told
        able && !full && self.way(context, asked, slot) <= asked.most_stall_seconds
    }
}
