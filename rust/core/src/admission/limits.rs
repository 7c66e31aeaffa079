//! Limits of a tenant: requests on engines, and rate.
use super::settings::TenantLimits;
use crate::ids::Seconds;
use hashbrown::HashMap;

/// Tenants kept; those without requests are dropped first.
const MOST_TENANTS: usize = 65_536;

/// Use of a tenant's limits.
#[derive(Clone, Copy, Debug)]
struct Usage {
    /// Requests on engines.
    running: u32,
    /// The tenant's weight, as of its last request.
    weight: f64,
    /// Requests that may come at once, as of `at`.
    tokens: f64,
    at: Seconds,
}

/// The use of all tenants' limits, by the hash of their names.
#[derive(Clone, Debug, Default)]
pub(super) struct Limits {
    tenants: HashMap<u64, Usage>,
    /// Requests on engines, and the weights of their tenants.
    running: u32,
    weights: f64,
}

impl Limits {
    /// Counts an arriving request against its tenant's rate. Returns the seconds until a request
    /// may come if the rate is used up.
    pub fn arrive(&mut self, tenant: u64, limits: &TenantLimits, now: Seconds) -> Option<Seconds> {
        let rate = limits.most_requests_per_second?;
        let burst = limits.burst.unwrap_or(rate).max(1.0);
        let usage = self.usage(tenant, burst, now);
        usage.tokens = (usage.tokens + (now - usage.at).max(0.0) * rate).min(burst);
        usage.at = now;
        if usage.tokens >= 1.0 {
            usage.tokens -= 1.0;
            return None;
        }
        Some((1.0 - usage.tokens) / rate)
    }

    /// Counts a request that goes to an engine.
    pub fn begin(&mut self, tenant: u64, weight: f64, now: Seconds) {
        let usage = self.usage(tenant, f64::INFINITY, now);
        let old = if usage.running > 0 { usage.weight } else { 0.0 };
        usage.running += 1;
        usage.weight = weight;
        self.weights += weight - old;
        self.running += 1;
    }

    /// Counts the end of such a request.
    pub fn end(&mut self, tenant: u64) {
        let Some(usage) = self.tenants.get_mut(&tenant).filter(|usage| usage.running > 0) else { return };
        usage.running -= 1;
        self.running -= 1;
        if usage.running == 0 {
            self.weights = if self.running == 0 { 0.0 } else { self.weights - usage.weight };
        }
    }

    /// Returns the tenant's requests on engines.
    pub fn running(&self, tenant: u64) -> u32 {
        self.tenants.get(&tenant).map_or(0, |usage| usage.running)
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

    fn usage(&mut self, tenant: u64, tokens: f64, now: Seconds) -> &mut Usage {
        if self.tenants.len() >= MOST_TENANTS && !self.tenants.contains_key(&tenant) {
            self.tenants.retain(|_, usage| usage.running > 0);
        }
        self.tenants.entry(tenant).or_insert(Usage { running: 0, weight: 1.0, tokens, at: now })
    }
}
