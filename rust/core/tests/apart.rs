//! Decode placement: requests decode where all requests together lose the least time. Covers
//! placements, reasons and decision records.
#[path = "common/router.rs"]
mod common;
#[path = "../../study/src/planner/given.rs"]
mod given;

use common::STEP;
use given::given;
use lmetric_core::fleet::Role;
use lmetric_core::ids::Slot;
use lmetric_core::indicators::{Indicator, IndicatorSet};
use lmetric_core::plan::{Cuts, Event, Segment, Usage};
use lmetric_core::program::Finish;
use lmetric_core::request::Request;
use lmetric_core::router::ledger::Report;
use lmetric_core::router::{FetchConfig, Router, RouterConfig, Split};
use lmetric_core::split::apart::Settings;
use lmetric_core::{CoreError, Registry};

const SETTINGS: Settings = Settings {
    max_stall_seconds: 0.0,
    recent_seconds: 10.0,
    min_gain_seconds: 0.0,
    transfer_seconds_per_token: 1e-5,
    transfer_fixed_seconds: 0.002,
};

/// Returns the planner with [`SETTINGS`], extended or replaced by these settings.
fn with(settings: &[(&str, f64)]) -> Result<Split, CoreError> {
    let usual = [
        ("max_stall_seconds", SETTINGS.max_stall_seconds),
        ("recent_seconds", SETTINGS.recent_seconds),
        ("min_gain_seconds", SETTINGS.min_gain_seconds),
        ("transfer_seconds_per_token", SETTINGS.transfer_seconds_per_token),
        ("transfer_fixed_seconds", SETTINGS.transfer_fixed_seconds),
    ];
    Registry::CORE.split("apart", &[&usual, settings].concat())
}

fn apart(settings: &[(&str, f64)]) -> Split {
    with(settings).unwrap()
}

fn fleet(split: Split, instances: usize) -> Router {
    // Prefills do not drain between events.
    let config = RouterConfig { step_time: Some(STEP), drain: false, ..RouterConfig::default() };
    let mut router = Router::new(Registry::CORE.policy("least_requests", &[]).unwrap(), config).unwrap();
    router.set_split(&split).unwrap();
    for i in 0..instances {
        router.add_instance(&format!("engine-{i}"), Role::Both, None).unwrap();
    }
    router
}

/// A prompt of 1,000 tokens: 0.1 s, and 1e-8 x 500,000 pairs: 0.005 s. An output of 100 tokens.
const ASKED: Request<'static> = Request {
    chain: &[],
    prompt_tokens: 1000,
    tokens_per_block: 16.0,
    expected_output_tokens: Some(100),
    think_tokens: None,
    length_class: None,
    session: None,
    split_reason: None,
    fetch_reason: None,
    instances: None,
    tenant: lmetric_core::request::Tenant::NOBODY,
    lora: None,
    priority: None,
    arrival: None,
    ttft_slo_seconds: None,
    level: 0,
    sheddable: false,
    whole_answer: false,
    session_final: false,
    home: None,
    arm: lmetric_core::request::Arm::Stable,
    shadow: false,
};

fn costs(router: &Router, id: u64) -> (f64, f64) {
    let balance = router.record(id).unwrap().balance.expect("asked");
    assert!(balance.whole_seconds.is_nan() && balance.first_seconds.is_nan());
    (balance.stay_seconds, balance.apart_seconds)
}

/// Nine external requests, which scores include; their tokens are unknown.
fn busy_with_others(router: &mut Router, id: Slot, at: f64) {
    let name = router.fleet().name(id).clone();
    let report = Report { at, waiting: Some(0.0), running: Some(9.0), ..Report::default() };
    router.engine_report(&name, report).unwrap();
}

fn near(got: (f64, f64), expected: (f64, f64)) {
    assert!((got.0 - expected.0).abs() < 1e-9 && (got.1 - expected.1).abs() < 1e-9, "{got:?} {expected:?}");
}

