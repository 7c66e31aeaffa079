//! The in-flight ledger against a naive recount, over random sequences of all operations on a fleet
//! and its requests.
#[path = "common/router.rs"]
mod common;
#[path = "common/force.rs"]
mod force;

use common::STEP;
use force::force;
use lmetric_core::CoreError;
use lmetric_core::fleet::Role;
use lmetric_core::indicators::{Indicator, IndicatorSet, Snapshot};
use lmetric_core::plan::{Binding, Cuts, Event, Failure, Segment, Usage};
use lmetric_core::policy::{Policy, PolicyRng, PolicySpec, Scores};
use lmetric_core::request::Request;
use lmetric_core::router::ledger::Report;
use lmetric_core::router::planners::{Planner, PlannerSpec, View};
use lmetric_core::router::{Carry, Follow, Rest, Router, RouterConfig, Split, TicketId};
use lmetric_core::{Maturity, Registry};
use proptest::prelude::*;
use std::borrow::Cow;

/// Fewest requests first, so that the test depends on no registered policy.
struct LeastRequests(PolicySpec);

impl LeastRequests {
    fn boxed() -> Box<dyn Policy> {
        Box::new(LeastRequests(PolicySpec {
            name: Cow::Borrowed("least"),
            formula: Cow::Borrowed("bs"),
            source: Cow::Borrowed("this test"),
            maturity: Maturity::Study,
            knobs: &[],
            symmetric: true,
            random: false,
            guard: Some(false),
        }))
    }
}

impl Policy for LeastRequests {
    fn spec(&self) -> &PolicySpec {
        &self.0
    }

    fn reads(&self) -> IndicatorSet {
        IndicatorSet::of(&[Indicator::Bs])
    }

    fn score(&self, s: &Snapshot<'_>, _: &mut PolicyRng, scores: &mut Scores) -> Result<(), CoreError> {
        scores.score.copy_from_slice(s.column(Indicator::Bs));
        Ok(())
    }
}

#[derive(Clone, Debug)]
enum Op {
    Add(u8, Role),
    Role(u8, Role),
    Remove(u8),
    Health(u8, bool),
    Drain(u8, bool),
    Route { prompt: u16, expected: Option<u8>, thoughts: Option<u8> },
    Sent(usize),
    Scheduled(usize),
    Prefilled(usize, u16),
    FirstToken(usize),
    Tokens(usize, u8),
    Finish(usize),
    End(usize),
    BeginMove(usize, u8, bool),
    EndMove(usize, bool),
    Cuts(u8, Cuts),
    Fail(usize, u8),
    Drop(usize),
    Report(u8, u8, u8),
}

fn role() -> impl Strategy<Value = Role> {
    prop_oneof![Just(Role::Both), Just(Role::Prefill), Just(Role::Decode)]
}

fn op() -> impl Strategy<Value = Op> {
    let n = 0..64usize;
    prop_oneof![
        2 => (0..6u8, role()).prop_map(|(i, role)| Op::Add(i, role)),
        1 => (0..6u8, role()).prop_map(|(i, role)| Op::Role(i, role)),
        1 => (0..6u8).prop_map(Op::Remove),
        1 => (0..6u8, any::<bool>()).prop_map(|(i, on)| Op::Health(i, on)),
        1 => (0..6u8, any::<bool>()).prop_map(|(i, on)| Op::Drain(i, on)),
        8 => (any::<u16>(), prop::option::of(any::<u8>()), prop::option::of(any::<u8>()))
            .prop_map(|(prompt, expected, thoughts)| Op::Route { prompt, expected, thoughts }),
        2 => n.clone().prop_map(Op::Sent),
        3 => n.clone().prop_map(Op::Scheduled),
        3 => (n.clone(), any::<u16>()).prop_map(|(t, k)| Op::Prefilled(t, k)),
        5 => n.clone().prop_map(Op::FirstToken),
        5 => (n.clone(), any::<u8>()).prop_map(|(t, k)| Op::Tokens(t, k)),
        3 => n.clone().prop_map(Op::Finish),
        1 => n.clone().prop_map(Op::End),
        3 => (n.clone(), 0..6u8, any::<bool>()).prop_map(|(t, i, carry)| Op::BeginMove(t, i, carry)),
        2 => (n.clone(), any::<bool>()).prop_map(|(t, done)| Op::EndMove(t, done)),
        1 => (0..6u8, 0..4usize).prop_map(|(i, k)| Op::Cuts(i, Cuts::NAMES[k].1)),
        3 => (n.clone(), 0..6u8).prop_map(|(t, k)| Op::Fail(t, k)),
        2 => n.prop_map(Op::Drop),
        1 => (0..6u8, any::<u8>(), any::<u8>()).prop_map(|(i, w, r)| Op::Report(i, w, r)),
    ]
}

