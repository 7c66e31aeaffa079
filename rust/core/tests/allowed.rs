//! Requests that only some instances may take: the policy chooses among these, and so do retries,
//! roles and the hot-spot guard.
#[path = "common/router.rs"]
mod common;

use common::{chain, request};
use lmetric_core::fleet::Role;
use lmetric_core::guard::GuardConfig;
use lmetric_core::plan::{Binding, Cuts, Event, Failure, Usage};
use lmetric_core::request::{Allowed, Request};
use lmetric_core::router::{Carry, IndexFeed, Router, RouterConfig};
use lmetric_core::{CoreError, Registry};

fn fleet(policy: &str, config: RouterConfig, roles: &[Role]) -> Router {
    let mut router = Router::new(Registry::CORE.policy(policy, &[]).unwrap(), config).unwrap();
    for (i, role) in roles.iter().enumerate() {
        router.add_instance(&format!("e{i}"), *role, None).unwrap();
    }
    router
}

fn both(policy: &str, instances: usize) -> Router {
    fleet(policy, RouterConfig::default(), &vec![Role::Both; instances])
}

fn among(slots: &[usize]) -> Allowed {
    slots.iter().map(|slot| format!("e{slot}").into()).collect()
}

/// The slot of a request that only `allowed` may take; it stays in flight.
fn place(router: &mut Router, allowed: &Allowed, chain: &[u64]) -> u32 {
    let asked = Request { instances: Some(allowed), ..request(chain) };
    router.route(&asked, 0.0).unwrap().segment.instance.0
}

