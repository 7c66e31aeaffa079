//! Plans of two segments, step by step: placements, ledger entries, and failures.
#[path = "common/force.rs"]
mod force;
use force::force;
use lmetric_core::CoreError;
use lmetric_core::Registry;
use lmetric_core::estimate::{Remaining, RemainingCurve};
use lmetric_core::fleet::Role;
use lmetric_core::ids::Slot;
use lmetric_core::indicators::{Indicator, IndicatorSet};
use lmetric_core::plan::{Binding, Cuts, Event, Failure, Usage};
use lmetric_core::program::Finish;
use lmetric_core::rebalance::RebalanceConfig;
use lmetric_core::rebalance::{Forecast, Running};
use lmetric_core::request::Request;
use lmetric_core::router::{Carry, Decision, Router, RouterConfig};

fn fleet(config: RouterConfig, roles: &[Role]) -> Router {
    let mut router = Router::new(Registry::CORE.policy("least_requests", &[]).unwrap(), config).unwrap();
    for (i, role) in roles.iter().enumerate() {
        router.add_instance(&format!("e{i}"), *role, None).unwrap();
    }
    router
}

fn route(router: &mut Router, now: f64) -> Decision {
    let request = Request { prompt_tokens: 1000, tokens_per_block: 16.0, ..Request::default() };
    router.route(&request, now).unwrap()
}

fn is(router: &mut Router, id: Indicator, expected: &[f64]) {
    assert_eq!(router.columns().get(id), expected, "{}", id.decl().name);
}

const DONE: Event = Event::Finished(Usage {
    prompt_tokens: Some(1000),
    cached_tokens: Some(0),
    output_tokens: None,
    finish: Finish::Unknown,
});
use Indicator::{BoundBs, BoundTokens, Bs, DecodeBs, DecodeTokens};
use Role::{Both, Decode, Prefill};

#[test]
fn the_decode_instance_is_booked_at_the_decision() {
    let mut router = fleet(RouterConfig::default(), &[Prefill, Decode, Decode]);
    let first = route(&mut router, 0.0);
    let next = first.next.expect("bound early");
    assert_eq!((first.segment.instance.0, first.segment.to_token), (0, Some(1000)));
    assert_eq!((next.from_token, next.to_token), (1000, None));
    let other = route(&mut router, 0.0);
    assert_ne!(other.next.unwrap().instance, next.instance, "the bound request counts");
    is(&mut router, BoundBs, &[2.0, 1.0, 1.0]);
    is(&mut router, BoundTokens, &[2000.0, 1000.0, 1000.0]);
    is(&mut router, DecodeBs, &[0.0; 3]);

    router.advance(first.ticket, Event::Sent, 0.1).unwrap();
    assert_eq!(router.advance(first.ticket, DONE, 0.5).unwrap(), Some(next));
    is(&mut router, Bs, &[1.0, 1.0, 1.0]);
    router.advance(first.ticket, Event::Sent, 0.5).unwrap();
    router.advance(first.ticket, Event::FirstToken, 0.6).unwrap();
    router.advance(first.ticket, Event::Tokens(9), 0.9).unwrap();
    let decoding = next.instance.index();
    assert_eq!(router.columns().get(DecodeTokens)[decoding], 1010.0);
    assert_eq!(router.advance(first.ticket, DONE, 1.0).unwrap(), None);
    router.drop_ticket(other.ticket);
    is(&mut router, Bs, &[0.0; 3]);
    let record = router.record(first.id).unwrap();
    assert_eq!(record.next[0].slot, next.instance.0);
    assert_eq!((record.outcome.handed_over_seconds, record.outcome.ttft_seconds), (Some(0.5), Some(0.6)));
    assert_eq!(router.totals().finished, 1);
}

#[test]
fn bound_late_it_is_chosen_when_the_prefill_ends() {
    let config = RouterConfig { binding: Binding::Late, ..RouterConfig::default() };
    let mut router = fleet(config, &[Prefill, Decode, Decode]);
    let (a, b) = (route(&mut router, 0.0), route(&mut router, 0.0));
    assert_eq!((a.next, a.segment.to_token), (None, Some(1000)));
    is(&mut router, Bs, &[2.0, 0.0, 0.0]);
    let a = router.advance(a.ticket, DONE, 0.5).unwrap().unwrap();
    let b = router.advance(b.ticket, DONE, 0.6).unwrap().unwrap();
    assert_ne!(a.instance, b.instance);
    is(&mut router, Bs, &[0.0, 1.0, 1.0]);
}

