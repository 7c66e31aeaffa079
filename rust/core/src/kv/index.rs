//! The KV index. See the module's contract in `docs/architecture.md`.
use crate::ids::InstanceId;

/// Who holds how much of a prefix, bounded in bytes by construction.
#[derive(Debug)]
pub struct KvIndex {}

impl KvIndex {
    /// An empty index that never takes more than `byte_bound` bytes (the least recently used leaves go first).
    pub fn new(byte_bound: usize) -> KvIndex {
        let _ = byte_bound;
        todo!()
    }

    /// Opens the books of an instance. `capacity_blocks`: what its cache holds; bounds what is remembered of it.
    pub fn add_instance(&mut self, instance: InstanceId, capacity_blocks: Option<u32>) {
        let _ = (instance, capacity_blocks);
        todo!()
    }

    /// Forgets everything of an instance.
    pub fn remove_instance(&mut self, instance: InstanceId) {
        let _ = instance;
        todo!()
    }

    /// For each instance, how many leading blocks of `chain` it holds: `hit_blocks[slot]`. Entries of unknown slots are 0.
    pub fn match_prefix(&self, chain: &[u64], hit_blocks: &mut [u32]) {
        let _ = (chain, hit_blocks);
        todo!()
    }

    /// Approximate feed: this prompt was placed on `instance`, so its blocks will be there.
    pub fn record(&mut self, instance: InstanceId, chain: &[u64]) {
        let _ = (instance, chain);
        todo!()
    }

    /// Exact feed: `instance` stored these consecutive blocks behind `parent` (None: they start the chain). Each call
    /// counts one physical copy of each block.
    pub fn stored(&mut self, instance: InstanceId, parent: Option<u64>, chain: &[u64]) {
        let _ = (instance, parent, chain);
        todo!()
    }

    /// Exact feed: one physical copy of a block is gone. Returns whether the index knew it.
    pub fn removed(&mut self, instance: InstanceId, hash: u64) -> bool {
        let _ = (instance, hash);
        todo!()
    }

    /// Exact feed: the whole cache of `instance` was cleared.
    pub fn cleared(&mut self, instance: InstanceId) {
        let _ = instance;
        todo!()
    }

    /// Appends the instances that hold the block (and everything before it) to `out`.
    pub fn holders(&self, hash: u64, out: &mut Vec<InstanceId>) {
        let _ = (hash, out);
        todo!()
    }

    /// Blocks held for `instance`.
    pub fn blocks(&self, instance: InstanceId) -> u32 {
        let _ = instance;
        todo!()
    }

    /// Bytes taken now, allocations included.
    pub fn bytes(&self) -> usize {
        todo!()
    }
}
