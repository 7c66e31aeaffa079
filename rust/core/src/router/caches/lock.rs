//! The engines' caches behind a lock of their own.
//!
//! Locks are taken in this order, and never in another: the state of a [`KvFeed`], the router, the
//! caches, the predictions. A thread takes the caches once at a time, and calls nothing that may
//! wait meanwhile. Builds with debug assertions check both. Matches, events and predictions hold
//! the caches for microseconds; changes of the fleet may hold them longer.
//!
//! [`KvFeed`]: crate::feed::KvFeed
use super::content::{Caches, PrefixMatch};
use crate::fleet::{InstanceId, Member};
use crate::ids::Slot;
use crate::kv::predictions::{Prediction, Predictions};
use crate::request::Request;
use crate::router::patience::give_way;
use crate::router::settings::{IndexFeed, RouterConfig};
use parking_lot::{Mutex, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::cell::Cell;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

/// Attempts to read busy caches before the thread sleeps: about a microsecond.
const TRIES: u32 = 64;
/// Locks of the caches for predictions that must not wait: about 10 us, as long as a decision keeps
/// an interpreter's lock.
const SHORT: u32 = 4;

thread_local! {
    /// Whether this thread holds caches; builds without debug assertions do not count.
    static HELD: Cell<bool> = const { Cell::new(false) };
}

/// Caches shared by a router and the feeds of its engines' events. A clone refers to the same
/// caches.
#[derive(Clone)]
pub struct SharedCaches {
    inner: Arc<Inner>,
}

struct Inner {
    caches: RwLock<Caches>,
    /// Number of readers that wait.
    waiting: AtomicU32,
    /// Changes of instances and of settings so far.
    version: AtomicU64,
    /// Predictions that the caches do not hold yet.
    predictions: Mutex<Predictions>,
    /// Whether there are any.
    predicted: AtomicBool,
    /// Whether a thread panicked while it changed the caches or held their router.
    broken: AtomicBool,
}

impl SharedCaches {
    /// Creates the caches of a router without instances.
    pub(in crate::router) fn new(config: &RouterConfig) -> SharedCaches {
        SharedCaches {
            inner: Arc::new(Inner {
                caches: RwLock::new(Caches::new(config)),
                waiting: AtomicU32::new(0),
                version: AtomicU64::new(0),
                predictions: Mutex::default(),
                predicted: AtomicBool::new(false),
                broken: AtomicBool::new(false),
            }),
        }
    }

    /// Waits for the caches and reads them. They hold all predictions made before, except blocks
    /// that another thread enters now.
    #[inline]
    pub fn read(&self) -> Reading<'_> {
        self.try_read().unwrap_or_else(|| self.wait())
    }

    /// Reads the caches if that needs no wait: they are free, and no prediction is queued. A caller
    /// that holds a lock of its own (an interpreter's) releases it before it waits.
    #[inline]
    pub fn try_read(&self) -> Option<Reading<'_>> {
        let (version, alone) = (self.version(), Alone::new());
        let is_whole = !self.inner.predicted.load(Ordering::Acquire);
        let caches = self.inner.caches.try_read().filter(|_| is_whole)?;
        Some(Reading { caches, version, _alone: alone })
    }

    #[cold]
    fn wait(&self) -> Reading<'_> {
        let version = self.version();
        if self.inner.predicted.load(Ordering::Acquire) {
            drop(self.write());
        }
        let alone = Alone::new();
        self.inner.waiting.fetch_add(1, Ordering::Relaxed);
        let spun = (0..TRIES).find_map(|_| {
            std::hint::spin_loop();
            self.inner.caches.try_read()
        });
        let caches = spun.unwrap_or_else(|| self.inner.caches.read());
        self.inner.waiting.fetch_sub(1, Ordering::Relaxed);
        Reading { caches, version, _alone: alone }
    }

    /// Waits for the caches and takes them for changes. They hold all predictions made before.
    pub fn write(&self) -> Writing<'_> {
        self.writing(false)
    }

    /// Takes the caches for an event: waiting readers go first, and go next when they are released.
    /// An event must hold the caches for microseconds only.
    pub(crate) fn write_behind(&self) -> Writing<'_> {
        give_way(&self.inner.waiting);
        self.writing(true)
    }

    fn writing(&self, fair: bool) -> Writing<'_> {
        loop {
            check_free();
            if let Some(writing) = self.inner.entered(self.inner.caches.write(), fair) {
                return writing;
            }
            give_way(&self.inner.waiting);
        }
    }

    /// Enters the queued predictions if that needs no wait and little time. Returns whether the
    /// caches hold all. A caller that holds a lock of its own (an interpreter's) otherwise releases
    /// it and calls [`SharedCaches::write`].
    pub fn try_enter(&self) -> bool {
        let enter = || self.inner.entered(self.inner.caches.try_write()?, true);
        (0..SHORT).any(|_| enter().is_some())
    }

    /// Returns the number of changes of instances and settings, and of predicted blocks, so far.
    pub(in crate::router) fn version(&self) -> u64 {
        self.inner.version.load(Ordering::Relaxed)
    }

    /// Calls [`Caches::member`]. Earlier matches no longer count.
    pub(in crate::router) fn member(&self, member: Member, instance: InstanceId, feed: IndexFeed) {
        let mut caches = self.write();
        self.inner.version.fetch_add(1, Ordering::Relaxed);
        caches.member(member, instance, feed);
    }

    /// Queues a prediction; `chain`: the blocks that it is about. The next reader or writer of the
    /// caches enters it, unless another thread does.
    pub(in crate::router) fn predict(&self, prediction: Prediction, chain: &[u64]) {
        let is_full = {
            let mut predictions = self.inner.predictions.lock();
            self.inner.predicted.store(true, Ordering::Release);
            if matches!(prediction, Prediction::Holds { .. }) {
                self.inner.version.fetch_add(1, Ordering::Relaxed);
            }
            predictions.push(prediction, chain)
        };
        if is_full {
            drop(self.write());
        }
    }

    /// Queues that an instance uses the first `gpu` blocks of a chain on its GPU, and the first
    /// `all` with its lower tiers.
    pub(in crate::router) fn predict_use(&self, id: Slot, chain: &[u64], gpu: u32, all: u32) {
        for (below, blocks) in [(false, gpu), (true, all)] {
            if let Some(last) = chain[..chain.len().min(blocks as usize)].last() {
                self.predict(Prediction::Used { id, below }, std::slice::from_ref(last));
            }
        }
    }

    /// Returns whether a panic left the caches or their router inconsistent.
    pub(in crate::router) fn is_broken(&self) -> bool {
        self.inner.broken.load(Ordering::Relaxed)
    }

    /// Notes that a panic left the router inconsistent.
    pub(in crate::router) fn set_broken(&self) {
        self.inner.broken.store(true, Ordering::Relaxed);
    }
}

