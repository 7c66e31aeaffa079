//! Workers of one server count each other's requests at once, through memory that they share.
#[path = "common/board.rs"]
mod boards;
#[path = "common/router.rs"]
mod common;

use boards::{board, memory};
use common::{STEP, chain, request};
use lmetric_core::Registry;
use lmetric_core::admission::{HeldFor, LoadConfig, TenantLimits, Verdict};
use lmetric_core::fleet::Role;
use lmetric_core::ids::MAX_INSTANCES;
use lmetric_core::indicators::{Indicator, IndicatorSet};
use lmetric_core::plan::{Event, Usage};
use lmetric_core::request::{Request, Tenant};
use lmetric_core::router::{Router, RouterConfig, SharedRouter, TicketId};
use proptest::prelude::*;

fn router(instances: &[&str]) -> Router {
    let config = RouterConfig { drain: false, step_time: Some(STEP), ..RouterConfig::default() };
    let mut router = Router::new(Registry::CORE.policy("least_requests", &[]).unwrap(), config).unwrap();
    for name in instances {
        router.add_instance(name, Role::Both, None).unwrap();
    }
    router
}

fn value(router: &mut Router, id: Indicator, name: &str) -> f64 {
    router.derive_some(IndicatorSet::ALL, 0.0);
    router.columns().get(id)[router.fleet().find(name).unwrap().index()]
}

/// Per-instance indicators that include the requests of all workers.
const COUNTED: [Indicator; 7] = [
    Indicator::Bs,
    Indicator::QBs,
    Indicator::RBs,
    Indicator::DecodeBs,
    Indicator::BoundBs,
    Indicator::BoundTokens,
    Indicator::QueuedPrefillTokens,
];

#[test]
fn a_worker_counts_a_request_of_another_worker_at_once() {
    let memory = memory();
    let [a, b] = [0, 1].map(|writer| {
        // The workers' fleets have different orders.
        let names = if writer == 0 { ["x", "y"] } else { ["y", "x"] };
        let shared = SharedRouter::new(router(&names));
        shared.lock().join(board(&memory, writer), 7).unwrap();
        shared
    });
    let place = |router: &SharedRouter, seed| {
        let mut router = router.lock();
        let made = router.route(&request(&chain(seed, 10)), 0.0).unwrap();
        (made.ticket, router.fleet().name(made.segment.instance).to_string())
    };
    let (first, on) = place(&a, 1);
    let (_, other) = place(&b, 2);
    assert_ne!(on, other);
    assert_eq!(value(&mut b.lock(), Indicator::QueuedPrefillTokens, &on), 161.0);
    a.lock().advance(first, Event::Ended(Usage::default()), 1.0).unwrap();
    assert_eq!(value(&mut b.lock(), Indicator::Bs, &on), 0.0);
}

#[test]
fn routers_of_different_models_do_not_count_each_other() {
    let memory = memory();
    let (mut a, mut b) = (router(&["x"]), router(&["x"]));
    a.join(board(&memory, 0), 1).unwrap();
    b.join(board(&memory, 1), 2).unwrap();
    a.route(&request(&chain(1, 10)), 0.0).unwrap();
    a.publish_changes();
    assert_eq!(value(&mut b, Indicator::Bs, "x"), 0.0);
}

#[test]
fn load_on_an_instance_counts_when_the_instance_joins_later() {
    let memory = memory();
    let (mut a, mut b) = (router(&["x", "y"]), router(&["y"]));
    a.join(board(&memory, 0), 1).unwrap();
    b.join(board(&memory, 1), 1).unwrap();
    for seed in 0..4 {
        a.route(&request(&chain(seed, 10)), 0.0).unwrap();
        a.publish_changes();
    }
    assert_eq!(value(&mut b, Indicator::Bs, "y"), 2.0);
    b.add_instance("x", Role::Both, None).unwrap();
    assert_eq!(value(&mut b, Indicator::Bs, "x"), 2.0);
    b.remove_instance("y").unwrap();
    b.add_instance("y", Role::Both, None).unwrap();
    assert_eq!(value(&mut b, Indicator::Bs, "y"), 2.0);
    a.remove_instance("y").unwrap();
    assert_eq!(value(&mut b, Indicator::Bs, "y"), 0.0);
}

#[test]
fn the_load_of_a_worker_that_ended_counts_no_more() {
    let memory = memory();
    let (mut a, mut b, mut c) = (router(&["x"]), router(&["x"]), router(&["x"]));
    let supervisor = board(&memory, 3);
    for (number, router) in [&mut a, &mut b, &mut c].into_iter().enumerate() {
        router.join(board(&memory, number), 1).unwrap();
        router.route(&request(&chain(number as u64, 10)), 0.0).unwrap();
        router.publish_changes();
    }
    assert_eq!(value(&mut c, Indicator::Bs, "x"), 3.0);
    drop(a); // its board empties its area
    assert_eq!(value(&mut c, Indicator::Bs, "x"), 2.0);
    std::mem::forget(b); // killed
    supervisor.clear(1).unwrap();
    assert_eq!(value(&mut c, Indicator::Bs, "x"), 1.0);
}

/// One step of a worker: a request, or an event of one of its requests.
#[derive(Clone, Copy, Debug)]
enum Step {
    Route(u64),
    FirstToken(usize),
    End(usize),
}

