//! Policies score each instance of a snapshot. Policies are pure: equal inputs give equal scores.
//!
//! A policy never reads a clock, changes the index or counts load. Each policy is one file
//! (formula, source, parameters, tests) and one row of `policies!`.

pub mod expression;
pub mod select;
pub mod spec;

/// Declares the policies of a crate. Each row names a file with a declaration `SPEC` and a function
/// `build`. The rows are in the order of the docs page.
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
    total_delay,
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
    sibyl_plus,
    least_tokens,
    star_dispatch,
}

#[cfg(test)]
const REGISTRY: crate::Registry = crate::Registry::CORE;

#[cfg(test)]
#[path = "../../tests/common/fleet.rs"]
pub(crate) mod fleet;

pub use expression::{ExpressionPolicy, ExpressionSource};
pub use select::best;
pub use spec::{Build, Knob, KnobKind, Knobs, PolicyRow, PolicySpec};

use crate::error::CoreError;
use crate::estimate::WeightsOf;
use crate::estimate::survival::CurveSettings;
use crate::indicators::{DeclaredId, Snapshot};
use rand_pcg::Pcg64Mcg;

/// The random source of decisions. The router seeds it, so runs are reproducible.
pub type PolicyRng = Pcg64Mcg;

/// Whether the lowest or the highest score wins.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Prefer {
    /// The lowest score wins.
    #[default]
    Min,
    /// The highest score wins.
    Max,
}

/// Scores of one decision: a score per slot and tie-breaks, in order, among equal scores.
///
/// A slot with a NaN or infinite score is left out (an indicator that the score needs is absent).
/// If slots are still equal after the tie-breaks, the router draws one at random; otherwise the
/// first of equal instances would get all requests of an idle fleet.
#[derive(Clone, Debug, Default)]
pub struct Scores {
    /// One score per slot; entries of slots that are not eligible are ignored.
    pub score: Vec<f64>,
    /// Whether the lowest or the highest `score` wins.
    pub prefer: Prefer,
    /// Tie-breaks, one column each; lower is better. The first `then_count` columns are valid; the
    /// buffers are reused.
    pub then: Vec<Vec<f64>>,
    /// Number of valid columns in `then`.
    pub then_count: usize,
    /// Whether the filter passed no eligible slot and was waived, so that all eligible slots are
    /// scored.
    pub filter_waived: bool,
    /// Number of eligible slots that the filter excluded.
    pub filtered: usize,
    /// Whether the policy scored no eligible slot; `score` then holds the requests per slot (`bs`).
    pub unscored: bool,
    /// Registers of expressions, reused between decisions.
    pub scratch: crate::indicators::expressions::Scratch,
    /// Lowest finite key (`score`, negated if the highest wins) of each 64 slots; infinity if none
    /// has one. [`best`] sets this and the following fields.
    pub(crate) minima: Vec<f64>,
    /// Slots with the lowest key, as bits.
    ties: Vec<u64>,
    /// Number of finite scores.
    pub(crate) scored: usize,
    /// Number of slots with the lowest key, before the tie-breaks.
    pub(crate) tied: u32,
    /// Number of slots that are still equal after the tie-breaks.
    pub(crate) drawn_from: u32,
}

impl Scores {
    /// Clears the scores and sizes them for `slots` slots, all NaN.
    pub fn reset(&mut self, slots: usize) {
        self.score.clear();
        self.begin(slots);
    }

    /// Sizes the scores for `slots` slots and clears all else. The policy must score every slot.
    pub(crate) fn begin(&mut self, slots: usize) {
        // A NaN of one repeated byte is filled in twice as fast.
        const UNSCORED: f64 = f64::from_bits(u64::MAX);
        self.score.resize(slots, UNSCORED);
        self.prefer = Prefer::Min;
        self.then_count = 0;
        self.filter_waived = false;
        self.filtered = 0;
        self.unscored = false;
    }

