//! Peer routers: published load counts like own load until the next message or the timeout.
#[path = "common/router.rs"]
mod common;

use common::{STEP, chain, request};
use lmetric_core::Registry;
use lmetric_core::fleet::Role;
use lmetric_core::indicators::{Indicator, IndicatorSet};
use lmetric_core::plan::{Event, Usage};
use lmetric_core::program::ProgramConfig;
use lmetric_core::request::Request;
use lmetric_core::router::ledger::Report;
use lmetric_core::router::{Load, LoadMessage};
use lmetric_core::router::{MAX_REPLICAS, Message, Published, Router, RouterConfig, Share, TicketId};
use proptest::prelude::*;
use std::convert::Infallible;
use std::sync::Arc;

fn router(policy: &str, instances: &[&str]) -> Router {
    let config = RouterConfig { drain: false, step_time: Some(STEP), ..RouterConfig::default() };
    let mut router = Router::new(Registry::CORE.policy(policy, &[]).unwrap(), config).unwrap();
    for name in instances {
        router.add_instance(name, Role::Both, None).unwrap();
    }
    router
}

fn hear(router: &mut Router, from: &str, told: &[(Arc<str>, Published)], now: f64) {
    router.hear(from, told.iter().map(|(name, load)| (&**name, *load)), now).unwrap();
}

fn value(router: &Router, id: Indicator, name: &str) -> f64 {
    router.columns().get(id)[router.fleet().find(name).unwrap().index()]
}

/// Per-instance indicators that include the requests of all routers.
const SHARED: [Indicator; 10] = [
    Indicator::Bs,
    Indicator::QBs,
    Indicator::RBs,
    Indicator::DecodeBs,
    Indicator::BoundBs,
    Indicator::Tokens,
    Indicator::DecodeTokens,
    Indicator::BoundTokens,
    Indicator::RemainingTokens,
    Indicator::QueuedPrefillTokens,
];

/// The programs of all models together leave a message below its limit.
#[test]
fn the_programs_of_many_models_fit_in_a_message() {
    // 3,500 programs of 3,200 tokens need some 1.5 MB.
    let sizes = [3500, 3, 3500, 3500, 3500];
    let routers = sizes.map(|programs| {
        let mut router = router("least_requests", &["x"]);
        router.set_programs(Some(ProgramConfig { min_tokens: 16, ..ProgramConfig::default() })).unwrap();
        for program in 0..programs {
            let chain = chain(1 + program * 100_000, 200);
            let (arrival, _) = router.arrive(&request(&chain), 0.0).unwrap().unwrap();
            let made = router.route(&Request { arrival, ..request(&chain) }, 0.0).unwrap();
            router.advance(made.ticket, Event::Ended(Usage::default()), 0.0).unwrap();
        }
        router.enter_load(1, 0, 0.0).unwrap();
        router
    });
    let all: Vec<usize> =
        routers.iter().map(|router| router.programs_since(None, usize::MAX, 0.0).most_bytes()).collect();
    assert!(all.iter().sum::<usize>() > 5 << 20, "{all:?}");
    let counts = routers.each_ref().map(|router| router.count_programs_since(None));
    assert_eq!(counts, sizes.map(|size| size as usize));
    let made = |budgets: usize| {
        let models = routers.iter().enumerate();
        let models = models.map(|(i, each)| (i.to_string().into(), each.instances_since(None, 0.0)));
        let (sender, budgets) = ("a".into(), vec![0; budgets].into());
        let mut message = LoadMessage { sender, version: 1, base: None, models: models.collect(), budgets };
        let of =
            |place: usize, bytes: usize| Ok::<_, Infallible>(routers[place].programs_since(None, bytes, 0.0));
        message.add_programs(&counts, of).unwrap();
        let bytes = message.encode();
        assert_eq!(LoadMessage::decode(&bytes).unwrap().version, 1);
        let programs: Vec<usize> =
            message.models.iter().map(|(_, load)| load.programs.programs.len()).collect();
        (bytes.len(), programs)
    };
    let (bytes, programs) = made(0);
    assert!((3 << 20..4 << 20).contains(&bytes), "{bytes}");
    // The small model has all its programs, and the others have as many as each other.
    assert_eq!(programs[1], 3);
    assert!(programs.iter().all(|count| *count == 3 || (*count < 3500 && count.abs_diff(programs[0]) < 3)));
    let (bytes, programs) = made((14 << 20) + (1 << 19));
    assert!((15 << 20..LoadMessage::MOST_BYTES).contains(&bytes), "{bytes}");
    assert_eq!(programs[1], 3);
    let (bytes, programs) = made(LoadMessage::MOST_BYTES - 1000);
    assert!(bytes <= LoadMessage::MOST_BYTES, "{bytes}");
    assert_eq!(programs, [0; 5]);
}

