//! KV events of tiers below the GPU: names, removals per tier, hits and scores.
use lmetric_core::Registry;
use lmetric_core::feed::{Applied, KvFeed, Means, Source, Stored};
use lmetric_core::fleet::Role;
use lmetric_core::kv::hash::hash_tokens;
use lmetric_core::kv::keys::Keys;
use lmetric_core::kv::tier::Tier;
use lmetric_core::kv::tiers::TierUse;
use lmetric_core::plan::{Event, Usage};
use lmetric_core::request::{Allowed, Request};
use lmetric_core::router::{
    Decision, FetchConfig, IndexFeed, Router, RouterConfig, SharedRouter, TierConfig,
};
use proptest::prelude::*;
use std::collections::HashSet;

const BLOCK: u64 = 16;
const TIERS: [Tier; 3] = [Tier::Gpu, Tier::Cpu, Tier::Storage];

struct Bed {
    feed: KvFeed,
    a: Source,
    b: Source,
}

/// An engine's hash of block `n` of the prompt `prompt`. The first two blocks are common to all.
fn engine(prompt: u64, n: u64) -> u64 {
    let prompt = if n < 2 { 0 } else { prompt };
    (prompt * 1_000_003 + n + 1).wrapping_mul(0x2545_f491_4f6c_dd1d)
}

fn tokens(prompt: u64, blocks: std::ops::Range<u64>) -> Vec<u32> {
    let of = |b: u64| if b < 2 { 0 } else { prompt * 7777 };
    blocks.flat_map(|b| (0..BLOCK).map(move |t| (of(b) + b * 31 + t) as u32)).collect()
}

impl Bed {
    fn new(tiers: TierConfig) -> Bed {
        Bed::with(RouterConfig { tiers, ..RouterConfig::default() })
    }

    fn with(config: RouterConfig) -> Bed {
        let config = RouterConfig { index_bytes: 16 << 20, index_feed: IndexFeed::Exact, ..config };
        let mut router = Router::new(Registry::CORE.policy("lmetric", &[]).unwrap(), config).unwrap();
        router.add_instance("a", Role::Both, None).unwrap();
        router.add_instance("b", Role::Both, None).unwrap();
        let keys = Keys::new(&[], BLOCK as usize, 256).unwrap();
        let feed = KvFeed::new(SharedRouter::new(router), keys, 16 << 20, true);
        let (a, b) = (feed.source("a", 0).unwrap(), feed.source("b", 0).unwrap());
        Bed { feed, a, b }
    }

    /// Stores blocks, described by their tokens.
    fn store(&self, source: Source, tier: Tier, prompt: u64, blocks: std::ops::Range<u64>) -> Applied {
        let hashes: Vec<u64> = blocks.clone().map(|b| engine(prompt, b)).collect();
        let stored = Stored {
            parent: blocks.start.checked_sub(1).map(|b| engine(prompt, b)),
            engine_hashes: &hashes,
            token_ids: &tokens(prompt, blocks),
            domain: self.feed.keys().tokens,
            narrowing: &[],
            means: Means::Report,
        };
        self.feed.stored_in(source, tier, &stored)
    }

    /// Stores blocks in a tier by their names alone.
    fn name(&self, source: Source, tier: Tier, prompt: u64, blocks: std::ops::Range<u64>) -> Applied {
        let hashes: Vec<u64> = blocks.map(|b| engine(prompt, b)).collect();
        self.feed.named_in(source, tier, &hashes)
    }

    fn remove(&self, source: Source, tier: Tier, prompt: u64, blocks: std::ops::Range<u64>) -> Applied {
        let hashes: Vec<u64> = blocks.map(|b| engine(prompt, b)).collect();
        self.feed.removed_from(source, tier, &hashes)
    }

    fn route<T>(
        &self,
        prompt: u64,
        blocks: u64,
        pin: Option<&str>,
        with: impl FnOnce(&Router, &Decision) -> T,
    ) -> T {
        let mut chain = Vec::new();
        hash_tokens(self.feed.keys().tokens, BLOCK as usize, &tokens(prompt, 0..blocks), &mut chain);
        let only = pin.map(|name| -> Allowed { [name.into()].into() });
        let request = Request {
            chain: &chain,
            // One token more: engines compute the last token.
            prompt_tokens: (blocks * BLOCK) as u32 + 1,
            tokens_per_block: BLOCK as f64,
            instances: only.as_ref(),
            ..Request::default()
        };
        let mut router = self.feed.router().lock();
        let decision = router.route(&request, 0.0).unwrap();
        let found = with(&router, &decision);
        router.drop_ticket(decision.ticket);
        found
    }

