//! What a round of rescheduling takes: `cargo run --release --example reschedule_latency [instances [requests on each]]`. Microseconds.
//!
//! Loads differ as they do without rescheduling: requests fall at random, each fourth instance gets twice as many as it should, each fourth half as many.
use lmetric_core::estimate::Remaining;
use lmetric_core::ids::InstanceId;
use lmetric_core::reschedule::{InstanceLoad, NAMES, RunningRequest, build};
use rand::{RngExt, SeedableRng};
use std::time::Instant;

const ROUNDS: usize = 1000;

fn main() {
    let mut args = std::env::args().skip(1).map(|a| a.parse::<usize>().expect("a number"));
    let given = (args.next(), args.next().unwrap_or(64));
    println!(
        "{:<16}{:>10}{:>10}{:>10}{:>10}{:>10}",
        "rescheduler", "instances", "requests", "moves", "p50", "p99"
    );
    for name in NAMES.iter().filter(|name| **name != "none") {
        for instances in given.0.map_or(vec![8, 64, 256], |n| vec![n]) {
            let (moves, p50, p99) = measure(name, instances, given.1);
            println!("{name:<16}{instances:>10}{:>10}{moves:>10.3}{p50:>10.1}{p99:>10.1}", given.1);
        }
    }
}

/// Moves a round, and p50 and p99 of rounds, each over a fleet of its own.
fn measure(name: &str, instances: usize, requests: usize) -> (f64, f64, f64) {
    let mut rng = rand_pcg::Pcg64Mcg::seed_from_u64(1);
    let mut rule = build(name).expect("known");
    let (mut micros, mut moves) = (Vec::new(), 0);
    for _ in 0..ROUNDS {
        let running: Vec<Vec<RunningRequest>> = (0..instances)
            .map(|i| {
                let count = requests * [4, 8, 4, 2][i % 4] / 4;
                let one = |_| {
                    let (id, tokens) = (rng.random(), rng.random_range(10..20_000));
                    let (remaining, deviation) = (rng.random_range(0.0..20_000.0), 1000.0);
                    let remaining = Remaining { tokens: remaining, deviation };
                    RunningRequest { id, tokens, remaining, priority: 0, movable: true }
                };
                (0..count).map(one).collect()
            })
            .collect();
        let loads: Vec<InstanceLoad> = running
            .iter()
            .enumerate()
            .map(|(i, requests)| InstanceLoad {
                instance: InstanceId(i as u32),
                capacity_tokens: 1_200_000,
                other_tokens: 0,
                queued_tokens: 0,
                step_seconds: 0.02,
                accepts: true,
                requests,
            })
            .collect();
        let start = Instant::now();
        let round = std::hint::black_box(rule.round(&loads)).expect("good input");
        micros.push(start.elapsed().as_secs_f64() * 1e6);
        moves += round.moves.len();
    }
    micros.sort_by(f64::total_cmp);
    (moves as f64 / ROUNDS as f64, micros[ROUNDS / 2], micros[ROUNDS * 99 / 100])
}
