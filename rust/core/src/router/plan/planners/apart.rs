//! Decode placement: a request decodes on its prefill instance or, split at the end of its prompt,
//! on another instance. The planner minimizes the time that all requests together lose
//! ([`crate::split::apart`]).
use super::*;
use crate::estimate::{OutputLength, StepTime};
use crate::indicators::Indicator;
use crate::policy::select;
use crate::record::Balance;
use crate::request::Request;
use crate::router::context::DecisionContext;
use crate::router::parts::Turn;
use crate::split::apart::{Beside, Settings, lost_seconds};

/// Maximum of settings in seconds.
const MAX_SECONDS: f64 = 1e6;

pub static SPEC: PlannerSpec = PlannerSpec {
    name: "apart",
    about: "splits a request at the end of its prompt if all requests together lose less time when it decodes on another instance",
    source: "ours",
    maturity: Maturity::Experimental,
    settings: &[
        Knob::float(
            "recent_seconds",
            1e-6,
            MAX_SECONDS,
            30.0,
            "time constant of an instance's share of time spent on prefills, seconds",
        ),
        Knob::float(
            "min_gain_seconds",
            0.0,
            MAX_SECONDS,
            0.3,
            "minimum gain of a decode on another instance, seconds over all requests",
        ),
        Knob::float(
            "transfer_seconds_per_token",
            0.0,
            MAX_SECONDS,
            4e-6,
            "seconds per transferred token, until prefix fetches are measured",
        ),
        Knob::float("transfer_fixed_seconds", 0.0, MAX_SECONDS, 0.005, "fixed seconds per handoff"),
        Knob::float(
            "max_stall_seconds",
            0.0,
            MAX_SECONDS,
            0.1,
            "maximum expected handoff time, seconds, for which the client gets the prefill's own first token; \
             0: never",
        ),
        Knob::int(
            "prior_tokens",
            1,
            u32::MAX as i64,
            300,
            "assumed output tokens until 8 similar outputs have ended; chats have 200 to 350",
        ),
    ],
    keeps_tokens: true,
    build,
};

#[derive(Debug)]
struct Apart {
    settings: Settings,
    /// Assumed output tokens until enough answers have ended.
    prior_tokens: u32,
}

fn build(settings: &Knobs) -> Result<Box<dyn Planner>, CoreError> {
    let get = |name| settings.get(name);
    let apart = Apart {
        settings: Settings {
            recent_seconds: get("recent_seconds"),
            min_gain_seconds: get("min_gain_seconds"),
            transfer_seconds_per_token: get("transfer_seconds_per_token"),
            transfer_fixed_seconds: get("transfer_fixed_seconds"),
            max_stall_seconds: get("max_stall_seconds"),
        },
        prior_tokens: get("prior_tokens") as u32,
    };
    Ok(Box::new(apart))
}

/// KV cache usage above which an engine only fetches what it must. vLLM keeps the KV of a finished
/// request for a lease if the request fetched the front of its prompt, and this KV has no further
/// use.
const MAX_KV_USAGE: f64 = 0.8;

/// A request prefilled on `first` that can decode on any instance.
struct Prefilled<'a> {
    request: &'a Request<'a>,
    output_tokens: f64,
    first: Slot,
    /// Step-time model for instances without data.
    any: StepTime,
    /// Transfer seconds per token, and fixed seconds per transfer.
    way: (Seconds, Seconds),
    /// Maximum handoff time for the prefill's own token
    /// ([`crate::split::apart::Settings::max_stall_seconds`]).
    max_stall_seconds: Seconds,
    now: Seconds,
}

