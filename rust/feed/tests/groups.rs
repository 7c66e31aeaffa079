//! Hybrid models: predicted hits equal those of vLLM's own KV cache manager, whose events and hits
//! `tests/real/record_groups.py` records. Another process may have other groups.
mod publisher;

use lmetric_core::Registry;
use lmetric_core::feed::KvFeed;
use lmetric_core::fleet::Role;
use lmetric_core::kv::hash::hash_tokens;
use lmetric_core::kv::keys::Keys;
use lmetric_core::request::Request;
use lmetric_core::router::{IndexFeed, Router, RouterConfig, SharedRouter};
use lmetric_feed::apply::Applier;
use lmetric_feed::decode::Reader;
use lmetric_feed::status::Status;
use lmetric_feed::{EventFeed, Subscription};
use publisher::Publisher;
use rmp::encode as pack;
use std::net::Shutdown;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

struct Bed {
    feed: Arc<KvFeed>,
    applier: Applier,
    block_size: usize,
}

impl Bed {
    fn new(block_size: usize) -> Bed {
        let feed = kv_feed(block_size);
        let applier = Applier::new(feed.clone(), feed.source("e", 0).unwrap());
        Bed { feed, applier, block_size }
    }

    fn hit(&self, prompt: &[u32]) -> u64 {
        hit(&self.feed, self.block_size, prompt)
    }
}

fn kv_feed(block_size: usize) -> Arc<KvFeed> {
    let bytes = 16 << 20;
    let config = RouterConfig { index_feed: IndexFeed::Exact, index_bytes: bytes, ..RouterConfig::default() };
    let mut router = Router::new(Registry::CORE.policy("lmetric", &[]).unwrap(), config).unwrap();
    router.add_instance("e", Role::Both, None).unwrap();
    let keys = Keys::new(&[], block_size, 256).unwrap();
    Arc::new(KvFeed::new(SharedRouter::new(router), keys, bytes, true))
}

fn hit(feed: &KvFeed, block_size: usize, prompt: &[u32]) -> u64 {
    let mut chain = Vec::new();
    hash_tokens(feed.keys().tokens, block_size, prompt, &mut chain);
    let request = Request {
        chain: &chain,
        prompt_tokens: prompt.len() as u32,
        tokens_per_block: block_size as f64,
        ..Request::default()
    };
    let mut router = feed.router().lock();
    let decision = router.route(&request, 0.0).unwrap();
    router.drop_ticket(decision.ticket);
    decision.predicted_hit_tokens.into()
}

/// Reads an array of bytes, which `Reader` returns raw with their head.
fn binary<'a>(reader: &mut Reader<'a>) -> &'a [u8] {
    let raw = reader.raw().unwrap();
    let head = match raw[0] {
        0xc4 => 2,
        0xc5 => 3,
        0xc6 => 5,
        other => panic!("{other:#x} begins no bytes"),
    };
    &raw[head..]
}

#[test]
fn predicted_hits_of_hybrid_models_equal_vllm() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/samples/vllm-0.32.0-groups.msgpack");
    let sample = std::fs::read(std::env::var("LMETRIC_GROUPS").unwrap_or(path.into())).unwrap();
    let mut reader = Reader::new(&sample);
    for _ in 0..reader.array().unwrap() {
        assert_eq!(reader.array().unwrap(), 3);
        let (name, size) = (reader.text().unwrap(), reader.unsigned().unwrap());
        let mut bed = Bed::new(size as usize);
        let (mut total, mut cut) = (0, 0);
        for step in 0..reader.array().unwrap() {
            assert_eq!(reader.array().unwrap(), 3);
            let mut prompt = Vec::new();
            reader.tokens(&mut prompt).unwrap();
            let hit = reader.unsigned().unwrap();
            assert_eq!(bed.hit(&prompt), hit, "{name}, step {step}, {} tokens", prompt.len());
            (total, cut) = (total + hit, cut + u64::from(hit < prompt.len() as u64 / size * size));
            bed.applier.apply(binary(&mut reader));
        }
        assert!(total > 0 && cut > 0, "{name}: no hits, or nothing but full hits");
        let tally = bed.applier.tally();
        assert_eq!(
            (&tally.skipped, tally.unknown_parent, tally.unknown_removed),
            (&[].into(), 0, 0),
            "{name}"
        );
        assert!(tally.blocks_removed > 0 || tally.group_blocks > 0, "{name}: no block was evicted");
    }
}

const BLOCK: u64 = 16;
const FULL: (&str, Option<u64>) = ("full_attention", None);
const WINDOW: (&str, Option<u64>) = ("sliding_window", Some(2 * BLOCK));

/// An engine whose events come over a connection, without replays.
struct Live {
    kv: Arc<KvFeed>,
    feed: EventFeed,
    /// The router's clock, in seconds.
    clock: Arc<AtomicU64>,
    publisher: Publisher,
    next: u64,
    sent: u64,
}

impl Live {
    fn new() -> Live {
        let (kv, clock) = (kv_feed(BLOCK as usize), Arc::new(AtomicU64::new(0)));
        let now = clock.clone();
        let feed = EventFeed::start(kv.clone(), move || now.load(Ordering::Relaxed) as f64).unwrap();
        let mut live = Live { kv, feed, clock, publisher: Publisher::new(), next: 0, sent: 0 };
        live.subscribe();
        live
    }

