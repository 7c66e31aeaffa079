//! Replacing a policy while requests are in flight.
use lmetric_core::fleet::Role;
use lmetric_core::indicators::Indicator::{self, *};
use lmetric_core::indicators::IndicatorSet;
use lmetric_core::plan::{Event, Usage};
use lmetric_core::request::Request;
use lmetric_core::router::{Router, RouterConfig, TicketId};
use lmetric_study::REGISTRY;

const SHOWN: [Indicator; 6] =
    [HandoffRunningTokens, HandoffArrivedTokens, HandoffComingTokens, DecodePressure, Bs, RemainingTokens];

fn router(policy: &str, decode_policy: &str, roles: &[Role]) -> Router {
    let config = RouterConfig { drain: false, ..RouterConfig::default() };
    let mut router = Router::new(REGISTRY.policy(policy, &[]).unwrap(), config).unwrap();
    router.set_decode_policy(REGISTRY.policy(decode_policy, &[]).unwrap()).unwrap();
    for (i, role) in roles.iter().enumerate() {
        router.add_instance(&format!("engine-{i}"), *role, Some(1000)).unwrap();
    }
    router
}

/// Twelve requests, the last four of them still prefilling; some ended.
fn load(router: &mut Router) -> Vec<TicketId> {
    let mut open = Vec::new();
    for i in 0..12u32 {
        let now = f64::from(i) * 0.1;
        let chain: Vec<u64> = (0..4).map(|block| u64::from(i / 3) << 32 | block).collect();
        let request = Request {
            chain: &chain,
            prompt_tokens: 64 + i,
            tokens_per_block: 16.0,
            expected_output_tokens: Some(100 + i),
            ..Request::default()
        };
        let d = router.route(&request, now).unwrap();
        router.advance(d.ticket, Event::Sent, now).unwrap();
        if i < 8 {
            if d.segment.to_token.is_some() {
                router.advance(d.ticket, Event::Finished(Usage::default()), now + 0.05).unwrap();
            }
            router.advance(d.ticket, Event::FirstToken, now + 0.1).unwrap();
            router.advance(d.ticket, Event::Tokens(3 + i), now + 0.1).unwrap();
        }
        match i {
            0 | 5 => drop(router.advance(d.ticket, Event::Finished(Usage::default()), now + 0.1).unwrap()),
            _ => open.push(d.ticket),
        }
    }
    open
}

fn shown(router: &mut Router, now: f64) -> Vec<(Indicator, Vec<f64>)> {
    router.derive_some(IndicatorSet::ALL, now);
    let columns = router.columns();
    SHOWN.iter().map(|id| (*id, columns.get(*id).to_vec())).collect()
}

/// Returns a load's text without the starts of bound segments, which are estimated anew.
fn without_starts(load: &str) -> String {
    let parts = load.split("start: ").enumerate();
    parts.map(|(i, part)| if i == 0 { part } else { part.split_once(' ').unwrap().1 }).collect()
}

#[test]
fn a_policy_that_looks_ahead_sees_the_requests_that_were_there_before_it() {
    for roles in [[Role::Both; 3], [Role::Prefill, Role::Decode, Role::Decode]] {
        let build = |name| REGISTRY.policy(name, &[]).unwrap();
        // One router has looked ahead since before its first request, for a policy that was
        // replaced.
        let mut always = router("sibyl", "least_requests", &roles);
        always.set_policy(build("round_robin")).unwrap();
        let mut late = router("round_robin", "least_requests", &roles);
        let open = [load(&mut always), load(&mut late)];
        assert!(late.ahead().is_none());
        late.set_decode_policy(build("sibyl")).unwrap();
        let loads = |router: &Router| {
            let ahead = router.ahead().unwrap();
            (0..3).map(|slot| without_starts(&format!("{:?}", ahead.load(slot)))).collect::<Vec<_>>()
        };
        assert_eq!(loads(&late), loads(&always));
        // Another policy that reads more.
        always.set_decode_policy(build("sibyl_known")).unwrap();
        assert_eq!(loads(&late), loads(&always));
        // All requests end: the ledger is empty.
        for (router, open) in [&mut always, &mut late].into_iter().zip(open) {
            open.into_iter().for_each(|ticket| router.drop_ticket(ticket));
            for (id, column) in shown(router, 9.0) {
                assert!(column.iter().all(|value| *value == 0.0 || value.is_nan()), "{id:?} {column:?}");
            }
        }
    }
}

#[test]
fn index_ledger_and_what_was_learned_stay() {
    let mut router = router("sibyl", "least_requests", &[Role::Both; 3]);
    let open = load(&mut router);
    let before = shown(&mut router, 2.0);
    let (seen, blocks) = (router.answers().curve().unwrap().seen(), router.caches().read().gpu().pairs());
    for policy in ["lmetric", "round_robin", "sibyl"] {
        router.set_policy(REGISTRY.policy(policy, &[]).unwrap()).unwrap();
        assert_eq!(router.policy().spec().name, policy);
    }
    assert_eq!(format!("{:?}", shown(&mut router, 2.0)), format!("{before:?}"));
    assert_eq!(
        (router.answers().curve().unwrap().seen(), router.caches().read().gpu().pairs()),
        (seen, blocks)
    );
    assert_eq!(router.in_flight(), open.len());
    assert_eq!(router.totals().decisions, 12);
}

#[test]
fn a_policy_that_does_not_suit_the_other_changes_nothing() {
    let mut router = router("round_robin", "sibyl_plus", &[Role::Both; 2]);
    let wide = REGISTRY.policy("sibyl", &[("bucket_tokens".into(), 128.0)]).unwrap();
    let error = router.set_policy(wide).unwrap_err().to_string();
    assert!(error.contains("bucket_tokens"), "{error}");
    assert_eq!(router.policy().spec().name, "round_robin");
}
