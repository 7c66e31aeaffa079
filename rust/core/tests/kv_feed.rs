//! KV events applied to a router's index: names, copies, ranks, reports, bounds.
use lmetric_core::Registry;
use lmetric_core::feed::{Applied, KvFeed, Means, Source, Stored};
use lmetric_core::fleet::Role;
use lmetric_core::kv::hash::{Domain, hash_tokens};
use lmetric_core::kv::keys::Keys;
use lmetric_core::plan::{Event, Usage};
use lmetric_core::request::{Allowed, Request};
use lmetric_core::router::{IndexFeed, Router, RouterConfig, SharedRouter};
use proptest::prelude::*;
use std::collections::HashMap;

const BLOCK: usize = 16;

struct Bed {
    feed: KvFeed,
    a: Source,
    b: Source,
}

/// An engine's hash of block `n` of the prompt `prompt`.
fn engine(prompt: u64, n: u64) -> u64 {
    (prompt * 1_000_003 + n + 1).wrapping_mul(0x2545_f491_4f6c_dd1d)
}

fn tokens(prompt: u64, blocks: std::ops::Range<u64>) -> Vec<u32> {
    blocks.flat_map(|b| (0..BLOCK as u64).map(move |t| (prompt * 77 + b * 31 + t) as u32)).collect()
}

fn keys(block_size: usize) -> Keys {
    Keys::new(&[Some("model".into())], block_size, 256).unwrap()
}

impl Bed {
    fn new(index_bytes: usize) -> Bed {
        Bed::with(index_bytes, IndexFeed::Exact)
    }

    fn with(index_bytes: usize, index_feed: IndexFeed) -> Bed {
        let config = RouterConfig { index_bytes, index_feed, ..RouterConfig::default() };
        let mut router = Router::new(Registry::CORE.policy("lmetric", &[]).unwrap(), config).unwrap();
        router.add_instance("a", Role::Both, None).unwrap();
        router.add_instance("b", Role::Both, None).unwrap();
        let feed =
            KvFeed::new(SharedRouter::new(router), keys(BLOCK), index_bytes, index_feed == IndexFeed::Exact);
        let (a, b) = (feed.source("a", 0).unwrap(), feed.source("b", 0).unwrap());
        Bed { feed, a, b }
    }

    fn domain(&self) -> Domain {
        self.feed.keys().tokens
    }

    fn say(&self, source: Source, prompt: u64, blocks: std::ops::Range<u64>, means: Means) -> Applied {
        let hashes: Vec<u64> = blocks.clone().map(|b| engine(prompt, b)).collect();
        self.feed.stored(
            source,
            &Stored {
                parent: blocks.start.checked_sub(1).map(|b| engine(prompt, b)),
                engine_hashes: &hashes,
                token_ids: &tokens(prompt, blocks),
                domain: self.domain(),
                narrowing: &[],
                means,
            },
        )
    }

    fn store(&self, source: Source, prompt: u64, blocks: std::ops::Range<u64>) -> usize {
        self.say(source, prompt, blocks, Means::NewCopy).done
    }

    fn remove(&self, source: Source, prompt: u64, block: u64) -> Applied {
        self.feed.removed(source, &[engine(prompt, block)])
    }

    /// Returns the number of leading blocks of the prompt on each instance.
    fn hits(&self, prompt: u64, blocks: u64) -> (u32, u32) {
        self.hits_in(self.domain(), &tokens(prompt, 0..blocks))
    }

    fn hits_in(&self, domain: Domain, tokens: &[u32]) -> (u32, u32) {
        let mut chain = Vec::new();
        hash_tokens(domain, self.feed.keys().block_size, tokens, &mut chain);
        let mut hits = [0; 2];
        self.feed.router().lock().caches().read().gpu().match_prefix(&chain, &mut hits);
        (hits[0], hits[1])
    }

    fn names(&self) -> usize {
        self.feed.names().0
    }

    /// The engine of instance `a` computes a prompt, and its first token comes at `now`.
    fn computes(&self, prompt: u64, blocks: u64, now: f64) {
        let (mut chain, tokens) = (Vec::new(), tokens(prompt, 0..blocks));
        hash_tokens(self.domain(), BLOCK, &tokens, &mut chain);
        let on_a: Allowed = [Box::from("a")].into_iter().collect();
        let request = Request {
            chain: &chain,
            prompt_tokens: tokens.len() as u32,
            tokens_per_block: BLOCK as f64,
            instances: Some(&on_a),
            ..Request::default()
        };
        let mut router = self.feed.router().lock();
        let ticket = router.route(&request, now).unwrap().ticket;
        for event in [Event::Sent, Event::FirstToken, Event::Ended(Usage::default())] {
            router.advance(ticket, event, now).unwrap();
        }
    }
}

