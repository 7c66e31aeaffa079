//! Settings of agent programs.
use super::thunder::Thunder;
use crate::error::CoreError;
use crate::ids::Seconds;
use serde::Deserialize;

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
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
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
    /// grow.
    pub growth: f64,
    /// Whether held programs with the fewest tokens are admitted first, not those that began first.
    /// On recorded agents above the caches' capacity: end to end -21 to -23%, P99 -39 to -51%. On
    /// synthetic ones, the 95th percentile of the job completion time doubles.
    pub shortest_first: bool,
    /// How long smaller programs may pass a held program that does not fit.
    pub backfill_seconds: Seconds,
    /// Length of a gap after which a program counts as ended, until it returns. People pause for
    /// minutes: at 120 s, recorded agents above the caches' capacity took up to 1.2 times as long.
    /// At 600 s, they were held below it.
    pub forget_seconds: Seconds,
    /// How long tokens of requests outside programs count after their end.
    pub others_seconds: Seconds,
    /// Requests that continue no program and have fewer tokens of their own, apart from a shared
    /// prefix such as a system prompt, belong to no program: they are never held.
    pub least_tokens: u32,
    /// Predicted hold above which a new program is refused.
    pub most_hold_seconds: Seconds,
    /// Maximum number of held programs. A tenant with less than its share may hold more.
    pub most_held: usize,
    /// Share of `theta` below which an instance counts as roomy: the policy places requests of
    /// programs whose instance is roomy while no program waits, and others return to their
    /// instance. For studies: at 0.6, the policy's choice is lost where all contexts fit, +5 to
    /// +12% end to end on recorded agents. Above the caches' capacity, no value is better.
    pub free: f64,
    /// Whether the session that a request names identifies its program.
    pub sessions: bool,
    /// Whether classes of gaps distinguish how the last answer ended.
    pub finish_reason: bool,
    /// For studies: learned gaps are taken as this many times as long.
    pub gap_error: f64,
    /// ThunderAgent's rules in place of ours, to compare with them; `None`: ours.
    #[serde(skip)]
    pub thunder: Option<Thunder>,
}

impl Default for ProgramConfig {
    fn default() -> ProgramConfig {
        ProgramConfig {
            mode: ProgramMode::Observe,
            theta: 1.0,
            resume: 0.85,
            growth: 0.1,
            shortest_first: true,
            backfill_seconds: 120.0,
            forget_seconds: 300.0,
            others_seconds: 15.0,
            least_tokens: 2048,
            most_hold_seconds: 300.0,
            most_held: 4096,
            free: 1.0,
            sessions: true,
            finish_reason: true,
            gap_error: 1.0,
            thunder: None,
        }
    }
}

impl ProgramConfig {
    /// Returns the settings with ThunderAgent's rules. A program keeps its place until its pause.
    /// Held ones may pass each other, are never refused, and count without room to grow.
    pub fn of_thunder(self, thunder: Thunder) -> ProgramConfig {
        ProgramConfig {
            mode: ProgramMode::Admit,
            growth: 0.0,
            free: 0.0,
            backfill_seconds: 1e9,
            most_hold_seconds: 1e9,
            thunder: Some(thunder),
            ..self
        }
    }

    /// # Errors
    /// `BadValue` for a setting out of its range.
    pub fn checked(self) -> Result<ProgramConfig, CoreError> {
        in_range(&[
            ("theta", self.theta, 0.1, 10.0),
            ("resume", self.resume, 0.1, 1.0),
            ("growth", self.growth, 0.0, 1.0),
            ("backfill_seconds", self.backfill_seconds, 0.0, 1e9),
            ("free", self.free, 0.0, 1.0),
            ("forget_seconds", self.forget_seconds, 1.0, 1e6),
            ("others_seconds", self.others_seconds, 0.0, 3600.0),
            ("gap_error", self.gap_error, 0.01, 100.0),
            ("most_hold_seconds", self.most_hold_seconds, 0.0, 1e9),
        ])?;
        self.thunder.map(Thunder::checked).transpose()?;
        Ok(self)
    }
}

/// Checks settings: name, value, least and greatest value.
///
/// # Errors
/// `BadValue` for a setting out of its range.
pub(super) fn in_range(settings: &[(&str, f64, f64, f64)]) -> Result<(), CoreError> {
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
