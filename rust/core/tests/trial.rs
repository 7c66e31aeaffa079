//! Policies on trial: canaries decide requests of their arm, shadows place nothing.
#[path = "common/router.rs"]
mod common;

use common::{chain, request};
use lmetric_core::Registry;
use lmetric_core::fleet::Role;
use lmetric_core::guard::GuardConfig;
use lmetric_core::plan::{Event, Failure, Usage};
use lmetric_core::policy::Policy;
use lmetric_core::request::{Arm, Request};
use lmetric_core::router::{Router, RouterConfig};

fn policy(name: &str) -> Box<dyn Policy> {
    Registry::CORE.policy(name, &[]).unwrap()
}

fn router(name: &str, guard: bool) -> Router {
    let config = RouterConfig {
        guard: GuardConfig { on: guard, ..GuardConfig::default() },
        ..RouterConfig::default()
    };
    let mut router = Router::new(policy(name), config).unwrap();
    for i in 0..4 {
        router.add_instance(&format!("e{i}"), Role::Both, None).unwrap();
    }
    router
}

/// Instances of 40 requests of 8 prompts. `ask` changes each request.
fn run(router: &mut Router, ask: impl Fn(usize, &mut Request<'_>)) -> Vec<u32> {
    let placed = (0..40).map(|i| {
        let prompt = chain(1000 * (i % 8), 50);
        let mut asked = request(&prompt);
        ask(i as usize, &mut asked);
        let now = 0.01 * i as f64;
        let decision = router.route(&asked, now).unwrap();
        router.advance(decision.ticket, Event::FirstToken, now + 0.005).unwrap();
        decision.segment.instance.0
    });
    placed.collect()
}

#[test]
fn a_shadow_changes_no_decision() {
    let mut alone = router("lmetric", true);
    let plain = run(&mut alone, |_, _| {});
    for shadow in ["round_robin", "random", "lmetric", "vllm"] {
        let mut shadowed = router("lmetric", true);
        shadowed.set_shadow(Some((policy(shadow), true))).unwrap();
        assert_eq!(run(&mut shadowed, |_, asked| asked.shadow = true), plain, "{shadow}");
        assert_eq!(shadowed.totals(), alone.totals());
        let seen = shadowed.record(40).unwrap().shadow.clone().unwrap();
        assert_eq!(&*seen.policy, shadow);
        let (_, hit, ttft) = seen.choice.unwrap();
        assert!(hit <= 800 && ttft > 0.0 && seen.chosen_ttft_seconds > 0.0);
    }
}

#[test]
fn a_shadow_takes_turns_of_its_own() {
    let mut router = router("lmetric", true);
    router.set_shadow(Some((policy("round_robin"), false))).unwrap();
    run(&mut router, |_, asked| asked.shadow = true);
    let seen = (1..=5).map(|id| router.record(id).unwrap().shadow.clone().unwrap().choice.unwrap().0);
    assert_eq!(seen.map(|name| name.to_string()).collect::<Vec<_>>(), ["e0", "e1", "e2", "e3", "e0"]);
}

#[test]
fn requests_without_the_flag_have_no_shadow() {
    let mut router = router("lmetric", true);
    router.set_shadow(Some((policy("vllm"), true))).unwrap();
    run(&mut router, |i, asked| asked.shadow = i == 1);
    assert!(router.record(1).unwrap().shadow.is_none());
    assert!(router.record(2).unwrap().shadow.is_some());
    router.set_shadow(None).unwrap();
    run(&mut router, |_, asked| asked.shadow = true);
    assert!(router.record(80).unwrap().shadow.is_none());
}

#[test]
fn the_canary_decides_its_arm_alone() {
    let mut router = router("least_requests", false);
    router.set_canary(Some((policy("round_robin"), false))).unwrap();
    let placed = run(&mut router, |i, asked| asked.arm = if i % 2 == 1 { Arm::Canary } else { Arm::Stable });
    let canary: Vec<u32> = placed.iter().copied().skip(1).step_by(2).collect();
    assert_eq!(canary[..6], [0, 1, 2, 3, 0, 1], "its own turns");
    let (first, second) = (router.record(1).unwrap(), router.record(2).unwrap());
    assert_eq!((first.policy.as_deref(), first.arm), (Some("least_requests"), Arm::Stable));
    assert_eq!((second.policy.as_deref(), second.arm), (Some("round_robin"), Arm::Canary));
    router.set_canary(None).unwrap();
    run(&mut router, |_, asked| asked.arm = Arm::Canary);
    let last = router.record(80).unwrap();
    assert_eq!((last.policy.as_deref(), last.arm), (Some("least_requests"), Arm::Stable));
}

#[test]
fn a_failover_stays_in_its_arm() {
    let mut router = router("least_requests", false);
    router.set_canary(Some((policy("lmetric"), true))).unwrap();
    let (prompt, other) = (chain(1, 50), chain(9000, 50));
    for name in ["e1", "e2"] {
        let only = [name.into()].into();
        let warm = router.route(&Request { instances: Some(&only), ..request(&prompt) }, 0.0).unwrap();
        router.advance(warm.ticket, Event::FirstToken, 0.1).unwrap();
        router.advance(warm.ticket, Event::Ended(Usage::default()), 0.2).unwrap();
    }
    let only = ["e2".into()].into();
    router.route(&Request { instances: Some(&only), ..request(&other) }, 0.3).unwrap();
    let decision = router.route(&Request { arm: Arm::Canary, ..request(&prompt) }, 0.4).unwrap();
    let name = |router: &Router, id| router.fleet().name(id).to_string();
    assert_eq!(name(&router, decision.segment.instance), "e1", "its cache is there, and it is idle");
    let next = router.advance(decision.ticket, Event::Failed(Failure::Refused), 0.5).unwrap().unwrap();
    // The stable policy would choose e0 or e3, which are idle.
    assert_eq!(name(&router, next.instance), "e2", "the other cache");
}

#[test]
fn the_guard_runs_while_a_policy_needs_it() {
    let mut router = router("round_robin", false);
    assert!(router.guard().is_none());
    router.set_canary(Some((policy("lmetric"), true))).unwrap();
    assert!(router.guard().is_some());
    router.set_guard(false);
    assert!(router.guard().is_some(), "the canary needs it");
    router.set_guard_of_all(false);
    assert!(router.guard().is_none());
    router.set_canary(Some((policy("lmetric"), true))).unwrap();
    router.set_canary(None).unwrap();
    assert!(router.guard().is_none());
    router.set_shadow(Some((policy("lmetric"), true))).unwrap();
    assert!(router.guard().is_none(), "a shadow changes nothing");
}
