//! Reasoning requests in three parts: in-flight ledger, decision records and failures (Libra,
//! section 4.4).
#[path = "../../core/tests/common/router.rs"]
mod common;

use common::STEP;
use lmetric_core::Slot;
use lmetric_core::fleet::Role;
use lmetric_core::indicators::{Indicator, IndicatorSet};
use lmetric_core::plan::{Cuts, Event, Failure, Segment, Usage};
use lmetric_core::program::Finish;
use lmetric_core::request::{Request, Tenant};
use lmetric_core::router::{Decision, Router, RouterConfig, Split};
use lmetric_study::REGISTRY;
use lmetric_study::planner::given;

const DONE: Event = Event::Finished(Usage {
    prompt_tokens: None,
    cached_tokens: None,
    output_tokens: None,
    finish: Finish::Unknown,
});

fn libra(parts: u32) -> Split {
    let planner = if parts == 3 { "libra_three" } else { "libra" };
    given(REGISTRY.split(planner, &[("min_gain", -1.0)]).unwrap())
}

fn fleet(split: Split, instances: usize) -> Router {
    let config = RouterConfig { step_time: Some(STEP), ..RouterConfig::default() };
    let mut router = Router::new(REGISTRY.policy("least_requests", &[]).unwrap(), config).unwrap();
    router.set_split(&split).unwrap();
    for i in 0..instances {
        router.add_instance(&format!("engine-{i}"), Role::Both, Some(1000)).unwrap();
    }
    router
}

/// 512 prompt tokens, 1,200 reasoning tokens, 336 answer tokens.
const THINKS: Request<'static> = Request {
    chain: &[],
    prompt_tokens: 512,
    tokens_per_block: 16.0,
    expected_output_tokens: Some(1536),
    think_tokens: Some(1200),
    length_class: None,
    session: None,
    split_reason: None,
    fetch_reason: None,
    instances: None,
    tenant: Tenant::NOBODY,
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

fn segments(router: &mut Router, d: &Decision) -> Vec<Segment> {
    std::iter::once(d.segment).chain(router.bound(d.ticket)).collect()
}

fn all_zero(router: &mut Router) {
    router.derive_some(IndicatorSet::ALL, 9.0);
    for id in [Indicator::Bs, Indicator::BoundBs, Indicator::Tokens, Indicator::RemainingTokens] {
        assert!(router.columns().get(id).iter().all(|n| *n == 0.0), "{}", id.decl().name);
    }
    assert_eq!(router.in_flight(), 0);
}

#[test]
fn each_part_is_on_an_instance_of_its_own_and_the_record_says_which() {
    let mut router = fleet(libra(3), 4);
    let d = router.route(&THINKS, 0.0).unwrap();
    let plan = segments(&mut router, &d);
    let [a, b, c] = plan[..] else { panic!("{plan:?}") };
    assert!(a.instance != b.instance && b.instance != c.instance && a.instance != c.instance);
    assert_eq!((a.to_token, b.to_token, c.to_token), (Some(b.from_token), Some(c.from_token), None));
    // No answer token is made on the reasoning instance.
    assert!(c.from_token <= 1712 && b.from_token < c.from_token);
    router.derive_some(IndicatorSet::ALL, 0.0);
    let bound =
        |router: &Router, s: Segment| router.columns().get(Indicator::BoundTokens)[s.instance.index()];
    assert_eq!(bound(&router, b), f64::from(b.from_token.max(512)));
    assert_eq!(bound(&router, c), f64::from(c.from_token));
    let record = router.record(d.id).unwrap().clone();
    assert_eq!(record.cuts[..], [b.from_token, c.from_token]);
    assert_eq!(record.next.iter().map(|next| next.slot).collect::<Vec<_>>(), [b.instance.0, c.instance.0]);
    assert!(record.next[0].handoff_seconds < record.next[1].handoff_seconds, "{:?}", record.next);
    let balance = record.balance.unwrap();
    assert!(balance.third_seconds > 0.0 && balance.cut_seconds.is_nan());
    assert_eq!((record.split_reason, router.totals().split), (None, 1));
    for segment in [b, c] {
        assert_eq!(router.advance(d.ticket, DONE, 1.0).unwrap(), Some(segment));
        router.advance(d.ticket, Event::FirstToken, 1.1).unwrap();
    }
    assert_eq!(router.advance(d.ticket, DONE, 2.0).unwrap(), None);
    all_zero(&mut router);
}

