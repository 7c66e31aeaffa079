//! Settings of agent programs.
use crate::error::CoreError;
use crate::ids::Seconds;

/// What the router does about programs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum ProgramMode {
    /// Measures the working set and counts the requests that `admit` would hold. Holds nothing.
    #[default]
    Observe,
    /// Holds requests of programs whose working set does not fit into the caches.
    Admit,
}

impl ProgramMode {
    /// All values, with their names.
    pub const NAMES: [(&'static str, ProgramMode); 2] =
        [("observe", ProgramMode::Observe), ("admit", ProgramMode::Admit)];
}

/// Order in which held programs are admitted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum HoldOrder {
    /// Oldest program first: best 95th percentile, fair to long programs.
    #[default]
    Birth,
    /// Fewest tokens first: best median, long programs wait longest.
    Shortest,
}

impl HoldOrder {
    /// All values, with their names.
    pub const NAMES: [(&'static str, HoldOrder); 2] =
        [("birth", HoldOrder::Birth), ("shortest", HoldOrder::Shortest)];
}

/// Settings of agent programs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ProgramConfig {
    /// What the router does about programs.
    pub mode: ProgramMode,
    /// Share of an instance's cache that its programs may be expected to use; above it, programs
    /// are paused.
    pub theta: f64,
    /// Share of `theta` up to which programs are admitted.
    pub resume: f64,
    /// Least tokens counted for a program, as a share of the mean context of all programs: room to
    /// grow.
    pub growth: f64,
    /// Order of held programs.
    pub order: HoldOrder,
    /// How long smaller programs may pass a held program that does not fit.
    pub backfill_seconds: Seconds,
    /// Length of a gap after which a program counts as ended.
    pub forget_seconds: Seconds,
    /// How long tokens of requests outside programs count after their end.
    pub others_seconds: Seconds,
    /// Prompts of new requests below this length are chats: not tracked, never held.
    pub min_tokens: u32,
    /// Predicted hold above which a new program is refused.
    pub hold_max_seconds: Seconds,
    /// Maximum number of held requests.
    pub max_held: usize,
    /// Whether classes of gaps distinguish how the last answer ended.
    pub finish_reason: bool,
}

impl Default for ProgramConfig {
    fn default() -> ProgramConfig {
        ProgramConfig {
            mode: ProgramMode::Observe,
            theta: 0.95,
            resume: 0.85,
            growth: 0.25,
            order: HoldOrder::Birth,
            backfill_seconds: 120.0,
            forget_seconds: 300.0,
            others_seconds: 15.0,
            min_tokens: 4096,
            hold_max_seconds: 300.0,
            max_held: 10_000,
            finish_reason: true,
        }
    }
}

impl ProgramConfig {
    /// # Errors
    /// `BadValue` for a setting out of its range.
    pub fn checked(self) -> Result<ProgramConfig, CoreError> {
        for (what, value, least, most) in [
            ("theta", self.theta, 0.1, 2.0),
            ("resume", self.resume, 0.1, 1.0),
            ("growth", self.growth, 0.0, 1.0),
            ("backfill_seconds", self.backfill_seconds, 0.0, 1e9),
            ("forget_seconds", self.forget_seconds, 1.0, 1e6),
            ("others_seconds", self.others_seconds, 0.0, 3600.0),
            ("hold_max_seconds", self.hold_max_seconds, 0.0, 1e9),
        ] {
            if !(least..=most).contains(&value) {
                return Err(CoreError::BadValue {
                    what: what.into(),
                    got: value.to_string(),
                    expected: format!("{least} to {most}"),
                });
            }
        }
        Ok(self)
    }
}
