//! Policies: from a snapshot to one score an instance. Pure: same inputs, same answer.
//!
//! A policy never reads a clock, changes the index or counts load. Each is one file (formula, source,
//! knobs, tests) and one row of `policies!`.

pub mod expression;
pub mod select;
pub mod spec;

/// Declares the policies of a crate: each row is a file with its declaration `SPEC` and a function
/// `build`, in the order of the docs page.
#[macro_export]
macro_rules! policies {
    ($($file:ident,)*) => {
        $(mod $file;)*
        pub(crate) static POLICIES: &[$crate::policy::PolicyRow] =
            &[$($crate::policy::PolicyRow { spec: &$file::SPEC, build: $file::build },)*];
    };
}

policies! {
    lmetric,
    lmetric_pull,
    lmetric_seconds,
    planner,
    round_robin,
    random,
    least_requests,
    power_of_two,
    session_affinity,
    vllm,
    linear,
    filter,
    aibrix_prefix,
    dynamo_linear,
    dynamo,
    dynamo_two_tier,
    llmd_scorers,
    llmd_affinity,
    cache_aware,
    prefix_spill,
    ray_prefix,
    preble,
    least_prefill,
    sibyl,
    least_tokens,
    star_dispatch,
}

#[cfg(test)]
const REGISTRY: crate::Registry = crate::Registry::CORE;

#[cfg(test)]
#[path = "../../tests/common/fleet.rs"]
pub(crate) mod fleet;

pub use expression::{ExpressionPolicy, ExpressionSource};
pub use select::{best, ranking};
pub use spec::{Build, Knob, KnobKind, Knobs, PolicyRow, PolicySpec};

use crate::error::CoreError;
use crate::estimate::WeightsOf;
use crate::estimate::survival::CurveSettings;
use crate::indicators::{DeclaredId, Snapshot};
use rand_pcg::Pcg64Mcg;

/// The random source of decisions: seeded by the router, so that runs repeat.
pub type PolicyRng = Pcg64Mcg;

/// Which end of the scores is the best.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Prefer {
    /// The lowest score wins.
    #[default]
    Min,
    /// The highest score wins.
    Max,
}

/// What a policy proposes: a score for each slot and, among equal scores, tie-breaks in order.
///
/// A NaN or infinite score leaves the slot out (an indicator that the score needs is absent). What is still equal after the
/// tie-breaks is drawn at random by the router: the first of equal instances must not collect all idle traffic.
#[derive(Clone, Debug, Default)]
pub struct Scores {
    /// One score a slot; entries of slots that are not eligible are ignored.
    pub score: Vec<f64>,
    /// Which end of `score` is the best.
    pub prefer: Prefer,
    /// Tie-breaks, one column each, lower is better. Reused between decisions: `then_count` says how many are live.
    pub then: Vec<Vec<f64>>,
    /// Number of live columns in `then`.
    pub then_count: usize,
    /// Whether a filter left no eligible slot and was waived, so that all of them were scored.
    pub filter_waived: bool,
    /// Whether the policy scored no eligible slot, so that `score` holds the requests on each (`bs`).
    pub unscored: bool,
    /// Registers of expressions, kept from one decision to the next.
    pub scratch: crate::expr::Scratch,
}

impl Scores {
    /// Clears for `slots` slots; scores start as NaN.
    pub fn reset(&mut self, slots: usize) {
        // A NaN of one repeated byte is filled in twice as fast.
        const UNSCORED: f64 = f64::from_bits(u64::MAX);
        self.score.clear();
        self.score.resize(slots, UNSCORED);
        self.prefer = Prefer::Min;
        self.then_count = 0;
        self.filter_waived = false;
        self.unscored = false;
    }

    /// Checks what a policy made of the scores: one for each of `slots` slots, in all columns.
    ///
    /// # Errors
    /// `Policy` if a column was resized.
    pub(crate) fn check(&self, slots: usize, policy: &str) -> Result<(), CoreError> {
        let then = self.then.get(..self.then_count);
        let sound = |columns: &[Vec<f64>]| columns.iter().all(|column| column.len() == slots);
        if self.score.len() == slots && then.is_some_and(sound) {
            return Ok(());
        }
        Err(CoreError::Policy {
            policy: policy.into(),
            problem: format!(
                "it must leave one score and one of each tie-break for each of the {slots} slots"
            ),
        })
    }

