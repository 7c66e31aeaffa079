//! KV events while others change the same data: instances that leave, key schemes, other users of
//! the feed.
use lmetric_core::Registry;
use lmetric_core::feed::{Applied, KvFeed, Means, Source, Stored};
use lmetric_core::fleet::Role;
use lmetric_core::kv::groups::Group;
use lmetric_core::kv::keys::Keys;
use lmetric_core::kv::tier::Tier;
use lmetric_core::router::{IndexFeed, Router, RouterConfig, SharedRouter};
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::collections::BTreeSet;
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

const BLOCK: usize = 16;
const WINDOW: Group = Group { id: 1, needed: 1, every: 1 };

fn keys(block_size: usize) -> Keys {
    Keys::new(&[], block_size, 256).unwrap()
}

fn feed(index_bytes: usize) -> KvFeed {
    let config = RouterConfig { index_bytes, index_feed: IndexFeed::Exact, ..RouterConfig::default() };
    let mut router = Router::new(Registry::CORE.policy("lmetric", &[]).unwrap(), config).unwrap();
    router.add_instance("a", Role::Both, None).unwrap();
    KvFeed::new(SharedRouter::new(router), keys(BLOCK), index_bytes, true)
}

/// The engine's hashes of the first blocks of a prompt.
fn engine(blocks: u64) -> Vec<u64> {
    (1..=blocks).map(|block| block.wrapping_mul(0x2545_f491_4f6c_dd1d)).collect()
}

/// Calls `with` with the event of a prompt's first blocks.
fn stored<T>(feed: &KvFeed, hashes: &[u64], with: impl FnOnce(&Stored<'_>) -> T) -> T {
    let token_ids: Vec<u32> = (0..(hashes.len() * BLOCK) as u32).collect();
    with(&Stored {
        parent: None,
        engine_hashes: hashes,
        token_ids: &token_ids,
        domain: feed.keys().tokens,
        narrowing: &[],
        means: Means::NewCopy,
    })
}

fn store(feed: &KvFeed, source: Source, hashes: &[u64]) -> Applied {
    stored(feed, hashes, |stored| feed.stored(source, stored))
}

fn store_in_window(feed: &KvFeed, source: Source, hashes: &[u64]) -> Applied {
    stored(feed, hashes, |stored| {
        feed.stored_in_group(source, (Tier::Gpu, WINDOW), stored, true, &mut Vec::new())
    })
}

#[test]
fn events_of_a_gone_instance_leave_the_next_one_alone() {
    let (feed, hashes) = (feed(8 << 20), engine(40));
    let old = feed.source("a", 0).unwrap();
    feed.remove_instance("a").unwrap();
    feed.router().lock().add_instance("b", Role::Both, None).unwrap();
    let new = feed.source("b", 0).unwrap();
    assert_eq!(new.instance.slot(), old.instance.slot(), "of the same slot");
    let done = Applied { done: 40, ..Applied::default() };
    assert_eq!((store(&feed, new, &hashes), store_in_window(&feed, new, &hashes)), (done, done));
    let names = feed.names();

    let gone = Applied { gone: 40, ..Applied::default() };
    assert_eq!(feed.removed(old, &hashes), gone);
    assert_eq!(feed.removed_from_group(old, Tier::Gpu, WINDOW.id, &hashes), gone);
    assert_eq!(feed.named_in(old, Tier::Cpu, &hashes), gone);
    assert_eq!(feed.named_in_group(old, Tier::Gpu, WINDOW.id, &hashes), gone);
    // A table of another rank would count as another cache of the new instance.
    assert_eq!(store(&feed, Source { rank: 1, ..old }, &hashes), gone);
    assert_eq!(store_in_window(&feed, Source { rank: 1, ..old }, &hashes), gone);
    assert_eq!(feed.names(), names);

    assert_eq!(feed.removed(new, &hashes), done);
    assert_eq!(feed.removed_from_group(new, Tier::Gpu, WINDOW.id, &hashes), done);
    let caches = feed.router().caches().read();
    let slot = new.instance.slot();
    assert_eq!((caches.gpu().blocks(slot), caches.groups().blocks(slot)), (0, 0));
}

#[test]
fn a_changed_key_scheme_leaves_groups_and_gpus_their_bytes() {
    let (feed, hashes) = (feed(64 << 20), engine(1));
    let source = feed.source("a", 0).unwrap();
    let bound = || feed.router().caches().read().gpu().byte_bound();
    let before = bound();
    store_in_window(&feed, source, &hashes);
    assert_eq!(bound(), before / 2);
    for block_size in [32, 64, 16] {
        feed.set_keys(keys(block_size));
        assert!(feed.router().caches().read().groups().is_empty());
        store_in_window(&feed, source, &hashes);
        assert!(!feed.router().caches().read().groups().is_empty());
        assert_eq!(bound(), before / 2);
    }
}

/// Memory of which a watched thread frees large parts only after another thread has visited:
/// [`COME`] counts the visits. [`ALONE`]: a visit was missing for long.
struct Watched;

const LARGE: usize = 4096;
/// A test that waits this long hangs. The speed of the machine must not decide over a test.
const PATIENCE: Duration = Duration::from_secs(60);
static ASKED: AtomicBool = AtomicBool::new(false);
static COME: AtomicUsize = AtomicUsize::new(0);
static ALONE: AtomicBool = AtomicBool::new(false);

thread_local! {
    static IS_WATCHED: Cell<bool> = const { Cell::new(false) };
}

#[global_allocator]
static MEMORY: Watched = Watched;

// SAFETY: the system's allocator does the work.
unsafe impl GlobalAlloc for Watched {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: of the caller.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        if layout.size() >= LARGE && IS_WATCHED.get() {
            let (before, since) = (COME.load(Ordering::SeqCst), Instant::now());
            ASKED.store(true, Ordering::SeqCst);
            while COME.load(Ordering::SeqCst) == before {
                std::thread::yield_now();
                if since.elapsed() > PATIENCE {
                    ALONE.store(true, Ordering::SeqCst);
                    IS_WATCHED.set(false);
                    break;
                }
            }
        }
        // SAFETY: of the caller.
        unsafe { System.dealloc(at, layout) }
    }
}

