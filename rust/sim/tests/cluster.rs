//! The event loop: hand-computed cases, and laws that hold for any load, policy and signals.
#[path = "common/cluster.rs"]
mod common;

use common::round;
use lmetric_core::CoreError;
use lmetric_core::estimate::StepTime;
use lmetric_core::fleet::Role;
use lmetric_core::guard::GuardConfig;
use lmetric_core::plan::Binding;
use lmetric_core::router::{FetchConfig, IndexFeed, Split};
use lmetric_sim::{
    Admission, ClusterConfig, DecodeThroughput, Order, Outcome, Overlap, Policies, Profile, Quantity,
    Signals, SimulatedFetch, TokenSlo, Trace, Transfer, Workload, simulate,
};
use lmetric_study::REGISTRY;
use lmetric_study::planner::given;
use proptest::prelude::*;

fn config(instances: usize) -> ClusterConfig {
    common::config(vec![round(); instances])
}

#[derive(Clone, Debug)]
struct Ask {
    at: f64,
    input: i64,
    output: i64,
    ids: Vec<u64>,
    previous: i64,
    think: f64,
    /// Number of reasoning tokens in `output`.
    thoughts: i64,
}

fn ask(at: f64, input: i64, output: i64, ids: &[u64]) -> Ask {
    Ask { at, input, output, ids: ids.to_vec(), previous: -1, think: 0.0, thoughts: 0 }
}

fn workload(asks: &[Ask]) -> Workload {
    let column = |f: fn(&Ask) -> i64| asks.iter().map(f).collect::<Vec<_>>();
    let seconds = |f: fn(&Ask) -> f64| asks.iter().map(f).collect::<Vec<_>>();
    let mut offsets = vec![0];
    asks.iter().for_each(|a| offsets.push(offsets.last().unwrap() + a.ids.len() as i64));
    let ids: Vec<u64> = asks.iter().flat_map(|a| a.ids.iter().copied()).collect();
    let trace = Trace {
        arrival_seconds: &seconds(|a| a.at),
        input_tokens: &column(|a| a.input),
        output_tokens: &column(|a| a.output),
        think_tokens: &column(|a| a.thoughts),
        hash_offsets: &offsets,
        hash_ids: &ids,
        block_tokens: 16,
        previous: &column(|a| a.previous),
        think_seconds: &seconds(|a| a.think),
        ..Trace::default()
    };
    Workload::new(&trace, 16).unwrap()
}

fn play(workload: &Workload, policy: &str, config: &ClusterConfig) -> Result<Outcome, CoreError> {
    // With roles, the policy chooses both the prefill and the decode instance.
    let decode = if config.roles.is_empty() { None } else { Some(REGISTRY.policy(policy, &[])?) };
    let policies = Policies { place: REGISTRY.policy(policy, &[])?, decode };
    simulate(workload, vec![policies], config, || Ok(()))
}

fn close(got: &[f64], expected: &[f64]) {
    assert_eq!(got.len(), expected.len());
    for (a, b) in got.iter().zip(expected) {
        assert!((a - b).abs() < 1e-9, "{got:?} instead of {expected:?}");
    }
}

#[test]
fn two_requests_on_one_engine_by_hand() {
    // The second arrives in the first's second decode step, so that a jump over three of them is
    // cut short.
    let w = workload(&[ask(0.0, 20, 4, &[1, 2]), ask(3.0, 26, 2, &[1, 3])]);
    let out = play(&w, "round_robin", &config(1)).unwrap();
    let r = &out.records;
    // Prefill: 1 + 0.2 s. Decode of 21 and 22 tokens: 1.121 and 1.122 s, so it ends at 3.443 s.
    //
    // The next step has 10 new tokens of the second (16 are cached) and a decode of 23 tokens:
    // 1 + 0.1 + 0.023 + 0.1 s. The last step has a decode of 27 tokens alone.
    let joined = 1.2 + 1.121 + 1.122;
    close(&r.scheduled_seconds, &[0.0, joined]);
    close(&r.first_token_seconds, &[1.2, joined + 1.223]);
    close(&r.finished_seconds, &[joined + 1.223, joined + 1.223 + 1.127]);
    assert_eq!(r.hit_tokens, [0, 16]);
    assert_eq!(r.predicted_hit_tokens, [0, 16]);
    assert_eq!(r.slow_tokens, [3, 1]);
    close(&r.worst_gap_seconds, &[1.223, 1.127]);
    assert_eq!(out.gaps.counts().iter().sum::<u64>(), 4);
    assert_eq!(out.steps, 5);
    close(&out.timeline.column(Quantity::Waiting), &[(joined - 3.0) / 10.0]);
    close(&out.timeline.column(Quantity::PrefillTokens), &[30.0]);
}

/// Prefill instances, then decode instances.
fn pools(prefill: usize, decode: usize) -> ClusterConfig {
    let roles = [vec![Role::Prefill; prefill], vec![Role::Decode; decode]].concat();
    ClusterConfig { roles, ..config(prefill + decode) }
}

