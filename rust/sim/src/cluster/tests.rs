//! Tests that compare the router's view with the engines.
use super::*;
use crate::transfer::Overlap;
use crate::workload::Trace;
use lmetric_core::estimate::StepTime;
use lmetric_core::guard::GuardConfig;
use lmetric_core::indicators::{Indicator, IndicatorSet};
use lmetric_core::plan::Binding;
use lmetric_core::plan::Segment;
use lmetric_core::router::{FetchConfig, IndexFeed, Split};
use lmetric_study::REGISTRY;
use lmetric_study::planner::given;
use proptest::prelude::*;

fn config(instances: usize, cache_blocks: u32, step_end: bool) -> ClusterConfig {
    let profile = Profile {
        fixed_seconds: 1.0,
        decode_seconds_per_sequence: 0.1,
        decode_seconds_per_context_token: 0.001,
        prefill_seconds_per_token: 0.01,
        prefill_seconds_per_attention_pair: 1e-5,
        max_batch_tokens: 64,
        max_sequences: 4,
        block_tokens: 16,
        cache_blocks,
        decode_throughput: None,
    };
    ClusterConfig {
        profiles: vec![profile; instances],
        step_times: Vec::new(),
        roles: Vec::new(),
        transfer: Transfer::default(),
        fetching: SimulatedFetch::default(),
        admission: Admission::Reserve,
        order: Order::default(),
        preempt: Preempt::Recompute,
        priorities: None,
        load: None,
        cached_answers: false,
        session_final: false,
        reported_cache_ratio: 1.0,
        host: None,
        sharing_seconds: None,
        signals: if step_end { Signals::STEP_END } else { Signals::EXACT },
        router: RouterConfig {
            index_feed: IndexFeed::Exact,
            guard: GuardConfig { on: false, ..GuardConfig::default() },
            ..RouterConfig::default()
        },
        split: Split::NONE,
        silent_segments: false,
        output_known: true,
        rebalance: None,
        move_by: MoveBy::Kv,
        changes: Vec::new(),
        timeline_seconds: 10.0,
        token_slo: TokenSlo::same(0.1),
    }
}

/// At any moment, each router's view (after the exchange of loads) must equal the engines' state,
/// up to the steps that it has seen.
fn check(cluster: &mut Cluster<'_>) -> Result<(), TestCaseError> {
    let now = cluster.now;
    cluster.routers.catch_up_all(&cluster.engines, now).unwrap();
    (0..cluster.routers.len()).for_each(|i| cluster.routers.share(i, &cluster.engines, now).unwrap());
    cluster.routers.each().for_each(|observer| observer.router.derive_some(IndicatorSet::ALL, now));
    let (n, shape) = (cluster.engines.len(), &cluster.workload.shape);
    let in_flight: Vec<usize> = (0..cluster.workload.len())
        .filter(|&i| cluster.records.instance[i] >= 0 && cluster.records.finished_seconds[i].is_nan())
        .collect();
    let moving: Vec<usize> = cluster
        .events
        .iter()
        .filter_map(|Reverse((_, e))| match e {
            Event::HandOver { request }
            | Event::Prefilled { request }
            | Event::FetchBegins { request }
            | Event::FetchEnds { request } => Some(*request as usize),
            _ => None,
        })
        .collect();
    let bound: Vec<Vec<Segment>> =
        (0..cluster.workload.len() as u64).map(|i| cluster.routers.of(i).bound(i).collect()).collect();
    for slot in 0..n {
        let (engine, records, parts) = (&cluster.engines[slot], &cluster.records, &cluster.parts);
        let (begun, ended) = engine.progress(now);
        let steps = if cluster.config.signals.step_end { begun } else { ended };
        let outputs: Vec<(u64, u32)> = engine.decoding().collect();
        let mut queued = engine.load().remaining_prefill_tokens as i64;
        let (mut tokens, mut remaining, mut coming) = (0, 0, 0);
        let mut unknown = false;
        for &i in &in_flight {
            let (part, prompt, output) = (&parts[i], shape.input_tokens[i], shape.output_tokens[i]);
            // Tokens that other segments of the request will find here; a move was bound with the
            // tokens known when it began.
            for segment in bound[i].iter().filter(|segment| segment.instance.index() == slot) {
                tokens += segment.from_token.max(prompt);
                coming += 1;
            }
            if part.instance as usize != slot {
                continue;
            }
            coming += u32::from(moving.contains(&i));
            let before = part.from.saturating_sub(prompt);
            let made = outputs.iter().find(|o| o.0 == i as u64).map(|o| o.1 + steps);
            // The token that is made again behind the boundary counts there.
            let most = part.to.map_or(u32::MAX, |to| to.saturating_sub(prompt));
            let made_in_all = (before + made.unwrap_or(0)).min(most);
            let needed = part.to.map_or(prompt, |to| to.min(prompt));
            tokens += needed + made_in_all;
            let admitted =
                if part.from > 0 { records.decode_start_seconds[i] } else { records.scheduled_seconds[i] };
            if !admitted.is_nan() {
                let expected = part.to.map_or(output, |to| to.saturating_sub(prompt));
                remaining += expected.saturating_sub(made_in_all);
                // The last token of the part computed elsewhere is no backlog.
                queued -= i64::from(part.from >= prompt && made.is_none());
            } else {
                let there =
                    if part.from == 0 { records.predicted_hit_tokens[i] } else { i64::from(part.from) };
                // Tokens on their way are not computed; once the fetch is over, tokens that
                // arrived.
                let to_come =
                    cluster.fetches.get(&(i as u32)).map_or(0, |under_way| under_way.fetch.to_token);
                let there = there.max(i64::from(to_come.max(part.fetched)));
                queued += (i64::from(needed) - there).max(0);
                // No one recorded how many tokens the router predicted as cached where the rest of
                // a prompt is computed.
                unknown |= (1..prompt).contains(&part.from);
            }
        }
        for (id, truth) in [
            (Indicator::QBs, f64::from(engine.waiting() + coming)),
            (Indicator::RBs, f64::from(engine.running())),
            (Indicator::DecodeBs, outputs.len() as f64),
            (Indicator::QueuedPrefillTokens, queued as f64),
            (Indicator::Tokens, f64::from(tokens)),
            (Indicator::RemainingTokens, f64::from(remaining)),
        ] {
            for observer in cluster.routers.each() {
                let known = observer.router.columns().get(id)[slot];
                if unknown && id == Indicator::QueuedPrefillTokens {
                    prop_assert!(known <= truth);
                } else {
                    prop_assert_eq!(known, truth, "{:?} of {} at {}", id, slot, now);
                }
            }
        }
    }
    for request in 0..cluster.workload.len() {
        let (chain, prompt_tokens) = (shape.chain(request), shape.input_tokens[request]);
        let asked =
            RouterRequest { chain, prompt_tokens, tokens_per_block: 16.0, ..RouterRequest::default() };
        let found: Vec<u32> = cluster.engines.iter().map(|e| e.hit_tokens(chain, prompt_tokens)).collect();
        for observer in cluster.routers.each() {
            prop_assert_eq!(&observer.router.hit_tokens(&asked), &found);
        }
    }
    Ok(())
}

