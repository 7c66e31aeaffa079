//! Forks of a process with feeds. A child has no thread of its parent, but all locks as they were
//! at the fork. If a feed's thread had locked an engine's cache, the child's router would hang.
use std::cell::RefCell;
use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

/// Feeds' threads share it while they may hold locks of routers.
static WORK: RwLock<()> = RwLock::new(());

thread_local! {
    static FORKING: RefCell<Option<RwLockWriteGuard<'static, ()>>> = const { RefCell::new(None) };
}

/// Begins work that may lock parts of a router.
pub(crate) fn work() -> RwLockReadGuard<'static, ()> {
    WORK.read().unwrap_or_else(PoisonError::into_inner) // it protects no data
}

/// Waits until no feed works, and keeps all from their work until this thread calls [`end`].
pub fn begin() {
    let guard = WORK.write().unwrap_or_else(PoisonError::into_inner);
    FORKING.set(Some(guard));
}

/// Lets feeds work again: call it in the parent and in the child.
pub fn end() {
    FORKING.set(None);
}