#[test]
fn a_first_token_while_both_segments_run_ends_the_first() {
    let mut router = fleet(RouterConfig::default(), &[Prefill, Decode]);
    let d = route(&mut router, 0.0);
    assert_eq!(router.advance(d.ticket, Event::FirstToken, 0.4).unwrap(), d.next);
    is(&mut router, DecodeBs, &[0.0, 1.0]);
    is(&mut router, Bs, &[0.0, 1.0]);
}

#[test]
fn an_instance_gone_meanwhile_is_replaced() {
    let mut router = fleet(RouterConfig::default(), &[Prefill, Decode, Decode]);
    let d = route(&mut router, 0.0);
    let bound = d.next.unwrap().instance;
    router.fleet_mut().set_healthy(bound, false).unwrap();
    let next = router.advance(d.ticket, DONE, 0.5).unwrap().unwrap();
    assert_ne!(next.instance, bound);
    assert_eq!(router.columns().get(Bs)[bound.index()], 0.0);
    // The second decode instance refuses too. No decode instance is left, so the prefill instance
    // takes the whole request.
    let whole = router.advance(d.ticket, Event::Failed(Failure::Refused), 0.6).unwrap().unwrap();
    assert_eq!((whole.instance.0, whole.from_token, whole.to_token), (0, 0, None));
    assert_eq!(router.advance(d.ticket, DONE, 1.0).unwrap(), None);
    is(&mut router, Bs, &[0.0; 3]);
}

/// The slot of a removed instance has another instance, of another role.
#[test]
fn a_segment_is_followed_by_the_role_of_its_own_instance() {
    let config = RouterConfig { binding: Binding::Late, ..RouterConfig::default() };
    let mut router = fleet(config, &[Prefill, Decode, Decode]);
    let replace = |router: &mut Router, id: Slot| {
        router.remove_instance(&format!("e{}", id.0)).unwrap();
        assert_eq!(router.add_instance(&format!("new{}", id.0), Both, None).unwrap(), id);
    };
    let d = route(&mut router, 0.0);
    replace(&mut router, d.segment.instance);
    let decode = router.advance(d.ticket, DONE, 0.5).unwrap().unwrap().instance;
    assert_ne!(decode, d.segment.instance);
    replace(&mut router, decode);
    let next = router.advance(d.ticket, Event::Failed(Failure::Reset), 0.6).unwrap().unwrap();
    assert_eq!(next.instance, Slot(3 - decode.0));
}

#[test]
fn a_segment_is_not_bound_to_the_instance_that_takes_its_slot() {
    let mut router = fleet(RouterConfig::default(), &[Prefill, Decode, Decode]);
    let d = route(&mut router, 0.0);
    let bound = d.next.unwrap().instance;
    assert_eq!(router.bound(d.ticket).next(), d.next);
    router.remove_instance(&format!("e{}", bound.0)).unwrap();
    assert_eq!(router.add_instance("new", Decode, None).unwrap(), bound);
    assert_eq!(router.bound(d.ticket).next(), None);
}

#[test]
fn a_request_moves_to_the_instance_that_has_taken_the_slot_of_its_own() {
    let mut router = fleet(RouterConfig::default(), &[Both, Both]);
    let d = route(&mut router, 0.0);
    router.advance(d.ticket, Event::FirstToken, 0.1).unwrap();
    let slot = d.segment.instance;
    let begin = |router: &mut Router, carry| router.begin_move(d.ticket, slot, carry, 0.2);
    assert!(begin(&mut router, Carry::Recompute).unwrap_err().to_string().contains("already runs"));
    router.remove_instance(&format!("e{}", slot.0)).unwrap();
    assert_eq!(router.add_instance("new", Both, None).unwrap(), slot);
    // The transfers of its own engine are unknown.
    assert!(begin(&mut router, Carry::Kv).unwrap_err().to_string().contains("transfer KV"));
    assert_eq!(begin(&mut router, Carry::Recompute).unwrap().instance, slot);
}

