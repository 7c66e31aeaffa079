//! Limits of a tenant: requests on engines.
use crate::board::Board;
use crate::ids::Seconds;
use hashbrown::HashMap;
use std::sync::Arc;

/// Tenants from which on those without requests on engines are dropped.
const MAX_TENANTS: usize = 65_536;
/// Seconds for which room is kept for a tenant after its last request: longer than nearly all gaps
/// between the requests of a client in use.
const KEPT_SECONDS: Seconds = 300.0;
/// Weight of the latest request in the mean time on engines.
const LATEST: f64 = 0.1;

/// Use of a tenant's limits.
#[derive(Clone, Copy, Debug)]
struct Usage {
    /// Requests on engines.
    running: u32,
    /// Whether the tenant had a limit of such requests.
    limited: bool,
    /// The tenant's weight, as of its last request.
    weight: f64,
    /// Mean time of its requests on engines.
    seconds: Option<Seconds>,
    /// Time since which it has requests on engines.
    since: Seconds,
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
    /// Number of tenants with requests on engines.
    running_tenants: usize,
    /// Mean time of the requests of all tenants on engines.
    seconds: Option<Seconds>,
    /// The two tenants whose requests ended last, with the times of these ends; the last one first.
    last_ends: [Option<(u64, Seconds)>; 2],
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
    pub fn begin(&mut self, tenant: u64, weight: f64, limited: bool, now: Seconds) {
        let usage = self.usage(tenant);
        let old = if usage.running > 0 { usage.weight } else { 0.0 };
        if usage.running == 0 {
            usage.since = now;
        }
        usage.running += 1;
        usage.weight = weight;
        usage.limited |= limited;
        let Usage { running, limited, .. } = *usage;
        self.running_tenants += usize::from(running == 1);
        self.weights += weight - old;
        if limited {
            self.publish(tenant, running);
        }
        self.running += 1;
    }

    /// Counts the end of such a request.
    pub fn end(&mut self, tenant: u64, now: Seconds) {
        let Some(usage) = self.tenants.get_mut(&tenant).filter(|usage| usage.running > 0) else { return };
        usage.running -= 1;
        self.running -= 1;
        let Usage { running, weight, limited, .. } = *usage;
        if running == 0 {
            self.weights = if self.running == 0 { 0.0 } else { self.weights - weight };
            self.running_tenants -= 1;
        }
        if self.last_ends[0].is_some_and(|(last, _)| last != tenant) {
            self.last_ends[1] = self.last_ends[0];
        }
        self.last_ends[0] = Some((tenant, now));
        if limited {
            self.publish(tenant, running);
        }
    }