    /// Returns the blocks that the instance can reuse, and how many come from a lower tier.
    fn hits(&self, instance: &str, prompt: u64, blocks: u64) -> (u32, u32) {
        let block = BLOCK as u32;
        self.route(prompt, blocks, Some(instance), |_, decision| {
            (decision.predicted_hit_tokens / block, decision.predicted_tier_tokens / block)
        })
    }

    /// Returns the name of the chosen instance.
    fn chosen(&self, prompt: u64, blocks: u64) -> String {
        self.route(prompt, blocks, None, |router, decision| {
            router.fleet().name(decision.segment.instance).to_string()
        })
    }
}

fn all() -> TierConfig {
    TierConfig { counted: TierUse::All, ..TierConfig::default() }
}

fn done(done: usize) -> Applied {
    Applied { done, ..Applied::default() }
}

#[test]
fn a_block_evicted_from_the_gpu_is_still_in_the_cpu_tier() {
    let bed = Bed::new(TierConfig::default());
    assert_eq!(bed.store(bed.a, Tier::Gpu, 1, 0..62), done(62));
    assert_eq!(bed.name(bed.a, Tier::Cpu, 1, 0..62), done(62));
    assert_eq!(bed.hits("a", 1, 62), (62, 0), "the GPU's copy is nearer");
    assert_eq!(bed.remove(bed.a, Tier::Gpu, 1, 0..62), done(62));
    assert_eq!(bed.hits("a", 1, 62), (62, 62));
    assert_eq!(bed.hits("b", 1, 62), (0, 0));
    // A load back to the GPU stores the blocks there again.
    assert_eq!(bed.store(bed.a, Tier::Gpu, 1, 0..10), done(10));
    assert_eq!(bed.hits("a", 1, 62), (62, 52));
    assert_eq!(bed.remove(bed.a, Tier::Cpu, 1, 30..31), done(1));
    assert_eq!(bed.hits("a", 1, 62), (30, 20), "the CPU tier's run ends at its hole");
    // No tier knows the name any more. A block described by its tokens needs no known name.
    assert_eq!(bed.name(bed.a, Tier::Cpu, 1, 30..31), Applied { unknown_name: 1, ..Applied::default() });
    assert_eq!(bed.store(bed.a, Tier::Cpu, 1, 30..31), done(1));
    assert_eq!(bed.hits("a", 1, 62), (62, 52));
}

#[test]
fn blocks_without_a_known_name_or_parent_are_skipped() {
    let bed = Bed::new(all());
    assert_eq!(bed.name(bed.a, Tier::Cpu, 1, 0..4), Applied { unknown_name: 4, ..Applied::default() });
    assert_eq!(bed.store(bed.a, Tier::Cpu, 1, 4..8), Applied { unknown_parent: 4, ..Applied::default() });
    assert_eq!(bed.store(bed.a, Tier::Gpu, 1, 0..8), done(8));
    let one = Applied { unknown_parent: 1, ..Applied::default() };
    assert_eq!(bed.name(bed.a, Tier::Cpu, 1, 4..5), one, "the block before it is not in the tier");
    assert_eq!(bed.name(bed.a, Tier::Storage, 1, 0..8), done(8));
    assert_eq!(bed.remove(bed.a, Tier::Cpu, 1, 0..1), Applied { unknown_removed: 1, ..Applied::default() });
    assert_eq!(bed.name(bed.b, Tier::Cpu, 1, 0..1), Applied { unknown_name: 1, ..Applied::default() });
    // Tiers are of the rank that named the blocks.
    let rank = bed.feed.source("a", 1).unwrap();
    assert_eq!(bed.name(rank, Tier::Cpu, 1, 0..1), Applied { unknown_name: 1, ..Applied::default() });
}

#[test]
fn a_storage_tier_without_removals_is_a_hint() {
    let off = TierConfig { counted: TierUse::Off, ..TierConfig::default() };
    // Blocks that hit before and after the tier has reported a removal.
    for (config, hint, known) in [(TierConfig::default(), 0, 7), (all(), 8, 7), (off, 0, 0)] {
        let bed = Bed::new(config);
        let tiers =
            || bed.feed.router().lock().caches().read().tiers_of(bed.a.instance.slot()).collect::<Vec<_>>();
        bed.store(bed.a, Tier::Gpu, 1, 0..8);
        assert_eq!(tiers(), []);
        bed.name(bed.a, Tier::Storage, 1, 0..8);
        bed.remove(bed.a, Tier::Gpu, 1, 0..8);
        assert_eq!((tiers(), bed.hits("a", 1, 8)), (vec![(Tier::Storage, 8, true)], (hint, hint)));
        bed.remove(bed.a, Tier::Storage, 1, 7..8);
        assert_eq!((tiers(), bed.hits("a", 1, 8)), (vec![(Tier::Storage, 7, false)], (known, known)));
    }
    for load_ratio in [-0.1, 1.1, f64::NAN] {
        let config = RouterConfig { tiers: TierConfig { load_ratio, ..all() }, ..RouterConfig::default() };
        let error = Router::new(Registry::CORE.policy("lmetric", &[]).unwrap(), config).err().unwrap();
        assert!(error.to_string().starts_with("tier_load_ratio: "), "{error}");
    }
}