    /// A tie-break column of `slots` entries to fill, lower is better.
    pub fn push_then(&mut self, slots: usize) -> &mut Vec<f64> {
        if self.then.len() == self.then_count {
            self.then.push(Vec::new());
        }
        let column = &mut self.then[self.then_count];
        self.then_count += 1;
        column.clear();
        column.resize(slots, 0.0);
        column
    }
}

/// Decisions that a fallback made for a policy, by cause.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Fallbacks {
    /// The policy failed.
    pub errors: u64,
    /// It exceeded its time limit.
    pub overruns: u64,
    /// It was not asked, because it had failed or exceeded its limit again and again.
    pub paused: u64,
    /// What went wrong last.
    pub problem: Option<String>,
}

impl Fallbacks {
    /// These and `later` ones.
    pub fn and(self, later: Fallbacks) -> Fallbacks {
        Fallbacks {
            errors: self.errors + later.errors,
            overruns: self.overruns + later.overruns,
            paused: self.paused + later.paused,
            problem: later.problem.or(self.problem),
        }
    }
}

/// One way to choose an instance.
pub trait Policy: Send + Sync {
    /// Its declaration.
    fn spec(&self) -> &PolicySpec;

    /// Indicators it reads with its present knobs; no others are computed for it.
    fn reads(&self) -> crate::indicators::IndicatorSet;

    /// Declared indicators it reads; no others are looked up for it.
    fn declared(&self) -> &[DeclaredId] {
        &[]
    }

    /// How the curve of answer lengths behind the `handoff_` indicators is kept for it.
    fn length_curve(&self) -> CurveSettings {
        CurveSettings::default()
    }

    /// Makes the weights behind the `decode_pressure` indicators for it; `None`: it reads neither.
    fn decode_weights(&self) -> Option<WeightsOf> {
        None
    }

    /// Decisions that its fallback made for it since it was built.
    fn fallbacks(&self) -> Fallbacks {
        Fallbacks::default()
    }

    /// Scores every eligible slot of the snapshot into `scores`, which was reset to the snapshot's slots.
    ///
    /// # Errors
    /// Only where the policy cannot score at all; a slot it cannot score is left NaN.
    fn score(
        &self,
        snapshot: &Snapshot<'_>,
        rng: &mut PolicyRng,
        scores: &mut Scores,
    ) -> Result<(), CoreError>;
}

/// The policy of segments that follow others, unless another is set.
///
/// # Errors
/// None with the knobs at their defaults.
pub(crate) fn least_requests() -> Result<Box<dyn Policy>, CoreError> {
    PolicyRow { spec: &least_requests::SPEC, build: least_requests::build }.build(&[])
}

/// A registered policy written as expressions: the lowest `score` wins, then the lowest of each in
/// `then`.
///
/// # Errors
/// `Expression`, with the place.
pub fn lowest(
    spec: &PolicySpec,
    knobs: &Knobs,
    score: &str,
    then: &[&str],
) -> Result<Box<dyn Policy>, CoreError> {
    Ok(Box::new(expression(spec, knobs, score, Prefer::Min, then)?))
}

/// A registered policy written as expressions: the highest `score` wins, then the lowest of each in
/// `then`.
///
/// # Errors
/// `Expression`, with the place.
pub fn highest(
    spec: &PolicySpec,
    knobs: &Knobs,
    score: &str,
    then: &[&str],
) -> Result<Box<dyn Policy>, CoreError> {
    Ok(Box::new(expression(spec, knobs, score, Prefer::Max, then)?))
}

/// A registered policy written as expressions, to be built on.
///
/// # Errors
/// `Expression`, with the place.
pub fn expression(
    spec: &PolicySpec,
    knobs: &Knobs,
    score: &str,
    prefer: Prefer,
    then: &[&str],
) -> Result<ExpressionPolicy, CoreError> {
    let then = then.iter().map(|text| (text.to_string(), Prefer::Min)).collect();
    let source = ExpressionSource { filter: None, score: score.into(), prefer, then };
    ExpressionPolicy::new(spec.clone(), source, knobs)
}
