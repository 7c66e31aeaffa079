//! The router as an embedder uses it: hand-computed decisions, retries, merged load, decision
//! records, dropped tickets.
#[path = "common/router.rs"]
mod common;

use common::{STEP, chain, request};
use lmetric_core::CoreError;
use lmetric_core::Registry;
use lmetric_core::fleet::Role;
use lmetric_core::guard::{GuardConfig, Phase};
use lmetric_core::indicators::{Indicator, IndicatorSet};
use lmetric_core::plan::{Event, Failure, Usage};
use lmetric_core::request::Request;
use lmetric_core::router::ledger::Report;
use lmetric_core::router::{IndexFeed, Router, RouterConfig, SharedRouter};

fn router(policy: &str, instances: usize) -> Router {
    let mut router =
        Router::new(Registry::CORE.policy(policy, &[]).unwrap(), RouterConfig::default()).unwrap();
    for i in 0..instances {
        router.add_instance(&format!("e{i}"), Role::Both, None).unwrap();
    }
    router
}

fn slot_of(router: &Router, name: &str) -> usize {
    router.fleet().find(name).unwrap().index()
}

#[test]
fn lmetric_by_hand_goes_back_to_its_cache_until_load_outweighs_it() {
    let mut router = router("lmetric", 2);
    let prompt = chain(1, 100); // 1,601 tokens
    let first = router.route(&request(&prompt), 0.0).unwrap();
    let home = first.segment.instance;
    router.advance(first.ticket, Event::FirstToken, 0.1).unwrap();
    // Home: 1 uncached token x (1 + 1) = 2. The other instance: 1,601 x (0 + 1).
    let second = router.route(&request(&prompt), 0.2).unwrap();
    assert_eq!(second.segment.instance, home);
    assert_eq!(second.predicted_hit_tokens, 1600);
    let record = router.record(second.id).unwrap();
    let scores: Vec<f64> = record.best.iter().map(|best| best.score).collect();
    assert_eq!(scores, [2.0, 1601.0]);
    assert_eq!(record.margin, Some(1599.0));
    // A cold prompt weighs the batch at home: 1,601 + 1 queued x (2 + 1). The other instance: 1,601
    // x 1.
    let cold = chain(1000, 100);
    assert_ne!(router.route(&request(&cold), 0.3).unwrap().segment.instance, home);
}

/// Long prompts ahead in the queue: their attention pairs take more time than their tokens.
#[test]
fn the_attention_of_queued_prompts_delays_the_first_token() {
    let config = RouterConfig {
        step_time: Some(STEP),
        prior_prefill_tokens_per_second: 20_000.0,
        ..RouterConfig::default()
    };
    let mut router = Router::new(Registry::CORE.policy("lmetric", &[]).unwrap(), config).unwrap();
    router.add_instance("e0", Role::Both, None).unwrap();
    let long = Request { prompt_tokens: 20_000, tokens_per_block: 16.0, ..Request::default() };
    router.route(&long, 0.0).unwrap();
    // Half of the tokens, and of the pairs, are left after half a second.
    for (now, left) in [(0.0, 1.0_f64), (0.5, 0.5), (1.0, 0.0), (9.0, 0.0)] {
        let (tokens, pairs) = (20_000.0 * left, 20_000.0 * 10_000.0 * left);
        let steps = f64::max((tokens / 512.0).ceil(), 1.0);
        let expected = 0.01 * steps + 1e-4 * tokens + 1e-8 * pairs;
        router.derive_some(IndicatorSet::ALL, now);
        let predicted = router.columns().get(Indicator::PredictedTtftSeconds)[0];
        assert!((predicted - expected).abs() < 1e-9, "{predicted} is not {expected} at {now}");
    }
}

#[test]
fn a_failed_request_walks_its_ranking_and_then_closes() {
    let mut router = router("lmetric", 3);
    let prompt = chain(1, 10);
    let decision = router.route(&request(&prompt), 0.0).unwrap();
    let mut tried = vec![decision.segment.instance];
    for _ in 0..2 {
        let next = router.advance(decision.ticket, Event::Failed(Failure::Refused), 0.1).unwrap().unwrap();
        assert!(!tried.contains(&next.instance));
        tried.push(next.instance);
        assert_eq!(router.in_flight_on(next.instance), 1);
    }
    assert_eq!(router.in_flight(), 1);
    assert_eq!(router.advance(decision.ticket, Event::Failed(Failure::Refused), 0.2).unwrap(), None);
    assert_eq!(router.in_flight(), 0);
    assert_eq!(router.totals().retries, 2);
    let record = router.record(decision.id).unwrap();
    assert_eq!(record.tried().count(), 3);
    assert_eq!(record.outcome.ended, Some(Some(Failure::Refused)));
}

