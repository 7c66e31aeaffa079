//! Events of an engine that is not honest: they cost work in proportion to their bytes, and keep
//! bounded memory (security F5, rust 7.14).
use lmetric_core::Registry;
use lmetric_core::feed::KvFeed;
use lmetric_core::fleet::Role;
use lmetric_core::kv::groups::MAX_GROUPS;
use lmetric_core::kv::keys::Keys;
use lmetric_core::router::{IndexFeed, Router, RouterConfig, SharedRouter};
use lmetric_feed::apply::Applier;
use lmetric_feed::event::MAX_STEPS;
use rmp::encode as pack;
use std::sync::Arc;

const BLOCK: u64 = 16;

fn hash(block: u64) -> u64 {
    (block + 1).wrapping_mul(0x2545_f491_4f6c_dd1d)
}

#[derive(Clone, Copy, Default)]
struct Fields<'a> {
    medium: Option<&'a str>,
    /// Group number, kind, and window.
    group: Option<(u64, &'a str, u64)>,
    without_tokens: bool,
}

fn text(out: &mut Vec<u8>, text: &str) {
    pack::write_str(out, text).unwrap();
}

fn medium_and_group(out: &mut Vec<u8>, fields: Fields<'_>) {
    text(out, "medium");
    match fields.medium {
        Some(medium) => text(out, medium),
        None => pack::write_nil(out).unwrap(),
    }
    text(out, "group_idx");
    match fields.group {
        Some((group, ..)) => {
            pack::write_uint(out, group).unwrap();
        }
        None => pack::write_nil(out).unwrap(),
    }
}

/// An event of consecutive blocks of one prompt.
fn stored(blocks: std::ops::Range<u64>, fields: Fields<'_>) -> Vec<u8> {
    let mut out = Vec::new();
    pack::write_map_len(&mut out, 7 + if fields.group.is_some() { 2 } else { 0 }).unwrap();
    text(&mut out, "type");
    text(&mut out, "BlockStored");
    text(&mut out, "block_hashes");
    pack::write_array_len(&mut out, (blocks.end - blocks.start) as u32).unwrap();
    blocks.clone().for_each(|block| {
        pack::write_uint(&mut out, hash(block)).unwrap();
    });
    text(&mut out, "parent_block_hash");
    match blocks.start.checked_sub(1) {
        Some(parent) => {
            pack::write_uint(&mut out, hash(parent)).unwrap();
        }
        None => pack::write_nil(&mut out).unwrap(),
    }
    text(&mut out, "token_ids");
    let tokens = if fields.without_tokens { 0..0 } else { blocks.start * BLOCK..blocks.end * BLOCK };
    pack::write_array_len(&mut out, (tokens.end - tokens.start) as u32).unwrap();
    tokens.for_each(|token| {
        pack::write_uint(&mut out, token % 100_000).unwrap();
    });
    text(&mut out, "block_size");
    pack::write_uint(&mut out, BLOCK).unwrap();
    medium_and_group(&mut out, fields);
    if let Some((_, kind, window)) = fields.group {
        text(&mut out, "kv_cache_spec_kind");
        text(&mut out, kind);
        text(&mut out, "kv_cache_spec_sliding_window");
        pack::write_uint(&mut out, window).unwrap();
    }
    out
}

fn removed(blocks: impl IntoIterator<Item = u64>, fields: Fields<'_>) -> Vec<u8> {
    let (blocks, mut out) = (blocks.into_iter().collect::<Vec<_>>(), Vec::new());
    pack::write_map_len(&mut out, 4).unwrap();
    text(&mut out, "type");
    text(&mut out, "BlockRemoved");
    text(&mut out, "block_hashes");
    pack::write_array_len(&mut out, blocks.len() as u32).unwrap();
    blocks.iter().for_each(|block| {
        pack::write_uint(&mut out, hash(*block)).unwrap();
    });
    medium_and_group(&mut out, fields);
    out
}

fn batch(events: &[Vec<u8>]) -> Vec<u8> {
    let mut batch = Vec::new();
    pack::write_array_len(&mut batch, 3).unwrap();
    pack::write_f64(&mut batch, 1.0).unwrap();
    pack::write_array_len(&mut batch, events.len() as u32).unwrap();
    events.iter().for_each(|event| batch.extend_from_slice(event));
    pack::write_uint(&mut batch, 0).unwrap();
    batch
}

