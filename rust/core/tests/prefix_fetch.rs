//! Prefix fetches: fetched tokens and holders, their cost in scores, and cleanup.
#[path = "common/router.rs"]
mod common;
#[path = "common/force.rs"]
mod force;

use common::{chain, request};
use force::force;
use lmetric_core::CoreError;
use lmetric_core::Registry;
use lmetric_core::estimate::StepTime;
use lmetric_core::fleet::Role;
use lmetric_core::ids::Slot;
use lmetric_core::indicators::{Indicator, IndicatorSet};
use lmetric_core::plan::{Cuts, Event, Failure, PrefixFetch, Usage};
use lmetric_core::router::ledger::Report;
use lmetric_core::router::{Decision, FetchConfig, Router, RouterConfig};
use lmetric_core::warm::WarmConfig;
use proptest::prelude::*;

/// A fetch of 1,600 tokens takes 0.002 + 0.016 s.
const FETCH: FetchConfig = FetchConfig {
    seconds_per_token: 1e-5,
    fixed_seconds: 0.002,
    min_tokens: 64,
    max_fetches: 1,
    max_kv_usage: 1.0,
};

/// Instances that compute 10,000 tokens/s until another rate is learned; prefills do not drain
/// between events.
fn router(policy: &str, fetch: FetchConfig, instances: usize) -> Router {
    in_fleet(config(fetch), policy, instances)
}

fn config(fetch: FetchConfig) -> RouterConfig {
    RouterConfig {
        fetch: Some(fetch),
        drain: false,
        prior_prefill_tokens_per_second: 10_000.0,
        ..RouterConfig::default()
    }
}

fn in_fleet(config: RouterConfig, policy: &str, instances: usize) -> Router {
    let mut router = Router::new(Registry::CORE.policy(policy, &[]).unwrap(), config).unwrap();
    for i in 0..instances {
        router.add_instance(&format!("e{i}"), Role::Both, None).unwrap();
    }
    router
}

/// One instance has a prompt of 1,601 tokens in its cache, computed at 10,000 tokens/s. It accepts
/// no new requests but can serve fetches.
fn held_by_one(policy: &str, fetch: FetchConfig, instances: usize) -> (Router, Slot, Vec<u64>) {
    held_in(config(fetch), policy, instances)
}

fn held_in(config: RouterConfig, policy: &str, instances: usize) -> (Router, Slot, Vec<u64>) {
    let mut router = in_fleet(config, policy, instances);
    let prompt = chain(1, 100);
    let first = router.route(&request(&prompt), 0.0).unwrap();
    assert_eq!(first.fetch, None);
    router.advance(first.ticket, Event::FirstToken, 0.1601).unwrap();
    router.advance(first.ticket, Event::Finished(Usage::default()), 0.2).unwrap();
    let home = first.segment.instance;
    router.fleet_mut().set_draining(home, true).unwrap();
    (router, home, prompt)
}

fn of(router: &mut Router, id: Indicator, instance: Slot) -> f64 {
    router.derive_some(IndicatorSet::ALL, 0.0);
    router.columns().get(id)[instance.index()]
}

use Indicator::{Bs, Fetches, QueuedPrefillTokens};

#[test]
fn whoever_is_chosen_fetches_what_another_holds() {
    let (mut router, home, prompt) = held_by_one("least_requests", FETCH, 2);
    let decision = router.route(&request(&prompt), 1.0).unwrap();
    let target = decision.segment.instance;
    assert_eq!(decision.fetch, Some(PrefixFetch { holder: home, from_token: 0, to_token: 1600 }));
    assert_eq!((decision.segment.from_token, decision.predicted_hit_tokens), (0, 0));
    assert_eq!(router.fetch_of(decision.ticket), decision.fetch);
    // The target computes only the last token. The holder computes nothing and serves one fetch.
    assert_eq!(of(&mut router, QueuedPrefillTokens, target), 1.0);
    assert_eq!((of(&mut router, Fetches, home), of(&mut router, Bs, home)), (1.0, 0.0));
    let told = router.record(decision.id).unwrap().fetch.clone().unwrap();
    assert_eq!((told.slot, &*told.name, told.from_token, told.to_token), (home.0, "e0", 0, 1600));
    assert!((told.expected_seconds - 0.018).abs() < 1e-12);

    router.advance(decision.ticket, Event::Sent, 1.0).unwrap();
    router
        .advance(decision.ticket, Event::Fetched { tokens: 1600, seconds: 0.018, late: false }, 1.018)
        .unwrap();
    assert_eq!((router.fetch_of(decision.ticket), of(&mut router, Fetches, home)), (None, 0.0));
    let told = router.record(decision.id).unwrap().fetch.clone().unwrap();
    assert_eq!((told.tokens, told.seconds), (Some(1600), Some(0.018)));
    assert_eq!((router.totals().fetches, router.totals().fetched_tokens), (1, 1600));
    // Both instances hold the prompt now.
    assert_eq!(router.hit_tokens(&request(&prompt)), [1600, 1600]);
    let more = router.route(&request(&prompt), 1.1).unwrap();
    assert_eq!((more.fetch, more.predicted_hit_tokens), (None, 1600));
}