#[test]
fn after_the_first_token_nothing_moves() {
    let mut router = router("lmetric", 2);
    let decision = router.route(&request(&[]), 0.0).unwrap();
    router.advance(decision.ticket, Event::FirstToken, 0.1).unwrap();
    assert_eq!(router.advance(decision.ticket, Event::Failed(Failure::Reset), 0.2).unwrap(), None);
    assert!(matches!(router.advance(decision.ticket, Event::Tokens(1), 0.3), Err(CoreError::Ticket { .. })));
}

#[test]
fn a_retry_survives_a_lost_record_and_may_go_to_an_instance_that_is_new() {
    let config = RouterConfig { record_bytes: 1, ..RouterConfig::default() };
    let mut router = Router::new(Registry::CORE.policy("lmetric", &[]).unwrap(), config).unwrap();
    router.add_instance("e0", Role::Both, None).unwrap();
    let first = router.route(&request(&[]), 0.0).unwrap();
    let second = router.route(&request(&[]), 0.0).unwrap();
    assert!(router.record(first.id).is_none());
    let new = router.add_instance("new", Role::Both, None).unwrap();
    for decision in [first, second] {
        let next = router.advance(decision.ticket, Event::Failed(Failure::Reset), 0.1).unwrap().unwrap();
        assert_eq!(next.instance, new);
    }
    let tried: Vec<_> = router.record(second.id).unwrap().tried().map(|name| name.to_string()).collect();
    assert_eq!(tried, ["e0", "new"]);
}

#[test]
fn what_a_dead_instance_leaves_is_spread() {
    let mut router = router("lmetric", 5);
    let decisions: Vec<_> = (0..40).map(|_| router.route(&request(&[]), 0.0).unwrap()).collect();
    let dead = router.fleet().find("e0").unwrap();
    let orphans: Vec<_> = decisions.iter().filter(|d| d.segment.instance == dead).collect();
    assert_eq!(orphans.len(), 8);
    let mut next = std::collections::BTreeMap::new();
    for decision in orphans {
        let segment = router.advance(decision.ticket, Event::Failed(Failure::Reset), 0.1).unwrap().unwrap();
        *next.entry(segment.instance).or_insert(0) += 1;
    }
    assert_eq!(next.into_values().collect::<Vec<_>>(), [2, 2, 2, 2]);
}

#[test]
fn giving_up_closes_with_the_true_failure() {
    let mut router = router("lmetric", 3);
    let decision = router.route(&request(&[]), 0.0).unwrap();
    assert_eq!(router.advance(decision.ticket, Event::GaveUp(Failure::Status), 0.1).unwrap(), None);
    assert_eq!((router.in_flight(), router.totals().retries), (0, 0));
    let record = router.record(decision.id).unwrap();
    assert_eq!((record.outcome.ended, record.tried().count()), (Some(Some(Failure::Status)), 1));
}

#[test]
fn foreign_load_is_what_the_engine_reports_beyond_our_own() {
    let mut router = router("vllm", 2);
    let decision = router.route(&request(&[]), 0.0).unwrap();
    let name = router.fleet().name(decision.segment.instance).to_string();
    // The engine counts our prefill as running; the router counts it as queued: no double count.
    let report = |waiting, running| Report {
        at: 0.1,
        waiting: Some(waiting),
        running: Some(running),
        ..Report::default()
    };
    router.engine_report(&name, report(0.0, 1.0)).unwrap();
    let slot = slot_of(&router, &name);
    assert_eq!(router.columns().get(Indicator::Bs)[slot], 1.0);
    // Three more waiting requests and one more running request than ours.
    router.engine_report(&name, report(3.0, 2.0)).unwrap();
    assert_eq!(router.columns().get(Indicator::Bs)[slot], 5.0);
    assert_eq!(router.columns().get(Indicator::QBs)[slot], 1.0 + 2.0);
    // A header with waiting requests alone leaves the external load unchanged.
    let waiting = Report { at: 0.2, waiting: Some(0.0), running: None, ..Report::default() };
    router.engine_report(&name, waiting).unwrap();
    assert_eq!(router.columns().get(Indicator::Bs)[slot], 5.0);
    assert_eq!(router.columns().get(Indicator::QBs)[slot], 2.0, "our request left the queue");
    assert!(router.engine_report(&name, report(f64::NAN, 0.0)).is_err());
}

