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
//!
//! The meaning of names comes from outside: a text is compiled with a table of [`Names`] to a
//! [`Program`], which runs over one column of numbers for each name that it reads.
//!
//! ```
//! use lmetric_expr::{Column, Inputs, Names, Program, Scratch, Type};
//!
//! struct Table;
//! impl Names for Table {
//!     fn find(&self, name: &str) -> Option<Column> {
//!         let number = self.all().iter().position(|known| known.eq_ignore_ascii_case(name))?;
//!         Some(Column::Stored(number))
//!     }
//!     fn all(&self) -> Vec<&str> {
//!         vec!["p_token", "bs"]
//!     }
//! }
//! let constants = [("extra", 1.0)];
//! let program = Program::compile("p_token * (bs + extra)", Type::Number, &Table, &constants)?;
//! let (tokens, requests, eligible) = ([100.0, 50.0], [1.0, 3.0], [true, true]);
//! let mut inputs = Inputs::new(&eligible);
//! for column in program.columns() {
//!     inputs.push(if *column == Column::Stored(0) { &tokens } else { &requests });
//! }
//! let mut scores = [0.0; 2];
//! program.evaluate(inputs, None, &mut Scratch::default(), &mut scores);
//! assert_eq!(scores, [200.0, 200.0]);
//! # Ok::<(), lmetric_expr::ExprError>(())
//! ```
#![warn(unreachable_pub)]
mod check;
mod error;
mod eval;
mod lowest;
mod parse;
mod program;
mod suggest;
#[cfg(test)]
mod tests;

pub use error::ExprError;
pub use eval::{CHUNK, Inputs, Kernels, Scratch, Sums, chunks};
pub use lowest::{WORD, lowest_of_eight, set_of_lowest};
pub use parse::{MAX_DEPTH, MAX_LENGTH};
pub use program::Program;
pub use suggest::nearest;

/// Column of numbers behind a name. The number identifies the column in its table of names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Column {
    /// One number per instance.
    Stored(usize),
    /// One number per instance, which [`Kernels`] can compute. Its number is below 64.
    Computed(usize),
    /// One number for all instances.
    Request(usize),
    /// A text for all instances, by its [`text_number`].
    Text(usize),
}

impl Column {
    /// Returns the number of the column.
    #[inline]
    pub fn number(self) -> usize {
        let (Column::Stored(number)
        | Column::Computed(number)
        | Column::Request(number)
        | Column::Text(number)) = self;
        number
    }

    /// Returns whether the column has one number per instance.
    fn varies(self) -> bool {
        matches!(self, Column::Stored(_) | Column::Computed(_))
    }
}

/// The names that expressions can use.
pub trait Names {
    /// Returns the column with this name, ignoring case.
    fn find(&self, name: &str) -> Option<Column>;

    /// Returns all names, for suggestions.
    fn all(&self) -> Vec<&str>;
}

/// Returns whether a word is reserved in expressions, so that no column can use it as its name.
pub fn is_reserved(word: &str) -> bool {
    ["and", "or", "not"].contains(&word) || parse::FUNCTIONS.iter().any(|function| function.0 == word)
}

/// Returns the number that stands for a text in expressions: whole, exact in `f64`. `hash`: the
/// XXH3 hash (64 bits) of the text.
#[inline]
pub fn text_number(hash: u64) -> f64 {
    (hash >> 11) as f64
}

/// Returns `x` if `keep`, else NaN, without a branch: a number with all bits set is NaN.
#[inline(always)]
pub fn nan_unless(keep: bool, x: f64) -> f64 {
    f64::from_bits(x.to_bits() | u64::from(keep).wrapping_sub(1))
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
        names: &dyn Names,
        knobs: &[(&str, f64)],
    ) -> Result<Program, ExprError> {
        let line: String = text.chars().map(|c| if c.is_ascii_whitespace() { ' ' } else { c }).collect();
        let nodes = parse::parse(&line)?;
        let (graph, result) = check::check(&line, &nodes, expect.into(), names, knobs)?;
        Ok(Program::new(&graph, result))
    }
}
