//! Virtual token counters: fairness between tenants (Sheng et al., OSDI 2024), as priorities that a
//! router can pass to engines.
//!
//! A tenant's counter is its service so far: prompt tokens plus twice the answer tokens, divided by
//! the tenant's weight. The paper's scheduler takes the next request of the tenant with the least
//! counter. An engine, however, accepts one integer at submission and no later update. So a
//! request's priority is its tenant's counter after all earlier requests of the tenant have been
//! served: a *start tag*, as in start-time fair queueing. The prompt is charged at once, the answer
//! when it has ended. A returning tenant is lifted to the least start tag in flight: unused service
//! is not saved up.
use hashbrown::HashMap;
use std::collections::BTreeMap;

/// Cost of an answer token in prompt tokens (the paper: w_p = 1, w_q = 2).
pub const OUTPUT_COST: f64 = 2.0;
/// Maximum number of tenants kept. Tenants with nothing in flight are dropped first.
pub const MAX_TENANTS: usize = 65_536;
/// Tags are in thousandths of a virtual token, so that sums are exact.
const UNIT: f64 = 1e3;

#[derive(Clone, Copy, Debug, Default)]
struct Tenant {
    /// Start tag of the next request, if it arrives while other requests of the tenant are in
    /// flight.
    next: u64,
    in_flight: u32,
}

/// Place of a request in its tenant's order. The caller keeps it until the request ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Start tag in thousandths of a virtual token: lower goes first.
    pub start: u64,
    tenant: u64,
    /// Cost of the prompt, and of one answer token, in thousandths.
    prompt_cost: u64,
    output_cost: u64,
}

/// Counters of all tenants, by a hash of their names.
#[derive(Clone, Debug, Default)]
pub struct VirtualTokens {
    tenants: HashMap<u64, Tenant>,
    /// Requests in flight by start tag.
    starts: BTreeMap<u64, u32>,
    /// Last known minimum of `starts`.
    now: u64,
}

impl VirtualTokens {
    /// Starts a request of a tenant. `weight`: the tenant's share of the service, 0.001 to 1e6; 1
    /// for tenants without a configured weight.
    pub fn begin(&mut self, tenant: u64, prompt_tokens: u32, weight: f64) -> Place {
        if let Some((least, _)) = self.starts.first_key_value() {
            self.now = self.now.max(*least);
        }
        if self.tenants.len() >= MAX_TENANTS && !self.tenants.contains_key(&tenant) {
            self.tenants.retain(|_, tenant| tenant.in_flight > 0); // drops the debt of idle tenants
        }
        let at = self.tenants.entry(tenant).or_default();
        let start = at.next.max(self.now);
        let prompt_cost = cost(f64::from(prompt_tokens.max(1)), weight);
        at.next = start.saturating_add(prompt_cost);
        at.in_flight += 1;
        *self.starts.entry(start).or_default() += 1;
        Place { start, tenant, prompt_cost, output_cost: cost(OUTPUT_COST, weight) }
    }

    /// Returns the start tag that a request of a tenant would get now.
    pub fn start(&self, tenant: u64) -> u64 {
        let least = self.starts.first_key_value().map_or(0, |(least, _)| *least);
        self.tenants.get(&tenant).map_or(0, |tenant| tenant.next).max(self.now).max(least)
    }

    /// Charges `output_tokens` answer tokens of a request.
    pub fn charge(&mut self, place: Place, output_tokens: u32) {
        if let Some(at) = self.tenants.get_mut(&place.tenant) {
            at.next = at.next.saturating_add(u64::from(output_tokens).saturating_mul(place.output_cost));
        }
    }

    /// Gives back the prompt of a request that no engine got. End the request after it.
    pub fn take_back(&mut self, place: Place) {
        if let Some(at) = self.tenants.get_mut(&place.tenant) {
            at.next = at.next.saturating_sub(place.prompt_cost);
        }
    }

    /// Ends a request, whatever its outcome.
    pub fn end(&mut self, place: Place) {
        if let Some(at) = self.tenants.get_mut(&place.tenant) {
            at.in_flight = at.in_flight.saturating_sub(1);
        }
        if let Some(count) = self.starts.get_mut(&place.start) {
            *count -= 1;
            if *count == 0 {
                self.starts.remove(&place.start);
                self.now =
                    self.now.max(self.starts.first_key_value().map_or(place.start, |(least, _)| *least));
            }
        }
    }

    /// Returns the number of requests in flight, of all tenants.
    pub fn in_flight(&self) -> u64 {
        self.starts.values().map(|count| u64::from(*count)).sum()
    }
}

fn cost(tokens: f64, weight: f64) -> u64 {
    (tokens / weight * UNIT).round() as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn start(counters: &mut VirtualTokens, tenant: u64, prompt_tokens: u32) -> u64 {
        counters.begin(tenant, prompt_tokens, 1.0).start / 1000
    }

    #[test]
    fn the_tenant_that_was_served_least_goes_first() {
        let mut counters = VirtualTokens::default();
        let bulk: Vec<Place> = (0..5).map(|_| counters.begin(1, 1000, 1.0)).collect();
        assert_eq!(
            bulk.iter().map(|place| place.start / 1000).collect::<Vec<_>>(),
            [0, 1000, 2000, 3000, 4000]
        );
        // Another tenant's requests go before all but the first request of the bulk tenant.
        assert_eq!([start(&mut counters, 2, 100), start(&mut counters, 2, 100)], [0, 100]);
        assert_eq!(start(&mut counters, 1, 1000), 5000);
        // Two bulk requests are served, with 300 answer tokens each, which cost 600: the next bulk
        // request goes after them.
        counters.charge(bulk[0], 300);
        counters.end(bulk[0]);
        counters.charge(bulk[1], 300);
        counters.end(bulk[1]);
        assert_eq!(start(&mut counters, 1, 1000), 6000 + 1200);
    }

    #[test]
    fn weights_divide() {
        let mut counters = VirtualTokens::default();
        let place = counters.begin(1, 100, 4.0);
        counters.charge(place, 50);
        counters.end(place);
        assert_eq!(counters.tenants[&1].next, (25 + 25) * 1000);
    }

    #[test]
    fn nothing_is_saved_up_and_nothing_grows_without_bound() {
        let mut counters = VirtualTokens::default();
        let first = counters.begin(1, 10, 1.0);
        counters.end(first);
        // Tenant 2 is served for a long time, two requests at once. Tenant 1 was idle and does not
        // go ahead of the running requests.
        let mut before = counters.begin(2, 1000, 1.0);
        for _ in 0..100 {
            let next = counters.begin(2, 1000, 1.0);
            counters.end(before);
            before = next;
        }
        assert_eq!(counters.begin(1, 10, 1.0).start, before.start);
        counters.end(before);
        assert_eq!(counters.in_flight(), 1);
        for tenant in 0..200_000 {
            let place = counters.begin(tenant, 1, 1.0);
            counters.end(place);
        }
        assert!(counters.tenants.len() <= MAX_TENANTS + 1);
    }
}
