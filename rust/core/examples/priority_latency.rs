//! Cost of priorities:
//!
//! - the priority of one request, revised at every step as in a scheduler
//!   ([`Settings::boosted_arrival`]);
//! - gamma, updated with every ended request ([`TailRate`]);
//! - virtual token counters;
//! - a whole decision ([`Router::route`]), with and without priorities.
//!
//! `cargo run --release -p lmetric-core --example priority_latency`. Revisions are timed 64 at a
//! time, because one takes less time than reading the clock. All others are timed call by call.
use lmetric_core::Registry;
use lmetric_core::fleet::Role;
use lmetric_core::plan::{Event, Failure};
use lmetric_core::priority::vtc::VirtualTokens;
use lmetric_core::priority::{Adaptive, MemGuard, Settings, TailRate, Work};
use lmetric_core::request::{Request, Tenant};
use lmetric_core::router::{PrefixMatch, Priorities, Router, RouterConfig};
use rand::{RngExt, SeedableRng};
use rand_pcg::Pcg64;
use std::hint::black_box;
use std::time::Instant;

const SAMPLES: usize = 20_000;
const AT_ONCE: usize = 64;

fn report(name: &str, mut nanoseconds: Vec<f64>) {
    nanoseconds.sort_unstable_by(f64::total_cmp);
    let at = |share: f64| nanoseconds[(share * (nanoseconds.len() - 1) as f64) as usize] / 1e3;
    println!("{name:<48} p50 {:7.3} us   p99 {:7.3} us   p99.9 {:7.3} us", at(0.5), at(0.99), at(0.999));
}

/// Measures priorities of requests that have advanced by a token.
fn revisions(name: &str, memguard: Option<MemGuard>) {
    let settings = Settings { memguard, ..Settings::default() };
    let mut rng = Pcg64::seed_from_u64(1);
    let mut jobs: Vec<(f64, Work)> = (0..AT_ONCE)
        .map(|i| {
            let work = Work { prompt_tokens: rng.random_range(20..8000), ..Work::default() };
            (i as f64, Work { attained_tokens: rng.random_range(0..16_000), ..work })
        })
        .collect();
    let mut ranks = [0.0; AT_ONCE];
    let each = (0..SAMPLES).map(|_| {
        let start = Instant::now();
        for ((arrival, work), rank) in jobs.iter_mut().zip(&mut ranks) {
            work.attained_tokens += 1;
            *rank = settings.boosted_arrival(*arrival, work, 0.1, 1e-4);
        }
        black_box(&ranks);
        start.elapsed().as_nanos() as f64 / AT_ONCE as f64
    });
    report(name, each.collect());
}

fn each(name: &str, mut call: impl FnMut(&mut Pcg64)) {
    let mut rng = Pcg64::seed_from_u64(2);
    let took = (0..SAMPLES).map(|_| {
        let mut given = rng.clone();
        rng.random::<u64>();
        let start = Instant::now();
        call(&mut given);
        start.elapsed().as_nanos() as f64
    });
    report(name, took.collect());
}

fn decisions(name: &str, priorities: Option<Priorities>, instances: usize) {
    let policy = Registry::CORE.policy("lmetric", &[]).expect("registered");
    let mut router = Router::new(policy, RouterConfig::default()).expect("good settings");
    for i in 0..instances {
        router.add_instance(&format!("engine-{i}"), Role::Both, Some(75_000)).expect("a new name");
    }
    router.set_priorities(priorities).expect("good settings");
    let mut rng = Pcg64::seed_from_u64(3);
    let mut took = Vec::with_capacity(SAMPLES);
    for i in 0..SAMPLES {
        let now = i as f64 * 1e-3;
        let prompt_tokens = rng.random_range(64..16_384);
        let mut chain: Vec<u64> = (0..prompt_tokens / 16).map(|_| rng.random()).collect();
        let tenant = Tenant { id: rng.random_range(0..100), ..Tenant::NOBODY };
        let request = Request { prompt_tokens, tokens_per_block: 16.0, tenant, ..Request::default() };
        let start = Instant::now();
        let decision = router
            .route_matched(&request, &mut chain, &mut PrefixMatch::default(), None, now)
            .expect("an instance");
        took.push(start.elapsed().as_nanos() as f64);
        router.advance(decision.ticket, Event::Failed(Failure::Cancelled), now).expect("open");
    }
    report(&format!("route, {name}, {instances} instances"), took);
}

fn main() {
    each("clock", |_| ());
    revisions("a request's priority, each token", None);
    revisions("a request's priority, in bins", Some(MemGuard::default()));
    let mut tail = TailRate::new(0.1, Adaptive::default()).expect("good settings");
    each("gamma, with each end", |rng| {
        black_box(tail.ended(rng.random_range(0.1..100.0)));
    });
    let mut counters = VirtualTokens::default();
    each("virtual tokens: begin, charge, end", |rng| {
        let place = counters.begin(rng.random_range(0..1000), 1000, 1.0);
        counters.charge(place, 100);
        counters.end(place);
    });
    let uniboost = Priorities::UniBoost {
        settings: Settings::default(),
        max_seconds: Priorities::MAX_SECONDS,
        clock_offset_seconds: 0.0,
    };
    for instances in [2, 256] {
        for (name, priorities) in
            [("no priorities", None), ("uniboost", Some(uniboost)), ("vtc", Some(Priorities::Vtc))]
        {
            decisions(name, priorities, instances);
        }
    }
}