#[test]
fn two_routers_do_not_send_the_next_requests_to_one_idle_engine() {
    let (mut a, mut b) = (router("least_requests", &["x", "y"]), router("least_requests", &["y", "x"]));
    let first = a.route(&request(&chain(1, 10)), 0.0).unwrap();
    hear(&mut b, "a", &a.share(0.0), 0.0);
    let second = b.route(&request(&chain(2, 10)), 0.0).unwrap();
    let name = |router: &Router, id| router.fleet().name(id).to_string();
    assert_ne!(name(&a, first.segment.instance), name(&b, second.segment.instance));
    b.derive_some(IndicatorSet::ALL, 0.0);
    assert_eq!(value(&b, Indicator::QueuedPrefillTokens, &name(&a, first.segment.instance)), 161.0);
    // The request ended, and the next message contains the change.
    a.advance(first.ticket, Event::Ended(Usage::default()), 1.0).unwrap();
    hear(&mut b, "a", &a.share(1.0), 1.0);
    assert_eq!(value(&b, Indicator::Bs, &name(&a, first.segment.instance)), 0.0);
}

#[test]
fn what_a_silent_router_said_is_forgotten() {
    let (mut a, mut b) = (router("least_requests", &["x"]), router("least_requests", &["x"]));
    a.route(&request(&chain(1, 10)), 0.0).unwrap();
    hear(&mut b, "a", &a.share(0.0), 5.0);
    assert_eq!(b.forget_silent(2.0, 7.0), [], "the last message is two seconds old");
    assert_eq!((value(&b, Indicator::Bs, "x"), b.replicas().count()), (1.0, 1));
    let gone: Vec<String> = b.forget_silent(2.0, 7.1).into_iter().map(String::from).collect();
    assert_eq!(gone, ["a"]);
    b.derive_some(IndicatorSet::ALL, 8.0);
    assert!(SHARED.iter().all(|id| value(&b, *id, "x") == 0.0));
    assert_eq!(b.replicas().count(), 0);
}

#[test]
fn engines_reports_count_beyond_what_all_routers_have() {
    let (mut a, mut b) = (router("vllm", &["x"]), router("vllm", &["x"]));
    let mine = a.route(&request(&chain(1, 10)), 0.0).unwrap();
    a.advance(mine.ticket, Event::FirstToken, 0.1).unwrap();
    b.route(&request(&chain(2, 10)), 0.0).unwrap();
    hear(&mut b, "a", &a.share(0.2), 0.2);
    // Our request, the peer's request, and two external requests.
    let report = Report { at: 0.3, waiting: Some(2.0), running: Some(2.0), ..Report::default() };
    b.engine_report("x", report).unwrap();
    assert_eq!(value(&b, Indicator::Bs, "x"), 4.0);
    // Without the peer's message, its request counts as external.
    b.forget_silent(1.0, 2.0);
    assert_eq!(value(&b, Indicator::Bs, "x"), 3.0);
    // The first report since then may be older than that.
    b.engine_report("x", Report { at: 3.0, kv_usage: Some(0.5), ..report }).unwrap();
    b.engine_report("x", Report { at: 4.0, kv_usage: Some(0.6), ..report }).unwrap();
    assert_eq!(value(&b, Indicator::Bs, "x"), 4.0);
}

