//! Times a search for a segment boundary (`lmetric_core::split`), over random loads and lengths.
//! Also times whole decisions ([`Router::route`], from chained hashes to the decision record), with
//! and without splits.
//!
//! Run `cargo run --release -p lmetric-study --example split_latency`. Each sample is one call
//! between two readings of the clock, so the tail is visible; the clock's own time is printed
//! first.
use lmetric_core::estimate::StepTime;
use lmetric_core::fleet::Role;
use lmetric_core::plan::{Event, Failure};
use lmetric_core::request::Request;
use lmetric_core::router::{FetchConfig, PrefixMatch, Router, RouterConfig, Split};
use lmetric_core::split::predict::Instance;
use lmetric_core::split::{Found, Load, Settings, Whole, search};
use lmetric_study::REGISTRY;
use lmetric_study::planner::{Placed, given, search_three};
use rand::{RngExt, SeedableRng};
use rand_pcg::Pcg64;
use std::hint::black_box;
use std::time::Instant;

const SAMPLES: usize = 200_000;

/// Approximately the profile `llama-3.1-8b-a100`.
const STEP: StepTime = StepTime {
    fixed_seconds: 0.01,
    decode_seconds_per_sequence: 2e-5,
    decode_seconds_per_context_token: 8e-8,
    prefill_seconds_per_token: 6e-5,
    prefill_seconds_per_attention_pair: 2.2e-9,
    max_batch_tokens: 2048.0,
    max_sequences: f64::INFINITY,
};

struct Case {
    whole: Whole,
    loads: [Load; 3],
}

fn case(rng: &mut Pcg64) -> Case {
    let prompt_tokens = rng.random_range(64..16_384);
    let mut load = || {
        let (queued, decoding) = (rng.random_range(0.0..8000.0), rng.random_range(0.0..128.0f64).floor());
        Load {
            queued_prefill_tokens: queued,
            queued_prefill_pairs: queued * 1000.0,
            decoding,
            context_tokens: decoding * 1500.0,
            remaining_output_tokens: decoding * rng.random_range(50.0..600.0),
        }
    };
    let loads = [load(), load(), load()];
    let whole = Whole {
        prompt_tokens,
        first_hit_tokens: rng.random_range(0..prompt_tokens),
        second_hit_tokens: 0,
        expected_output_tokens: rng.random_range(64..2048),
    };
    Case { whole, loads }
}

fn measure(name: &str, cases: &[Case], mut call: impl FnMut(&Case)) {
    let nanoseconds: Vec<u64> = cases
        .iter()
        .map(|case| {
            let start = Instant::now();
            call(black_box(case));
            start.elapsed().as_nanos() as u64
        })
        .collect();
    report(name, nanoseconds);
}

const DECISIONS: usize = 20_000;
/// Number of decodes that run on each instance meanwhile.
const RUNNING: usize = 32;

/// Times whole decisions for uncached prompts of 64 to 16,384 tokens, on busy instances.
fn decisions(instances: usize, policy: &str, split: Split, name: &str) {
    let mut rng = Pcg64::seed_from_u64(2);
    let fetch = (policy == "planner").then(FetchConfig::default);
    let policy = REGISTRY.policy(policy, &[]).expect("registered");
    let config = RouterConfig { step_time: Some(STEP), fetch, ..RouterConfig::default() };
    let mut router = Router::new(policy, config).expect("good settings");
    router.set_split(&split).expect("good settings");
    for i in 0..instances {
        router.add_instance(&format!("engine-{i}"), Role::Both, Some(75_000)).expect("a new name");
    }
    let mut route = |router: &mut Router, now: f64| {
        let prompt_tokens = rng.random_range(64..16_384);
        let expected_output_tokens = Some(rng.random_range(64..2048));
        let mut chain: Vec<u64> = (0..prompt_tokens / 16).map(|_| rng.random()).collect();
        let request =
            Request { prompt_tokens, tokens_per_block: 16.0, expected_output_tokens, ..Request::default() };
        let start = Instant::now();
        let decision = router
            .route_matched(&request, &mut chain, &mut PrefixMatch::default(), None, now)
            .expect("somebody");
        (decision, start.elapsed())
    };
    router.set_split(&Split::NONE).expect("good settings");
    for _ in 0..instances * RUNNING {
        let (decision, _) = route(&mut router, 0.0);
        router.advance(decision.ticket, Event::FirstToken, 1.0).expect("open");
        router.advance(decision.ticket, Event::Tokens(64), 1.0).expect("open");
    }
    router.set_split(&split).expect("good settings");
    let (mut nanoseconds, mut cut) = (Vec::with_capacity(DECISIONS), 0);
    for i in 0..DECISIONS {
        let now = 2.0 + i as f64 * 1e-3;
        let (decision, took) = route(&mut router, now);
        nanoseconds.push(took.as_nanos() as u64);
        cut += usize::from(router.bound(decision.ticket).next().is_some());
        router.advance(decision.ticket, Event::Failed(Failure::Cancelled), now).expect("open");
    }
    report(&format!("{name}, {instances} instances"), nanoseconds);
    println!("{:<36} {cut} of {DECISIONS} split", "");
}

fn report(name: &str, mut nanoseconds: Vec<u64>) {
    nanoseconds.sort_unstable();
    let at = |share: f64| nanoseconds[(share * (nanoseconds.len() - 1) as f64) as usize] as f64 / 1e3;
    println!("{name:<36} p50 {:7.3} us   p99 {:7.3} us   p99.9 {:7.3} us", at(0.5), at(0.99), at(0.999));
}

fn main() {
    let mut rng = Pcg64::seed_from_u64(1);
    let cases: Vec<Case> = (0..SAMPLES).map(|_| case(&mut rng)).collect();
    let settings = Settings::default();
    let six = Settings { epsilon: 0.0, ..settings };
    let run = |case: &Case, settings: &Settings| -> Found {
        search(&case.whole, &case.loads[0], &case.loads[1], &STEP, &STEP, settings)
    };
    measure("clock", &cases, |_| ());
    measure("two loads made ready", &cases, |case| {
        black_box((Instance::new(&case.loads[0], &STEP), Instance::new(&case.loads[1], &STEP)));
    });
    measure("search", &cases, |case| {
        black_box(run(case, &settings));
    });
    measure("search, always six probes", &cases, |case| {
        black_box(run(case, &six));
    });
    measure("three parts, three instances", &cases, |case| {
        let on = [0, 1, 2].map(|i| Placed { load: &case.loads[i], step: &STEP, hit_tokens: 0 });
        black_box(search_three(&case.whole, case.whole.expected_output_tokens / 2, on, &settings));
    });
    let found: Vec<Found> = cases.iter().map(|case| run(case, &settings)).collect();
    let cut = found.iter().filter(|found| found.cut_token.is_some()).count();
    let probes: u32 = found.iter().map(|found| found.probes).sum();
    println!("{cut} of {SAMPLES} split, {:.2} probes each", f64::from(probes) / SAMPLES as f64);
    let libra = given(REGISTRY.split("libra", &[]).expect("good settings"));
    for instances in [2, 256] {
        let apart = REGISTRY.split("apart", &[]).expect("good settings");
        for (policy, split, name) in [
            ("lmetric", libra.clone(), "route, split libra"),
            ("planner", apart, "route, planner"),
            ("lmetric", Split::NONE, "route, no split"),
        ] {
            decisions(instances, policy, split, name);
        }
    }
}
