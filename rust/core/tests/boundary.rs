//! Rejections by the router's public functions before any change, and the effects of a panic.
#[path = "common/router.rs"]
mod common;
#[path = "common/force.rs"]
mod force;

use common::{STEP, chain, request};
use force::force;
use lmetric_core::Registry;
use lmetric_core::fleet::Role;
use lmetric_core::guard::GuardConfig;
use lmetric_core::indicators::{Indicator, IndicatorSet, Snapshot};
use lmetric_core::plan::{Cuts, Event, Failure};
use lmetric_core::policy::{Policy, PolicyRng, PolicySpec, Scores};
use lmetric_core::request::Request;
use lmetric_core::router::{IndexFeed, Router, RouterConfig, Share, SharedRouter};
use lmetric_core::{CoreError, Slot};
use std::panic::{AssertUnwindSafe, catch_unwind};

fn router_of(policy: Box<dyn Policy>, instances: usize) -> Router {
    let config = RouterConfig { drain: false, step_time: Some(STEP), ..RouterConfig::default() };
    let mut router = Router::new(policy, config).unwrap();
    for i in 0..instances {
        router.add_instance(&format!("e{i}"), Role::Both, None).unwrap();
    }
    router
}

fn router(instances: usize) -> Router {
    router_of(Registry::CORE.policy("lmetric", &[]).unwrap(), instances)
}

/// A policy that modifies the scores in a forbidden way.
struct Faulty(fn(&mut Scores));

static SPEC: PolicySpec = PolicySpec::new("faulty", "none", "these tests", &[]);

impl Policy for Faulty {
    fn spec(&self) -> &PolicySpec {
        &SPEC
    }

    fn reads(&self) -> IndicatorSet {
        IndicatorSet::EMPTY
    }

    fn score(&self, _: &Snapshot<'_>, _: &mut PolicyRng, scores: &mut Scores) -> Result<(), CoreError> {
        scores.score.fill(1.0);
        (self.0)(scores);
        Ok(())
    }
}

/// A policy that returns errors.
struct Failing;

impl Policy for Failing {
    fn spec(&self) -> &PolicySpec {
        &SPEC
    }

    fn reads(&self) -> IndicatorSet {
        IndicatorSet::EMPTY
    }

    fn score(&self, _: &Snapshot<'_>, _: &mut PolicyRng, _: &mut Scores) -> Result<(), CoreError> {
        Err(CoreError::Policy { policy: "faulty".into(), problem: "a fault".into() })
    }
}

/// A policy that resizes its columns causes an error, not a panic.
#[test]
fn scores_of_another_length_are_refused() {
    let faults: [fn(&mut Scores); 4] = [
        |scores| scores.score.truncate(1),
        |scores| scores.score.push(0.0),
        |scores| scores.push_then(3).truncate(1),
        |scores| scores.then_count = 1,
    ];
    for fault in faults {
        let mut router = router_of(Box::new(Faulty(fault)), 3);
        let error = router.route(&request(&chain(1, 4)), 0.0).unwrap_err();
        assert!(matches!(&error, CoreError::Policy { policy, .. } if policy == "faulty"), "{error}");
        assert_eq!(router.in_flight(), 0);
    }
}

/// A decision rejects tokens per block that are not finite.
#[test]
fn tokens_per_block_must_be_a_number() {
    let (mut router, prompt) = (router(2), chain(1, 4));
    for tokens_per_block in [f64::NAN, f64::INFINITY, -1.0] {
        let request = Request { tokens_per_block, ..request(&prompt) };
        let error = router.route(&request, 0.0).unwrap_err().to_string();
        assert!(error.contains("tokens_per_block"), "{error}");
        let chosen = router.score(&common::request(&prompt), 0.0).unwrap();
        assert!(router.commit(&request, None, chosen, 0.0).is_err());
    }
    assert_eq!(router.in_flight(), 0);
}