#[test]
fn an_instance_that_goes_takes_what_was_told_of_it() {
    let (mut a, mut b) = (router("least_requests", &["x"]), router("least_requests", &["x"]));
    a.route(&request(&chain(1, 10)), 0.0).unwrap();
    hear(&mut b, "a", &a.share(0.0), 0.0);
    b.remove_instance("x").unwrap();
    b.add_instance("z", Role::Both, None).unwrap();
    assert_eq!(value(&b, Indicator::Bs, "z"), 0.0, "the slot has a new instance");
    // Other peers' messages do not change the new instance; messages about the removed instance are
    // ignored.
    hear(&mut b, "c", &[], 0.1);
    hear(&mut b, "a", &a.share(0.1), 0.1);
    assert_eq!(value(&b, Indicator::Bs, "z"), 0.0);
}

#[test]
fn what_cannot_be_is_refused_and_changes_nothing() {
    let mut b = router("least_requests", &["x"]);
    for bad in [f64::NAN, -1.0, f64::INFINITY] {
        let share = Share { decode_tokens: bad, ..Share::default() };
        let message = b.hear("a", [("x", share)], 0.0).unwrap_err().to_string();
        assert!(message.contains("decode_tokens on x in the load of router a"), "{message}");
    }
    assert_eq!(b.replicas().count(), 0);
    for i in 0..MAX_REPLICAS {
        b.hear(&format!("router-{i}"), [("x", Share { decoding: 1.0, ..Share::default() })], 0.0).unwrap();
    }
    let message = b.hear("one more", [("x", Share::default())], 0.0).unwrap_err().to_string();
    assert!(message.contains("after 64 others"), "{message}");
    assert_eq!(value(&b, Indicator::Bs, "x"), MAX_REPLICAS as f64);
    assert_eq!(
        Share::of(b.share(0.0).first().map_or([0.0; Share::NAMES.len()], |s| s.1.share.numbers())),
        Share::default()
    );
}

/// The messages of router `a`.
#[derive(Default)]
struct Sender {
    version: u64,
    /// Version that the receiver has.
    known: Option<u64>,
}

impl Sender {
    /// Sends the changes, or the whole load, to `b`. Returns the number of instances in the
    /// message, or none if `b` needs the whole load.
    fn send(&mut self, a: &mut Router, b: &mut Router, now: f64) -> Option<usize> {
        self.enter(a, now);
        let models = vec![("m".into(), a.load_since(self.known, now))];
        let message = LoadMessage {
            sender: "a".into(),
            version: self.version,
            base: self.known,
            models,
            budgets: [].into(),
        };
        let read = LoadMessage::decode(&message.encode()).unwrap();
        assert_eq!(read, message, "messages have rounded numbers");
        let LoadMessage { sender, version, base, models, .. } = read;
        let Load { instances, programs } = &models[0].1;
        let loads = instances.iter().map(|(name, load)| (&**name, *load));
        let applied = b.hear_message(Message { from: &sender, version, base, loads, programs }, now).unwrap();
        self.known = applied.then_some(version);
        applied.then_some(instances.len())
    }

    fn enter(&mut self, a: &mut Router, now: f64) {
        self.version += 1;
        a.enter_load(self.version, self.known.unwrap_or(self.version - 1), now).unwrap();
    }
}

