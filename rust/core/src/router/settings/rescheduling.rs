//! Settings of rescheduling.
use crate::error::CoreError;
use crate::ids::Seconds;
use crate::reschedule::{
    Curve, Forecast, INTERVAL_STEPS, Llumnix, LlumnixSettings, Rescheduler, Star, StarSettings,
};
use crate::suggest::nearest;
use serde::Deserialize;

/// Rescheduling of running requests.
pub struct Rescheduling {
    /// The rule.
    pub rule: Box<dyn Rescheduler>,
    /// Forecast of output lengths.
    pub forecast: Box<dyn Forecast>,
    /// Output tokens of a request between two predictions of its length (STAR, section 5.3: 20).
    pub repredict_tokens: u32,
    /// Whether a request's expected length is its maximum. Otherwise it is the true length, which
    /// the learned curve must not use.
    pub expected_is_limit: bool,
}

/// Settings of [`Rescheduling`], which can be shown, stored and copied.
#[derive(Debug, Deserialize)]
#[serde(default)]
pub struct RescheduleConfig {
    /// The rule with its settings.
    #[serde(skip)]
    pub rule: Rule,
    /// Forecast of output lengths.
    #[serde(skip)]
    pub forecast: Box<dyn Forecast>,
    /// Output tokens of a request between two predictions of its length.
    pub repredict_tokens: u32,
    /// Whether a request's expected length is its maximum; otherwise its true length.
    #[serde(skip)]
    pub expected_is_limit: bool,
    /// Seconds between two rounds. 0.5: about [`INTERVAL_STEPS`] steps of 25 ms.
    pub period_seconds: Seconds,
}

impl Default for RescheduleConfig {
    fn default() -> RescheduleConfig {
        RescheduleConfig {
            rule: Rule::Star(StarSettings::default()),
            forecast: Box::new(Curve),
            repredict_tokens: INTERVAL_STEPS,
            expected_is_limit: true,
            period_seconds: 0.5,
        }
    }
}

impl Clone for RescheduleConfig {
    fn clone(&self) -> RescheduleConfig {
        RescheduleConfig { forecast: self.forecast.fresh(), ..*self }
    }
}

/// A rule with its settings.
#[derive(Clone, Copy, Debug)]
pub enum Rule {
    /// STAR.
    Star(StarSettings),
    /// Llumnix.
    Llumnix(LlumnixSettings),
}

impl RescheduleConfig {
    /// Names that [`RescheduleConfig::named`] accepts.
    pub const NAMES: [&str; 3] = ["star", "star_current", "llumnix"];

    /// Returns the default settings of a rule: `star` predicts by the learned curve, `star_current`
    /// uses only present loads.
    ///
    /// # Errors
    /// `UnknownName` with the nearest name.
    pub fn named(name: &str) -> Result<RescheduleConfig, CoreError> {
        let plain = RescheduleConfig::default();
        Ok(match name {
            "star" => plain,
            "star_current" => {
                let settings = StarSettings { prediction: false, ..StarSettings::default() };
                RescheduleConfig { rule: Rule::Star(settings), ..plain }
            }
            "llumnix" => RescheduleConfig { rule: Rule::Llumnix(LlumnixSettings::default()), ..plain },
            _ => {
                return Err(CoreError::UnknownName {
                    kind: "rescheduler".into(),
                    name: name.into(),
                    nearest: nearest(name, RescheduleConfig::NAMES),
                });
            }
        })
    }

    /// Builds the rescheduling from its settings.
    ///
    /// # Errors
    /// `BadValue` for a setting out of its range.
    pub fn build(&self) -> Result<Rescheduling, CoreError> {
        if !(self.period_seconds >= 1e-3 && self.period_seconds <= 1e9) {
            return Err(CoreError::BadValue {
                what: "rescheduling: period_seconds".into(),
                got: self.period_seconds.to_string(),
                expected: "0.001 to 1e9 seconds".into(),
            });
        }
        let rule: Box<dyn Rescheduler> = match self.rule {
            Rule::Star(settings) => Box::new(Star::new(settings)?),
            Rule::Llumnix(settings) => Box::new(Llumnix::new(settings)?),
        };
        Ok(Rescheduling {
            rule,
            forecast: self.forecast.fresh(),
            repredict_tokens: self.repredict_tokens,
            expected_is_limit: self.expected_is_limit,
        })
    }
}
