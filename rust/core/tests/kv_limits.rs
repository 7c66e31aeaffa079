//! Limits of the KV index and its feed, reached late or by engines that are not honest.
use lmetric_core::feed::{Applied, KvFeed, Means, Source, Stored};
use lmetric_core::fleet::Role;
use lmetric_core::kv::groups::{Group, MAX_GROUPS};
use lmetric_core::kv::hash::hash_tokens;
use lmetric_core::kv::keys::Keys;
use lmetric_core::kv::tier::Tier;
use lmetric_core::router::ledger::Report;
use lmetric_core::router::{IndexFeed, Router, RouterConfig, SharedRouter};
use lmetric_core::warm::Fetch;
use lmetric_core::{CoreError, Registry, Slot};
use std::sync::Barrier;

const BLOCK: usize = 16;
const BLOCKS: u64 = 100;

struct Bed {
    feed: KvFeed,
    bytes: usize,
}

fn engine(prompt: u64, block: u64) -> u64 {
    (prompt * 1_000_003 + block + 1).wrapping_mul(0x2545_f491_4f6c_dd1d)
}

fn tokens(prompt: u64) -> Vec<u32> {
    (0..BLOCKS * BLOCK as u64).map(|at| (prompt * 7919 + at) as u32).collect()
}

impl Bed {
    fn new(bytes: usize, index_feed: IndexFeed) -> Bed {
        let config = RouterConfig { index_bytes: bytes, index_feed, ..RouterConfig::default() };
        let mut router = Router::new(Registry::CORE.policy("lmetric", &[]).unwrap(), config).unwrap();
        for name in ["a", "b"] {
            router.add_instance(name, Role::Both, None).unwrap();
        }
        let exact = index_feed == IndexFeed::Exact;
        let keys = Keys::new(&[], BLOCK, 256).unwrap();
        Bed { feed: KvFeed::new(SharedRouter::new(router), keys, bytes, exact), bytes }
    }

    fn source(&self, name: &str) -> Source {
        self.feed.source(name, 0).unwrap()
    }

    fn chain(&self, prompt: u64) -> Vec<u64> {
        let mut chain = Vec::new();
        hash_tokens(self.feed.keys().tokens, BLOCK, &tokens(prompt), &mut chain);
        chain
    }

    fn store(&self, name: &str, tier: Tier, prompt: u64) -> Applied {
        let hashes: Vec<u64> = (0..BLOCKS).map(|block| engine(prompt, block)).collect();
        let stored = Stored {
            parent: None,
            engine_hashes: &hashes,
            token_ids: &tokens(prompt),
            domain: self.feed.keys().tokens,
            narrowing: &[],
            means: Means::NewCopy,
        };
        self.feed.stored_in(self.source(name), tier, &stored)
    }

    /// Blocks of the prompt's front that the tiers of an instance hold.
    fn held(&self, tier: Tier, prompt: u64, name: &str) -> u32 {
        let mut hits = [0; 2];
        let router = self.feed.router().lock();
        router.caches().read().index(tier).unwrap().match_prefix(&self.chain(prompt), &mut hits);
        hits[self.source_index(name)]
    }

    fn source_index(&self, name: &str) -> usize {
        usize::from(name == "b")
    }

    fn index_bytes(&self) -> (usize, usize) {
        let router = self.feed.router().lock();
        let caches = router.caches().read();
        (caches.gpu().bytes(), caches.gpu().byte_bound())
    }
}

/// rust 7.11: the first instance with events emptied the index of all other instances.
#[test]
fn the_first_instance_with_events_leaves_the_others_their_recent_blocks() {
    let bed = Bed::new(8 << 20, IndexFeed::Approximate);
    let prompts = 4000;
    for prompt in 0..prompts {
        bed.feed.router().lock().caches().write().gpu_mut().record(Slot(0), &bed.chain(prompt));
    }
    let (bytes, bound) = bed.index_bytes();
    assert!(bytes > bed.bytes * 2 / 3 + (1 << 20) && bound == bed.bytes, "{bytes} of {bound}");
    bed.feed.set_index_feed("b", IndexFeed::Exact).unwrap();
    assert_eq!(bed.held(Tier::Gpu, prompts - 1, "a"), 100, "before the first event, nothing changes");
    assert_eq!(bed.store("b", Tier::Gpu, prompts), Applied { done: 100, ..Applied::default() });
    let (bytes, bound) = bed.index_bytes();
    assert!(bytes <= bound && bound <= bed.bytes * 2 / 3 + 1, "{bytes} of {bound}");
    assert_eq!(bed.held(Tier::Gpu, prompts, "b"), 100);
    let kept = (0..prompts).filter(|prompt| bed.held(Tier::Gpu, *prompt, "a") == 100).count() as u64;
    assert!(kept > 700, "{kept}");
    assert!((prompts - 700..prompts).all(|prompt| bed.held(Tier::Gpu, prompt, "a") == 100));
}

