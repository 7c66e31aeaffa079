//! Planners split requests that roles do not split. Each planner is one file here and one row of
//! `planners!`. Other crates write planners with [`Planner`] and [`View`].
mod view;

use crate::error::CoreError;
use crate::estimate::OutputLength;
use crate::ids::{Seconds, Slot};
use crate::maturity::Maturity;
use crate::plan::Cuts;
use crate::policy::{Knob, Knobs};
use crate::router::parts::{Follow, Rest};
use crate::router::state::State;
use std::fmt;

pub use crate::router::state::{Planner, View};
pub use libra::Libra;

/// Declares the planners. Each row names a file with a declaration `SPEC`, in the order of the docs
/// page.
macro_rules! planners {
    ($($file:ident,)*) => {
        $(mod $file;)*
        pub(crate) static PLANNERS: &[&PlannerSpec] = &[$(&$file::SPEC,)*];
    };
}

planners! {
    libra,
    apart,
}

/// Builds a planner from the values of its settings.
pub type Build = fn(&Knobs) -> Result<Box<dyn Planner>, CoreError>;

/// The declaration of a planner.
pub struct PlannerSpec {
    /// Name in the configuration.
    pub name: &'static str,
    /// Description, a predicate of "it" in the docs page.
    pub about: &'static str,
    /// Source of the rule: paper and section.
    pub source: &'static str,
    /// Audience of the planner.
    pub maturity: Maturity,
    /// Settings.
    pub settings: &'static [Knob],
    /// Whether the last token that an engine produces before a split inside the output counts. The
    /// next engine then computes its KV.
    pub keeps_tokens: bool,
    /// Builder.
    pub build: Build,
}

/// Puts a planner into another.
pub type Wrap = fn(Box<dyn Planner>) -> Box<dyn Planner>;

/// Maximum number of classes of learned lengths, 0.5 KiB each; the least recently used class is
/// removed.
const CLASSES: u32 = 1024;

/// How requests that roles do not split are split: a planner with its settings. A
/// [`crate::Registry`] creates it by name.
#[derive(Clone, Default)]
pub struct Split {
    planner: Option<(&'static PlannerSpec, Knobs)>,
    wrap: Option<Wrap>,
}

impl Split {
    /// Requests are not split.
    pub const NONE: Split = Split { planner: None, wrap: None };

    /// Builds a planner with these settings, all others at their defaults.
    ///
    /// # Errors
    /// `UnknownName` for an unknown setting; `BadValue` for a setting out of range.
    pub fn by(spec: &'static PlannerSpec, settings: &[(String, f64)]) -> Result<Split, CoreError> {
        let settings = Knobs::resolve(&format!("split {}", spec.name), spec.settings, settings)?;
        (spec.build)(&settings)?;
        Ok(Split { planner: Some((spec, settings)), wrap: None })
    }

    /// Passes the planner through `wrap` when it is built, for planners that change another.
    pub fn wrapped(self, wrap: Wrap) -> Split {
        Split { wrap: Some(wrap), ..self }
    }

    /// Returns the planner's declaration; `None`: requests are not split.
    pub fn planner(&self) -> Option<&'static PlannerSpec> {
        self.planner.as_ref().map(|(spec, _)| *spec)
    }

    /// Yields all settings of the planner with their values.
    pub fn settings(&self) -> impl Iterator<Item = (&'static str, f64)> + '_ {
        self.planner.iter().flat_map(|(_, settings)| settings.iter())
    }

    /// Returns the planner's [`PlannerSpec::keeps_tokens`].
    pub fn keeps_tokens(&self) -> bool {
        self.planner().is_some_and(|spec| spec.keeps_tokens)
    }
}

impl fmt::Debug for Split {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some((spec, settings)) = &self.planner else { return f.write_str("none") };
        f.write_str(spec.name)?;
        if self.wrap.is_some() {
            f.write_str(" wrapped")?;
        }
        f.debug_map().entries(settings.iter()).finish()
    }
}

impl State {
    /// Sets the planner for requests that roles do not split. Returns the planner's predictor of
    /// output lengths, if it needs one.
    ///
    /// # Errors
    /// `BadValue` for a setting out of its range.
    pub(in crate::router) fn set_split(&mut self, split: &Split) -> Result<Option<OutputLength>, CoreError> {
        let planner = split.planner.as_ref().map(|(spec, settings)| (spec.build)(settings)).transpose()?;
        let planner = planner.map(|planner| match split.wrap {
            Some(wrap) => wrap(planner),
            None => planner,
        });
        let lengths = planner.as_ref().map_or(Ok(None), |planner| planner.lengths())?;
        if let Some(seconds) = planner.as_ref().and_then(|planner| planner.recent_seconds()) {
            self.ledger.set_recent(seconds);
        }
        self.planner = planner;
        Ok(lengths)
    }
}