#[test]
fn a_request_leaves_an_instance_that_prefills_and_the_record_has_both_costs() {
    let mut router = fleet(given(apart(&[])), 2);
    // Alone on another instance: 100 steps of 10 + 0.1 + 1.05 ms, and 2 + 10 ms for the transfer.
    // On the first instance: 99 steps with half a context token less.
    let first = router.route(&ASKED, 0.0).unwrap();
    let (stays, alone) = (99.0 * 0.0111495, 100.0 * 0.01115);
    near(costs(&router, first.id), (stays, alone + 0.012));
    assert_eq!((first.segment.to_token, first.next), (None, None));
    let record = router.record(first.id).unwrap();
    assert_eq!(record.split_reason.as_deref(), Some("a decode on another instance gains too little"));
    // The least loaded instance takes the next request, 2 s later, and is otherwise empty. The
    // first instance has a queued prefill of 0.105 s, which has decayed by exp(-0.2) in 2 s of the
    // 10 s. The share of prefills is therefore this over 10 (1 - exp(-0.2)).
    let second = router.route(&ASKED, 2.0).unwrap();
    assert_ne!(second.segment.instance, first.segment.instance);
    let share = 0.105 * (-0.2f64).exp() / (10.0 * (1.0 - (-0.2f64).exp()));
    // A request of 1,000 context tokens runs beside it: each step takes 0.1 + 1 ms more, and each
    // step of the other takes 0.1 + 1.05 ms more.
    let there = 100.0 * (0.01115 + 0.0011 + 0.00115) / (1.0 - share) + 0.105;
    near(costs(&router, second.id), (stays, there + 0.012));
    assert!(second.next.is_none());
    // The first request decodes and ends. Its instance keeps the same share of prefills but has no
    // queue.
    router.advance(first.ticket, Event::FirstToken, 2.0).unwrap();
    router.advance(first.ticket, Event::Finished(Usage::default()), 2.0).unwrap();
    // The third request is prefilled and stays there: the other instance has a queue and a request.
    let third = router.route(&ASKED, 2.0).unwrap();
    assert_eq!((third.segment.instance, third.next), (first.segment.instance, None));
    // The fourth request decodes on the instance with the lower loss.
    let fourth = router.route(&ASKED, 2.0).unwrap();
    let (stay, away) = costs(&router, fourth.id);
    assert_eq!(fourth.next.is_some(), away < stay);
}

#[test]
fn who_goes_is_cut_at_the_prompts_end_and_booked_on_both() {
    let mut router = fleet(given(apart(&[])), 3);
    // Only engine 2 is open; it takes five prompts.
    for name in ["engine-0", "engine-1"] {
        let id = router.fleet_mut().find(name).unwrap();
        router.fleet_mut().set_draining(id, true).unwrap();
    }
    let stays: Vec<_> = (0..5).map(|_| router.route(&ASKED, 1.0).unwrap()).collect();
    for d in &stays {
        assert_eq!((d.segment.instance, d.next), (Slot(2), None));
        assert_eq!(
            router.record(d.id).unwrap().split_reason.as_deref(),
            Some("no second instance is available")
        );
    }
    let id = router.fleet_mut().find("engine-1").unwrap();
    router.fleet_mut().set_draining(id, false).unwrap();
    // Only engine 2 can prefill the sixth request; engine 1 has external requests.
    busy_with_others(&mut router, id, 1.0);
    let d = router.route(&ASKED, 1.0).unwrap();
    let next = d.next.expect("engine 2 prefills five prompts");
    let expected = Segment { instance: Slot(1), from_token: 1000, to_token: None };
    assert_eq!((d.segment.instance, d.segment.to_token, next), (Slot(2), Some(1000), expected));
    let (stay, away) = costs(&router, d.id);
    assert!(away < stay, "{away} {stay}");
    let record = router.record(d.id).unwrap();
    assert_eq!((record.cuts.to_vec(), record.split_reason.as_deref()), (vec![1000], None));
    assert_eq!((&*record.next[0].name, record.next[0].score), ("engine-1", away));
    router.derive_some(IndicatorSet::ALL, 1.0);
    let at = |router: &Router, id: Indicator| router.columns().get(id)[1];
    assert_eq!((at(&router, Indicator::BoundBs), at(&router, Indicator::Tokens)), (1.0, 1000.0));
    // The request continues on engine 1 and leaves nothing behind.
    let opened = router.advance(d.ticket, Event::Finished(Usage::default()), 2.0).unwrap();
    assert_eq!(opened, Some(expected));
    router.advance(d.ticket, Event::FirstToken, 2.1).unwrap();
    router.advance(d.ticket, Event::Finished(Usage::default()), 3.0).unwrap();
    stays.iter().for_each(|d| router.drop_ticket(d.ticket));
    router.derive_some(IndicatorSet::ALL, 4.0);
    for id in [Indicator::BoundBs, Indicator::Tokens, Indicator::DecodeBs, Indicator::QueuedPrefillTokens] {
        assert!(router.columns().get(id).iter().all(|n| *n == 0.0), "{}", id.decl().name);
    }
}

