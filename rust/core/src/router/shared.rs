//! The router behind a lock, and tickets that close themselves.
use super::{Decision, Router, TicketId};
use crate::error::CoreError;
use crate::ids::Seconds;
use crate::plan::{Event, Segment};
use parking_lot::{Mutex, MutexGuard};
use std::sync::Arc;

/// A router that several threads share. Cloning shares it.
#[derive(Clone)]
pub struct SharedRouter {
    inner: Arc<Inner>,
}

struct Inner {
    router: Mutex<Router>,
    /// Tickets dropped while the router was locked: closed when it is next taken.
    dropped: Mutex<Vec<TicketId>>,
}

impl SharedRouter {
    /// Shares a router.
    pub fn new(router: Router) -> SharedRouter {
        SharedRouter { inner: Arc::new(Inner { router: Mutex::new(router), dropped: Mutex::default() }) }
    }

    /// Takes the router, waiting for it. Decisions are short; a caller that holds a lock of its own (an interpreter's) should
    /// try [`SharedRouter::try_lock`] first and let its own go before it waits here.
    pub fn lock(&self) -> MutexGuard<'_, Router> {
        let mut router = self.inner.router.lock();
        self.close_dropped(&mut router);
        router
    }

    /// Takes the router if it is free.
    pub fn try_lock(&self) -> Option<MutexGuard<'_, Router>> {
        let mut router = self.inner.router.try_lock()?;
        self.close_dropped(&mut router);
        Some(router)
    }

    /// A handle on the ticket of a decision. When the last handle goes, an open ticket is closed.
    pub fn ticket(&self, decision: &Decision) -> Ticket {
        Ticket { shared: self.clone(), id: decision.ticket }
    }

    fn close_dropped(&self, router: &mut Router) {
        let mut dropped = self.inner.dropped.lock();
        for id in dropped.drain(..) {
            router.drop_ticket(id);
        }
    }
}

/// A request in flight. Dropped while open, it is an abort: its counts are gone, whatever happened.
pub struct Ticket {
    shared: SharedRouter,
    id: TicketId,
}

impl Ticket {
    /// Its key.
    pub fn id(&self) -> TicketId {
        self.id
    }

    /// Its router.
    pub fn router(&self) -> &SharedRouter {
        &self.shared
    }

    /// See [`Router::advance`].
    ///
    /// # Errors
    /// `Ticket` where it is closed.
    pub fn advance(&self, event: Event, now: Seconds) -> Result<Option<Segment>, CoreError> {
        self.shared.lock().advance(self.id, event, now)
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        // A handle may go in the middle of a decision (a garbage collector's whim): never wait here.
        match self.shared.try_lock() {
            Some(mut router) => router.drop_ticket(self.id),
            None => self.shared.inner.dropped.lock().push(self.id),
        }
    }
}
