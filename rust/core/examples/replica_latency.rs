//! Cost of peer load between routers: publishing a router's load on each instance
//! ([`Router::share`]), and receiving it ([`Router::hear`]).
//!
//! `cargo run --release -p lmetric-core --example replica_latency`. Each instance has 8 requests
//! from each of 4 routers.
use lmetric_core::Registry;
use lmetric_core::fleet::Role;
use lmetric_core::plan::Event;
use lmetric_core::request::Request;
use lmetric_core::router::{Router, RouterConfig};
use std::hint::black_box;
use std::time::Instant;

const SAMPLES: usize = 5_000;
const REQUESTS: usize = 8;
const OTHERS: [&str; 3] = ["b", "c", "d"];

fn report(name: &str, mut nanoseconds: Vec<f64>) {
    nanoseconds.sort_unstable_by(f64::total_cmp);
    let at = |share: f64| nanoseconds[(share * (nanoseconds.len() - 1) as f64) as usize] / 1e3;
    println!("{name:<48} p50 {:7.3} us   p99 {:7.3} us   p99.9 {:7.3} us", at(0.5), at(0.99), at(0.999));
}

fn router(instances: usize) -> Router {
    let policy = Registry::CORE.policy("round_robin", &[]).expect("registered");
    let mut router = Router::new(policy, RouterConfig::default()).expect("good settings");
    for i in 0..instances {
        router.add_instance(&format!("engine-{i}"), Role::Both, Some(75_000)).expect("a new name");
    }
    for i in 0..instances * REQUESTS {
        let request = Request { prompt_tokens: 1_000, tokens_per_block: 16.0, ..Request::default() };
        let ticket = router.route(&request, 0.0).expect("an instance").ticket;
        if i % 4 > 0 {
            router.advance(ticket, Event::FirstToken, 0.1).expect("open");
        }
    }
    router
}

fn main() {
    for instances in [16, 256, 1024] {
        let (mut ours, other) = (router(instances), router(instances));
        let told = other.share(0.2);
        let telling = (0..SAMPLES).map(|i| {
            let start = Instant::now();
            black_box(ours.share(0.2 + i as f64 * 0.1));
            start.elapsed().as_nanos() as f64
        });
        report(&format!("told, {instances} instances"), telling.collect());
        let hearing = (0..SAMPLES).map(|i| {
            let shares = told.iter().map(|(instance, share)| (&**instance, *share));
            let start = Instant::now();
            ours.hear(OTHERS[i % OTHERS.len()], shares, 0.2 + i as f64 * 0.1).expect("valid loads");
            start.elapsed().as_nanos() as f64
        });
        report(&format!("heard of one of three, {instances} instances"), hearing.collect());
    }
}
