//! Requests on each instance by LoRA adapter and by tenant.
use super::counts::Entry;
use hashbrown::HashMap;

/// Number of requests by the hash of a name. Requests without a name are not counted.
type Counts = HashMap<u64, u32>;

/// Adapters remembered per instance if the engine does not report its limit.
const MAX_ADAPTERS: usize = 256;

/// Requests on one instance, by LoRA adapter and by tenant, and the adapters that it has loaded.
#[derive(Clone, Debug, Default)]
pub struct Owners {
    lora: Counts,
    tenant: Counts,
    /// Adapters of placed requests, the latest last. Engines evict the least recently used one.
    loaded: Vec<u64>,
    /// Adapters that the engine keeps loaded, if it reports it (vLLM's `max_loras`).
    max_loras: Option<u32>,
}

impl Owners {
    /// Adds a placed request.
    pub fn add(&mut self, entry: &Entry) {
        for (counts, name) in [(&mut self.lora, entry.lora), (&mut self.tenant, entry.tenant)] {
            if name != 0 {
                *counts.entry(name).or_default() += 1;
            }
        }
        if entry.lora != 0 && self.loaded.last() != Some(&entry.lora) {
            self.loaded.retain(|name| *name != entry.lora);
            self.loaded.push(entry.lora);
            self.trim();
        }
    }

    /// Sets the number of adapters that the engine keeps loaded; `None`: unknown.
    pub fn set_max_loras(&mut self, max_loras: Option<u32>) {
        self.max_loras = max_loras;
        self.trim();
    }

    /// Forgets the loaded adapters: the engine has restarted.
    pub fn forget_loaded(&mut self) {
        self.loaded.clear();
    }

    /// Returns 1 if the instance has loaded the adapter of this hash, as far as this router placed
    /// it; else 0. No adapter (0) needs no loading.
    pub fn lora_loaded(&self, name: u64) -> f64 {
        f64::from(u8::from(name == 0 || self.loaded.contains(&name)))
    }

    fn trim(&mut self) {
        let most = self.max_loras.map_or(MAX_ADAPTERS, |max| (max as usize).min(MAX_ADAPTERS));
        let over = self.loaded.len().saturating_sub(most);
        self.loaded.drain(..over);
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
