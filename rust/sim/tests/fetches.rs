//! Prefix fetches, worked out by hand: their duration, their waits, evicted blocks, and their cost
//! for the holder.
#[path = "common/cluster.rs"]
mod common;

use lmetric_core::fleet::Role;
use lmetric_core::router::FetchConfig;
use lmetric_sim::{
    Admission, ClusterConfig, Outcome, Profile, Signals, SimulatedFetch, Trace, Transfer, Workload, simulate,
};
use lmetric_study::REGISTRY;

/// A prefix fetch takes 0.5 s, and 0.01 s per token. The router expects each to pay.
fn config(instances: usize, cache_blocks: u32) -> ClusterConfig {
    let fetch = FetchConfig {
        seconds_per_token: 1e-4,
        fixed_seconds: 0.0,
        min_tokens: 16,
        max_fetches: 4,
        max_kv_usage: 1.0,
    };
    let mut config = common::config(vec![Profile { cache_blocks, ..common::round() }; instances]);
    config.transfer = Transfer { seconds_per_token: 0.01, fixed_seconds: 0.5, ..Transfer::default() };
    config.router.fetch = Some(fetch);
    config
}

/// (arrival, prompt tokens, output tokens, family): prompts of a family are each other's prefixes.
/// They go to the engines in turn.
fn play(asks: &[(f64, i64, i64, u64)], config: &ClusterConfig) -> Outcome {
    let (mut offsets, mut ids) = (vec![0], Vec::new());
    for &(_, input, _, family) in asks {
        ids.extend((0..(input as u64).div_ceil(16)).map(|block| 100 * family + block));
        offsets.push(ids.len() as i64);
    }
    let trace = Trace {
        arrival_seconds: &asks.iter().map(|ask| ask.0).collect::<Vec<_>>(),
        input_tokens: &asks.iter().map(|ask| ask.1).collect::<Vec<_>>(),
        output_tokens: &asks.iter().map(|ask| ask.2).collect::<Vec<_>>(),
        hash_offsets: &offsets,
        hash_ids: &ids,
        block_tokens: 16,
        ..Trace::default()
    };
    let workload = Workload::new(&trace, 16).unwrap();
    let policy = REGISTRY.policy("round_robin", &[]).unwrap();
    simulate(&workload, vec![policy.into()], config, || Ok::<(), lmetric_core::CoreError>(())).unwrap()
}

#[track_caller]
fn close(got: f64, expected: f64) {
    assert!((got - expected).abs() < 1e-9, "{got} instead of {expected}");
}

/// Checks the outcome of request `i`: holder, fetched tokens, time of their arrival, time of its
/// first token.
#[track_caller]
fn fetched(out: &Outcome, i: usize, tokens: i64, there: f64, first_token: f64) {
    let r = &out.records;
    assert_eq!((r.fetch_instance[i], r.fetched_tokens[i], r.hit_tokens[i]), (0, tokens, 0));
    close(r.arrival_seconds[i] + r.fetch_seconds[i], there);
    close(r.first_token_seconds[i], first_token);
}

const LONG: (f64, i64, i64, u64) = (0.0, 49, 1, 1); // in engine 0's cache from 1.49 s on
const OTHER: (f64, i64, i64, u64) = (0.0, 16, 1, 2); // engine 1's turn

#[test]
fn an_idle_holder_sends_at_once() {
    let out = play(&[LONG, (10.0, 49, 2, 1)], &config(2, 32));
    // 48 tokens take 0.98 s; one token behind 48 is left to compute, a decode: 1.149 s. The next
    // has 50 tokens of context.
    fetched(&out, 1, 48, 10.98, 12.129);
    close(out.records.finished_seconds[1], 13.279);
    assert_eq!(out.routers[0].totals().fetched_tokens, 48);
    let usage = out.routers[0].record(2).unwrap().outcome.usage;
    assert_eq!(usage.cached_tokens, Some(48), "engines count what they did not compute");
    let (per_token, fixed, observed) = out.routers[0].fetch_cost(0.0).unwrap();
    assert!(observed == 1 && fixed + 48.0 * per_token > 0.1, "{fixed} {per_token}");
}

#[test]
fn it_goes_on_behind_a_prefix_of_its_own() {
    // One engine holds 64 of its tokens, the other 32; 32 are fetched, and 17 computed: 0.82 s and
    // 1.17 s.
    let out = play(&[(0.0, 64, 1, 1), (0.0, 32, 1, 1), (5.0, 16, 1, 3), (10.0, 81, 1, 1)], &config(2, 32));
    let r = &out.records;
    assert_eq!((r.fetch_instance[3], r.hit_tokens[3], r.fetched_tokens[3]), (0, 32, 32));
    close(r.fetch_seconds[3], 0.82);
    close(r.first_token_seconds[3], 10.82 + 1.17);
}

