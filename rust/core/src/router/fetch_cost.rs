//! Settings and learned cost of prefix fetches.
use super::settings::FetchConfig;
use crate::error::CoreError;
use crate::estimate::FetchCost;
use crate::ids::Seconds;

/// Settings and learned cost of prefix fetches.
#[derive(Clone, Copy, Debug)]
pub(super) struct Fetches {
    pub config: FetchConfig,
    pub cost: FetchCost,
}

impl Fetches {
    pub fn new(config: FetchConfig) -> Result<Fetches, CoreError> {
        config.check()?;
        Ok(Fetches { config, cost: FetchCost::new(config.seconds_per_token, config.fixed_seconds) })
    }

    /// Returns the learned seconds per fetched token, the learned fixed seconds per fetch, and the
    /// number of fetches behind these values.
    pub fn learned(&self) -> (Seconds, Seconds, u64) {
        let (per_token, fixed) = self.cost.cost();
        (per_token, fixed, self.cost.observed())
    }

    /// Returns the settings, and the cost as it counts at `now`.
    pub fn at(&self, now: Seconds) -> Fetches {
        Fetches { cost: self.cost.at(now), ..*self }
    }

    /// Returns whether a fetch of `tokens` is faster than their computation, which takes `seconds`.
    pub fn pays(&self, tokens: f64, seconds: Seconds) -> bool {
        tokens >= f64::from(self.config.min_tokens) && self.cost.seconds(tokens) < seconds
    }
}
