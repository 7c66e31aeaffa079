//! Rules of admission in place of the core's own, for studies.
use super::entry::Program;
use super::gaps::{GapClass, Gaps};
use super::types::SOON_SECONDS;
use crate::ids::Seconds;
use std::fmt::Debug;

/// Rules of admission in place of the core's own. [`super::ProgramConfig::rules`] selects them.
///
/// Without such rules, the core calls nothing here, so a tick over many programs makes no virtual
/// call.
pub trait ProgramRules: Debug + Send + Sync {
    /// Returns the constants of the rules.
    fn terms(&self) -> Terms {
        Terms::default()
    }

    /// Returns the part of a program's tokens that counts after a gap of this length, 0 to 1.
    fn returns(&self, gaps: &Gaps, class: GapClass, gap: Seconds) -> f64 {
        gaps.returns(class, gap)
    }

    /// Returns the rank of a program between two turns. A crowded instance loses programs of low
    /// rank first.
    fn pause_rank(&self, gaps: &Gaps, program: &Program, gap: Seconds) -> f64 {
        gaps.returns_within(program.class(), gap, SOON_SECONDS)
    }

    /// Returns the rank of a held program within its tenant. Programs of low rank are admitted
    /// first. `None`: the core's order.
    fn admission_rank(&self, _program: &Program) -> Option<u64> {
        None
    }
}

/// Constants in which rules differ from the core's own. The default is the core's.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Terms {
    /// Whether a prefix that several programs share counts once.
    pub shared_roots: bool,
    /// Whether a program waits for its children: the part that they continue keeps counting.
    pub waits_for_children: bool,
    /// Whether a held program returns to its last instance if it fits there.
    pub returns_home: bool,
    /// Whether long holds end: by the place of another tenant's programs, or by a refusal.
    pub ends_long_holds: bool,
    /// Share of `theta` below which an instance counts as roomy: the policy places requests of
    /// programs whose instance is roomy while no program waits. Other requests return to their
    /// instance. With 0.6, recorded agents took 5 to 12% longer end to end if all contexts fit.
    /// Above the caches' capacity, no value was better.
    pub free: f64,
    /// Share of the limit down to which a crowded instance loses programs. `None`: down to the
    /// limit.
    pub pause_to: Option<f64>,
    /// Hold after which a program is admitted above the limit.
    pub max_wait_seconds: Seconds,
}

impl Default for Terms {
    fn default() -> Terms {
        Terms {
            shared_roots: true,
            waits_for_children: true,
            returns_home: true,
            ends_long_holds: true,
            free: 1.0,
            pause_to: None,
            max_wait_seconds: f64::INFINITY,
        }
    }
}