struct Bed {
    feed: Arc<KvFeed>,
    applier: Applier,
}

impl Bed {
    fn new() -> Bed {
        let bytes = 64 << 20;
        let config =
            RouterConfig { index_feed: IndexFeed::Exact, index_bytes: bytes, ..RouterConfig::default() };
        let mut router = Router::new(Registry::CORE.policy("lmetric", &[]).unwrap(), config).unwrap();
        router.add_instance("e", Role::Both, None).unwrap();
        let keys = Keys::new(&[], BLOCK as usize, 256).unwrap();
        let feed = Arc::new(KvFeed::new(SharedRouter::new(router), keys, bytes, true));
        let applier = Applier::new(feed.clone(), feed.source("e", 0).unwrap());
        Bed { feed, applier }
    }

    /// Applies a batch and returns its steps, without those of its bytes.
    fn apply(&mut self, events: &[Vec<u8>]) -> u64 {
        let (before, batch) = (self.applier.steps(), batch(events));
        self.applier.apply(&batch);
        let steps = self.applier.steps() - before;
        if steps < MAX_STEPS { steps - batch.len() as u64 / 256 } else { steps }
    }

    fn skipped(&self, reason: &str) -> u64 {
        self.applier.tally().skipped.get(reason).copied().unwrap_or(0)
    }
}

const CPU: Fields<'_> = Fields { medium: Some("CPU"), group: None, without_tokens: false };

/// The attack of security F5: blocks of a lower tier without the block before them, then other
/// blocks of that tier. Each early block is tried once, behind its own parent.
#[test]
fn early_blocks_are_tried_once_each_and_bounded() {
    let mut bed = Bed::new();
    // Even blocks come first, and all their parents are missing.
    let early = (1..4001u64).map(|at| stored(2 * at..2 * at + 1, CPU));
    let others = (10_000..14_000u64).map(|at| stored(at..at + 1, CPU));
    let events: Vec<_> = early.chain(others).collect();
    let steps = bed.apply(&events);
    assert_eq!((steps, bed.skipped("tier_parent")), (16_000, 8000));
    // The same blocks behind their parents: each is stored when its parent is.
    let mut bed = Bed::new();
    let events: Vec<_> = (0..4000u64).rev().map(|at| stored(at..at + 1, CPU)).collect();
    let steps = bed.apply(&events);
    assert_eq!((steps, bed.skipped("tier_parent")), (2 * 4000 + 3999, 0));
    // Beyond the bound, they count as blocks with an unknown parent.
    let mut bed = Bed::new();
    let events: Vec<_> = (0..6000u64).rev().map(|at| stored(at..at + 1, CPU)).collect();
    bed.apply(&events);
    assert_eq!(bed.skipped("tier_parent"), 5999);
}

/// Removals of early blocks, last one first, drop each event once.
#[test]
fn early_blocks_are_removed_by_name() {
    let mut bed = Bed::new();
    let mut events: Vec<_> = (1..4001u64).map(|at| stored(2 * at..2 * at + 1, CPU)).collect();
    events.extend((1..4001u64).rev().map(|at| removed([2 * at], CPU)));
    events.push(stored(0..8002, CPU));
    let steps = bed.apply(&events);
    assert!(steps <= 8000 + 8000 + 8003 + 8002 * BLOCK / 64, "{steps}");
    assert_eq!((bed.skipped("tier_parent"), bed.skipped("tier_removed")), (0, 4000));
}

/// A batch with more work than any engine has is refused in the middle, whatever its bytes hold.
#[test]
fn the_work_of_a_batch_is_bounded() {
    let blocks = MAX_STEPS + 10;
    let cheap = vec![0xc0; 200_000]; // events of one byte, none of which is an event
    for events in [
        vec![removed(0..blocks, Fields::default())],
        vec![stored(0..blocks, Fields { without_tokens: true, ..CPU })],
        (0..blocks).map(|at| removed([at], CPU)).collect(),
        cheap.into_iter().map(|byte| vec![byte]).collect(),
    ] {
        let mut bed = Bed::new();
        assert_eq!(bed.apply(&events), MAX_STEPS);
        let told = bed.applier.take_over_limit().expect("a limit");
        assert!(told.contains("65536 steps"), "{told}");
        assert_eq!(bed.applier.take_over_limit(), None);
        // The next batch counts.
        assert_eq!(bed.apply(&[stored(0..100, Fields::default())]), 101 + 100 * BLOCK / 64);
        assert_eq!((bed.applier.tally().blocks_stored, bed.applier.take_over_limit()), (100, None));
    }
}