/// Unknown slots are rejected without any change.
#[test]
fn unknown_slots_are_refused() {
    let (mut router, prompt, none) = (router(2), chain(1, 4), Slot(2));
    let decision = router.route(&request(&prompt), 0.0).unwrap();
    router.advance(decision.ticket, Event::FirstToken, 0.1).unwrap();
    router.score(&request(&prompt), 0.1).unwrap();
    let results = [
        router.fleet_mut().set_healthy(none, true),
        router.fleet_mut().set_draining(none, true),
        router.fleet_mut().set_role(none, Role::Decode),
        router.set_cuts(none, Cuts::Nowhere),
        router.set_step_time(none, None),
        router.set_index_feed(none, IndexFeed::Exact),
        router.set_cache_blocks(none, Some(1)),
        router.commit(&request(&prompt), None, none, 0.1).map(drop),
        router.begin_move(decision.ticket, none, lmetric_core::router::Carry::Kv, 0.1).map(drop),
    ];
    for result in results {
        let error = result.unwrap_err().to_string();
        assert!(error.contains("slot 2") && error.contains("2 slots"), "{error}");
    }
    assert_eq!((router.decisions_on(none), router.in_flight_on(none)), (0, 0));
    assert_eq!((router.cache_blocks(none), router.index_feed(none)), (None, IndexFeed::Approximate));
    assert!(!router.fleet().is_current(router.fleet().id_of(none)));
    assert_eq!(router.in_flight(), 1);
    // Scores of another fleet choose nothing.
    router.add_instance("new", Role::Both, None).unwrap();
    assert!(router.commit(&request(&prompt), None, none, 0.1).is_err());
}

/// A retry's reason for no split does not appear in the record of the next request.
#[test]
fn a_retry_leaves_nothing_to_the_next_commit() {
    let (mut router, prompt) = (router(2), chain(1, 40));
    router.set_split(&force(0.5).unwrap()).unwrap();
    let request = Request { expected_output_tokens: Some(100), ..request(&prompt) };
    let retried = router.route(&request, 0.0).unwrap();
    assert!(retried.next.is_some());
    assert!(router.advance(retried.ticket, Event::Failed(Failure::Refused), 0.1).unwrap().is_some());
    let why = router.record(retried.id).unwrap().split_reason.clone();
    assert_eq!(why.as_deref(), Some("no second instance is available"));
    router.match_prefix(&request);
    let chosen = router.score(&request, 0.2).unwrap();
    let next = router.commit(&request, None, chosen, 0.2).unwrap();
    assert_eq!(router.record(next.id).unwrap().split_reason, None);
}

/// rust 7.5: a request on its program's instance is not guarded, and its record does not show the
/// guard's result for the request before it.
#[test]
fn the_guards_result_is_not_kept_for_a_programs_request() {
    let guard =
        GuardConfig { period_seconds: 0.01, min_requests: 1, phase2_factor: 0.0, ..GuardConfig::default() };
    let config = RouterConfig { guard, drain: false, ..RouterConfig::default() };
    let mut router = Router::new(Registry::CORE.policy("lmetric", &[]).unwrap(), config).unwrap();
    let ids = ["e0", "e1", "e2", "e3"].map(|name| router.add_instance(name, Role::Both, None).unwrap());
    let prompt = chain(1, 50);
    let mut now = 0.0;
    let mut ask = |router: &mut Router, request: &Request<'_>| {
        now += 0.02;
        router.tick(now);
        let decision = router.route(request, now).unwrap();
        router.advance(decision.ticket, Event::FirstToken, now).unwrap();
        let record = router.record(decision.id).unwrap();
        (record.guard_excluded, record.balance_only, decision.segment.instance)
    };
    let filtered = (0..20).map(|_| ask(&mut router, &request(&prompt))).find(|seen| seen.0 > 0);
    let (excluded, _, chosen) = filtered.expect("a filter");
    let holder = *ids.iter().find(|id| **id != chosen).unwrap();
    assert!(excluded < 4);
    let at_home = Request { home: Some(holder), ..request(&prompt) };
    assert_eq!(ask(&mut router, &at_home), (0, false, holder));

    let excluded: Vec<_> = router.guard().unwrap().alarms()[0].holders.iter().collect();
    let only = [Box::from(&**router.fleet().name(excluded[0]))].into();
    let nowhere_else = Request { instances: Some(&only), ..request(&prompt) };
    assert_eq!(ask(&mut router, &nowhere_else), (0, true, excluded[0]));
    assert_eq!(ask(&mut router, &at_home), (0, false, holder));
}

