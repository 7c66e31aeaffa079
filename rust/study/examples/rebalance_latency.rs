//! Duration of a rebalancing round, in microseconds:
//! `cargo run --release --example rebalance_latency [instances [requests on each]]`.
//!
//! Loads differ as they do without rebalancing: requests are placed at random. Every fourth
//! instance gets twice its share, every fourth half its share. The rule is measured first by
//! itself, on given loads, then as a router's whole round, which collects the loads from its
//! tickets. Between two whole rounds, all requests generate the tokens of a period, so that their
//! tickets are not in the cache, as in a busy router.
//!
//! Rounds in which the kernel preempted the thread are excluded, and their fraction is shown: time
//! of other processes is not part of a round.
use lmetric_core::Registry;
use lmetric_core::estimate::Remaining;
use lmetric_core::fleet::Role;
use lmetric_core::ids::Slot;
use lmetric_core::plan::{Event, Usage};
use lmetric_core::rebalance::{InstanceLoad, RunningRequest};
use lmetric_core::rebalance::{RebalanceConfig, Rebalancing};
use lmetric_core::request::Request;
use lmetric_core::router::{PrefixMatch, Router, RouterConfig, TicketId};
use lmetric_core::settings::SettingsReader;
use lmetric_study::rebalance::named;
use rand::{RngExt, SeedableRng};
use std::time::Instant;

const ROUNDS: usize = 1000;
/// Number of whole rounds of a router. It has many requests, and each generates its tokens between
/// rounds.
const WHOLE_ROUNDS: usize = 400;
/// Requests on each instance per four requested, in turn.
const SHARES: [usize; 4] = [4, 8, 4, 2];
const RULES: [&str; 3] = ["star", "star_current", "llumnix"];

/// Builds a rule with its defaults.
fn built(name: &str) -> Rebalancing {
    let config: RebalanceConfig = named(name, &mut SettingsReader::new(name, [])).expect("known");
    config.build().expect("good settings")
}

fn main() {
    let mut args = std::env::args().skip(1).map(|a| a.parse::<usize>().expect("a number"));
    let (sizes, requests) =
        (args.next().map_or(vec![8, 32, 64, 128, 256], |n| vec![n]), args.next().unwrap_or(64));
    println!(
        "{:<30}{:>10}{:>10}{:>10}{:>12}{:>10}{:>10}",
        "rebalancer", "instances", "requests", "moves", "left out %", "p50", "p99"
    );
    let line = |name: &str, instances: usize, [moves, left_out, p50, p99]: [f64; 4]| {
        println!(
            "{name:<30}{instances:>10}{requests:>10}{moves:>10.3}{left_out:>12.1}{p50:>10.1}{p99:>10.1}"
        );
    };
    for name in RULES {
        for &instances in &sizes {
            line(name, instances, measure(name, instances, requests));
        }
    }
    for name in RULES {
        for &instances in &sizes {
            line(&format!("{name}, router's round"), instances, measure_whole(name, instances, requests));
        }
    }
}

/// Returns the number of times that the kernel preempted this thread; 0 if the number is not
/// available.
fn interruptions() -> u64 {
    let told = std::fs::read_to_string("/proc/thread-self/status").unwrap_or_default();
    let line = told.lines().find_map(|line| line.strip_prefix("nonvoluntary_ctxt_switches:"));
    line.and_then(|count| count.trim().parse().ok()).unwrap_or(0)
}

/// Round times in microseconds, and the number of preempted rounds.
#[derive(Default)]
struct Timed {
    micros: Vec<f64>,
    interrupted: usize,
    moves: usize,
}

impl Timed {
    fn round(&mut self, round: impl FnOnce() -> usize) {
        let before = interruptions();
        let start = Instant::now();
        self.moves += round();
        let took = start.elapsed().as_secs_f64() * 1e6;
        if interruptions() == before {
            self.micros.push(took);
        } else {
            self.interrupted += 1;
        }
    }

