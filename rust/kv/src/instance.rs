//! Numbers of instances.
use serde::{Deserialize, Serialize};

/// An engine instance, as a dense slot number that indexes every indicator column.
///
/// A slot is reused only after its instance is removed. A number is therefore valid within one call
/// of the router; `InstanceRef` of the core outlives it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct InstanceId(pub u32);

impl InstanceId {
    /// Returns the slot as an index into columns.
    #[inline]
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// Maximum number of instances of a router; bounds every bit set and column.
pub const MAX_INSTANCES: usize = 16_384;
