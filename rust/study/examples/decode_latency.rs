//! Times the choice of a decode instance, by policy: `cargo run --release --example decode_latency
//! [instances [requests on each]]`.
//!
//! Each decision also chooses a prefill instance and counts the request there; `round_robin` shows
//! the time of that alone. Microseconds.
use lmetric_core::fleet::Role;
use lmetric_core::plan::{Event, Usage};
use lmetric_core::program::Finish;
use lmetric_core::request::Request;
use lmetric_core::router::{Router, RouterConfig};
use lmetric_study::REGISTRY;
use rand::{RngExt, SeedableRng};
use std::time::Instant;

const DONE: Event = Event::Finished(Usage {
    prompt_tokens: None,
    cached_tokens: None,
    output_tokens: None,
    finish: Finish::Unknown,
});

fn main() {
    let mut args = std::env::args().skip(1).map(|a| a.parse::<usize>().expect("a number"));
    let given = (args.next(), args.next());
    println!("{:<16}{:>10}{:>10}{:>10}{:>10}", "policy", "instances", "requests", "p50", "p99");
    for policy in ["round_robin", "least_requests", "ils", "sibyl", "sibyl_plus"] {
        for instances in given.0.map_or(vec![16, 64, 256], |n| vec![n]) {
            for requests in given.1.map_or(vec![16, 64, 256], |n| vec![n]) {
                let (p50, p99) = measure(policy, instances, requests);
                println!("{policy:<16}{instances:>10}{requests:>10}{p50:>10.2}{p99:>10.2}");
            }
        }
    }
}

/// Returns p50 and p99 of decisions over a fleet with `requests` requests on each decode instance,
/// one in eight of them still in prefill.
fn measure(policy: &str, instances: usize, requests: usize) -> (f64, f64) {
    let mut rng = rand_pcg::Pcg64Mcg::seed_from_u64(1);
    let least = REGISTRY.policy("least_requests", &[]).expect("known");
    let mut router = Router::new(least, RouterConfig::default()).expect("good settings");
    router.set_decode_policy(REGISTRY.policy(policy, &[]).expect("known")).expect("nothing in flight");
    for i in 0..instances / 4 {
        router.add_instance(&format!("p{i}"), Role::Prefill, None).expect("a new name");
    }
    for i in 0..instances {
        router.add_instance(&format!("d{i}"), Role::Decode, None).expect("a new name");
    }
    let mut now = 0.0;
    let mut route = |router: &mut Router, now: f64| {
        let prompt_tokens = rng.random_range(100..4000);
        let output = rng.random_range(1..8000);
        let request = Request { prompt_tokens, tokens_per_block: 16.0, ..Request::default() };
        (router.route(&request, now).expect("an instance takes it"), output)
    };
    let mut open = Vec::new();
    for i in 0..2 * instances * requests {
        now += 1e-3;
        let (decision, output) = route(&mut router, now);
        if !i.is_multiple_of(8) {
            router.advance(decision.ticket, DONE, now).expect("open");
            router.advance(decision.ticket, Event::FirstToken, now).expect("open");
            router.advance(decision.ticket, Event::Tokens(output), now).expect("open");
        }
        open.push(decision);
        if open.len() > instances * requests {
            let old = open.swap_remove(i * 7919 % open.len());
            router.advance(old.ticket, DONE, now).expect("open");
            router.drop_ticket(old.ticket);
        }
    }
    let mut micros: Vec<f64> = (0..4000)
        .map(|_| {
            now += 1e-4;
            let start = Instant::now();
            let (decision, _) = std::hint::black_box(route(&mut router, now));
            let micros = start.elapsed().as_secs_f64() * 1e6;
            router.drop_ticket(decision.ticket);
            micros
        })
        .collect();
    micros.sort_by(f64::total_cmp);
    (micros[2000], micros[3960])
}