#[test]
fn prompt_tokens_that_an_engine_reports_beyond_ours_are_queued() {
    let mut router = router("lmetric", 1);
    let decision = router.route(&request(&chain(1, 60)), 0.0).unwrap();
    let name = router.fleet().name(decision.segment.instance).to_string();
    let queued = |router: &mut Router| {
        router.derive_some(IndicatorSet::ALL, 0.0);
        router.columns().get(Indicator::QueuedPrefillTokens)[0]
    };
    let report = |tokens: Option<f64>, running| Report {
        at: 0.0,
        waiting: Some(0.0),
        running: Some(running),
        prefill_tokens: tokens,
        ..Report::default()
    };
    let ours = queued(&mut router);
    // The engine has yet to receive our request, or has computed a part: ours counts.
    router.engine_report(&name, report(Some(0.0), 0.0)).unwrap();
    assert_eq!(queued(&mut router), ours);
    router.engine_report(&name, report(Some(3000.0), 2.0)).unwrap();
    assert!(queued(&mut router) >= ours + 2000.0 - 1e-6, "2,000 tokens of another client");
    // The same sample again, without the tokens, and a newer sample without them.
    router.engine_report(&name, report(None, 2.0)).unwrap();
    assert!(queued(&mut router) > ours);
    router.engine_report(&name, report(None, 1.0)).unwrap();
    assert_eq!(queued(&mut router), ours);
    assert!(router.engine_report(&name, report(Some(-1.0), 1.0)).is_err());
}

#[test]
fn queued_prefill_drains_at_the_learned_rate() {
    let mut router = router("least_prefill", 1);
    let queued = |router: &mut Router, now| {
        router.derive_some(IndicatorSet::ALL, now);
        router.columns().get(Indicator::QueuedPrefillTokens)[0]
    };
    let first = router.route(&request(&chain(1, 100)), 0.0).unwrap();
    assert_eq!(queued(&mut router, 0.1), 801.0, "at the assumed 8,000 tokens/s until a rate is learned");
    router.advance(first.ticket, Event::FirstToken, 1.601).unwrap(); // 1,000 tokens/s
    assert_eq!(queued(&mut router, 1.7), 0.0);
    let plain = router.route(&request(&chain(1000, 100)), 2.0).unwrap();
    let second = router.route(&request(&chain(2000, 100)), 2.0).unwrap();
    assert!((queued(&mut router, 3.0) - 2202.0).abs() < 1e-6);
    assert_eq!(queued(&mut router, 30.0), 0.0, "a long decode without streaming is no backlog");
    // Idle time gives no credit to the next prefill: 1,601 tokens from 30 s on.
    router.route(&request(&chain(3000, 100)), 30.0).unwrap();
    assert!((queued(&mut router, 31.0) - 601.0).abs() < 1e-6);
    // A first token also ends earlier prefills, and the rate is learned from all of them.
    router.advance(second.ticket, Event::FirstToken, 31.0).unwrap();
    assert!((queued(&mut router, 31.0) - 601.0).abs() < 1e-6);
    router.advance(plain.ticket, Event::Finished(Usage::default()), 32.0).unwrap();
    assert!(queued(&mut router, 31.0) > 0.0);
}

/// An engine with 0.1 ms per token and 1 ns per attention pair; the router learns both from first
/// tokens.
#[test]
fn long_prompts_drain_as_slowly_as_attention_makes_them() {
    let mut router = router("least_prefill", 1);
    let ask = |router: &mut Router, tokens: u32, now: f64| {
        let request = Request { prompt_tokens: tokens, tokens_per_block: 16.0, ..Request::default() };
        router.route(&request, now).unwrap().ticket
    };
    let seconds = |tokens: f64| 1e-4 * tokens + 1e-9 * tokens * tokens / 2.0;
    let mut now = 0.0;
    for tokens in [500, 4000, 20_000, 1000, 60_000] {
        let ticket = ask(&mut router, tokens, now);
        now += seconds(f64::from(tokens));
        router.advance(ticket, Event::FirstToken, now).unwrap();
        router.advance(ticket, Event::Finished(Usage::default()), now).unwrap();
    }
    for tokens in [800, 100_000] {
        let ticket = ask(&mut router, tokens, now);
        // At half the time, half is left, at any length. A single rate would be wrong by a factor
        // of five.
        router.derive_some(IndicatorSet::ALL, now + seconds(f64::from(tokens)) / 2.0);
        let left = router.columns().get(Indicator::QueuedPrefillTokens)[0];
        assert!((left / f64::from(tokens) - 0.5).abs() < 1e-6, "{left} of {tokens}");
        now += seconds(f64::from(tokens));
        router.advance(ticket, Event::FirstToken, now).unwrap();
    }
}

