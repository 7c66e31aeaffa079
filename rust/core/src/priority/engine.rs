//! Boosted arrivals in an engine: what a scheduler needs to order its queue and its batch.
use super::{Settings, TailRate, Work};
use crate::error::CoreError;
use crate::ids::Seconds;

/// Requests that end between two updates of gamma and of the time per token. Ranks do not change by
/// themselves in between.
const EVERY: u64 = 16;
/// Weight of the measurements since the last update; the first update takes them in full.
const SMOOTHING: f64 = 0.2;

/// Values that an engine learns from its own requests: gamma, and the seconds per token.
#[derive(Clone, Debug)]
pub struct EngineBoost {
    settings: Settings,
    tail: Option<TailRate>,
    gamma: f64,
    /// A router's gamma, since the last update.
    given: Option<f64>,
    token_seconds: Seconds,
    /// Steps since the last update.
    seconds: Seconds,
    tokens: u64,
    ended: u64,
    /// Requests that had ended at the last call of [`EngineBoost::look`].
    looked: u64,
}

impl EngineBoost {
    /// Creates the values of an engine that has served no request. `token_seconds`: seconds per
    /// token until they are measured, such as those of a full step.
    ///
    /// # Errors
    /// `BadValue` for a setting out of its range.
    pub fn new(settings: Settings, token_seconds: Seconds) -> Result<EngineBoost, CoreError> {
        settings.check()?;
        let gamma = settings.gamma;
        Ok(EngineBoost {
            settings,
            tail: settings.adaptive.map(|adaptive| TailRate::new(gamma, adaptive)).transpose()?,
            gamma,
            given: None,
            token_seconds,
            seconds: 0.0,
            tokens: 0,
            ended: 0,
            looked: 0,
        })
    }

    /// Returns gamma, 1/s.
    pub fn gamma(&self) -> f64 {
        self.gamma
    }

    /// Returns the seconds of the engine's steps per token computed in them, prompt and answer
    /// alike.
    pub fn token_seconds(&self) -> Seconds {
        self.token_seconds
    }

    /// Records steps that took `seconds` and computed `tokens` tokens.
    pub fn stepped(&mut self, seconds: Seconds, tokens: u64) {
        if seconds.is_finite() {
            self.seconds += seconds;
            self.tokens += tokens;
        }
    }

    /// Records that a request ended `seconds` after its arrival.
    pub fn ended(&mut self, seconds: Seconds) {
        self.ended += 1;
        if let Some(tail) = &mut self.tail {
            tail.ended(seconds);
        }
    }

    /// Takes the gamma of a router, in 1/s, at the next update. It learns from all its engines.
    ///
    /// # Errors
    /// `BadValue` for a gamma out of its range.
    pub fn give(&mut self, gamma: f64) -> Result<(), CoreError> {
        Settings { gamma, ..self.settings }.check()?;
        self.given = Some(gamma);
        Ok(())
    }

    /// Updates the values if an update is due: called after each step. Returns whether it was, so
    /// that all ranks may have changed. Gamma is a router's, or else the learned one.
    pub fn look(&mut self) -> bool {
        let before = std::mem::replace(&mut self.looked, self.ended);
        if self.ended / EVERY == before / EVERY {
            return false;
        }
        if self.tokens > 0 {
            let measured = self.seconds / self.tokens as f64;
            let share = if before < EVERY { 1.0 } else { SMOOTHING };
            self.token_seconds += share * (measured - self.token_seconds);
            (self.seconds, self.tokens) = (0.0, 0);
        }
        let learned = self.tail.as_ref().map_or(self.gamma, TailRate::gamma);
        self.gamma = self.given.take().unwrap_or(learned);
        true
    }

    /// Returns a request's boosted arrival on the clock of `arrival`: lower goes first.
    pub fn rank(&self, arrival: Seconds, work: &Work) -> Seconds {
        self.settings.boosted_arrival(arrival, work, self.gamma, self.token_seconds)
    }

    /// Returns the work tokens from which the rank of a running request changes.
    pub fn next_change(&self, work: &Work) -> u32 {
        match self.settings.memguard {
            Some(guard) => guard.next(work.tokens()),
            None => work.tokens().saturating_add(1),
        }
    }

    /// Returns the seconds of boosted arrival by which a waiting request must be ahead of the
    /// running request that goes back for it (Eq. 7).
    pub fn hysteresis(&self) -> Seconds {
        self.settings.memguard.map_or(0.0, |guard| guard.hysteresis_seconds)
    }
}