#[test]
fn events_of_any_hash_meet_the_routers_chains() {
    let bed = Bed::new(1 << 22);
    assert_eq!(bed.store(bed.a, 1, 0..4), 4);
    assert_eq!(bed.store(bed.a, 1, 4..8), 4);
    assert_eq!(bed.store(bed.b, 1, 0..2), 2);
    assert_eq!(bed.hits(1, 10), (8, 2));
    assert_eq!(bed.remove(bed.a, 1, 5), Applied { done: 1, ..Applied::default() });
    assert_eq!(bed.hits(1, 10), (5, 2));
    assert_eq!(bed.store(bed.a, 1, 5..6), 1);
    assert_eq!(bed.hits(1, 10), (8, 2));
    bed.feed.cleared(bed.a);
    assert_eq!(bed.hits(1, 10), (0, 2));
    assert_eq!(bed.names(), 2);
    let orphans = bed.say(bed.a, 1, 4..8, Means::NewCopy);
    assert_eq!(orphans, Applied { unknown_parent: 4, ..Applied::default() }, "the parent was cleared, too");
    // More blocks than one lock of the router covers.
    assert_eq!(bed.store(bed.a, 7, 0..300), 300);
    assert_eq!(bed.store(bed.a, 7, 300..500), 200);
    assert_eq!(bed.hits(7, 500), (500, 0));
}

/// Blocks of a prompt that gave a token are there, before the engine reports them and as often as
/// it reports them then.
#[test]
fn computed_prompts_are_expected_until_events_report_them() {
    let bed = Bed::new(1 << 22);
    bed.store(bed.a, 1, 0..4);
    bed.computes(1, 40, 10.0);
    assert_eq!(bed.hits(1, 40), (40, 0));
    assert_eq!(bed.store(bed.a, 1, 4..30), 26);
    bed.computes(1, 40, 12.0);
    assert_eq!(bed.hits(1, 40), (40, 0), "2 s are not over");
    bed.computes(2, 4, 12.5);
    assert_eq!(bed.hits(1, 40), (30, 0), "never reported");
    for block in (10..30).rev() {
        assert_eq!(bed.remove(bed.a, 1, block).done, 1);
    }
    assert_eq!(bed.hits(1, 40), (10, 0), "one copy was counted");
    assert_eq!(bed.hits(2, 4), (0, 0), "the engine may not report prompts");
    bed.store(bed.a, 2, 0..4);
    bed.computes(3, 4, 14.6);
    assert_eq!(bed.hits(3, 4), (4, 0), "it does");
    bed.feed.cleared(bed.a);
    assert_eq!(bed.hits(3, 4), (0, 0));
}

#[test]
fn what_a_removed_instance_computed_is_not_expected_of_the_next_one() {
    let bed = Bed::new(1 << 22);
    bed.computes(1, 20, 10.0);
    bed.feed.remove_instance("a").unwrap();
    bed.feed.router().lock().add_instance("a", Role::Both, None).unwrap();
    assert_eq!(bed.hits(1, 20), (0, 0));
    bed.store(bed.feed.source("a", 0).unwrap(), 1, 0..20);
    bed.computes(2, 20, 13.0);
    assert_eq!((bed.hits(1, 20), bed.hits(2, 20)), ((20, 0), (20, 0)));
    // Predictions of prompts are all that the index of such an instance has.
    let approximate = Bed::with(1 << 22, IndexFeed::Approximate);
    approximate.computes(1, 20, 10.0);
    approximate.computes(2, 20, 13.0);
    assert_eq!(approximate.hits(1, 20), (20, 0));
}

#[test]
fn a_copy_removed_is_not_all_copies_removed() {
    let bed = Bed::new(1 << 22);
    bed.store(bed.a, 1, 0..3);
    bed.store(bed.a, 1, 0..3);
    bed.remove(bed.a, 1, 1);
    assert_eq!(bed.hits(1, 3).0, 3);
    bed.remove(bed.a, 1, 1);
    assert_eq!(bed.hits(1, 3).0, 1);
    assert_eq!(bed.remove(bed.a, 1, 1).unknown_removed, 1, "there is none left");
}

