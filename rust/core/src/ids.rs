//! Basic types of the whole crate.
use serde::{Deserialize, Serialize};
use slotmap::{Key, new_key_type};

/// An engine instance, as a dense slot number that indexes every indicator column.
///
/// A slot is reused only after its instance is removed. Tickets also carry a generation, so a late
/// event of a removed instance never reaches the in-flight ledger of its successor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct InstanceId(pub u32);

impl InstanceId {
    /// Returns the slot as an index into columns.
    #[inline]
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// Monotonic time in seconds; the caller chooses the origin.
pub type Seconds = f64;

/// Maximum number of instances of a router; bounds every bit set and column.
pub const MAX_INSTANCES: usize = 16_384;

new_key_type! {
    /// A request from its arrival to its end.
    pub struct ArrivalId;
}

impl ArrivalId {
    /// Returns a number that no other arrival of the router has.
    pub fn number(self) -> u64 {
        self.data().as_ffi()
    }
}