fn steps() -> impl Strategy<Value = Vec<(usize, Step)>> {
    let step = prop_oneof![
        (0..50_u64).prop_map(Step::Route),
        (0..8_usize).prop_map(Step::FirstToken),
        (0..8_usize).prop_map(Step::End),
    ];
    prop::collection::vec((0..3_usize, step), 1..120)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 32, ..ProptestConfig::default() })]

    /// After each step, all workers see the same counts: those of one router with all requests.
    #[test]
    fn all_workers_see_the_same_load(steps in steps()) {
        let memory = memory();
        let names = ["x", "y", "z"];
        let mut workers: Vec<(Router, Vec<TicketId>)> = (0..3)
            .map(|number| {
                let mut router = router(&names);
                router.join(board(&memory, number), 1).unwrap();
                (router, Vec::new())
            })
            .collect();
        for (number, (worker, step)) in steps.into_iter().enumerate() {
            let (router, tickets) = &mut workers[worker];
            let now = number as f64 * 1e-3;
            match step {
                Step::Route(seed) => {
                    tickets.push(router.route(&request(&chain(seed, 10)), now).unwrap().ticket);
                }
                Step::FirstToken(at) if at < tickets.len() => {
                    router.advance(tickets[at], Event::FirstToken, now).ok();
                }
                Step::End(at) if at < tickets.len() => {
                    let ticket = tickets.swap_remove(at);
                    router.advance(ticket, Event::Ended(Usage::default()), now).unwrap();
                }
                _ => {}
            }
            router.publish_changes();
            let in_flight: usize = workers.iter().map(|(router, _)| router.in_flight()).sum();
            let all: f64 = names.iter().map(|name| value(&mut workers[0].0, Indicator::Bs, name)).sum();
            prop_assert_eq!(all, in_flight as f64);
            for name in names {
                for id in COUNTED {
                    let seen: Vec<f64> =
                        workers.iter_mut().map(|(router, _)| value(router, id, name)).collect();
                    let spread = seen.iter().fold(0.0_f64, |most, value| most.max((value - seen[0]).abs()));
                    prop_assert!(spread < 1e-6, "{:?} of {}: {:?}", id, name, seen);
                }
            }
        }
    }
}

const ACME: Tenant = Tenant { id: 7, ..Tenant::NOBODY };

/// Admission that holds only requests of tenants at their limits.
fn limited(max_concurrent: Option<u32>) -> LoadConfig {
    let limits = TenantLimits { max_concurrent, max_waiting: None };
    LoadConfig {
        room_seconds: Some(f64::INFINITY),
        tenants: [(ACME.id, limits)].into_iter().collect(),
        ..LoadConfig::default()
    }
}

#[test]
fn a_tenants_limits_count_the_requests_of_all_workers() {
    let memory = memory();
    let mut workers: Vec<Router> = (0..2)
        .map(|number| {
            let mut router = router(&["x", "y"]);
            router.join(board(&memory, number), 1).unwrap();
            router.set_admission(Some(limited(Some(2)))).unwrap();
            router
        })
        .collect();
    let chain = chain(1, 4);
    let asked = Request { tenant: ACME, ..request(&chain) };
    let mut arrive = |worker: usize, now| workers[worker].arrive(&asked, now).unwrap().unwrap();
    let [(first, one), (_, two)] = [arrive(0, 0.0), arrive(1, 0.0)];
    assert!(matches!((one, two), (Verdict::Free, Verdict::Free)), "{one:?} {two:?}");
    let (_, third) = arrive(0, 0.0);
    assert!(matches!(third, Verdict::Held { by: HeldFor::Concurrency, .. }), "{third:?}");
    let (_, fourth) = arrive(1, 0.0);
    assert!(matches!(fourth, Verdict::Held { by: HeldFor::Concurrency, .. }), "{fourth:?}");
    // The first request ends on its worker, so one of the other worker may run.
    workers[0].drop_arrival(first.unwrap(), 0.1);
    assert_eq!(workers[1].release_held(0.1).ready.len(), 1);
    assert_eq!(workers[0].release_held(0.1).ready.len(), 0);
}

#[test]
fn a_new_limit_counts_the_requests_that_run_on_other_workers_already() {
    let memory = memory();
    let mut workers = [0, 1].map(|number| {
        let mut router = router(&["x", "y"]);
        router.join(board(&memory, number), 1).unwrap();
        router.set_admission(Some(limited(None))).unwrap();
        router
    });
    let chain = chain(1, 4);
    let asked = Request { tenant: ACME, ..request(&chain) };
    for _ in 0..2 {
        assert!(matches!(workers[0].arrive(&asked, 0.0).unwrap().unwrap().1, Verdict::Free));
    }
    for router in &mut workers {
        router.set_admission(Some(limited(Some(2)))).unwrap();
    }
    let (_, third) = workers[1].arrive(&asked, 0.1).unwrap().unwrap();
    assert!(matches!(third, Verdict::Held { by: HeldFor::Concurrency, .. }), "{third:?}");
}

#[test]
fn load_without_a_row_is_published_once_a_row_is_free() {
    let memory = memory();
    let own = board(&memory, 0);
    (1..MAX_INSTANCES).for_each(|_| assert!(own.take().is_some()));
    let (mut a, mut b) = (router(&["x", "y"]), router(&["x", "y"]));
    a.join(own, 1).unwrap();
    b.join(board(&memory, 1), 1).unwrap();
    for seed in 0..2 {
        a.route(&request(&chain(seed, 10)), 0.0).unwrap();
        a.publish_changes();
    }
    let has_load = |name: &&str| value(&mut b, Indicator::Bs, name) == 1.0;
    let (with, without): (Vec<_>, Vec<_>) = ["x", "y"].into_iter().partition(has_load);
    assert_eq!((with.len(), without.len(), a.publish_all(0.1)), (1, 1, false));
    a.remove_instance(with[0]).unwrap();
    assert!(a.publish_all(0.2));
    assert_eq!(value(&mut b, Indicator::Bs, without[0]), 1.0);
}
