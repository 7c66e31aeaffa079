//! Settings of agent programs.
use super::rules::{ProgramRules, Terms};
use crate::error::CoreError;
use crate::ids::Seconds;
use crate::settings::SettingsReader;
use serde::Deserialize;
use std::sync::Arc;

/// Hold after which a program's level rises by one, unless admission by load has another.
pub const AGING_SECONDS: Seconds = 30.0;

/// Treatment of programs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum ProgramMode {
    /// Measures the working set and counts the requests that `admit` would hold. Holds nothing.
    #[default]
    Observe,
    /// Holds requests of programs whose working set does not fit into the caches, while
    /// recomputation of contexts is most of the fleet's work.
    Auto,
    /// Holds requests of programs whose working set does not fit into the caches.
    Admit,
}

impl ProgramMode {
    /// All values, with their names.
    pub const NAMES: [(&'static str, ProgramMode); 3] =
        [("observe", ProgramMode::Observe), ("auto", ProgramMode::Auto), ("admit", ProgramMode::Admit)];
}

/// Settings of agent programs.
#[derive(Clone, Debug, Deserialize)]
#[serde(default)]
pub struct ProgramConfig {
    /// Treatment of programs.
    #[serde(skip)]
    pub mode: ProgramMode,
    /// Share of an instance's cache that its programs may be expected to use; above it, programs
    /// are paused.
    pub theta: f64,
    /// Share of `theta` up to which programs are admitted.
    pub resume: f64,
    /// Least tokens counted for a program, as a share of the mean context of all programs: room to
    /// grow. At 0.1, recorded agents above the caches' capacity took 2 to 5% longer end to end.
    pub growth: f64,
    /// Whether held programs with the fewest tokens are admitted first, not those that began first.
    /// On recorded agents above the caches' capacity: end to end -21 to -23%, P99 -39 to -51%. On
    /// synthetic ones, the 95th percentile of the job completion time doubles.
    pub shortest_first: bool,
    /// How long smaller programs may pass a held program that does not fit. At 120 s, instances
    /// were kept free too often: recorded agents above the caches' capacity took 4 to 14% longer
    /// end to end. The longest hold was the same.
    pub backfill_seconds: Seconds,
    /// Length of a gap after which a program counts as ended, until it returns. People pause for
    /// minutes: at 120 s, recorded agents above the caches' capacity took up to 1.2 times as long.
    /// At 600 s, they were held below it.
    pub forget_seconds: Seconds,
    /// How long tokens of requests outside programs count after their end.
    pub others_seconds: Seconds,
    /// Requests that continue no program and have fewer tokens of their own, apart from a shared
    /// prefix such as a system prompt, belong to no program: they are never held.
    pub min_tokens: u32,
    /// Predicted hold above which a new program is refused.
    pub max_hold_seconds: Seconds,
    /// Maximum number of held programs. A tenant with less than its share may hold more.
    pub max_held: usize,
    /// Whether the session that a request names identifies its program.
    pub sessions: bool,
    /// Whether classes of gaps distinguish how the last answer ended.
    pub finish_reason: bool,
    /// Hold after which a held program's level rises by one.
    #[serde(skip)]
    pub aging_seconds: Seconds,
    /// Rules in place of the core's own; `None`: the core's.
    #[serde(skip)]
    pub rules: Option<Arc<dyn ProgramRules>>,
}

impl Default for ProgramConfig {
    fn default() -> ProgramConfig {
        ProgramConfig {
            mode: ProgramMode::Observe,
            theta: 1.0,
            resume: 0.85,
            growth: 0.2,
            shortest_first: true,
            backfill_seconds: 600.0,
            forget_seconds: 300.0,
            others_seconds: 15.0,
            min_tokens: 2048,
            max_hold_seconds: 300.0,
            max_held: 4096,
            sessions: true,
            finish_reason: true,
            aging_seconds: AGING_SECONDS,
            rules: None,
        }
    }
}

impl ProgramConfig {
    /// Returns the constants of the rules.
    pub(super) fn terms(&self) -> Terms {
        self.rules.as_ref().map_or_else(Terms::default, |rules| rules.terms())
    }

    /// Returns the settings of this kind, a name of [`ProgramMode::NAMES`]; `None` for `"none"`.
    ///
    /// # Errors
    /// `BadValue` for another kind, or for a setting of the wrong type or out of its range.
    pub fn named(kind: &str, settings: &mut SettingsReader) -> Result<Option<ProgramConfig>, CoreError> {
        if kind == "none" {
            return Ok(None);
        }
        let Some((_, mode)) = ProgramMode::NAMES.into_iter().find(|(name, _)| *name == kind) else {
            return Err(CoreError::BadValue {
                what: "programs".into(),
                got: format!("{kind:?}"),
                expected: "\"none\", \"observe\", \"auto\" or \"admit\"".into(),
            });
        };
        ProgramConfig { mode, ..settings.read()? }.checked().map(Some)
    }

    /// # Errors
    /// `BadValue` for a setting out of its range.
    pub fn checked(self) -> Result<ProgramConfig, CoreError> {
        in_range(&[
            ("theta", self.theta, 0.1, 10.0),
            ("resume", self.resume, 0.1, 1.0),
            ("growth", self.growth, 0.0, 1.0),
            ("backfill_seconds", self.backfill_seconds, 0.0, 1e9),
            ("forget_seconds", self.forget_seconds, 1.0, 1e6),
            ("others_seconds", self.others_seconds, 0.0, 3600.0),
            ("max_hold_seconds", self.max_hold_seconds, 0.0, 1e9),
        ])?;
        Ok(self)
    }
}

/// Checks settings: name, value, least and greatest value.
///
/// # Errors
/// `BadValue` for a setting out of its range.
pub fn in_range(settings: &[(&str, f64, f64, f64)]) -> Result<(), CoreError> {
    for &(what, value, least, most) in settings {
        if !(least..=most).contains(&value) {
            return Err(CoreError::BadValue {
                what: format!("programs: {what}"),
                got: value.to_string(),
                expected: format!("{least} to {most}"),
            });
        }
    }
    Ok(())
}
