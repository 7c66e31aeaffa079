//! Limits of a tenant: requests on engines.
use crate::board::Board;
use hashbrown::HashMap;
use std::sync::Arc;

/// Tenants from which on those without requests on engines are dropped.
const MAX_TENANTS: usize = 65_536;

/// Use of a tenant's limits.
#[derive(Clone, Copy, Debug)]
struct Usage {
    /// Requests on engines.
    running: u32,
    /// Whether the tenant had a limit of such requests.
    limited: bool,
    /// The tenant's weight, as of its last request.
    weight: f64,
}

/// The use of all tenants' limits, by the hash of their names.
#[derive(Clone, Debug, Default)]
pub(super) struct Limits {
    tenants: HashMap<u64, Usage>,
    /// Number of tenants at which the next ones are dropped.
    sweep_at: usize,
    /// Requests on engines, and the weights of their tenants.
    running: u32,
    weights: f64,
    /// Use by the other workers of this server, if there are any.
    shared: Option<Shared>,
}

/// Use of the limits by all workers.
#[derive(Clone, Debug)]
pub(super) struct Shared {
    pub board: Arc<Board>,
    /// Part of the tenants' keys: limits hold for each model.
    pub model: u64,
}

impl Limits {
    /// Creates unused limits.
    pub fn new(shared: Option<Shared>) -> Limits {
        Limits { shared, ..Limits::default() }
    }

    /// Counts a request that goes to an engine. `limited`: whether the tenant has a limit of such
    /// requests.
    pub fn begin(&mut self, tenant: u64, weight: f64, limited: bool) {
        let usage = self.usage(tenant);
        let old = if usage.running > 0 { usage.weight } else { 0.0 };
        usage.running += 1;
        usage.weight = weight;
        usage.limited |= limited;
        let Usage { running, limited, .. } = *usage;
        self.weights += weight - old;
        if limited {
            self.publish(tenant, running);
        }
        self.running += 1;
    }

    /// Counts the end of such a request.
    pub fn end(&mut self, tenant: u64) {
        let Some(usage) = self.tenants.get_mut(&tenant).filter(|usage| usage.running > 0) else { return };
        usage.running -= 1;
        self.running -= 1;
        let Usage { running, weight, limited, .. } = *usage;
        if running == 0 {
            self.weights = if self.running == 0 { 0.0 } else { self.weights - weight };
        }
        if limited {
            self.publish(tenant, running);
        }
    }

    /// Publishes that these limits end.
    pub fn end_all(&self) {
        for (tenant, _) in self.tenants.iter().filter(|(_, usage)| usage.limited) {
            self.publish(*tenant, 0);
        }
    }

    fn publish(&self, tenant: u64, running: u32) {
        if let Some(Shared { board, model }) = &self.shared {
            board.set_running(tenant ^ model, running);
        }
    }

    /// Returns the tenant's requests on engines.
    pub fn running(&self, tenant: u64) -> u32 {
        self.tenants.get(&tenant).map_or(0, |usage| usage.running)
    }

    /// Returns the requests on engines of a tenant with a limit, over all workers.
    pub fn running_everywhere(&self, tenant: u64) -> u32 {
        let shared = self.shared.as_ref();
        let elsewhere = shared.and_then(|all| all.board.running_elsewhere(tenant ^ all.model));
        self.running(tenant) + elsewhere.unwrap_or(0)
    }

    /// Returns whether a tenant may take the room that is kept for others. It may if there are no
    /// others, or if it has fewer requests on engines than its share of all by weight.
    pub fn may_take_kept(&self, tenant: u64, weight: f64) -> bool {
        if self.tenants.len() <= 1 {
            return true;
        }
        let own = self.running(tenant);
        let others = if own > 0 { self.weights } else { self.weights + weight };
        f64::from(own) * others < f64::from(self.running) * weight
    }

    fn usage(&mut self, tenant: u64) -> &mut Usage {
        if self.tenants.len() >= self.sweep_at.max(MAX_TENANTS) && !self.tenants.contains_key(&tenant) {
            self.tenants.retain(|_, usage| usage.running > 0);
            // So that a table of tenants that stay is not walked through for each new one.
            self.sweep_at = 2 * self.tenants.len();
        }
        self.tenants.entry(tenant).or_insert(Usage { running: 0, limited: false, weight: 1.0 })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Defect 23 of the core review: clients may choose names of tenants.
    #[test]
    fn a_flood_of_tenants_is_bounded_and_forgets_no_running_request() {
        let mut limits = Limits::default();
        limits.begin(0, 1.0, false);
        for tenant in 1..4 * MAX_TENANTS as u64 {
            limits.begin(tenant, 1.0, false);
            limits.end(tenant);
            assert!(limits.tenants.len() <= MAX_TENANTS);
        }
        assert_eq!(limits.running(0), 1);
    }
}