#[test]
fn requests_cut_at_any_token_by_hand() {
    let transfer = Transfer { seconds_per_token: 0.02, fixed_seconds: 0.5, ..Transfer::default() };
    let one = workload(&[ask(0.0, 20, 4, &[1, 2])]);
    let cut_at = |fraction, silent_segments, one: &Workload| {
        let mut config = ClusterConfig { transfer, silent_segments, ..config(2) };
        config.split = REGISTRY.split("force", &[("fraction", fraction)]).unwrap();
        play(one, "round_robin", &config).unwrap()
    };
    // Split at 22 of 24 tokens. Prefill: 1 + 0.2. Decodes of 21 and 22 tokens, the last of which
    // does not count. Transfer: 0.5 + 22 x 0.02. Then steps with 22 and 23 tokens of context.
    let ended = 1.2 + 1.121 + 1.122;
    for (silent, first_token) in [(false, 1.2), (true, ended)] {
        let out = cut_at(0.9, silent, &one);
        let r = &out.records;
        assert_eq!((r.instance[0], r.decode_instance[0], r.cut_tokens[0]), (0, 1, 22));
        close(&r.first_token_seconds, &[first_token]);
        close(&r.handoff_seconds, &[ended]);
        close(&r.decode_start_seconds, &[ended + 0.94]);
        close(&r.finished_seconds, &[ended + 0.94 + 1.122 + 1.123]);
        // Between its tokens: 1.121, the segment boundary, 1.123. Tokens that arrive at once have
        // no gaps.
        let seam = 1.122 + 0.94 + 1.122;
        close(&r.worst_gap_seconds, &[if silent { 0.94 + 1.122 } else { seam }]);
        assert_eq!(r.slow_tokens, [if silent { 2 } else { 3 }]);
        // Each prompt token is computed once, and each token of the answer counts once.
        assert_eq!(r.computed_tokens, [20]);
        assert!(silent || out.gaps.counts().iter().sum::<u64>() == 3);
        assert_eq!((out.routers[0].totals().split, out.routers[0].totals().output_tokens), (1, 4));
    }
    // Split at 12: a prefill of 12 tokens, a transfer of 0.5 + 12 x 0.02, a prefill of the other 8.
    let r = cut_at(0.5, false, &one).records;
    let there = 1.12 + 0.74;
    close(&r.decode_start_seconds, &[there]);
    close(&r.first_token_seconds, &[there + 1.08]);
    close(&r.finished_seconds, &[there + 1.08 + 1.121 + 1.122 + 1.123]);
    assert_eq!(r.cut_tokens, [12]);
    // If the first segment makes the last token, too, no segment follows it; a request of one token
    // is not split.
    let r = cut_at(0.95, false, &one).records;
    close(&r.finished_seconds, &[ended + 1.123]);
    assert_eq!((r.cut_tokens[0], r.handoff_seconds[0].is_nan()), (-1, true));
    assert_eq!(cut_at(0.5, false, &workload(&[ask(0.0, 1, 1, &[1])])).records.cut_tokens, [-1]);
}

#[test]
fn an_answer_apart_begins_with_the_prefills_own_token_by_hand() {
    let one = |output| workload(&[ask(0.0, 20, output, &[1, 2])]);
    let play = |max_stall_seconds, output_known, w: &Workload| {
        let mut config = ClusterConfig { output_known, ..config(2) };
        config.transfer = Transfer { seconds_per_token: 0.02, fixed_seconds: 0.5, ..Transfer::default() };
        config.split = apart(max_stall_seconds);
        // It begins on the instance whose steps supposedly take ten times as long.
        config.step_times = vec![StepTime { fixed_seconds: 10.0, ..STEP }, STEP];
        play(w, "round_robin", &config).unwrap()
    };
    // Prefill: 1 + 0.2. Transfer: 0.5 + 20 x 0.02. Then steps with 21, 22 and 23 tokens of context;
    // or with 20, too, for the first token.
    for (most, cut, first, ends) in [
        (10.0, 21, 1.2, 2.1 + 1.121 + 1.122 + 1.123),
        (0.0, 20, 2.1 + 1.12, 2.1 + 1.12 + 1.121 + 1.122 + 1.123),
    ] {
        let out = play(most, true, &one(4));
        let r = &out.records;
        assert_eq!((r.instance[0], r.decode_instance[0], r.cut_tokens[0]), (0, 1, cut));
        close(&r.handoff_seconds, &[1.2]);
        close(&r.decode_start_seconds, &[2.1]);
        close(&r.first_token_seconds, &[first]);
        close(&r.finished_seconds, &[ends]);
        // The transfer is a gap in the answer once the answer has begun.
        close(&r.worst_gap_seconds, &[if cut == 21 { 0.9 + 1.121 } else { 1.123 }]);
        assert_eq!(r.slow_tokens, [3]);
        assert_eq!(out.routers[0].totals().output_tokens, 4);
    }
    // Its only token is the prefill's: no segment follows, despite the expected length.
    let out = play(10.0, false, &one(1));
    let r = &out.records;
    close(&r.finished_seconds, &[1.2]);
    assert_eq!((out.routers[0].totals().split, r.cut_tokens[0], r.decode_instance[0]), (1, -1, -1));
    assert!(r.handoff_seconds[0].is_nan());
    assert_eq!(out.routers[0].totals().output_tokens, 1);
}

