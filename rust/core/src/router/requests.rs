//! The requests in flight, and what is recorded and learned of requests that came.
use super::decision::Totals;
use super::priorities::Ordering;
use super::tickets::Tickets;
use crate::estimate::Turns;
use crate::receipt::ReceiptRing;

/// What a router keeps of requests apart from their load on instances.
pub(super) struct Requests {
    /// Those in flight.
    pub tickets: Tickets,
    pub receipts: ReceiptRing,
    pub totals: Totals,
    /// What requests are ordered by, if at all.
    pub ordering: Option<Ordering>,
    /// The latest turns of conversations, if a forecast reads them.
    pub turns: Option<Turns>,
}

impl Requests {
    /// None so far.
    pub fn new(receipt_bytes: usize) -> Requests {
        Requests {
            tickets: Tickets::default(),
            receipts: ReceiptRing::new(receipt_bytes),
            totals: Totals::default(),
            ordering: None,
            turns: None,
        }
    }
}
