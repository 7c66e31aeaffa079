//! Waiting requests: by tenant, and within a tenant by deadline.
use crate::ids::{ArrivalId, Seconds};
use hashbrown::HashMap;
use std::collections::BTreeMap;

/// Place of a request among the waiting requests of its tenant: deadline, then arrival.
pub(super) type Place = (u64, u64);

/// The waiting requests of a tenant, and the sum of their work.
#[derive(Clone, Debug, Default)]
pub(super) struct Line {
    places: BTreeMap<Place, ArrivalId>,
    work: f64,
    weight: f64,
}

impl Line {
    /// Yields the waiting requests in order.
    pub fn iter(&self) -> impl Iterator<Item = ArrivalId> + '_ {
        self.places.values().copied()
    }

    /// Returns the waiting request with the latest deadline.
    pub fn last(&self) -> Option<ArrivalId> {
        self.places.last_key_value().map(|(_, id)| *id)
    }

    /// Returns the tenant's weight.
    pub fn weight(&self) -> f64 {
        self.weight
    }

    /// Returns the number of waiting requests.
    pub fn len(&self) -> usize {
        self.places.len()
    }
}

/// All waiting requests.
#[derive(Clone, Debug, Default)]
pub(super) struct Queue {
    lines: HashMap<u64, Line>,
    len: usize,
    serial: u64,
}

impl Queue {
    /// Adds a request; returns its place.
    pub fn push(
        &mut self,
        (tenant, weight): (u64, f64),
        deadline: Option<Seconds>,
        work: f64,
        id: ArrivalId,
    ) -> Place {
        self.serial += 1;
        // Times are not negative, so their bits sort like the numbers.
        let place = (deadline.unwrap_or(f64::INFINITY).max(0.0).to_bits(), self.serial);
        let line = self.lines.entry(tenant).or_default();
        line.places.insert(place, id);
        line.work += work;
        line.weight = weight;
        self.len += 1;
        place
    }

    /// Removes a request.
    pub fn remove(&mut self, tenant: u64, place: Place, work: f64) {
        let Some(line) = self.lines.get_mut(&tenant) else { return };
        if line.places.remove(&place).is_some() {
            self.len -= 1;
            line.work -= work;
        }
        if line.places.is_empty() {
            self.lines.remove(&tenant);
        }
    }

    /// Returns the number of waiting requests.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Yields the tenants with waiting requests.
    pub fn lines(&self) -> impl Iterator<Item = (u64, &Line)> {
        self.lines.iter().map(|(tenant, line)| (*tenant, line))
    }

    /// Returns the waiting requests of a tenant.
    pub fn line(&self, tenant: u64) -> Option<&Line> {
        self.lines.get(&tenant)
    }

    /// Returns the last request of the tenant with the most waiting requests, if `tenant` has
    /// fewer.
    pub fn last_of_longest(&self, tenant: u64) -> Option<ArrivalId> {
        let own = self.line(tenant).map_or(0, Line::len);
        let longest = self.lines().max_by_key(|(tenant, line)| (line.len(), *tenant))?.1;
        if longest.len() <= own { None } else { longest.last() }
    }

    /// Returns the work that is taken up until a tenant's requests are. Tenants share by weight, so
    /// of every other tenant that `may_run` at most the work of its share goes before.
    pub fn work_before(&self, tenant: u64, may_run: impl Fn(u64) -> bool) -> f64 {
        let Some(own) = self.line(tenant) else { return 0.0 };
        let per_weight = own.work / own.weight;
        let lines = self.lines().filter(|(other, _)| *other == tenant || may_run(*other));
        lines.map(|(_, line)| line.work.min(per_weight * line.weight)).sum()
    }
}