#[test]
fn lmetric_pull_weighs_a_fetched_token_at_its_cost() {
    let (mut router, home, prompt) = held_by_one("lmetric_pull", FETCH, 2);
    router.fleet_mut().set_draining(home, false).unwrap();
    let name = router.fleet().name(home).to_string();
    let route = |router: &mut Router, running: f64| {
        // Twice, because the first report may still include requests ended since the last report.
        for usage in [0.1, 0.2] {
            let (waiting, running) = (Some(0.0), Some(running));
            let report = Report { at: 1.0, waiting, running, kv_usage: Some(usage), ..Report::default() };
            router.engine_report(&name, report).unwrap();
        }
        let decision = router.route(&request(&prompt), 1.0).unwrap();
        let mut scores = router.record(decision.id).unwrap().known_scores();
        scores.sort_by(f32::total_cmp);
        router.drop_ticket(decision.ticket);
        (decision, scores)
    };
    // The other instance: 1 token and 0.018 s at 10,000 tokens/s, x 1. At home: 1 token x (bs + 1).
    let (decision, scores) = route(&mut router, 100.0);
    assert_eq!((decision.segment.instance, decision.fetch), (home, None));
    assert_eq!(scores, [101.0, 181.0]);
    let (decision, scores) = route(&mut router, 200.0);
    assert_ne!(decision.segment.instance, home);
    assert_eq!(decision.fetch.map(|fetch| fetch.holder), Some(home));
    assert_eq!(scores, [181.0, 201.0]);
    // LMETRIC stays at home until the batch has 1,600 requests.
    router.set_fetch(None).unwrap();
    assert_eq!(route(&mut router, 200.0).1, [201.0, 1601.0]);
}

#[test]
fn a_holder_serves_so_many_fetches_at_once() {
    let fetch = FetchConfig { max_fetches: 2, ..FETCH };
    let (mut router, home, prompt) = held_by_one("least_requests", fetch, 5);
    let fetching: Vec<Decision> = (0..4).map(|_| router.route(&request(&prompt), 1.0).unwrap()).collect();
    let holders: Vec<_> = fetching.iter().map(|d| d.fetch.map(|fetch| fetch.holder)).collect();
    assert_eq!(holders, [Some(home), Some(home), None, None]);
    assert_eq!(of(&mut router, Fetches, home), 2.0);
    router
        .advance(fetching[0].ticket, Event::Fetched { tokens: 1600, seconds: 0.018, late: false }, 1.1)
        .unwrap();
    assert_eq!(of(&mut router, Fetches, home), 1.0);
    // The first target now holds the prompt and serves no fetch.
    router.add_instance("new", Role::Both, None).unwrap();
    let next = router.route(&request(&prompt), 1.2).unwrap();
    assert_eq!(next.fetch.map(|fetch| fetch.holder), Some(fetching[0].segment.instance));
}

#[test]
fn of_equal_holders_the_one_that_serves_least_is_asked() {
    let fetch = FetchConfig { max_fetches: 9, ..FETCH };
    let (mut router, home, prompt) = held_by_one("least_requests", fetch, 4);
    let second = router.route(&request(&prompt), 1.0).unwrap();
    router.advance(second.ticket, Event::Sent, 1.0).unwrap();
    let also = second.segment.instance;
    router.fleet_mut().set_draining(also, true).unwrap();
    // The home instance still serves a fetch, so the other holder is chosen, although it has one
    // more request.
    let third = router.route(&request(&prompt), 1.0).unwrap();
    assert_eq!(third.fetch.unwrap().holder, also);
    assert_eq!((of(&mut router, Fetches, home), of(&mut router, Fetches, also)), (1.0, 1.0));
    // Both serve one fetch: the holder with fewer requests is chosen.
    let fourth = router.route(&request(&prompt), 1.0).unwrap();
    assert_eq!(fourth.fetch.unwrap().holder, home);
}

