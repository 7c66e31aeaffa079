//! Libra: chooses the pair of instances, then the token at which both are busy equally long.
use super::*;
use crate::estimate::{OutputLength, StepTime};
use crate::record::Balance;
use crate::split::{self, Settings};

/// Maximum seconds of a transfer.
const MAX_SECONDS: f64 = 1e6;

pub static SPEC: PlannerSpec = PlannerSpec {
    name: "libra",
    about: "splits a request at the token that balances its two instances, if the split saves time",
    source: "Libra (NSDI 2026), section 4.1 (Algorithm 1)",
    maturity: Maturity::Experimental,
    settings: &[
        Knob::int("probes", 1, 32, 6, "maximum probes of the search (K; 6 in the paper)"),
        Knob::float(
            "epsilon",
            0.0,
            1.0,
            0.05,
            "maximum gap between both instances' times in balance, as a fraction of the request's own time",
        ),
        Knob::float(
            "min_gain",
            -1.0,
            1.0,
            0.05,
            "minimum gain over the whole request on the better instance, as a fraction of its own time. \
             Below 0: every balance is a split, as in Algorithm 1",
        ),
        Knob::flag(
            "bounded_batch",
            false,
            "whether the engine's sequence slots and memory limit predicted batches (N_max in the paper)",
        ),
        Knob::int("min_tokens", 1, u32::MAX as i64, 32, "minimum tokens of each part"),
        Knob::float(
            "transfer_seconds_per_token",
            0.0,
            MAX_SECONDS,
            0.0,
            "seconds per transferred token that do not overlap with the first part",
        ),
        Knob::float("transfer_fixed_seconds", 0.0, MAX_SECONDS, 0.0, "fixed seconds per handoff"),
        Knob::float(
            "quantile",
            0.0,
            1.0,
            OutputLength::QUANTILE,
            "quantile of learned output lengths used as expected output",
        ),
        Knob::int(
            "margin_tokens",
            0,
            u32::MAX as i64,
            OutputLength::MARGIN_TOKENS as i64,
            "tokens added to the expected output",
        ),
    ],
    keeps_tokens: false,
    build,
};

/// The planner `libra`: the search for the cut and its settings. Other planners build on it.
#[derive(Debug)]
pub struct Libra {
    /// Settings of the search, without the engines' capabilities.
    settings: Settings,
    /// Quantile and margin of learned output lengths.
    lengths: (f64, u32),
    bounded_batch: bool,
}

fn build(settings: &Knobs) -> Result<Box<dyn Planner>, CoreError> {
    Ok(Box::new(Libra::new(settings)))
}

impl Planner for Libra {
    fn rest(&self, view: &mut View<'_>) -> Rest {
        let Some((second, follow)) = view.second() else { return Rest::new() };
        match self.in_two(view, second) {
            Ok(from_token) => Rest::from_iter([Follow { from_token, ..follow }]),
            Err(reason) => view.leave_whole(reason),
        }
    }

    fn lengths(&self) -> Result<Option<OutputLength>, CoreError> {
        let (quantile, margin) = self.lengths;
        Ok(Some(OutputLength::new(quantile, margin, CLASSES)?))
    }
}

impl Libra {
    /// Declared settings, for planners that include all of them.
    pub const SETTINGS: &'static [Knob] = SPEC.settings;

    /// Creates the search with these settings.
    pub fn new(settings: &Knobs) -> Libra {
        let get = |name| settings.get(name);
        Libra {
            settings: Settings {
                probes: get("probes") as u32,
                epsilon: get("epsilon"),
                min_gain: Some(get("min_gain")).filter(|gain| *gain >= 0.0),
                min_tokens: get("min_tokens") as u32,
                transfer_seconds_per_token: get("transfer_seconds_per_token"),
                transfer_fixed_seconds: get("transfer_fixed_seconds"),
                cuts: Cuts::Anywhere,
            },
            lengths: (get("quantile"), get("margin_tokens") as u32),
            bounded_batch: get("bounded_batch") != 0.0,
        }
    }

    /// Returns the settings of a search between instances whose engines support these cuts.
    pub fn search(&self, cuts: Cuts) -> Settings {
        Settings { cuts, ..self.settings }
    }

    /// Returns the step-time model of an instance, with the number of sequences that run at once.
    pub fn step_of(&self, view: &View<'_>, id: Slot, load: &split::Load) -> Option<StepTime> {
        let step = view.step_time_of(id)?;
        let tokens_per_block = view.request().tokens_per_block;
        let cache = view.cache_blocks_of(id);
        let cache_tokens = cache.map(|blocks| f64::from(blocks) * tokens_per_block).filter(|t| *t > 0.0);
        let max_sequences = match self.bounded_batch {
            true => split::predict::sequence_slots(load, &step, cache_tokens),
            false => f64::INFINITY,
        };
        Some(StepTime { max_sequences, ..step })
    }

    /// Returns the token at which a request is split between the first instance and `second`
    /// (section 4.1).
    ///
    /// # Errors
    /// The reason for no split.
    pub fn in_two(&self, view: &mut View<'_>, second: Slot) -> Result<u32, &'static str> {
        if view.request().expected_output_tokens.is_none() {
            return Err("output lengths are unknown");
        }
        let on = [view.first(), second];
        let whole = view.whole(second);
        let loads = on.map(|id| view.load_of(id));
        let steps = [0, 1].map(|i| self.step_of(view, on[i], &loads[i]));
        let [Some(step_first), Some(step_second)] = steps else {
            return Err("the speed of the instances is unknown");
        };
        let settings = self.search(view.cuts_of(&on));
        let found = split::search(&whole, &loads[0], &loads[1], &step_first, &step_second, &settings);
        view.set_balance(Balance {
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