impl Inner {
    /// Enters some of the queued predictions, about as many blocks as an event per lock. Returns
    /// the caches if they hold all then; otherwise releases them, so that decisions go between.
    fn entered<'a>(&'a self, caches: RwLockWriteGuard<'a, Caches>, fair: bool) -> Option<Writing<'a>> {
        let (calm, alone) = (!std::thread::panicking(), Alone::new());
        let mut writing = Writing { caches: Some(caches), inner: self, fair: true, calm, _alone: alone };
        let is_done = |caches: &Caches| caches.is_whole() && !self.predicted.load(Ordering::Acquire);
        if !is_done(&writing) {
            writing.enter_some(|taken| {
                let mut predictions = self.predictions.lock();
                self.predicted.store(false, Ordering::Relaxed);
                std::mem::swap(&mut *predictions, taken);
            });
            if !is_done(&writing) {
                return None;
            }
        }
        writing.fair = fair;
        Some(writing)
    }
}

/// Marks that this thread holds caches, for builds with debug assertions.
struct Alone;

impl Alone {
    #[inline]
    fn new() -> Alone {
        check_free();
        if cfg!(debug_assertions) {
            HELD.set(true);
        }
        Alone
    }
}

impl Drop for Alone {
    #[inline]
    fn drop(&mut self) {
        if cfg!(debug_assertions) {
            HELD.set(false);
        }
    }
}

/// Checks that this thread holds no caches: it is about to take these or their router.
#[inline]
pub(in crate::router) fn check_free() {
    if cfg!(debug_assertions) {
        assert!(!HELD.get() || std::thread::panicking(), "caches are taken last, and once");
    }
}

/// The caches, read by this thread. Others may read them, too.
pub struct Reading<'a> {
    caches: RwLockReadGuard<'a, Caches>,
    /// The version that the caches had, at least.
    version: u64,
    _alone: Alone,
}

impl Reading<'_> {
    /// Finds the length of a prompt's prefix on each instance before its decision, which then need
    /// not do it ([`Router::route_matched`]).
    ///
    /// [`Router::route_matched`]: crate::router::Router::route_matched
    pub fn match_ahead(&self, request: &Request<'_>, found: &mut PrefixMatch) {
        self.match_prefix(request, found);
        // A change since then makes the match invalid.
        found.version = self.is_whole().then_some(self.version);
    }
}

impl Deref for Reading<'_> {
    type Target = Caches;

    #[inline]
    fn deref(&self) -> &Caches {
        &self.caches
    }
}

/// The caches, locked by this thread for changes.
pub struct Writing<'a> {
    caches: Option<RwLockWriteGuard<'a, Caches>>,
    inner: &'a Inner,
    /// Whether the caches go to a thread that sleeps for them when this guard is dropped.
    fair: bool,
    /// Whether the thread was not yet panicking when it locked the caches.
    calm: bool,
    _alone: Alone,
}

impl Deref for Writing<'_> {
    type Target = Caches;

    fn deref(&self) -> &Caches {
        self.caches.as_ref().expect("held until dropped")
    }
}

impl DerefMut for Writing<'_> {
    fn deref_mut(&mut self) -> &mut Caches {
        self.caches.as_mut().expect("held until dropped")
    }
}

impl Drop for Writing<'_> {
    fn drop(&mut self) {
        if self.calm && std::thread::panicking() {
            self.inner.broken.store(true, Ordering::Relaxed);
        }
        if let Some(caches) = self.caches.take().filter(|_| self.fair) {
            RwLockWriteGuard::unlock_fair(caches);
        }
    }
}
