//! Events of tiers below the GPU, in the forms that vLLM 0.32 sends.
use lmetric_core::Registry;
use lmetric_core::feed::KvFeed;
use lmetric_core::fleet::Role;
use lmetric_core::kv::hash::hash_tokens;
use lmetric_core::kv::keys::Keys;
use lmetric_core::kv::tier::Tier;
use lmetric_core::request::Request;
use lmetric_core::router::{IndexFeed, Router, RouterConfig, SharedRouter};
use lmetric_feed::apply::Applier;
use rmp::encode as pack;
use std::sync::Arc;

const BLOCK: u64 = 16;

/// The engine's hash of a block: the same in all tiers.
fn hash(block: u64) -> u64 {
    (block + 1).wrapping_mul(0x2545_f491_4f6c_dd1d)
}

fn token(at: u64) -> u64 {
    at * 31 % 1801
}

/// Appends a `BlockStored` event of consecutive blocks. `described`: with tokens, parent and block
/// size; otherwise with hashes alone, as vLLM's connectors send it by default.
fn stored(medium: Option<&str>, blocks: std::ops::Range<u64>, described: bool) -> Vec<u8> {
    let mut out = Vec::new();
    pack::write_map_len(&mut out, 8).unwrap();
    let key = |out: &mut Vec<u8>, name: &str| pack::write_str(out, name).unwrap();
    key(&mut out, "type");
    key(&mut out, "BlockStored");
    key(&mut out, "block_hashes");
    pack::write_array_len(&mut out, (blocks.end - blocks.start) as u32).unwrap();
    blocks.clone().for_each(|block| {
        pack::write_uint(&mut out, hash(block)).unwrap();
    });
    key(&mut out, "parent_block_hash");
    match blocks.start.checked_sub(1).filter(|_| described) {
        Some(parent) => {
            pack::write_uint(&mut out, hash(parent)).unwrap();
        }
        None => pack::write_nil(&mut out).unwrap(),
    }
    let tokens = if described { blocks.start * BLOCK..blocks.end * BLOCK } else { 0..0 };
    key(&mut out, "token_ids");
    pack::write_array_len(&mut out, (tokens.end - tokens.start) as u32).unwrap();
    tokens.for_each(|at| {
        pack::write_uint(&mut out, token(at)).unwrap();
    });
    key(&mut out, "block_size");
    pack::write_uint(&mut out, if described { BLOCK } else { 0 }).unwrap();
    key(&mut out, "lora_id");
    pack::write_nil(&mut out).unwrap();
    with_medium(&mut out, medium);
    key(&mut out, "locality");
    key(&mut out, "REMOTE");
    out
}

fn removed(medium: Option<&str>, blocks: std::ops::Range<u64>) -> Vec<u8> {
    let mut out = Vec::new();
    pack::write_map_len(&mut out, 3).unwrap();
    pack::write_str(&mut out, "type").unwrap();
    pack::write_str(&mut out, "BlockRemoved").unwrap();
    pack::write_str(&mut out, "block_hashes").unwrap();
    pack::write_array_len(&mut out, (blocks.end - blocks.start) as u32).unwrap();
    blocks.for_each(|block| {
        pack::write_uint(&mut out, hash(block)).unwrap();
    });
    with_medium(&mut out, medium);
    out
}

fn cleared() -> Vec<u8> {
    let mut out = Vec::new();
    pack::write_map_len(&mut out, 1).unwrap();
    pack::write_str(&mut out, "type").unwrap();
    pack::write_str(&mut out, "AllBlocksCleared").unwrap();
    out
}

fn with_medium(out: &mut Vec<u8>, medium: Option<&str>) {
    pack::write_str(out, "medium").unwrap();
    match medium {
        Some(medium) => pack::write_str(out, medium).unwrap(),
        None => pack::write_nil(out).unwrap(),
    }
}

struct Bed {
    feed: Arc<KvFeed>,
    applier: Applier,
}