fn error(router: &mut Router, allowed: &Allowed) -> String {
    let asked = Request { instances: Some(allowed), ..request(&[]) };
    match router.route(&asked, 0.0) {
        Err(CoreError::NoInstance(why)) => why,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_policy_that_prefers_the_maximum_chooses_the_highest_score_of_the_set() {
    let mut router = both("llmd_scorers", 4);
    for slot in [0, 0, 1, 1, 1, 3] {
        place(&mut router, &among(&[slot]), &[]);
    }
    assert_eq!(place(&mut router, &among(&[0, 1]), &[]), 0, "2 requests, and 3 on the other");
    assert_eq!(place(&mut router, &among(&[0, 1, 2, 3]), &[]), 2);
    assert_eq!(place(&mut router, &among(&[1, 3]), &[]), 3);
}

#[test]
fn ties_and_turns_are_those_of_the_policy() {
    let mut router = both("round_robin", 4);
    let turns: Vec<_> = (0..6).map(|_| place(&mut router, &among(&[1, 3]), &[])).collect();
    assert_eq!(turns, [1, 3, 1, 3, 1, 3]);
    let mut router = both("least_requests", 4);
    let allowed = among(&[0, 1, 3]);
    let draw = |router: &mut Router| {
        let asked = Request { instances: Some(&allowed), ..request(&[]) };
        let decision = router.route(&asked, 0.0).unwrap();
        router.drop_ticket(decision.ticket);
        decision.segment.instance.0
    };
    let drawn: Vec<_> = (0..60).map(|_| draw(&mut router)).collect();
    for slot in [0, 1, 3] {
        assert!(drawn.iter().filter(|drawn| **drawn == slot).count() > 5, "ties are random: {drawn:?}");
    }
    assert!(!drawn.contains(&2));
}

#[test]
fn the_guard_restricts_the_set() {
    let config = RouterConfig {
        index_feed: IndexFeed::Exact, // keeps the prefix on its instance
        guard: GuardConfig { on: true, ..GuardConfig::default() },
        ..RouterConfig::default()
    };
    let mut router = fleet("lmetric", config, &[Role::Both; 8]);
    let (shared, holder) = (chain(1, 64), router.fleet().find("e0").unwrap());
    router.caches().write().gpu_mut().stored(holder, None, &shared);
    let allowed = among(&[0, 2, 3, 4]);
    let mut elsewhere = 0;
    for i in 0..200u64 {
        let now = i as f64 * 0.05;
        let mut prompt = shared.clone();
        prompt.extend(chain(10_000 + i * 10, 1));
        let asked = Request { instances: Some(&allowed), ..request(&prompt) };
        let decision = router.route(&asked, now).unwrap();
        let slot = decision.segment.instance.0;
        assert!([0, 2, 3, 4].contains(&slot));
        elsewhere += usize::from(slot != 0);
        router.advance(decision.ticket, Event::FirstToken, now).unwrap();
        router.advance(decision.ticket, Event::Finished(Usage::default()), now).unwrap();
        router.tick(now);
    }
    assert!(elsewhere > 100, "{elsewhere} requests left the hot instance");
}

#[test]
fn retries_stay_in_the_set() {
    let mut router = both("least_requests", 4);
    let allowed = among(&[1, 2]);
    let asked = Request { instances: Some(&allowed), ..request(&[]) };
    let first = router.route(&asked, 0.0).unwrap();
    let failed = |router: &mut Router| {
        router
            .advance(first.ticket, Event::Failed(Failure::Refused), 0.1)
            .unwrap()
            .map(|next| next.instance.0)
    };
    let second = failed(&mut router).unwrap();
    assert_eq!(first.segment.instance.0 + second, 3, "the other one of the set");
    assert_eq!(failed(&mut router), None, "two idle instances are outside");
    assert_eq!(router.in_flight(), 0);
}

#[test]
fn a_running_request_moves_only_inside_the_set() {
    let mut router = both("least_requests", 4);
    let ids: Vec<_> = (0..4).map(|slot| router.fleet().find(&format!("e{slot}")).unwrap()).collect();
    ids.iter().for_each(|id| router.set_cuts(*id, Cuts::Output).unwrap());
    let allowed = among(&[1, 2]);
    let asked = Request { instances: Some(&allowed), ..request(&[]) };
    let first = router.route(&asked, 0.0).unwrap();
    router.advance(first.ticket, Event::FirstToken, 0.1).unwrap();
    let error = router.begin_move(first.ticket, ids[3], Carry::Recompute, 0.2).unwrap_err().to_string();
    assert!(error.contains("not one of its instances"), "{error}");
    let other = ids[3 - first.segment.instance.index()];
    router.begin_move(first.ticket, other, Carry::Recompute, 0.2).unwrap();
}

#[test]
fn prefill_and_decode_are_in_the_set() {
    use Role::{Decode, Prefill};
    for binding in [Binding::Early, Binding::Late] {
        let config = RouterConfig { binding, ..RouterConfig::default() };
        let mut router = fleet("least_requests", config, &[Prefill, Prefill, Decode, Decode, Decode]);
        let allowed = among(&[1, 3, 4]);
        for _ in 0..4 {
            let asked = Request { instances: Some(&allowed), ..request(&[]) };
            let decision = router.route(&asked, 0.0).unwrap();
            assert_eq!(decision.segment.instance.0, 1);
            router.advance(decision.ticket, Event::Sent, 0.0).unwrap();
            let done = Event::Finished(Usage::default());
            let next = router.advance(decision.ticket, done, 0.1).unwrap().expect("a decode follows");
            assert!([3, 4].contains(&next.instance.0), "{next:?}");
        }
        // Without one of the roles in the set, an instance takes the whole request.
        for slot in [0, 2] {
            let only = among(&[slot]);
            let asked = Request { instances: Some(&only), ..request(&[]) };
            let decision = router.route(&asked, 0.0).unwrap();
            assert_eq!((decision.segment.instance.0, decision.segment.to_token), (slot as u32, None));
            assert_eq!(decision.next, None);
        }
    }
    let config = RouterConfig { colocate: false, ..RouterConfig::default() };
    let mut router = fleet("least_requests", config, &[Prefill, Decode]);
    assert_eq!(error(&mut router, &among(&[0])), r#"instance "e0" has the role prefill"#);
    assert_eq!(error(&mut router, &among(&[1])), r#"instance "e1" has the role decode"#);
}

#[test]
fn a_warming_instance_helps_out_in_its_set() {
    let mut router = both("round_robin", 3);
    let warming = router.fleet().find("e1").unwrap();
    router.fleet_mut().set_warming(warming, true).unwrap();
    assert_eq!(place(&mut router, &among(&[1]), &[]), 1);
    assert_eq!([0; 3].map(|_| place(&mut router, &among(&[1, 2]), &[])), [2; 3]);
}

#[test]
fn errors_name_the_instances_and_why_they_take_nothing() {
    let mut router = both("round_robin", 3);
    assert_eq!(error(&mut router, &among(&[])), "the request allows no instance");
    let [first, second] = ["e0", "e1"].map(|name| router.fleet().find(name).unwrap());
    router.fleet_mut().set_healthy(first, false).unwrap();
    router.fleet_mut().set_draining(second, true).unwrap();
    let why = error(&mut router, &among(&[0, 1, 7]));
    let expected = r#"instance "e0" is not healthy, instance "e1" is draining; it accepts no new requests, instance "e7" is not in the router"#;
    assert_eq!(why, expected);
    let many = error(&mut router, &among(&[10, 11, 12, 13, 14, 15]));
    assert!(many.ends_with(r#"instance "e13" is not in the router, and 2 more"#), "{many}");
}
