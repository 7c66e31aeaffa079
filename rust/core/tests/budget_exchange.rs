//! Budgets of several routers, which exchange their counts by messages that may be lost, late or
//! repeated.
use lmetric_core::budget::{
    Amounts, Budgets, MOST_SKEW, Now, Period, Reservation, Scope, Unit, Window, Zone,
};
use proptest::prelude::*;
use std::sync::Arc;

const ACCOUNT: u64 = 7;
const START: f64 = 1_700_006_400.0; // a midnight
const LIMIT: u64 = 100;

fn at(seconds: f64) -> Now {
    Now { steady: START + seconds, unix: START + seconds }
}

fn window(period: Period, is_calendar: bool) -> Window {
    Window {
        key: 1 << 4,
        name: "window".into(),
        unit: Unit::OutputTokens,
        limit: LIMIT,
        period,
        zone: is_calendar.then(|| Arc::new(Zone::default())),
        cached_weight: 1.0,
        per_model: false,
        per_key: false,
        slo_class: None,
        shadow: false,
    }
}

fn router(origin: u64, window: Window) -> Budgets {
    let mut budgets = Budgets::new(None);
    budgets.share(origin);
    budgets.set([(ACCOUNT, vec![window])]);
    budgets
}

fn reserve(budgets: &mut Budgets, tokens: u64, now: Now) -> Option<Reservation> {
    let asked = Amounts { requests: 1, output_tokens: tokens, ..Amounts::default() };
    budgets.reserve(ACCOUNT, Scope::default(), asked, now).ok().flatten()
}

fn used(budgets: &mut Budgets, now: Now) -> u64 {
    let none = Amounts::default();
    let probe = budgets.reserve(ACCOUNT, Scope::default(), none, now).expect("room").expect("windows");
    probe.states().map(|state| state.used).sum()
}

/// Sends all counts of a router to another one.
fn tell(from: &mut Budgets, to: &mut Budgets, now: Now) {
    from.enter();
    let message = from.encode(None, now);
    assert!(to.merge(&message, now).expect("a message").0);
}

#[derive(Clone, Debug)]
enum Step {
    Reserve {
        router: usize,
        tokens: u64,
    },
    Settle {
        which: usize,
        tokens: u64,
    },
    Drop(usize),
    Send {
        from: usize,
        to: usize,
    },
    /// A message that was sent before comes again, or late.
    Repeat {
        which: usize,
        to: usize,
    },
    Restart(usize),
    Wait(f64),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let router = || 0_usize..3;
    let step = prop_oneof![
        6 => (router(), 1_u64..20).prop_map(|(router, tokens)| Step::Reserve { router, tokens }),
        3 => (any::<usize>(), 0_u64..25).prop_map(|(which, tokens)| Step::Settle { which, tokens }),
        1 => any::<usize>().prop_map(Step::Drop),
        6 => (router(), router()).prop_map(|(from, to)| Step::Send { from, to }),
        2 => (any::<usize>(), router()).prop_map(|(which, to)| Step::Repeat { which, to }),
        1 => router().prop_map(Step::Restart),
        1 => (0.0..0.05).prop_map(Step::Wait),
    ];
    prop::collection::vec(step, 1..120)
}

