//! KV events while others change the same data: key schemes.
use lmetric_core::Registry;
use lmetric_core::fleet::Role;
use lmetric_core::kv::groups::Group;
use lmetric_core::kv::keys::Keys;
use lmetric_core::kv::tier::Tier;
use lmetric_core::router::feed::{Applied, KvFeed, Means, Source, Stored};
use lmetric_core::router::{IndexFeed, Router, RouterConfig, SharedRouter};

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

fn store_in_window(feed: &KvFeed, source: Source, hashes: &[u64]) -> Applied {
    stored(feed, hashes, |stored| {
        feed.stored_in_group(source, (Tier::Gpu, WINDOW), stored, true, &mut Vec::new())
    })
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
