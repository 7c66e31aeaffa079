//! Limits of a tenant: requests on engines, and rate.
use super::settings::TenantLimits;
use crate::board::Board;
use crate::ids::Seconds;
use hashbrown::HashMap;
use std::sync::Arc;

/// Tenants from which on those that lose nothing are dropped: without requests on engines, and with
/// a full rate. The others are at most the running requests and the tenants with a configured rate.
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
    /// Requests that may come at once, as of `at`.
    tokens: f64,
    at: Seconds,
    /// Requests per second, and at most at once; infinite: no rate.
    rate: f64,
    burst: f64,
}

impl Usage {
    /// Returns the requests that may come at once at `now`.
    fn tokens_at(&self, now: Seconds) -> f64 {
        if self.tokens == f64::INFINITY {
            return self.burst;
        } // no rate until now
        (self.tokens + (now - self.at).max(0.0) * self.rate).min(self.burst)
    }

    /// Returns whether a new entry would say the same.
    fn is_full(&self, now: Seconds) -> bool {
        self.running == 0 && self.tokens_at(now) >= self.burst
    }
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

    /// Counts an arriving request against its tenant's rate. Returns the seconds until a request
    /// may come if the rate is used up.
    pub fn arrive(&mut self, tenant: u64, limits: &TenantLimits, now: Seconds) -> Option<Seconds> {
        let rate = limits.max_requests_per_second?;
        let burst = limits.burst.unwrap_or(rate).max(1.0);
        if let Some(Shared { board, model }) = &self.shared
            && let Some(seconds) = board.use_rate(tenant ^ model, rate, burst, now)
        {
            return (seconds > 0.0).then_some(seconds);
        }
        let usage = self.usage(tenant, now);
        (usage.rate, usage.burst) = (rate, burst);
        (usage.tokens, usage.at) = (usage.tokens_at(now), now);
        if usage.tokens >= 1.0 {
            usage.tokens -= 1.0;
            return None;
        }
        Some((1.0 - usage.tokens) / rate)
    }

    /// Counts a request that goes to an engine. `limited`: whether the tenant has a limit of such
    /// requests.
    pub fn begin(&mut self, tenant: u64, weight: f64, limited: bool, now: Seconds) {
        let usage = self.usage(tenant, now);
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

    fn usage(&mut self, tenant: u64, now: Seconds) -> &mut Usage {
        if self.tenants.len() >= self.sweep_at.max(MAX_TENANTS) && !self.tenants.contains_key(&tenant) {
            self.tenants.retain(|_, usage| !usage.is_full(now));
            // So that a table of tenants that stay is not walked through for each new one.
            self.sweep_at = 2 * self.tenants.len();
        }
        let none = f64::INFINITY;
        let new =
            Usage { running: 0, limited: false, weight: 1.0, tokens: none, at: now, rate: none, burst: none };
        self.tenants.entry(tenant).or_insert(new)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Defect 23 of the core review: names of tenants, which clients may choose, do not give a
    /// tenant its spent rate back.
    #[test]
    fn a_flood_of_tenants_resets_no_rate_and_is_bounded() {
        let rate =
            TenantLimits { max_requests_per_second: Some(0.01), burst: Some(2.0), ..Default::default() };
        let mut limits = Limits::default();
        assert_eq!((limits.arrive(0, &rate, 0.0), limits.arrive(0, &rate, 0.0)), (None, None));
        for tenant in 1..4 * MAX_TENANTS as u64 {
            limits.begin(tenant, 1.0, false, 1.0);
            limits.end(tenant);
            assert!(limits.tenants.len() <= MAX_TENANTS);
        }
        assert!(limits.arrive(0, &rate, 1.0).is_some());
        // With its rate full again, its entry goes.
        for tenant in 1..2 * MAX_TENANTS as u64 {
            limits.begin(tenant, 1.0, false, 1000.0);
            limits.end(tenant);
        }
        assert!(!limits.tenants.contains_key(&0));
        assert_eq!((limits.arrive(0, &rate, 1000.0), limits.arrive(0, &rate, 1000.0)), (None, None));
        assert!(limits.arrive(0, &rate, 1000.0).is_some());
    }
}
