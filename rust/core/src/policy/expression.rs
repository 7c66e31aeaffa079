//! Policies written as expressions: `filter`, `score` and tie-breaks `then`. Most published rules
//! fit in one line.
use super::{Knobs, Policy, PolicyRng, PolicySpec, Prefer, Scores};
use crate::error::CoreError;
use crate::estimate::WeightsOf;
use crate::estimate::survival::CurveSettings;
use crate::expr::{Program, Type, nan_unless};
use crate::indicators::expressions::{compile, evaluate};
use crate::indicators::{DeclaredId, IndicatorSet, Named, Snapshot};
use crate::maturity::Maturity;
use std::borrow::Cow;
use std::fmt;

/// Expression texts of a policy.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ExpressionSource {
    /// Boolean per instance: only instances that pass are scored. If no eligible instance passes,
    /// the filter is waived for this decision.
    pub filter: Option<String>,
    /// One number per instance.
    pub score: String,
    /// Whether the lowest or the highest `score` wins.
    pub prefer: Prefer,
    /// Tie-breaks, in order.
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

/// A policy made of compiled, type-checked expressions.
///
/// An instance with a NaN or infinite score is left out of the decision; an absent indicator or a
/// division by zero causes such a score. Reductions (`min(bs)`, `norm(bs)`) run over all eligible
/// instances, including instances that fail the filter.
#[derive(Clone, Debug)]
pub struct ExpressionPolicy {
    spec: PolicySpec,
    filter: Option<Program>,
    score: Program,
    prefer: Prefer,
    then: Vec<(Program, Prefer)>,
    reads: IndicatorSet,
    declared: Vec<DeclaredId>,
    length_curve: CurveSettings,
    decode_weights: Option<WeightsOf>,
}

impl ExpressionPolicy {
    /// Compiles `source`; parameters are named constants in its texts.
    ///
    /// # Errors
    /// `Expression`, with the position in the text.
    pub fn new(
        spec: PolicySpec,
        source: ExpressionSource,
        knobs: &Knobs,
    ) -> Result<ExpressionPolicy, CoreError> {
        Self::compile(spec, source, &knobs.iter().collect::<Vec<_>>())
    }

    /// Builds a user's policy. Its texts are its formula; `constants` maps names to values. The
    /// default name is `expression`.
    ///
    /// # Errors
    /// `Expression`, with the position in the text.
    pub fn custom(
        name: Option<&str>,
        source: ExpressionSource,
        constants: &[(String, f64)],
    ) -> Result<ExpressionPolicy, CoreError> {
        let spec = PolicySpec {
            name: name.map_or(Cow::Borrowed("expression"), |n| Cow::Owned(n.to_string())),
            formula: Cow::Owned(source.to_string()),
            source: Cow::Borrowed("configuration"),
            maturity: Maturity::Stable,
            knobs: &[],
            symmetric: true,
            random: false,
            guard: None,
        };
        let constants: Vec<_> = constants.iter().map(|(name, value)| (name.as_str(), *value)).collect();
        Self::compile(spec, source, &constants)
    }

    /// Sets whether the hot-spot guard filters the candidates.
    pub fn with_guard(mut self, guard: Option<bool>) -> ExpressionPolicy {
        self.spec.guard = guard;
        self
    }

    /// Sets how the survival curve of output lengths is learned for this policy.
    pub fn with_length_curve(mut self, length_curve: CurveSettings) -> ExpressionPolicy {
        self.length_curve = length_curve;
        self
    }

    /// Sets the source of the weights behind the indicator `decode_pressure`.
    pub fn with_decode_weights(mut self, weights_of: WeightsOf) -> ExpressionPolicy {
        self.decode_weights = Some(weights_of);
        self
    }