/// Moves a decoding request to another instance that may take it; false if none could move.
fn move_one(cluster: &mut Cluster<'_>, turn: usize) -> bool {
    let n = cluster.engines.len();
    let running: Vec<u64> = cluster.engines.iter().flat_map(|e| e.decoding().map(|(id, _)| id)).collect();
    let Some(id) = running.get(turn % running.len().max(1)) else { return false };
    cluster.begin_move(*id as usize, lmetric_core::Slot((turn / 3 % n) as u32)).is_ok()
}

const STEP: StepTime = StepTime {
    fixed_seconds: 1.0,
    decode_seconds_per_sequence: 0.1,
    decode_seconds_per_context_token: 0.001,
    prefill_seconds_per_token: 0.01,
    prefill_seconds_per_attention_pair: 1e-5,
    max_batch_tokens: 64.0,
    max_sequences: f64::INFINITY,
};

/// Three parts for requests that reason, two for other requests, wherever there is a balance.
fn in_three() -> Split {
    let settings = [("min_gain", -1.0), ("min_tokens", 1.0)];
    given(REGISTRY.split("libra_three", &settings).unwrap())
}

fn shape_outputs(workload: &Workload) -> u64 {
    workload.shape.output_tokens.iter().map(|tokens| u64::from(*tokens)).sum()
}

/// Requests of 20 prompt tokens and `output` output tokens.
fn plain(arrival_seconds: &[f64], output: i64) -> Workload {
    let n = arrival_seconds.len();
    let trace = Trace {
        arrival_seconds,
        input_tokens: &vec![20; n],
        output_tokens: &vec![output; n],
        hash_offsets: &vec![0; n + 1],
        block_tokens: 16,
        ..Trace::default()
    };
    Workload::new(&trace, 16).unwrap()
}

#[test]
fn a_request_leaves_when_the_step_that_was_seen_early_ends() {
    let (workload, config) = (plain(&[0.0], 9), config(2, 24, true));
    let policies = vec![REGISTRY.policy("round_robin", &[]).unwrap().into()];
    let mut cluster = Cluster::new(&workload, policies, &config).unwrap();
    while cluster.instances[0].state != State::Seen {
        assert!(cluster.step().unwrap());
    }
    assert!(cluster.begin_move(0, lmetric_core::Slot(1)).unwrap());
    let ends = cluster.instances[0].busy_until;
    assert!(cluster.now < ends);
    assert_eq!((cluster.records.moves[0], cluster.last_tokens[0]), (1, ends));
    while cluster.step().unwrap() {}
    // The next token is made on the target, after the step.
    assert!(cluster.records.decode_start_seconds[0] >= ends);
    assert_eq!(cluster.records.decode_instance[0], 1);
}