/// rust 7.10: after the index had passed its half, tiers and groups were never counted.
#[test]
fn tiers_and_groups_open_in_a_router_that_has_been_busy() {
    for group in [false, true] {
        let bed = Bed::new(16 << 20, IndexFeed::Exact);
        let prompts = 2000; // below the bound of the names' table, whose secret moves it a little
        for prompt in 0..prompts {
            bed.store("a", Tier::Gpu, prompt);
        }
        // A second copy of the last prompt, which the smaller index must know too.
        bed.store("a", Tier::Gpu, prompts - 1);
        let (bytes, bound) = bed.index_bytes();
        assert!(bytes > bound / 2 + (1 << 20), "{bytes} of {bound}");
        if group {
            let group = Group { id: 1, needed: 1, every: 1 };
            let hashes: Vec<u64> = (0..BLOCKS).map(|block| engine(prompts - 1, block)).collect();
            let stored = Stored {
                parent: None,
                engine_hashes: &hashes,
                token_ids: &[],
                domain: bed.feed.keys().tokens,
                narrowing: &[],
                means: Means::NewCopy,
            };
            let place = (Tier::Gpu, group);
            let applied = bed.feed.stored_in_group(bed.source("a"), place, &stored, true, &mut Vec::new());
            assert_eq!(applied, Applied { done: 100, ..Applied::default() });
        } else {
            assert_eq!(bed.store("a", Tier::Cpu, prompts - 1), Applied { done: 100, ..Applied::default() });
            assert_eq!(bed.held(Tier::Cpu, prompts - 1, "a"), 100);
        }
        let (after, half) = bed.index_bytes();
        assert!(after <= half && half == bound / 2, "{after} of {half}");
        assert!((prompts - 500..prompts).all(|prompt| bed.held(Tier::Gpu, prompt, "a") == 100));
        let last: Vec<u64> = (0..BLOCKS).rev().map(|block| engine(prompts - 1, block)).collect();
        for held in [100, 0] {
            assert_eq!(bed.feed.removed(bed.source("a"), &last).done, 100);
            assert_eq!(bed.held(Tier::Gpu, prompts - 1, "a"), held, "{group}");
        }
    }
}

/// security F5: equal names of one engine cost each other nothing, and bounded memory.
#[test]
fn copies_of_one_block_are_bounded() {
    let bed = Bed::new(16 << 20, IndexFeed::Exact);
    for _ in 0..1500 {
        assert_eq!(bed.store("a", Tier::Gpu, 1).done, 100);
    }
    // Fewer at the end of a table's segment, where a secret places some names.
    let copies = bed.feed.names().0;
    assert!((16 * BLOCKS as usize..=64 * BLOCKS as usize).contains(&copies), "{copies}");
    assert_eq!(bed.store("a", Tier::Gpu, 2).done, 100);
    assert_eq!((bed.held(Tier::Gpu, 1, "a"), bed.held(Tier::Gpu, 2, "a")), (100, 100));
}

/// security F5: also through the feed's own interface.
#[test]
fn groups_of_an_instance_are_bounded() {
    let bed = Bed::new(16 << 20, IndexFeed::Exact);
    let stored = Stored {
        parent: None,
        engine_hashes: &[1],
        token_ids: &[],
        domain: bed.feed.keys().tokens,
        narrowing: &[],
        means: Means::NewCopy,
    };
    for id in 0..1000 {
        let place = (Tier::Gpu, Group { id, needed: 1, every: 1 });
        let applied = bed.feed.stored_in_group(bed.source("a"), place, &stored, true, &mut Vec::new());
        assert_eq!(applied.unplaced, usize::from(id as usize >= MAX_GROUPS));
    }
    let router = bed.feed.router().lock();
    assert_eq!(router.caches().read().groups().of(Slot(0)).len(), MAX_GROUPS);
}

