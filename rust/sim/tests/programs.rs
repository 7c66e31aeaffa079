//! Programs, worked out by hand: requests that wait for several others, answers in the cache, and
//! bounds under a cache without an end.
#[path = "common/cluster.rs"]
mod common;

use lmetric_core::CoreError;
use lmetric_sim::{Admission, ClusterConfig, Outcome, Profile, Signals, Trace, Workload, simulate};
use lmetric_study::REGISTRY;

fn play(workload: &Workload, config: &ClusterConfig) -> Outcome {
    let policy = REGISTRY.policy("round_robin", &[]).unwrap();
    simulate(workload, vec![policy.into()], config, || Ok::<(), CoreError>(())).unwrap()
}

#[track_caller]
fn close(got: f64, expected: f64) {
    assert!((got - expected).abs() < 1e-9, "{got} instead of {expected}");
}

/// A parent, two subagents behind it, and the parent's next turn, which waits for both. No prompt
/// shares a block. A prompt of 16 tokens takes 1.16 s alone, a prompt of 32 tokens 1.32 s.
fn family() -> Trace<'static> {
    Trace {
        arrival_seconds: &[0.0; 4],
        input_tokens: &[16, 16, 32, 16],
        output_tokens: &[1; 4],
        hash_offsets: &[0; 5],
        block_tokens: 16,
        previous: &[-1, 0, 0, 0],
        joins: &[3, 2, 3, 1],
        think_seconds: &[0.0, 1.0, 1.0, 2.0],
        ..Trace::default()
    }
}

#[test]
fn a_join_waits_for_the_last_end() {
    for signals in [Signals::EXACT, Signals::STEP_END] {
        let config = ClusterConfig { signals, ..common::config(vec![common::round(); 2]) };
        let records = play(&Workload::new(&family(), 16).unwrap(), &config).records;
        // The parent ends at 1.16 s, the subagents begin at 2.16 s and end at 3.32 and 3.48 s.
        for (i, arrival) in [0.0, 2.16, 2.16, 5.48].into_iter().enumerate() {
            close(records.arrival_seconds[i], arrival);
        }
        close(records.finished_seconds[3], 6.64);
        assert_eq!(records.computed_tokens, [16, 16, 32, 16]);
        assert_eq!(records.hold_seconds, [0.0; 4]);
    }
}

#[test]
fn a_join_never_arrives_before_its_time_in_the_trace() {
    let trace = Trace { arrival_seconds: &[0.0, 0.0, 0.0, 9.0], ..family() };
    let config = common::config(vec![common::round(); 2]);
    let workload = Workload::new(&trace, 16).unwrap();
    close(play(&workload, &config).records.arrival_seconds[3], 9.0);
    // Twice as fast: think times and arrivals take half the time, the engine the same.
    let records = play(&workload.faster(2.0).unwrap(), &config).records;
    close(records.arrival_seconds[1], 1.66);
    close(records.arrival_seconds[3], 4.5);
}

#[test]
fn wrong_joins_are_named() {
    for (joins, part) in [
        (&[3, 1, 3][..], "length of joins: 3"),
        (&[3, 4], "second request of pair 0: 4"),
        (&[-1, 2], "first request of pair 0: -1"),
        (&[2, 2], "second request of pair 0: 2"),
        (&[3, 1, 3, 1], "joins of request 3: request 1 twice"),
        (&[3, 0], "joins of request 3: request 0 twice"),
        (&[0, 3], "one that does not wait for it in turn"),
    ] {
        let error = Workload::new(&Trace { joins, ..family() }, 16).unwrap_err().to_string();
        assert!(error.contains(part), "{error}");
    }
    let error = Workload::new(&Trace { finish: &[0, 1, -1, 3], ..family() }, 16).unwrap_err().to_string();
    assert!(error.contains("finish of request 3"), "{error}");
    let workload = Workload::new(&Trace { finish: &[0, 1, -1, 0], ..family() }, 16).unwrap();
    assert_eq!([0, 1, 2].map(|i| workload.finish(i)), [0, 1, -1]);
}

