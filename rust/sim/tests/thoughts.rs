//! Reasoning tokens: their own token SLO, in counts and in batches, and requests that answer on
//! another instance (Libra, section 4.4).
#[path = "common/cluster.rs"]
mod common;

use lmetric_core::estimate::StepTime;
use lmetric_core::router::RouterConfig;
use lmetric_sim::{
    Admission, ClusterConfig, Engine, Gaps, Order, Outcome, Profile, Prompt, Request, Settings, TokenSlo,
    Trace, Transfer, Workload, simulate,
};
use lmetric_study::REGISTRY;
use lmetric_study::planner::given;
use proptest::prelude::*;
use std::collections::HashMap;

/// Round constants: a step takes 1 s, 0.1 s per decode and 0.01 s per prompt token.
fn round() -> Profile {
    Profile { decode_seconds_per_context_token: 0.0, cache_blocks: 64, ..common::round() }
}

/// Prompt tokens, output tokens and, among these, reasoning tokens.
type Ask = (u32, u32, u32);

/// Returns the gaps of each request on one engine, all submitted at the times given.
fn gaps(settings: Settings, slo: TokenSlo, asks: &[(f64, Ask)], jumps: bool, blocks: u32) -> Vec<Gaps> {
    let mut engine = Engine::new(Profile { cache_blocks: blocks, ..round() }, settings, None).unwrap();
    engine.set_token_slo(slo);
    let mut found = HashMap::new();
    let (mut now, mut next) = (0.0, 0);
    loop {
        while let Some((at, (prompt, output, thoughts))) = asks.get(next).filter(|ask| ask.0 <= now) {
            let prompt = Prompt::Chain { hashes: &[], tokens: *prompt };
            let request = Request { think_tokens: *thoughts, ..Request::new(next as u64, prompt, *output) };
            engine.submit(&request, *at).unwrap();
            next += 1;
        }
        let until = asks.get(next).map_or(f64::INFINITY, |ask| ask.0);
        match if jumps { engine.start_steps(now, until) } else { engine.start_step(now) } {
            Some(end) => now = end,
            None if next < asks.len() => {
                now = asks[next].0;
                continue;
            }
            None => break,
        }
        let events = engine.finish_step();
        found.extend(events.finished.iter().copied().zip(events.gaps.iter().copied()));
    }
    (0..asks.len() as u64).map(|id| found[&id]).collect()
}

#[test]
fn a_thought_is_slow_by_its_own_slo_only() {
    // Ten tokens, each 1.1 s behind the one before; from the 5th second on with another decode, 1.2
    // s. Six are reasoning tokens: five gaps of theirs, four of the answer.
    let slo = |answer_seconds, think_seconds| TokenSlo { answer_seconds, think_seconds };
    let alone = |slo| gaps(Settings::default(), slo, &[(0.0, (16, 10, 6))], true, 64)[0];
    assert_eq!(alone(slo(1.0, 1.0)).slow, 9);
    assert_eq!(alone(slo(1.0, 2.0)).slow, 4);
    assert_eq!(alone(slo(2.0, 1.0)).slow, 5);
    assert_eq!(gaps(Settings::default(), slo(1.0, 2.0), &[(0.0, (16, 10, 10))], true, 64)[0].slow, 0);
    assert_eq!(
        gaps(Settings::default(), slo(1.0, 2.0), &[(0.0, (16, 10, 1))], true, 64)[0].slow,
        9,
        "the first has no gap"
    );
    assert_eq!(alone(slo(1.0, 2.0)).worst, 1.1);
}

#[test]
fn thoughts_alone_let_a_step_take_longer() {
    // A request decodes when a prompt of 200 tokens arrives. Answers allow 1.4 s: 1.1 for the
    // decode, 30 tokens. Reasoning allows 1.5 s: 40 tokens.
    let slo = TokenSlo { answer_seconds: 1.4, think_seconds: 1.5 };
    let settings = Settings { order: Order::named("slo", 0, slo).unwrap(), ..Settings::default() };
    let counted = TokenSlo { answer_seconds: 1.401, think_seconds: 1.501 };
    let worst = |thoughts| {
        gaps(settings.clone(), counted, &[(0.0, (16, 40, thoughts)), (2.0, (200, 1, 0))], true, 64)[0]
    };
    let near =
        |found: Gaps, worst: f64| assert!((found.worst - worst).abs() < 1e-9 && found.slow == 0, "{found:?}");
    near(worst(0), 1.4);
    near(worst(40), 1.5);
    // It answers from its fourth token on. By then a step of reasoning tokens has run beside the
    // prompt, and the rest are short.
    let crosses = worst(4);
    near(crosses, 1.5);
    let two = [(0.0, (16, 40, 40)), (0.0, (16, 40, 0)), (2.5, (200, 1, 0))];
    near(gaps(settings.clone(), counted, &two, true, 64)[0], 1.4);
}