#[derive(Clone, Copy, PartialEq)]
enum Stage {
    Queued,
    Scheduled,
    Decoding,
}

/// The recount's state of an open ticket.
struct Open {
    ticket: TicketId,
    /// Instance, by name and by the number of times this name was added: a new instance starts
    /// empty.
    home: (u8, u32),
    /// Homes of the bound segments, and the tokens they were bound with.
    bound: Vec<((u8, u32), f64)>,
    /// Whether a bound segment is a move, and whether the move recomputes all tokens.
    moving: Option<bool>,
    /// The open segment.
    segment: Segment,
    /// Whether the open segment recomputes earlier tokens.
    anew: bool,
    /// Position in the order of placements: engines begin prefills in this order.
    turn: u64,
    /// Whether the prompt is in the backlog.
    sent: bool,
    stage: Stage,
    /// Prompt tokens of the whole request.
    whole: u32,
    prefill_left: f64,
    output: f64,
    expected: Option<f64>,
}

impl Open {
    /// Returns the prompt tokens that the segment needs.
    fn prompt(&self) -> f64 {
        f64::from(self.segment.to_token.unwrap_or(self.whole).min(self.whole))
    }

    /// Returns the prompt tokens that the segment computes.
    fn computes(&self) -> f64 {
        match self.anew {
            true => f64::from(self.segment.from_token),
            false => self.prompt() - f64::from(self.segment.from_token.min(self.whole)),
        }
    }

    fn follows(&self) -> bool {
        self.segment.to_token.is_some()
    }

    fn prefills_only(&self) -> bool {
        self.segment.to_token.is_some_and(|to| to <= self.whole)
    }

    fn remaining(&self) -> f64 {
        let cut = self.segment.to_token.map(|to| f64::from(to.saturating_sub(self.whole)));
        let expected = cut.or(self.expected);
        match self.stage {
            Stage::Queued => 0.0,
            _ => expected.map_or(0.0, |e| (e - self.output).max(0.0)),
        }
    }
}

#[derive(Default)]
struct Model {
    lives: [u32; 6],
    live: [bool; 6],
    /// The last instance of each slot, as in [`Open::home`].
    owners: Vec<(u8, u32)>,
    turn: u64,
    now: f64,
    open: Vec<Open>,
}

fn name(i: u8) -> String {
    format!("engine-{i}")
}

impl Model {
    fn check(&self, router: &mut Router) {
        router.derive_some(IndicatorSet::ALL, 0.0);
        assert_eq!(router.in_flight(), self.open.len());
        for open in &self.open {
            let bound: Vec<_> =
                router.bound(open.ticket).map(|next| self.owners[next.instance.index()]).collect();
            let homes = open.bound.iter().map(|(home, _)| *home);
            assert_eq!(bound, homes.take_while(|home| self.owners.contains(home)).collect::<Vec<_>>());
        }
        for i in (0..6u8).filter(|i| self.live[*i as usize]) {
            let slot = router.fleet().find(&name(i)).unwrap().index();
            let here: Vec<&Open> =
                self.open.iter().filter(|o| o.home == (i, self.lives[i as usize])).collect();
            let all_bound = self.open.iter().flat_map(|o| &o.bound);
            let coming: Vec<f64> = all_bound
                .filter(|(home, _)| *home == (i, self.lives[i as usize]))
                .map(|bound| bound.1)
                .collect();
            let bound: f64 = coming.iter().sum();
            let sum = |f: &dyn Fn(&Open) -> f64| here.iter().map(|o| f(o)).sum::<f64>();
            let count = |stage| here.iter().filter(|o| o.stage == stage).count() as f64;
            for (id, expected) in [
                (Indicator::DecodeBs, count(Stage::Decoding)),
                (Indicator::BoundBs, count(Stage::Queued) + count(Stage::Scheduled) + coming.len() as f64),
                (Indicator::Tokens, sum(&|o| o.prompt() + o.output) + bound),
                (
                    Indicator::DecodeTokens,
                    sum(&|o| if o.stage == Stage::Decoding { o.prompt() + o.output } else { 0.0 }),
                ),
                (
                    Indicator::BoundTokens,
                    sum(&|o| if o.stage == Stage::Decoding { 0.0 } else { o.prompt() + o.output }) + bound,
                ),
                (Indicator::RemainingTokens, sum(&Open::remaining)),
                (Indicator::QueuedPrefillTokens, sum(&|o| o.prefill_left)),
            ] {
                assert_eq!(router.columns().get(id)[slot], expected, "{} of {}", id.decl().name, name(i));
            }
            let bs = router.columns().get(Indicator::Bs)[slot];
            assert!(bs >= (here.len() + coming.len()) as f64, "own requests always count");
            let id = router.fleet().find(&name(i)).unwrap();
            assert_eq!(router.in_flight_on(id), here.len() + coming.len());
            if let Some(ahead) = router.ahead() {
                let (requests, context) = ahead.load(slot).decoding().buckets();
                assert_eq!(requests.iter().sum::<f64>(), count(Stage::Decoding));
                assert_eq!(
                    context.iter().sum::<f64>(),
                    sum(&|o| if o.stage == Stage::Decoding { o.prompt() + o.output } else { 0.0 })
                );
                let pending =
                    here.iter().filter(|o| o.stage != Stage::Decoding && !o.prefills_only()).count();
                assert_eq!(ahead.load(slot).pending().count(), pending + coming.len());
            }
            assert_eq!(
                bs,
                router.columns().get(Indicator::QBs)[slot] + router.columns().get(Indicator::RBs)[slot]
            );
        }
    }
}

