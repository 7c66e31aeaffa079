//! Where a request decodes: where it was prefilled, or split at its prompt's end and elsewhere,
//! wherever all requests together lose least ([`crate::split::apart`]).
use super::*;
use crate::estimate::{OutputLength, StepTime};
use crate::indicators::Indicator;
use crate::policy::select;
use crate::receipt::Balance;
use crate::request::Request;
use crate::router::context::DecisionContext;
use crate::router::parts::Turn;
use crate::split::apart::{Beside, Settings, lost_seconds};

/// Most seconds of a setting.
const MOST_SECONDS: f64 = 1e6;

pub static SPEC: PlannerSpec = PlannerSpec {
    name: "apart",
    about: "splits a request at its prompt's end if all requests together lose less time where it then decodes",
    source: "ours",
    maturity: Maturity::Experimental,
    settings: &[
        Knob::float(
            "recent_seconds",
            1e-6,
            MOST_SECONDS,
            30.0,
            "time constant of the share of its time that an instance spends on prefills, seconds",
        ),
        Knob::float(
            "least_gain_seconds",
            0.0,
            MOST_SECONDS,
            0.3,
            "what decoding elsewhere must gain, seconds over all requests",
        ),
        Knob::float(
            "transfer_seconds_per_token",
            0.0,
            MOST_SECONDS,
            4e-6,
            "seconds per moved token, until prefix fetches have been measured",
        ),
        Knob::float("transfer_fixed_seconds", 0.0, MOST_SECONDS, 0.005, "seconds of each hand-over besides"),
        Knob::float(
            "most_stall_seconds",
            0.0,
            MOST_SECONDS,
            0.1,
            "the client gets the prefill's own token if the hand-over is expected to take at most this long; \
             0: never",
        ),
        Knob::int(
            "prior_tokens",
            1,
            u32::MAX as i64,
            300,
            "tokens of an answer until 8 answers of its kind have ended; chats have 200 to 350",
        ),
        Knob::flag(
            "lengths_given",
            false,
            "requests bring the length of their answer (the oracle of a simulation); nothing is learned",
        )
        .for_studies(),
    ],
    keeps_tokens: true,
    build,
};

#[derive(Debug)]
struct Apart {
    settings: Settings,
    /// See `prior_tokens` of the settings; `None`: requests bring their lengths.
    prior_tokens: Option<u32>,
}

fn build(settings: &Knobs) -> Result<Box<dyn Planner>, CoreError> {
    let get = |name| settings.get(name);
    let apart = Apart {
        settings: Settings {
            recent_seconds: get("recent_seconds"),
            least_gain_seconds: get("least_gain_seconds"),
            transfer_seconds_per_token: get("transfer_seconds_per_token"),
            transfer_fixed_seconds: get("transfer_fixed_seconds"),
            most_stall_seconds: get("most_stall_seconds"),
        },
        prior_tokens: (get("lengths_given") == 0.0).then(|| get("prior_tokens") as u32),
    };
    Ok(Box::new(apart))
}

/// Share of its KV cache from which on an engine fetches no more than it must: vLLM holds what a
/// request had that fetched the front of its prompt for a lease behind its end, and all of that is
/// of no use.
const MOST_KV_USAGE: f64 = 0.8;

/// A request that was prefilled on `first`, to decode anywhere.
struct Prefilled<'a> {
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

impl Planner for Apart {
    /// What follows a first segment on `first`: nothing, or the answer on another instance.
    fn rest(&self, view: &mut View<'_>) -> Rest {
        let View { state, request, first, failed, now, .. } = *view;
        let context = &mut *view.context;
        let Some(output_tokens) = request.expected_output_tokens else {
            return context.leave_whole("nothing is known of the length of answers");
        };
        if output_tokens < 2 {
            return context.leave_whole("its answer ends with its prefill");
        }
        // One of which nothing is known, or little that is sure, is taken for another, or it would
        // never be tried.
        let Some(any) = (0..state.fleet.slots()).find_map(|slot| state.step_time_of(slot)) else {
            return context.leave_whole("nothing is known of the instances' speed");
        };
        if state.admit(context, Turn::Peer(Some(first)), failed) == 0 {
            return context.leave_whole("no second instance takes over");
        }
        let settings = &self.settings;
        let way = match state.pulls.map(|pulls| pulls.learned()) {
            Some((per_token, _, _)) => (per_token, settings.transfer_fixed_seconds),
            None => (settings.transfer_seconds_per_token, settings.transfer_fixed_seconds),
        };
        let asked = Prefilled {
            request,
            output_tokens: f64::from(output_tokens),
            first,
            any,
            way,
            most_stall_seconds: settings.most_stall_seconds,
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
        let Some(best) = select::best(&context.later.scores, &context.later.eligible, &mut context.rng)
        else {
            return context.leave_whole("what the other instances would lose is no number");
        };
        let apart_seconds = context.later.scores.score[best];
        context.balance = Some(Balance { stay_seconds, apart_seconds, ..Balance::default() });
        if stay_seconds - apart_seconds <= settings.least_gain_seconds {
            return context.leave_whole("too little is lost where it is");
        }
        let start_seconds = state.expected_handoff(context, request, first, now);
        let instance = Some(InstanceId(best as u32));
        let from_token =
            request.prompt_tokens.saturating_add(u32::from(state.tells_early(context, &asked, best)));
        Rest::from_iter([Follow { from_token, instance, start_seconds, score: apart_seconds }])
    }

    fn lengths(&self) -> Result<Option<OutputLength>, CoreError> {
        self.prior_tokens.map(|prior| OutputLength::mean(prior, CLASSES)).transpose()
    }

    fn recent_seconds(&self) -> Option<Seconds> {
        Some(self.settings.recent_seconds)
    }
}

impl State {
    /// What all requests together lose if it decodes on `slot`.
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

    /// Seconds that its KV takes to `slot`.
    fn way(&self, context: &DecisionContext, asked: &Prefilled<'_>, slot: usize) -> Seconds {
        let (per_token, fixed) = asked.way;
        let there = self.saved_tokens(asked.request, context.hit_blocks[slot]);
        fixed + per_token * (f64::from(asked.request.prompt_tokens) - there)
    }

    /// Whether the client gets the prefill's own token where it goes on at `slot`: once it has one,
    /// the way there is a gap in its answer.
    fn tells_early(&self, context: &DecisionContext, asked: &Prefilled<'_>, slot: usize) -> bool {
        let able =
            [asked.first.index(), slot].iter().all(|slot| self.instances[*slot].cuts == Cuts::Anywhere);
        let full = self.ledger.get(Indicator::KvUsage)[slot] >= MOST_KV_USAGE; // never, where it is not told
        able && !full && self.way(context, asked, slot) <= asked.most_stall_seconds
    }
}
