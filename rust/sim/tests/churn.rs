//! Instances that join and leave, cold and warm.
#[path = "common/cluster.rs"]
mod common;

use lmetric_core::CoreError;
use lmetric_core::warm::WarmConfig;
use lmetric_sim::{
    Admission, ClusterConfig, FleetChange, MoveBy, Outcome, Profile, Recompute, Signals, Trace, Transfer,
    Workload, simulate,
};
use lmetric_study::REGISTRY;

const fn join(at_seconds: f64, instance: u32) -> FleetChange {
    FleetChange { at_seconds, instance, joins: true }
}

const fn leave(at_seconds: f64, instance: u32) -> FleetChange {
    FleetChange { at_seconds, instance, joins: false }
}

fn config(instances: usize, changes: &[FleetChange], warm: bool) -> ClusterConfig {
    let mut config = common::config(vec![Profile { cache_blocks: 256, ..common::round() }; instances]);
    config.admission = Admission::Vllm;
    config.transfer = Transfer { seconds_per_token: 0.001, fixed_seconds: 0.1, ..Transfer::default() };
    config.changes = changes.to_vec();
    config.router.warm = warm.then_some(WarmConfig {
        min_tokens: 16,
        seconds_per_token: 0.001,
        fixed_seconds: 0.1,
        ..WarmConfig::default()
    });
    config
}

/// (arrival, output tokens, conversation): prompts of 65 tokens, all of a conversation equal.
fn play(asks: &[(f64, i64, u64)], config: &ClusterConfig) -> Result<Outcome, CoreError> {
    let (mut offsets, mut ids) = (vec![0], Vec::new());
    for &(_, _, conversation) in asks {
        ids.extend((0..4).map(|block| 100 * conversation + block));
        offsets.push(ids.len() as i64);
    }
    let trace = Trace {
        arrival_seconds: &asks.iter().map(|ask| ask.0).collect::<Vec<_>>(),
        input_tokens: &vec![65; asks.len()],
        output_tokens: &asks.iter().map(|ask| ask.1).collect::<Vec<_>>(),
        hash_offsets: &offsets,
        hash_ids: &ids,
        block_tokens: 16,
        ..Trace::default()
    };
    let workload = Workload::new(&trace, 16)?;
    simulate(&workload, vec![REGISTRY.policy("lmetric", &[])?.into()], config, || Ok(()))
}

#[test]
fn a_newcomer_fetches_its_share_before_it_takes_requests() {
    // Four conversations on one instance; another joins at 50 s.
    let mut asks: Vec<_> = (0..4).map(|n| (10.0 * n as f64, 1, n)).collect();
    asks.extend((0..4).map(|n| (60.0 + 0.001 * n as f64, 1, n)));
    let warm = play(&asks, &config(2, &[join(50.0, 1)], true)).unwrap();
    let change = warm.changes[0];
    assert_eq!((change.fetches, change.fetched_tokens), (2, 2 * 64));
    // The prefixes take 0.164 s each and one token 1.1 s or more at the newcomer.
    assert!(change.done_seconds > 51.0 && change.done_seconds < 56.0, "{}", change.done_seconds);
    assert_eq!(&warm.records.instance[..4], [0; 4], "it was absent");
    let mut again = warm.records.instance[4..].to_vec();
    again.sort_unstable();
    assert_eq!(again, [0, 0, 1, 1]);
    assert_eq!(&warm.records.hit_tokens[4..], [64; 4], "each finds its prefix");
    let cold = play(&asks, &config(2, &[join(50.0, 1)], false)).unwrap();
    assert_eq!((cold.changes[0].done_seconds, cold.changes[0].fetches), (50.0, 0));
    assert_eq!(&cold.records.instance[4..], [0; 4], "nothing draws them to an empty cache");
    let last = |out: &Outcome| out.records.first_token_seconds[4..].iter().copied().fold(0.0, f64::max);
    assert!(last(&warm) < last(&cold), "{} {}", last(&warm), last(&cold));
}

#[test]
fn prefixes_of_an_instance_that_leaves_go_to_its_successors() {
    let mut asks = vec![(0.0, 1, 0), (0.0, 1, 1)];
    asks.extend([(60.0, 1, 0), (60.0, 1, 1)]);
    let warm = play(&asks, &config(2, &[leave(40.0, 0)], true)).unwrap();
    assert_eq!(
        (&warm.records.instance[..], &warm.records.hit_tokens[2..]),
        (&[0, 1, 1, 1][..], &[64, 64][..])
    );
    let change = warm.changes[0];
    assert_eq!((change.fetches, change.fetched_tokens), (1, 64));
    assert!(change.done_seconds < 45.0, "{}", change.done_seconds);
    let cold = play(&asks, &config(2, &[leave(40.0, 0)], false)).unwrap();
    let mut hits = cold.records.hit_tokens[2..].to_vec();
    hits.sort_unstable();
    assert_eq!((hits, cold.changes[0].done_seconds), (vec![0, 64], 40.0));
}

#[test]
fn running_requests_move_or_end_before_the_instance_is_gone() {
    // The request on instance 0 decodes for minutes when its instance leaves.
    let asks = [(0.0, 100, 0), (1.0, 1, 1), (60.0, 1, 0), (300.0, 1, 1)];
    let of = |warm| play(&asks, &config(2, &[leave(20.0, 0)], warm)).unwrap();
    let (warm, cold) = (of(true), of(false));
    for out in [&warm, &cold] {
        assert!(out.records.finished_seconds.iter().all(|end| end.is_finite()));
        assert_eq!(out.records.instance[2], 1);
    }
    assert_eq!((warm.records.moves[0], warm.changes[0].moves), (1, 1));
    assert!(warm.changes[0].done_seconds < 30.0);
    assert_eq!(cold.records.moves[0], 0);
    assert!(cold.changes[0].done_seconds >= cold.records.finished_seconds[0]);
}