#[test]
fn a_report_repeated_changes_nothing() {
    let bed = Bed::new(1 << 22);
    bed.store(bed.a, 1, 0..2);
    bed.store(bed.a, 1, 1..2); // a second copy of the second block
    for _ in 0..3 {
        assert_eq!(bed.say(bed.a, 1, 0..4, Means::Report).done, 4);
        assert_eq!((bed.hits(1, 4).0, bed.names()), (4, 5));
    }
    // New blocks of the report have one copy; known blocks keep their number of copies.
    for (block, left) in [(3, 3), (1, 3), (1, 1), (0, 0)] {
        assert_eq!(bed.remove(bed.a, 1, block).done, 1);
        assert_eq!(bed.hits(1, 4).0, left, "without a copy of block {block}");
    }
}

#[test]
fn a_block_is_held_where_one_rank_holds_it() {
    let bed = Bed::new(1 << 22);
    let second = Source { rank: 3, ..bed.a };
    bed.store(bed.a, 1, 0..4);
    assert_eq!(bed.say(second, 1, 2..4, Means::NewCopy).unknown_parent, 2, "each rank has its own blocks");
    bed.store(second, 1, 0..6);
    bed.store(bed.a, 2, 0..2);
    assert_eq!((bed.hits(1, 6).0, bed.hits(2, 2).0), (6, 2));
    bed.remove(bed.a, 1, 1);
    assert_eq!(bed.hits(1, 6).0, 6);
    bed.say(second, 1, 0..6, Means::Report);
    bed.feed.cleared(second);
    assert_eq!((bed.hits(1, 6).0, bed.hits(2, 2).0), (1, 2), "the other rank's copy was the last of block 1");
    assert_eq!(bed.names(), 3 + 2);
    bed.store(second, 1, 0..6);
    let epoch = bed.feed.epoch_of(second);
    bed.feed.forget("a").unwrap();
    assert_eq!((bed.hits(1, 6).0, bed.hits(2, 2).0, bed.names()), (0, 0, 0));
    assert!(bed.feed.epoch_of(second) > epoch, "its engine must send its blocks again");
}

#[test]
fn what_a_block_is_besides_its_tokens_keeps_it_apart() {
    let bed = Bed::new(1 << 22);
    let say = |first: u64, narrowing: &[u64], domain| {
        let hashes: Vec<u64> = (first..first + 4).map(|b| engine(9, b)).collect();
        let (parent, token_ids) = (None, &tokens(1, 0..4)[..]);
        let stored =
            Stored { parent, engine_hashes: &hashes, token_ids, domain, narrowing, means: Means::NewCopy };
        assert_eq!(bed.feed.stored(bed.a, &stored).done, 4);
    };
    say(0, &[0, 0, 5, 0], bed.domain());
    assert_eq!(bed.hits(1, 4).0, 2, "the picture is in the third block");
    say(10, &[], bed.domain().of_request(Some("adapter"), Some("salt")));
    let salted = bed.domain().of_request(Some("adapter"), Some("salt"));
    assert_eq!(bed.hits(1, 4).0, 2);
    assert_eq!(bed.hits_in(salted, &tokens(1, 0..4)).0, 4);
    // Later blocks need no salt in their domain.
    let stored = Stored {
        parent: Some(engine(9, 13)),
        engine_hashes: &[engine(9, 14)],
        token_ids: &tokens(1, 4..5),
        domain: bed.domain(),
        narrowing: &[],
        means: Means::NewCopy,
    };
    assert_eq!(bed.feed.stored(bed.a, &stored).done, 1);
    assert_eq!(bed.hits_in(salted, &tokens(1, 0..5)).0, 5);
    say(20, &[7, 0, 0, 0], bed.domain());
    assert_eq!(bed.hits(1, 4).0, 2, "no block of a prompt that begins with a picture");
}

