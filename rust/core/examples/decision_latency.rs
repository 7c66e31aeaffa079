//! Stages of a decision over about 1M (instance, block) pairs, 8k-token prompts.
//!
//! `cargo run --release -p lmetric-core --example decision_latency -- [instances] [rounds]
//! [policy]` (256, 15,000 and lmetric). "cold": 64 MB are written between decisions, and the prompt
//! was just written. The ring of decision records is full before times are measured, as in a router
//! that has run for a while. To count instructions, run the built example with few rounds under
//! callgrind.
//!
//! With the argument `beside`: decisions of a shared router, hash excluded, alternately quiet and
//! beside two threads that store 100,000 blocks/s and remove as many.
use lmetric_core::Registry;
use lmetric_core::Slot;
use lmetric_core::feed::{KvFeed, Means, Source, Stored};
use lmetric_core::fleet::Role;
use lmetric_core::kv::hash::{Domain, hash_tokens};
use lmetric_core::kv::keys::Keys;
use lmetric_core::plan::{Event, Failure};
use lmetric_core::request::Request;
use lmetric_core::router::ledger::Report;
use lmetric_core::router::{IndexFeed, PrefixMatch, Router, RouterConfig, SharedRouter};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

const INSTANCES: u32 = 256;
const ROUNDS: usize = 15_000;
const PROMPTS: u32 = 2200;
const TOKENS: u32 = 8192;
const STAGES: [&str; 6] = ["hash", "match", "score", "commit", "together", "route, hash included"];

/// Blocks of an event, and events of an instance whose blocks are present.
const BLOCKS: u64 = 32;
const CHAINS: u64 = 64;
/// Blocks that all threads store per second.
const RATE: u64 = 100_000;
/// Threads that apply events.
const FEEDS: u64 = 2;

/// Tokens that begin all prompts; every instance holds their blocks.
const SHARED: u32 = 512;

/// Returns prompt `p`.
fn prompt(p: u32) -> Vec<u32> {
    (0..TOKENS).map(|i| if i < SHARED { i } else { (p + 1) << 16 | i }).collect()
}

/// Stores a chain of blocks on an instance and removes the chain stored half a round before.
fn replace(feed: &KvFeed, source: Source, chain: u64) {
    let instance = u64::from(source.instance.slot().0);
    let hash = |chain: u64, block: u64| {
        (instance << 40 | chain << 16 | (block + 1)).wrapping_mul(0x9e37_79b9_7f4a_7c15)
    };
    let old: Vec<u64> = (0..BLOCKS).rev().map(|block| hash((chain + CHAINS / 2) % CHAINS, block)).collect();
    feed.removed(source, &old);
    let engine_hashes: Vec<u64> = (0..BLOCKS).map(|block| hash(chain, block)).collect();
    let token = |at: u64| (instance * CHAINS + chain).wrapping_mul(0x2545_f491).wrapping_add(at * 7919);
    let token_ids: Vec<u32> = (0..BLOCKS * 16).map(|at| token(at) as u32).collect();
    let (narrowing, means) = (&[][..], Means::NewCopy);
    let domain = feed.keys().tokens;
    let stored = Stored {
        parent: None,
        engine_hashes: &engine_hashes,
        token_ids: &token_ids,
        domain,
        narrowing,
        means,
    };
    feed.stored(source, &stored);
}

/// Applies events of every `FEEDS`th instance at the rate, while `on`.
fn apply(feed: &KvFeed, instances: u32, first: u64, on: &AtomicBool) {
    let name = |instance: u64| format!("engine-{instance}");
    let sources: Vec<Source> = (0..u64::from(instances))
        .filter(|instance| instance % FEEDS == first)
        .map(|instance| feed.source(&name(instance), 0).expect("a known name"))
        .collect();
    let gap = Duration::from_secs_f64((BLOCKS * FEEDS) as f64 / RATE as f64);
    let mut due = Instant::now();
    for chain in (0..CHAINS).cycle() {
        for source in &sources {
            if !on.load(Ordering::Relaxed) {
                return;
            }
            replace(feed, *source, chain);
            due += gap;
            std::thread::sleep(due.saturating_duration_since(Instant::now()));
        }
    }
}

/// Measures decisions of a shared router, quiet and beside events.
fn beside(router: Router, instances: u32, chains: &[Vec<u64>]) {
    let shared = SharedRouter::new(router);
    let keys = Keys::new(&[Some("model".into())], 16, 256).expect("good settings");
    let feed = KvFeed::new(shared.clone(), keys, 900 << 20, true);
    let on = AtomicBool::new(false);
    let mut now = 1.0;
    let (mut chain, mut found) = (Vec::new(), PrefixMatch::default());
    println!("{:24} {:>9} {:>9} {:>9} {:>9} {:>9}", "us", "p50", "p90", "p99", "p99.9", "decisions");
    for round in 0..8 {
        on.store(round % 2 == 1, Ordering::Relaxed);
        let samples = std::thread::scope(|scope| {
            for first in 0..FEEDS {
                let (feed, on) = (&feed, &on);
                scope.spawn(move || apply(feed, instances, first, on));
            }
            let mut samples: Vec<u64> = Vec::new();
            let start = Instant::now();
            while start.elapsed() < Duration::from_secs(2) {
                chain.clone_from(&chains[samples.len() * 7919 % chains.len()]);
                let request = Request { prompt_tokens: TOKENS, tokens_per_block: 16.0, ..Request::default() };
                now += 1e-4;
                let routing = Instant::now();
                shared.caches().read().match_ahead(&Request { chain: &chain, ..request.clone() }, &mut found);
                let mut router = shared.lock_next();
                let decision = router.route_matched(&request, &mut chain, &mut found, None, now);
                let decision = decision.expect("an instance");
                drop(router);
                let routed = routing.elapsed();
                shared.lock().advance(decision.ticket, Event::Failed(Failure::Cancelled), now).expect("open");
                samples.push(routed.as_nanos() as u64);
            }
            on.store(false, Ordering::Relaxed);
            samples
        });
        let mut all = samples;
        let count = all.len();
        all.sort_unstable();
        let at = |share: f64| all[(count as f64 * share) as usize] as f64 / 1e3;
        let name = if round % 2 == 1 { "beside events" } else { "quiet" };
        println!("{name:24} {:9.2} {:9.2} {:9.2} {:9.2} {count:9}", at(0.5), at(0.9), at(0.99), at(0.999));
    }
}

