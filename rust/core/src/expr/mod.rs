//! Score expressions: text -> tree -> checked graph -> program -> vector evaluation over instances.
//!
//! The same text is used in YAML, in `--policy` and by the Python operators:
//! `lm.P_TOKEN * (lm.BS + 1)` renders to text. So there is one parser and one checker.
//!
//! | | |
//! | --- | --- |
//! | values | numbers, named constants (parameters); indicators in any case: `p_token`, `P_TOKEN` |
//! | texts | `"acme"`, `'acme'`, and the request's texts (`tenant`), compared by `==` and `!=` |
//! | numbers | `+ - * / **`, `log exp sqrt abs`, `minimum maximum clip`, `where(condition, a, b)` |
//! | truth values | `< <= > >= == !=` of numbers, joined by <code>& \| ~</code> |
//! | over the instances | `min max mean std`, and `norm(x)` = `x / max(x)`, 0 if all are 0 |
//! | over groups | `group_min group_max group_sum group_mean`: the value of an instance's group |
//!
//! Comparisons bind tighter than `& | ~` and do not chain. Semantics follow numpy. A comparison
//! with NaN (an absent indicator) is false. `minimum` and `maximum` propagate NaN. Reductions run
//! over the eligible instances and skip NaN. A division by zero at run time gives NaN or infinity.
//! A score that is not finite excludes its instance from the decision. Errors that are known when
//! the expression is built are raised then.
mod check;
mod eval;
mod parse;
mod program;
#[cfg(test)]
mod tests;

use crate::error::ExprError;

pub(crate) use eval::nan_unless;
pub use eval::{Inputs, Scratch};
pub use parse::{MAX_DEPTH, MAX_LENGTH};
pub use program::Program;

/// Returns whether a word is reserved in expressions, so that no indicator can use it as its name.
pub(crate) fn is_reserved(word: &str) -> bool {
    ["and", "or", "not"].contains(&word) || parse::FUNCTIONS.iter().any(|function| function.0 == word)
}

/// Type of an expression's value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Type {
    /// One number per instance. Numbers that do not depend on the instance are broadcast.
    Number,
    /// One truth value per instance.
    Bool,
    /// A text, for comparison with `==` and `!=`. It cannot be the value of a whole expression.
    Text,
}

impl Program {
    /// Parses, checks and compiles `text`, which must have type `expect` (`None`: any). `knobs` are
    /// named constants, case-insensitive.
    ///
    /// # Errors
    /// Error with the position, and the nearest known name.
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
