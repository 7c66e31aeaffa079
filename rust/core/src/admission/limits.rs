//! Limits of a tenant: requests on engines, and rate.
use super::settings::TenantLimits;
use crate::ids::Seconds;
use hashbrown::HashMap;

/// Tenants kept; those without requests are dropped first.
const MOST_TENANTS: usize = 65_536;

/// What counts against the limits of a tenant.
#[derive(Clone, Copy, Debug)]
struct Usage {
    /// Requests on engines.
    running: u32,
    /// Requests that may come at once, as of `at`.
    tokens: f64,
    at: Seconds,
}

/// The use of all tenants' limits, by the hash of their names.
#[derive(Clone, Debug, Default)]
pub(super) struct Limits {
    tenants: HashMap<u64, Usage>,
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
    pub fn begin(&mut self, tenant: u64, now: Seconds) {
        self.usage(tenant, f64::INFINITY, now).running += 1;
    }

    /// Counts the end of such a request.
    pub fn end(&mut self, tenant: u64) {
        if let Some(usage) = self.tenants.get_mut(&tenant) {
            usage.running = usage.running.saturating_sub(1);
        }
    }

    /// Returns the tenant's requests on engines.
    pub fn running(&self, tenant: u64) -> u32 {
        self.tenants.get(&tenant).map_or(0, |usage| usage.running)
    }

    fn usage(&mut self, tenant: u64, tokens: f64, now: Seconds) -> &mut Usage {
        if self.tenants.len() >= MOST_TENANTS && !self.tenants.contains_key(&tenant) {
            self.tenants.retain(|_, usage| usage.running > 0);
        }
        self.tenants.entry(tenant).or_insert(Usage { running: 0, tokens, at: now })
    }
}