fn main() {
    let numbers: Vec<u32> = std::env::args().skip(1).filter_map(|argument| argument.parse().ok()).collect();
    let instances = numbers.first().copied().unwrap_or(INSTANCES);
    let full = numbers.get(1).map_or(ROUNDS, |rounds| *rounds as usize);
    let config =
        RouterConfig { index_feed: IndexFeed::Exact, index_bytes: 1 << 30, ..RouterConfig::default() };
    let is_name = |argument: &String| argument != "beside" && argument.parse::<u32>().is_err();
    let name = std::env::args().skip(1).find(is_name).unwrap_or("lmetric".into());
    let policy = Registry::CORE.policy(&name, &[]).expect("a registered policy");
    let mut router = Router::new(policy, config).expect("good settings");
    for i in 0..instances {
        let name = format!("engine-{i}");
        router.add_instance(&name, Role::Both, None).expect("a new name");
        let (waiting, running) = (Some(f64::from(i % 3)), Some(f64::from(i % 17)));
        let report = Report { at: 0.0, waiting, running, kv_usage: Some(0.1), ..Report::default() };
        router.engine_report(&name, report).expect("a known name");
    }
    let domain = Domain::new(&[Some("model")], 16);
    let prompts: Vec<Vec<u32>> = (0..PROMPTS).map(prompt).collect();
    let mut chain = Vec::new();
    let hash = |p: &[u32], chain: &mut Vec<u64>| {
        chain.clear();
        hash_tokens(domain, 16, p, chain);
    };
    hash(&prompts[0][..SHARED as usize], &mut chain);
    for i in 0..instances {
        router.caches().write().gpu_mut().stored(Slot(i), None, &chain);
    }
    for (p, prompt) in prompts.iter().enumerate() {
        hash(prompt, &mut chain);
        router.caches().write().gpu_mut().stored(Slot(p as u32 % instances), None, &chain[..460]);
    }
    if std::env::args().any(|argument| argument == "beside") {
        let chains: Vec<Vec<u64>> = prompts
            .iter()
            .map(|prompt| {
                hash(prompt, &mut chain);
                chain.clone()
            })
            .collect();
        return beside(router, instances, &chains);
    }
    let mut flush = vec![0u64; 8 << 20];
    let mut now = 1.0;
    for (cold, rounds) in [(false, full), (false, full.div_ceil(3)), (true, full.div_ceil(40))] {
        let mut samples: [Vec<u64>; 6] = Default::default();
        for i in 0..rounds {
            let source = &prompts[i * 7919 % prompts.len()];
            let mut fresh = |cold: bool| {
                if cold {
                    flush.iter_mut().for_each(|x| *x += 1);
                }
                source.clone()
            };
            let tokens = fresh(cold);
            now += 1e-3;
            let start = Instant::now();
            hash(&tokens, &mut chain);
            let hashed = Instant::now();
            let whole = Request {
                chain: &chain,
                prompt_tokens: TOKENS,
                tokens_per_block: 16.0,
                ..Request::default()
            };
            router.match_prefix(&whole);
            let matched = Instant::now();
            let chosen = router.score(&whole, now).expect("an instance");
            let scored = Instant::now();
            let decision = router.commit(&whole, None, chosen, now).expect("a slot");
            let committed = Instant::now();
            router.advance(decision.ticket, Event::Failed(Failure::Cancelled), now).expect("open");

            let tokens = fresh(cold);
            let routing = Instant::now();
            hash(&tokens, &mut chain);
            let request = Request { prompt_tokens: TOKENS, tokens_per_block: 16.0, ..Request::default() };
            let decision = router
                .route_matched(&request, &mut chain, &mut PrefixMatch::default(), None, now)
                .expect("an instance");
            let routed = routing.elapsed();
            router.advance(decision.ticket, Event::Failed(Failure::Cancelled), now).expect("open");
            let spans = [
                hashed - start,
                matched - hashed,
                scored - matched,
                committed - scored,
                committed - start,
                routed,
            ];
            samples.iter_mut().zip(spans).for_each(|(all, span)| all.push(span.as_nanos() as u64));
        }
        println!("{:24} {:>9} {:>9} {:>9}", if cold { "cold, us" } else { "warm, us" }, "p10", "p50", "p99");
        for (name, all) in STAGES.iter().zip(&mut samples) {
            all.sort_unstable();
            let at = |share: usize| all[all.len() * share / 100] as f64 / 1e3;
            println!("{name:24} {:9.2} {:9.2} {:9.2}", at(10), at(50), at(99));
        }
    }
}