#[test]
fn others_get_the_feed_and_the_caches_while_blocks_of_old_keys_are_freed() {
    let (feed, hashes) = (feed(8 << 20), engine(20_000));
    let source = feed.source("a", 0).unwrap();
    assert_eq!(store(&feed, source, &hashes).done, hashes.len());
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !over.load(Ordering::SeqCst) {
                if ASKED.swap(false, Ordering::SeqCst) {
                    drop(feed.router().caches().read());
                    feed.names();
                    COME.fetch_add(1, Ordering::SeqCst);
                }
                std::thread::yield_now();
            }
        });
        IS_WATCHED.set(true);
        feed.set_keys(keys(32));
        IS_WATCHED.set(false);
        over.store(true, Ordering::SeqCst);
    });
    assert_eq!(feed.names().0, 0);
    assert!(COME.load(Ordering::SeqCst) > 16, "the names have 16 tables");
    assert!(!ALONE.load(Ordering::SeqCst));
}

/// Returns whether another user of the feed gets it while `run` applies an event.
fn others_get_in(feed: &KvFeed, run: &dyn Fn()) -> bool {
    let (begun, over) = (Barrier::new(2), AtomicBool::new(false));
    std::thread::scope(|scope| {
        let other = scope.spawn(|| {
            let mut seen = BTreeSet::from([feed.names().0]);
            begun.wait();
            while !over.load(Ordering::Relaxed) {
                seen.insert(feed.names().0);
            }
            seen.insert(feed.names().0);
            seen.len()
        });
        begun.wait();
        run();
        over.store(true, Ordering::Relaxed);
        other.join().unwrap() > 2 // not only the numbers before and after the event
    })
}

#[test]
fn large_events_let_other_users_of_the_feed_in() {
    let (feed, hashes) = (feed(256 << 20), engine(20_000));
    let source = feed.source("a", 0).unwrap();
    assert_eq!(store(&feed, source, &hashes).done, hashes.len());
    store_in_window(&feed, source, &hashes[..1]);
    feed.named_in(source, Tier::Cpu, &hashes[..1]);
    let by_name = || assert!(feed.named_in_group(source, Tier::Gpu, WINDOW.id, &hashes).done >= 19_999);
    let with_tokens = || assert_eq!(store_in_window(&feed, source, &hashes).done, 20_000);
    let removed = || _ = feed.removed_from_group(source, Tier::Gpu, WINDOW.id, &hashes);
    let in_tier = || assert_eq!(feed.named_in(source, Tier::Cpu, &hashes).done, 20_000);
    let not_in_tier = || _ = feed.removed_from(source, Tier::Cpu, &hashes);
    // Each event, and the event that undoes it. A busy machine may let nobody in by chance.
    type Event<'e> = &'e dyn Fn();
    let kinds: [(&str, Event<'_>, Event<'_>); 4] = [
        ("named_in_group", &by_name, &removed),
        ("stored_in_group", &with_tokens, &removed),
        ("removed_from_group", &removed, &by_name),
        ("named_in", &in_tier, &not_in_tier),
    ];
    for (what, event, undo) in kinds {
        undo();
        let (began, mut got_in) = (Instant::now(), false);
        while !got_in && began.elapsed() < PATIENCE {
            got_in = others_get_in(&feed, event);
            undo();
        }
        assert!(got_in, "{what}");
    }
}

#[test]
fn the_rest_of_an_event_is_gone_with_its_instance() {
    let (feed, hashes) = (feed(256 << 20), engine(20_000));
    let by_name = |source| feed.named_in_group(source, Tier::Gpu, WINDOW.id, &hashes);
    let with_tokens = |source| store_in_window(&feed, source, &hashes);
    let removed = |source| feed.removed_from_group(source, Tier::Gpu, WINDOW.id, &hashes);
    let in_tier = |source| feed.named_in(source, Tier::Cpu, &hashes);
    let kinds: [(&str, &dyn Fn(Source) -> Applied); 4] = [
        ("named_in_group", &by_name),
        ("stored_in_group", &with_tokens),
        ("removed_from_group", &removed),
        ("named_in", &in_tier),
    ];
    let mut cuts = 0;
    for (what, event) in kinds {
        // The instance leaves sooner or later during the event, or before it.
        let cut = |wait: u64| {
            let source = feed.source("a", 0).unwrap();
            assert_eq!(store(&feed, source, &hashes).done, hashes.len());
            store_in_window(&feed, source, if what == "removed_from_group" { &hashes } else { &hashes[..1] });
            let begun = Barrier::new(2);
            let applied = std::thread::scope(|scope| {
                scope.spawn(|| {
                    begun.wait();
                    std::thread::sleep(Duration::from_micros(200 * wait));
                    feed.remove_instance("a").unwrap();
                });
                begun.wait();
                event(source)
            });
            feed.router().lock().add_instance("a", Role::Both, None).unwrap();
            let unknown = (applied.unknown_name, applied.unknown_parent, applied.unknown_removed);
            assert_eq!(unknown, (0, 0, 0), "{what}: {applied:?}");
            applied.done > 0 && applied.gone > 0
        };
        cuts += usize::from((0..200).any(|at| cut(at % 50)));
    }
    // A busy machine may run each event of a kind at once.
    assert!(cuts > 0, "no instance has left during an event");
}
