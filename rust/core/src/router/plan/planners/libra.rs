//! Libra: the pair first, then the token at which both instances are busy for equally long.
use super::*;
use crate::estimate::output_length::{MARGIN_TOKENS, QUANTILE};
use crate::estimate::{OutputLength, StepTime};
use crate::receipt::Balance;
use crate::router::parts::Rest;
use crate::split::{self, Placed, Settings};
use smallvec::SmallVec;

/// Most seconds of a transfer.
const MOST_SECONDS: f64 = 1e6;

pub static SPEC: PlannerSpec = PlannerSpec {
    name: "libra",
    about: "splits a request at the token that balances its two instances, if that pays; into three parts, unconditionally",
    source: "Libra (NSDI 2026), sections 4.1 (Algorithm 1) and 4.4",
    settings: &[
        Knob::int(
            "parts",
            2,
            3,
            2,
            "parts of a request at most; 3 for one that gives the number of its reasoning tokens",
        ),
        Knob::int("probes", 1, 32, 6, "probes of the search at most (K; the paper's 6)"),
        Knob::float(
            "epsilon",
            0.0,
            1.0,
            0.05,
            "gap of both instances' seconds that counts as balance, a share of the request's own seconds",
        ),
        Knob::float(
            "least_gain",
            -1.0,
            1.0,
            0.05,
            "what a split must gain over the request in one piece on the better instance, a share of its own \
             seconds; below 0: every balance is a split, as in Algorithm 1",
        ),
        Knob::flag(
            "bounded_batch",
            false,
            "predictions bound a batch by the engine's sequence slots and memory (the paper's N_max)",
        ),
        Knob::int("least_tokens", 1, u32::MAX as i64, 32, "tokens of each part at least"),
        Knob::float(
            "transfer_seconds_per_token",
            0.0,
            MOST_SECONDS,
            0.0,
            "seconds per moved token that do not overlap with the first part",
        ),
        Knob::float("transfer_fixed_seconds", 0.0, MOST_SECONDS, 0.0, "seconds of each hand-over besides"),
        Knob::float("quantile", 0.0, 1.0, QUANTILE, "quantile of learned answers that is expected"),
        Knob::int(
            "margin_tokens",
            0,
            u32::MAX as i64,
            MARGIN_TOKENS as i64,
            "tokens added to the expected answer",
        ),
        Knob::flag(
            "lengths_given",
            false,
            "requests bring the length of their answer (the oracle of a simulation); nothing is learned",
        ),
    ],
    keeps_tokens: false,
    build,
};

#[derive(Debug)]
struct Libra {
    /// The search; what engines can do is filled in at each.
    settings: Settings,
    /// Quantile and margin of learned answers; `None`: requests bring their lengths.
    lengths: Option<(f64, u32)>,
    parts: u32,
    bounded_batch: bool,
}

fn build(settings: &Knobs) -> Result<Box<dyn Planner>, CoreError> {
    let get = |name| settings.get(name);
    let libra = Libra {
        settings: Settings {
            probes: get("probes") as u32,
            epsilon: get("epsilon"),
            least_gain: Some(get("least_gain")).filter(|gain| *gain >= 0.0),
            least_tokens: get("least_tokens") as u32,
            transfer_seconds_per_token: get("transfer_seconds_per_token"),
            transfer_fixed_seconds: get("transfer_fixed_seconds"),
            cuts: Cuts::Anywhere,
        },
        lengths: (get("lengths_given") == 0.0).then(|| (get("quantile"), get("margin_tokens") as u32)),
        parts: get("parts") as u32,
        bounded_batch: get("bounded_batch") != 0.0,
    };
    Ok(Box::new(libra))
}

impl Planner for Libra {
    fn rest(&self, state: &State, context: &mut DecisionContext, asked: &Asked<'_>) -> Rest {
        let Some((second, follow)) = state.second(context, asked) else { return Rest::new() };
        let thoughts = asked.request.think_tokens.filter(|tokens| self.parts == 3 && *tokens > 0);
        if let Some(think_tokens) = thoughts {
            match self.in_three(state, context, asked, think_tokens, (second, follow)) {
                Ok(rest) => return rest,
                Err(reason) => context.uncut = Some(format!("in three parts: {reason}").into()),
            }
        }
        match self.in_two(state, context, asked, second) {
            Ok(from_token) => Rest::from_iter([Follow { from_token, ..follow }]),
            Err(reason) => context.leave_whole(reason),
        }
    }

    fn lengths(&self) -> Result<Option<OutputLength>, CoreError> {
        let learned = |(quantile, margin)| OutputLength::new(quantile, margin, CLASSES);
        self.lengths.map(learned).transpose()
    }
}