#[test]
fn what_cannot_be_placed_is_counted() {
    let bed = Bed::new(1 << 22);
    let one = Stored {
        parent: None,
        engine_hashes: &[engine(1, 0), engine(1, 1)],
        token_ids: &tokens(1, 0..1),
        domain: bed.domain(),
        narrowing: &[],
        means: Means::NewCopy,
    };
    assert_eq!(bed.feed.stored(bed.a, &one), Applied { done: 1, unplaced: 1, ..Applied::default() });
    assert_eq!(bed.feed.stored(bed.a, &Stored { token_ids: &[], ..one }).unplaced, 2);
    assert_eq!(bed.remove(bed.b, 1, 0).unknown_removed, 1);

    // Events of an instance that was removed before they arrived.
    bed.feed.remove_instance("b").unwrap();
    assert_eq!(bed.say(bed.b, 1, 0..3, Means::NewCopy), Applied { gone: 3, ..Applied::default() });
    assert_eq!(bed.remove(bed.b, 1, 0), Applied { gone: 1, ..Applied::default() });
    bed.feed.router().lock().add_instance("c", Role::Both, None).unwrap();
    assert_eq!(bed.say(bed.b, 1, 0..3, Means::NewCopy).gone, 3, "its slot has a new instance");
    bed.feed.cleared(bed.b);
    assert!(bed.feed.source("b", 0).is_err() && bed.feed.forget("b").is_err());

    // An instance whose index entries do not come from events.
    bed.feed.set_index_feed("a", IndexFeed::Approximate).unwrap();
    assert_eq!(bed.say(bed.a, 2, 0..3, Means::NewCopy), Applied { not_exact: 3, ..Applied::default() });
    assert_eq!((bed.hits(1, 1).0, bed.names()), (1, 0), "event entries stay as approximate entries");
    bed.feed.cleared(bed.a);
    assert_eq!(bed.hits(1, 1).0, 1, "a clear event of its stream is ignored, too");
}

#[test]
fn each_instance_learns_in_its_own_way() {
    let bed = Bed::with(1 << 22, IndexFeed::Approximate);
    let place = |prompt, name: &str| {
        let mut chain = Vec::new();
        hash_tokens(bed.domain(), BLOCK, &tokens(prompt, 0..4), &mut chain);
        let mut router = bed.feed.router().lock();
        for other in ["a", "b"] {
            let id = router.fleet().find(other).unwrap();
            router.fleet_mut().set_healthy(id, other == name).unwrap();
        }
        let request =
            Request { chain: &chain, prompt_tokens: 64, tokens_per_block: 16.0, ..Request::default() };
        let decision = router.route(&request, 1.0).unwrap();
        router.advance(decision.ticket, lmetric_core::plan::Event::Sent, 1.0).unwrap();
    };
    place(1, "a");
    place(1, "b");
    assert_eq!(bed.hits(1, 4), (4, 4));
    let epochs = || (bed.feed.epoch(), bed.feed.epoch_of(bed.a), bed.feed.epoch_of(bed.b));
    let before = epochs();
    bed.feed.set_index_feed("a", IndexFeed::Exact).unwrap();
    assert!(epochs().0 > before.0 && epochs().1 > before.1 && epochs().2 == before.2);
    bed.feed.set_index_feed("a", IndexFeed::Exact).unwrap();
    assert_eq!(epochs().2, before.2, "nothing changed for the other");
    assert_eq!(bed.hits(1, 4), (0, 4), "approximate entries are dropped");
    bed.store(bed.a, 3, 0..2);
    place(2, "a");
    place(2, "b");
    assert_eq!((bed.hits(2, 4), bed.hits(3, 2)), ((0, 4), (2, 0)));
    let router = bed.feed.router().lock();
    assert!(
        router.caches().read().gpu().byte_bound() <= (1 << 22) * 2 / 3 + 1,
        "memory for names is reserved"
    );
}

#[test]
fn an_engines_capacity_bounds_what_is_known_of_it() {
    let bed = Bed::new(1 << 22);
    bed.store(bed.a, 1, 0..200);
    bed.feed.set_cache_blocks("a", Some(150)).unwrap();
    assert_eq!(bed.hits(1, 200).0, 150);
    // An engine that does not report its evictions.
    for prompt in 2..10 {
        bed.store(bed.a, prompt, 0..100);
        assert_eq!(bed.hits(prompt, 100).0, 100);
        assert!(bed.feed.router().lock().caches().read().gpu().blocks(bed.a.instance.slot()) <= 150);
    }
    bed.feed.set_cache_blocks("a", None).unwrap();
    bed.store(bed.a, 20, 0..300);
    assert_eq!(bed.hits(20, 300).0, 300);
    assert!(bed.feed.set_cache_blocks("z", None).is_err());
}

