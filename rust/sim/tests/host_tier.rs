//! The host-memory tier, worked out by hand: write-through, loads, their link, and evictions.
#[path = "common/cluster.rs"]
mod common;

use lmetric_core::CoreError;
use lmetric_core::kv::tier::Tier;
use lmetric_core::kv::tiers::TierUse;
use lmetric_core::router::TierConfig;
use lmetric_sim::{
    Admission, Engine, HostTier, KvEvent, Order, Profile, Prompt, Request, Settings, TokenSlo, Trace,
    Workload, simulate,
};
use lmetric_study::REGISTRY;

/// A token takes 0.01 s to load, as long as to compute.
const TIER: HostTier = HostTier { capacity_ratio: 2.0, seconds_per_token: 0.01, step_ratio: 0.0 };

fn engine(cache_blocks: u32, tier: HostTier) -> Engine {
    let settings = Settings { host: Some(tier), kv_events: true, ..Settings::default() };
    Engine::new(Profile { cache_blocks, ..common::round() }, settings, None).unwrap()
}

fn ask(id: u64, hashes: &[u64], tokens: u32, output_tokens: u32) -> Request<'_> {
    Request::new(id, Prompt::Chain { hashes, tokens }, output_tokens)
}

#[track_caller]
fn close(got: f64, expected: f64) {
    assert!((got - expected).abs() < 1e-9, "{got} instead of {expected}");
}

/// Runs until there is nothing to do. Returns the ends of requests, and their cached and loaded
/// tokens.
fn run(engine: &mut Engine, mut now: f64) -> Vec<(u64, f64, u32, u32)> {
    let (mut done, mut admitted) = (Vec::new(), Vec::new());
    loop {
        match (engine.start_step(now), engine.next_load()) {
            (Some(end), _) => {
                let events = engine.finish_step();
                admitted.extend(events.admitted.iter().map(|a| (a.id, a.cached_tokens, a.loaded_tokens)));
                for &id in &events.finished {
                    let (_, cached, loaded) = *admitted.iter().rev().find(|a| a.0 == id).unwrap();
                    done.push((id, events.end, cached, loaded));
                }
                now = end;
            }
            (None, Some(end)) => now = end,
            (None, None) => return done,
        }
    }
}

/// The hashes stored in a tier and removed from it since the last call.
fn changes(engine: &mut Engine, of: Tier) -> (Vec<u64>, Vec<u64>) {
    let log = engine.kv_log();
    let (mut stored, mut removed) = (Vec::new(), Vec::new());
    for event in &log.events {
        match event {
            KvEvent::Stored { tier, hashes, .. } if *tier == of => stored.extend(&log.hashes[hashes.clone()]),
            KvEvent::Removed { tier, hashes } if *tier == of => removed.extend(&log.hashes[hashes.clone()]),
            _ => {}
        }
    }
    (stored, removed)
}

const A: [u64; 3] = [1, 2, 3];
const B: [u64; 4] = [11, 12, 13, 14];

#[test]
fn an_evicted_prompt_is_loaded_instead_of_computed() {
    let mut engine = engine(4, TIER);
    engine.submit(&ask(1, &A, 48, 1), 0.0).unwrap();
    assert_eq!(run(&mut engine, 0.0).len(), 1);
    for tier in [Tier::Gpu, Tier::Cpu] {
        assert_eq!(changes(&mut engine, tier), (A.to_vec(), vec![]), "write-through");
    }
    // It needs all four blocks of the GPU; the host holds eight.
    engine.kv_log().clear();
    engine.submit(&ask(2, &B, 64, 1), 2.0).unwrap();
    run(&mut engine, 2.0);
    assert_eq!(changes(&mut engine, Tier::Gpu), (B.to_vec(), vec![3, 2, 1]));
    assert_eq!(changes(&mut engine, Tier::Cpu), (B.to_vec(), vec![]));

    engine.kv_log().clear();
    engine.submit(&ask(3, &A, 50, 1), 10.0).unwrap();
    assert_eq!(engine.start_step(10.0), None);
    assert_eq!((engine.waiting(), engine.running()), (1, 0));
    close(engine.next_load().unwrap(), 10.48);
    assert_eq!(engine.start_step(10.4), None);
    // Two tokens are left: 1.02 s.
    close(engine.start_step(10.48).unwrap(), 11.5);
    let admitted = engine.events().admitted[0];
    assert_eq!((admitted.cached_tokens, admitted.loaded_tokens, admitted.first_time), (48, 48, true));
    assert_eq!(changes(&mut engine, Tier::Gpu).0, A, "a load is a new block on the GPU");
    assert_eq!(engine.finish_step().finished, [3]);
    let load = engine.load();
    assert_eq!((load.counters.loaded_tokens, load.counters.prefix_cache_hits, load.kv_usage), (48, 48, 0.0));

    // Now the GPU has it.
    engine.submit(&ask(4, &A, 50, 1), 20.0).unwrap();
    close(engine.start_step(20.0).unwrap(), 21.02);
    assert_eq!(engine.events().admitted[0].loaded_tokens, 0);
}