/// A turn of 30 prompt and 20 output tokens, and the next turn. The next prompt, of 70 tokens,
/// begins with the first prompt and its answer. They share the first block.
fn turns() -> Trace<'static> {
    Trace {
        arrival_seconds: &[0.0; 2],
        input_tokens: &[30, 70],
        output_tokens: &[20, 1],
        hash_offsets: &[0, 2, 7],
        hash_ids: &[1, 2, 1, 3, 4, 5, 6],
        block_tokens: 16,
        previous: &[-1, 0],
        think_seconds: &[0.0, 2.0],
        ..Trace::default()
    }
}

#[test]
fn the_next_turn_finds_a_cached_answer() {
    let workload = Workload::new(&turns(), 16).unwrap();
    // 49 of the 50 tokens have KV: three full blocks, one of them the prompt's.
    for (cached_answers, hit) in [(false, 16), (true, 48)] {
        let mut config = common::config(vec![common::round()]);
        (config.admission, config.cached_answers) = (Admission::Vllm, cached_answers);
        let records = play(&workload, &config).records;
        assert_eq!((records.hit_tokens[1], records.predicted_hit_tokens[1]), (hit, hit));
        assert_eq!(records.computed_tokens, [30, 70 - hit]);
        let computed = workload.min_computed_tokens(Admission::Vllm, cached_answers);
        assert_eq!(computed, records.computed_tokens);
        // 1.3 s, and 19 decodes behind 31 to 49 tokens: 19 x 1.1 + 0.76 s.
        let ends = workload.ideal_finished_seconds(&config.profiles, &computed);
        close(ends[0], 22.96);
        // The next turn begins at 24.96 s. At most 64 tokens fit a step.
        close(ends[1], 24.96 + 1.0 + 0.01 * (70 - hit) as f64);
        close(records.finished_seconds[0], ends[0]);
        close(records.finished_seconds[1], ends[1]);
    }
}

#[test]
fn only_a_continuation_names_an_answer() {
    // The next prompt differs in its first block, or is too short for the whole answer.
    for trace in [
        Trace { hash_ids: &[1, 2, 9, 3, 4, 5, 6], ..turns() },
        Trace { input_tokens: &[30, 49], hash_offsets: &[0, 2, 6], hash_ids: &[1, 2, 1, 3, 4, 5], ..turns() },
    ] {
        let workload = Workload::new(&trace, 16).unwrap();
        let own = workload.min_computed_tokens(Admission::Vllm, false);
        assert_eq!(workload.min_computed_tokens(Admission::Vllm, true), own);
    }
    // Prompts below a block continue each other only in one session.
    let short =
        Trace { input_tokens: &[8, 70], output_tokens: &[41, 1], hash_offsets: &[0, 1, 6], ..turns() };
    let short = Trace { hash_ids: &[2, 1, 3, 4, 5, 6], ..short };
    for (sessions, computed) in [(&[7, 7][..], 22), (&[7, 8], 70), (&[], 70)] {
        let workload = Workload::new(&Trace { sessions, ..short.clone() }, 16).unwrap();
        assert_eq!(workload.min_computed_tokens(Admission::Vllm, true), [8, computed]);
    }
}

#[test]
fn answers_need_an_admission_that_caches_them() {
    let config = ClusterConfig { cached_answers: true, ..common::config(vec![common::round()]) };
    let policy = REGISTRY.policy("round_robin", &[]).unwrap();
    let workload = Workload::new(&turns(), 16).unwrap();
    let error = simulate(&workload, vec![policy.into()], &config, || Ok::<(), CoreError>(())).err().unwrap();
    assert!(error.to_string().contains("cached_answers"), "{error}");
}

#[test]
fn bounds_take_the_fastest_engine_and_the_last_end() {
    let workload = Workload::new(&family(), 16).unwrap();
    let slow = Profile { fixed_seconds: 5.0, ..common::round() };
    let ends = workload.ideal_finished_seconds(&[slow, common::round()], &[16, 16, 32, 16]);
    for (end, expected) in ends.into_iter().zip([1.16, 3.32, 3.48, 6.64]) {
        close(end, expected);
    }
}