#[test]
fn time_does_not_run_back() {
    let mut router = router("lmetric", 1);
    let first = router.route(&request(&chain(1, 100)), 10.0).unwrap();
    router.advance(first.ticket, Event::FirstToken, 11.0).unwrap();
    router.advance(first.ticket, Event::Finished(Usage::default()), 11.0).unwrap();
    let late = router.route(&request(&chain(1, 100)), 2.0).unwrap();
    assert_eq!(router.record(late.id).unwrap().at, 11.0);
    assert_eq!(router.record(late.id).unwrap().best[0].score, 1.0, "one uncached token, nothing queued");
    router.route(&request(&[]), f64::NAN).unwrap();
    router.route(&request(&[]), f64::INFINITY).unwrap();
    assert!(router.tick(f64::INFINITY).1.is_finite());
}

#[test]
fn exact_feed_believes_events_only() {
    let config = RouterConfig { index_feed: IndexFeed::Exact, ..RouterConfig::default() };
    let mut router = Router::new(Registry::CORE.policy("lmetric", &[]).unwrap(), config).unwrap();
    let ids: Vec<_> =
        (0..2).map(|i| router.add_instance(&format!("e{i}"), Role::Both, None).unwrap()).collect();
    let prompt = chain(1, 4);
    router.route(&request(&prompt), 0.0).unwrap();
    assert_eq!(router.route(&request(&prompt), 0.1).unwrap().predicted_hit_tokens, 0);
    router.caches().write().gpu_mut().stored(ids[1], None, &prompt[..3]);
    let decision = router.route(&request(&prompt), 0.2).unwrap();
    assert_eq!((decision.segment.instance, decision.predicted_hit_tokens), (ids[1], 48));
}

#[test]
fn nobody_to_take_it_is_an_error_that_books_nothing() {
    let mut empty = router("lmetric", 0);
    assert!(empty.route(&request(&[]), 0.0).unwrap_err().to_string().contains("no instances"));
    let mut drained = router("lmetric", 1);
    let id = drained.fleet().find("e0").unwrap();
    drained.fleet_mut().set_draining(id, true).unwrap();
    let error = drained.route(&request(&[]), 0.0).unwrap_err().to_string();
    assert!(error.contains("draining"), "{error}");
    assert_eq!((drained.in_flight(), drained.totals().no_instance), (0, 1));
    // The score reads an indicator that no engine reports.
    let mut blind = router("llmd_scorers", 2);
    let error = blind.route(&request(&[]), 0.0);
    if let Err(error) = error {
        assert!(error.to_string().contains("kv_usage"), "{error}");
    }
}

#[test]
fn dropped_tickets_leave_nothing_even_while_the_router_is_locked() {
    let shared = SharedRouter::new(router("lmetric", 2));
    let decision = shared.lock().route(&request(&[]), 0.0).unwrap();
    let ticket = shared.ticket(&decision);
    let guard = shared.lock();
    drop(ticket);
    drop(guard);
    assert_eq!(shared.lock().in_flight(), 0);
    assert_eq!(shared.lock().totals().dropped, 1);

    let decision = shared.lock().route(&request(&[]), 0.0).unwrap();
    let ticket = shared.ticket(&decision);
    ticket.advance(Event::Finished(Usage::default()), 1.0).unwrap();
    drop(ticket);
    assert_eq!(shared.lock().totals().dropped, 1, "a finished ticket is not dropped");
}

#[test]
fn a_removed_instance_owes_its_successor_nothing() {
    let mut router = router("lmetric", 1);
    let decision = router.route(&request(&[]), 0.0).unwrap();
    router.remove_instance("e0").unwrap();
    router.add_instance("new", Role::Both, None).unwrap();
    router.advance(decision.ticket, Event::FirstToken, 0.1).unwrap();
    router.advance(decision.ticket, Event::Finished(Usage::default()), 0.2).unwrap();
    assert_eq!(router.columns().get(Indicator::Bs)[0], 0.0);
    assert_eq!(router.in_flight(), 0);
}

