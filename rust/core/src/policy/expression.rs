//! A policy written as expressions: `filter`, `score`, tie-breaks `then`. Most rules of the field are one line here.
use super::{Knobs, Policy, PolicyRng, PolicySpec, Prefer, Scores};
use crate::error::CoreError;
use crate::expr::{Program, Type};
use crate::indicators::{IndicatorSet, Snapshot};
use std::borrow::Cow;
use std::fmt;

/// The texts of a policy.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ExpressionSource {
    /// Which instances are scored at all: a truth value an instance. Where it leaves none of the eligible, it is waived
    /// for that decision.
    pub filter: Option<String>,
    /// One number an instance.
    pub score: String,
    /// Which end of `score` wins.
    pub prefer: Prefer,
    /// Tie-breaks in order.
    pub then: Vec<(String, Prefer)>,
}

impl fmt::Display for ExpressionSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let end = |prefer: &Prefer| if *prefer == Prefer::Min { "min" } else { "max" };
        if let Some(filter) = &self.filter {
            write!(f, "where {filter}: ")?;
        }
        write!(f, "{} {}", end(&self.prefer), self.score)?;
        self.then.iter().try_for_each(|(text, prefer)| write!(f, ", then {} {text}", end(prefer)))
    }
}

/// A policy made of checked expressions.
///
/// An instance whose score is NaN or infinite (an indicator is absent, a division by zero at run time) is left out of that
/// decision. Reductions (`min(bs)`, `norm(bs)`) run over the eligible instances, whatever the filter says of them.
#[derive(Clone, Debug)]
pub struct ExpressionPolicy {
    spec: PolicySpec,
    filter: Option<Program>,
    score: Program,
    prefer: Prefer,
    then: Vec<(Program, Prefer)>,
    reads: IndicatorSet,
}

impl ExpressionPolicy {
    /// Compiles `source`; the knobs are named constants in its texts.
    ///
    /// # Errors
    /// `Expression`, with the place.
    pub fn new(
        spec: PolicySpec,
        source: ExpressionSource,
        knobs: &Knobs,
    ) -> Result<ExpressionPolicy, CoreError> {
        Self::compile(spec, source, &knobs.iter().collect::<Vec<_>>())
    }

    /// A policy of a user's: its texts are its formula, `constants` are named in them. Without a name it is called
    /// `expression`.
    ///
    /// # Errors
    /// `Expression`, with the place.
    pub fn custom(
        name: Option<&str>,
        source: ExpressionSource,
        constants: &[(String, f64)],
    ) -> Result<ExpressionPolicy, CoreError> {
        let spec = PolicySpec {
            name: name.map_or(Cow::Borrowed("expression"), |n| Cow::Owned(n.to_string())),
            formula: Cow::Owned(source.to_string()),
            source: Cow::Borrowed("configuration"),
            knobs: &[],
            symmetric: true,
            random: false,
        };
        let constants: Vec<_> = constants.iter().map(|(name, value)| (name.as_str(), *value)).collect();
        Self::compile(spec, source, &constants)
    }

    fn compile(
        spec: PolicySpec,
        source: ExpressionSource,
        constants: &[(&str, f64)],
    ) -> Result<ExpressionPolicy, CoreError> {
        let program =
            |text: &str, expect| Program::compile(text, expect, constants).map_err(CoreError::Expression);
        let filter = source.filter.as_deref().map(|text| program(text, Type::Bool)).transpose()?;
        let score = program(&source.score, Type::Number)?;
        let then = source
            .then
            .iter()
            .map(|(text, prefer)| Ok((program(text, Type::Number)?, *prefer)))
            .collect::<Result<Vec<_>, CoreError>>()?;
        let reads = filter
            .iter()
            .chain([&score])
            .chain(then.iter().map(|(program, _)| program))
            .fold(IndicatorSet::EMPTY, |set, program| set.union(program.reads()));
        Ok(ExpressionPolicy { spec, filter, score, prefer: source.prefer, then, reads })
    }
}

impl Policy for ExpressionPolicy {
    fn spec(&self) -> &PolicySpec {
        &self.spec
    }

    fn reads(&self) -> IndicatorSet {
        self.reads
    }

    fn score(
        &self,
        snapshot: &Snapshot<'_>,
        _rng: &mut PolicyRng,
        scores: &mut Scores,
    ) -> Result<(), CoreError> {
        let slots = snapshot.slots();
        let mut scratch = std::mem::take(&mut scores.scratch);
        self.score.eval(snapshot, &mut scratch, &mut scores.score[..slots]);
        scores.prefer = self.prefer;
        if let Some(filter) = &self.filter {
            let mut passes = std::mem::take(&mut scratch.filter);
            passes.clear();
            passes.resize(slots, 0.0);
            filter.eval(snapshot, &mut scratch, &mut passes);
            let passing = passes.iter().zip(snapshot.eligible).filter(|(p, e)| **p != 0.0 && **e).count();
            scores.filter_waived = passing == 0;
            if !scores.filter_waived {
                for (score, passes) in scores.score.iter_mut().zip(&passes) {
                    *score = if *passes != 0.0 { *score } else { f64::NAN };
                }
            }
            scratch.filter = passes;
        }
        for (program, prefer) in &self.then {
            let column = scores.push_then(slots);
            program.eval(snapshot, &mut scratch, column);
            if *prefer == Prefer::Max {
                column.iter_mut().for_each(|value| *value = -*value);
            }
        }
        scores.scratch = scratch;
        Ok(())
    }
}