#[test]
fn what_does_not_pay_is_not_fetched() {
    // The computation of 1,600 tokens takes 0.16 s.
    for (fetch, pays) in [
        (FetchConfig { fixed_seconds: 0.143, ..FETCH }, true),
        (FetchConfig { fixed_seconds: 0.145, ..FETCH }, false),
        (FetchConfig { seconds_per_token: 0.98e-4, ..FETCH }, true),
        (FetchConfig { seconds_per_token: 0.99e-4, ..FETCH }, false),
        (FetchConfig { min_tokens: 1600, ..FETCH }, true),
        (FetchConfig { min_tokens: 1601, ..FETCH }, false),
    ] {
        let (mut router, _, prompt) = held_by_one("lmetric_pull", fetch, 2);
        let decision = router.route(&request(&prompt), 1.0).unwrap();
        assert_eq!(decision.fetch.is_some(), pays, "{fetch:?}");
        let cost = 1.0 + (fetch.fixed_seconds + 1600.0 * fetch.seconds_per_token) * 10_000.0;
        let score = router.record(decision.id).unwrap().known_scores()[1];
        let expected = if pays { cost as f32 } else { 1601.0 };
        assert!((score / expected - 1.0).abs() < 1e-6, "{fetch:?}: {score} is not {expected}");
    }
}

#[test]
fn a_step_time_model_says_what_computing_takes() {
    // 1e-4 s per token and 1e-8 s per pair: 0.16 + 0.0128 s for 1,600 tokens. The fetch's 0.018 s
    // are about a ninth.
    let step = StepTime {
        fixed_seconds: 1.0,
        decode_seconds_per_sequence: 1.0,
        decode_seconds_per_context_token: 1.0,
        prefill_seconds_per_token: 1e-4,
        prefill_seconds_per_attention_pair: 1e-8,
        max_batch_tokens: 512.0,
        max_sequences: f64::INFINITY,
    };
    let (mut router, _, prompt) = held_by_one("lmetric_pull", FETCH, 2);
    router.set_step_time(Slot(1), Some(step)).unwrap();
    let decision = router.route(&request(&prompt), 1.0).unwrap();
    let score = f64::from(router.record(decision.id).unwrap().known_scores()[1]);
    assert!((score - (1.0 + 0.018 * 1600.0 / 0.1728)).abs() < 1e-4, "{score}");
    router.drop_ticket(decision.ticket);
    for (fixed_seconds, pays) in [(0.157, false), (0.156, true)] {
        router.set_fetch(Some(FetchConfig { fixed_seconds, ..FETCH })).unwrap();
        assert_eq!(router.route(&request(&prompt), 1.0).unwrap().fetch.is_some(), pays);
    }
}

#[test]
fn the_cost_is_learned() {
    let (mut router, home, prompt) = held_by_one("least_requests", FETCH, 2);
    assert_eq!(router.fetch_cost(1.0), Some((1e-5, 0.002, 0)));
    let mut fetches = 0;
    for i in 0..200 {
        let now = 1.0 + f64::from(i);
        let decision = router.route(&request(&prompt), now).unwrap();
        let Some(fetch) = decision.fetch else { break };
        // Each fetch takes 0.5 s, three times as long as the computation.
        router
            .advance(
                decision.ticket,
                Event::Fetched { tokens: fetch.tokens(), seconds: 0.5, late: false },
                now,
            )
            .unwrap();
        router.drop_ticket(decision.ticket);
        router.caches().write().gpu_mut().cleared(decision.segment.instance);
        fetches += 1;
    }
    let (per_token, fixed, observed) = router.fetch_cost(1.0).unwrap();
    assert!((1..100).contains(&fetches) && observed == fetches, "{fetches}");
    assert!(fixed + 1600.0 * per_token > 0.16, "{fixed} {per_token}");
    assert_eq!(of(&mut router, Fetches, home), 0.0);
}

