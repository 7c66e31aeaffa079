//! Requests in flight, and records and learned values of all requests.
use super::decision::Totals;
use super::priorities::Ordering;
use super::tickets::Tickets;
use crate::admission::Admission;
use crate::estimate::Turns;
use crate::record::RecordRing;
use crate::warm::Demand;

/// All request data of a router, apart from the load on instances.
pub(super) struct Requests {
    /// Tickets of the requests in flight.
    pub tickets: Tickets,
    pub records: RecordRing,
    pub totals: Totals,
    /// The order of requests, if any.
    pub ordering: Option<Ordering>,
    /// The latest turns of conversations, if a forecast reads them.
    pub turns: Option<Turns>,
    /// Arrivals, with agent programs and admission by load.
    pub admission: Admission,
    /// Prompts of recent requests, if fleet changes are warm.
    pub demand: Option<Demand>,
}

impl Requests {
    /// Creates an empty set.
    pub fn new(record_bytes: usize) -> Requests {
        Requests {
            tickets: Tickets::default(),
            records: RecordRing::new(record_bytes),
            totals: Totals::default(),
            ordering: None,
            turns: None,
            admission: Admission::default(),
            demand: None,
        }
    }
}