#[test]
fn another_block_size_begins_anew() {
    let bed = Bed::new(1 << 22);
    bed.store(bed.a, 1, 0..4);
    let epoch = bed.feed.epoch_of(bed.b);
    bed.feed.set_keys(keys(BLOCK));
    assert_eq!((bed.hits(1, 4).0, bed.feed.epoch_of(bed.b)), (4, epoch));
    bed.feed.set_keys(keys(32));
    assert_eq!((bed.names(), bed.feed.epoch_of(bed.b) > epoch), (0, true));
    assert_eq!(bed.feed.router().lock().caches().read().gpu().pairs(), 0);
    let stored = Stored {
        parent: None,
        engine_hashes: &[1, 2],
        token_ids: &tokens(1, 0..4),
        domain: bed.domain(),
        narrowing: &[],
        means: Means::NewCopy,
    };
    assert_eq!(bed.feed.stored(bed.a, &stored).done, 2);
    assert_eq!(bed.hits(1, 4).0, 2);
    assert!(Keys::new(&[], 0, 256).is_err() && Keys::new(&[], 16, 0).is_err());
}

#[test]
fn the_bound_holds_and_the_newest_stays() {
    let bed = Bed::new(3 << 20);
    for prompt in 0..2000 {
        assert_eq!(bed.store(bed.a, prompt, 0..40), 40);
        assert!(bed.feed.names().1 <= 1 << 20);
        assert_eq!(bed.hits(prompt, 40).0, 40);
    }
    let router = bed.feed.router().lock();
    assert!(router.caches().read().gpu().evicted_blocks() > 0);
    assert!(
        router.caches().read().gpu().blocks(bed.a.instance.slot()) > 20_000,
        "{:?}",
        router.caches().read().gpu()
    );
}

#[test]
fn a_name_costs_at_most_25_bytes() {
    let bed = Bed::new(1 << 26);
    let mut worst: f64 = 0.0;
    for prompt in 0..3000 {
        bed.store(bed.a, prompt, 0..40);
        if prompt > 100 {
            let (names, bytes) = bed.feed.names();
            worst = worst.max(bytes as f64 / names as f64);
        }
    }
    assert!(worst <= 25.0, "{worst}");
}

proptest! {
    /// Compares the ranks of one instance with a count of copies each, over stores, removals and
    /// clears in any order.
    #[test]
    fn the_index_holds_the_union_of_the_ranks(
        steps in prop::collection::vec((0u8..5, 0u32..3, 0u64..3, 0u64..6, 1u64..5), 1..60)
    ) {
        let bed = Bed::new(1 << 22);
        let mut copies: HashMap<(u32, u64, u64), u32> = HashMap::new();
        let other = bed.store(bed.b, 0, 0..6);
        prop_assert_eq!(other, 6);
        for (kind, rank, prompt, first, length) in steps {
            let source = Source { rank, ..bed.a };
            match kind {
                0..=2 => {
                    let known = first == 0 || copies.contains_key(&(rank, prompt, first - 1));
                    let means = if kind == 2 { Means::Report } else { Means::NewCopy };
                    let applied = bed.say(source, prompt, first..first + length, means);
                    prop_assert_eq!(applied.done as u64, if known { length } else { 0 });
                    for block in (first..first + length).filter(|_| known) {
                        let count = copies.entry((rank, prompt, block)).or_default();
                        *count = if kind == 2 { (*count).max(1) } else { *count + 1 };
                    }
                }
                3 => {
                    let count = copies.remove(&(rank, prompt, first)).unwrap_or_default();
                    prop_assert_eq!(bed.remove(source, prompt, first).done, usize::from(count > 0));
                    if count > 1 {
                        copies.insert((rank, prompt, first), count - 1);
                    }
                }
                _ => {
                    bed.feed.cleared(source);
                    copies.retain(|(r, _, _), _| *r != rank);
                }
            }
            prop_assert_eq!(bed.names() as u32, copies.values().sum::<u32>() + 6);
            for prompt in 0..3 {
                let holds = |block: &u64| (0..3).any(|rank| copies.contains_key(&(rank, prompt, *block)));
                let depth = (0..10).take_while(holds).count() as u32;
                prop_assert_eq!(bed.hits(prompt, 10), (depth, if prompt == 0 { 6 } else { 0 }));
            }
        }
    }
}