#[test]
fn what_did_not_come_is_computed() {
    let (mut router, _, prompt) = held_by_one("least_requests", FETCH, 2);
    let decision = router.route(&request(&prompt), 1.0).unwrap();
    let target = decision.segment.instance;
    let fetched = |tokens, seconds| Event::Fetched { tokens, seconds, late: false };
    for (event, part) in
        [(fetched(1601, 0.1), "1601"), (fetched(5, f64::NAN), "NaN"), (fetched(5, -1.0), "-1")]
    {
        let error = router.advance(decision.ticket, event, 1.0).unwrap_err().to_string();
        assert!(error.contains(part) && error.contains("at most the 1600"), "{error}");
    }
    router.advance(decision.ticket, fetched(640, 0.01), 1.0).unwrap();
    assert_eq!(of(&mut router, QueuedPrefillTokens, target), 961.0);
    // The engine found no cached tokens of its own; fetched tokens still count.
    router.advance(decision.ticket, Event::Scheduled(Some(0)), 1.1).unwrap();
    assert_eq!(of(&mut router, QueuedPrefillTokens, target), 961.0);
    // A second result has no effect.
    router.advance(decision.ticket, fetched(0, 0.0), 1.2).unwrap();
    assert_eq!(of(&mut router, QueuedPrefillTokens, target), 961.0);
    let cold = chain(7000, 10);
    let other = router.route(&request(&cold), 1.3).unwrap();
    let error = router.advance(other.ticket, fetched(0, 0.0), 1.3).unwrap_err();
    assert!(matches!(&error, CoreError::Ticket { problem, .. } if problem.contains("fetches no prefix")));
}

/// Fetches that the load of the fleet made slow, in the time after that load.
#[test]
fn after_slow_fetches_and_some_idle_minutes_it_fetches_again() {
    let fetch = FetchConfig { max_fetches: 1000, ..FETCH };
    let planned = |policy: &str, (came, late): (bool, bool), idle_seconds: f64| {
        let (mut router, _, prompt) = held_by_one(policy, fetch, 2);
        let fetches: Vec<_> = (0..50).map(|_| router.route(&request(&prompt), 1.0).unwrap()).collect();
        for decision in fetches {
            let tokens = decision.fetch.expect("a fetch").tokens();
            let event = Event::Fetched { tokens: if came { tokens } else { 0 }, seconds: 0.9, late };
            router.advance(decision.ticket, event, 1.9).unwrap();
            router.drop_ticket(decision.ticket);
        }
        // The target has the prompt now; another instance does not.
        router.fleet_mut().set_draining(Slot(1), true).unwrap();
        router.add_instance("new", Role::Both, None).unwrap();
        let decision = router.route(&request(&prompt), 1.9 + idle_seconds).unwrap();
        decision.fetch.is_some()
    };
    for policy in ["least_requests", "lmetric_pull"] {
        for end in [(true, false), (false, true)] {
            assert!(!planned(policy, end, 1.0), "{policy} {end:?}: computing takes 0.16 s, a fetch 0.9 s");
            assert!(planned(policy, end, 600.0), "{policy} {end:?}");
        }
        assert!(planned(policy, (false, false), 1.0), "{policy}: holders that refuse are not slow ones");
    }
}

/// A fleet change after them uses the cost that decisions use, and so do learned values.
#[test]
fn after_slow_fetches_and_some_idle_minutes_fleet_changes_fetch_again() {
    let warm = Some(WarmConfig { half_life_seconds: 3600.0, ..WarmConfig::default() });
    let config = RouterConfig { warm, ..config(FetchConfig { max_fetches: 1000, ..FETCH }) };
    let (mut router, _, prompt) = held_in(config, "least_requests", 2);
    for decision in (0..50).map(|_| router.route(&request(&prompt), 1.0).unwrap()).collect::<Vec<_>>() {
        let tokens = decision.fetch.expect("a fetch").tokens();
        let event = Event::Fetched { tokens, seconds: 0.9, late: false };
        router.advance(decision.ticket, event, 1.9).unwrap();
        router.drop_ticket(decision.ticket);
    }
    let new = router.add_instance("new", Role::Both, None).unwrap();
    let planned = |router: &mut Router, now| {
        let warming = router.begin_join(new, now).unwrap();
        router.end_warming(new).unwrap();
        warming.planned() > 0
    };
    let seconds = |router: &Router, now| {
        let (per_token, fixed, _) = router.fetch_cost(now).unwrap();
        fixed + 1600.0 * per_token
    };
    assert!(!planned(&mut router, 2.0) && seconds(&router, 2.0) > 0.5);
    assert!(planned(&mut router, 1202.0) && seconds(&router, 1202.0) < 0.02);
}