#[test]
fn nobody_who_decodes_is_an_error_where_instances_keep_to_their_roles() {
    let config = RouterConfig { colocate: false, ..RouterConfig::default() };
    let mut router = fleet(config, &[Prefill, Decode]);
    let d = route(&mut router, 0.0);
    router.fleet_mut().set_healthy(d.next.unwrap().instance, false).unwrap();
    let error = router.advance(d.ticket, DONE, 0.5).unwrap_err();
    assert!(matches!(&error, CoreError::NoInstance(why) if why.contains("decode")), "{error}");
    assert_eq!((router.in_flight(), router.totals().failed.iter().sum::<u64>()), (0, 1));
    let request = Request { prompt_tokens: 10, tokens_per_block: 16.0, ..Request::default() };
    assert!(router.route(&request, 1.0).is_err());
    is(&mut router, Bs, &[0.0; 2]);
    // With `colocate`, any instance takes whole requests.
    let mut router = fleet(RouterConfig::default(), &[Prefill]);
    assert_eq!(route(&mut router, 0.0).segment.to_token, None);
    let mut router = fleet(RouterConfig::default(), &[Decode]);
    assert_eq!(route(&mut router, 0.0).segment.to_token, None);
}

/// The only decode instance fails a request, and then the prefill instance that took it whole.
#[test]
fn a_retry_is_not_bound_to_a_decode_instance_that_failed_it() {
    for binding in [Binding::Early, Binding::Late] {
        let config = RouterConfig { binding, ..RouterConfig::default() };
        let mut router = fleet(config, &[Prefill, Prefill, Decode]);
        let d = route(&mut router, 0.0);
        let decode = router.advance(d.ticket, DONE, 0.5).unwrap().unwrap();
        assert_eq!(decode.instance.0, 2);
        let whole = router.advance(d.ticket, Event::Failed(Failure::Reset), 0.6).unwrap().unwrap();
        assert_eq!((whole.instance.0 < 2, whole.to_token), (true, None), "no other instance decodes");
        let last = router.advance(d.ticket, Event::Failed(Failure::Reset), 0.7).unwrap().unwrap();
        assert_eq!((last.instance.0, last.to_token), (1 - whole.instance.0, None), "{binding:?}");
        is(
            &mut router,
            BoundBs,
            &[f64::from(u8::from(last.instance.0 == 0)), f64::from(u8::from(last.instance.0 == 1)), 0.0],
        );
    }
}

#[test]
fn instances_that_do_both_take_whole_requests_beside_those_that_do_not() {
    let mut router = fleet(RouterConfig::default(), &[Both, Prefill, Decode]);
    let (a, b) = (route(&mut router, 0.0), route(&mut router, 0.0));
    let whole = [a, b].into_iter().find(|d| d.segment.instance.0 == 0).expect("one each");
    let cut = [a, b].into_iter().find(|d| d.segment.instance.0 == 1).expect("one each");
    assert_eq!((whole.segment.to_token, whole.next), (None, None));
    assert_eq!(cut.next.unwrap().instance.0, 2);
    // A failed prefill moves to the `both` instance, which needs no follow-up segment.
    let moved = router.advance(cut.ticket, Event::Failed(Failure::Reset), 0.1).unwrap().unwrap();
    assert_eq!((moved.instance.0, moved.to_token), (0, None));
    is(&mut router, Bs, &[2.0, 0.0, 0.0]);
}

