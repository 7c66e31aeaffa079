//! The router behind a lock, and tickets that close themselves.
use super::{Decision, Router, TicketId};
use crate::error::CoreError;
use crate::ids::Seconds;
use crate::plan::{Event, Segment};
use parking_lot::{Mutex, MutexGuard};
use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

/// How often a decision tries a router that is taken before it goes to sleep: work behind decisions holds it for microseconds.
const TRIES: u32 = 2000;
/// How long work behind decisions lets them go first, in spins; beyond it, the waiting thread is not running.
const PATIENCE: u32 = 2000;

/// A router that several threads share. Cloning shares it.
#[derive(Clone)]
pub struct SharedRouter {
    inner: Arc<Inner>,
}

struct Inner {
    router: Mutex<Router>,
    /// Decisions that wait for the router.
    waiting: AtomicU32,
    /// Tickets dropped while the router was locked: closed when it is next taken.
    dropped: Mutex<Vec<TicketId>>,
}

impl SharedRouter {
    /// Shares a router.
    pub fn new(router: Router) -> SharedRouter {
        SharedRouter {
            inner: Arc::new(Inner {
                router: Mutex::new(router),
                waiting: AtomicU32::new(0),
                dropped: Mutex::default(),
            }),
        }
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

    /// Takes the router as soon as it is free, for some microseconds at most: whoever holds it for a moment only is waited for,
    /// and work behind decisions gives way.
    pub fn lock_soon(&self) -> Option<MutexGuard<'_, Router>> {
        if let Some(router) = self.try_lock() {
            return Some(router);
        }
        self.inner.waiting.fetch_add(1, Ordering::Relaxed);
        let router = (0..TRIES).find_map(|_| {
            std::hint::spin_loop();
            self.try_lock()
        });
        self.inner.waiting.fetch_sub(1, Ordering::Relaxed);
        router
    }

    /// Takes the router for work that decisions shall not wait for: they go first, and are next when it is let go. Such work holds it for
    /// microseconds at a time.
    pub fn lock_behind(&self) -> Behind<'_> {
        for _ in 0..PATIENCE {
            if self.inner.waiting.load(Ordering::Relaxed) == 0 {
                break;
            }
            std::hint::spin_loop();
        }
        Behind(Some(self.lock()))
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

/// The router, taken for work behind decisions.
pub struct Behind<'a>(Option<MutexGuard<'a, Router>>);

impl Deref for Behind<'_> {
    type Target = Router;

    fn deref(&self) -> &Router {
        self.0.as_ref().expect("held until dropped")
    }
}

impl DerefMut for Behind<'_> {
    fn deref_mut(&mut self) -> &mut Router {
        self.0.as_mut().expect("held until dropped")
    }
}

impl Drop for Behind<'_> {
    fn drop(&mut self) {
        if let Some(guard) = self.0.take() {
            // To whoever sleeps for it, rather than to this thread's next few blocks.
            MutexGuard::unlock_fair(guard);
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
