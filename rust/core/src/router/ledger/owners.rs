//! Requests on each instance by LoRA adapter and by tenant.
use super::counts::Entry;
use hashbrown::HashMap;

/// The requests of an instance by the hash of a name. Requests without one are not counted.
type Counts = HashMap<u64, u32>;

/// Requests on one instance, by LoRA adapter and by tenant.
#[derive(Clone, Debug, Default)]
pub struct Owners {
    lora: Counts,
    tenant: Counts,
}

impl Owners {
    /// A request was placed.
    pub fn add(&mut self, entry: &Entry) {
        for (counts, name) in [(&mut self.lora, entry.lora), (&mut self.tenant, entry.tenant)] {
            if name != 0 {
                *counts.entry(name).or_default() += 1;
            }
        }
    }

    /// It is gone.
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

    /// Requests with the LoRA adapter of this hash.
    pub fn lora(&self, name: u64) -> f64 {
        self.lora.get(&name).map_or(0.0, |count| f64::from(*count))
    }

    /// Requests of the tenant of this hash.
    pub fn tenant(&self, name: u64) -> f64 {
        self.tenant.get(&name).map_or(0.0, |count| f64::from(*count))
    }
}