#[test]
fn sibyl_sees_what_will_be_there_when_the_prefill_ends() {
    let mut router = fleet(RouterConfig::default(), &[Prefill, Decode, Decode]);
    router.set_decode_policy(Registry::CORE.policy("sibyl", &[]).unwrap()).unwrap();
    // One request decodes on each instance. Ended outputs had 128 tokens, so the request with more
    // output will end soon.
    for i in 0..20 {
        let at = 2.0 * f64::from(i);
        let d = route(&mut router, at);
        router.advance(d.ticket, DONE, at + 0.5).unwrap();
        router.advance(d.ticket, Event::FirstToken, at + 0.5).unwrap();
        router.advance(d.ticket, Event::Tokens(127), at + 1.5).unwrap();
        router.advance(d.ticket, DONE, at + 1.5).unwrap();
    }
    let (old, young) = (route(&mut router, 40.0), route(&mut router, 40.0));
    let at = |d: &Decision| d.next.unwrap().instance;
    assert_ne!(at(&old), at(&young));
    for (d, tokens) in [(old, 100), (young, 10)] {
        router.advance(d.ticket, DONE, 40.5).unwrap();
        router.advance(d.ticket, Event::FirstToken, 40.5).unwrap();
        router.advance(d.ticket, Event::Tokens(tokens), 41.5).unwrap();
    }
    // The younger request has fewer tokens; SIBYL predicts that the older request will have ended.
    assert_eq!(at(&route(&mut router, 41.5)), at(&old));
    // Another policy can replace SIBYL at run time: the younger request has the fewest tokens.
    router.set_decode_policy(Registry::CORE.policy("least_tokens", &[]).unwrap()).unwrap();
    assert_eq!(at(&route(&mut router, 41.5)), at(&young));
}

/// A fleet of `both` instances that cuts each request (1,000 prompt and 200 expected output tokens)
/// at `fraction` of its tokens.
fn cutting(fraction: f64, equals: usize) -> Router {
    let mut router = fleet(RouterConfig::default(), &vec![Both; equals]);
    router.set_split(&force(fraction).unwrap()).unwrap();
    router
}

fn route_expecting(router: &mut Router, output: Option<u32>, split_reason: Option<&str>) -> Decision {
    let request = Request {
        prompt_tokens: 1000,
        tokens_per_block: 16.0,
        expected_output_tokens: output,
        split_reason,
        ..Request::default()
    };
    router.route(&request, 0.0).unwrap()
}

#[test]
fn a_cut_behind_the_prompt_leaves_the_first_segment_some_of_the_output() {
    let mut router = cutting(0.875, 3);
    let d = route_expecting(&mut router, Some(200), None);
    let (a, b) = (d.segment.instance.index(), d.next.unwrap().instance.index());
    assert_ne!(a, b);
    assert_eq!((d.segment.to_token, d.next.unwrap().from_token), (Some(1050), 1050));
    assert_eq!(router.record(d.id).unwrap().cuts[..], [1050]);
    router.derive_some(IndicatorSet::ALL, 0.0);
    let at = |router: &mut Router, id, slot: usize| router.columns().get(id)[slot];
    assert_eq!(at(&mut router, Indicator::QueuedPrefillTokens, a), 1000.0);
    assert_eq!(at(&mut router, Indicator::QueuedPrefillTokens, b), 0.0);
    assert_eq!(at(&mut router, BoundTokens, b), 1050.0);
    // The first token comes from the first segment and does not end it.
    assert_eq!(router.advance(d.ticket, Event::FirstToken, 0.5).unwrap(), None);
    assert_eq!(at(&mut router, Indicator::RemainingTokens, a), 49.0);
    router.advance(d.ticket, Event::Tokens(49), 0.9).unwrap();
    assert_eq!(router.advance(d.ticket, DONE, 1.0).unwrap(), d.next);
    router.advance(d.ticket, Event::FirstToken, 1.1).unwrap();
    assert_eq!(at(&mut router, DecodeTokens, b), 1051.0);
    assert_eq!(at(&mut router, Indicator::RemainingTokens, b), 149.0);
    assert_eq!(router.advance(d.ticket, DONE, 2.0).unwrap(), None);
    is(&mut router, Bs, &[0.0; 3]);
    is(&mut router, Indicator::Tokens, &[0.0; 3]);
    let outcome = router.record(d.id).unwrap().outcome;
    assert_eq!((outcome.ttft_seconds, outcome.handed_over_seconds), (Some(0.5), Some(1.0)));
    assert_eq!((router.totals().split, router.totals().output_tokens), (1, 51));
}

