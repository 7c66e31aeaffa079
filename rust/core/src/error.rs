//! The error type. Messages report what failed, the value, and what was expected.
use crate::estimate::OutputLengthError;
use crate::expr::{ExprError, nearest};
use crate::kv::keys::BlockSizeError;
use crate::maturity::Maturity;
use thiserror::Error;

/// All errors of the core.
#[derive(Debug, Error, Clone, PartialEq)]
pub enum CoreError {
    /// An unknown name, with the nearest known name.
    #[error("unknown {kind} {name:?}{}", nearest.as_ref().map(|n| format!("; did you mean {n:?}?")).unwrap_or_default())]
    UnknownName {
        /// Kind of the name: `policy`, `indicator`, `instance`, `parameter of policy lmetric`.
        kind: String,
        /// The given name.
        name: String,
        /// The nearest known name, if it is near enough.
        nearest: Option<String>,
    },
    /// A value of the wrong type or out of range.
    #[error("{what}: {got} is not valid; expected {expected}")]
    BadValue {
        /// Purpose of the value, for example `parameter lam of policy linear`.
        what: String,
        /// The given value.
        got: String,
        /// The expected values.
        expected: String,
    },
    /// A policy, a planner or a setting that the registry does not offer.
    #[error("{kind} {name:?} {}", refusal(*maturity))]
    Immature {
        /// Kind of the part: `policy`, `split`, `programs`.
        kind: String,
        /// Name of the part.
        name: String,
        /// Maturity of the part.
        maturity: Maturity,
    },
    /// A score expression that does not parse or type-check.
    #[error("{0}")]
    Expression(ExprError),
    /// The failure of a policy in the embedding program.
    #[error("policy {policy}: {problem}")]
    Policy {
        /// Name of the policy.
        policy: String,
        /// The problem.
        problem: String,
    },
    /// No instance can take the request.
    #[error("no instance can take the request: {0}")]
    NoInstance(String),
    /// An event that the ticket's state does not allow, or an event of a closed ticket.
    #[error("ticket {ticket}: {problem}")]
    Ticket {
        /// Number of the ticket.
        ticket: u64,
        /// The problem.
        problem: String,
    },
    /// A panic left the router's counts inconsistent.
    #[error(
        "the router is broken: an internal error stopped one of its operations halfway; build a new Router and report the error"
    )]
    Broken,
}

impl CoreError {
    /// Creates a [`CoreError::BadValue`].
    pub fn bad_value(what: impl Into<String>, got: impl ToString, expected: impl Into<String>) -> CoreError {
        CoreError::BadValue { what: what.into(), got: got.to_string(), expected: expected.into() }
    }

    /// Creates a [`CoreError::UnknownName`] with the nearest of the `known` names.
    pub fn unknown_name<'a>(
        kind: impl Into<String>,
        name: &str,
        known: impl IntoIterator<Item = &'a str>,
    ) -> CoreError {
        let nearest = nearest(name, known);
        CoreError::UnknownName { kind: kind.into(), name: name.into(), nearest }
    }
}

impl From<BlockSizeError> for CoreError {
    fn from(error: BlockSizeError) -> CoreError {
        CoreError::bad_value(error.what, error.got, BlockSizeError::EXPECTED)
    }
}

impl From<OutputLengthError> for CoreError {
    fn from(error: OutputLengthError) -> CoreError {
        CoreError::bad_value(error.what, error.got, error.expected)
    }
}

/// Returns the rest of the message: why the part is not offered, and what to do.
fn refusal(maturity: Maturity) -> &'static str {
    match maturity {
        Maturity::Stable => "is not offered here",
        Maturity::Experimental => {
            "is experimental; set `experimental: true` (`serve --experimental`) to use it"
        }
        Maturity::Study => "is for studies only: use it in simulate or study",
    }
}
