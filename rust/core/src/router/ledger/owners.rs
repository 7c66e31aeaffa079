//! Requests on each instance by LoRA adapter and by tenant.
use super::counts::Entry;
use hashbrown::HashMap;

/// Number of requests by the hash of a name. Requests without a name are not counted.
type Counts = HashMap<u64, u32>;

/// Requests on one instance, by LoRA adapter and by tenant.
#[derive(Clone, Debug, Default)]
pub struct Owners {
    lora: Counts,
    tenant: Counts,
}

impl Owners {
    /// Adds a placed request.
    pub fn add(&mut self, entry: &Entry) {
        for (counts, name) in [(&mut self.lora, entry.lora), (&mut self.tenant, entry.tenant)] {
            if name != 0 {
                *counts.entry(name).or_default() += 1;
            }
        }
    }

    /// Removes a request.
    pub fn remove(&mut self, entry: &Entry) {
        for (counts, name) in [(&mut self.lora, entry.lora), (&mut self.tenant, entry.tenant)] {
            if name == 0 {
                continue;
            }
            if let Some(count) = counts.get_mut(&name) {
                *count -= 1;
                if *count == 0 {
                    counts.remove(&name);
                }
            }
        }
    }

    /// Returns the number of requests with the LoRA adapter of this hash.
    pub fn lora(&self, name: u64) -> f64 {
        self.lora.get(&name).map_or(0.0, |count| f64::from(*count))
    }

    /// Returns the number of requests of the tenant of this hash.
    pub fn tenant(&self, name: u64) -> f64 {
        self.tenant.get(&name).map_or(0.0, |count| f64::from(*count))
    }
}