/// rust 7.3: a fetch that ends after another engine has taken the slot is no block of that engine.
#[test]
fn a_finished_fetch_counts_for_its_own_instance() {
    let bed = Bed::new(16 << 20, IndexFeed::Approximate);
    let chain = bed.chain(1);
    let id = Slot(0);
    let source = bed.source("b").instance;
    let fetch = |target| Fetch { prompt: chain[99], chain: chain.clone(), tokens: 1600, source, target };
    let before = fetch(bed.feed.router().lock().fleet().id_of(id));
    bed.feed.remove_instance("a").unwrap();
    let mut router = bed.feed.router().lock();
    assert_eq!(router.add_instance("c", Role::Both, None).unwrap(), id);
    let after = fetch(router.fleet().id_of(id));
    router.prefix_fetched(&before, 1600);
    assert_eq!(router.caches().read().gpu().blocks(id), 0);
    router.prefix_fetched(&after, 1600);
    assert_eq!(router.caches().read().gpu().blocks(id), 100);
}

/// rust 7.25: pushed load does not change a broken router, and errors keep their kinds.
#[test]
fn pushed_load_is_refused_with_its_reason() {
    let bed = Bed::new(16 << 20, IndexFeed::Exact);
    let report =
        |waiting| Report { at: 0.0, waiting: Some(waiting), running: Some(1.0), ..Report::default() };
    bed.feed.report_load("a", report(1.0)).unwrap();
    let refused = |name, waiting| bed.feed.report_load(name, report(waiting)).unwrap_err();
    assert!(matches!(refused("x", 1.0), CoreError::UnknownName { .. }));
    assert!(matches!(refused("a", f64::NAN), CoreError::BadValue { .. }));
    let shared = bed.feed.router().clone();
    let panicked = std::thread::spawn(move || {
        let _router = shared.lock();
        panic!("while it holds the router");
    });
    assert!(panicked.join().is_err());
    assert!(matches!(refused("a", 1.0), CoreError::Broken));
}

/// A crowded index, filled with the first of these prompts: engines were added to a full one.
fn crowded(prompts: u64) -> Bed {
    let bed = Bed::new(24 << 20, IndexFeed::Exact);
    for prompt in 0..prompts {
        // Without names, whose memory is another matter.
        bed.feed.router().lock().caches().write().gpu_mut().record(Slot(0), &bed.chain(prompt));
    }
    assert!(bed.feed.router().lock().caches().read().gpu().evicted_blocks() > 0);
    for i in 0..5000 {
        bed.feed.router().lock().add_instance(&format!("e{i}"), Role::Both, None).unwrap();
    }
    assert!(bed.feed.router().lock().caches().read().gpu().is_crowded());
    bed
}

/// Threads that copy the same part at once would make each other's copies fail.
#[test]
fn one_thread_at_a_time_divides_the_index_anew() {
    const THREADS: usize = 8;
    let bed = crowded(5000);
    let begun = Barrier::new(THREADS);
    let divided = || {
        begun.wait();
        bed.feed.even_out();
        !bed.feed.router().lock().caches().read().gpu().is_crowded()
    };
    let all = std::thread::scope(|scope| {
        let threads = [(); THREADS].map(|()| scope.spawn(divided));
        threads.map(|thread| thread.join().unwrap())
    });
    assert_eq!(all, [true; THREADS]);
}

/// Instances beyond those of a full part of the index get their share of its memory.
#[test]
fn engines_added_to_a_full_index_get_their_share() {
    let mut prompt = 5000; // more than fits
    let bed = crowded(prompt);
    let (late, from) = ("e4999", prompt);
    for _ in 0..100 {
        bed.store(late, Tier::Gpu, prompt);
        prompt += 1;
    }
    let (bytes, bound) = bed.index_bytes();
    assert!(
        bytes <= bound && !bed.feed.router().lock().caches().read().gpu().is_crowded(),
        "{bytes} of {bound}"
    );
    let held = |name, prompts: std::ops::Range<u64>| {
        let id = bed.source(name).instance.slot();
        let held = |prompt: &u64| {
            let router = bed.feed.router().lock();
            bed.chain(*prompt).iter().all(|hash| router.caches().read().gpu().holds(id, *hash))
        };
        prompts.filter(held).count()
    };
    assert_eq!(held(late, from + 1..prompt), 99);
    assert_eq!(held("a", from - 500..from), 500);
}