/// rust 7.17: after a policy's error there are no scores, so a commit is rejected.
#[test]
fn a_failed_policys_scores_are_not_committed() {
    let (mut router, prompt) = (router_of(Box::new(Failing), 3), chain(1, 4));
    assert!(router.score(&request(&prompt), 0.0).is_err());
    let error = router.commit(&request(&prompt), None, Slot(1), 0.0).unwrap_err();
    assert!(matches!(&error, CoreError::BadValue { what, .. } if what == "commit"), "{error}");
    assert_eq!(router.in_flight(), 0);
}

/// After a panic of a thread that holds it, a shared router reports that it is broken.
#[test]
fn a_panic_while_the_router_is_held_breaks_it() {
    let panics: fn(&mut Scores) = |_| panic!("as a bug would");
    let shared = SharedRouter::new(router_of(Box::new(Faulty(panics)), 2));
    let sound = SharedRouter::new(router(2));
    let decision = sound.lock().route(&request(&[]), 0.0).unwrap();
    let ticket = sound.ticket(&decision);
    assert!(catch_unwind(AssertUnwindSafe(|| shared.lock().route(&request(&[]), 0.0))).is_err());
    assert_eq!(shared.check(), Err(CoreError::Broken));
    assert!(!shared.is_held_here() && !SharedRouter::any_is_held_here());
    // Another router is unaffected, even if it is locked during a panic.
    let dropped = catch_unwind(AssertUnwindSafe(|| {
        let _ticket = ticket;
        panic!("of another kind");
    }));
    assert!(dropped.is_err());
    assert_eq!((sound.check(), sound.lock().in_flight()), (Ok(()), 0));
    // A broken router rejects events, and its tickets drop silently.
    let held = sound.lock();
    assert!(sound.is_held_here() && SharedRouter::any_is_held_here());
    assert!(!shared.is_held_here());
    drop(held);
    assert!(!sound.is_held_here());
}

/// Sums over peers that change one by one equal the total, and removed peers leave nothing.
#[test]
fn sums_over_peers_follow_each_change() {
    use proptest::prelude::*;
    let share = |requests: u32, tokens: f64| Share {
        queued: f64::from(requests),
        decoding: f64::from(requests / 2),
        queued_prefill_tokens: tokens,
        window_output_tokens: tokens / 7.0,
        ..Share::default()
    };
    let word = (0usize..5, prop::collection::vec((0u32..4, 0.0..1e6f64), 0..4));
    proptest!(|(words in prop::collection::vec(word, 1..60))| {
        let mut router = router(4);
        let mut said = vec![vec![Share::default(); 4]; 5];
        for (at, (peer, shares)) in words.iter().enumerate() {
            let shares: Vec<Share> =
                shares.iter().map(|(n, tokens)| if *n == 0 { Share::default() } else { share(*n, *tokens) }).collect();
            let names: Vec<String> = (0..shares.len()).map(|i| format!("e{i}")).collect();
            let told = names.iter().map(String::as_str).zip(shares.iter().copied());
            router.hear(&format!("peer-{peer}"), told, at as f64).unwrap();
            said[*peer] = shares;
            said[*peer].resize(4, Share::default());
            router.derive_some(IndicatorSet::ALL, at as f64);
            for slot in 0..4 {
                let sum = |of: fn(&Share) -> f64| said.iter().map(|shares| of(&shares[slot])).sum::<f64>();
                let column = |id| router.columns().get(id)[slot];
                prop_assert_eq!(column(Indicator::QBs), sum(|share| share.queued));
                let (queued, wanted) = (column(Indicator::QueuedPrefillTokens), sum(|share| share.queued_prefill_tokens));
                prop_assert!((queued - wanted).abs() <= 1e-6 && queued >= 0.0);
                prop_assert!(wanted > 0.0 || queued == 0.0);
            }
        }
        let end = words.len() as f64 + 10.0;
        router.forget_silent(5.0, end);
        router.derive_some(IndicatorSet::ALL, end);
        for slot in 0..4 {
            prop_assert_eq!(router.columns().get(Indicator::QueuedPrefillTokens)[slot], 0.0);
            prop_assert_eq!(router.columns().get(Indicator::Bs)[slot], 0.0);
        }
    });
}