#[test]
fn an_instance_comes_back_with_an_empty_cache() {
    let asks = [(0.0, 1, 0), (0.0, 1, 1), (50.0, 1, 0), (51.0, 1, 1), (90.0, 1, 0), (90.1, 1, 1)];
    let changes = [leave(20.0, 0), join(30.0, 0), leave(60.0, 1), join(70.0, 1)];
    for (warm, admission) in [(false, Admission::Vllm), (true, Admission::Vllm), (true, Admission::Reserve)] {
        for signals in [Signals::EXACT, Signals::delayed(0.02, 1.0)] {
            let config = ClusterConfig { signals, admission, ..config(2, &changes, warm) };
            let out = play(&asks, &config).unwrap();
            assert!(out.records.finished_seconds.iter().all(|end| end.is_finite()));
            let expected = |got: i64, predicted: i64| got == predicted;
            let both = out.records.hit_tokens.iter().zip(&out.records.predicted_hit_tokens);
            assert!(both.clone().all(|(got, predicted)| expected(*got, *predicted)), "{both:?}");
            let found: i64 = out.records.hit_tokens.iter().sum();
            assert_eq!(found == 4 * 64, warm, "{warm} {found}: a warm restart loses no prefix");
            assert!(out.changes.iter().all(|change| change.done_seconds.is_finite()));
        }
    }
}

#[test]
fn changes_of_an_instance_take_effect_in_order() {
    // The first request keeps instance 0 there for about two minutes, so that its join waits.
    let asks: Vec<_> = [(0.0, 100, 0), (1.0, 1, 1)]
        .into_iter()
        .chain((0..4).map(|n| (300.0 + f64::from(n), 9, 2)))
        .collect();
    let changes = [leave(10.0, 0), join(11.0, 0), leave(12.0, 0)];
    for warm in [false, true] {
        let out = play(&asks, &config(2, &changes, warm)).unwrap();
        assert_eq!((&out.records.instance[..2], &out.records.instance[2..]), (&[0, 1][..], &[1; 4][..]));
        let done: Vec<_> = out.changes.iter().map(|change| change.done_seconds).collect();
        assert!(done.iter().all(|at| at.is_finite()) && done.is_sorted(), "{done:?}");
        assert!(warm || done[0] >= out.records.finished_seconds[0]);
    }
}

#[test]
fn requests_wait_while_no_instance_takes_any() {
    // By the schedule, instance 0 is back before instance 1 leaves; but it has a request left.
    let asks = [(0.0, 100, 0), (1.0, 1, 1), (12.5, 1, 2), (13.0, 2, 3)];
    let out = play(&asks, &config(2, &[leave(10.0, 0), join(11.0, 0), leave(12.0, 1)], false)).unwrap();
    let (records, back) = (&out.records, out.changes[1].done_seconds);
    assert!(back >= records.finished_seconds[0] && records.finished_seconds[0] > 100.0);
    assert_eq!(records.instance, [0, 1, 0, 0]);
    assert_eq!(records.arrival_seconds[2..], [12.5, 13.0]);
    assert_eq!(records.hold_seconds[2..], [back - 12.5, back - 13.0]);
    assert!(records.finished_seconds.iter().all(|end| end.is_finite()));
}

#[test]
fn only_moves_that_begin_are_counted() {
    // Two requests leave instance 0, one at a time.
    let asks = [(0.0, 100, 0), (0.1, 100, 1), (0.2, 100, 2), (0.3, 100, 3)];
    let mut config = config(2, &[leave(20.0, 0)], true);
    config.move_by = MoveBy::Recompute(Recompute { at_once: 1, max_gap_seconds: 1e9 });
    let out = play(&asks, &config).unwrap();
    let moved: i64 = out.records.moves.iter().sum();
    assert_eq!((moved, out.changes[0].moves), (2, 2));
}

#[test]
fn an_approximate_index_learns_what_was_fetched() {
    let mut config = config(2, &[leave(40.0, 0)], true);
    config.router.index_feed = lmetric_core::router::IndexFeed::Approximate;
    let out = play(&[(0.0, 1, 0), (0.0, 1, 1), (60.0, 1, 0)], &config).unwrap();
    assert_eq!((out.records.predicted_hit_tokens[2], out.records.hit_tokens[2]), (64, 64));
}

#[test]
fn the_same_changes_give_the_same_run() {
    let asks: Vec<_> = (0..40).map(|n| (2.0 * n as f64, 1 + n as i64 % 7, n % 5)).collect();
    let changes = [leave(20.0, 0), join(30.0, 0), leave(40.0, 1), join(50.0, 1)];
    let runs = [(); 2].map(|()| play(&asks, &config(3, &changes, true)).unwrap());
    assert_eq!((&runs[0].records, &runs[0].changes), (&runs[1].records, &runs[1].changes));
}

#[test]
fn impossible_changes_are_named() {
    let asks = [(0.0, 1, 0)];
    for (changes, what) in [
        (vec![leave(5.0, 7)], "0 to 1"),
        (vec![leave(5.0, 0), leave(6.0, 0)], "leaves twice"),
        (vec![leave(5.0, 0), leave(6.0, 1)], "at least one instance"),
        (vec![leave(5.0, 0), join(4.0, 0)], "in order of time"),
        (vec![join(f64::NAN, 0)], "in order of time"),
    ] {
        let message = play(&asks, &config(2, &changes, true)).err().unwrap().to_string();
        assert!(message.contains(what), "{message}");
    }
}
