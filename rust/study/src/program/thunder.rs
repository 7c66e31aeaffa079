//! The rules of ThunderAgent (Kang et al. 2026, arXiv 2602.13692), to compare with them.
//!
//! Its clients say which request of a program is the last. A program counts with all its tokens,
//! between two turns with a share that halves at a fixed rate. Above the limit, the programs with
//! the fewest tokens are paused first. Programs that return go before new ones, those with the
//! fewest tokens first, each to the instance with the most room. The values of Dynamo's port are in
//! `components/src/dynamo/thunderagent_router/router.py` of ai-dynamo/dynamo.
use lmetric_core::CoreError;
use lmetric_core::ids::Seconds;
use lmetric_core::program::settings::in_range;
use lmetric_core::program::{GapClass, Gaps, Program, ProgramConfig, ProgramMode, ProgramRules, Terms};
use serde::Deserialize;
use std::sync::Arc;

/// Settings of ThunderAgent's rules.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
#[serde(default)]
pub struct Thunder {
    /// Share of the limit down to which a crowded instance loses programs.
    pub pause_to: f64,
    /// Seconds between two turns after which half of a program's tokens count; 0: all count.
    pub half_life_seconds: Seconds,
    /// Whether a prefix that several programs share counts once.
    pub shared_roots: bool,
    /// Hold after which a program is admitted above the limit.
    pub max_wait_seconds: Seconds,
}

impl Default for Thunder {
    fn default() -> Thunder {
        Thunder { pause_to: 1.0, half_life_seconds: 30.0, shared_roots: true, max_wait_seconds: 1e9 }
    }
}

impl Thunder {
    /// Returns `config` with these rules. A program keeps its place until its pause. Held programs
    /// may pass each other, are never refused, and count without room to grow.
    ///
    /// # Errors
    /// `BadValue` for a setting out of its range.
    pub fn rule(self, config: ProgramConfig) -> Result<ProgramConfig, CoreError> {
        in_range(&[
            ("pause_to", self.pause_to, 0.1, 1.0),
            ("half_life_seconds", self.half_life_seconds, 0.0, 1e9),
            ("max_wait_seconds", self.max_wait_seconds, 0.0, 1e9),
        ])?;
        let config = ProgramConfig {
            mode: ProgramMode::Admit,
            growth: 0.0,
            backfill_seconds: 1e9,
            max_hold_seconds: 1e9,
            rules: Some(Arc::new(self)),
            ..config
        };
        config.checked()
    }
}

impl ProgramRules for Thunder {
    fn terms(&self) -> Terms {
        Terms {
            shared_roots: self.shared_roots,
            waits_for_children: false,
            returns_home: false,
            ends_long_holds: false,
            free: 0.0,
            pause_to: Some(self.pause_to),
            max_wait_seconds: self.max_wait_seconds,
        }
    }

    fn returns(&self, _: &Gaps, _: GapClass, gap: Seconds) -> f64 {
        if self.half_life_seconds > 0.0 { (-gap.max(0.0) / self.half_life_seconds).exp2() } else { 1.0 }
    }

    fn pause_rank(&self, _: &Gaps, program: &Program, _: Seconds) -> f64 {
        program.tokens
    }

    fn admission_rank(&self, program: &Program) -> Option<u64> {
        Some(u64::from(!program.has_run()) << 63 | program.tokens as u64)
    }
}