#[test]
fn all_tiers_are_cleared_together() {
    let bed = Bed::new(all());
    let rank = bed.feed.source("a", 1).unwrap();
    let fill = || {
        for source in [bed.a, rank] {
            bed.store(source, Tier::Gpu, 1, 0..8);
            bed.name(source, Tier::Cpu, 1, 0..8);
            bed.name(source, Tier::Storage, 1, 0..8);
            bed.remove(source, Tier::Gpu, 1, 0..8);
        }
    };
    fill();
    bed.feed.cleared(bed.a);
    assert_eq!(bed.hits("a", 1, 8), (8, 8), "the other rank has its own copies");
    bed.feed.cleared(rank);
    assert_eq!((bed.hits("a", 1, 8), bed.feed.names().0), ((0, 0), 0));
    fill();
    bed.feed.set_index_feed("a", IndexFeed::Approximate).unwrap();
    assert_eq!(bed.hits("a", 1, 8), (0, 0), "nothing would remove the blocks");
    bed.feed.set_index_feed("a", IndexFeed::Exact).unwrap();
    fill();
    assert_eq!(bed.hits("a", 1, 8), (8, 8));
    bed.feed.set_keys(Keys::new(&[], 8, 256).unwrap());
    assert_eq!(bed.feed.router().lock().caches().read().tiers_of(bed.a.instance.slot()).count(), 0);
    bed.feed.set_keys(Keys::new(&[], BLOCK as usize, 256).unwrap());
    fill();
    assert_eq!(bed.hits("a", 1, 8), (8, 8));
    bed.feed.remove_instance("a").unwrap();
    assert_eq!(bed.feed.names().0, 0);
    bed.feed.router().lock().add_instance("a", Role::Both, None).unwrap();
    assert_eq!(bed.hits("a", 1, 8), (0, 0));
}

#[test]
fn lmetric_prefers_a_tier_to_computing_and_the_gpu_to_a_tier() {
    let bed = Bed::new(TierConfig::default());
    bed.store(bed.b, Tier::Gpu, 1, 0..64);
    bed.name(bed.b, Tier::Cpu, 1, 0..64);
    bed.remove(bed.b, Tier::Gpu, 1, 0..64);
    (0..20).for_each(|_| assert_eq!(bed.chosen(1, 64), "b"));
    bed.store(bed.a, Tier::Gpu, 1, 0..64);
    (0..20).for_each(|_| assert_eq!(bed.chosen(1, 64), "a"));
    // Loading 62 blocks costs less than computing 2.
    bed.remove(bed.a, Tier::Gpu, 1, 62..64);
    (0..20).for_each(|_| assert_eq!(bed.chosen(1, 64), "b"));
    // Unless it costs as much as computing 62.
    let bed = Bed::new(TierConfig { load_ratio: 1.0, ..all() });
    bed.store(bed.b, Tier::Gpu, 1, 0..64);
    bed.name(bed.b, Tier::Cpu, 1, 0..64);
    bed.remove(bed.b, Tier::Gpu, 1, 0..64);
    bed.store(bed.a, Tier::Gpu, 1, 0..62);
    (0..20).for_each(|_| assert_eq!(bed.chosen(1, 64), "a"));
}

#[test]
fn a_prefix_is_not_fetched_from_elsewhere_if_a_tier_of_the_instance_holds_it() {
    let fetch =
        FetchConfig { min_tokens: 16, seconds_per_token: 1e-9, fixed_seconds: 0.0, ..FetchConfig::default() };
    let bed = Bed::with(RouterConfig { fetch: Some(fetch), ..RouterConfig::default() });
    bed.store(bed.a, Tier::Gpu, 1, 0..64);
    bed.store(bed.b, Tier::Gpu, 1, 0..32);
    bed.name(bed.b, Tier::Cpu, 1, 0..32);
    bed.remove(bed.b, Tier::Gpu, 1, 0..32);
    let (from, to) = bed.route(1, 64, Some("b"), |_, decision| {
        let fetch = decision.fetch.expect("the other half is worth a fetch");
        (fetch.from_token, fetch.to_token)
    });
    assert_eq!((from, to), (32 * 16, 64 * 16));
    bed.store(bed.b, Tier::Cpu, 1, 32..64);
    assert!(bed.route(1, 64, Some("b"), |_, decision| decision.fetch.is_none()));
    // Nothing is fetched from a lower tier of another instance.
    bed.remove(bed.a, Tier::Gpu, 1, 0..64);
    assert!(bed.route(1, 64, Some("a"), |_, decision| decision.fetch.is_none()));
}

