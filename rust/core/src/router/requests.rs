//! Requests in flight, and records of all requests.
use super::decision::Totals;
use super::tickets::Tickets;
use crate::record::RecordRing;

/// All request data of a router, apart from the load on instances.
pub(super) struct Requests {
    /// Tickets of the requests in flight.
    pub tickets: Tickets,
    pub records: RecordRing,
    pub totals: Totals,
}

impl Requests {
    /// Creates an empty set.
    pub fn new(record_bytes: usize) -> Requests {
        Requests {
            tickets: Tickets::default(),
            records: RecordRing::new(record_bytes),
            totals: Totals::default(),
        }
    }
}