/// A malformed event costs what was read of it.
#[test]
fn a_malformed_event_is_no_free_work() {
    let long = |fields, kind, field, values: u32| {
        let mut event = Vec::new();
        pack::write_map_len(&mut event, fields).unwrap();
        text(&mut event, "type");
        text(&mut event, kind);
        text(&mut event, field);
        pack::write_array_len(&mut event, values).unwrap();
        event.resize(event.len() + values as usize, 0xc0);
        event
    };
    let mut event = long(3, "BlockStored", "extra_keys", 4_000_000);
    text(&mut event, "block_hashes");
    text(&mut event, "none");
    let mut bed = Bed::new();
    assert_eq!(bed.apply(&[event]), MAX_STEPS);
    assert!(bed.applier.take_over_limit().is_some());
    // Bytes that are only skipped count as well.
    let event = long(2, "AllBlocksCleared", "further", 1_000_000);
    let before = bed.applier.steps();
    bed.applier.apply(&batch(&[event]));
    assert_eq!(bed.applier.steps() - before, 1 + 1_000_000 / 256);
}

/// A large honest event is far below the limit: 4 MiB hold about 500,000 tokens.
#[test]
fn the_report_of_a_long_prompt_is_within_the_limits() {
    let mut bed = Bed::new();
    let event = stored(0..30_000, Fields::default());
    assert!(event.len() > 1_500_000, "{}", event.len());
    assert_eq!(bed.apply(&[event]), 30_001 + 30_000 * BLOCK / 64);
    assert_eq!((bed.applier.tally().blocks_stored, bed.applier.take_over_limit()), (30_000, None));
}

#[test]
fn groups_and_tiers_of_an_engine_are_bounded() {
    let mut bed = Bed::new();
    let window = |group| Fields { group: Some((group, "sliding_window", 64)), ..Fields::default() };
    let events: Vec<_> = (0..10_000u64).map(|group| stored(0..1, window(group))).collect();
    bed.apply(&events);
    assert_eq!(bed.applier.tally().groups, MAX_GROUPS);
    assert_eq!(bed.skipped("too_many_groups"), 10_000 - MAX_GROUPS as u64);
    let huge = u64::from(u32::MAX) + 1;
    bed.apply(&[stored(0..1, window(huge)), removed([0], window(huge))]);
    assert_eq!(bed.skipped("group"), 2, "a group that the router does not know");
    let names: Vec<String> =
        (0..40).map(|n| format!("{n}").repeat(if n < 4 { 100_000 } else { 1 })).collect();
    let events: Vec<_> =
        names.iter().map(|name| stored(0..1, Fields { medium: Some(name), ..Fields::default() })).collect();
    bed.apply(&events);
    let tiers = &bed.applier.tally().tiers;
    assert!(tiers.len() <= 17 && tiers.keys().all(|name| name.len() <= 64), "{tiers:?}");
    assert_eq!(tiers.values().sum::<i64>(), 40);
    let router = bed.feed.router().lock();
    assert_eq!(router.caches().read().groups().of(bed.applier.source().instance.slot()).len(), MAX_GROUPS);
}

/// Blocks of a group whose position no event gives, removed in reverse.
#[test]
fn blocks_without_a_position_are_forgotten_by_name() {
    let mut bed = Bed::new();
    let window = Fields { group: Some((1, "sliding_window", 64)), without_tokens: true, ..Fields::default() };
    let stored = [stored(0..20_000, window), stored(0..10_000, window)];
    let gone = [removed((0..20_000).rev(), window)];
    bed.apply(&[&stored[..], &gone[..]].concat());
    // The second copies of 10,000 blocks are left; nothing ever names them.
    assert_eq!((bed.skipped("group_removed"), bed.skipped("group_name")), (0, 10_000));
}