/// One router: its counts by an exact ledger, and what the others know of it.
struct Life {
    budgets: Budgets,
    /// Use of this life so far, and of earlier lives as last published.
    uses: u64,
    gone: u64,
    /// Use at the last message to anyone.
    published: u64,
    /// The version that each other router has answered with.
    known: [Option<u64>; 3],
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]

    /// A router grants a request only if it fits into the counts that the router knows. After an
    /// exchange, all routers count the same: every use once, also of routers that have ended.
    #[test]
    fn counts_of_several_routers_agree_with_an_exact_ledger(steps in steps()) {
        let mut lives: Vec<Life> = (0..3)
            .map(|place| Life {
                budgets: router(place, window(Period::Day, true)),
                uses: 0,
                gone: 0,
                published: 0,
                known: [None; 3],
            })
            .collect();
        let mut next = 3;
        let mut open: Vec<(usize, u64, Reservation, u64)> = Vec::new(); // router, tokens, origin
        let mut origins = [0_u64, 1, 2];
        let mut sent: Vec<Vec<u8>> = Vec::new();
        let mut now = 0.0;
        for step in steps {
            match step {
                Step::Reserve { router, tokens } => {
                    let counted = used(&mut lives[router].budgets, at(now));
                    let made = reserve(&mut lives[router].budgets, tokens, at(now));
                    prop_assert_eq!(made.is_some(), counted + tokens <= LIMIT);
                    if let Some(made) = made {
                        lives[router].uses += tokens;
                        open.push((router, tokens, made, origins[router]));
                    }
                }
                Step::Settle { which, tokens } if !open.is_empty() => {
                    let (router, asked, made, origin) = open.swap_remove(which % open.len());
                    made.settle(&Amounts { requests: 1, output_tokens: tokens, ..Amounts::default() }, at(now));
                    if origin == origins[router] {
                        lives[router].uses = lives[router].uses - asked + tokens;
                    }
                }
                Step::Drop(which) if !open.is_empty() => {
                    let (router, asked, made, origin) = open.swap_remove(which % open.len());
                    drop(made);
                    if origin == origins[router] {
                        lives[router].uses -= asked;
                    }
                }
                Step::Send { from, to } if from != to => {
                    let base = lives[from].known[to];
                    let version = lives[from].budgets.enter();
                    lives[from].published = lives[from].uses;
                    let message = lives[from].budgets.encode(base, at(now));
                    let (is_complete, ahead) = lives[to].budgets.merge(&message, at(now)).expect("a message");
                    prop_assert_eq!(ahead, 0.0);
                    lives[from].known[to] = is_complete.then_some(version);
                    sent.push(message);
                }
                Step::Repeat { which, to } if !sent.is_empty() => {
                    let message = &sent[which % sent.len()];
                    lives[to].budgets.merge(message, at(now)).expect("a message");
                }
                Step::Restart(place) => {
                    origins[place] = next;
                    let life = &mut lives[place];
                    life.gone += life.published;
                    (life.uses, life.published, life.known) = (0, 0, [None; 3]);
                    life.budgets = router(next, window(Period::Day, true));
                    next += 1;
                }
                Step::Wait(seconds) => now += seconds,
                Step::Settle { .. } | Step::Drop(_) | Step::Send { .. } | Step::Repeat { .. } => {}
            }
        }
        // Each router sends all known counts to each other router, twice: what one of them knows of
        // an ended router reaches all.
        for _ in 0..2 {
            for from in 0..3 {
                for to in (0..3).filter(|to| *to != from) {
                    let version = lives[from].budgets.enter();
                    prop_assert!(version > 0);
                    let message = lives[from].budgets.encode(None, at(now));
                    lives[to].budgets.merge(&message, at(now)).expect("a message");
                }
            }
        }
        let counted: Vec<u64> = lives.iter_mut().map(|life| used(&mut life.budgets, at(now))).collect();
        prop_assert!(counted.iter().all(|each| *each == counted[0]), "{counted:?}");
        let live: u64 = lives.iter().map(|life| life.uses).sum();
        let gone: u64 = lives.iter().map(|life| life.gone).sum();
        prop_assert!(live <= counted[0], "{counted:?} of {live} and {gone}");
        // A message of an ended router that no router still running has received is lost with it.
        if next == 3 {
            prop_assert_eq!(counted[0], live);
        }
    }
}

#[test]
fn an_ended_routers_counts_stay_until_their_period_has_passed_and_reach_new_routers() {
    for (period, is_calendar, seconds) in [(Period::Day, true, 86_400.0), (Period::Minute, false, 61.0)] {
        let mut first = router(1, window(period, is_calendar));
        reserve(&mut first, 80, at(0.0)).expect("room").keep();
        let mut second = router(2, window(period, is_calendar));
        tell(&mut first, &mut second, at(0.5));
        drop(first);
        // The first router starts again. A full message of the second one has its earlier counts.
        let mut third = router(3, window(period, is_calendar));
        assert_eq!(used(&mut third, at(1.0)), 0);
        tell(&mut second, &mut third, at(1.0));
        for other in [&mut second, &mut third] {
            assert_eq!(used(other, at(seconds - 2.0)), 80);
            assert!(reserve(other, 21, at(seconds - 2.0)).is_none());
            assert_eq!(used(other, at(seconds + 1.0)), 0);
        }
        tell(&mut third, &mut second, at(seconds + 1.0));
        assert_eq!(used(&mut second, at(seconds + 1.0)), 0);
    }
}

#[test]
fn a_refusal_waits_for_the_use_of_other_routers_too() {
    let mut first = router(1, window(Period::Minute, false));
    let mut second = router(2, window(Period::Minute, false));
    reserve(&mut first, 90, at(0.0)).expect("room").keep();
    reserve(&mut second, 10, at(30.0)).expect("room").keep();
    tell(&mut first, &mut second, at(30.0));
    let asked = Amounts { requests: 1, output_tokens: 50, ..Amounts::default() };
    let refusal = second.reserve(ACCOUNT, Scope::default(), asked, at(30.0)).expect_err("no room");
    assert_eq!((refusal.used, refusal.asked), (100, 50));
    assert!((30.0..=31.5).contains(&refusal.retry_after), "{refusal:?}");
}