    fn compile(
        spec: PolicySpec,
        source: ExpressionSource,
        constants: &[(&str, f64)],
    ) -> Result<ExpressionPolicy, CoreError> {
        let program = |text: &str, expect| compile(text, expect, constants).map_err(CoreError::Expression);
        let filter = source.filter.as_deref().map(|text| program(text, Type::Bool)).transpose()?;
        let score = program(&source.score, Type::Number)?;
        let then = source
            .then
            .iter()
            .map(|(text, prefer)| Ok((program(text, Type::Number)?, *prefer)))
            .collect::<Result<Vec<_>, CoreError>>()?;
        let (mut reads, mut declared) = (IndicatorSet::EMPTY, Vec::new());
        for program in filter.iter().chain([&score]).chain(then.iter().map(|(program, _)| program)) {
            for named in Named::read_by(program) {
                match named {
                    Named::BuiltIn(id) => reads.insert(id),
                    Named::Declared(id) => declared.push(id),
                }
            }
        }
        declared.sort_unstable();
        declared.dedup();
        let length_curve = CurveSettings::default();
        Ok(ExpressionPolicy {
            spec,
            filter,
            score,
            prefer: source.prefer,
            then,
            reads,
            declared,
            length_curve,
            decode_weights: None,
        })
    }
}

impl Policy for ExpressionPolicy {
    fn spec(&self) -> &PolicySpec {
        &self.spec
    }

    fn reads(&self) -> IndicatorSet {
        self.reads
    }

    fn declared(&self) -> &[DeclaredId] {
        &self.declared
    }

    fn by_chunks(&self) -> bool {
        true
    }

    fn length_curve(&self) -> CurveSettings {
        self.length_curve
    }

    fn decode_weights(&self) -> Option<WeightsOf> {
        self.decode_weights
    }