#[test]
fn an_answer_that_ends_before_its_cut_is_not_split() {
    // From the second on, the router expects 40 tokens; the last two have three.
    let output = |n| if n < 4 { 40 } else { 3 };
    let asks: Vec<Ask> = (0..6).map(|n| ask(100.0 * f64::from(n), 20, output(n), &[])).collect();
    for silent_segments in [false, true] {
        let mut config = ClusterConfig { silent_segments, output_known: false, ..config(2) };
        config.split = REGISTRY.split("libra", &[("min_gain", -1.0), ("min_tokens", 1.0)]).unwrap();
        config.router.step_time = Some(STEP);
        let out = play(&workload(&asks), "round_robin", &config).unwrap();
        let r = &out.records;
        assert!(r.cut_tokens[1..4].iter().all(|cut| *cut > 23), "{:?}", r.cut_tokens);
        assert_eq!((out.routers[0].totals().split, r.cut_tokens[4..] == [-1; 2]), (5, true));
        assert_eq!(r.decode_instance[4..], [-1; 2]);
        assert!(r.handoff_seconds[4..].iter().all(|at| at.is_nan()));
        // A silent segment sends all tokens at its end. No token of theirs is made again.
        let first = if silent_segments { &r.finished_seconds[4..] } else { &[401.2, 501.2] };
        close(&r.first_token_seconds[4..], first);
        assert_eq!(r.slow_tokens[4..], if silent_segments { [0; 2] } else { [2; 2] });
    }
}

#[test]
fn a_prompt_prefilled_elsewhere_by_hand() {
    let transfer =
        |overlap| Transfer { seconds_per_token: 0.02, fixed_seconds: 0.5, overlap, unshared: false };
    // Prefill: 1 + 0.2. Transfer: 0.5 + 20 x 0.02 = 0.9 s. The prefill hides almost all of it
    // (layers) or no part (end).
    for (transfer, binding, there) in [
        (Transfer::default(), Binding::Early, 1.2),
        (transfer(Overlap::End), Binding::Early, 2.1),
        (transfer(Overlap::Layers), Binding::Early, 1.2),
        (transfer(Overlap::Layers), Binding::Late, 2.1),
        (Transfer { fixed_seconds: 1.0, ..transfer(Overlap::Layers) }, Binding::Early, 1.4),
    ] {
        let mut config = ClusterConfig { transfer, ..pools(1, 1) };
        config.router.binding = binding;
        let out = play(&workload(&[ask(0.0, 20, 3, &[1, 2])]), "round_robin", &config).unwrap();
        let r = &out.records;
        assert_eq!((r.instance[0], r.decode_instance[0], r.handoff_least_loaded[0]), (0, 1, 1));
        close(&r.handoff_seconds, &[1.2]);
        close(&r.decode_start_seconds, &[there]);
        // Three steps of a decode with 20, 21 and 22 tokens of context.
        close(&r.first_token_seconds, &[there + 1.12]);
        close(&r.finished_seconds, &[there + 1.12 + 1.121 + 1.122]);
        assert_eq!((out.steps, r.computed_tokens[0]), (4, 20));
    }
}

#[test]
fn the_load_of_targets_is_compared_without_roles() {
    // Both parts of each request take turns over three instances, blind to their load.
    let asks: Vec<Ask> =
        (0..9).map(|n| ask(2.0 * f64::from(n), 20, 5 + 20 * i64::from(n % 2), &[])).collect();
    let mut config = config(3);
    config.split = REGISTRY.split("force", &[("fraction", 0.3)]).unwrap();
    let r = play(&workload(&asks), "round_robin", &config).unwrap().records;
    assert!(r.handoff_least_loaded.contains(&0), "{:?}", r.handoff_least_loaded);
}

#[test]
fn times_in_another_unit_are_named() {
    let message = |asks: &[Ask]| play(&workload(asks), "round_robin", &config(1)).err().unwrap().to_string();
    let error = message(&[ask(0.0, 20, 1, &[]), ask(1.7e9, 20, 1, &[])]);
    assert!(error.contains("arrival of request 1") && error.contains("up to 10000000 s"), "{error}");
    let late = Ask { previous: 0, think: 1.1e7, ..ask(0.0, 20, 1, &[]) };
    assert!(message(&[ask(0.0, 20, 1, &[]), late]).contains("think time of request 1"));
}

#[test]
fn an_unlimited_prefill_waits_for_nobody() {
    let asks = [ask(0.0, 20, 1, &[]), ask(0.0, 100, 1, &[]), ask(0.5, 20, 1, &[])];
    let mut config = pools(1, 2);
    let queued = play(&workload(&asks), "round_robin", &config).unwrap().records;
    // 20 + 44 tokens, then the other 56 with 8 of the third, then its last 12.
    close(&queued.handoff_seconds, &[1.64, 1.64 + 1.64, 1.64 + 1.64 + 1.12]);
    config.router.unlimited_prefill = true;
    let out = play(&workload(&asks), "round_robin", &config).unwrap();
    // 1 + 0.2; a step of 64 tokens and one of 36; 1 + 0.2.
    close(&out.records.handoff_seconds, &[1.2, 3.0, 1.7]);
    close(&out.records.scheduled_seconds, &[0.0, 0.0, 0.5]);
    close(&out.timeline.column(Quantity::PrefillTokens)[..1], &[140.0]);
}