#[test]
fn a_message_from_a_clock_that_is_far_ahead_or_behind_changes_nothing() {
    for seconds in [-1e9, -86_400.0, -MOST_SKEW - 1.0, MOST_SKEW + 1.0, 86_400.0, 1e9] {
        let mut first = router(1, window(Period::Day, true));
        let mut second = router(2, window(Period::Day, true));
        reserve(&mut first, 10, at(43_200.0)).expect("room").keep();
        tell(&mut first, &mut second, at(43_200.0));
        reserve(&mut first, 30, at(43_200.0 + seconds)).expect("room").keep();
        first.enter();
        let message = first.encode(None, at(43_200.0 + seconds));
        let (_, ahead) = second.merge(&message, at(43_200.0)).expect("a message");
        assert_eq!(ahead, seconds);
        assert_eq!(used(&mut second, at(43_200.0)), 10);
        // Its clock is right again.
        tell(&mut first, &mut second, at(43_260.0));
        assert!(used(&mut second, at(43_260.0)) <= 40);
    }
    let mut first = router(1, window(Period::Day, true));
    let mut second = router(2, window(Period::Day, true));
    reserve(&mut first, 10, at(MOST_SKEW / 2.0)).expect("room").keep();
    first.enter();
    let message = first.encode(None, at(MOST_SKEW / 2.0));
    second.merge(&message, at(0.0)).expect("a message");
    assert_eq!(used(&mut second, at(0.0)), 10);
}

#[test]
fn changes_of_an_unknown_version_ask_for_all_counts() {
    let mut first = router(1, window(Period::Day, false));
    let mut second = router(2, window(Period::Day, false));
    let version = first.enter();
    reserve(&mut first, 10, at(0.0)).expect("room").keep();
    first.enter();
    let changes = first.encode(Some(version), at(0.0));
    assert!(!second.merge(&changes, at(0.0)).expect("a message").0);
    assert_eq!(used(&mut second, at(0.0)), 0);
    tell(&mut first, &mut second, at(0.0));
    assert!(
        second.merge(&changes, at(0.0)).expect("a message").0,
        "an old message is no reason to repeat all"
    );
    assert_eq!(used(&mut second, at(0.0)), 10);
    // A router's own counts come back from another one.
    tell(&mut second, &mut first, at(0.0));
    assert_eq!(used(&mut first, at(0.0)), 10);
}

#[test]
fn a_saved_file_has_the_counts_of_all_routers() {
    let mut first = router(1, window(Period::Day, false));
    let mut second = router(2, window(Period::Day, false));
    reserve(&mut first, 30, at(0.0)).expect("room").keep();
    reserve(&mut second, 20, at(0.0)).expect("room").keep();
    tell(&mut first, &mut second, at(0.0));
    let saved = second.save(at(0.0));
    // The restarted router, and a router without others.
    let mut again = router(3, window(Period::Day, false));
    let mut alone = Budgets::new(None);
    alone.set([(ACCOUNT, vec![window(Period::Day, false)])]);
    for each in [&mut again, &mut alone] {
        each.restore(&saved, at(1.0)).expect("a file");
        assert_eq!(used(each, at(1.0)), 50);
    }
    // The others still count the earlier life of the second router, once.
    tell(&mut second, &mut first, at(1.0));
    tell(&mut again, &mut first, at(1.0));
    assert_eq!(used(&mut first, at(1.0)), 50);
}

proptest! {
    #[test]
    fn broken_messages_change_nothing(cut in any::<prop::sample::Index>(), to in any::<u8>()) {
        let mut first = router(1, window(Period::Day, false));
        let mut second = router(2, window(Period::Day, false));
        reserve(&mut first, 10, at(0.0)).expect("room").keep();
        first.enter();
        let mut message = first.encode(None, at(0.0));
        let place = cut.index(message.len());
        // No bytes are a router without counts.
        prop_assert_eq!(second.merge(&message[..place], at(0.0)).is_err(), place > 0);
        let before = std::mem::replace(&mut message[place], to);
        prop_assert_eq!(second.merge(&message, at(0.0)).is_ok(), to == before);
        prop_assert_eq!(used(&mut second, at(0.0)), 10 * u64::from(to == before));
    }
}

#[test]
fn online_requests_keep_a_part_of_a_budget_that_batch_never_takes() {
    let (online, batch) = (3, 4);
    let mut budgets = Budgets::new(None);
    let of_batch = Window { key: 2 << 4, limit: 80, slo_class: Some(batch), ..window(Period::Day, false) };
    budgets.set([(ACCOUNT, vec![window(Period::Day, false), of_batch])]);
    let mut grant = |slo_class, tokens| {
        let asked = Amounts { requests: 1, output_tokens: tokens, ..Amounts::default() };
        let scope = Scope { slo_class, ..Scope::default() };
        let made = budgets.reserve(ACCOUNT, scope, asked, at(0.0)).ok().flatten();
        made.map(Reservation::keep).is_some()
    };
    assert_eq!((grant(batch, 70), grant(batch, 11)), (true, false));
    assert_eq!((grant(batch, 10), grant(batch, 1)), (true, false));
    assert_eq!((grant(online, 20), grant(online, 1)), (true, false));
}
