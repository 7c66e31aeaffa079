//! Score expressions: text -> tree -> checked program -> vector evaluation over instances.
//!
//! The same text is written in YAML, in `--policy` and by the Python operators (`lm.P_TOKEN * (lm.BS + 1)` renders
//! itself to text), so there is one parser and one checker.
use crate::indicators::{IndicatorSet, Snapshot};
use thiserror::Error;

/// What is wrong with an expression, and where.
#[derive(Debug, Error, Clone, PartialEq)]
#[error("{message}\n  {text}\n  {}{}", " ".repeat(text[..(*start).min(text.len())].chars().count()), "^".repeat(text[(*start).min(text.len())..(*end).min(text.len())].chars().count().max(1)))]
pub struct ExprError {
    /// What is wrong and what would have been right.
    pub message: String,
    /// The expression.
    pub text: String,
    /// Byte offset where the offending part starts.
    pub start: usize,
    /// Byte offset where it ends.
    pub end: usize,
}

/// The type of an expression's value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Type {
    /// One number an instance (numbers that do not depend on the instance are spread).
    Number,
    /// One truth value an instance.
    Bool,
}

/// Reusable buffers of an evaluation.
#[derive(Clone, Debug, Default)]
pub struct Scratch {
    /// Registers.
    pub registers: Vec<Vec<f64>>,
    /// Truth values of a policy's filter, one a slot.
    pub filter: Vec<f64>,
}

/// A checked expression, ready to run.
#[derive(Clone, Debug)]
pub struct Program {}

impl Program {
    /// Parses, checks and compiles `text`, which must have type `expect`. `knobs` are named constants.
    ///
    /// # Errors
    /// Names the place, and the nearest known name.
    pub fn compile(text: &str, expect: Type, knobs: &[(&str, f64)]) -> Result<Program, ExprError> {
        let _ = (text, expect, knobs);
        todo!()
    }

    /// Indicators it reads.
    pub fn reads(&self) -> IndicatorSet {
        todo!()
    }

    /// Evaluates over all slots; `out` has one entry a slot (1.0 and 0.0 for truth values). Reductions (`min`, `max`,
    /// `mean`, `std`, `norm`) run over eligible slots and skip NaN.
    pub fn eval(&self, snapshot: &Snapshot<'_>, scratch: &mut Scratch, out: &mut [f64]) {
        let _ = (snapshot, scratch, out);
        todo!()
    }
}