#[test]
fn with_two_instances_the_answer_comes_back_to_the_first() {
    let mut router = fleet(libra(3), 2);
    router.set_decode_policy(REGISTRY.policy("sibyl", &[]).unwrap()).unwrap();
    let d = router.route(&THINKS, 0.0).unwrap();
    let plan = segments(&mut router, &d);
    assert_eq!(plan.len(), 3);
    assert_eq!(plan[2].instance, plan[0].instance);
    assert_eq!(plan[2].from_token, 1712);
    let (first, second) = (plan[0].instance.index(), plan[1].instance.index());
    router.derive_some(IndicatorSet::ALL, 0.0);
    assert_eq!(router.columns().get(Indicator::BoundBs)[first], 2.0, "to begin with, and to come back");
    // Both of its segments there have separate entries, by their expected decode times.
    let pending = |router: &Router, slot| router.ahead().unwrap().load(slot).pending().count();
    assert_eq!(pending(&router, second), 1);
    let before = pending(&router, first);
    router.advance(d.ticket, DONE, 1.0).unwrap();
    assert_eq!(pending(&router, first), 1, "{before} before");
    router.advance(d.ticket, Event::FirstToken, 1.1).unwrap();
    router.advance(d.ticket, DONE, 2.0).unwrap();
    router.advance(d.ticket, Event::FirstToken, 2.1).unwrap();
    assert_eq!((pending(&router, first), pending(&router, second)), (0, 0));
    router.advance(d.ticket, DONE, 3.0).unwrap();
    all_zero(&mut router);
}

#[test]
fn an_end_at_any_time_takes_all_three_off_the_books() {
    for events in 0..4 {
        let mut router = fleet(libra(3), 3);
        let d = router.route(&THINKS, 0.0).unwrap();
        for _ in 0..events / 2 {
            router.advance(d.ticket, DONE, 1.0).unwrap();
        }
        if events % 2 == 1 {
            router.advance(d.ticket, Event::FirstToken, 1.5).unwrap();
        }
        let usage = Usage { output_tokens: Some(3), ..Usage::default() };
        assert_eq!(router.advance(d.ticket, Event::Ended(usage), 2.0).unwrap(), None);
        all_zero(&mut router);
    }
}

#[test]
fn a_thinking_segment_that_fails_leaves_the_answer_to_who_takes_it_over() {
    let mut router = fleet(libra(3), 3);
    let d = router.route(&THINKS, 0.0).unwrap();
    let plan = segments(&mut router, &d);
    router.advance(d.ticket, DONE, 1.0).unwrap();
    let next = router.advance(d.ticket, Event::Failed(Failure::Reset), 1.1).unwrap().unwrap();
    assert!(next.instance != plan[1].instance && next.from_token == plan[1].from_token);
    assert_eq!((next.to_token, router.bound(d.ticket).count()), (None, 0));
    let record = router.record(d.id).unwrap();
    assert_eq!((&record.cuts[..], record.next.len()), (&[next.from_token][..], 1));
    assert_eq!(record.next[0].slot, next.instance.0);
    router.advance(d.ticket, DONE, 2.0).unwrap();
    all_zero(&mut router);
}

#[test]
fn bound_instances_that_are_gone_are_replaced_each_by_itself() {
    let mut router = fleet(libra(3), 4);
    let d = router.route(&THINKS, 0.0).unwrap();
    let plan = segments(&mut router, &d);
    router.fleet_mut().set_healthy(plan[1].instance, false).unwrap();
    let next = router.advance(d.ticket, DONE, 1.0).unwrap().unwrap();
    assert!(next.instance != plan[1].instance);
    assert_eq!((next.from_token, next.to_token), (plan[1].from_token, plan[1].to_token));
    assert_eq!(router.bound(d.ticket).collect::<Vec<_>>(), [plan[2]]);
    let named =
        |router: &Router| router.record(d.id).unwrap().next.iter().map(|n| n.slot).collect::<Vec<_>>();
    assert_eq!(named(&router), [next.instance.0, plan[2].instance.0]);
    router.fleet_mut().set_healthy(plan[2].instance, false).unwrap();
    let last = router.advance(d.ticket, DONE, 2.0).unwrap().unwrap();
    assert!(last.instance != plan[2].instance && last.from_token == plan[2].from_token);
    assert_eq!(named(&router), [next.instance.0, last.instance.0]);
    router.advance(d.ticket, DONE, 3.0).unwrap();
    all_zero(&mut router);
}