#[test]
fn the_prefills_own_token_comes_first_where_the_way_is_short_and_both_can() {
    // The transfer takes 2 + 10 ms.
    for (max_stall_seconds, cuts, kv_usage, from_token) in [
        (0.012, [Cuts::Anywhere; 2], None, 1001),
        (0.011, [Cuts::Anywhere; 2], None, 1000),
        (1.0, [Cuts::Output, Cuts::Anywhere], None, 1000),
        (1.0, [Cuts::Anywhere, Cuts::PromptEnd], None, 1000),
        (1.0, [Cuts::Anywhere; 2], Some(0.79), 1001),
        (1.0, [Cuts::Anywhere; 2], Some(0.8), 1000), // keeps the fetched KV for long
    ] {
        let mut router = fleet(given(apart(&[("max_stall_seconds", max_stall_seconds)])), 2);
        let ids = ["engine-0", "engine-1"].map(|name| router.fleet().find(name).unwrap());
        ids.iter().zip(cuts).for_each(|(id, cuts)| router.set_cuts(*id, cuts).unwrap());
        // Engine 0 has five prompts; engine 1 has external requests.
        router.fleet_mut().set_draining(ids[1], true).unwrap();
        let stays: Vec<_> = (0..5).map(|_| router.route(&ASKED, 1.0).unwrap()).collect();
        router.fleet_mut().set_draining(ids[1], false).unwrap();
        let report =
            Report { at: 1.0, waiting: Some(0.0), running: Some(9.0), kv_usage, ..Report::default() };
        router.engine_report("engine-1", report).unwrap();
        let d = router.route(&ASKED, 1.0).unwrap();
        assert_eq!(d.segment, Segment { instance: ids[0], from_token: 0, to_token: Some(from_token) });
        let expected = Segment { instance: ids[1], from_token, to_token: None };
        assert_eq!(d.next, Some(expected));
        // 100 steps, or 99 after a token of the prefill's own: 11.15 and 11.1495 ms.
        let (_, away) = costs(&router, d.id);
        let steps = if from_token == 1001 { 99.0 * 0.0111495 } else { 100.0 * 0.01115 };
        assert!((away - steps - 0.012).abs() < 1e-9, "{away}");
        if from_token == 1001 {
            // The token arrives while the first segment is open, and counts.
            assert_eq!(router.advance(d.ticket, Event::FirstToken, 1.5).unwrap(), None);
            assert_eq!(router.record(d.id).unwrap().outcome.ttft_seconds, Some(0.5));
        }
        let opened = router.advance(d.ticket, Event::Finished(Usage::default()), 2.0).unwrap();
        assert_eq!(opened, Some(expected));
        assert_eq!(router.totals().output_tokens, u64::from(from_token - 1000));
        router.advance(d.ticket, Event::FirstToken, 2.1).unwrap();
        router.advance(d.ticket, Event::Finished(Usage::default()), 3.0).unwrap();
        stays.iter().for_each(|d| router.drop_ticket(d.ticket));
        router.derive_some(IndicatorSet::ALL, 4.0);
        for id in [Indicator::BoundBs, Indicator::Tokens, Indicator::DecodeBs, Indicator::QueuedPrefillTokens]
        {
            assert!(router.columns().get(id).iter().all(|n| *n == 0.0), "{}", id.decl().name);
        }
    }
}