#[test]
fn lower_tiers_share_the_index_bytes() {
    let bed = Bed::new(all());
    let bounds = || {
        let router = bed.feed.router().lock();
        TIERS.map(|tier| router.caches().read().index(tier).map(|index| index.byte_bound()))
    };
    let [Some(whole), None, None] = bounds() else { panic!("lower tiers without events") };
    bed.store(bed.a, Tier::Gpu, 1, 0..4);
    bed.name(bed.a, Tier::Storage, 1, 0..4);
    assert_eq!(bounds(), [Some(whole / 2), None, Some(whole / 4)]);
    bed.name(bed.a, Tier::Cpu, 1, 0..4);
    assert_eq!(bounds(), [Some(whole / 2), Some(whole / 4), Some(whole / 4)]);
    let chains = 4_000;
    for prompt in 2..chains {
        bed.store(bed.a, Tier::Gpu, prompt, 0..50);
        bed.name(bed.a, Tier::Cpu, prompt, 0..50);
    }
    let router = bed.feed.router().lock();
    for tier in TIERS {
        let caches = router.caches().read();
        let index = caches.index(tier).unwrap();
        assert!(index.bytes() <= index.byte_bound(), "{tier:?}: {index:?}");
    }
    drop(router);
    assert_eq!(bed.hits("a", chains - 1, 50), (50, 0));
    // A small index has no room for tiers.
    let config =
        RouterConfig { index_bytes: 3 << 20, index_feed: IndexFeed::Exact, ..RouterConfig::default() };
    let router = Router::new(Registry::CORE.policy("lmetric", &[]).unwrap(), config).unwrap();
    let mut caches = router.caches().write();
    assert!(!caches.open_tier(Tier::Cpu) && caches.open_tier(Tier::Gpu));
}

/// First block of the prompt, from `start` on, that is not in `held`.
fn run(held: &HashSet<u64>, prompt: u64, start: u32) -> u32 {
    (start..20).find(|b| !held.contains(&engine(prompt, u64::from(*b)))).unwrap_or(20)
}

/// Blocks of the GPU's run, and of the longest run of one lower tier behind it.
fn reusable([gpu, lower @ ..]: &[HashSet<u64>; 3], prompt: u64) -> (u32, u32) {
    let front = run(gpu, prompt, 0);
    (front, lower.iter().map(|held| run(held, prompt, front)).max().unwrap())
}

#[test]
fn a_run_that_begins_on_the_gpu_continues_in_a_tier() {
    let bed = Bed::new(all());
    bed.store(bed.a, Tier::Gpu, 1, 0..64);
    bed.name(bed.a, Tier::Cpu, 1, 0..64);
    bed.remove(bed.a, Tier::Gpu, 1, 20..64);
    bed.remove(bed.a, Tier::Cpu, 1, 0..10);
    assert_eq!(bed.hits("a", 1, 64), (64, 44));
    bed.remove(bed.a, Tier::Cpu, 1, 40..41);
    assert_eq!(bed.hits("a", 1, 64), (40, 20));
    bed.remove(bed.a, Tier::Cpu, 1, 20..21);
    assert_eq!(bed.hits("a", 1, 64), (20, 0));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    /// Hits never exceed what an engine holds, and are the GPU's run with the longest run of one
    /// tier behind it, among the blocks that the feed accepted.
    #[test]
    fn hits_are_the_gpus_run_continued_by_one_tier(
        steps in prop::collection::vec(
            (0u8..10, 0usize..3, any::<bool>(), 1u64..4, 0u64..12, 1u64..8), 1..120),
    ) {
        let bed = Bed::new(all());
        let mut truth: [[HashSet<u64>; 3]; 2] = Default::default();
        let mut accepted = truth.clone();
        for (what, tier, second, prompt, from, length) in steps {
            let (i, source) = if second { (1, bed.b) } else { (0, bed.a) };
            match what {
                0..6 => for block in from..from + length {
                    let blocks = block..block + 1;
                    let applied = match what {
                        0..3 => bed.store(source, TIERS[tier], prompt, blocks),
                        _ if tier == 0 => continue,
                        _ => bed.name(source, TIERS[tier], prompt, blocks),
                    };
                    truth[i][tier].insert(engine(prompt, block));
                    if applied.done == 1 {
                        accepted[i][tier].insert(engine(prompt, block));
                    }
                },
                6..9 => {
                    bed.remove(source, TIERS[tier], prompt, from..from + length);
                    for block in from..from + length {
                        truth[i][tier].remove(&engine(prompt, block));
                        accepted[i][tier].remove(&engine(prompt, block));
                    }
                }
                _ if length > 6 => {
                    bed.feed.cleared(source);
                    truth[i] = Default::default();
                    accepted[i] = Default::default();
                }
                _ => {}
            }
            for prompt in 1..4 {
                for (i, name) in ["a", "b"].into_iter().enumerate() {
                    let (all, tier) = bed.hits(name, prompt, 20);
                    let (gpu, most) = reusable(&accepted[i], prompt);
                    prop_assert_eq!((all, tier), (most, most - gpu));
                    prop_assert!(all <= reusable(&truth[i], prompt).1);
                }
            }
        }
    }
}