#[test]
fn a_busy_holder_sends_when_its_step_has_ended() {
    // It prefills until 11.16 s, and its decodes end at 12.277 and 13.395 s.
    let asks = [LONG, OTHER, (10.0, 16, 3, 3), (11.5, 49, 1, 1)];
    let mut config = config(2, 32);
    let out = play(&asks, &config);
    fetched(&out, 3, 48, 12.277 + 0.98, 12.277 + 0.98 + 1.149);
    close(out.records.finished_seconds[2], 13.395);
    config.fetching.holder_seconds = 0.5;
    let out = play(&asks, &config);
    fetched(&out, 3, 48, 12.277 + 0.98, 12.277 + 0.98 + 1.149);
    close(out.records.finished_seconds[2], 13.895);
    // Read without the engine's help, from 11.5 s on.
    config.fetching = SimulatedFetch { waits: false, ..SimulatedFetch::default() };
    fetched(&play(&asks, &config), 3, 48, 11.5 + 0.98, 11.5 + 0.98 + 1.149);
    config.fetching = SimulatedFetch { holder_seconds: 0.5, ..SimulatedFetch::default() };
    // With STEP_END, an engine's results are seen at the beginning of a step.
    config.signals = Signals::STEP_END;
    let out = play(&asks, &config);
    fetched(&out, 3, 48, 12.277 + 0.98, 12.277 + 0.98 + 1.149);
    close(out.records.finished_seconds[2], 13.895);
}

#[test]
fn what_is_evicted_before_it_begins_is_computed() {
    // 80 tokens fill engine 0's cache when their second step ends, at 12.8 s.
    let out = play(&[LONG, OTHER, (10.0, 80, 1, 3), (12.0, 49, 1, 1)], &config(2, 5));
    fetched(&out, 3, 0, 12.8, 14.29);
    assert_eq!(out.routers[0].totals().fetched_tokens, 0);
}

#[test]
fn what_is_evicted_on_the_way_came_only_where_it_is_pinned() {
    // It begins at the end of the first of those steps, at 11.64 s, and takes 2.9 s.
    let asks = [LONG, OTHER, (10.0, 80, 1, 3), (10.5, 49, 1, 1)];
    let mut config = config(2, 5);
    config.transfer.seconds_per_token = 0.05;
    fetched(&play(&asks, &config), 3, 48, 14.54, 14.54 + 1.149);
    config.fetching.pinned = false;
    fetched(&play(&asks, &config), 3, 0, 14.54, 14.54 + 1.49);
}

#[test]
fn blocks_that_are_pinned_are_in_use() {
    // vLLM's blocks: the prompt of 65 tokens needs all five, but three of them are being sent until
    // 12.4 s.
    let asks = [LONG, OTHER, (10.2, 65, 1, 3), (10.0, 49, 1, 1)];
    let mut config = config(2, 5);
    config.admission = Admission::Vllm;
    config.transfer.seconds_per_token = 0.04;
    let order = |pinned| {
        let mut config = config.clone();
        config.fetching.pinned = pinned;
        // In the order of arrival it is engine 0's turn, then 1's: a filler makes it 1's.
        let mut asks = asks.to_vec();
        asks.insert(2, (8.0, 1, 1, 4));
        play(&asks, &config)
    };
    let (pinned, free) = (order(true), order(false));
    let (request, sender) = (4, 3);
    assert_eq!((pinned.records.fetched_tokens[request], pinned.records.instance[request]), (48, 1));
    close(pinned.records.fetch_seconds[request], 0.5 + 48.0 * 0.04);
    assert_eq!((pinned.records.instance[sender], free.records.instance[sender]), (0, 0));
    close(free.records.scheduled_seconds[sender], 10.2);
    assert!(pinned.records.scheduled_seconds[sender] >= 10.0 + 0.5 + 48.0 * 0.04);
    assert_eq!(free.records.fetched_tokens[request], 0, "its blocks were taken");
}

#[test]
fn a_holder_sends_one_at_a_time_unless_links_are_not_shared() {
    let asks = [LONG, OTHER, OTHER, (9.0, 16, 1, 3), (20.0, 49, 1, 1), (20.0, 49, 1, 1)];
    let mut config = config(3, 32);
    let out = play(&asks, &config);
    fetched(&out, 4, 48, 20.98, 20.98 + 1.149);
    fetched(&out, 5, 48, 21.96, 21.96 + 1.149);
    config.transfer.unshared = true;
    let out = play(&asks, &config);
    fetched(&out, 5, 48, 20.98, 20.98 + 1.149);
    // With one fetch at a time per holder, the router lets the second compute.
    config.router.fetch.as_mut().unwrap().max_fetches = 1;
    let out = play(&asks, &config);
    assert_eq!(out.records.fetch_instance[5], -1);
    close(out.records.first_token_seconds[5], 21.49);
}

#[test]
fn settings_that_cannot_be_are_named() {
    let mut bad = config(1, 8);
    bad.fetching.holder_seconds = -1.0;
    let mut alone = config(2, 8);
    alone.roles = vec![Role::Prefill, Role::Decode];
    alone.router.unlimited_prefill = true;
    for (config, part) in [(bad, "holder_seconds"), (alone, "none with unlimited_prefill")] {
        let trace = Trace {
            arrival_seconds: &[0.0],
            input_tokens: &[1],
            output_tokens: &[1],
            hash_offsets: &[0, 0],
            block_tokens: 16,
            ..Trace::default()
        };
        let workload = Workload::new(&trace, 16).unwrap();
        let policy = REGISTRY.policy("round_robin", &[]).unwrap();
        let error =
            simulate(&workload, vec![policy.into()], &config, || Ok::<(), lmetric_core::CoreError>(()));
        let error = error.err().unwrap().to_string();
        assert!(error.contains(part), "{error}");
    }
}