    fn subscribe(&mut self) {
        let endpoint = self.publisher.endpoint();
        self.feed.subscribe("e", Subscription { endpoint, ..Subscription::default() }).unwrap();
        self.publisher.accept();
        self.until(|status| status.connected);
        self.sent = 0;
    }

    fn until(&self, what: impl Fn(&Status) -> bool) -> Status {
        loop {
            let status = self.feed.status("e").remove(0);
            if what(&status) {
                return status;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Publishes a batch of these blocks in each of these groups, whose numbers count from 0.
    fn publish(&mut self, blocks: std::ops::Range<u64>, groups: &[(&str, Option<u64>)]) -> Status {
        let mut batch = Vec::new();
        pack::write_array_len(&mut batch, 2).unwrap();
        pack::write_f64(&mut batch, 1.0).unwrap();
        pack::write_array_len(&mut batch, groups.len() as u32).unwrap();
        for (group, kind) in groups.iter().enumerate() {
            stored(&mut batch, group as u64, *kind, blocks.clone());
        }
        self.publisher.send(&[b"", &self.next.to_be_bytes(), &batch]);
        self.next += 1;
        self.sent += groups.len() as u64;
        self.until(|status| status.tally.events == self.sent)
    }

    /// Returns the blocks that a prompt of these blocks and a token more hits.
    fn hit(&self, blocks: u64) -> u64 {
        let prompt: Vec<u32> = (0..=blocks * BLOCK).map(|at| at as u32).collect();
        hit(&self.kv, BLOCK as usize, &prompt) / BLOCK
    }
}

/// Appends an event of consecutive blocks of one prompt.
fn stored(out: &mut Vec<u8>, group: u64, (kind, window): (&str, Option<u64>), blocks: std::ops::Range<u64>) {
    let number = |out: &mut Vec<u8>, value: u64| {
        pack::write_uint(out, value).unwrap();
    };
    let optional = |out: &mut Vec<u8>, value: Option<u64>| match value {
        Some(value) => number(out, value),
        None => pack::write_nil(out).unwrap(),
    };
    let key = |out: &mut Vec<u8>, name: &str| pack::write_str(out, name).unwrap();
    pack::write_map_len(out, 8).unwrap();
    key(out, "type");
    key(out, "BlockStored");
    key(out, "block_hashes");
    pack::write_array_len(out, (blocks.end - blocks.start) as u32).unwrap();
    blocks.clone().for_each(|block| number(out, block + 1));
    key(out, "parent_block_hash");
    optional(out, Some(blocks.start).filter(|start| *start > 0));
    key(out, "token_ids");
    pack::write_array_len(out, ((blocks.end - blocks.start) * BLOCK) as u32).unwrap();
    (blocks.start * BLOCK..blocks.end * BLOCK).for_each(|token| number(out, token));
    key(out, "block_size");
    number(out, BLOCK);
    key(out, "group_idx");
    number(out, group);
    key(out, "kv_cache_spec_kind");
    key(out, kind);
    key(out, "kv_cache_spec_sliding_window");
    optional(out, window);
}

/// A process may take the place of another one in ways that show it, and in ways that do not.
#[test]
fn the_groups_of_another_process_count_alone() {
    let starts_again = |live: &mut Live| live.next = 0;
    let connects_again = |live: &mut Live| {
        live.publisher.accepted().shutdown(Shutdown::Both).unwrap();
        live.until(|status| !status.connected);
        live.clock.fetch_add(10, Ordering::Relaxed);
        live.publisher.accept();
        live.until(|status| status.connected);
        live.next = 0;
    };
    let is_subscribed_again = |live: &mut Live| {
        assert!(live.feed.unsubscribe("e").unwrap());
        live.subscribe();
        live.next = 0;
    };
    let ways: [fn(&mut Live); 3] = [starts_again, connects_again, is_subscribed_again];
    for (way, restarts) in ways.into_iter().enumerate() {
        let mut live = Live::new();
        for number in 0..3 {
            live.publish(number..number + 1, &[FULL, WINDOW]);
        }
        assert_eq!((live.hit(3), live.publish(3..4, &[FULL, WINDOW]).tally.groups), (3, 1), "{way}");

        // It has no window, so a hit needs no block of a window.
        restarts(&mut live);
        let status = live.publish(0..4, &[FULL]);
        assert_eq!((live.hit(4), status.tally.groups, status.tally.skipped), (4, 0, [].into()), "{way}");
        live.publish(4..5, &[FULL]);

        // It has the groups in another order.
        restarts(&mut live);
        let before = live.until(|_| true).tally.blocks_stored;
        let status = live.publish(0..4, &[WINDOW, FULL]);
        assert_eq!((live.hit(4), status.tally.groups, status.tally.skipped), (4, 1, [].into()), "{way}");
        assert_eq!(status.tally.blocks_stored - before, 4, "{way}");
        live.publish(4..5, &[WINDOW, FULL]);

        // A window alone: blocks before it are of no use.
        restarts(&mut live);
        live.publish(0..4, &[FULL, WINDOW]);
        live.publish(4..5, &[FULL]);
        assert_eq!(live.hit(5), 4, "{way}: a hit needs a block of the window");
    }
}
