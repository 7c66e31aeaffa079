//! The router learns the costs of the engine model's steps from its own traffic, with only the
//! signals of a live server.
use lmetric_core::estimate::{Queued, StepTime};
use lmetric_core::fleet::Role;
use lmetric_core::indicators::{Indicator, IndicatorSet};
use lmetric_core::plan::{Event, Usage};
use lmetric_core::router::{Router, RouterConfig, TicketId, TtftSource};
use lmetric_core::{Slot, request};
use lmetric_sim::{Engine, Profile, Prompt, Request, Settings};
use lmetric_study::REGISTRY;
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::TestRunner;
use std::collections::HashMap;

const BLOCK: u32 = 16;

fn profile(f: [f64; 5], max_batch_tokens: u32) -> Profile {
    Profile {
        fixed_seconds: 0.01 * f[0],
        decode_seconds_per_sequence: 5e-5 * f[1],
        decode_seconds_per_context_token: 8e-8 * f[2],
        prefill_seconds_per_token: 6e-5 * f[3],
        prefill_seconds_per_attention_pair: 2e-9 * f[4],
        max_batch_tokens,
        max_sequences: 256,
        block_tokens: BLOCK,
        cache_blocks: 60_000,
        decode_throughput: None,
    }
}

/// Arrival in seconds, prompt tokens, prompt tokens that the engine has cached, output tokens.
type Ask = (f64, u32, u32, u32);

/// Plays requests over one engine and returns the router. Tokens arrive `jitter` late, in turns.
fn play(profile: &Profile, asks: &[Ask], jitter: f64) -> Router {
    let mut router = Router::new(REGISTRY.policy("lmetric", &[]).unwrap(), RouterConfig::default()).unwrap();
    router.add_instance("a", Role::Both, Some(profile.cache_blocks)).unwrap();
    let mut engine = Engine::new(profile.clone(), Settings::default(), None).unwrap();
    let mut tickets: HashMap<u64, TicketId> = HashMap::new();
    let (mut next, mut now, mut end) = (0, 0.0, None);
    loop {
        let arrival = asks.get(next).map(|ask| ask.0);
        match (end, arrival) {
            (None, None) => break,
            (_, Some(at)) if end.is_none_or(|end| at < end) => {
                let (_, tokens, shared, output_tokens) = asks[next];
                let own = 1_000_000 * (next as u64 + 1);
                let chain: Vec<u64> = (0..u64::from(tokens / BLOCK))
                    .map(|block| if block < u64::from(shared / BLOCK) { block + 1 } else { own + block })
                    .collect();
                let asked = request::Request {
                    chain: &chain,
                    prompt_tokens: tokens,
                    tokens_per_block: f64::from(BLOCK),
                    ..Default::default()
                };
                let ticket = router.route(&asked, at).unwrap().ticket;
                router.advance(ticket, Event::Sent, at).unwrap();
                tickets.insert(next as u64, ticket);
                let prompt = Prompt::Chain { hashes: &chain, tokens };
                let id = next as u64;
                engine.submit(&Request::new(id, prompt, output_tokens), at).unwrap();
                (next, now) = (next + 1, at);
            }
            (Some(at), _) => {
                let decoding: Vec<u64> = engine.decoding().map(|(id, _)| id).collect();
                let events = engine.finish_step().clone();
                let mut tell = |order: usize, id: u64, event| {
                    let late = jitter * (order % 7) as f64 / 7.0;
                    router.advance(tickets[&id], event, at + late).unwrap();
                };
                let done = events.prefilled.iter().filter(|p| p.done).map(|p| (p.id, Event::FirstToken));
                let tokens = decoding.iter().map(|id| (*id, Event::Tokens(1)));
                tokens.chain(done).enumerate().for_each(|(i, (id, event))| tell(i, id, event));
                events.finished.iter().for_each(|id| tell(0, *id, Event::Finished(Usage::default())));
                now = at;
                end = None;
            }
            (None, Some(_)) => unreachable!("an arrival at an idle engine was taken above"),
        }
        if end.is_none() {
            end = engine.start_step(now);
        }
    }
    router.derive_some(IndicatorSet::ALL, now);
    router
}

fn learned(router: &mut Router, decoding: f64, context: f64) -> f64 {
    let id = Slot(0);
    assert_eq!(router.ttft_source(id, router.knows_a_rate()), TtftSource::LearnedStepTime);
    router.step_time(id).unwrap().step(decoding, context)
}