#[test]
fn engines_that_stand_still_end_the_run_and_are_told_of() {
    let curve = DecodeThroughput { alpha: -1.0, beta: 2.5, gamma: 0.0, hold_peak: false };
    let mut config = pools(1, 2);
    config.router.unlimited_prefill = true;
    for profile in &mut config.profiles {
        profile.decode_throughput = Some(curve);
    }
    // Alternately: three requests come together on one engine, which makes no token of them; the
    // other engine has two, and continues.
    let asks = [0.0, 0.0, 0.0, 0.0, 0.0].map(|at| ask(at, 20, 3, &[]));
    let out = play(&workload(&asks), "round_robin", &config).unwrap();
    assert_eq!(out.stalled, 1);
    let stuck = out.records.decode_instance[0];
    for i in 0..5 {
        assert_eq!(out.records.finished_seconds[i].is_nan(), out.records.decode_instance[i] == stuck);
    }
    // Two of them make 2.5 x 2 - 4 = 1 token/s together.
    close(&out.records.finished_seconds[1..2], &[1.2 + 3.0 * 2.0]);
    for profile in &mut config.profiles {
        profile.decode_throughput = Some(DecodeThroughput { hold_peak: true, ..curve });
    }
    let out = play(&workload(&asks), "round_robin", &config).unwrap();
    assert_eq!(out.stalled, 0);
    assert!(out.records.finished_seconds.iter().all(|at| at.is_finite()));
}

#[test]
fn pools_that_cannot_work_are_named() {
    let w = workload(&[ask(0.0, 20, 1, &[])]);
    for roles in
        [vec![Role::Prefill; 2], vec![Role::Decode; 2], vec![Role::Prefill, Role::Decode, Role::Both]]
    {
        let error = play(&w, "round_robin", &ClusterConfig { roles, ..config(2) }).err().unwrap().to_string();
        assert!(error.contains("roles"), "{error}");
    }
}

#[test]
fn two_requests_at_one_moment_share_a_step_and_two_engines_do_not() {
    let asks = [ask(5.0, 20, 1, &[]), ask(5.0, 30, 1, &[])];
    let out = play(&workload(&asks), "round_robin", &config(1)).unwrap();
    close(&out.records.finished_seconds, &[5.0 + 1.5, 5.0 + 1.5]);
    let out = play(&workload(&asks), "round_robin", &config(2)).unwrap();
    close(&out.records.finished_seconds, &[5.0 + 1.2, 5.0 + 1.3]);
    assert_eq!(out.records.instance, [0, 1]);
}

#[test]
fn a_step_that_runs_is_seen_as_the_signals_say() {
    // A computes 64 of 100 tokens from 0 to 1.64, B all 60 from 0 to 1.6; 38 tokens come to B at
    // 0.5 and wait. At 1.0, 100 tokens are left on A and 98 on B; once these steps have ended, 36
    // and 38.
    let asks = [ask(0.0, 100, 1, &[]), ask(0.0, 60, 1, &[]), ask(0.5, 38, 1, &[]), ask(1.0, 16, 1, &[])];
    for (signals, expected) in [(Signals::EXACT, 1), (Signals::STEP_END, 0)] {
        for seed in 0..4 {
            let mut config = ClusterConfig { signals, ..config(2) };
            config.router.seed = seed;
            let placed = play(&workload(&asks), "least_prefill", &config).unwrap().records.instance;
            assert_ne!(placed[0], placed[1]);
            assert_eq!(placed[2], placed[1]);
            assert_eq!(placed[3], placed[expected], "{signals:?}");
        }
    }
}

#[test]
fn late_cache_events_are_not_seen_early() {
    // The first prompt is cached at 1.2. The second arrives a second later, and its engine finds
    // blocks. Its router knows them if it has placed the first prompt, too.
    let w = workload(&[ask(0.0, 20, 1, &[1, 2]), ask(2.2, 40, 1, &[1, 3, 4])]);
    let predicted = |delay, routers, seed| {
        let mut config = ClusterConfig { signals: Signals::delayed(delay, 1.0), ..config(1) };
        config.router.seed = seed;
        let policies = (0..routers).map(|_| REGISTRY.policy("round_robin", &[]).unwrap().into()).collect();
        let r = simulate(&w, policies, &config, || Ok::<(), CoreError>(())).unwrap().records;
        assert_eq!(r.hit_tokens[1], 16);
        r.predicted_hit_tokens[1]
    };
    assert_eq!((predicted(0.9, 1, 0), predicted(1.1, 1, 0)), (16, 16));
    let late: Vec<_> = (0..8).map(|seed| predicted(1.1, 2, seed)).collect();
    assert!(late.contains(&0) && late.contains(&16), "{late:?}");
    assert!((0..8).all(|seed| predicted(0.9, 2, seed) == 16));
}