#[test]
fn a_prefill_that_waits_for_its_fetch_holds_nobody_up() {
    let (mut router, _, prompt) = held_by_one("least_requests", FETCH, 2);
    let waiting = router.route(&request(&prompt), 1.0).unwrap();
    let target = waiting.segment.instance;
    let cold = chain(7000, 100);
    let other = router.route(&request(&cold), 2.0).unwrap();
    assert_eq!((other.segment.instance, other.fetch), (target, None));
    assert_eq!(of(&mut router, QueuedPrefillTokens, target), 1602.0);
    // Placed later but started earlier: only this prefill ends, after 0.2 s, not 1.2 s.
    router.advance(other.ticket, Event::FirstToken, 2.2).unwrap();
    assert_eq!(of(&mut router, QueuedPrefillTokens, target), 1.0);
    assert!((of(&mut router, Indicator::PrefillTokensPerSecond, target) - 8005.0).abs() < 1e-6);
    router.advance(waiting.ticket, Event::Fetched { tokens: 0, seconds: 1.5, late: false }, 2.5).unwrap();
    assert_eq!(of(&mut router, QueuedPrefillTokens, target), 1601.0);
    router.advance(waiting.ticket, Event::FirstToken, 2.7).unwrap();
    assert_eq!(of(&mut router, QueuedPrefillTokens, target), 0.0);
    assert!((of(&mut router, Indicator::PrefillTokensPerSecond, target) - 8005.0).abs() < 1e-6);
}

#[test]
fn however_it_ends_the_holder_is_free_again() {
    for end in [
        Event::FirstToken,
        Event::Finished(Usage::default()),
        Event::Ended(Usage::default()),
        Event::GaveUp(Failure::Cancelled),
        Event::Failed(Failure::EngineError),
        Event::Failed(Failure::Refused),
    ] {
        let (mut router, home, prompt) = held_by_one("least_requests", FETCH, 2);
        let decision = router.route(&request(&prompt), 1.0).unwrap();
        assert_eq!(of(&mut router, Fetches, home), 1.0);
        router.advance(decision.ticket, end, 1.1).unwrap();
        assert_eq!(of(&mut router, Fetches, home), 0.0, "{end:?}");
        router.drop_ticket(decision.ticket);
        assert_eq!(of(&mut router, Fetches, home), 0.0, "{end:?}");
    }
    // A new instance in the holder's slot starts empty.
    let (mut router, home, prompt) = held_by_one("least_requests", FETCH, 2);
    let decision = router.route(&request(&prompt), 1.0).unwrap();
    router.remove_instance("e0").unwrap();
    // Nobody can bring the tokens: the instance computes all of them.
    let (target, queued) = (decision.segment.instance, Indicator::QueuedPrefillTokens);
    assert_eq!(of(&mut router, queued, target), 1.0);
    assert_eq!(router.add_instance("new", Role::Both, None).unwrap(), home);
    assert_eq!(of(&mut router, queued, target), 1601.0);
    assert_eq!(router.fetch_of(decision.ticket), None);
    router.drop_ticket(decision.ticket);
    assert_eq!(of(&mut router, Fetches, home), 0.0);
}

#[test]
fn a_retry_fetches_anew() {
    let (mut router, home, prompt) = held_by_one("least_requests", FETCH, 3);
    let decision = router.route(&request(&prompt), 1.0).unwrap();
    let next = router.advance(decision.ticket, Event::Failed(Failure::Reset), 1.1).unwrap().unwrap();
    assert_ne!(next.instance, decision.segment.instance);
    assert_eq!(router.fetch_of(decision.ticket), decision.fetch);
    assert_eq!(of(&mut router, Fetches, home), 1.0);
    let record = router.record(decision.id).unwrap();
    assert_eq!((record.fetch.as_ref().unwrap().slot, record.predicted_hit_tokens), (home.0, 0));
    // No instance is left: the ticket closes.
    let last = router.advance(decision.ticket, Event::Failed(Failure::Reset), 1.2).unwrap();
    assert_eq!((last, router.in_flight(), of(&mut router, Fetches, home)), (None, 0, 0.0));
}