#[test]
fn what_is_there_need_not_move_and_fetches_say_what_moving_takes() {
    let chain: Vec<u64> = (1..=62).collect();
    let held = Request { chain: &chain, ..ASKED };
    let mut router = fleet(given(apart(&[])), 2);
    let first = router.route(&held, 0.0).unwrap();
    let alone = 100.0 * 0.01115;
    router.advance(first.ticket, Event::FirstToken, 0.1).unwrap();
    router.advance(first.ticket, Event::Finished(Usage::default()), 0.1).unwrap();
    let home = first.segment.instance;
    router.fleet_mut().set_draining(home, true).unwrap();
    let elsewhere = router.route(&ASKED, 1e4).unwrap().segment.instance;
    assert_ne!(elsewhere, home);
    router.fleet_mut().set_draining(home, false).unwrap();
    busy_with_others(&mut router, home, 1e4);
    // Much later, the share of prefills is 0. The home instance holds 992 of the 1,000 tokens.
    let d = router.route(&held, 1e4).unwrap();
    assert_eq!(d.segment.instance, elsewhere);
    let (_, away) = costs(&router, d.id);
    assert!((away - (alone + 0.002 + 8e-5)).abs() < 1e-9, "{away}");
    router.drop_ticket(d.ticket);
    router
        .set_fetch(Some(FetchConfig {
            seconds_per_token: 1e-3,
            fixed_seconds: 0.5,
            ..FetchConfig::default()
        }))
        .unwrap();
    let d = router.route(&held, 1e4).unwrap();
    let (_, away) = costs(&router, d.id);
    // A fetch's fixed time is its wait for the holder; here there is no wait.
    assert!((away - (alone + 0.002 + 0.008)).abs() < 1e-9, "{away}");
}

#[test]
fn what_cannot_be_or_is_not_known_leaves_the_request_whole_with_the_reason() {
    let why = |router: &mut Router, request: &Request<'_>| {
        let d = router.route(request, 0.0).unwrap();
        assert_eq!((d.next, d.segment.to_token), (None, None));
        let record = router.record(d.id).unwrap();
        assert!(record.balance.is_none());
        record.split_reason.clone().unwrap()
    };
    let two = || fleet(given(apart(&[])), 2);
    let short = Request { expected_output_tokens: Some(1), ..ASKED };
    assert_eq!(&*why(&mut two(), &short), "its output ends with its prefill");
    let unknown = Request { expected_output_tokens: None, ..ASKED };
    assert_eq!(&*why(&mut two(), &unknown), "output lengths are unknown");
    let said = Request { split_reason: Some("it carries a picture"), ..ASKED };
    assert_eq!(&*why(&mut two(), &said), "it carries a picture");
    assert_eq!(&*why(&mut fleet(given(apart(&[])), 1), &ASKED), "no second instance is available");
    let mut router = two();
    (0..2).for_each(|i| router.set_cuts(Slot(i), Cuts::Nowhere).unwrap());
    assert_eq!(&*why(&mut router, &ASKED), "its instance cannot transfer KV");
    // KV transfer at the end of the prompt is enough.
    (0..2).for_each(|i| router.set_cuts(Slot(i), Cuts::PromptEnd).unwrap());
    let d = router.route(&ASKED, 0.0).unwrap();
    assert!(router.record(d.id).unwrap().balance.is_some());
    let policy = Registry::CORE.policy("least_requests", &[]).unwrap();
    let mut router = Router::new(policy, RouterConfig::default()).unwrap();
    router.set_split(&given(apart(&[]))).unwrap();
    for name in ["engine-0", "engine-1"] {
        router.add_instance(name, Role::Both, None).unwrap();
    }
    assert_eq!(&*why(&mut router, &ASKED), "the speed of the instances is unknown");
    router.set_step_time(Slot(0), Some(STEP)).unwrap();
    // The known instance's model is used for the other instance.
    let d = router.route(&Request { prompt_tokens: 999, ..ASKED }, 0.0).unwrap();
    let (stay, away) = costs(&router, d.id);
    let alone = 99.0 * 0.0111485 - 1e-9;
    assert!(stay >= alone && away >= alone, "{stay} {away}");
}