#[test]
fn loads_take_turns_while_others_run() {
    let mut engine = engine(9, TIER);
    let other: Vec<u64> = (21..30).collect();
    for (id, chain) in [(1, &A[..]), (2, &B[..3]), (3, &other[..])] {
        engine.submit(&ask(id, chain, 16 * chain.len() as u32, 1), 0.0).unwrap();
        run(&mut engine, 10.0 * id as f64);
    }
    // Both prompts were evicted. One load ends at 100.48 s, the other at 100.96 s.
    engine.submit(&ask(4, &A, 50, 1), 100.0).unwrap();
    engine.submit(&ask(5, &B[..3], 50, 1), 100.0).unwrap();
    engine.submit(&ask(6, &[], 10, 2), 100.0).unwrap();
    let done = run(&mut engine, 100.0);
    // Request 6 runs at once: 1.1 s. At 101.1 s both loads have ended: 1 + 0.1 + 0.011 + 0.04 s.
    assert_eq!(
        done.iter().map(|d| (d.0, d.2, d.3)).collect::<Vec<_>>(),
        [(6, 0, 0), (4, 48, 48), (5, 48, 48)]
    );
    done.iter().for_each(|d| close(d.1, 102.251));
    // With nothing else to do, each begins when its own load has ended.
    engine.submit(&ask(7, &other, 144, 1), 110.0).unwrap();
    run(&mut engine, 110.0);
    engine.submit(&ask(8, &A, 50, 1), 200.0).unwrap();
    engine.submit(&ask(9, &B[..3], 50, 1), 200.0).unwrap();
    let done = run(&mut engine, 200.0);
    close(done[0].1, 201.5);
    close(done[1].1, 202.52);
}

#[test]
fn a_load_takes_its_share_of_the_next_step() {
    let mut engine = engine(4, HostTier { step_ratio: 0.5, ..TIER });
    for (id, chain) in [(1, &A[..]), (2, &B[..])] {
        engine.submit(&ask(id, chain, 16 * chain.len() as u32, 1), 0.0).unwrap();
        run(&mut engine, 10.0 * id as f64);
    }
    engine.submit(&ask(3, &[], 10, 1), 100.0).unwrap();
    engine.submit(&ask(4, &A[..2], 33, 1), 100.0).unwrap();
    // 1.1 s, and half of the 0.32 s of the load.
    close(engine.start_step(100.0).unwrap(), 101.26);
}

#[test]
fn the_host_drops_the_tail_used_longest_ago() {
    let mut engine = engine(4, HostTier { capacity_ratio: 1.25, ..TIER });
    engine.submit(&ask(1, &A, 48, 1), 0.0).unwrap();
    run(&mut engine, 0.0);
    engine.kv_log().clear();
    engine.submit(&ask(2, &B, 64, 1), 10.0).unwrap();
    run(&mut engine, 10.0);
    assert_eq!(changes(&mut engine, Tier::Cpu), (B.to_vec(), vec![3, 2]));
    // One block is left in the host.
    engine.submit(&ask(3, &A, 50, 1), 20.0).unwrap();
    assert_eq!(run(&mut engine, 20.0), [(3, 20.16 + 1.34, 16, 16)]);
}

