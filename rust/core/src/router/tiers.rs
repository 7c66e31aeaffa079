//! Loads from the tiers below the GPU, and how these tiers count.
use super::router::Router;
use super::settings::TierConfig;
use crate::error::CoreError;
use crate::ids::InstanceId;
use crate::kv::tier::Tier;

impl Router {
    /// Returns an instance's loads from a tier: the cost of a loaded token relative to a computed
    /// one, the number of loads behind it, and the tokens loaded.
    pub fn tier_loads_of(&self, id: InstanceId, tier: Tier) -> (f64, u64, u64) {
        let ratio = self.state.tier_load_ratio(id.index(), tier);
        let loads = self.state.ledger.loads(id.index()).of(tier);
        loads.map_or((ratio, 0, 0), |loads| (ratio, loads.cost.observed(), loads.hit_tokens as u64))
    }

    /// Sets how lower tiers count in scores.
    ///
    /// # Errors
    /// `BadValue` for a setting out of its range.
    pub fn set_tiers(&mut self, tiers: TierConfig) -> Result<(), CoreError> {
        self.state.config.tiers = tiers.checked()?;
        self.state.caches.set_counted(tiers.counted);
        Ok(())
    }
}