#[test]
fn lengths_are_a_prior_then_the_mean_of_their_kind_and_never_beyond_the_limit() {
    let mut router = fleet(apart(&[("prior_tokens", 40.0)]), 2);
    let open = Request { expected_output_tokens: None, ..ASKED };
    let steps = |tokens: f64| (tokens - 1.0) * (0.0101 + 1e-6 * (1000.0 + (tokens - 1.0) / 2.0));
    let mut now = 0.0;
    let mut stay = |router: &mut Router, request: &Request<'_>, made: u32| {
        now += 1e4;
        let d = router.route(request, now).unwrap();
        let seconds = router.record(d.id).unwrap().balance.map(|balance| balance.stay_seconds);
        let at_limit = request.expected_output_tokens == Some(made);
        let finish = if at_limit { Finish::Length } else { Finish::Stop };
        let usage = Usage { output_tokens: Some(made), finish, ..Usage::default() };
        router.advance(d.ticket, Event::FirstToken, now).unwrap();
        router.advance(d.ticket, Event::Ended(usage), now).unwrap();
        seconds.unwrap_or(f64::NAN)
    };
    let close =
        |got: f64, tokens: f64| assert!((got - steps(tokens)).abs() < 1e-9, "{got} {}", steps(tokens));
    for made in [100, 200, 100, 200, 100, 200, 100] {
        close(stay(&mut router, &open, made), 40.0);
    }
    close(stay(&mut router, &open, 200), 40.0);
    // Eight outputs have ended, with a mean of 150 tokens.
    close(stay(&mut router, &open, 150), 150.0);
    close(stay(&mut router, &Request { expected_output_tokens: Some(60), ..ASKED }, 150), 60.0);
    // Answers of one token, as many as their requests allowed, show nothing of others.
    for _ in 0..300 {
        stay(&mut router, &Request { expected_output_tokens: Some(1), ..ASKED }, 1);
    }
    close(stay(&mut router, &open, 150), 150.0);
    // Prompts of another length have their own class.
    let longer = Request { prompt_tokens: 5000, ..open };
    let seconds = stay(&mut router, &longer, 1);
    assert!((seconds - 39.0 * (0.0101 + 1e-6 * 5019.5)).abs() < 1e-9, "{seconds}");
}

#[test]
fn settings_are_checked() {
    for bad in [
        ("recent_seconds", 0.0),
        ("min_gain_seconds", f64::NAN),
        ("transfer_seconds_per_token", -1.0),
        ("transfer_fixed_seconds", f64::INFINITY),
        ("prior_tokens", 0.0),
    ] {
        let error = with(&[bad]).unwrap_err().to_string();
        assert!(error.contains(&format!("parameter {} of split apart", bad.0)), "{error}");
    }
    let error = with(&[("prior_token", 40.0)]).unwrap_err().to_string();
    assert!(error.contains("did you mean \"prior_tokens\""), "{error}");
    let error = Registry::CORE.split("libre", &[]).unwrap_err().to_string();
    assert_eq!(error, "unknown split \"libre\"; did you mean \"libra\"?");
}