#[test]
fn no_event_is_spent_on_hours_without_work() {
    let config = config(2, 24, false);
    let play = |arrivals: &[f64]| {
        let workload = plain(arrivals, 9);
        let policies = vec![REGISTRY.policy("round_robin", &[]).unwrap().into()];
        let mut cluster = Cluster::new(&workload, policies, &config).unwrap();
        let mut events = 0;
        while cluster.step().unwrap() {
            events += 1;
        }
        (events, cluster.variances)
    };
    let (few, once) = play(&[0.5]);
    let (events, twice) = play(&[0.5, 1e6 + 0.5]);
    assert!(events < 3 * few, "{events} instead of {few}");
    assert!(once.1 >= 9.0, "a comparison each second in which the request decodes");
    assert_eq!(twice.1, 2.0 * once.1);
    assert!((twice.0 - 2.0 * once.0).abs() < 1e-9 * once.0);
}

proptest! {
    #[test]
    fn exact_signals_are_exact(
        step_end: bool, instances in 1usize..4, decodes in 0usize..3, late: bool, seconds_per_token in 0.0f64..0.02,
        layers: bool, moves in 0usize..4, cut in prop::option::of(0.01f64..0.99), cache_blocks in 6u32..24,
        asks in prop::collection::vec((0.0f64..30.0, 1i64..90, 1i64..15, 0u64..3, 0u64..7), 1..25), three: bool,
        fetch in prop::option::of((any::<bool>(), any::<bool>())), routers in 1usize..4,
    ) {
        let column = |f: fn(&(f64, i64, i64, u64, u64)) -> i64| asks.iter().map(f).collect::<Vec<_>>();
        let (mut offsets, mut ids) = (vec![0], Vec::new());
        for (i, ask) in asks.iter().enumerate() {
            let own = 1000 + 10 * i as u64;
            ids.extend((0..(ask.1 as u64).div_ceil(16)).map(|b| if b < ask.4 { ask.3 * 100 + b } else { own + b }));
            offsets.push(ids.len() as i64);
        }
        let trace = Trace {
            arrival_seconds: &asks.iter().map(|a| a.0).collect::<Vec<_>>(),
            input_tokens: &column(|a| a.1),
            output_tokens: &column(|a| a.2),
            think_tokens: &column(|a| a.2 * a.4 as i64 / 7),
            hash_offsets: &offsets,
            hash_ids: &ids,
            block_tokens: 16,
            ..Trace::default()
        };
        let (workload, mut config) =
            (Workload::new(&trace, 16).unwrap(), config(instances + decodes, cache_blocks, step_end));
        if decodes > 0 {
            config.roles = [vec![Role::Prefill; instances], vec![Role::Decode; decodes]].concat();
            let overlap = if layers { Overlap::Layers } else { Overlap::End };
            config.transfer = Transfer { seconds_per_token, fixed_seconds: 0.1, overlap, unshared: false };
            config.router.binding = if late { Binding::Late } else { Binding::Early };
        } else if let Some(fraction) = cut {
            config.split = if three { in_three() } else { REGISTRY.split("force", &[("fraction", fraction)]).unwrap() };
            config.router.step_time = Some(STEP);
            config.transfer = Transfer { seconds_per_token, fixed_seconds: 0.1, ..Transfer::default() };
        }
        if let Some((pinned, costs)) = fetch {
            let transfer = Transfer { seconds_per_token: seconds_per_token / 4.0, ..config.transfer };
            config.transfer = transfer;
            config.router.fetch = Some(FetchConfig {
                seconds_per_token: transfer.seconds_per_token,
                fixed_seconds: 0.0,
                min_tokens: 1,
                max_fetches: 2,
                max_kv_usage: 1.0,
            });
            config.fetching = SimulatedFetch { holder_seconds: if costs { 0.5 } else { 0.0 }, pinned, waits: !step_end };
        }
        let policies = (0..routers).map(|_| REGISTRY.policy("dynamo", &[]).unwrap().into()).collect();
        let mut cluster = Cluster::new(&workload, policies, &config).unwrap();
        let mut steps = 0;
        while cluster.step().unwrap() {
            check(&mut cluster)?;
            steps += 1;
            if moves > 0 && steps % moves == 0 && move_one(&mut cluster, steps) {
                check(&mut cluster)?;
            }
        }
        let records = &cluster.records;
        prop_assert!(records.finished_seconds.iter().all(|at| at.is_finite()));
        let moved = records.moves.iter().sum::<i64>() as u64;
        let fetches = records.fetch_instance.iter().filter(|holder| **holder >= 0).count() as u64;
        let mut told = [0; 4];
        for observer in cluster.routers.each() {
            let totals = observer.router.totals();
            let all = [totals.output_tokens, totals.moved, totals.fetches, observer.router.in_flight() as u64];
            told.iter_mut().zip(all).for_each(|(sum, each)| *sum += each);
        }
        prop_assert_eq!(told, [shape_outputs(&workload), moved, fetches, 0]);
        let handed = records.handoff_seconds.iter().filter(|at| at.is_finite()).count();
        let split = records.cut_tokens.iter().filter(|cut| **cut >= 0).count();
        prop_assert_eq!(split, if decodes > 0 { 0 } else { handed });
        prop_assert_eq!(cluster.fetches.len(), 0);
    }
}