fn apply(op: &Op, router: &mut Router, model: &mut Model) {
    let config_instance = |i: u8, model: &Model| model.live[i as usize];
    match *op {
        Op::Add(i, role) if !config_instance(i, model) => {
            let slot = router.add_instance(&name(i), role, Some(100)).unwrap().index();
            model.live[i as usize] = true;
            model.lives[i as usize] += 1;
            model.owners.resize(model.owners.len().max(slot + 1), (i, 0));
            model.owners[slot] = (i, model.lives[i as usize]);
        }
        Op::Role(i, role) if config_instance(i, model) => {
            let id = router.fleet().find(&name(i)).unwrap();
            router.fleet_mut().set_role(id, role).unwrap();
        }
        Op::Remove(i) if config_instance(i, model) => {
            router.remove_instance(&name(i)).unwrap();
            model.live[i as usize] = false;
        }
        Op::Health(i, on) if config_instance(i, model) => {
            let id = router.fleet().find(&name(i)).unwrap();
            router.fleet_mut().set_healthy(id, on).unwrap();
        }
        Op::Drain(i, on) if config_instance(i, model) => {
            let id = router.fleet().find(&name(i)).unwrap();
            router.fleet_mut().set_draining(id, on).unwrap();
        }
        Op::Cuts(i, cuts) if config_instance(i, model) => {
            let id = router.fleet().find(&name(i)).unwrap();
            router.set_cuts(id, cuts).unwrap();
        }
        Op::Report(i, waiting, running) if config_instance(i, model) => {
            let report = Report {
                at: model.now,
                waiting: Some(f64::from(waiting)),
                running: Some(f64::from(running)),
                ..Report::default()
            };
            router.engine_report(&name(i), report).unwrap();
        }
        Op::Route { prompt, expected, thoughts } => {
            let prompt = u32::from(prompt) + 1;
            let request = Request {
                prompt_tokens: prompt,
                tokens_per_block: 16.0,
                expected_output_tokens: expected.map(u32::from),
                think_tokens: thoughts.map(u32::from),
                ..Request::default()
            };
            let Ok(decision) = router.route(&request, model.now) else {
                assert_eq!(router.fleet().eligible_count() + router.fleet().decoder_count(), 0);
                return;
            };
            model.turn += 1;
            model.open.push(Open {
                ticket: decision.ticket,
                home: home(decision.segment.instance, model),
                bound: bound(router, decision.ticket, decision.segment, prompt, model),
                moving: None,
                segment: decision.segment,
                anew: false,
                turn: model.turn,
                sent: true,
                stage: Stage::Queued,
                whole: prompt,
                prefill_left: f64::from(decision.segment.to_token.unwrap_or(prompt).min(prompt)),
                output: 0.0,
                expected: expected.map(f64::from),
            });
        }
        Op::Sent(t)
        | Op::Scheduled(t)
        | Op::Prefilled(t, _)
        | Op::FirstToken(t)
        | Op::Tokens(t, _)
        | Op::Finish(t)
        | Op::End(t)
        | Op::BeginMove(t, ..)
        | Op::EndMove(t, _)
        | Op::Fail(t, _)
        | Op::Drop(t)
            if !model.open.is_empty() =>
        {
            let t = t % model.open.len();
            on_ticket(op, t, router, model);
        }
        _ => {}
    }
}