#[test]
fn who_takes_the_request_whole_leaves_nothing_to_those_bound_behind() {
    let mut router = fleet(libra(3), 3);
    let d = router.route(&THINKS, 0.0).unwrap();
    let plan = segments(&mut router, &d);
    // No instance accepts transfers for the reasoning part; the third may take requests, but
    // transfers none.
    (0..3).for_each(|i| router.set_cuts(Slot(i), Cuts::Nowhere).unwrap());
    router.fleet_mut().set_healthy(plan[1].instance, false).unwrap();
    let next = router.advance(d.ticket, DONE, 1.0).unwrap().unwrap();
    assert_eq!((next.from_token, next.to_token, router.bound(d.ticket).count()), (0, None, 0));
    assert_eq!(router.record(d.id).unwrap().next.len(), 1);
    router.derive_some(IndicatorSet::ALL, 1.0);
    assert_eq!(router.columns().get(Indicator::Bs).iter().sum::<f64>(), 1.0);
    router.advance(d.ticket, DONE, 2.0).unwrap();
    all_zero(&mut router);
}

#[test]
fn what_cannot_be_cut_in_three_is_cut_in_two_and_the_record_says_why() {
    let parts = |router: &mut Router, request: &Request<'_>| {
        let d = router.route(request, 0.0).unwrap();
        let record = router.record(d.id).unwrap();
        let told = (record.cuts.len() + 1, record.split_reason.as_deref().map(str::to_owned));
        router.drop_ticket(d.ticket);
        told
    };
    let mut router = fleet(libra(3), 3);
    assert_eq!(parts(&mut router, &THINKS), (3, None));
    let no_answer = Request { think_tokens: Some(1536), ..THINKS };
    assert_eq!(parts(&mut router, &no_answer), (2, Some("in three parts: too short to split".into())));
    for plain in [None, Some(0)] {
        assert_eq!(parts(&mut router, &Request { think_tokens: plain, ..THINKS }), (2, None));
    }
    let unknown = Request { expected_output_tokens: None, ..THINKS };
    let (pieces, why) = parts(&mut router, &unknown);
    assert_eq!((pieces, why.as_deref()), (1, Some("output lengths are unknown")));
    (0..3).for_each(|i| router.set_cuts(Slot(i), Cuts::PromptEnd).unwrap());
    let cannot = "in three parts: its instances cannot transfer KV".to_string();
    assert_eq!(parts(&mut router, &THINKS), (2, Some(cannot)));
    assert_eq!(parts(&mut fleet(libra(2), 3), &THINKS), (2, None));
    assert_eq!(parts(&mut fleet(libra(3), 1), &THINKS).0, 1);
    for bad in [
        ("probes", 0.0),
        ("epsilon", f64::NAN),
        ("min_gain", 2.0),
        ("min_tokens", 0.0),
        ("transfer_seconds_per_token", -1.0),
        ("transfer_fixed_seconds", f64::INFINITY),
        ("quantile", 1.5),
    ] {
        let error = REGISTRY.split("libra_three", &[bad]).unwrap_err().to_string();
        assert!(error.contains(&format!("parameter {} of split libra_three", bad.0)), "{error}");
    }
}

#[test]
fn lengths_are_learned_by_class_once_enough_of_it_have_ended() {
    let split = REGISTRY.split("libra", &[("quantile", 0.5), ("margin_tokens", 0.0)]).unwrap();
    let mut router = fleet(split, 1);
    let (chats, codes) = (Some(7), Some(8));
    let request = |class| Request { length_class: class, expected_output_tokens: None, ..THINKS };
    let expects_of = |router: &mut Router, request: &Request<'_>| {
        let d = router.route(request, 0.0).unwrap();
        router.advance(d.ticket, Event::Scheduled(None), 0.0).unwrap();
        router.derive_some(IndicatorSet::ALL, 0.0);
        let remaining = router.columns().get(Indicator::RemainingTokens)[0];
        router.drop_ticket(d.ticket);
        remaining
    };
    let expects = |router: &mut Router, class| expects_of(router, &request(class));
    let end = |router: &mut Router, class, tokens| {
        let d = router.route(&request(class), 0.0).unwrap();
        let usage = Usage { output_tokens: Some(tokens), ..Usage::default() };
        router.advance(d.ticket, Event::Finished(usage), 0.1).unwrap();
    };
    (0..20).for_each(|_| end(&mut router, chats, 12));
    (0..7).for_each(|_| end(&mut router, codes, 300));
    assert_eq!((expects(&mut router, chats), expects(&mut router, None)), (12.0, 12.0));
    assert_eq!(expects(&mut router, codes), 12.0, "seven are too few");
    end(&mut router, codes, 300);
    assert_eq!(expects(&mut router, codes), 303.0, "the upper edge of 300's bucket");
    assert_eq!(expects(&mut router, Some(9)), 12.0, "a class of which nothing is known");
    // Prompts of another length are separate, even within that class.
    assert_eq!(expects_of(&mut router, &Request { prompt_tokens: 40, ..request(codes) }), 0.0);
}
