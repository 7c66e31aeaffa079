//! The router behind a lock, and tickets that close themselves.
use super::caches::{SharedCaches, check_free};
use super::decision::Decision;
use super::patience::give_way;
use super::router::Router;
use super::tickets::TicketId;
use crate::error::CoreError;
use crate::ids::{ArrivalId, Seconds};
use crate::plan::{Event, Segment};
use parking_lot::{Mutex, MutexGuard};
use std::cell::Cell;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::time::Duration;

thread_local! {
    /// Number of routers that this thread holds. The address identifies the thread.
    static HELD: Cell<u32> = const { Cell::new(0) };
}

fn this_thread() -> usize {
    HELD.with(|held| std::ptr::from_ref(held).addr())
}

/// A router shared by several threads. A clone refers to the same router.
///
/// A panic while a thread holds the router leaves inconsistent counts, and later decisions would be
/// silently wrong. From then on, the router is broken ([`SharedRouter::check`]). The process does
/// not abort, because it belongs to the program that embeds the router.
#[derive(Clone)]
pub struct SharedRouter {
    inner: Arc<Inner>,
}

struct Inner {
    router: Mutex<Router>,
    /// Number of decisions that wait for the router.
    waiting: AtomicU32,
    /// The thread that holds the router; 0: none.
    holder: AtomicUsize,
    /// The engines' caches. They are taken after the router, or alone.
    caches: SharedCaches,
    /// Tickets dropped while the router was locked; the next holder closes them.
    dropped: Mutex<Vec<Dropped>>,
}

impl SharedRouter {
    /// Shares a router.
    pub fn new(router: Router) -> SharedRouter {
        SharedRouter {
            inner: Arc::new(Inner {
                caches: router.caches().clone(),
                router: Mutex::new(router),
                waiting: AtomicU32::new(0),
                holder: AtomicUsize::new(0),
                dropped: Mutex::default(),
            }),
        }
    }

    /// Returns the engines' caches, which have a lock of their own.
    pub fn caches(&self) -> &SharedCaches {
        &self.inner.caches
    }

    /// Waits for the router and takes it. Decisions are short. A caller that holds a lock of its
    /// own (an interpreter's) should call [`SharedRouter::try_lock`] first and release its lock
    /// before it waits here.
    pub fn lock(&self) -> Held<'_> {
        check_free();
        self.held(self.inner.router.lock(), false)
    }

    /// Waits for the router and takes it for a decision; work behind decisions lets it go first.
    pub fn lock_next(&self) -> Held<'_> {
        check_free();
        self.inner.waiting.fetch_add(1, Ordering::Relaxed);
        let router = self.inner.router.lock();
        self.inner.waiting.fetch_sub(1, Ordering::Relaxed);
        self.held(router, false)
    }

    /// Waits for the router for at most `most` and takes it.
    pub fn lock_within(&self, most: Duration) -> Option<Held<'_>> {
        check_free();
        Some(self.held(self.inner.router.try_lock_for(most)?, false))
    }

    /// Takes the router if it is free.
    pub fn try_lock(&self) -> Option<Held<'_>> {
        Some(self.held(self.inner.router.try_lock()?, false))
    }

    /// Returns whether this thread holds the router. Waiting for it would then never end.
    pub fn is_held_here(&self) -> bool {
        self.inner.holder.load(Ordering::Relaxed) == this_thread()
    }

    /// Returns whether this thread holds any router.
    pub fn any_is_held_here() -> bool {
        HELD.get() > 0
    }

    /// Checks that the router is usable.
    ///
    /// # Errors
    /// `Broken` after a panic of a thread that held the router or changed the caches.
    pub fn check(&self) -> Result<(), CoreError> {
        if self.inner.caches.is_broken() { Err(CoreError::Broken) } else { Ok(()) }
    }

    fn held<'a>(&'a self, router: MutexGuard<'a, Router>, fair: bool) -> Held<'a> {
        self.inner.holder.store(this_thread(), Ordering::Relaxed);
        HELD.set(HELD.get() + 1);
        let calm = !std::thread::panicking();
        let mut held = Held { router: Some(router), inner: &self.inner, fair, calm };
        if self.check().is_ok() {
            let mut dropped = self.inner.dropped.lock();
            dropped.drain(..).for_each(|dropped| dropped.close(&mut held));
        }
        held
    }

    /// Returns whether a decision waits for the router. A long holder should let it go first.
    pub fn decision_waits(&self) -> bool {
        self.inner.waiting.load(Ordering::Relaxed) > 0
    }

    /// Takes the router for work behind decisions: waiting decisions go first, and go next when it
    /// is released. Such work must hold the router for microseconds only, or release it if
    /// [`SharedRouter::decision_waits`].
    pub fn lock_behind(&self) -> Held<'_> {
        check_free();
        give_way(&self.inner.waiting);
        self.held(self.inner.router.lock(), true)
    }

    /// Returns a handle on an arrival that [`Router::arrive`] returned.
    pub fn arrival(&self, id: ArrivalId) -> Waiting {
        Waiting { shared: self.clone(), id, taken: AtomicBool::new(false) }
    }

    /// Closes a dropped handle, at once or by the router's next holder.
    fn close(&self, dropped: Dropped) {
        match self.try_lock() {
            Some(mut router) => dropped.close(&mut router),
            None => self.inner.dropped.lock().push(dropped),
        }
    }

    /// Returns a handle on the ticket of a decision. Dropping the last handle closes an open
    /// ticket.
    pub fn ticket(&self, decision: &Decision) -> Ticket {
        Ticket { shared: self.clone(), id: decision.ticket }
    }
}