fn home(instance: lmetric_core::Slot, model: &Model) -> (u8, u32) {
    model.owners[instance.index()]
}

/// Returns the segments bound after the open segment `first`, and checks that they are contiguous.
fn bound(
    router: &mut Router,
    ticket: TicketId,
    first: Segment,
    prompt: u32,
    model: &Model,
) -> Vec<((u8, u32), f64)> {
    let segments: Vec<Segment> = router.bound(ticket).collect();
    let mut end = first.to_token;
    for segment in &segments {
        assert_eq!(Some(segment.from_token), end);
        end = segment.to_token;
    }
    assert!(segments.is_empty() || end.is_none());
    let tokens = |segment: &Segment| f64::from(segment.from_token.max(prompt));
    segments.iter().map(|segment| (home(segment.instance, model), tokens(segment))).collect()
}

/// Moves the request to the segment `next`, as returned by the router.
fn go_on(t: usize, next: Segment, router: &mut Router, model: &mut Model) {
    model.turn += 1;
    let (turn, home) = (model.turn, home(next.instance, model));
    let (ticket, whole) = (model.open[t].ticket, model.open[t].whole);
    let anew = if next.from_token == 0 { bound(router, ticket, next, whole, model) } else { Vec::new() };
    let open = &mut model.open[t];
    // A restart, the next segment, or the failed segment with all later ones.
    let taken_over = Segment { instance: next.instance, to_token: None, ..open.segment };
    assert!(next.from_token == 0 || Some(next.from_token) == open.segment.to_token || next == taken_over);
    open.segment = next;
    open.anew = false;
    open.moving = None;
    if next.from_token == 0 {
        open.bound = anew;
    } else if next.to_token.is_none() {
        open.bound.clear(); // the replacement of a failed segment runs to the end
    } else {
        open.bound.remove(0);
    }
    (open.home, open.turn, open.stage) = (home, turn, Stage::Queued);
    open.prefill_left = if next.from_token == 0 { open.computes() } else { 0.0 };
    open.sent = next.from_token == 0;
    open.output = f64::from(next.from_token.saturating_sub(open.whole));
}

/// Ends the prefill and all earlier prefills of the instance.
fn prefilled(t: usize, model: &mut Model) {
    if model.open[t].computes() > 0.0 && model.open[t].sent {
        let (home, turn) = (model.open[t].home, model.open[t].turn);
        for earlier in model.open.iter_mut().filter(|o| o.home == home && o.turn <= turn) {
            earlier.prefill_left = 0.0;
        }
    }
}

/// Opens the next segment after the open one ended, or after a first token (`first`) while both
/// segments run.
fn hand_over(first: bool, t: usize, router: &mut Router, model: &mut Model) {
    let (ticket, now, alone) = (model.open[t].ticket, model.now, model.open[t].prefills_only());
    let usage = Usage { cached_tokens: Some(0), ..Usage::default() };
    let event = if first { Event::FirstToken } else { Event::Finished(usage) };
    let next = router.advance(ticket, event, now);
    if alone {
        prefilled(t, model);
    }
    match next {
        Ok(next) => {
            go_on(t, next.expect("another segment"), router, model);
            if first {
                prefilled(t, model);
                (model.open[t].stage, model.open[t].output) = (Stage::Decoding, model.open[t].output + 1.0);
            }
        }
        Err(error) => {
            assert!(matches!(error, CoreError::NoInstance(_)), "{error}");
            model.open.remove(t);
        }
    }
}