/// Half of the answers end before the cut. The others were as long as the cut, whether or not
/// their first segments report tokens.
#[test]
fn tokens_of_a_segment_without_reports_are_tokens_of_running_answers() {
    let learned = |reports: bool| {
        let mut router = cutting(0.875, 3);
        router.set_decode_policy(Registry::CORE.policy("sibyl", &[]).unwrap()).unwrap();
        for _ in 0..20 {
            let (short, long) = (
                route_expecting(&mut router, Some(200), None),
                route_expecting(&mut router, Some(200), None),
            );
            let usage = |tokens| Usage { output_tokens: Some(tokens), ..Usage::default() };
            router.advance(short.ticket, Event::FirstToken, 0.5).unwrap();
            router.advance(short.ticket, Event::Ended(usage(9)), 0.6).unwrap();
            if reports {
                router.advance(long.ticket, Event::FirstToken, 0.5).unwrap();
                router.advance(long.ticket, Event::Tokens(49), 0.9).unwrap();
            }
            router.advance(long.ticket, DONE, 1.0).unwrap();
            router.advance(long.ticket, Event::FirstToken, 1.1).unwrap();
            router.advance(long.ticket, Event::Tokens(149), 1.2).unwrap();
            router.advance(long.ticket, Event::Ended(usage(200)), 2.0).unwrap();
        }
        router.answers().curve().unwrap().product_limit().boundaries().to_vec()
    };
    let (with, without) = (learned(true), learned(false));
    assert!((0.3..0.7).contains(&with[1]), "{}", with[1]);
    assert_eq!(without, with);
}

#[test]
fn a_segment_that_says_nothing_until_its_end_gives_its_first_token_then() {
    let mut router = cutting(0.875, 2);
    let d = route_expecting(&mut router, Some(200), None);
    router.advance(d.ticket, DONE, 1.0).unwrap();
    assert_eq!(router.record(d.id).unwrap().outcome.ttft_seconds, Some(1.0));
    assert_eq!(router.totals().output_tokens, 50);
    // The rest fails and continues on the first instance, from the same token.
    let back = router.advance(d.ticket, Event::Failed(Failure::Reset), 1.1).unwrap().unwrap();
    assert_eq!((back.instance, back.from_token), (d.segment.instance, 1050));
    router.advance(d.ticket, DONE, 2.0).unwrap();
    is(&mut router, Bs, &[0.0; 2]);
}

#[test]
fn a_cut_inside_the_prompt_leaves_its_rest_to_the_second_segment() {
    let mut router = cutting(0.5, 2);
    let d = route_expecting(&mut router, Some(200), None);
    let (a, b) = (d.segment.instance.index(), d.next.unwrap().instance.index());
    assert_eq!(d.segment.to_token, Some(600));
    let queued = |router: &mut Router| {
        router.derive_some(IndicatorSet::ALL, router.record(1).unwrap().at);
        router.columns().get(Indicator::QueuedPrefillTokens).to_vec()
    };
    assert_eq!(queued(&mut router)[a], 600.0);
    assert_eq!(router.columns().get(Indicator::Tokens)[a], 600.0);
    assert_eq!(router.advance(d.ticket, DONE, 0.0).unwrap(), d.next);
    router.advance(d.ticket, Event::Sent, 0.0).unwrap();
    assert_eq!((queued(&mut router)[a], queued(&mut router)[b]), (0.0, 400.0));
    router.advance(d.ticket, Event::FirstToken, 0.5).unwrap();
    assert_eq!((queued(&mut router)[b], router.columns().get(DecodeTokens)[b]), (0.0, 1001.0));
    router.advance(d.ticket, DONE, 1.0).unwrap();
    is(&mut router, Indicator::Tokens, &[0.0; 2]);
}

#[test]
fn an_answer_that_ends_before_the_cut_ends_the_request() {
    let mut router = cutting(0.875, 2);
    let d = route_expecting(&mut router, Some(200), None);
    router.advance(d.ticket, Event::FirstToken, 0.5).unwrap();
    let usage = Usage { output_tokens: Some(9), ..Usage::default() };
    assert_eq!(router.advance(d.ticket, Event::Ended(usage), 0.6).unwrap(), None);
    assert_eq!((router.in_flight(), router.totals().finished), (0, 1));
    is(&mut router, Bs, &[0.0; 2]);
    is(&mut router, BoundBs, &[0.0; 2]);
}