#[test]
fn a_retry_fetches_nothing_from_an_instance_that_failed_the_request() {
    for policy in ["least_requests", "lmetric_pull"] {
        for holders in [1, 2] {
            let (mut router, home, prompt) = held_by_one(policy, FETCH, 1 + holders);
            let route_home = |router: &mut Router, id: Slot| {
                for slot in 0..router.fleet().slots() as u32 {
                    router.fleet_mut().set_draining(Slot(slot), Slot(slot) != id).unwrap();
                }
                router.route(&request(&prompt), 1.0).unwrap()
            };
            let other = Slot(1);
            if holders == 2 {
                let second = route_home(&mut router, other);
                router.advance(second.ticket, Event::FirstToken, 1.1).unwrap();
                router.advance(second.ticket, Event::Finished(Usage::default()), 1.2).unwrap();
            }
            let decision = route_home(&mut router, home);
            assert_eq!((decision.segment.instance, decision.fetch), (home, None));
            // Only the last instance, without the prompt, takes the retry.
            let last = Slot(holders as u32);
            router.fleet_mut().set_draining(last, false).unwrap();
            let next = router.advance(decision.ticket, Event::Failed(Failure::Reset), 2.0).unwrap().unwrap();
            assert_eq!(next.instance, last);
            let holder = router.fetch_of(decision.ticket).map(|fetch| fetch.holder);
            assert_eq!(holder, (holders == 2).then_some(other), "{policy}");
        }
    }
}

#[test]
fn engines_must_be_able_to() {
    for (slot, cuts) in [(0, Cuts::Output), (1, Cuts::Output), (1, Cuts::Nowhere)] {
        let (mut router, _, prompt) = held_by_one("lmetric_pull", FETCH, 2);
        router.set_cuts(Slot(slot), cuts).unwrap();
        let decision = router.route(&request(&prompt), 1.0).unwrap();
        assert_eq!(decision.fetch, None);
        assert_eq!(router.record(decision.id).unwrap().known_scores()[1], 1601.0);
    }
    let (mut router, home, prompt) = held_by_one("lmetric_pull", FETCH, 2);
    router.fleet_mut().set_healthy(home, false).unwrap();
    assert_eq!(router.route(&request(&prompt), 1.0).unwrap().fetch, None);
}

#[test]
fn a_prefill_instance_fetches_too_and_a_part_of_a_prompt_does_not() {
    let (mut router, home, prompt) = held_by_one("least_requests", FETCH, 2);
    router.fleet_mut().set_role(Slot(1), Role::Prefill).unwrap();
    router.add_instance("decode", Role::Decode, None).unwrap();
    let decision = router.route(&request(&prompt), 1.0).unwrap();
    assert_eq!(decision.segment.to_token, Some(1601));
    assert_eq!(decision.fetch.map(|fetch| fetch.holder), Some(home));
    router.advance(decision.ticket, Event::Finished(Usage::default()), 1.1).unwrap();
    assert_eq!(of(&mut router, Fetches, home), 0.0);

    let (mut router, _, prompt) = held_by_one("least_requests", FETCH, 3);
    router.set_split(&force(0.5).unwrap()).unwrap();
    let decision = router.route(&request(&prompt), 1.0).unwrap();
    assert_eq!((decision.segment.to_token.is_some(), decision.fetch), (true, None));
}

#[test]
fn an_instance_that_is_full_fetches_nothing() {
    let fetch = FetchConfig { max_fetches: 9, max_kv_usage: 0.8, ..FETCH };
    let (mut router, home, prompt) = held_by_one("lmetric_pull", fetch, 2);
    let place = |router: &mut Router, kv_usage: Option<f64>| {
        if kv_usage.is_some() {
            let report = Report { at: 1.0, waiting: None, running: None, kv_usage, ..Report::default() };
            router.engine_report("e1", report).unwrap();
            router.engine_report("e0", Report { kv_usage: Some(1.0), ..report }).unwrap();
        }
        let decision = router.route(&request(&prompt), 1.0).unwrap();
        router.drop_ticket(decision.ticket);
        let record = router.record(decision.id).unwrap();
        let read = record.reads.iter().position(|id| id == Indicator::FetchTokens).unwrap();
        let (_, terms) = record.explained().find(|(best, _)| best.slot == record.chosen).unwrap();
        let tokens = terms[read];
        (decision.fetch.map_or(0, |fetch| fetch.tokens()), tokens, decision.segment.instance != home)
    };
    // No report, below the limit, at the limit, above it, and below it again. The holder's usage
    // has no effect.
    for (told, fetched) in
        [(None, 1600), (Some(0.79), 1600), (Some(0.8), 0), (Some(1.0), 0), (Some(0.5), 1600)]
    {
        assert_eq!(place(&mut router, told), (fetched, f64::from(fetched), true), "{told:?}");
    }
    router.set_fetch(Some(FetchConfig { max_kv_usage: 1.0, ..fetch })).unwrap();
    assert_eq!(place(&mut router, Some(1.0)).0, 1600);
}