#[test]
fn messages_have_what_changed_and_idle_instances_need_none() {
    let names: Vec<String> = (0..100).map(|i| format!("e{i}")).collect();
    let names: Vec<&str> = names.iter().map(|name| &**name).collect();
    let (mut a, mut b) = (router("least_requests", &names), router("least_requests", &names));
    let mut sender = Sender::default();
    assert_eq!(sender.send(&mut a, &mut b, 0.0), Some(0));
    let tickets: Vec<TicketId> =
        (0..100).map(|i| a.route(&request(&chain(i, 10)), 0.0).unwrap().ticket).collect();
    assert_eq!(sender.send(&mut a, &mut b, 0.1), Some(100));
    for ticket in &tickets[1..] {
        a.advance(*ticket, Event::Ended(Usage::default()), 0.2).unwrap();
    }
    assert_eq!(sender.send(&mut a, &mut b, 0.2), Some(99));
    assert_eq!(sender.send(&mut a, &mut b, 5.0), Some(0));
    a.advance(tickets[0], Event::FirstToken, 6.0).unwrap();
    assert_eq!(sender.send(&mut a, &mut b, 6.0), Some(1));
    a.advance(tickets[0], Event::Tokens(3), 7.0).unwrap();
    assert_eq!(sender.send(&mut a, &mut b, 7.0), Some(1));
    // The recent work of idle instances becomes less without a message, and is gone in the end.
    for now in [100.0, 2_000.0] {
        assert_eq!(sender.send(&mut a, &mut b, now), Some(0));
        [&mut a, &mut b].into_iter().for_each(|router| router.derive_some(IndicatorSet::ALL, now));
        let [own, seen] = [&a, &b].map(|router| value(router, Indicator::WindowPrefillTokens, "e7"));
        assert!((own - seen).abs() < 1e-4 * own.max(1.0), "{own} {seen}");
    }
    sender.known = None;
    assert_eq!(sender.send(&mut a, &mut b, 2_000.0), Some(1), "the one with a request");
}

#[test]
fn load_waits_for_an_instance_that_joins_later() {
    let (mut a, mut b) = (router("least_requests", &["x", "y"]), router("least_requests", &["x"]));
    let mut sender = Sender::default();
    let tickets = [1, 2].map(|i| a.route(&request(&chain(i, 10)), 0.0).unwrap().ticket);
    assert_eq!(sender.send(&mut a, &mut b, 0.0), Some(2));
    for _ in 0..2 {
        b.add_instance("y", Role::Both, None).unwrap();
        assert_eq!(value(&b, Indicator::Bs, "y"), 0.0);
        assert!(sender.send(&mut a, &mut b, 0.1).is_some());
        assert_eq!(value(&b, Indicator::Bs, "y"), 1.0);
        b.remove_instance("y").unwrap();
    }
    // The request ends while `b` does not have its instance.
    for ticket in tickets {
        a.advance(ticket, Event::Ended(Usage::default()), 0.2).unwrap();
    }
    assert_eq!(sender.send(&mut a, &mut b, 0.2), Some(2));
    b.add_instance("y", Role::Both, None).unwrap();
    sender.send(&mut a, &mut b, 0.3).unwrap();
    assert_eq!((value(&b, Indicator::Bs, "x"), value(&b, Indicator::Bs, "y")), (0.0, 0.0));
}

#[test]
fn a_newer_load_replaces_the_one_that_waited() {
    let (mut a, mut b) = (router("least_requests", &["y"]), router("least_requests", &["x"]));
    let mut sender = Sender::default();
    a.route(&request(&chain(1, 10)), 0.0).unwrap();
    sender.send(&mut a, &mut b, 0.0).unwrap();
    b.add_instance("y", Role::Both, None).unwrap();
    a.route(&request(&chain(2, 10)), 0.1).unwrap();
    assert_eq!(sender.send(&mut a, &mut b, 0.1), Some(1));
    assert_eq!(value(&b, Indicator::Bs, "y"), 2.0);
}