#[test]
fn what_engines_cannot_do_moves_the_cut_or_leaves_the_request_whole_and_the_record_says_why() {
    let whole = |router: &mut Router, d: &Decision| {
        assert_eq!((d.segment.to_token, d.next), (None, None));
        let record = router.record(d.id).unwrap();
        assert!(record.cuts.is_empty());
        record.split_reason.as_deref().unwrap().to_owned()
    };
    for (cuts, token) in [(Cuts::Output, 1000), (Cuts::PromptEnd, 1000), (Cuts::Anywhere, 600)] {
        let mut router = cutting(0.5, 2);
        router.set_cuts(lmetric_core::Slot(1), cuts).unwrap();
        assert_eq!(route_expecting(&mut router, Some(200), None).segment.to_token, Some(token));
    }
    let mut router = cutting(0.875, 2);
    router.set_cuts(lmetric_core::Slot(0), Cuts::PromptEnd).unwrap();
    assert_eq!(route_expecting(&mut router, Some(200), None).segment.to_token, Some(1000));
    let d = route_expecting(&mut router, Some(200), Some("it has a seed"));
    assert_eq!(whole(&mut router, &d), "it has a seed");
    router.set_cuts(lmetric_core::Slot(0), Cuts::Nowhere).unwrap();
    for _ in 0..4 {
        let d = route_expecting(&mut router, Some(200), None);
        let why = whole(&mut router, &d);
        assert!(
            why == "its instance cannot transfer KV" || why == "no second instance is available",
            "{why}"
        );
    }
    let mut router = cutting(0.5, 1);
    let d = route_expecting(&mut router, Some(200), None);
    assert_eq!(whole(&mut router, &d), "no second instance is available");
    assert_eq!(router.totals().split, 0);
    for bad in [0.0, 1.0, -1.0, f64::NAN] {
        let error = force(bad).unwrap_err().to_string();
        assert!(error.contains("parameter fraction of split force"), "{error}");
    }
}

#[test]
fn a_running_request_moves_and_its_books_with_it() {
    let mut router = fleet(RouterConfig::default(), &[Both, Both, Both]);
    let d = route(&mut router, 0.0);
    let (source, now) = (d.segment.instance, 0.5);
    let target = lmetric_core::Slot((source.0 + 1) % 3);
    let begin = |router: &mut Router, to| router.begin_move(d.ticket, to, Carry::Kv, now);
    let refused = |error: CoreError, why: &str| assert!(error.to_string().contains(why), "{error}");
    refused(begin(&mut router, target).unwrap_err(), "no token yet");
    refused(router.elsewhere(d.ticket, now).unwrap_err(), "no token yet");
    router.advance(d.ticket, Event::FirstToken, 0.5).unwrap();
    refused(begin(&mut router, source).unwrap_err(), "already runs on the target");
    refused(begin(&mut router, lmetric_core::Slot(7)).unwrap_err(), "slot 7 is not valid");
    router.set_cuts(target, Cuts::PromptEnd).unwrap();
    refused(begin(&mut router, target).unwrap_err(), "transfer KV after an output token");
    router.set_cuts(target, Cuts::Anywhere).unwrap();
    let bound = begin(&mut router, target).unwrap();
    assert_eq!((bound.instance, bound.from_token, bound.to_token), (target, 1001, None));
    refused(begin(&mut router, target).unwrap_err(), "a segment is already bound");
    router.advance(d.ticket, Event::Tokens(49), 1.5).unwrap();
    let at = |router: &Router, id, slot: lmetric_core::Slot| router.columns().get(id)[slot.index()];
    assert_eq!((at(&router, DecodeTokens, source), at(&router, BoundTokens, target)), (1050.0, 1001.0));
    let moved = router.advance(d.ticket, Event::Moved, 2.0).unwrap().unwrap();
    assert_eq!((moved.instance, moved.from_token), (target, 1050));
    assert_eq!((at(&router, Bs, source), at(&router, BoundTokens, target)), (0.0, 1050.0));
    router.advance(d.ticket, Event::FirstToken, 2.1).unwrap();
    assert_eq!(at(&router, DecodeTokens, target), 1051.0);
    // The target fails after the first token: the request fails and leaves nothing in the ledger.
    assert_eq!(router.advance(d.ticket, Event::Failed(Failure::Reset), 3.0).unwrap(), None);
    is(&mut router, Indicator::Tokens, &[0.0; 3]);
    assert_eq!((router.totals().moved, router.totals().output_tokens, router.in_flight()), (1, 51, 0));
    let record = router.record(d.id).unwrap();
    assert_eq!(record.moves.iter().map(|m| (m.0, m.1)).collect::<Vec<_>>(), [(1050, target.0)]);
    assert_eq!(record.outcome.ttft_seconds, Some(0.5));
}