    fn score(
        &self,
        snapshot: &Snapshot<'_>,
        _rng: &mut PolicyRng,
        scores: &mut Scores,
    ) -> Result<(), CoreError> {
        let slots = snapshot.slots();
        evaluate(&self.score, snapshot, &mut scores.scratch, &mut scores.score[..slots]);
        scores.prefer = self.prefer;
        if let Some(filter) = &self.filter {
            let mut passes = std::mem::take(&mut scores.scratch.filter);
            passes.clear();
            passes.resize(slots, 0.0);
            evaluate(filter, snapshot, &mut scores.scratch, &mut passes);
            let passing = |(p, e): (&f64, &bool)| u32::from((*p != 0.0) & *e);
            let passing: u32 = passes.iter().zip(snapshot.eligible).map(passing).sum();
            scores.filter_waived = passing == 0;
            if !scores.filter_waived {
                scores.filtered = snapshot.eligible_count - passing as usize;
                for (score, passes) in scores.score.iter_mut().zip(&passes) {
                    *score = nan_unless(*passes != 0.0, *score);
                }
            }
            scores.scratch.filter = passes;
        }
        for (program, prefer) in &self.then {
            scores.push_then(slots);
            let column = &mut scores.then[scores.then_count - 1];
            evaluate(program, snapshot, &mut scores.scratch, column);
            if *prefer == Prefer::Max {
                column.iter_mut().for_each(|value| *value = -*value);
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::indicators::{Columns, Indicator};
    use crate::policy::{Knob, best};
    use rand::SeedableRng;

    fn columns(values: &[(Indicator, [f64; 4])]) -> Columns {
        let mut columns = Columns::default();
        columns.resize(4);
        values.iter().for_each(|(id, values)| columns.get_mut(*id).copy_from_slice(values));
        columns
    }

    fn score(policy: &ExpressionPolicy, columns: &Columns, eligible: &[bool; 4], scores: &mut Scores) {
        let snapshot = Snapshot {
            columns: columns.into(),
            eligible,
            eligible_count: eligible.iter().filter(|e| **e).count(),
            name_hashes: &[0; 4],
            ordinal: 0,
            session: None,
        };
        scores.reset(4);
        policy.score(&snapshot, &mut PolicyRng::seed_from_u64(0), scores).unwrap();
    }

    fn source(filter: Option<&str>, score: &str, then: &[(&str, Prefer)]) -> ExpressionSource {
        ExpressionSource {
            filter: filter.map(str::to_string),
            score: score.into(),
            prefer: Prefer::Max,
            then: then.iter().map(|(text, prefer)| (text.to_string(), *prefer)).collect(),
        }
    }

    #[test]
    fn filter_score_and_tie_breaks_meet_in_the_choice() {
        let source =
            source(Some("bs - min(bs) <= range"), "kv_hit", &[("tokens", Prefer::Max), ("bs", Prefer::Min)]);
        assert_eq!(
            source.to_string(),
            "where bs - min(bs) <= range: max kv_hit, then max tokens, then min bs"
        );
        let knobs = [("range".to_string(), 8.0)];
        let policy = ExpressionPolicy::custom(Some("mine"), source, &knobs).unwrap();
        assert_eq!(policy.spec().name, "mine");
        assert_eq!(policy.reads(), IndicatorSet::of(&[Indicator::Bs, Indicator::KvHit, Indicator::Tokens]));
        let columns = columns(&[
            (Indicator::Bs, [0.0, 3.0, 8.0, 9.0]),
            (Indicator::KvHit, [0.1, 0.5, 0.5, 0.9]),
            (Indicator::Tokens, [1.0, 7.0, 6.0, 9.0]),
        ]);
        let mut scores = Scores::default();
        for (eligible, waived, filtered, expected) in [
            ([true; 4], false, 1, Some(1)),
            // Slot 0 is not eligible, so the lowest batch size is 3 and slot 3 passes.
            ([false, true, true, true], false, 0, Some(3)),
            ([false; 4], true, 0, None),
        ] {
            score(&policy, &columns, &eligible, &mut scores);
            assert_eq!((scores.filter_waived, scores.filtered), (waived, filtered), "{eligible:?}");
            assert_eq!(
                best(&mut scores, &eligible, &mut PolicyRng::seed_from_u64(1)),
                expected,
                "{eligible:?}"
            );
        }
    }

    #[test]
    fn a_filter_that_leaves_none_is_waived_for_this_decision_only() {
        let policy = ExpressionPolicy::custom(None, source(Some("bs < 2"), "kv_hit", &[]), &[]).unwrap();
        let hits = (Indicator::KvHit, [0.1, 0.5, 0.6, 0.9]);
        let mut scores = Scores::default();
        score(
            &policy,
            &columns(&[(Indicator::Bs, [2.0, 5.0, 9.0, 1.0]), hits]),
            &[true, true, true, false],
            &mut scores,
        );
        assert!(scores.filter_waived);
        assert_eq!(scores.score, [0.1, 0.5, 0.6, 0.9]);
        score(
            &policy,
            &columns(&[(Indicator::Bs, [1.0, 5.0, 9.0, 1.0]), hits]),
            &[true, true, true, false],
            &mut scores,
        );
        assert!(!scores.filter_waived);
        assert!(scores.score[0] == 0.1 && scores.score[1].is_nan() && scores.score[2].is_nan());
    }

    #[test]
    fn an_absent_indicator_leaves_its_instance_out() {
        let policy = ExpressionPolicy::custom(None, source(None, "1 / bs - kv_usage", &[]), &[]).unwrap();
        let columns = columns(&[
            (Indicator::Bs, [0.0, 2.0, 4.0, 1.0]),
            (Indicator::KvUsage, [0.0, 0.5, 0.5, f64::NAN]),
        ]);
        let mut scores = Scores::default();
        score(&policy, &columns, &[true; 4], &mut scores);
        assert_eq!(best(&mut scores, &[true; 4], &mut PolicyRng::seed_from_u64(1)), Some(1));
    }

    #[test]
    fn knobs_of_a_declaration_are_constants_and_errors_name_the_place() {
        const SPEC: PolicySpec = PolicySpec {
            name: Cow::Borrowed("linear"),
            formula: Cow::Borrowed("lam * (1 - kv_hit) + (1 - lam) * norm(bs)"),
            source: Cow::Borrowed("LMETRIC section 4"),
            maturity: Maturity::Study,
            knobs: &[Knob::float("lam", 0.0, 1.0, 0.7, "weight")],
            symmetric: true,
            random: false,
            guard: None,
        };
        let knobs = Knobs::resolve("policy test", SPEC.knobs, &[]).unwrap();
        assert!(ExpressionPolicy::new(SPEC, source(None, &SPEC.formula, &[]), &knobs).is_ok());
        let error = ExpressionPolicy::new(SPEC, source(Some("bs"), "bs", &[]), &knobs).unwrap_err();
        assert!(matches!(&error, CoreError::Expression(e) if e.message.contains("filter")), "{error}");
        let error =
            ExpressionPolicy::new(SPEC, source(None, "bs", &[("lan", Prefer::Min)]), &knobs).unwrap_err();
        assert!(error.to_string().contains("did you mean `lam`"), "{error}");
    }
}