#[test]
fn an_instance_that_its_router_removed_has_no_load_of_it() {
    let (mut a, mut b) = (router("least_requests", &["x"]), router("least_requests", &["x"]));
    let mut sender = Sender::default();
    a.route(&request(&chain(1, 10)), 0.0).unwrap();
    sender.send(&mut a, &mut b, 0.0).unwrap();
    a.remove_instance("x").unwrap();
    assert_eq!(sender.send(&mut a, &mut b, 0.1), Some(1));
    assert_eq!(value(&b, Indicator::Bs, "x"), 0.0);
    a.add_instance("x", Role::Both, None).unwrap();
    a.route(&request(&chain(1, 10)), 0.2).unwrap();
    assert_eq!(sender.send(&mut a, &mut b, 0.2), Some(1));
    assert_eq!(value(&b, Indicator::Bs, "x"), 1.0);
    let error = a.enter_load(sender.version, 0, 0.3).unwrap_err().to_string();
    assert!(error.contains("expected more than 3, the last one"), "{error}");
}

#[test]
fn changes_of_another_version_are_not_applied() {
    let (mut a, mut b) = (router("least_requests", &["x"]), router("least_requests", &["x"]));
    let mut sender = Sender::default();
    sender.send(&mut a, &mut b, 0.0).unwrap();
    a.route(&request(&chain(1, 10)), 0.0).unwrap();
    sender.enter(&mut a, 0.1); // a message that is lost
    sender.known = Some(sender.version);
    assert_eq!(sender.send(&mut a, &mut b, 0.2), None);
    assert_eq!(value(&b, Indicator::Bs, "x"), 0.0);
    assert_eq!(sender.send(&mut a, &mut b, 0.3), Some(1));
    assert_eq!(value(&b, Indicator::Bs, "x"), 1.0);
    let unknown =
        (0..16_385).map(|i| (format!("u{i}"), Published::from(Share { coming: 1.0, ..Share::default() })));
    let unknown: Vec<(String, Published)> = unknown.collect();
    let loads = unknown.iter().map(|(name, load)| (&**name, *load));
    let message = Message { from: "a", version: 9, base: None, loads, programs: &Default::default() };
    let error = b.hear_message(message, 0.4).unwrap_err().to_string();
    assert!(error.contains("16385 is not valid; expected at most 16384"), "{error}");
    assert_eq!(value(&b, Indicator::Bs, "x"), 1.0);
}

/// A difference that messages may make: they have 24 bits of each number.
fn near(a: f64, b: f64) -> bool {
    (a - b).abs() <= 1e-5 * a.max(b).max(1.0)
}

