//! One error tree. Messages say what, where, and what would have been right.
use crate::maturity::Maturity;
use thiserror::Error;

/// Everything the core refuses.
#[derive(Debug, Error, Clone, PartialEq)]
pub enum CoreError {
    /// A name that is not known, with the nearest one that is.
    #[error("unknown {kind} {name:?}{}", nearest.as_ref().map(|n| format!("; did you mean {n:?}?")).unwrap_or_default())]
    UnknownName {
        /// What the name should have named: `policy`, `indicator`, `instance`, `knob of policy lmetric`.
        kind: String,
        /// The name as given.
        name: String,
        /// The nearest known name, where one is near enough.
        nearest: Option<String>,
    },
    /// A value out of its range or of the wrong type.
    #[error("{what}: {got} is not valid; expected {expected}")]
    BadValue {
        /// What the value is for, e.g. `knob lam of policy linear`.
        what: String,
        /// The value as given.
        got: String,
        /// What would have been right.
        expected: String,
    },
    /// A policy, a planner or a setting that the registry does not offer.
    #[error("{kind} {name:?} {}", refusal(*maturity))]
    Immature {
        /// What is not offered: `policy`, `split`, `knob of policy sibyl`.
        kind: String,
        /// Its name.
        name: String,
        /// How mature it is.
        maturity: Maturity,
    },
    /// A score expression that does not parse or type-check.
    #[error("{0}")]
    Expression(crate::expr::ExprError),
    /// A policy of the embedding program that failed.
    #[error("policy {policy}: {problem}")]
    Policy {
        /// Its name.
        policy: String,
        /// What went wrong.
        problem: String,
    },
    /// No instance can take the request.
    #[error("no instance can take the request: {0}")]
    NoInstance(String),
    /// An event that the ticket's state does not allow, or a ticket that is closed.
    #[error("ticket {ticket}: {problem}")]
    Ticket {
        /// Number of the ticket.
        ticket: u64,
        /// What does not fit.
        problem: String,
    },
    /// A panic has left the router's counts half changed.
    #[error(
        "the router is broken: an internal error stopped one of its operations halfway; build a new Router and report the error"
    )]
    Broken,
}

/// Why a part is not offered, and what to do.
fn refusal(maturity: Maturity) -> &'static str {
    match maturity {
        Maturity::Stable => "is not offered here",
        Maturity::Experimental => {
            "is experimental; set `experimental: true` (`serve --experimental`) to use it"
        }
        Maturity::Study => "is for studies only: use it in simulate or study",
    }
}