impl Bed {
    fn new() -> Bed {
        let bytes = 16 << 20;
        let config =
            RouterConfig { index_feed: IndexFeed::Exact, index_bytes: bytes, ..RouterConfig::default() };
        let mut router = Router::new(Registry::CORE.policy("lmetric", &[]).unwrap(), config).unwrap();
        router.add_instance("e", Role::Both, None).unwrap();
        let keys = Keys::new(&[], BLOCK as usize, 256).unwrap();
        let feed = Arc::new(KvFeed::new(SharedRouter::new(router), keys, bytes, true));
        let applier = Applier::new(feed.clone(), feed.source("e", 0).unwrap());
        Bed { feed, applier }
    }

    fn batch(&mut self, events: &[Vec<u8>]) {
        let mut batch = Vec::new();
        pack::write_array_len(&mut batch, 3).unwrap();
        pack::write_f64(&mut batch, 1.0).unwrap();
        pack::write_array_len(&mut batch, events.len() as u32).unwrap();
        events.iter().for_each(|event| batch.extend_from_slice(event));
        pack::write_uint(&mut batch, 0).unwrap();
        self.applier.apply(&batch);
    }

    /// Returns the predicted cached tokens of a prompt of 1,000 tokens, and how many of them come
    /// from a lower tier.
    fn hits(&self) -> (u32, u32) {
        let (mut chain, prompt) = (Vec::new(), (0..1000).map(|at| token(at) as u32).collect::<Vec<_>>());
        hash_tokens(self.feed.keys().tokens, BLOCK as usize, &prompt, &mut chain);
        let request = Request {
            chain: &chain,
            prompt_tokens: 1000,
            tokens_per_block: BLOCK as f64,
            ..Request::default()
        };
        let mut router = self.feed.router().lock();
        let decision = router.route(&request, 0.0).unwrap();
        router.drop_ticket(decision.ticket);
        (decision.predicted_hit_tokens, decision.predicted_tier_tokens)
    }

    fn skipped(&self) -> Vec<(&'static str, u64)> {
        self.applier.tally().skipped.iter().map(|(reason, count)| (*reason, *count)).collect()
    }

    fn hints(&self) -> Vec<&'static str> {
        self.applier.tally().hints.iter().copied().collect()
    }
}

/// After the GPU's copies are evicted, 992 of 1,000 tokens come from the CPU tier, as vLLM reports
/// for the same events.
#[test]
fn a_prompt_evicted_from_the_gpu_hits_the_cpu_tier() {
    for described in [false, true] {
        for medium in ["CPU", "cpu", "Cpu", "CPU_PINNED"] {
            let mut bed = Bed::new();
            let mut events = vec![stored(Some("GPU"), 0..62, true)];
            events.extend((0..62).map(|block| stored(Some(medium), block..block + 1, described)));
            bed.batch(&events);
            assert_eq!((bed.hits(), bed.hints()), ((992, 0), vec!["CPU"]));
            let evicted: Vec<_> = (0..62).rev().map(|b| removed(Some("GPU"), b..b + 1)).collect();
            bed.batch(&evicted);
            assert_eq!(bed.hits(), (992, 992));
            bed.batch(&[stored(Some("GPU"), 0..20, true)]);
            assert_eq!(bed.hits(), (992, 992 - 320));
            bed.batch(&[removed(Some(medium), 40..62)]);
            assert_eq!((bed.hits(), bed.hints()), ((640, 320), vec![]));
            let tally = bed.applier.tally();
            assert_eq!((tally.blocks_stored, tally.blocks_removed), (82, 62), "blocks of the GPU");
            assert_eq!(tally.tiers.iter().collect::<Vec<_>>(), [(&"CPU".to_string(), &40)]);
            assert_eq!((bed.skipped(), tally.unknown_parent, tally.unknown_removed), (vec![], 0, 0));
        }
    }
}