/// A router learns what a load costs from its first tokens. It scores with what it learned.
#[test]
fn the_cost_of_loads_is_learned_from_first_tokens() {
    let slow = |seconds_per_loaded_token: f64, reports: Option<u32>| {
        let bed = Bed::new(TierConfig::default());
        let mut now = 0.0;
        for prompt in 1..=60 {
            let blocks = 20 + prompt * 7 % 60;
            bed.store(bed.b, Tier::Gpu, prompt, 0..blocks);
            bed.name(bed.b, Tier::Cpu, prompt, 0..blocks);
            if prompt % 2 == 0 {
                bed.remove(bed.b, Tier::Gpu, prompt, 0..blocks);
            }
            // Every prompt has 100 more tokens to compute; those of even prompts load the others.
            let mut chain = Vec::new();
            hash_tokens(bed.feed.keys().tokens, BLOCK as usize, &tokens(prompt, 0..blocks), &mut chain);
            let only = ["b".into()].into();
            let request = Request {
                chain: &chain,
                prompt_tokens: (blocks * BLOCK + 100 + prompt * 13 % 200) as u32,
                tokens_per_block: BLOCK as f64,
                instances: Some(&only),
                ..Request::default()
            };
            let mut router = bed.feed.router().lock();
            let decision = router.route(&request, now).unwrap();
            let computed = f64::from(request.prompt_tokens - decision.predicted_hit_tokens);
            let loaded = f64::from(decision.predicted_tier_tokens);
            assert_eq!(loaded > 0.0, prompt % 2 == 0);
            now += 0.01 + 1e-4 * computed + seconds_per_loaded_token * loaded;
            router.advance(decision.ticket, Event::FirstToken, now).unwrap();
            let cached_tokens = Some(reports.unwrap_or(decision.predicted_hit_tokens));
            let usage = Usage { cached_tokens, ..Usage::default() };
            router.advance(decision.ticket, Event::Finished(usage), now).unwrap();
            now += 1.0;
        }
        let router = bed.feed.router().lock();
        let loads = router.tier_loads_of(bed.b.instance.slot(), Tier::Cpu);
        assert_eq!(router.tier_loads_of(bed.a.instance.slot(), Tier::Cpu), (0.02, 0, 0), "another instance");
        assert_eq!(router.tier_loads_of(bed.b.instance.slot(), Tier::Storage), (0.02, 0, 0), "another tier");
        drop(router);
        bed.store(bed.b, Tier::Gpu, 99, 0..64);
        bed.name(bed.b, Tier::Cpu, 99, 0..64);
        bed.remove(bed.b, Tier::Gpu, 99, 0..64);
        bed.store(bed.a, Tier::Gpu, 99, 0..40);
        (loads, bed.chosen(99, 64))
    };
    let ((ratio, observed, tokens), chosen) = slow(2e-6, None);
    assert!((ratio - 0.02).abs() < 0.01 && observed == 30 && tokens > 10_000, "{ratio}");
    assert_eq!(chosen, "b", "loading all costs less than computing 24 blocks");
    let ((ratio, ..), chosen) = slow(8e-5, None);
    assert!((ratio - 0.8).abs() < 0.1, "{ratio}");
    assert_eq!(chosen, "a", "loading all costs more than computing 24 blocks");
    let (loads, _) = slow(8e-5, Some(0));
    assert_eq!(loads, (0.02, 0, 0), "the engine found nothing in its cache");
}
