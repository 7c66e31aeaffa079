//! Basic types of the whole crate.
use slotmap::{Key, new_key_type};

pub use lmetric_estimate::Seconds;
pub use lmetric_kv::{MAX_INSTANCES, Slot};

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