/// The router, locked by this thread.
pub struct Held<'a> {
    router: Option<MutexGuard<'a, Router>>,
    inner: &'a Inner,
    /// Whether the router goes to a thread that sleeps for it when this guard is dropped; otherwise
    /// this thread may lock it again first.
    fair: bool,
    /// Whether the thread was not yet panicking when it locked the router.
    calm: bool,
}

impl Deref for Held<'_> {
    type Target = Router;

    fn deref(&self) -> &Router {
        self.router.as_ref().expect("held until dropped")
    }
}

impl DerefMut for Held<'_> {
    fn deref_mut(&mut self) -> &mut Router {
        self.router.as_mut().expect("held until dropped")
    }
}

impl Held<'_> {
    /// Releases the router. Returns whether predictions are queued: the caller enters them
    /// ([`SharedCaches::try_enter`], [`SharedCaches::write`]).
    pub fn release(mut self) -> bool {
        self.unlock()
    }

    fn unlock(&mut self) -> bool {
        let Some(mut router) = self.router.take() else { return false };
        if self.calm && std::thread::panicking() {
            self.inner.caches.set_broken();
        } else {
            router.publish_changes();
        }
        HELD.set(HELD.get() - 1);
        self.inner.holder.store(0, Ordering::Relaxed);
        let predicted = std::mem::take(&mut router.state.predicted);
        if self.fair {
            MutexGuard::unlock_fair(router);
        } else {
            drop(router);
        }
        predicted
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        if self.unlock() {
            drop(self.inner.caches.write());
        }
    }
}

/// A request in flight. Dropping an open ticket aborts the request and removes its counts.
pub struct Ticket {
    shared: SharedRouter,
    id: TicketId,
}

impl Ticket {
    /// Returns its key.
    pub fn id(&self) -> TicketId {
        self.id
    }

    /// Returns its router.
    pub fn router(&self) -> &SharedRouter {
        &self.shared
    }

    /// Calls [`Router::advance`] for this ticket.
    ///
    /// # Errors
    /// `Ticket` if the ticket is closed; `Broken` if its router is broken.
    pub fn advance(&self, event: Event, now: Seconds) -> Result<Option<Segment>, CoreError> {
        let mut router = self.shared.lock();
        self.shared.check()?; // its last holder may have panicked
        router.advance(self.id, event, now)
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        // Never wait here: a garbage collector may drop a handle in the middle of a decision.
        if self.shared.check().is_err() {
            return;
        }
        self.shared.close(Dropped::Ticket(self.id));
    }
}

/// Something that its handle no longer needs.
#[derive(Clone, Copy, Debug)]
enum Dropped {
    Ticket(TicketId),
    Arrival(ArrivalId),
}

impl Dropped {
    fn close(self, router: &mut Router) {
        match self {
            Dropped::Ticket(id) => router.drop_ticket(id),
            Dropped::Arrival(id) => router.drop_arrival(id, router.latest()),
        }
    }
}

/// An arrived request that is not routed yet. Dropping it ends the arrival, unless it was taken.
pub struct Waiting {
    shared: SharedRouter,
    id: ArrivalId,
    taken: AtomicBool,
}

impl Waiting {
    /// Returns its key.
    pub fn id(&self) -> ArrivalId {
        self.id
    }

    /// Takes the arrival for a decision, which then ends it; `None` if it was taken before.
    pub fn take(&self) -> Option<ArrivalId> {
        (!self.taken.swap(true, Ordering::AcqRel)).then_some(self.id)
    }

    /// Ends the arrival, for example because its client left. Does nothing if it was taken.
    pub fn close(&self) {
        if let Some(id) = self.take()
            && self.shared.check().is_ok()
        {
            self.shared.close(Dropped::Arrival(id));
        }
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        self.close();
    }
}