#[test]
fn the_record_of_a_move_names_the_instance_that_took_over() {
    let mut router = fleet(RouterConfig::default(), &[Both, Both, Both]);
    let d = route(&mut router, 0.0);
    router.advance(d.ticket, Event::FirstToken, 0.5).unwrap();
    let target = lmetric_core::Slot((d.segment.instance.0 + 1) % 3);
    router.begin_move(d.ticket, target, Carry::Recompute, 1.0).unwrap();
    router.advance(d.ticket, Event::Moved, 1.0).unwrap();
    // The target fails before its first token.
    let next = router.advance(d.ticket, Event::Failed(Failure::Reset), 1.5).unwrap().unwrap();
    assert_ne!(next.instance, target);
    let record = router.record(d.id).unwrap();
    assert_eq!(record.moves.iter().map(|m| (m.0, m.1)).collect::<Vec<_>>(), [(1001, next.instance.0)]);
    assert!(record.next.is_empty(), "it was not split");
}

#[test]
fn an_instance_that_failed_a_running_request_is_not_asked_for_it_again() {
    let mut router = fleet(RouterConfig::default(), &[Both, Both, Both]);
    let d = route(&mut router, 0.0);
    router.advance(d.ticket, Event::FirstToken, 0.5).unwrap();
    let mut lost = vec![d.segment.instance];
    let target = router.elsewhere(d.ticket, 1.0).unwrap();
    assert!(!lost.contains(&target));
    is(&mut router, Indicator::BoundTokens, &[0.0; 3]);
    router.begin_move(d.ticket, target, Carry::Recompute, 1.0).unwrap();
    assert_eq!(router.advance(d.ticket, Event::Moved, 1.0).unwrap().unwrap().instance, target);
    // The target fails before its first token, and the third instance fails while it decodes: no
    // instance is left.
    lost.push(target);
    let third = router.advance(d.ticket, Event::Failed(Failure::Refused), 2.0).unwrap().unwrap().instance;
    assert!(!lost.contains(&third));
    router.advance(d.ticket, Event::FirstToken, 2.5).unwrap();
    assert_eq!(router.elsewhere(d.ticket, 3.0).unwrap(), target);
    router.fleet_mut().set_healthy(target, false).unwrap();
    assert!(matches!(router.elsewhere(d.ticket, 3.0), Err(CoreError::NoInstance(_))));
    router.advance(d.ticket, Event::GaveUp(Failure::Reset), 4.0).unwrap();
    is(&mut router, Indicator::Tokens, &[0.0; 3]);
}

/// A new engine takes the place of an engine that failed the request, then the next engine fails.
#[test]
fn a_new_instance_has_failed_no_request() {
    let mut router = fleet(RouterConfig::default(), &[Both, Both]);
    let d = route(&mut router, 0.0);
    router.advance(d.ticket, Event::FirstToken, 0.5).unwrap();
    let first = d.segment.instance;
    let second = router.elsewhere(d.ticket, 1.0).unwrap();
    router.begin_move(d.ticket, second, Carry::Recompute, 1.0).unwrap();
    router.advance(d.ticket, Event::Moved, 1.0).unwrap();
    router.advance(d.ticket, Event::FirstToken, 1.5).unwrap();
    assert!(matches!(router.elsewhere(d.ticket, 2.0), Err(CoreError::NoInstance(_))), "both failed it");
    router.remove_instance(&format!("e{}", first.0)).unwrap();
    assert_eq!(router.add_instance("new", Both, None).unwrap(), first, "in the same slot");
    assert_eq!(router.elsewhere(d.ticket, 3.0).unwrap(), first);

    // A first segment, before its first token.
    let mut router = fleet(RouterConfig::default(), &[Both, Both]);
    let d = route(&mut router, 0.0);
    let first = d.segment.instance;
    let next = router.advance(d.ticket, Event::Failed(Failure::Reset), 0.1).unwrap().unwrap();
    router.remove_instance(&format!("e{}", first.0)).unwrap();
    assert_eq!(router.add_instance("new", Both, None).unwrap(), first);
    let last = router.advance(d.ticket, Event::Failed(Failure::Reset), 0.2).unwrap().unwrap();
    assert_eq!((last.instance, next.instance == first), (first, false));
}

