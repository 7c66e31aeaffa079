//! Settings of rebalancing.
use super::{Curve, Forecast, INTERVAL_STEPS, Rebalancer, Star};
use crate::error::CoreError;
use crate::expr::nearest;
use crate::ids::Seconds;
use crate::settings::SettingsReader;
use serde::Deserialize;

/// Rebalancing of running requests.
pub struct Rebalancing {
    /// The rule.
    pub rule: Box<dyn Rebalancer>,
    /// Forecast of output lengths.
    pub forecast: Box<dyn Forecast>,
    /// Output tokens of a request between two predictions of its length (STAR, section 5.3: 20).
    pub repredict_tokens: u32,
    /// Whether a request's expected length is its maximum. Otherwise it is the true length, which
    /// the learned curve must not use.
    pub expected_is_limit: bool,
}

/// Settings of [`Rebalancing`], which can be shown, stored and copied.
#[derive(Debug, Deserialize)]
#[serde(default)]
pub struct RebalanceConfig {
    /// The rule with its settings.
    #[serde(skip)]
    pub rule: Box<dyn Rebalancer>,
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

impl Default for RebalanceConfig {
    fn default() -> RebalanceConfig {
        RebalanceConfig {
            rule: Box::new(Star::default()),
            forecast: Box::new(Curve),
            repredict_tokens: INTERVAL_STEPS,
            expected_is_limit: true,
            period_seconds: 0.5,
        }
    }
}

impl Clone for RebalanceConfig {
    fn clone(&self) -> RebalanceConfig {
        RebalanceConfig { rule: self.rule.fresh(), forecast: self.forecast.fresh(), ..*self }
    }
}

impl RebalanceConfig {
    /// Returns the settings of a rule of the core: `star`, which predicts by the learned curve.
    ///
    /// # Errors
    /// `UnknownName` for another rule; `BadValue` for a setting of the wrong type or out of its
    /// range.
    pub fn named(name: &str, settings: &mut SettingsReader) -> Result<RebalanceConfig, CoreError> {
        if name != "star" {
            let (kind, nearest) = ("rebalancer".into(), nearest(name, ["star"]));
            return Err(CoreError::UnknownName { kind, name: name.into(), nearest });
        }
        let config: RebalanceConfig = settings.read()?;
        Ok(RebalanceConfig { rule: Box::new(Star::new(settings.read()?)?), ..config })
    }

    /// Builds the rebalancing from its settings.
    ///
    /// # Errors
    /// `BadValue` for a setting out of its range.
    pub fn build(&self) -> Result<Rebalancing, CoreError> {
        if !(self.period_seconds >= 1e-3 && self.period_seconds <= 1e9) {
            return Err(CoreError::BadValue {
                what: "rebalancing: period_seconds".into(),
                got: self.period_seconds.to_string(),
                expected: "0.001 to 1e9 seconds".into(),
            });
        }
        Ok(Rebalancing {
            rule: self.rule.fresh(),
            forecast: self.forecast.fresh(),
            repredict_tokens: self.repredict_tokens,
            expected_is_limit: self.expected_is_limit,
        })
    }
}