fn on_ticket(op: &Op, t: usize, router: &mut Router, model: &mut Model) {
    let now = model.now;
    let open = &mut model.open[t];
    let ticket = open.ticket;
    let at_home = model.live[open.home.0 as usize] && model.lives[open.home.0 as usize] == open.home.1;
    let mut advance = |event| router.advance(ticket, event, now).unwrap();
    match *op {
        Op::Sent(_) => {
            assert!(advance(Event::Sent).is_none());
            if !std::mem::replace(&mut open.sent, true) && open.stage != Stage::Decoding {
                // The rest of its prompt joins the backlog now.
                model.turn += 1;
                (open.turn, open.prefill_left) = (model.turn, open.computes());
            }
        }
        Op::Scheduled(_) => {
            advance(Event::Scheduled(None));
            if open.stage == Stage::Queued {
                open.stage = Stage::Scheduled;
            }
        }
        Op::Prefilled(_, k) => {
            advance(Event::Prefilled(u32::from(k)));
            open.prefill_left = (open.prefill_left - f64::from(k)).max(0.0);
        }
        Op::FirstToken(_) if open.prefills_only() => hand_over(true, t, router, model),
        Op::Finish(_) if open.follows() => hand_over(false, t, router, model),
        Op::FirstToken(_) => {
            advance(Event::FirstToken);
            if open.stage != Stage::Decoding {
                open.stage = Stage::Decoding;
                open.output += 1.0;
                prefilled(t, model);
            }
        }
        Op::Tokens(_, k) => {
            advance(Event::Tokens(u32::from(k)));
            if open.stage == Stage::Decoding {
                open.output += f64::from(k);
            }
        }
        Op::Finish(_) | Op::End(_) => {
            let usage = Usage { cached_tokens: Some(0), ..Usage::default() };
            let event = if matches!(op, Op::End(_)) { Event::Ended(usage) } else { Event::Finished(usage) };
            assert_eq!(advance(event), None);
            model.open.remove(t);
        }
        Op::Fail(_, kind) => {
            let failure = Failure::NAMES[kind as usize].1;
            let before = model.open[t].stage;
            match router.advance(ticket, Event::Failed(failure), now).unwrap() {
                None => {
                    assert!(router.advance(ticket, Event::Sent, now).is_err(), "a closed ticket is an error");
                    model.open.remove(t);
                }
                Some(next) => {
                    assert!(failure.may_move() && before != Stage::Decoding);
                    let home = home(next.instance, model);
                    assert!(!at_home || home != model.open[t].home, "never back to the one that failed");
                    go_on(t, next, router, model);
                }
            }
        }
        Op::BeginMove(_, i, recompute) => {
            let target = router.fleet().find(&name(i));
            let carry = if recompute { Carry::Recompute } else { Carry::Kv };
            let Ok(target) = target else { return };
            match router.begin_move(ticket, target, carry, now) {
                Err(error) => {
                    let (error, own) = (error.to_string(), open.home);
                    assert!(error.contains("cannot move"), "{error}");
                    assert!(!error.contains("already runs") || home(target, model) == own, "{error}");
                }
                Ok(segment) => {
                    assert!(open.stage == Stage::Decoding && open.bound.is_empty());
                    let home = home(segment.instance, model);
                    let open = &mut model.open[t];
                    assert_ne!(home, open.home);
                    assert_eq!(f64::from(segment.from_token), f64::from(open.whole) + open.output);
                    open.bound = vec![(home, f64::from(segment.from_token))];
                    open.moving = Some(recompute);
                }
            }
        }
        Op::EndMove(_, done) => match (open.moving, done) {
            (None, _) => assert!(router.advance(ticket, Event::Moved, now).is_err()),
            (Some(_), false) => {
                router.cancel_move(ticket, now).unwrap();
                open.bound.clear();
                open.moving = None;
            }
            (Some(recompute), true) => {
                let output = open.output;
                let (bound, to) = (open.bound[0].0, f64::from(open.whole) + open.output);
                open.segment.to_token = Some(to as u32);
                match router.advance(ticket, Event::Moved, now) {
                    Ok(next) => {
                        let next = next.expect("a segment on the target");
                        go_on(t, next, router, model);
                        let open = &mut model.open[t];
                        assert!(next.from_token == 0 || open.output == output);
                        // Recomputation does not apply if another instance takes the segment.
                        open.anew = recompute && bound == open.home && next.from_token > 0;
                        open.sent = next.from_token == 0;
                        open.bound.clear();
                    }
                    Err(error) => {
                        assert!(matches!(error, CoreError::NoInstance(_)), "{error}");
                        model.open.remove(t);
                    }
                }
            }
        },
        Op::Drop(_) => {
            router.drop_ticket(ticket);
            router.drop_ticket(ticket);
            model.open.remove(t);
        }
        _ => unreachable!("not an event of a ticket"),
    }
}

/// A planner of another crate: three parts for requests with reasoning tokens, two for others.
#[derive(Debug)]
struct Parts;

