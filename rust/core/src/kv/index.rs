//! The KV index. (Simple form, to be replaced by the fast one.)
use crate::ids::InstanceId;
use hashbrown::{HashMap, HashSet};

/// Who holds how much of a prefix.
#[derive(Debug, Default)]
pub struct KvIndex {
    sets: HashMap<u32, HashSet<u64>>,
}

#[allow(missing_docs)]
impl KvIndex {
    pub fn new(_byte_bound: usize) -> KvIndex {
        KvIndex::default()
    }
    pub fn add_instance(&mut self, instance: InstanceId, _capacity_blocks: Option<u32>) {
        self.sets.insert(instance.0, HashSet::new());
    }
    pub fn remove_instance(&mut self, instance: InstanceId) {
        self.sets.remove(&instance.0);
    }
    pub fn match_prefix(&self, chain: &[u64], hit_blocks: &mut [u32]) {
        for (slot, hits) in hit_blocks.iter_mut().enumerate() {
            *hits = self
                .sets
                .get(&(slot as u32))
                .map_or(0, |s| chain.iter().take_while(|h| s.contains(*h)).count() as u32);
        }
    }
    pub fn record(&mut self, instance: InstanceId, chain: &[u64]) {
        self.sets.entry(instance.0).or_default().extend(chain);
    }
    pub fn touch(&mut self, _instance: InstanceId, _chain: &[u64], _depth: usize) {}
    pub fn stored(&mut self, instance: InstanceId, _parent: Option<u64>, chain: &[u64]) {
        self.record(instance, chain);
    }
    pub fn removed(&mut self, instance: InstanceId, hash: u64) -> bool {
        self.sets.entry(instance.0).or_default().remove(&hash)
    }
    pub fn cleared(&mut self, instance: InstanceId) {
        self.sets.entry(instance.0).or_default().clear();
    }
    pub fn holders(&self, hash: u64, out: &mut Vec<InstanceId>) {
        out.extend(self.sets.iter().filter(|(_, s)| s.contains(&hash)).map(|(i, _)| InstanceId(*i)));
    }
    pub fn blocks(&self, instance: InstanceId) -> u32 {
        self.sets.get(&instance.0).map_or(0, |s| s.len() as u32)
    }
    pub fn bytes(&self) -> usize {
        0
    }
    pub fn evicted_blocks(&self) -> u64 {
        0
    }
}