#[test]
fn a_running_request_takes_the_blocks_of_a_loaded_one() {
    let mut engine = engine(4, TIER);
    for (id, chain) in [(1, &A[..]), (2, &B[..])] {
        engine.submit(&ask(id, chain, 16 * chain.len() as u32, 1), 0.0).unwrap();
        run(&mut engine, 10.0 * id as f64);
    }
    // The first takes one block and soon a second. The other loads three and needs a fourth.
    engine.submit(&ask(3, &[], 15, 10), 100.0).unwrap();
    engine.submit(&ask(4, &A, 50, 1), 100.0).unwrap();
    let done = run(&mut engine, 100.0);
    // It gave a block up and loaded it again.
    assert_eq!(done.iter().map(|d| (d.0, d.2, d.3)).collect::<Vec<_>>(), [(3, 0, 0), (4, 48, 16)]);
    let counters = engine.load().counters;
    assert_eq!((counters.loaded_tokens, counters.preemptions, counters.out_of_memory), (64, 0, 0));
}

#[test]
fn an_aborted_load_frees_its_blocks() {
    let mut engine = engine(4, TIER);
    for (id, chain) in [(1, &A[..]), (2, &B[..])] {
        engine.submit(&ask(id, chain, 16 * chain.len() as u32, 1), 0.0).unwrap();
        run(&mut engine, 10.0 * id as f64);
    }
    engine.submit(&ask(3, &A, 50, 1), 100.0).unwrap();
    assert_eq!(engine.start_step(100.0), None);
    close(engine.load().kv_usage, 0.75);
    assert!(engine.abort(3));
    let load = engine.load();
    assert_eq!((load.kv_usage, load.waiting, load.running), (0.0, 0, 0));
    assert_eq!(run(&mut engine, 100.0), []);
    assert!(engine.reset_cache());
}

#[test]
fn wrong_settings_are_named() {
    let of = |tier: HostTier, admission, order: &str| {
        let order = Order::named(order, 0, TokenSlo::same(0.1)).unwrap();
        let settings = Settings { host: Some(tier), admission, order, ..Settings::default() };
        Engine::new(common::round(), settings, None).unwrap_err().to_string()
    };
    for (error, part) in [
        (of(HostTier { capacity_ratio: 0.0, ..TIER }, Admission::Vllm, "fcfs"), "capacity"),
        (of(HostTier { seconds_per_token: f64::NAN, ..TIER }, Admission::Vllm, "fcfs"), "seconds to load"),
        (of(HostTier { step_ratio: 2.0, ..TIER }, Admission::Vllm, "fcfs"), "step_ratio"),
        (of(TIER, Admission::Reserve, "fcfs"), "admission"),
        (of(TIER, Admission::Vllm, "srpt"), "local_order"),
    ] {
        assert!(error.contains("host_tier") && error.contains(part), "{error}");
    }
}

#[test]
fn the_router_sees_the_host_tier() {
    let trace = Trace {
        arrival_seconds: &[0.0, 10.0, 20.0],
        input_tokens: &[48, 64, 50],
        output_tokens: &[1; 3],
        hash_offsets: &[0, 3, 7, 10],
        hash_ids: &[1, 2, 3, 11, 12, 13, 14, 1, 2, 3],
        block_tokens: 16,
        ..Trace::default()
    };
    let workload = Workload::new(&trace, 16).unwrap();
    for (host, counted, loaded, predicted, end) in [
        (Some(TIER), TierUse::Auto, 48, 48, 21.5),
        (Some(TIER), TierUse::Off, 48, 0, 21.5),
        (None, TierUse::Auto, 0, 0, 21.5),
        (Some(HostTier { seconds_per_token: 0.001, ..TIER }), TierUse::Auto, 48, 48, 21.068),
    ] {
        let mut config = common::config(vec![Profile { cache_blocks: 4, ..common::round() }]);
        (config.admission, config.host) = (Admission::Vllm, host);
        config.router.tiers = TierConfig { counted, ..TierConfig::default() };
        let policy = REGISTRY.policy("lmetric", &[]).unwrap();
        let out = simulate(&workload, vec![policy.into()], &config, || Ok::<(), CoreError>(())).unwrap();
        let records = &out.records;
        assert_eq!((records.loaded_tokens[2], records.predicted_hit_tokens[2]), (loaded, predicted));
        assert_eq!(records.hit_tokens[2], loaded);
        assert_eq!(records.computed_tokens[2], 50 - loaded);
        close(records.finished_seconds[2], end);
        assert_eq!(out.routers[0].caches().read().index(Tier::Cpu).is_some(), host.is_some());
    }
}
