//! The small types that everything else speaks in.

/// One engine replica, as a dense slot number: it indexes every indicator column.
///
/// A slot is used again only after its instance was removed; tickets carry a generation beside it, so that a late
/// event of a removed instance never reaches its successor's books.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct InstanceId(pub u32);

impl InstanceId {
    /// The slot as an index into columns.
    #[inline]
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// Monotonic time in seconds from an origin of the caller's choice.
pub type Seconds = f64;

/// Most instances one router holds: bounds every bit set and column.
pub const MAX_INSTANCES: usize = 4096;
