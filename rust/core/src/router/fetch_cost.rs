//! When prefixes are fetched, and what fetches cost, as learned.
use super::settings::PullConfig;
use crate::error::CoreError;
use crate::estimate::PullCost;
use crate::ids::Seconds;

/// When prefixes are pulled, and what was learned of it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pulls {
    pub config: PullConfig,
    pub cost: PullCost,
}

impl Pulls {
    pub fn new(config: PullConfig) -> Result<Pulls, CoreError> {
        config.check()?;
        Ok(Pulls { config, cost: PullCost::new(config.seconds_per_token, config.fixed_seconds) })
    }

    /// Seconds that a pulled token takes and that a pull takes besides, as learned, and how many
    /// pulls that was learned from.
    pub fn learned(&self) -> (Seconds, Seconds, u64) {
        let (per_token, fixed) = self.cost.cost();
        (per_token, fixed, self.cost.observed())
    }

    /// Whether to pull `tokens` is worth it where computing them takes `seconds`.
    pub fn pays(&self, tokens: f64, seconds: Seconds) -> bool {
        tokens >= f64::from(self.config.least_tokens) && self.cost.seconds(tokens) < seconds
    }
}