impl Libra {
    /// Prefill on the first instance, reasoning on `second`, the answer on a third, or on the first
    /// again if there are but two (section 4.4). The error says why the request is not split so.
    fn in_three(
        &self,
        state: &State,
        context: &mut DecisionContext,
        asked: &Asked<'_>,
        think_tokens: u32,
        (thinks, second): (InstanceId, Follow),
    ) -> Result<Rest, &'static str> {
        let Asked { request, first, failed, now } = *asked;
        let expected_output_tokens =
            request.expected_output_tokens.ok_or("nothing is known of the length of answers")?;
        let mut taken: SmallVec<[u32; 8]> = SmallVec::from_slice(failed);
        taken.push(thinks.0);
        let start = Some(second.start_seconds);
        let answers =
            state.choose(context, request, Turn::Peer(Some(first)), &taken, start, now).unwrap_or(first);
        let third = state.follow(context, 0, Some(answers), second.start_seconds);
        let on = [first, thinks, answers];
        let settings = Settings { cuts: state.cuts_of(&on), ..self.settings };
        let loads = on.map(|id| state.load_of(id, now));
        let steps = [0, 1, 2].map(|i| self.step_of(state, on[i], &loads[i], request.tokens_per_block));
        let [Some(a), Some(b), Some(c)] = &steps else {
            return Err("nothing is known of the instances' speed");
        };
        let placed = |i: usize, step| Placed {
            load: &loads[i],
            step,
            hit_tokens: state.hit_tokens_on(context, asked, on[i]),
        };
        let placed = [placed(0, a), placed(1, b), placed(2, c)];
        let whole = Whole {
            prompt_tokens: request.prompt_tokens,
            first_hit_tokens: placed[0].hit_tokens,
            second_hit_tokens: placed[1].hit_tokens,
            expected_output_tokens,
        };
        let found = if answers == first {
            split::search_return(&whole, think_tokens, [placed[0], placed[1]], &settings)
        } else {
            split::search_three(&whole, think_tokens, placed, &settings)
        };
        let [from_token, answer_token] = found.cut_tokens.ok_or(found.why.text())?;
        let [first_seconds, second_seconds, third_seconds] = found.seconds;
        context.balance =
            Some(Balance { first_seconds, second_seconds, third_seconds, ..Balance::default() });
        let start_seconds = second.start_seconds + found.think_seconds;
        Ok(Rest::from_iter([
            Follow { from_token, ..second },
            Follow { from_token: answer_token, start_seconds, ..third },
        ]))
    }

    /// The step-time model of an instance; its sequences are those that run at once there.
    fn step_of(
        &self,
        state: &State,
        id: InstanceId,
        load: &split::Load,
        tokens_per_block: f64,
    ) -> Option<StepTime> {
        let step = state.step_time_of(id.index())?;
        let cache = state.instances[id.index()].cache_blocks;
        let cache_tokens = cache.map(|blocks| f64::from(blocks) * tokens_per_block).filter(|t| *t > 0.0);
        let max_sequences = match self.bounded_batch {
            true => split::predict::sequence_slots(load, &step, cache_tokens),
            false => f64::INFINITY,
        };
        Some(StepTime { max_sequences, ..step })
    }

    /// The token at which a request is split between two instances (section 4.1); or why it is not.
    fn in_two(
        &self,
        state: &State,
        context: &mut DecisionContext,
        asked: &Asked<'_>,
        second: InstanceId,
    ) -> Result<u32, &'static str> {
        let Asked { request, first, now, .. } = *asked;
        if request.expected_output_tokens.is_none() {
            return Err("nothing is known of the length of answers");
        }
        let whole = state.whole(context, asked, second);
        let on = [first, second];
        let loads = on.map(|id| state.load_of(id, now));
        let steps = [0, 1].map(|i| self.step_of(state, on[i], &loads[i], request.tokens_per_block));
        let [Some(step_first), Some(step_second)] = steps else {
            return Err("nothing is known of the instances' speed");
        };
        let settings = Settings { cuts: state.cuts_of(&[first, second]), ..self.settings };
        let found = split::search(&whole, &loads[0], &loads[1], &step_first, &step_second, &settings);
        context.balance = Some(Balance {
            first_seconds: found.seconds_first,
            second_seconds: found.seconds_second,
            third_seconds: f64::NAN,
            cut_seconds: found.seconds_cut,
            whole_seconds: found.seconds_whole,
            ..Balance::default()
        });
        found.cut_token.ok_or(found.why.text())
    }
}