    /// Checks the sizes of all columns: one entry for each of `slots` slots.
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
                "it must return one score and one value of each tie-break for each of the {slots} slots"
            ),
        })
    }

    /// Adds a tie-break column of `slots` zeros to fill; lower is better.
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

/// Decisions made by a policy's fallback, by cause.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Fallbacks {
    /// The policy failed.
    pub errors: u64,
    /// The policy exceeded its time limit.
    pub overruns: u64,
    /// The policy was skipped after repeated failures or overruns.
    pub paused: u64,
    /// Last problem.
    pub problem: Option<String>,
}

impl Fallbacks {
    /// Returns the sum of these counts and `later` ones, with the latest problem.
    pub fn and(self, later: Fallbacks) -> Fallbacks {
        Fallbacks {
            errors: self.errors + later.errors,
            overruns: self.overruns + later.overruns,
            paused: self.paused + later.paused,
            problem: later.problem.or(self.problem),
        }
    }
}

/// A rule that chooses an instance.
pub trait Policy: Send + Sync {
    /// Returns the policy's declaration.
    fn spec(&self) -> &PolicySpec;

    /// Returns the indicators that the policy reads with its present parameters. Only these are
    /// computed.
    fn reads(&self) -> crate::indicators::IndicatorSet;

    /// Returns the declared indicators that the policy reads. Only these are looked up.
    fn declared(&self) -> &[DeclaredId] {
        &[]
    }

    /// Returns whether the policy scores every slot, chunk by chunk. Then its scores are not
    /// cleared before, and its snapshots have [`crate::indicators::Kernels`] instead of columns of
    /// [`crate::indicators::IndicatorSet::COMPUTED`].
    fn by_chunks(&self) -> bool {
        false
    }

    /// Returns how the survival curve of output lengths behind the `handoff_` indicators is
    /// learned.
    fn length_curve(&self) -> CurveSettings {
        CurveSettings::default()
    }

    /// Returns the source of the weights behind the indicator `decode_pressure`; `None`: the policy
    /// does not read it.
    fn decode_weights(&self) -> Option<WeightsOf> {
        None
    }

    /// Returns the decisions that the fallback made since the policy was built.
    fn fallbacks(&self) -> Fallbacks {
        Fallbacks::default()
    }

    /// Scores every eligible slot of the snapshot into `scores`, which is reset and sized for the
    /// snapshot.
    ///
    /// # Errors
    /// Only if the policy cannot score at all. A single slot without a score stays NaN.
    fn score(
        &self,
        snapshot: &Snapshot<'_>,
        rng: &mut PolicyRng,
        scores: &mut Scores,
    ) -> Result<(), CoreError>;
}

/// Builds the default policy of follow-up segments.
///
/// # Errors
/// None with default parameters.
pub(crate) fn least_requests() -> Result<Box<dyn Policy>, CoreError> {
    PolicyRow { spec: &least_requests::SPEC, build: least_requests::build }.build(&[])
}

/// Builds a registered policy from expressions: the lowest `score` wins, then the lowest value of
/// each tie-break in `then`.
///
/// # Errors
/// `Expression`, with the position in the text.
pub fn lowest(
    spec: &PolicySpec,
    knobs: &Knobs,
    score: &str,
    then: &[&str],
) -> Result<Box<dyn Policy>, CoreError> {
    Ok(Box::new(expression(spec, knobs, score, Prefer::Min, then)?))
}

/// Builds a registered policy from expressions: the highest `score` wins, then the lowest value of
/// each tie-break in `then`.
///
/// # Errors
/// `Expression`, with the position in the text.
pub fn highest(
    spec: &PolicySpec,
    knobs: &Knobs,
    score: &str,
    then: &[&str],
) -> Result<Box<dyn Policy>, CoreError> {
    Ok(Box::new(expression(spec, knobs, score, Prefer::Max, then)?))
}

/// Compiles a registered policy from expressions, for further settings.
///
/// # Errors
/// `Expression`, with the position in the text.
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