#[test]
fn a_block_described_by_its_tokens_needs_no_gpu_event() {
    let mut bed = Bed::new();
    bed.batch(&[stored(Some("CPU"), 0..30, true), stored(Some("CPU"), 30..62, true)]);
    assert_eq!(bed.hits(), (992, 992));
    bed.batch(&[cleared()]);
    assert_eq!((bed.hits(), bed.hints()), ((0, 0), vec![]), "the engine may have cleared all tiers");
}

/// vLLM reports the blocks of a tier in any order: each has its own parent.
#[test]
fn blocks_of_a_tier_come_in_any_order() {
    let orders: [Vec<u64>; 3] =
        [(0..62).rev().collect(), (0..62).map(|at| at * 23 % 62).collect(), (0..62).collect()];
    for (order, described) in orders.iter().flat_map(|order| [(order, false), (order, true)]) {
        let blocks = || order.iter().map(|block| stored(Some("CPU"), *block..block + 1, described));
        let mut bed = Bed::new();
        bed.batch(&[stored(Some("GPU"), 0..62, true)].into_iter().chain(blocks()).collect::<Vec<_>>());
        bed.batch(&[removed(Some("GPU"), 0..62)]);
        assert_eq!((bed.hits(), bed.skipped()), ((992, 992), vec![]), "{described} {order:?}");
        if described {
            // The GPU has forgotten the blocks: only their tokens say what they are.
            let mut bed = Bed::new();
            bed.batch(&blocks().collect::<Vec<_>>());
            assert_eq!((bed.hits(), bed.skipped()), ((992, 992), vec![]), "{order:?}");
            let mut bed = Bed::new();
            let gone = removed(Some("CPU"), order[0]..order[0] + 1);
            let events: Vec<_> = blocks().take(31).chain([gone]).chain(blocks().skip(31)).collect();
            bed.batch(&events);
            assert_eq!(bed.hits().0, order[0] as u32 * 16, "{order:?}");
        }
    }
}

#[test]
fn what_cannot_be_placed_is_counted() {
    let mut bed = Bed::new();
    bed.batch(&[stored(Some("CPU"), 0..3, false), removed(Some("CPU"), 0..1)]);
    assert_eq!(bed.skipped(), [("no_tokens", 3), ("tier_removed", 1)]);
    bed.batch(&[
        stored(None, 0..3, true),
        stored(Some("CPU"), 2..3, false),
        stored(Some("CPU"), 9..11, true),
    ]);
    assert_eq!(bed.skipped(), [("no_tokens", 3), ("tier_parent", 3), ("tier_removed", 1)]);
    // Blocks of an unknown medium are counted alone.
    bed.batch(&[
        stored(Some("CPU_FAR"), 0..3, true),
        stored(Some("TAPE"), 0..3, false),
        removed(Some("TAPE"), 0..1),
    ]);
    let tiers: Vec<_> = bed.applier.tally().tiers.iter().map(|(name, n)| (name.as_str(), *n)).collect();
    assert_eq!(tiers, [("CPU", 5), ("CPU_FAR", 3), ("TAPE", 2)]);
    let tally = bed.applier.tally();
    assert_eq!((tally.unknown_parent, tally.unknown_removed, bed.hits()), (0, 0, (48, 0)));
}

#[test]
fn a_storage_tier_is_a_hint_until_it_reports_a_removal() {
    let mut bed = Bed::new();
    bed.batch(&[stored(Some("GPU"), 0..62, true), stored(Some("storage"), 0..62, false)]);
    bed.batch(&[removed(Some("GPU"), 0..62)]);
    assert_eq!((bed.hits(), bed.hints()), ((0, 0), vec!["STORAGE"]));
    bed.batch(&[removed(Some("STORAGE"), 61..62)]);
    assert_eq!((bed.hits(), bed.hints()), ((976, 976), vec![]));
    let router = bed.feed.router().lock();
    let tiers: Vec<_> = router.caches().read().tiers_of(bed.applier.source().instance.slot()).collect();
    assert_eq!(tiers, [(Tier::Storage, 61, false)]);
}
