//! Score expressions: text -> tree -> checked graph -> program -> vector evaluation over instances.
//!
//! The same text is written in YAML, in `--policy` and by the Python operators (`lm.P_TOKEN * (lm.BS + 1)` renders
//! itself to text), so there is one parser and one checker.
//!
//! | | |
//! | --- | --- |
//! | values | numbers; indicators in any case (`p_token`, `P_TOKEN`); named constants (a policy's knobs) |
//! | texts | `"acme"`, `'acme'`, and the texts of the request (`tenant`), compared with `==` and `!=` |
//! | numbers | `+ - * / **`, `log exp sqrt abs`, `minimum maximum clip`, `where(condition, a, b)` |
//! | truth values | `< <= > >= == !=` of numbers, joined by <code>& \| ~</code>; comparisons bind tighter and do not chain |
//! | over the instances | `min max mean std`, and `norm(x)` = `x / max(x)`, 0 if all are 0 |
//! | over a group of instances | `group_min group_max group_sum group_mean`: the value of each instance's group |
//!
//! Meanings are numpy's: a comparison with NaN (an absent indicator) is false, `minimum` and `maximum` pass NaN on. Reductions
//! run over the eligible instances and skip NaN. A division by zero that only shows at run time gives NaN or infinity,
//! and a score that is not finite leaves its instance out of the decision; what can be known before is an error when the
//! expression is built.
mod check;
mod eval;
mod parse;
mod program;
#[cfg(test)]
mod tests;

pub(crate) use eval::nan_unless;
pub use eval::{Inputs, Scratch};
pub use parse::{MAX_DEPTH, MAX_LENGTH};
pub use program::Program;

/// Whether a word means something in every expression, so that no indicator can have it as its name.
pub(crate) fn is_reserved(word: &str) -> bool {
    ["and", "or", "not"].contains(&word) || parse::FUNCTIONS.iter().any(|function| function.0 == word)
}

use std::fmt;
use std::ops::Range;

/// What is wrong with an expression, and where.
#[derive(Debug, Clone, PartialEq)]
pub struct ExprError {
    /// What is wrong and what would have been right.
    pub message: String,
    /// The expression, on one line.
    pub text: String,
    /// Byte offset where the offending part starts.
    pub start: usize,
    /// Byte offset where it ends.
    pub end: usize,
}

impl ExprError {
    fn at(text: &str, place: Range<usize>, message: impl Into<String>) -> ExprError {
        ExprError { message: message.into(), text: text.to_string(), start: place.start, end: place.end }
    }
}

impl std::error::Error for ExprError {}

impl fmt::Display for ExprError {
    /// The message, the text around the place, and carets under the place.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const AROUND: usize = 60;
        let (before, rest) = self.text.split_at(self.start.min(self.text.len()));
        let (place, after) = rest.split_at(self.end.saturating_sub(self.start).min(rest.len()));
        let head: String = match before.char_indices().rev().nth(AROUND) {
            Some((cut, c)) => format!("…{}", &before[cut + c.len_utf8()..]),
            None => before.to_string(),
        };
        let cut = |text: &str| match text.char_indices().nth(AROUND) {
            Some((cut, _)) => format!("{}…", &text[..cut]),
            None => text.to_string(),
        };
        let (place, tail) = (cut(place), cut(after));
        let carets = "^".repeat(place.chars().count().max(1));
        let indent = " ".repeat(head.chars().count());
        write!(f, "{}\n  {head}{place}{tail}\n  {indent}{carets}", self.message)
    }
}

/// The type of an expression's value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Type {
    /// One number an instance (numbers that do not depend on the instance are spread).
    Number,
    /// One truth value an instance.
    Bool,
    /// A text, to be compared with `==` and `!=`; no whole expression is one.
    Text,
}

impl Program {
    /// Parses, checks and compiles `text`, which must have type `expect` (`None`: either). `knobs` are named constants, in
    /// any case.
    ///
    /// # Errors
    /// Names the place, and the nearest known name.
    pub fn compile(
        text: &str,
        expect: impl Into<Option<Type>>,
        knobs: &[(&str, f64)],
    ) -> Result<Program, ExprError> {
        let line: String = text.chars().map(|c| if c.is_ascii_whitespace() { ' ' } else { c }).collect();
        let nodes = parse::parse(&line)?;
        let (graph, result) = check::check(&line, &nodes, expect.into(), knobs)?;
        Ok(Program::new(&graph, result))
    }
}