fn model(profile: &Profile) -> StepTime {
    StepTime {
        fixed_seconds: profile.fixed_seconds,
        decode_seconds_per_sequence: profile.decode_seconds_per_sequence,
        decode_seconds_per_context_token: profile.decode_seconds_per_context_token,
        prefill_seconds_per_token: profile.prefill_seconds_per_token,
        prefill_seconds_per_attention_pair: profile.prefill_seconds_per_attention_pair,
        max_batch_tokens: f64::from(profile.max_batch_tokens),
        max_sequences: f64::INFINITY,
    }
}

/// Sessions of varied prompts, shared prefixes and answers, with bursts and idle times, on engines
/// of varied costs. The draws are fixed, because values learned from a few requests are estimates,
/// and some of many random draws would be off.
#[test]
fn learns_what_steps_cost() {
    let drawn = (
        prop::array::uniform5(0.4f64..2.5),
        prop::sample::select(vec![2048u32, 8192]),
        0.0f64..2e-3,
        prop::collection::vec((0.0f64..1.0, 32u32..6000, 0u32..4000, 10u32..300), 120..200),
    );
    let mut runner = TestRunner::deterministic();
    let (cases, mut far) = (48, Vec::new());
    for _ in 0..cases {
        let (factors, budget, jitter, gaps) = drawn.new_tree(&mut runner).unwrap().current();
        let profile = profile(factors, budget);
        // About a third of the engine's capacity, whatever its costs are.
        let truth = model(&profile);
        let seconds = |g: &Ask| {
            truth.ttft(Queued::default(), 0.0, f64::from(g.1), 0.0, 0.0)
                + 0.1 * f64::from(g.3) * truth.fixed_seconds
        };
        let busy: f64 = gaps.iter().map(seconds).sum();
        let pace = 2.0 * 2.0 * busy / gaps.len() as f64;
        let mut at = 0.0;
        let asks = gaps.iter().map(|g| {
            at += g.0 * pace;
            (at, g.1, g.2.min(g.1), g.3)
        });
        let mut router = play(&profile, &asks.collect::<Vec<Ask>>(), jitter);
        let error = router.columns().get(Indicator::StepRelativeError)[0];
        assert!(error < 0.1, "{error}");
        for (decoding, context) in [(2.0, 6_000.0), (5.0, 15_000.0), (10.0, 30_000.0)] {
            let (is, should) = (learned(&mut router, decoding, context), truth.step(decoding, context));
            assert!((is / should - 1.0).abs() < 0.05, "{is} {should}");
        }
        let step = router.step_time(Slot(0)).unwrap();
        // Effects of a step beyond 2,048 tokens show only if prompts are long and many.
        let tolerance = if budget == 2048 { 0.15 } else { 0.4 };
        for (hit, new) in [(0.0, 2000.0), (0.0, 5000.0), (3000.0, 2000.0)] {
            let [is, should] =
                [step, truth].map(|model| model.ttft(Queued::default(), hit, new, 4.0, 12_000.0));
            assert!((0.5..2.0).contains(&(is / should)), "{hit} {new}: {is} {should}");
            if (is / should - 1.0).abs() > tolerance {
                far.push((budget, hit, new, is / should));
            }
        }
    }
    assert!(far.len() <= 3 * cases / 20, "{far:?}");
}

/// Without streams, the router learns no step times and invents none.
#[test]
fn without_streams_step_times_stay_absent() {
    let profile = profile([1.0; 5], 2048);
    let mut router = Router::new(REGISTRY.policy("lmetric", &[]).unwrap(), RouterConfig::default()).unwrap();
    router.add_instance("a", Role::Both, Some(profile.cache_blocks)).unwrap();
    for i in 0..100 {
        let asked = request::Request { prompt_tokens: 100, ..Default::default() };
        let ticket = router.route(&asked, f64::from(i)).unwrap().ticket;
        router.advance(ticket, Event::Sent, f64::from(i)).unwrap();
        router.advance(ticket, Event::Finished(Usage::default()), f64::from(i) + 0.5).unwrap();
    }
    router.derive_some(IndicatorSet::ALL, 200.0);
    for id in [
        Indicator::StepSeconds,
        Indicator::StepRelativeError,
        Indicator::PredictedTpotSeconds,
        Indicator::PrefillRelativeError,
    ] {
        assert!(router.columns().get(id)[0].is_nan(), "{id:?}");
    }
    assert_eq!(router.ttft_source(Slot(0), false), TtftSource::Prior);
}