proptest! {
    #[test]
    fn gaps_are_the_same_step_by_step(
        asks in prop::collection::vec((0.0f64..30.0, 1u32..90, 1u32..40, 0u32..41), 1..16),
        answer_seconds in 1.0f64..2.0,
        think_seconds in 1.0f64..2.0,
        slo_order: bool,
        vllm: bool,
        blocks in 9u32..40,
    ) {
        let mut asks: Vec<(f64, Ask)> =
            asks.into_iter().map(|(at, p, o, t)| (at, (p, o, t.min(o)))).collect();
        asks.sort_by(|a, b| a.0.total_cmp(&b.0));
        let slo = TokenSlo { answer_seconds, think_seconds };
        let order = if slo_order { Order::named("slo", 0, slo).unwrap() } else { Order::default() };
        let admission = if vllm { Admission::Vllm } else { Admission::Reserve };
        let settings = Settings { admission, order, ..Settings::default() };
        let (jumps, steps) = (gaps(settings.clone(), slo, &asks, true, blocks), gaps(settings.clone(), slo, &asks, false, blocks));
        for (a, b) in jumps.iter().zip(&steps) {
            prop_assert_eq!(a.slow, b.slow);
            prop_assert!((a.worst - b.worst).abs() < 1e-9);
        }
        // All of one kind: as if that were the only SLO. With equal SLOs, reasoning tokens make no
        // difference.
        let as_thoughts = |share: u32| asks.iter().map(|(at, (p, o, _))| (*at, (*p, *o, o * share))).collect::<Vec<_>>();
        let same = TokenSlo::same(think_seconds);
        let plain = Settings { order: Order::default(), ..settings };
        prop_assert_eq!(gaps(plain.clone(), slo, &as_thoughts(1), false, blocks), gaps(plain, same, &as_thoughts(0), false, blocks));
    }
}

fn play(asks: &[Ask], instances: usize, change: impl FnOnce(&mut ClusterConfig)) -> Outcome {
    let column = |of: fn(&Ask) -> u32| asks.iter().map(|ask| i64::from(of(ask))).collect::<Vec<_>>();
    let trace = Trace {
        arrival_seconds: &vec![0.0; asks.len()],
        input_tokens: &column(|ask| ask.0),
        output_tokens: &column(|ask| ask.1),
        think_tokens: &column(|ask| ask.2),
        hash_offsets: &vec![0; asks.len() + 1],
        block_tokens: 16,
        ..Trace::default()
    };
    let step = StepTime {
        fixed_seconds: 1.0,
        decode_seconds_per_sequence: 0.1,
        decode_seconds_per_context_token: 0.0,
        prefill_seconds_per_token: 0.01,
        prefill_seconds_per_attention_pair: 0.0,
        max_batch_tokens: 64.0,
        max_sequences: f64::INFINITY,
    };
    let libra = [("min_gain", -1.0), ("min_tokens", 4.0)];
    let mut config = ClusterConfig {
        transfer: Transfer { seconds_per_token: 0.02, fixed_seconds: 0.5, ..Transfer::default() },
        admission: Admission::Vllm,
        router: RouterConfig { step_time: Some(step), ..RouterConfig::default() },
        split: given(REGISTRY.split("libra_three", &libra).unwrap()),
        token_slo: TokenSlo { answer_seconds: 1.0, think_seconds: 20.0 },
        ..common::config(vec![round(); instances])
    };
    change(&mut config);
    let policy = REGISTRY.policy("round_robin", &[]).unwrap();
    simulate::<lmetric_core::CoreError>(
        &Workload::new(&trace, 16).unwrap(),
        vec![policy.into()],
        &config,
        || Ok(()),
    )
    .unwrap()
}

#[test]
fn an_answer_that_comes_back_moves_only_what_was_thought_elsewhere() {
    let out = play(&[(40, 60, 50)], 2, |_| {});
    let r = &out.records;
    let (s, t) = (r.cut_tokens[0] as u32, r.answer_cut_tokens[0] as u32);
    assert!((44..90).contains(&s) && t == 90, "{s} {t}");
    assert_eq!((r.instance[0], r.decode_instance[0]), (r.instance[0], r.instance[0]));
    // Its prompt in 1.4 s, then a step per token. A token is made again at each boundary.
    let thought = 1.4 + 1.1 * f64::from(s - 40);
    let there = thought + 0.5 + 0.02 * f64::from(s);
    let end = there + 1.1 * f64::from(t - s + 1);
    assert!((r.handoff_seconds[0] - end).abs() < 1e-6, "{} is not {end}", r.handoff_seconds[0]);
    // It comes back to the full blocks of the first part.
    let back = end + 0.5 + 0.02 * f64::from(t - s / 16 * 16);
    assert!((r.decode_start_seconds[0] - back).abs() < 1e-6, "{} is not {back}", r.decode_start_seconds[0]);
    assert!((r.finished_seconds[0] - (back + 11.0)).abs() < 1e-6);
    // Reasoning tokens have 20 s, and the first token has no gap. Ten answer tokens are too late:
    // nine of 1.1 s and the first, behind the KV transfer.
    assert_eq!(r.slow_tokens[0], 10);
    assert_eq!(out.routers[0].totals().output_tokens, 60);
    // A token that is made again takes a step, which is part of the gap: the answer's first token
    // waits for it, too.
    let seam = back + 1.1 - (end - 1.1);
    assert!((r.worst_gap_seconds[0] - seam.max(there + 1.1 - (thought - 1.1))).abs() < 1e-6);
}

#[test]
fn with_three_instances_each_part_has_its_own_and_tight_thoughts_are_slow() {
    let out = play(&[(40, 120, 60)], 3, |config| config.token_slo = TokenSlo::same(1.0));
    let r = &out.records;
    assert!(r.cut_tokens[0] > 0 && (r.cut_tokens[0]..=100).contains(&r.answer_cut_tokens[0]));
    assert_ne!(r.decode_instance[0], r.instance[0]);
    assert_eq!(r.slow_tokens[0], 119);
    let loose = play(&[(40, 120, 60)], 3, |config| config.token_slo.think_seconds = 20.0);
    assert_eq!(loose.records.slow_tokens[0], 60);
    assert_eq!(loose.records.finished_seconds, r.finished_seconds, "an SLO that only counts moves nothing");
}