impl Planner for Apart {
    /// Plans the decode: no follow-up segment, or the rest of the output on another instance.
    fn rest(&self, view: &mut View<'_>) -> Rest {
        let View { state, request, first, failed, now, .. } = *view;
        let context = &mut *view.context;
        let Some(output_tokens) = request.expected_output_tokens else {
            return context.leave_whole("output lengths are unknown");
        };
        if output_tokens < 2 {
            return context.leave_whole("its output ends with its prefill");
        }
        // An instance without reliable data uses another instance's model, so that it gets
        // requests.
        let Some(any) = (0..state.fleet.slots()).find_map(|slot| state.step_time_of(slot)) else {
            return context.leave_whole("the speed of the instances is unknown");
        };
        if state.mark_eligible(context, request, Turn::Peer(Some(first)), failed) == 0 {
            return context.leave_whole("no second instance is available");
        }
        let settings = &self.settings;
        let way = match state.fetches.map(|fetches| fetches.at(now).learned()) {
            Some((per_token, _, _)) => (per_token, settings.transfer_fixed_seconds),
            None => (settings.transfer_seconds_per_token, settings.transfer_fixed_seconds),
        };
        let asked = Prefilled {
            request,
            output_tokens: f64::from(output_tokens),
            first,
            any,
            way,
            max_stall_seconds: settings.max_stall_seconds,
            now,
        };
        let slots = state.fleet.slots();
        context.later.scores.reset(slots);
        for slot in (0..slots).filter(|slot| *slot != first.index()) {
            if context.later.eligible[slot] {
                context.later.scores.score[slot] = state.lost_on(context, &asked, slot);
            }
        }
        let stay_seconds = state.lost_on(context, &asked, first.index());
        let DecisionContext { later, rng, .. } = &mut *context;
        let Some(best) = select::best(&mut later.scores, &later.eligible, rng) else {
            return context.leave_whole("the predicted losses on other instances are not finite");
        };
        let apart_seconds = context.later.scores.score[best];
        context.balance = Some(Balance { stay_seconds, apart_seconds, ..Balance::default() });
        if stay_seconds - apart_seconds <= settings.min_gain_seconds {
            return context.leave_whole("a decode on another instance gains too little");
        }
        let start_seconds = state.expected_handoff(context, request, first, now);
        let instance = Some(Slot(best as u32));
        let from_token =
            request.prompt_tokens.saturating_add(u32::from(state.tells_early(context, &asked, best)));
        Rest::from_iter([Follow { from_token, instance, start_seconds, score: apart_seconds }])
    }

    fn lengths(&self) -> Result<Option<OutputLength>, CoreError> {
        Ok(Some(OutputLength::mean(self.prior_tokens, CLASSES)?))
    }

    fn recent_seconds(&self) -> Option<Seconds> {
        Some(self.settings.recent_seconds)
    }
}

impl State {
    /// Returns the time that all requests together lose if the request decodes on `slot`.
    fn lost_on(&self, context: &DecisionContext, asked: &Prefilled<'_>, slot: usize) -> Seconds {
        let Prefilled { request, now, .. } = *asked;
        let step = self.step_time_of(slot).unwrap_or(asked.any);
        let load = self.load_of(slot, now);
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

    /// Returns the transfer seconds of the request's KV to `slot`.
    fn way(&self, context: &DecisionContext, asked: &Prefilled<'_>, slot: usize) -> Seconds {
        let (per_token, fixed) = asked.way;
        let there = self.saved_tokens(asked.request, context.matched.hit_blocks[slot]);
        fixed + per_token * (f64::from(asked.request.prompt_tokens) - there)
    }

    /// Returns whether the client gets the prefill's own token before a handoff to `slot`. After
    /// this token, the handoff is a gap in the stream.
    fn tells_early(&self, context: &DecisionContext, asked: &Prefilled<'_>, slot: usize) -> bool {
        let able =
            [asked.first.index(), slot].iter().all(|slot| self.instances[*slot].cuts == Cuts::Anywhere);
        // False without a reported usage.
        let full = self.ledger.get(Indicator::KvUsage)[slot] >= MAX_KV_USAGE;
        able && !full && self.way(context, asked, slot) <= asked.max_stall_seconds
    }
}