#[test]
fn the_guard_takes_a_hot_prefix_off_its_holders() {
    let config = RouterConfig {
        index_feed: IndexFeed::Exact, // keeps the prefix on its instance
        guard: GuardConfig { on: true, ..GuardConfig::default() },
        ..RouterConfig::default()
    };
    let mut router = Router::new(Registry::CORE.policy("lmetric", &[]).unwrap(), config).unwrap();
    let ids: Vec<_> =
        (0..8).map(|i| router.add_instance(&format!("e{i}"), Role::Both, None).unwrap()).collect();
    let shared = chain(1, 64);
    router.caches().write().gpu_mut().stored(ids[0], None, &shared);
    let (mut elsewhere, mut excluded, mut filters) = (Vec::new(), 0, 0);
    for i in 0..200u64 {
        let now = i as f64 * 0.05;
        let mut prompt = shared.clone();
        prompt.extend(chain(10_000 + i * 10, 1));
        let decision = router.route(&request(&prompt), now).unwrap();
        elsewhere.extend((decision.segment.instance != ids[0]).then_some(decision.segment.instance));
        excluded += usize::from(router.record(decision.id).unwrap().guard_excluded > 0);
        router.advance(decision.ticket, Event::FirstToken, now).unwrap();
        router.advance(decision.ticket, Event::Finished(Usage::default()), now).unwrap();
        let (events, _) = router.tick(now);
        filters += events.iter().filter(|e| e.phase == Phase::Filtering && !e.released).count();
    }
    // Without the guard, the idle holder would always win. The filter sends one request to each
    // other instance. These hold the prefix then, which raises no second alarm.
    elsewhere.sort_unstable();
    elsewhere.dedup();
    assert_eq!((&elsewhere[..], excluded, filters), (&ids[1..], 7, 1));
    assert!(router.guard().unwrap().alarms().is_empty());
}

#[test]
fn same_seed_same_decisions() {
    let run = || {
        let mut router = router("power_of_two", 16);
        (0..200u64)
            .map(|i| router.route(&request(&chain(i % 7, 5)), i as f64).unwrap().segment.instance.0)
            .collect::<Vec<_>>()
    };
    assert_eq!(run(), run());
}

#[test]
fn partial_last_blocks_count_where_engines_keep_them() {
    let prompt = chain(1, 3);
    for (partial_blocks, tokens, expected) in
        [(false, 40, 32), (true, 40, 39), (false, 48, 32), (true, 48, 47), (false, 49, 48), (true, 49, 48)]
    {
        let config = RouterConfig { partial_blocks, ..RouterConfig::default() };
        let mut router = Router::new(Registry::CORE.policy("lmetric", &[]).unwrap(), config).unwrap();
        router.add_instance("e0", Role::Both, None).unwrap();
        let request = Request { prompt_tokens: tokens, ..request(&prompt) };
        let placed = router.route(&request, 0.0).unwrap();
        router.advance(placed.ticket, Event::Sent, 0.0).unwrap();
        assert_eq!(router.hit_tokens(&request), [expected], "{partial_blocks}, {tokens} tokens");
    }
}

#[test]
fn what_an_engine_finds_cached_replaces_what_was_booked() {
    let config = RouterConfig { drain: false, ..RouterConfig::default() };
    let mut router = Router::new(Registry::CORE.policy("lmetric", &[]).unwrap(), config).unwrap();
    router.add_instance("e0", Role::Both, None).unwrap();
    let (long, short) = (chain(1, 10), chain(50, 2)); // 161 and 33 tokens, without learned lengths
    let first = router.route(&request(&long), 0.0).unwrap();
    let second = router.route(&request(&short), 0.0).unwrap();
    let queued = |router: &mut Router| {
        router.derive_some(IndicatorSet::ALL, 1.0);
        router.columns().get(Indicator::QueuedPrefillTokens)[0]
    };
    assert_eq!(queued(&mut router), 194.0);
    router.advance(first.ticket, Event::Scheduled(Some(128)), 0.1).unwrap();
    assert_eq!(queued(&mut router), 33.0 + 33.0);
    router.advance(first.ticket, Event::Prefilled(30), 0.2).unwrap();
    assert_eq!(queued(&mut router), 3.0 + 33.0);
    // Requeued and scheduled again, with fewer cached tokens than before.
    router.advance(first.ticket, Event::Scheduled(Some(64)), 0.3).unwrap();
    assert_eq!(queued(&mut router), 97.0 + 33.0);
    for ticket in [first.ticket, second.ticket] {
        router.advance(ticket, Event::FirstToken, 0.4).unwrap();
    }
    assert_eq!(queued(&mut router), 0.0);
}
