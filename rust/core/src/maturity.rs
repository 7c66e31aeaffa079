//! Intended audience of a policy or planner.
use std::fmt;

/// Maturity of a policy or planner.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Maturity {
    /// Proven: studies recommend it, or it is a plain rule in wide use.
    Stable,
    /// Works, but studies do not recommend it for all traffic, or it is not tested with real
    /// engines.
    Experimental,
    /// For studies only: an oracle, an ablation, a negative control, or a rule that gains nothing.
    Study,
}

impl Maturity {
    /// All values, the most mature first.
    pub const ALL: [Maturity; 3] = [Maturity::Stable, Maturity::Experimental, Maturity::Study];

    /// Returns the name in Python and in tables.
    pub const fn name(self) -> &'static str {
        match self {
            Maturity::Stable => "stable",
            Maturity::Experimental => "experimental",
            Maturity::Study => "study",
        }
    }

    /// Returns the maturity with this name.
    pub fn named(name: &str) -> Option<Maturity> {
        Maturity::ALL.into_iter().find(|maturity| maturity.name() == name)
    }
}

impl fmt::Display for Maturity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
