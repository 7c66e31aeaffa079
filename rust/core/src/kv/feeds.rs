//! Feeds of the index. (Simple form, to be replaced.)
use super::hash::Domain;
use super::index::KvIndex;
use crate::ids::InstanceId;

/// Engines' own block hashes to ours.
#[derive(Debug, Default)]
pub struct ExactFeed {}

#[allow(missing_docs)]
impl ExactFeed {
    pub fn stored(
        &mut self,
        _index: &mut KvIndex,
        _instance: InstanceId,
        _parent: Option<u64>,
        hashes: &[u64],
        _tokens: &[u32],
        _block_size: usize,
        _domain: Domain,
    ) -> usize {
        hashes.len()
    }
    pub fn removed(&mut self, _index: &mut KvIndex, _instance: InstanceId, _hashes: &[u64]) {}
    pub fn cleared(&mut self, index: &mut KvIndex, instance: InstanceId) {
        index.cleared(instance);
    }
    pub fn forget(&mut self, _instance: InstanceId) {}
}
