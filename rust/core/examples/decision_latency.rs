//! Stages of a decision at 256 instances and about 1M (instance, block) pairs, 8k-token prompts.
//!
//! `cargo run --release -p lmetric-core --example decision_latency`. "cold": 64 MB are written
//! between decisions, and the prompt was just written. The ring of decision records is full before
//! times are measured, as in a router that has run for a while.
use lmetric_core::InstanceId;
use lmetric_core::Registry;
use lmetric_core::fleet::Role;
use lmetric_core::kv::hash::{Domain, hash_tokens};
use lmetric_core::plan::{Event, Failure};
use lmetric_core::request::Request;
use lmetric_core::router::ledger::Report;
use lmetric_core::router::{IndexFeed, Router, RouterConfig};
use std::time::Instant;

const INSTANCES: u32 = 256;
const PROMPTS: u32 = 2200;
const TOKENS: u32 = 8192;
const STAGES: [&str; 6] = ["hash", "match", "score", "commit", "together", "route, hash included"];

/// Returns prompt `p`. All prompts share the first 512 tokens.
fn prompt(p: u32) -> Vec<u32> {
    (0..TOKENS).map(|i| if i < 512 { i } else { (p + 1) << 16 | i }).collect()
}

fn main() {
    let config =
        RouterConfig { index_feed: IndexFeed::Exact, index_bytes: 600 << 20, ..RouterConfig::default() };
    let policy = Registry::CORE.policy("lmetric", &[]).expect("a registered policy");
    let mut router = Router::new(policy, config).expect("good settings");
    for i in 0..INSTANCES {
        let name = format!("engine-{i}");
        router.add_instance(&name, Role::Both, None).expect("a new name");
        let (waiting, running) = (Some(f64::from(i % 3)), Some(f64::from(i % 17)));
        let report = Report { at: 0.0, waiting, running, kv_usage: Some(0.1) };
        router.engine_report(&name, report).expect("a known name");
    }
    let domain = Domain::new(&[Some("model")], 16);
    let prompts: Vec<Vec<u32>> = (0..PROMPTS).map(prompt).collect();
    let mut chain = Vec::new();
    let hash = |p: &[u32], chain: &mut Vec<u64>| {
        chain.clear();
        hash_tokens(domain, 16, p, chain);
    };
    for (p, prompt) in prompts.iter().enumerate() {
        hash(prompt, &mut chain);
        router.index_mut().stored(InstanceId(p as u32 % INSTANCES), None, &chain[..460]);
    }
    let mut flush = vec![0u64; 8 << 20];
    let mut now = 1.0;
    for (cold, rounds) in [(false, 15_000), (false, 5000), (true, 400)] {
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
            let decision = router.route_taking(&request, &mut chain, None, now).expect("an instance");
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