#[test]
fn bad_settings_are_named() {
    for (fetch, what) in [
        (FetchConfig { seconds_per_token: -1.0, ..FETCH }, "seconds_per_token"),
        (FetchConfig { fixed_seconds: f64::NAN, ..FETCH }, "fixed_seconds"),
        (FetchConfig { min_tokens: 0, ..FETCH }, "min_tokens"),
        (FetchConfig { max_fetches: 0, ..FETCH }, "max_fetches"),
        (FetchConfig { max_kv_usage: 1.5, ..FETCH }, "max_kv_usage"),
        (FetchConfig { max_kv_usage: f64::NAN, ..FETCH }, "max_kv_usage"),
    ] {
        let mut router = router("lmetric", FETCH, 1);
        let error = router.set_fetch(Some(fetch)).unwrap_err().to_string();
        assert!(error.contains(what), "{error}");
    }
}

proptest! {
    /// Fetches counted at the holders equal the fetches of open tickets, for any sequence of
    /// events.
    #[test]
    fn holders_serve_what_tickets_fetch(
        max_fetches in 1u32..4,
        ops in prop::collection::vec((0..9u8, 0..64usize, 0..5u8), 1..120),
    ) {
        let mut router = router("lmetric_pull", FetchConfig { max_fetches, ..FETCH }, 4);
        let prompts: Vec<Vec<u64>> = (0..5).map(|i| chain(1 + 1000 * i, 20 + 30 * i as usize)).collect();
        let mut open = Vec::new();
        for (at, (op, which, what)) in ops.into_iter().enumerate() {
            let now = at as f64;
            if op < 3 || open.is_empty() {
                if let Ok(decision) = router.route(&request(&prompts[what as usize]), now) {
                    router.advance(decision.ticket, Event::Sent, now).unwrap();
                    open.push(decision.ticket);
                }
            } else {
                let place = which % open.len();
                let ticket = open[place];
                let fetched = router.fetch_of(ticket).map_or(0, |fetch| fetch.tokens());
                match op {
                    3 if fetched > 0 => {
                        let event = Event::Fetched { tokens: fetched / u32::from(1 + what), seconds: 0.01, late: false };
                        router.advance(ticket, event, now).unwrap();
                    }
                    4 => drop(router.advance(ticket, Event::FirstToken, now).unwrap()),
                    5 => drop(router.advance(ticket, Event::Finished(Usage::default()), now).unwrap()),
                    6 => drop(router.advance(ticket, Event::Failed(Failure::Reset), now).unwrap()),
                    7 => router.drop_ticket(ticket),
                    8 => {
                        let name = format!("e{}", what % 4);
                        let slot = Slot(u32::from(what % 4));
                        if router.fleet().find(&name).is_ok() {
                            if which % 2 == 0 {
                                router.remove_instance(&name).unwrap();
                            } else {
                                router.fleet_mut().set_draining(slot, which % 4 == 1).unwrap();
                            }
                        } else {
                            router.add_instance(&name, Role::Both, None).unwrap();
                        }
                    }
                    _ => {}
                }
                if !router.is_open(ticket) {
                    open.remove(place);
                }
            }
            let fetches: Vec<PrefixFetch> = open.iter().filter_map(|ticket| router.fetch_of(*ticket)).collect();
            for slot in 0..router.fleet().slots() {
                let id = Slot(slot as u32);
                let serves = fetches.iter().filter(|fetch| fetch.holder == id).count() as f64;
                let counted = of(&mut router, Fetches, id);
                // A new instance in a slot has no fetches of its predecessor.
                prop_assert!(counted <= serves && counted <= f64::from(max_fetches), "{counted} of {serves}");
                prop_assert!(counted == serves || !router.fleet().is_live(id));
            }
        }
        open.into_iter().for_each(|ticket| router.drop_ticket(ticket));
        for slot in 0..router.fleet().slots() {
            let id = Slot(slot as u32);
            prop_assert_eq!(of(&mut router, Fetches, id), 0.0);
            prop_assert_eq!(of(&mut router, QueuedPrefillTokens, id), 0.0);
        }
    }
}
