//! Planners: how requests are split that no roles split. Each is one file here and one row of
//! `planners!`. Other crates write planners of their own with [`Planner`] and [`View`].
mod view;

use crate::error::CoreError;
use crate::ids::{InstanceId, Seconds};
use crate::maturity::Maturity;
use crate::plan::Cuts;
use crate::policy::{Knob, Knobs};
use crate::router::parts::{Follow, Rest};
use crate::router::state::State;
use std::fmt;

pub use crate::router::state::{Planner, View};
pub use libra::Libra;

/// Each row is a file with its declaration `SPEC`, in the order of the docs page.
macro_rules! planners {
    ($($file:ident,)*) => {
        $(mod $file;)*
        pub(crate) static PLANNERS: &[&PlannerSpec] = &[$(&$file::SPEC,)*];
    };
}

planners! {
    libra,
    apart,
    force,
}

/// Makes a planner of the values of its settings.
pub type Build = fn(&Knobs) -> Result<Box<dyn Planner>, CoreError>;

/// The declaration of a planner.
pub struct PlannerSpec {
    /// Its name in configuration.
    pub name: &'static str,
    /// What it does.
    pub about: &'static str,
    /// Where it was read: paper and section.
    pub source: &'static str,
    /// Who should use it.
    pub maturity: Maturity,
    /// Its settings.
    pub settings: &'static [Knob],
    /// Whether the last token that an engine makes before a split in the answer counts, its KV
    /// being left to the next engine.
    pub keeps_tokens: bool,
    /// Makes it.
    pub build: Build,
}

/// Classes that lengths are kept of, 0.5 KiB each; the one used least recently leaves.
const CLASSES: u32 = 1024;

/// How requests are split that no roles split: a planner with its settings. A
/// [`crate::Registry`] makes it from names.
#[derive(Clone, Default)]
pub struct Split {
    planner: Option<(&'static PlannerSpec, Knobs)>,
}

impl Split {
    /// Requests are not split.
    pub const NONE: Split = Split { planner: None };

    /// The planner with these settings, the others at their defaults.
    ///
    /// # Errors
    /// `UnknownName` for a setting, `BadValue` for a setting out of its range.
    pub fn by(spec: &'static PlannerSpec, settings: &[(String, f64)]) -> Result<Split, CoreError> {
        let settings = Knobs::resolve(&format!("split {}", spec.name), spec.settings, settings)?;
        (spec.build)(&settings)?;
        Ok(Split { planner: Some((spec, settings)) })
    }

    /// The planner; `None`: requests are not split.
    pub fn planner(&self) -> Option<&'static PlannerSpec> {
        self.planner.as_ref().map(|(spec, _)| *spec)
    }

    /// All settings of the planner with their values.
    pub fn settings(&self) -> impl Iterator<Item = (&'static str, f64)> + '_ {
        self.planner.iter().flat_map(|(_, settings)| settings.iter())
    }

    /// See [`PlannerSpec::keeps_tokens`].
    pub fn keeps_tokens(&self) -> bool {
        self.planner().is_some_and(|spec| spec.keeps_tokens)
    }
}

impl fmt::Debug for Split {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some((spec, settings)) = &self.planner else { return f.write_str("none") };
        f.write_str(spec.name)?;
        f.debug_map().entries(settings.iter()).finish()
    }
}

impl State {
    /// Sets how requests are split from now on that no roles split.
    ///
    /// # Errors
    /// `BadValue` for a setting out of its range.
    pub(in crate::router) fn set_split(&mut self, split: &Split) -> Result<(), CoreError> {
        let planner = split.planner.as_ref().map(|(spec, settings)| (spec.build)(settings)).transpose()?;
        let lengths = planner.as_ref().map_or(Ok(None), |planner| planner.lengths())?;
        if lengths.is_none() || self.lengths.is_none() {
            self.lengths = lengths;
        }
        if let Some(seconds) = planner.as_ref().and_then(|planner| planner.recent_seconds()) {
            self.ledger.set_recent(seconds);
        }
        self.planner = planner;
        Ok(())
    }
}