    /// Publishes the requests of tenants that have a limit of such requests from now on.
    pub fn limit(&mut self, is_limited: impl Fn(u64) -> bool) {
        for (tenant, usage) in &mut self.tenants {
            usage.limited |= is_limited(*tenant);
        }
        for (tenant, usage) in self.tenants.iter().filter(|(_, usage)| usage.limited) {
            self.publish(*tenant, usage.running);
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
    /// others, or if it has fewer requests on engines than its share of all by weight. A tenant
    /// without requests counts for [`KEPT_SECONDS`]: the room is kept for its next request.
    pub fn may_take_kept(&self, tenant: u64, weight: f64, now: Seconds) -> bool {
        let own = self.running(tenant);
        let others_run = self.running_tenants > usize::from(own > 0);
        let mut others_ended = self.last_ends.iter().flatten().filter(|(last, _)| *last != tenant);
        if !others_run && others_ended.all(|(_, ended)| now - ended > KEPT_SECONDS) {
            return true;
        }
        let others = if own > 0 { self.weights } else { self.weights + weight };
        f64::from(own) * others < f64::from(self.running) * weight
    }

    /// Learns how long a request of a tenant was on engines.
    pub fn ran(&mut self, tenant: u64, seconds: Seconds) {
        let own = self.tenants.get_mut(&tenant).map(|usage| &mut usage.seconds);
        for mean in [Some(&mut self.seconds), own].into_iter().flatten() {
            let mean = mean.get_or_insert(seconds);
            *mean += (seconds - *mean) * LATEST;
        }
    }

    /// Returns the predicted seconds until `waiting` requests of a tenant at its limit run: each
    /// waits for the end of one on an engine, of any worker. Until a request of the tenant has
    /// ended here, its requests take as long as those of all tenants. The minimum is the time that
    /// the first request has taken so far.
    pub fn wait_seconds(&self, tenant: u64, waiting: usize, now: Seconds) -> Seconds {
        let usage = self.tenants.get(&tenant);
        let seconds = usage.and_then(|usage| usage.seconds).unwrap_or_else(|| {
            let first = usage.filter(|usage| usage.running > 0).map_or(0.0, |usage| now - usage.since);
            self.seconds.unwrap_or(0.0).max(first)
        });
        // On average, half of the time until the next end has passed.
        (waiting as f64 - 0.5).max(0.0) * seconds / f64::from(self.running_everywhere(tenant).max(1))
    }

    fn usage(&mut self, tenant: u64) -> &mut Usage {
        if self.tenants.len() >= self.sweep_at.max(MAX_TENANTS) && !self.tenants.contains_key(&tenant) {
            self.tenants.retain(|_, usage| usage.running > 0);
            // So that a table of tenants that stay is not walked through for each new one.
            self.sweep_at = 2 * self.tenants.len();
        }
        self.tenants.entry(tenant).or_insert(Usage {
            running: 0,
            limited: false,
            weight: 1.0,
            seconds: None,
            since: 0.0,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::board::tests::{board, memory};

    /// Defect 23 of the core review: clients may choose names of tenants.
    #[test]
    fn a_flood_of_tenants_is_bounded_and_forgets_no_running_request() {
        let mut limits = Limits::default();
        limits.begin(0, 1.0, false, 0.0);
        for tenant in 1..4 * MAX_TENANTS as u64 {
            limits.begin(tenant, 1.0, false, 0.0);
            limits.end(tenant, 0.0);
            assert!(limits.tenants.len() <= MAX_TENANTS);
        }
        assert_eq!(limits.running(0), 1);
    }

    /// The limit is over all workers, so an end on any of them lets the next request run.
    #[test]
    fn requests_of_all_workers_end_the_wait_for_a_limit() {
        let memory = memory();
        let [mut own, mut other] = [0, 1]
            .map(|writer| Limits::new(Some(Shared { board: Arc::new(board(&memory, writer)), model: 7 })));
        own.begin(1, 1.0, true, 0.0);
        own.end(1, 60.0);
        own.ran(1, 60.0);
        (0..4).for_each(|_| other.begin(1, 1.0, true, 0.0));
        assert_eq!((own.running(1), own.wait_seconds(1, 1, 60.0)), (0, 7.5));
        own.begin(1, 1.0, true, 0.0);
        assert_eq!(own.wait_seconds(1, 1, 60.0), 6.0);
    }

    #[test]
    fn the_wait_for_a_limit_is_known_before_the_tenants_first_request_has_ended() {
        let mut limits = Limits::default();
        limits.begin(1, 1.0, true, 100.0);
        limits.begin(1, 1.0, true, 130.0);
        assert_eq!(limits.wait_seconds(1, 1, 140.0), 10.0, "its first request has run for 40 s");
        limits.begin(2, 1.0, false, 0.0);
        limits.end(2, 140.0);
        limits.ran(2, 140.0);
        assert_eq!(limits.wait_seconds(1, 1, 140.0), 35.0);
        limits.end(1, 150.0);
        limits.ran(1, 50.0);
        assert_eq!(limits.wait_seconds(1, 1, 150.0), 25.0);
    }

    #[test]
    fn room_is_kept_for_tenants_that_had_requests_in_the_last_minutes() {
        let mut limits = Limits::default();
        limits.begin(1, 1.0, false, 0.0);
        assert!(limits.may_take_kept(1, 1.0, 0.0), "it is alone");
        limits.begin(2, 1.0, false, 0.0);
        limits.begin(3, 1.0, false, 0.0);
        assert!(!limits.may_take_kept(1, 1.0, 1e6), "others run");
        limits.end(2, 0.0);
        limits.end(3, 100.0);
        assert!(!limits.may_take_kept(1, 1.0, 100.0 + KEPT_SECONDS), "the last end counts");
        assert!(limits.may_take_kept(1, 1.0, 101.0 + KEPT_SECONDS));
        // Its own ends push out no end of the others.
        for _ in 0..3 {
            limits.begin(2, 1.0, false, 0.0);
            limits.end(2, 500.0);
            limits.begin(1, 1.0, false, 0.0);
            limits.end(1, 500.0);
        }
        assert!(!limits.may_take_kept(1, 1.0, 501.0));
        assert!(limits.may_take_kept(1, 1.0, 501.0 + KEPT_SECONDS));
    }
}
