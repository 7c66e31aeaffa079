//! Makes the engine of an instance, and adds the instance to a router: at the start, and when it
//! joins again.
use super::ClusterConfig;
use crate::engine::{Engine, Settings};
use lmetric_core::CoreError;
use lmetric_core::ids::Slot;
use lmetric_core::router::{IndexFeed, Router};

/// Makes the engine of an instance.
pub(super) fn new_engine(config: &ClusterConfig, instance: usize) -> Result<Engine, CoreError> {
    let settings = Settings {
        admission: config.admission,
        order: config.order.clone(),
        preempt: config.preempt,
        host: config.host,
        kv_events: config.router.index_feed == IndexFeed::Exact,
    };
    let mut engine = Engine::new(config.profiles[instance].clone(), settings, None)?;
    engine.set_token_slo(config.token_slo);
    Ok(engine)
}

/// Adds an instance to a router.
pub(super) fn add_instance(
    router: &mut Router,
    config: &ClusterConfig,
    instance: usize,
) -> Result<Slot, CoreError> {
    let role = config.roles.get(instance).copied().unwrap_or_default();
    let cache_blocks = f64::from(config.profiles[instance].cache_blocks);
    let blocks = (cache_blocks * config.reported_cache_ratio).round() as u32;
    let id = router.add_instance(&format!("engine-{instance}"), role, Some(blocks))?;
    router.set_step_time(id, config.step_times.get(instance).copied())?;
    Ok(id)
}