    /// Returns moves per round, excluded rounds in percent, p50 and p99.
    fn summary(mut self) -> [f64; 4] {
        self.micros.sort_by(f64::total_cmp);
        let (n, all) = (self.micros.len(), self.micros.len() + self.interrupted);
        assert!(n > 0, "all rounds were interrupted");
        let share = 100.0 * self.interrupted as f64 / all as f64;
        [self.moves as f64 / all as f64, share, self.micros[n / 2], self.micros[n * 99 / 100]]
    }
}

/// Creates a router whose instances decode the requested load, and returns it with its tickets.
fn at_work(name: &str, instances: usize, requests: usize) -> (Router, Vec<TicketId>) {
    let mut rng = rand_pcg::Pcg64Mcg::seed_from_u64(1);
    let policy = Registry::CORE.policy("round_robin", &[]).expect("registered");
    let mut router = Router::new(policy, RouterConfig::default()).expect("good settings");
    router.set_rebalancing(Some(built(name))).expect("nothing is in flight");
    for i in 0..instances {
        router.add_instance(&format!("engine-{i}"), Role::Both, Some(75_000)).expect("a new name");
    }
    let (mut open, mut running) = (Vec::new(), vec![0; instances]);
    for _ in 0..2 * requests * instances {
        let mut chain: Vec<u64> = (0..256).map(|_| rng.random()).collect();
        let request = Request {
            prompt_tokens: 4096,
            tokens_per_block: 16.0,
            expected_output_tokens: Some(32_768),
            ..Request::default()
        };
        let decision = router
            .route_matched(&request, &mut chain, &mut PrefixMatch::default(), None, 0.0)
            .expect("an instance");
        router.advance(decision.ticket, Event::FirstToken, 1.0).expect("open");
        router.advance(decision.ticket, Event::Tokens(rng.random_range(10..16_000)), 1.0).expect("open");
        let instance = decision.segment.instance.index();
        running[instance] += 1;
        if running[instance] > requests * SHARES[instance % 4] / 4 {
            router.advance(decision.ticket, Event::Finished(Usage::default()), 1.0).expect("open");
        } else {
            open.push(decision.ticket);
        }
    }
    (router, open)
}

/// Measures [`Router::rebalance`] like [`measure`]. The moves are returned but not carried out.
fn measure_whole(name: &str, instances: usize, requests: usize) -> [f64; 4] {
    let (mut router, open) = at_work(name, instances, requests);
    let (mut timed, mut now) = (Timed::default(), 1.0);
    for _ in 0..WHOLE_ROUNDS {
        now += 0.5;
        for ticket in &open {
            router.advance(*ticket, Event::Tokens(20), now).expect("open");
        }
        timed.round(|| std::hint::black_box(router.rebalance(now)).expect("good input").0.len());
    }
    timed.summary()
}

/// Measures rounds, each with a new fleet.
fn measure(name: &str, instances: usize, requests: usize) -> [f64; 4] {
    let mut rng = rand_pcg::Pcg64Mcg::seed_from_u64(1);
    let mut rule = built(name).rule;
    let mut timed = Timed::default();
    for _ in 0..ROUNDS {
        let running: Vec<Vec<RunningRequest>> = (0..instances)
            .map(|i| {
                let count = requests * SHARES[i % 4] / 4;
                let one = |_| {
                    let (id, tokens) = (rng.random(), rng.random_range(10..20_000));
                    let (remaining, deviation) = (rng.random_range(0.0..20_000.0), 1000.0);
                    let remaining = Remaining { tokens: remaining, deviation };
                    RunningRequest { id, tokens, remaining, movable: true }
                };
                (0..count).map(one).collect()
            })
            .collect();
        let loads: Vec<InstanceLoad> = running
            .iter()
            .enumerate()
            .map(|(i, requests)| InstanceLoad {
                instance: Slot(i as u32),
                capacity_tokens: 1_200_000,
                other_tokens: 0,
                queued_tokens: 0,
                step_seconds: 0.02,
                accepts: true,
                requests,
            })
            .collect();
        timed.round(|| std::hint::black_box(rule.round(&loads)).expect("good input").moves.len());
    }
    timed.summary()
}
