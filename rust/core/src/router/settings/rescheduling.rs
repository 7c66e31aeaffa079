//! How running requests are moved.
use crate::error::CoreError;
use crate::ids::Seconds;
use crate::reschedule::{
    Curve, Forecast, INTERVAL_STEPS, Llumnix, LlumnixSettings, Rescheduler, Star, StarSettings,
};
use crate::suggest::nearest;
use serde::Deserialize;

/// How running requests are moved.
pub struct Rescheduling {
    /// The rule.
    pub rule: Box<dyn Rescheduler>,
    /// What it believes of lengths.
    pub forecast: Box<dyn Forecast>,
    /// Output tokens of a request after which its length is predicted anew (STAR, section 5.3: 20).
    pub repredict_tokens: u32,
    /// Whether the expected length of a request is the most that it may get; else it is what it
    /// will get, which the curve must not know.
    pub expected_is_limit: bool,
}

/// The settings of [`Rescheduling`], to be told, kept and copied.
#[derive(Debug, Deserialize)]
#[serde(default)]
pub struct RescheduleConfig {
    /// The rule with its settings.
    #[serde(skip)]
    pub rule: Rule,
    /// See [`Rescheduling::forecast`].
    #[serde(skip)]
    pub forecast: Box<dyn Forecast>,
    /// See [`Rescheduling::repredict_tokens`].
    pub repredict_tokens: u32,
    /// See [`Rescheduling::expected_is_limit`].
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
    /// As Llumnix does it.
    Llumnix(LlumnixSettings),
}

impl RescheduleConfig {
    /// The names that [`RescheduleConfig::named`] takes.
    pub const NAMES: [&str; 3] = ["star", "star_current", "llumnix"];

    /// By name, at its defaults: `star` predicts by the learned curve, `star_current` looks at
    /// present loads alone.
    ///
    /// # Errors
    /// `UnknownName` with the nearest one.
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

    /// Ready to serve.
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
