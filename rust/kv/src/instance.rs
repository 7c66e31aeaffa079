//! Numbers of instances.
use serde::{Deserialize, Serialize};

/// The slot of an engine instance: a dense number that indexes every indicator column.
///
/// A slot is reused only after its instance is removed. It is therefore valid within one call of
/// the router; `InstanceId` of the core outlives it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Slot(pub u32);

impl Slot {
    /// Returns the slot as an index into columns.
    #[inline]
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// Maximum number of instances of a router; bounds every bit set and column.
pub const MAX_INSTANCES: usize = 16_384;