static PARTS: PlannerSpec = PlannerSpec {
    name: "parts",
    about: "splits at the prompt's end and, if it reasons, at the end of its reasoning",
    source: "a test",
    maturity: Maturity::Study,
    settings: &[],
    keeps_tokens: false,
    build: |_| Ok(Box::new(Parts)),
};

impl Planner for Parts {
    fn rest(&self, view: &mut View<'_>) -> Rest {
        let Some((thinks, second)) = view.second() else { return Rest::new() };
        let Some(expected) = view.request().expected_output_tokens else {
            return view.leave_whole("its length is unknown");
        };
        let prompt = view.request().prompt_tokens;
        let mut rest = Rest::from_iter([Follow { from_token: prompt, ..second }]);
        if let Some(tokens) = view.request().think_tokens.filter(|tokens| (1..expected).contains(tokens)) {
            let answers = view.other_than(&[thinks], second.start_seconds).unwrap_or(view.first());
            rest.push(Follow { from_token: prompt + tokens, ..view.follow(answers, 1.0) });
        }
        rest
    }
}

fn three() -> Split {
    Split::by(&PARTS, &[]).unwrap()
}

/// A router without drain between events.
fn router(late: bool, sibyl: bool, split: Split) -> Router {
    let binding = if late { Binding::Late } else { Binding::Early };
    let config = RouterConfig { drain: false, binding, step_time: Some(STEP), ..RouterConfig::default() };
    let mut router = Router::new(LeastRequests::boxed(), config).unwrap();
    router.set_split(&split).unwrap();
    if sibyl {
        router.set_decode_policy(Registry::CORE.policy("sibyl", &[]).unwrap()).unwrap();
    }
    router
}

#[test]
fn who_takes_over_a_middle_part_that_failed_does_the_rest() {
    let (mut router, mut model) = (router(false, false, three()), Model::default());
    let mut then = |op: Op| {
        apply(&op, &mut router, &mut model);
        model.check(&mut router);
        model.open.first().map(|open| (open.home.0, open.segment.from_token, open.segment.to_token))
    };
    then(Op::Add(0, Role::Both));
    then(Op::Add(1, Role::Both));
    let (first, _, cut) = then(Op::Route { prompt: 99, expected: Some(40), thoughts: Some(30) }).unwrap();
    let (second, from, answer) = then(Op::Finish(0)).unwrap();
    assert!(first != second && cut == Some(from) && answer.is_some_and(|token| token > from), "three parts");
    // The reasoning segment fails before its first token: the remaining instance produces reasoning
    // and answer.
    assert_eq!(then(Op::Fail(0, 0)), Some((first, from, None)));
    then(Op::FirstToken(0));
    then(Op::Tokens(0, 39));
    assert_eq!(then(Op::Finish(0)), None);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn books_equal_a_recount_and_end_at_zero(
        ops in prop::collection::vec(op(), 1..120),
        late in any::<bool>(),
        sibyl in any::<bool>(),
        cut in prop_oneof![
            Just(Split::NONE),
            (0.01..0.99f64).prop_map(|at| force(at).unwrap()),
            Just(three()),
        ],
    ) {
        let (mut router, mut model) = (router(late, sibyl, cut), Model::default());
        for op in &ops {
            apply(op, &mut router, &mut model);
            model.check(&mut router);
        }
        for open in std::mem::take(&mut model.open) {
            router.drop_ticket(open.ticket);
        }
        model.check(&mut router);
    }

    #[test]
    fn what_drains_stays_within_what_was_booked(
        ops in prop::collection::vec((op(), 0..400u32), 1..120),
    ) {
        let mut router = Router::new(LeastRequests::boxed(), RouterConfig::default()).unwrap();
        let mut model = Model::default();
        for (op, pause) in &ops {
            model.now += f64::from(*pause) / 333.0;
            apply(op, &mut router, &mut model);
            router.derive_some(IndicatorSet::ALL, model.now);
            for i in (0..6u8).filter(|i| model.live[*i as usize]) {
                let slot = router.fleet().find(&name(i)).unwrap().index();
                let home = (i, model.lives[i as usize]);
                let booked: f64 =
                    model.open.iter().filter(|o| o.home == home).map(|o| o.prefill_left).sum();
                let queued = router.columns().get(Indicator::QueuedPrefillTokens)[slot];
                prop_assert!((0.0..=booked + 1e-6).contains(&queued), "{queued} of {booked} booked");
            }
        }
    }
}