proptest! {
    /// After any loss, restart or change of a fleet, a router has the load of the other one.
    #[test]
    fn changes_add_up_to_the_load(
        steps in prop::collection::vec((0usize..7, 0usize..40, 1u64..200, 0usize..6), 1..80),
    ) {
        let names = ["x", "y", "z"];
        let (mut a, mut b) = (router("lmetric", &names), router("lmetric", &names));
        let (mut sender, mut open, mut now) = (Sender::default(), Vec::<TicketId>::new(), 0.0);
        for (what, which, size, outcome) in steps {
            now += size as f64 * 0.05;
            let ticket = open.get(which % open.len().max(1)).copied();
            match (what, ticket) {
                (5 | 6, _) => {
                    let (changed, name) = (if what == 5 { &mut a } else { &mut b }, names[1 + which % 2]);
                    if changed.remove_instance(name).is_err() {
                        changed.add_instance(name, Role::Both, None).unwrap();
                    }
                }
                (0, _) | (_, None) => open.push(a.route(&request(&chain(size, 3)), now).unwrap().ticket),
                (1, Some(ticket)) => drop(a.advance(ticket, Event::FirstToken, now).unwrap()),
                (2, Some(ticket)) => drop(a.advance(ticket, Event::Scheduled(None), now).unwrap()),
                (3, Some(ticket)) => drop(a.advance(ticket, Event::Tokens(size as u32), now).unwrap()),
                (_, Some(ticket)) => {
                    a.advance(ticket, Event::Ended(Usage::default()), now).unwrap();
                    open.retain(|each| *each != ticket);
                }
            }
            match outcome {
                0 => sender.enter(&mut a, now), // the last message has no answer yet
                1 => {
                    sender.enter(&mut a, now); // the message is lost
                    sender.known = None;
                }
                2 => {
                    let left: Vec<String> = b.fleet().live_names().map(String::from).collect();
                    b = router("lmetric", &left.iter().map(|name| &**name).collect::<Vec<_>>());
                    sender.send(&mut a, &mut b, now);
                }
                _ => {
                    if sender.send(&mut a, &mut b, now).is_none() {
                        continue;
                    }
                    let live: Vec<String> = b.fleet().live_names().map(String::from).collect();
                    let mut whole = router("lmetric", &live.iter().map(|name| &**name).collect::<Vec<_>>());
                    hear(&mut whole, "a", &a.share(now), now);
                    for router in [&mut b, &mut whole] {
                        router.derive_some(IndicatorSet::ALL, now);
                    }
                    let windows = [Indicator::WindowPrefillTokens, Indicator::WindowOutputTokens];
                    for id in SHARED.into_iter().chain(windows) {
                        for name in &live {
                            let (seen, all) = (value(&b, id, name), value(&whole, id, name));
                            // Senders round less than half a token of these sums to zero.
                            let ended = windows.contains(&id) && seen.max(all) <= 0.5;
                            prop_assert!(near(seen, all) || ended, "{id:?} of {name}: {seen} {all}");
                        }
                    }
                }
            }
        }
    }

    /// Routers that have exchanged their loads agree on the indicators: the sum of all requests,
    /// wherever they run.
    #[test]
    fn routers_that_told_each_other_agree(
        steps in prop::collection::vec((0usize..3, 0usize..5, 0usize..40, 1u64..200), 1..120),
    ) {
        let names = ["x", "y", "z"];
        let mut routers: Vec<Router> =
            [["x", "y", "z"], ["z", "x", "y"], ["y", "z", "x"]].iter().map(|names| router("lmetric", names)).collect();
        let mut open: Vec<Vec<TicketId>> = vec![Vec::new(); 3];
        for (i, (by, what, which, size)) in steps.iter().enumerate() {
            let (router, now) = (&mut routers[*by], i as f64 * 0.01);
            let ticket = open[*by].get(which % open[*by].len().max(1)).copied();
            match (what, ticket) {
                (0, _) | (_, None) => {
                    let chain = chain(*size, 3);
                    let asked = lmetric_core::request::Request {
                        expected_output_tokens: (size % 2 == 0).then_some(*size as u32),
                        ..request(&chain)
                    };
                    open[*by].push(router.route(&asked, now).unwrap().ticket);
                }
                (1, Some(ticket)) => drop(router.advance(ticket, Event::FirstToken, now).unwrap()),
                (2, Some(ticket)) => drop(router.advance(ticket, Event::Scheduled(None), now).unwrap()),
                (3, Some(ticket)) => drop(router.advance(ticket, Event::Tokens(*size as u32), now).unwrap()),
                (_, Some(ticket)) => {
                    router.advance(ticket, Event::Ended(Usage::default()), now).unwrap();
                    open[*by].retain(|each| *each != ticket);
                }
            }
            let told: Vec<_> = routers.iter().map(|router| router.share(now)).collect();
            for (to, router) in routers.iter_mut().enumerate() {
                for (from, told) in told.iter().enumerate().filter(|(from, _)| *from != to) {
                    hear(router, &from.to_string(), told, now);
                }
                router.derive_some(IndicatorSet::ALL, now);
            }
            for id in SHARED {
                for name in names {
                    let seen: Vec<f64> = routers.iter().map(|router| value(router, id, name)).collect();
                    prop_assert!(seen.iter().all(|each| (each - seen[0]).abs() < 1e-6), "{id:?} of {name}: {seen:?}");
                }
            }
            let all: f64 = names.iter().map(|name| value(&routers[0], Indicator::Bs, name)).sum();
            prop_assert_eq!(all, open.iter().map(Vec::len).sum::<usize>() as f64);
        }
    }
}