#[test]
fn a_turn_comes_after_the_answer_before_it() {
    let mut second = ask(1.0, 20, 1, &[]);
    (second.previous, second.think) = (0, 2.0);
    let r = play(&workload(&[ask(0.0, 20, 2, &[]), second]), "round_robin", &config(2)).unwrap().records;
    close(&r.arrival_seconds, &[0.0, 1.2 + 1.121 + 2.0]);
}

#[test]
fn a_request_that_no_engine_can_hold_is_named_before_anything_runs() {
    let config = ClusterConfig { admission: Admission::Vllm, ..config(1) };
    let asks = [ask(0.0, 20, 1, &[]), ask(0.0, 512, 2, &[])];
    let error = play(&workload(&asks), "round_robin", &config).err().unwrap().to_string();
    assert!(error.contains("request 1: 513 tokens") && error.contains("at most 512"), "{error}");
}

fn asks() -> impl Strategy<Value = Vec<Ask>> {
    let one = (0.0f64..40.0, 1i64..120, 0i64..20, 0u64..4, 0u64..9, any::<bool>(), 0.0f64..5.0);
    prop::collection::vec(one, 1..50).prop_map(|all| {
        let mut asks = Vec::new();
        for (i, (at, input, output, family, shared, turn, think)) in all.into_iter().enumerate() {
            // Prompts of a family share up to `shared` blocks; the rest of each prompt is its own.
            let id = |b| if b < shared { family * 100 + b } else { 10_000 + i as u64 * 100 + b };
            let ids: Vec<u64> = (0..(input as u64).div_ceil(16)).map(id).collect();
            let previous = if turn && i > 0 { (i as i64 * 7) % i as i64 } else { -1 };
            // None, some, or all of the answer are reasoning tokens.
            let thoughts = output * shared.min(5) as i64 / 5;
            asks.push(Ask { at, input, output, ids, previous, think, thoughts });
        }
        asks
    })
}

const STEP: StepTime = StepTime {
    fixed_seconds: 1.0,
    decode_seconds_per_sequence: 0.1,
    decode_seconds_per_context_token: 0.001,
    prefill_seconds_per_token: 0.01,
    prefill_seconds_per_attention_pair: 0.0,
    max_batch_tokens: 64.0,
    max_sequences: f64::INFINITY,
};

/// Three parts for requests that reason, two for other requests, wherever there is a balance.
fn in_three() -> Split {
    let settings = [("min_gain", -1.0), ("min_tokens", 1.0)];
    given(REGISTRY.split("libra_three", &settings).unwrap())
}

/// Decode placement on the instance where all requests lose least, if that gains anything; lengths
/// are unknown.
fn apart(max_stall_seconds: f64) -> Split {
    let settings = [
        ("max_stall_seconds", max_stall_seconds),
        ("recent_seconds", 30.0),
        ("transfer_seconds_per_token", 4e-6),
        ("transfer_fixed_seconds", 0.005),
        ("min_gain_seconds", 0.0),
        ("prior_tokens", 9.0),
    ];
    REGISTRY.split("apart", &settings).unwrap()
}

fn configs() -> impl Strategy<Value = ClusterConfig> {
    let signals = prop_oneof![
        Just(Signals::EXACT),
        Just(Signals::STEP_END),
        (0.0f64..2.0, 0.1f64..3.0).prop_map(|(delay, period)| Signals::delayed(delay, period)),
    ];
    let pools = prop_oneof![
        1 => Just(None),
        1 => (1usize..4, any::<bool>(), any::<bool>(), any::<bool>()).prop_map(Some),
    ];
    (1usize..5, pools, any::<bool>(), any::<bool>(), signals, 1u32..9, 9u32..20, any::<u64>()).prop_map(
        |(instances, pools, vllm, exact, signals, max_sequences, cache_blocks, seed)| {
            let mut config = config(instances);
            if let Some((decodes, late, moves, unlimited)) = pools {
                config.roles = [vec![Role::Prefill; instances], vec![Role::Decode; decodes]].concat();
                config.router.binding = if late { Binding::Late } else { Binding::Early };
                config.router.unlimited_prefill = unlimited;
                if moves {
                    let overlap = if seed % 3 == 0 { Overlap::Layers } else { Overlap::End };
                    config.transfer = Transfer {
                        seconds_per_token: 0.015625,
                        fixed_seconds: 0.25,
                        overlap,
                        unshared: false,
                    };
                }
            }
            let profile = Profile { max_sequences, cache_blocks, ..round() };
            config.profiles = vec![profile; instances.max(config.roles.len())];
            config.signals = signals;
            config.admission = if vllm { Admission::Vllm } else { Admission::Reserve };
            config.router.index_feed = if exact { IndexFeed::Exact } else { IndexFeed::Approximate };
            config.router.seed = seed;
            config.router.guard.on = seed % 2 == 0;
            if config.roles.is_empty() && seed % 5 < 3 {
                config.split =
                    REGISTRY.split("force", &[("fraction", (seed % 97) as f64 / 100.0 + 0.015)]).unwrap();
                config.silent_segments = seed % 5 == 1;
                config.transfer.seconds_per_token = 0.015625;
            }
            if config.roles.is_empty() && seed % 5 == 3 {
                config.split = in_three();
                config.router.step_time = Some(STEP);
                config.silent_segments = seed % 2 == 0;
                config.transfer.seconds_per_token = 0.015625;
            }
            if config.roles.is_empty() && seed % 5 == 4 {
                config.split = apart([0.0, 0.01, 10.0][(seed % 3) as usize]);
                config.router.step_time = Some(STEP);
                config.silent_segments = seed % 2 == 0;
                config.transfer.seconds_per_token = 0.015625;
            }
            config.token_slo.think_seconds = 1.5;
            if seed % 7 < 4 && !config.router.unlimited_prefill {
                let max_fetches = 1 + (seed % 3) as u32;
                config.router.fetch = Some(FetchConfig {
                    seconds_per_token: 1e-3,
                    fixed_seconds: 0.0,
                    min_tokens: 1,
                    max_fetches,
                    max_kv_usage: 1.0,
                });
                let holder_seconds = [0.0, 0.25][(seed % 2) as usize];
                config.fetching =
                    SimulatedFetch { holder_seconds, waits: seed % 7 < 3, pinned: seed % 7 < 2 };
                config.transfer.seconds_per_token = 0.015625;
            }
            config
        },
    )
}

