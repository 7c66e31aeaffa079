//! The router behind a lock, and tickets that close themselves.
use super::decision::Decision;
use super::router::Router;
use super::tickets::TicketId;
use crate::error::CoreError;
use crate::ids::Seconds;
use crate::plan::{Event, Segment};
use parking_lot::{Mutex, MutexGuard};
use std::cell::Cell;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::time::Duration;

/// How often a decision tries a router that is taken before it goes to sleep: work behind decisions
/// holds it for microseconds.
const TRIES: u32 = 2000;
/// How long work behind decisions lets them go first, in spins; beyond it, the waiting thread is
/// not running.
const PATIENCE: u32 = 2000;

thread_local! {
    /// Routers that this thread holds; its address names the thread.
    static HELD: Cell<u32> = const { Cell::new(0) };
}

fn this_thread() -> usize {
    HELD.with(|held| std::ptr::from_ref(held).addr())
}

/// A router that several threads share. Cloning shares it.
///
/// A panic while a thread holds the router leaves counts half changed, and what is decided from
/// them would be wrong without a sign of it. The router is broken from then on
/// ([`SharedRouter::check`]). It is not an abort: the process belongs to the program that embeds
/// the router.
#[derive(Clone)]
pub struct SharedRouter {
    inner: Arc<Inner>,
}

struct Inner {
    router: Mutex<Router>,
    /// Decisions that wait for the router.
    waiting: AtomicU32,
    /// The thread that holds the router; 0: none.
    holder: AtomicUsize,
    /// A thread panicked while it held the router.
    broken: AtomicBool,
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
                holder: AtomicUsize::new(0),
                broken: AtomicBool::new(false),
                dropped: Mutex::default(),
            }),
        }
    }

    /// Takes the router, waiting for it. Decisions are short; a caller that holds a lock of its own
    /// (an interpreter's) should try [`SharedRouter::try_lock`] first and let its own go before it
    /// waits here.
    pub fn lock(&self) -> Held<'_> {
        self.held(self.inner.router.lock(), false)
    }

    /// Takes the router for a decision, waiting for it: work behind decisions gives way.
    pub fn lock_next(&self) -> Held<'_> {
        self.inner.waiting.fetch_add(1, Ordering::Relaxed);
        let router = self.inner.router.lock();
        self.inner.waiting.fetch_sub(1, Ordering::Relaxed);
        self.held(router, false)
    }

    /// Takes the router, waiting for it no longer than `most`.
    pub fn lock_within(&self, most: Duration) -> Option<Held<'_>> {
        Some(self.held(self.inner.router.try_lock_for(most)?, false))
    }

    /// Takes the router if it is free.
    pub fn try_lock(&self) -> Option<Held<'_>> {
        Some(self.held(self.inner.router.try_lock()?, false))
    }

    /// Whether this thread holds the router: waiting for it would never end.
    pub fn is_held_here(&self) -> bool {
        self.inner.holder.load(Ordering::Relaxed) == this_thread()
    }

    /// Whether this thread holds any router.
    pub fn any_is_held_here() -> bool {
        HELD.get() > 0
    }

    /// # Errors
    /// `Broken` after a panic of a thread that held the router.
    pub fn check(&self) -> Result<(), CoreError> {
        if self.inner.broken.load(Ordering::Relaxed) { Err(CoreError::Broken) } else { Ok(()) }
    }

    fn held<'a>(&'a self, router: MutexGuard<'a, Router>, fair: bool) -> Held<'a> {
        self.inner.holder.store(this_thread(), Ordering::Relaxed);
        HELD.set(HELD.get() + 1);
        let calm = !std::thread::panicking();
        let mut held = Held { router: Some(router), inner: &self.inner, fair, calm };
        if self.check().is_ok() {
            let mut dropped = self.inner.dropped.lock();
            dropped.drain(..).for_each(|id| held.drop_ticket(id));
        }
        held
    }

    /// Takes the router as soon as it is free, for some microseconds at most: whoever holds it for
    /// a moment only is waited for, and work behind decisions gives way.
    pub fn lock_soon(&self) -> Option<Held<'_>> {
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

    /// Takes the router for work that decisions shall not wait for: they go first, and are next
    /// when it is let go. Such work holds it for microseconds at a time.
    pub fn lock_behind(&self) -> Held<'_> {
        for _ in 0..PATIENCE {
            if self.inner.waiting.load(Ordering::Relaxed) == 0 {
                break;
            }
            std::hint::spin_loop();
        }
        self.held(self.inner.router.lock(), true)
    }

    /// A handle on the ticket of a decision. When the last handle goes, an open ticket is closed.
    pub fn ticket(&self, decision: &Decision) -> Ticket {
        Ticket { shared: self.clone(), id: decision.ticket }
    }
}

/// The router, taken by this thread.
pub struct Held<'a> {
    router: Option<MutexGuard<'a, Router>>,
    inner: &'a Inner,
    /// Whether it goes to a thread that sleeps for it, rather than to this thread's next piece of
    /// work.
    fair: bool,
    /// Whether the thread was not panicking already when it took the router.
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

impl Drop for Held<'_> {
    fn drop(&mut self) {
        if self.calm && std::thread::panicking() {
            self.inner.broken.store(true, Ordering::Relaxed);
        }
        HELD.set(HELD.get() - 1);
        self.inner.holder.store(0, Ordering::Relaxed);
        if let Some(router) = self.router.take().filter(|_| self.fair) {
            MutexGuard::unlock_fair(router);
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
    /// `Ticket` where it is closed, `Broken` where its router is.
    pub fn advance(&self, event: Event, now: Seconds) -> Result<Option<Segment>, CoreError> {
        self.shared.check()?;
        self.shared.lock().advance(self.id, event, now)
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        // A handle may go in the middle of a decision (a garbage collector's whim): never wait
        // here.
        if self.shared.check().is_err() {
            return;
        }
        match self.shared.try_lock() {
            Some(mut router) => router.drop_ticket(self.id),
            None => self.shared.inner.dropped.lock().push(self.id),
        }
    }
}
