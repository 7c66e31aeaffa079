//! The core's own rules with changes that only studies make.
use lmetric_core::CoreError;
use lmetric_core::ids::Seconds;
use lmetric_core::program::settings::in_range;
use lmetric_core::program::{GapClass, Gaps, Program, ProgramConfig, ProgramRules, SOON_SECONDS, Terms};
use serde::Deserialize;
use std::sync::Arc;

/// Changes of the core's own rules. The default changes nothing.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
#[serde(default)]
pub struct Altered {
    /// [`Terms::free`].
    pub free: f64,
    /// Learned gaps are taken as this many times as long.
    pub gap_error: f64,
}

impl Default for Altered {
    fn default() -> Altered {
        Altered { free: Terms::default().free, gap_error: 1.0 }
    }
}

impl Altered {
    /// Returns `config` with these changes.
    ///
    /// # Errors
    /// `BadValue` for a setting out of its range.
    pub fn rule(self, config: ProgramConfig) -> Result<ProgramConfig, CoreError> {
        in_range(&[("free", self.free, 0.0, 1.0), ("gap_error", self.gap_error, 0.01, 100.0)])?;
        if self == Altered::default() {
            return Ok(config);
        }
        Ok(ProgramConfig { rules: Some(Arc::new(self)), ..config })
    }
}

impl ProgramRules for Altered {
    fn terms(&self) -> Terms {
        Terms { free: self.free, ..Terms::default() }
    }

    fn returns(&self, gaps: &Gaps, class: GapClass, gap: Seconds) -> f64 {
        gaps.returns(class, gap / self.gap_error)
    }

    fn pause_rank(&self, gaps: &Gaps, program: &Program, gap: Seconds) -> f64 {
        gaps.returns_within(program.class(), gap / self.gap_error, SOON_SECONDS / self.gap_error)
    }
}
