//! The rules of ThunderAgent (Kang et al. 2026, arXiv 2602.13692), to compare with them.
//!
//! Its clients say which request of a program is the last. A program counts with all its tokens,
//! between two turns with a share that halves at a fixed rate. Above the limit, the programs with
//! the fewest tokens are paused first. Programs that return go before new ones, those with the
//! fewest tokens first, each to the instance with the most room. The values of Dynamo's port are in
//! `components/src/dynamo/thunderagent_router/router.py` of ai-dynamo/dynamo.
use super::programs::Program;
use crate::error::CoreError;
use crate::ids::Seconds;
use serde::Deserialize;

/// Rules in place of ours.
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
    pub most_wait_seconds: Seconds,
}

impl Default for Thunder {
    fn default() -> Thunder {
        Thunder { pause_to: 1.0, half_life_seconds: 30.0, shared_roots: true, most_wait_seconds: 1e9 }
    }
}

impl Thunder {
    /// # Errors
    /// `BadValue` for a setting out of its range.
    pub(super) fn checked(self) -> Result<Thunder, CoreError> {
        super::settings::in_range(&[
            ("pause_to", self.pause_to, 0.1, 1.0),
            ("half_life_seconds", self.half_life_seconds, 0.0, 1e9),
            ("most_wait_seconds", self.most_wait_seconds, 0.0, 1e9),
        ])?;
        Ok(self)
    }

    /// Returns the part of a program's tokens that counts after a gap of this length.
    pub(super) fn part(&self, gap: Seconds) -> f64 {
        if self.half_life_seconds > 0.0 { (-gap.max(0.0) / self.half_life_seconds).exp2() } else { 1.0 }
    }

    /// Returns a program's place in the order of admission.
    pub(super) fn place(program: &Program) -> u64 {
        u64::from(!program.has_run) << 63 | program.tokens as u64
    }
}