const POLICIES: [&str; 8] =
    ["lmetric", "round_robin", "vllm", "dynamo", "filter", "simulation", "cache_aware", "least_tokens"];

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn nothing_is_lost_and_the_books_close(asks in asks(), config in configs(), policy in 0..POLICIES.len()) {
        let w = workload(&asks);
        let mut out = play(&w, POLICIES[policy], &config).unwrap();
        let r = &out.records;
        let (mut prefilled, mut running, mut waiting) = (0.0, 0.0, 0.0);
        for (i, ask) in asks.iter().enumerate() {
            prop_assert!(r.arrival_seconds[i] >= ask.at);
            if ask.previous >= 0 {
                let earliest = r.finished_seconds[ask.previous as usize] + ask.think;
                prop_assert!(r.arrival_seconds[i] == ask.at.max(earliest));
            }
            prop_assert!(r.scheduled_seconds[i] >= r.arrival_seconds[i]);
            prop_assert!(r.first_token_seconds[i] > r.scheduled_seconds[i]);
            let cut = r.cut_tokens[i];
            let moved = cut >= 0 && !r.handoff_seconds[i].is_nan();
            if moved {
                let again = r.answer_cut_tokens[i];
                prop_assert!(r.decode_instance[i] != r.instance[i] || again >= 0, "an answer may come back");
                prop_assert!(again < 0 || cut < again && again <= ask.input + ask.thoughts);
                let kept = config.split.keeps_tokens() && cut > ask.input;
                prop_assert!(cut + i64::from(!kept) < ask.input + ask.output.max(1));
                prop_assert!(r.scheduled_seconds[i] < r.handoff_seconds[i]);
                prop_assert!(r.handoff_seconds[i] <= r.decode_start_seconds[i]);
                // Its answer begins on the first engine if that engine makes a part of it, and is
                // whole only on the second.
                let begun = if config.silent_segments { r.handoff_seconds[i] } else { r.first_token_seconds[i] };
                prop_assert!(again >= 0 || (cut > ask.input) == (r.first_token_seconds[i] <= r.handoff_seconds[i].min(begun)));
                prop_assert!(r.decode_start_seconds[i] < r.finished_seconds[i]);
            } else if config.roles.is_empty() {
                prop_assert!(r.decode_instance[i] == -1 && r.handoff_seconds[i].is_nan());
                prop_assert!(r.decode_start_seconds[i].is_nan() && r.handoff_least_loaded[i] == -1);
            } else {
                prop_assert_eq!(config.roles[r.instance[i] as usize], Role::Prefill);
                prop_assert_eq!(config.roles[r.decode_instance[i] as usize], Role::Decode);
                prop_assert!(r.scheduled_seconds[i] < r.handoff_seconds[i]);
                prop_assert!(r.handoff_seconds[i] <= r.decode_start_seconds[i]);
                prop_assert!(r.decode_start_seconds[i] < r.first_token_seconds[i]);
                prop_assert!([0, 1].contains(&r.handoff_least_loaded[i]));
                // Its last prompt token is computed again on the decode instance.
                prefilled += 1.0;
                running -= r.decode_start_seconds[i] - r.handoff_seconds[i];
                waiting += r.decode_start_seconds[i] - r.handoff_seconds[i];
            }
            prop_assert!(r.finished_seconds[i] >= r.first_token_seconds[i]);
            prop_assert!(r.finished_seconds[i] > r.first_token_seconds[i] || ask.output <= 1 || config.silent_segments);
            prop_assert!(r.finished_seconds[i] == r.first_token_seconds[i] || ask.output > 1);
            prop_assert!((0..ask.input).contains(&r.hit_tokens[i]));
            prop_assert!((0..ask.input).contains(&r.predicted_hit_tokens[i]));
            prop_assert!((0..config.profiles.len() as i64).contains(&r.instance[i]));
            prop_assert!((0..ask.input).contains(&(r.hit_tokens[i] + r.fetched_tokens[i])));
            if r.fetch_instance[i] >= 0 {
                prop_assert!(r.fetch_instance[i] != r.instance[i] && r.fetch_seconds[i] >= 0.0);
                // It queues after the prefix fetch. (Its seconds are a difference of times that are
                // rounded.)
                prop_assert!(r.scheduled_seconds[i] >= r.arrival_seconds[i] + r.fetch_seconds[i] - 1e-9);
            } else {
                prop_assert!(r.fetched_tokens[i] == 0 && r.fetch_seconds[i].is_nan());
            }
            prefilled += (ask.input - r.hit_tokens[i] - r.fetched_tokens[i]) as f64;
            running += r.finished_seconds[i] - r.scheduled_seconds[i];
            waiting += r.scheduled_seconds[i] - r.arrival_seconds[i];
        }
        // Tokens and time are conserved; preempted requests compute and wait again.
        let total = |quantity, scale: f64| out.timeline.column(quantity).iter().sum::<f64>() * scale;
        let preempted = r.preemptions.iter().sum::<i64>() > 0;
        prop_assert!(!(preempted && config.admission == Admission::Reserve));
        for (sum, expected) in [
            (total(Quantity::PrefillTokens, 1.0), prefilled),
            (total(Quantity::Running, 10.0) + total(Quantity::Waiting, 10.0), running + waiting),
        ] {
            // The rest of a prompt may be cached on its instance.
            if config.split.planner().is_some() {
                continue;
            }
            // Requests that move between instances are in no queue.
            if config.transfer != Transfer::default() && sum < expected {
                continue;
            }
            prop_assert!((sum - expected).abs() < 1e-6 * expected || preempted && sum > expected - 1e-6, "{sum} {expected}");
        }
        // Clients receive each token once, and each prompt token is computed once.
        if !config.silent_segments {
            let gaps: i64 = asks.iter().map(|ask| ask.output.max(1) - 1).sum();
            prop_assert_eq!(out.gaps.counts().iter().sum::<u64>(), gaps as u64);
        }
        if config.split.planner().is_none() && !preempted {
            for (i, ask) in asks.iter().enumerate() {
                prop_assert_eq!(r.computed_tokens[i], ask.input - r.hit_tokens[i] - r.fetched_tokens[i]);
            }
        }
        // The router's in-flight ledger is empty, and all requests ended successfully.
        let router = &mut out.routers[0];
        prop_assert_eq!((router.in_flight(), router.totals().finished), (0, asks.len() as u64));
        router.derive_some(lmetric_core::indicators::IndicatorSet::ALL, 1e9);
        for id in ["bs", "q_bs", "r_bs", "queued_prefill_tokens", "tokens", "decode_tokens", "bound_tokens", "remaining_tokens", "fetches"] {
            let column = router.columns().get(lmetric_core::indicators::Indicator::from_name(id).unwrap());
            // External load in a report stays until the next report.
            let foreign = config.signals.report_period_seconds.is_some() && id.ends_with("bs");
            prop_assert!(foreign || column.iter().all(|x| *x == 0.0), "{id}: {column:?}");
        }
        let output: i64 = asks.iter().map(|a| a.output.max(1)).sum();
        prop_assert_eq!(router.totals().output_tokens, output as u64);
    }

    #[test]
    fn same_seed_same_bytes(asks in asks(), config in configs(), policy in 0..POLICIES.len()) {
        let w = workload(&asks);
        let alone = play(&w, POLICIES[policy], &config).unwrap();
        std::thread::scope(|scope| {
            let runs = [0, 1].map(|_| scope.spawn(|| play(&w, POLICIES[policy], &config).unwrap()));
            for run in runs {
                let other = run.join().unwrap();
                assert_eq!(alone.records, other.records);
                assert_eq!(alone.timeline, other.timeline);
            }
        });
    }

    /// Signals that the policy does not read change nothing.
    #[test]
    fn signals_do_not_move_engines(asks in asks(), config in configs()) {
        let w = workload(&asks);
        let times = |signals, index_feed| {
            let mut config = ClusterConfig { signals, ..config.clone() };
            config.router.index_feed = index_feed;
            config.router.guard.on = false;
            // With late binding, the choice at the end of a prefill depends on the moment at which
            // the router sees it.
            config.router.binding = Binding::Early;
            // An engine seen at the end of its step already holds that step's tokens, so fewer
            // tokens are transferred.
            config.transfer.seconds_per_token = 0.0;
            // The load decides where a split request continues, and all known values decide about
            // prefix fetches.
            config.split = Split::NONE;
            config.router.fetch = None;
            let r = play(&w, "round_robin", &config).unwrap().records;
            (r.instance, r.hit_tokens, r.scheduled_seconds, r.first_token_seconds, r.finished_seconds)
        };
        let exact = times(Signals::EXACT, IndexFeed::Exact);
        prop_assert_eq!(&exact, &times(Signals::STEP_END, IndexFeed::Exact));
        prop_assert_eq!(&exact, &times(Signals::delayed(0.3, 1.0), IndexFeed::Approximate));
    }

    /// A world that is twice as slow is the same world, bit for bit: doubling rounds nothing.
    #[test]
    fn time_has_no_scale(asks in asks(), mut config in configs()) {
        if config.signals.report_period_seconds.is_some()
            && matches!(config.split.planner().map(|spec| spec.name), Some("libra_three" | "apart"))
        {
            config.split = Split::NONE; // it reads inferred backlogs, with time constants
        }
        if config.signals.report_period_seconds.is_some() {
            config.router.fetch = None; // it reads an index whose event delay is not doubled
        }
        let mut slow = config.clone();
        for profile in &mut slow.profiles {
            profile.fixed_seconds *= 2.0;
            profile.decode_seconds_per_sequence *= 2.0;
            profile.decode_seconds_per_context_token *= 2.0;
            profile.prefill_seconds_per_token *= 2.0;
        }
        if let Some(step) = &mut slow.router.step_time {
            step.fixed_seconds *= 2.0;
            step.decode_seconds_per_sequence *= 2.0;
            step.decode_seconds_per_context_token *= 2.0;
            step.prefill_seconds_per_token *= 2.0;
        }
        if slow.split.planner().is_some_and(|spec| spec.name == "apart") {
            // The gain is 0.
            let twice = |(name, value): (&'static str, f64)| {
                (name, if name.contains("seconds") { value * 2.0 } else { value })
            };
            let settings: Vec<_> = slow.split.settings().map(twice).collect();
            slow.split = REGISTRY.split("apart", &settings).unwrap();
        }
        slow.transfer.seconds_per_token *= 2.0;
        slow.transfer.fixed_seconds *= 2.0;
        slow.fetching.holder_seconds *= 2.0;
        slow.router.prior_prefill_tokens_per_second /= 2.0;
        if let Some(fetch) = &mut slow.router.fetch {
            fetch.seconds_per_token *= 2.0;
        }
        let slow_asks: Vec<Ask> =
            asks.iter().map(|a| Ask { at: a.at * 2.0, think: a.think * 2.0, ..a.clone() }).collect();
        let run = |asks: &[Ask], config| play(&workload(asks), "round_robin", config).unwrap().records;
        let (a, b) = (run(&asks, &config), run(&slow_asks, &slow));
        // The learned cost of fetches fades after a minute without a fetch.
        let last = b.finished_seconds.iter().copied().fold(0.0, f64::max);
        prop_assume!(slow.router.fetch.is_none() || last < 60.0);
        let twice = |times: &[f64]| times.iter().map(|t| t * 2.0).collect::<Vec<_>>();
        prop_assert_eq!(twice(&a.first_token_seconds), b.first_token_seconds);
        prop_assert_eq!(twice(&a.finished_seconds), b.finished_seconds);
    }

    /// One request at a time, in order: faster engines, or more of them, serve no request later.
    #[test]
    fn more_and_faster_engines_never_hurt_a_queue(mut asks in asks(), instances in 1usize..4, faster in 0.3f64..1.0) {
        // Without turns, whose arrivals would move, and without a cache that other requests could
        // have filled.
        asks.iter_mut().for_each(|a| (a.previous, a.ids) = (-1, Vec::new()));
        let w = workload(&asks);
        let ends = |instances, factor: f64| {
            let mut config = config(instances);
            for profile in &mut config.profiles {
                profile.max_sequences = 1;
                profile.fixed_seconds *= factor;
                profile.prefill_seconds_per_token *= factor;
            }
            play(&w, "round_robin", &config).unwrap().records.finished_seconds
        };
        let base = ends(instances, 1.0);
        for better in [ends(instances, faster), ends(instances * 2, 1.0)] {
            for (a, b) in base.iter().zip(&better) {
                prop_assert!(*b <= a + 1e-9, "{a} before, {b} after");
            }
        }
    }
}

#[test]
fn one_that_came_later_may_run_earlier() {
    let w = workload(&[ask(0.0, 10, 9, &[]), ask(1.0, 60, 9, &[]), ask(4.1, 10, 2, &[])]);
    let one = Profile { max_sequences: 1, decode_seconds_per_context_token: 0.0, ..round() };
    // The guard ticks every second: under sjf at the moment at which the only engine ends a step,
    // with no other event pending.
    let guard = GuardConfig { on: true, period_seconds: 1.0, ..GuardConfig::default() };
    for (order, ends) in [("fcfs", [9.9, 20.3, 22.5]), ("sjf", [9.9, 22.5, 12.1])] {
        let mut config = ClusterConfig { profiles: vec![one.clone()], ..config(1) };
        (config.order, config.router.guard) = (Order::named(order, 0, TokenSlo::same(0.1)).unwrap(), guard);
        close(&play(&w, "lmetric", &config).unwrap().records.finished_seconds, &ends);
    }
}