#[test]
fn a_move_ends_with_its_request_and_a_target_that_is_gone_is_replaced() {
    let mut router = fleet(RouterConfig::default(), &[Both, Both, Both]);
    let start = |router: &mut Router| {
        let d = route(router, 0.0);
        router.advance(d.ticket, Event::FirstToken, 0.5).unwrap();
        let target = lmetric_core::Slot((d.segment.instance.0 + 1) % 3);
        router.begin_move(d.ticket, target, Carry::Recompute, 1.0).unwrap();
        (d, target)
    };
    let (ends, _) = start(&mut router);
    router.advance(ends.ticket, DONE, 2.0).unwrap();
    is(&mut router, Bs, &[0.0; 3]);
    assert!(router.advance(ends.ticket, Event::Moved, 2.0).is_err());
    let (given_up, _) = start(&mut router);
    router.cancel_move(given_up.ticket, 2.0).unwrap();
    assert!(router.advance(given_up.ticket, Event::Moved, 2.0).is_err());
    router.drop_ticket(given_up.ticket);
    let (d, target) = start(&mut router);
    router.fleet_mut().set_healthy(target, false).unwrap();
    router.fleet_mut().set_healthy(d.segment.instance, false).unwrap();
    let other = router.advance(d.ticket, Event::Moved, 2.0).unwrap().unwrap();
    assert!(other.instance != target && other.instance != d.segment.instance);
    assert_eq!(other.from_token, 1001);
    router.drop_ticket(d.ticket);
    is(&mut router, Bs, &[0.0; 3]);
    is(&mut router, BoundTokens, &[0.0; 3]);
}

/// A forecast of long answers.
#[derive(Debug)]
struct Long;

impl Forecast for Long {
    fn predict(
        &mut self,
        running: &[Running],
        _: Option<&RemainingCurve>,
        remaining: &mut Vec<Remaining>,
    ) -> Result<(), CoreError> {
        remaining.extend(running.iter().map(|_| Remaining::exact(1e4)));
        Ok(())
    }

    fn fresh(&self) -> Box<dyn Forecast> {
        Box::new(Long)
    }
}

#[test]
fn a_request_on_its_way_is_load_of_its_target() {
    // Three requests run on one instance, none on the other. After the first move begins, two and
    // one are balanced, long before the KV arrives.
    let mut router = fleet(RouterConfig::default(), &[Both, Both]);
    let rebalance = RebalanceConfig { forecast: Box::new(Long), ..RebalanceConfig::default() };
    router.set_rebalancing(Some(rebalance.build().unwrap())).unwrap();
    (0..2).for_each(|i| router.set_cuts(Slot(i), Cuts::Output).unwrap());
    let placed: Vec<Decision> = (0..6).map(|_| route(&mut router, 0.0)).collect();
    for decision in &placed {
        router.advance(decision.ticket, Event::FirstToken, 0.1).unwrap();
    }
    assert_eq!(router.rebalance(0.2).unwrap().0, [], "three and three are even");
    let (alone, other): (Vec<&Decision>, Vec<&Decision>) =
        placed.iter().partition::<Vec<&Decision>, _>(|d| d.segment.instance.0 == 0);
    for decision in other {
        router.advance(decision.ticket, DONE, 0.3).unwrap();
    }
    let moves = router.rebalance(0.4).unwrap().0;
    assert_eq!(moves.len(), 1);
    let moved = moves[0].ticket;
    assert!(alone.iter().any(|d| d.ticket == moved));
    router.begin_move(moved, Slot(1), Carry::Kv, 0.5).unwrap();
    router.advance(moved, Event::Moved, 0.6).unwrap();
    is(&mut router, DecodeBs, &[2.0, 0.0]);
    assert_eq!(router.rebalance(0.7).unwrap().0, [], "two on one instance, one in transfer to the other");
    router.advance(moved, Event::FirstToken, 2.0).unwrap();
    assert_eq!(router.rebalance(2.1).unwrap().0, []);
    // After it ends, the other two are unbalanced again.
    router.drop_ticket(moved);
    assert_eq!(router.rebalance(2.2).unwrap().0.len(), 1);
}
