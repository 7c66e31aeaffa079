//! Budgets against an exact ledger that keeps every event.
use lmetric_core::board::{BYTES, Board, Memory};
use lmetric_core::budget::{Amounts, Budgets, Now, PARTS, Period, Reservation, Scope, Unit, Window, Zone};
use proptest::prelude::*;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

const ACCOUNT: u64 = 7;
const START: f64 = 1_700_000_000.0;

fn window(key: u64, unit: Unit, limit: u64, period: Period) -> Window {
    let name = format!("window {key}");
    Window {
        key: key << 4,
        name,
        unit,
        limit,
        period,
        zone: None,
        cached_weight: 1.0,
        per_model: false,
        per_key: false,
        slo_class: None,
        shadow: false,
    }
}

fn calendar(window: Window) -> Window {
    Window { zone: Some(Arc::new(Zone::default())), ..window }
}

fn at(seconds: f64) -> Now {
    Now { steady: START + seconds, unix: START + seconds }
}

fn ask(input_tokens: u64, output_tokens: u64) -> Amounts {
    Amounts { requests: 1, input_tokens, cached_tokens: 0, output_tokens }
}

fn budgets(windows: &[Window]) -> Budgets {
    let mut budgets = Budgets::new(None);
    budgets.set([(ACCOUNT, windows.to_vec())]);
    budgets
}

fn reserve(budgets: &mut Budgets, amounts: Amounts, seconds: f64) -> Option<Reservation> {
    budgets
        .reserve(ACCOUNT, Scope::default(), amounts, at(seconds))
        .ok()
        .map(|made| made.expect("an account with windows"))
}

fn used(budgets: &mut Budgets, seconds: f64) -> Vec<u64> {
    used_at(budgets, at(seconds))
}

fn used_at(budgets: &mut Budgets, now: Now) -> Vec<u64> {
    let probe =
        budgets.reserve(ACCOUNT, Scope::default(), Amounts::default(), now).expect("room").expect("windows");
    probe.states().map(|state| state.used).collect()
}

#[derive(Clone, Debug)]
enum Step {
    Wait(f64),
    Reserve {
        input: u64,
        output: u64,
    },
    Settle {
        which: usize,
        input: u64,
        cached: u64,
        output: u64,
    },
    Drop(usize),
    /// The limits are replaced, by these percentages.
    Set(u64),
    /// The Unix time goes back.
    Back(f64),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let tokens = || 0_u64..400;
    let step = prop_oneof![
        3 => (0.0..30.0).prop_map(Step::Wait),
        1 => (0.0..4000.0).prop_map(Step::Wait),
        6 => (tokens(), tokens()).prop_map(|(input, output)| Step::Reserve { input, output }),
        4 => (any::<usize>(), 0_u64..500, 0_u64..600, 0_u64..500)
            .prop_map(|(which, input, cached, output)| Step::Settle { which, input, cached, output }),
        1 => any::<usize>().prop_map(Step::Drop),
        1 => (20_u64..200).prop_map(Step::Set),
        1 => (0.0..5.0).prop_map(Step::Back),
    ];
    prop::collection::vec(step, 1..80)
}

/// The exact amount of a request in a window, in hundredths: the cached weight is 0.25.
fn exact(unit: Unit, amounts: &Amounts) -> u64 {
    let cached = amounts.cached_tokens.min(amounts.input_tokens);
    let uncached = amounts.input_tokens - cached;
    match unit {
        Unit::Requests => 100,
        Unit::InputTokens => 100 * uncached + 25 * cached,
        Unit::OutputTokens => 100 * amounts.output_tokens,
        Unit::TotalTokens => 100 * (uncached + amounts.output_tokens) + 25 * cached,
        Unit::UncachedInputTokens => 100 * uncached,
    }
}

/// Every use of one window, with its time.
#[derive(Default)]
struct ExactLedger {
    uses: Vec<(f64, u64)>,
}

impl ExactLedger {
    /// The use in the period that ends now, or in the calendar period of now. Uses of the future,
    /// before the clock went back, count too.
    fn used(&self, window: &Window, now: f64) -> u64 {
        let length = window.period.seconds();
        let number = |then: f64| ((START + then) / length).floor();
        let counts = |then: f64| match window.zone {
            Some(_) => number(then) == number(now),
            None => then > now - length,
        };
        self.uses.iter().filter(|(then, _)| counts(*then)).map(|(_, amount)| amount).sum()
    }

    /// The use in a longer period: what a rolling window may count at most.
    fn used_at_most(&self, window: &Window, now: f64) -> u64 {
        let length = window.period.seconds() * (1.0 + 1.0 / PARTS as f64) + 1e-6;
        let rolling = |then: f64| then > now - length;
        match window.zone {
            Some(_) => self.used(window, now),
            None => self.uses.iter().filter(|(then, _)| rolling(*then)).map(|(_, amount)| amount).sum(),
        }
    }
}

/// The times of the windows: the Unix time may go back, but a calendar window stays in the newest
/// period.
#[derive(Clone, Copy, Default)]
struct Clock {
    steady: f64,
    unix: f64,
    newest: f64,
}

impl Clock {
    fn of(self, window: &Window) -> f64 {
        if window.zone.is_some() { self.newest } else { self.steady }
    }

    fn set(&mut self, steady: f64, unix: f64) {
        self.steady = steady;
        self.unix = unix.max(self.newest - 50.0); // less than the shortest period
        self.newest = self.newest.max(unix);
    }

    fn now(self) -> Now {
        Now { steady: START + self.steady, unix: START + self.unix }
    }
}

struct Open {
    reservation: Reservation,
    at: Clock,
    asked: Amounts,
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    /// Reservations never exceed a budget. Every use counts, once. A request is refused only if
    /// some window has no room for it.
    #[test]
    fn budgets_agree_with_an_exact_ledger(steps in steps()) {
        let limits = [6, 1500, 1200, 3000, 900, 2500];
        let windows = |percent: u64| -> Vec<Window> {
            let units = Unit::NAMES.map(|(_, unit)| unit);
            let rolling = units.iter().zip(limits).enumerate().map(|(key, (unit, limit))| Window {
                cached_weight: 0.25,
                ..window(key as u64, *unit, limit * percent / 100, [Period::Minute, Period::Hour][key % 2])
            });
            let day = calendar(window(9, Unit::TotalTokens, 2500 * percent / 100, Period::Minute));
            rolling.chain([Window { cached_weight: 0.25, ..day }]).collect()
        };
        let mut known = windows(100);
        let mut budgets = budgets(&known);
        let mut ledgers: Vec<ExactLedger> = known.iter().map(|_| ExactLedger::default()).collect();
        let mut open: Vec<Open> = Vec::new();
        let mut clock = Clock::default();
        for step in steps {
            match step {
                Step::Wait(seconds) => clock.set(clock.steady + seconds, clock.unix + seconds),
                Step::Back(seconds) => clock.set(clock.steady, clock.unix - seconds),
                Step::Set(percent) => {
                    known = windows(percent);
                    budgets.set([(ACCOUNT, known.clone())]);
                }
                Step::Reserve { input, output } => {
                    let asked = ask(input, output);
                    let amounts: Vec<u64> = known.iter().map(|each| exact(each.unit, &asked)).collect();
                    let each = || known.iter().zip(&ledgers).zip(&amounts);
                    // Sums of cached tokens are rounded up, each by less than a token.
                    let slack = 100 * ledgers[0].uses.len() as u64;
                    let fits = each().all(|((window, ledger), amount)| {
                        *amount == 0 || ledger.used(window, clock.of(window)) + amount <= 100 * window.limit
                    });
                    let surely_fits = each().all(|((window, ledger), amount)| {
                        *amount == 0
                            || ledger.used_at_most(window, clock.of(window)) + amount + slack <= 100 * window.limit
                    });
                    match budgets.reserve(ACCOUNT, Scope::default(), asked, clock.now()) {
                        Ok(made) => {
                            prop_assert!(fits, "granted above the budget: {asked:?} at {}", clock.steady);
                            for ((window, ledger), amount) in known.iter().zip(&mut ledgers).zip(&amounts) {
                                ledger.uses.push((clock.of(window), *amount));
                            }
                            open.push(Open { reservation: made.expect("windows"), at: clock, asked });
                        }
                        Err(refusal) => {
                            prop_assert!(!surely_fits, "{refusal:?} at {}", clock.steady);
                            prop_assert!(refusal.retry_after > 0.0);
                        }
                    }
                }
                Step::Settle { which, input, cached, output } if !open.is_empty() => {
                    let Open { reservation, at: then, asked } = open.swap_remove(which % open.len());
                    let cached_tokens = cached;
                    let spent = Amounts { requests: 1, input_tokens: input, cached_tokens, output_tokens: output };
                    reservation.settle(&spent, clock.now());
                    for (window, ledger) in known.iter().zip(&mut ledgers) {
                        let (old, new) = (exact(window.unit, &asked), exact(window.unit, &spent));
                        let use_ = (then.of(window), old);
                        let place = ledger.uses.iter().position(|used| *used == use_).expect("a use");
                        ledger.uses[place].1 = old.min(new);
                        if new > old {
                            ledger.uses.push((clock.of(window), new - old));
                        }
                    }
                }
                Step::Drop(which) if !open.is_empty() => {
                    let Open { reservation, at: then, asked } = open.swap_remove(which % open.len());
                    drop(reservation);
                    for (window, ledger) in known.iter().zip(&mut ledgers) {
                        let use_ = (then.of(window), exact(window.unit, &asked));
                        let place = ledger.uses.iter().position(|used| *used == use_).expect("a use");
                        ledger.uses.swap_remove(place);
                    }
                }
                Step::Settle { .. } | Step::Drop(_) => {}
            }
            for ((window, ledger), counted) in known.iter().zip(&ledgers).zip(used_at(&mut budgets, clock.now())) {
                let least = ledger.used(window, clock.of(window));
                prop_assert!(100 * counted >= least, "{}: {counted} at {}", window.name, clock.steady);
            }
        }
    }
}

#[test]
fn a_refused_request_is_charged_nowhere() {
    let mut budgets = budgets(&[
        window(1, Unit::Requests, 10, Period::Minute),
        window(2, Unit::TotalTokens, 100, Period::Hour),
        window(3, Unit::OutputTokens, 40, Period::Minute),
    ]);
    let held = reserve(&mut budgets, ask(50, 30), 0.0).expect("room");
    let refusal = budgets.reserve(ACCOUNT, Scope::default(), ask(5, 15), at(30.0)).expect_err("no room");
    assert_eq!((&*refusal.window.name, refusal.used, refusal.asked), ("window 3", 30, 15));
    // The error names the window with the longest wait.
    let refusal = budgets.reserve(ACCOUNT, Scope::default(), ask(20, 20), at(30.0)).expect_err("no room");
    assert_eq!((&*refusal.window.name, refusal.used, refusal.asked), ("window 2", 80, 40));
    assert!((3570.0..3631.0).contains(&refusal.retry_after), "{refusal:?}");
    assert_eq!(used(&mut budgets, 30.0), [1, 80, 30]);
    drop(held);
    assert_eq!(used(&mut budgets, 30.0), [0, 0, 0]);
    let refusal = budgets.reserve(ACCOUNT, Scope::default(), ask(101, 0), at(30.0)).expect_err("never fits");
    assert_eq!(refusal.retry_after, f64::INFINITY);
}

#[test]
fn absurd_usage_counts_as_reserved() {
    let mut budgets = budgets(&[
        window(1, Unit::TotalTokens, 1000, Period::Day),
        window(2, Unit::UncachedInputTokens, 1000, Period::Day),
    ]);
    let held = reserve(&mut budgets, ask(100, 50), 0.0).expect("room");
    let absurd = u64::MAX;
    held.settle(
        &Amounts { requests: 1, input_tokens: absurd, cached_tokens: absurd, output_tokens: absurd },
        at(1.0),
    );
    assert_eq!(used(&mut budgets, 1.0), [150, 100]);
    let held = reserve(&mut budgets, ask(100, 0), 2.0).expect("room");
    held.settle(&Amounts { requests: 1, input_tokens: 10, cached_tokens: 90, output_tokens: 0 }, at(3.0));
    assert_eq!(used(&mut budgets, 3.0), [160, 100]);
}

#[test]
fn a_shadow_window_counts_and_refuses_nothing() {
    let mut budgets = budgets(&[Window { shadow: true, ..window(1, Unit::Requests, 1, Period::Minute) }]);
    for _ in 0..3 {
        reserve(&mut budgets, ask(1, 1), 0.0).expect("room").settle(&ask(1, 1), at(0.0));
    }
    assert_eq!(used(&mut budgets, 0.0), [3]);
}

#[test]
fn models_and_keys_have_counts_of_their_own_if_the_window_says_so() {
    for (per_model, per_key, granted) in
        [(false, false, 1), (true, false, 2), (false, true, 2), (true, true, 4)]
    {
        let one = window(1, Unit::Requests, 1, Period::Day);
        let mut budgets = budgets(&[Window { per_model, per_key, ..one }]);
        let mut held = Vec::new();
        for (model, key) in [(5, 6), (5, 7), (8, 6), (8, 7), (5, 6)] {
            let (model, key) = (model << 4, key << 4);
            held.extend(budgets.reserve(ACCOUNT, Scope { model, key, slo_class: 0 }, ask(1, 1), at(0.0)));
        }
        assert_eq!(held.len(), granted, "{per_model} {per_key}");
    }
}

#[test]
fn a_clock_that_jumps_ahead_and_back_locks_no_one_out() {
    let mut budgets = budgets(&[calendar(window(1, Unit::Requests, 1, Period::Day))]);
    let year = 365.0 * 86_400.0;
    for (seconds, has_room) in [(0.0, true), (1.0, false), (year, true), (year + 1.0, false), (70.0, true)] {
        let made = reserve(&mut budgets, ask(1, 1), seconds);
        assert_eq!(made.is_some(), has_room, "at {seconds}");
        if let Some(made) = made {
            made.settle(&ask(1, 1), at(seconds));
        }
    }
}

#[test]
fn an_account_without_windows_reserves_nothing() {
    let mut budgets = budgets(&[]);
    budgets.set([]);
    assert!(budgets.reserve(ACCOUNT, Scope::default(), ask(1, 1), at(0.0)).expect("no refusal").is_none());
}

struct Shared(Arc<Box<[AtomicU64]>>);

impl Memory for Shared {
    fn words(&self) -> &[AtomicU64] {
        &self.0
    }
}

fn workers() -> Vec<Budgets> {
    workers_and_supervisor().0
}

/// Returns two workers with a window, and their supervisor without any.
fn workers_and_supervisor() -> (Vec<Budgets>, Budgets) {
    let memory: Arc<Box<[AtomicU64]>> =
        Arc::new((0..BYTES / size_of::<u64>()).map(|_| AtomicU64::new(0)).collect());
    let board = |number| Arc::new(Board::new(Box::new(Shared(memory.clone())), number).expect("an area"));
    let mut workers: Vec<Budgets> = (0..2).map(|number| Budgets::new(Some(board(number)))).collect();
    for worker in &mut workers {
        worker.set([(ACCOUNT, vec![window(1, Unit::TotalTokens, 100, Period::Minute)])]);
    }
    (workers, Budgets::new(Some(board(2))))
}

/// The supervisor exchanges counts with other routers, and its workers restore what it receives.
#[test]
fn a_supervisor_publishes_what_its_workers_use() {
    let (mut workers, mut supervisor) = workers_and_supervisor();
    let mut other = budgets(&[window(1, Unit::TotalTokens, 100, Period::Minute)]);
    other.share(2);
    workers.iter_mut().chain([&mut supervisor]).for_each(|each| each.share(1));
    reserve(&mut workers[0], ask(40, 20), 0.0).expect("room").settle(&ask(40, 20), at(0.0));
    let first = supervisor.save(at(1.0));
    other.restore(&first, at(1.0)).expect("counts");
    assert_eq!(used(&mut other, 1.0), [60]);
    reserve(&mut other, ask(20, 10), 1.0).expect("room").settle(&ask(20, 10), at(1.0));
    let told = other.save(at(2.0));
    for each in workers.iter_mut().chain([&mut supervisor]) {
        each.restore(&told, at(2.0)).expect("counts");
    }
    workers.iter_mut().for_each(|worker| assert_eq!(used(worker, 2.0), [90]));
    reserve(&mut workers[1], ask(5, 0), 2.0).expect("room").settle(&ask(5, 0), at(2.0));
    other.restore(&supervisor.save(at(3.0)), at(3.0)).expect("counts");
    assert_eq!(used(&mut other, 3.0), [95]);
    // A worker that starts later.
    let (mut late, _) = workers_and_supervisor();
    late[0].share(1);
    late[0].restore(&supervisor.save(at(3.0)), at(3.0)).expect("counts");
    assert_eq!(used(&mut late[0], 3.0), [30]);
    // Counts end with their periods, although the supervisor has no windows.
    assert!(supervisor.save(at(200.0)).len() < first.len());
}

#[test]
fn workers_share_counts() {
    let mut workers = workers();
    let held = reserve(&mut workers[0], ask(40, 40), 0.0).expect("room");
    assert!(reserve(&mut workers[1], ask(20, 20), 0.0).is_none());
    held.settle(&ask(10, 10), at(1.0));
    assert!(reserve(&mut workers[1], ask(20, 20), 1.0).is_some());
}

/// Returns a window of a second for each API key, and of an hour for each API key.
fn windows_of_keys() -> [Window; 2] {
    [Period::Second, Period::Hour].map(|period| Window {
        per_key: true,
        ..window(2 + period.seconds() as u64, Unit::OutputTokens, 100, period)
    })
}

/// Reserves for an API key, in the windows of a second (0) or of an hour (1).
fn reserve_of(budgets: &mut Budgets, period: u64, key: u64, output_tokens: u64, seconds: f64) -> Reservation {
    let scope = Scope { key: key << 4, ..Scope::default() };
    let made = budgets.reserve(10 + period, scope, ask(0, output_tokens), at(seconds));
    made.expect("room").expect("windows")
}

fn used_of(budgets: &mut Budgets, period: u64, key: u64, seconds: f64) -> u64 {
    reserve_of(budgets, period, key, 0, seconds).states().map(|state| state.used).sum()
}

fn workers_with_keys() -> [Budgets; 2] {
    let mut workers = workers();
    for worker in &mut workers {
        let [second, hour] = windows_of_keys();
        worker.set([(10, vec![second]), (11, vec![hour])]);
    }
    workers.try_into().expect("two workers")
}

/// Over time, many more windows count than the board has rows.
#[test]
fn workers_share_the_counts_of_any_number_of_windows_that_follow_each_other() {
    let mut workers = workers_with_keys();
    let open = reserve_of(&mut workers[0], 0, 0, 1, 0.0);
    for key in 1..=100_000 {
        let now = 0.001 * key as f64;
        let [one, two] = &mut workers;
        let (one, two) = if key % 2 == 0 { (one, two) } else { (two, one) };
        reserve_of(one, 0, key, 3, now).keep();
        assert_eq!(used_of(two, 0, key, now), 3);
        if key % 50 == 0 {
            assert!(one.tidy(at(now)) && two.tidy(at(now)), "at {now}");
        }
    }
    // The request of a worker that still runs counts in the window's own row.
    open.settle(&ask(0, 6), at(100.0));
    assert_eq!([0, 1].map(|worker| used_of(&mut workers[worker], 0, 0, 100.0)), [5, 5]);
}

#[test]
fn an_idle_worker_keeps_no_rows_from_others() {
    let [mut idle, mut busy] = workers_with_keys();
    (1..=20_000).for_each(|key| reserve_of(&mut idle, 0, key, 1, 0.0).keep());
    assert!(!idle.tidy(at(0.0)), "the board is full");
    (0..400).for_each(|_| _ = idle.tidy(at(10.0)));
    assert!(idle.tidy(at(10.0)));
    (20_001..=30_000).for_each(|key| reserve_of(&mut busy, 0, key, 1, 10.0).keep());
    assert!(busy.tidy(at(10.0)));
}

/// Each worker's count is in another sub-period, with a number in the upper half: there an empty
/// word looks newer. A request that still runs follows its window to the board.
#[test]
fn counts_without_room_on_the_board_move_there_later() {
    let [mut one, mut two] = workers_with_keys();
    let early = 1.78e9 - START;
    let [first, second, later] = [0.0, 70.0, 170.0].map(|seconds| early + seconds);
    (1..=40_000).for_each(|key| reserve_of(&mut one, 0, key, 1, first).keep());
    let open = reserve_of(&mut one, 1, 7, 20, first);
    reserve_of(&mut two, 1, 7, 4, second).keep();
    assert_eq!([used_of(&mut one, 1, 7, first), used_of(&mut two, 1, 7, second)], [20, 4]);
    assert_eq!([one.tidy(at(first)), two.tidy(at(second))], [false, false]);
    let tidy = |budgets: &mut Budgets| (0..800).fold(true, |_, _| budgets.tidy(at(later)));
    assert_eq!([tidy(&mut one), tidy(&mut two)], [true, true]);
    assert_eq!([used_of(&mut one, 1, 7, later), used_of(&mut two, 1, 7, later)], [24, 24]);
    open.settle(&ask(0, 10), at(later));
    assert_eq!([used_of(&mut one, 1, 7, later), used_of(&mut two, 1, 7, later)], [14, 14]);
}

/// Two threads reserve at once: above the budget is at most one reservation of the other worker.
#[test]
fn workers_exceed_a_budget_at_most_by_a_reservation() {
    for _ in 0..50 {
        let workers = workers();
        let granted: Vec<u64> = std::thread::scope(|scope| {
            let threads: Vec<_> = workers
                .into_iter()
                .map(|mut worker| {
                    scope.spawn(move || {
                        let mut held: Vec<Reservation> = Vec::new();
                        held.extend((0..30).filter_map(|_| reserve(&mut worker, ask(4, 3), 0.0)));
                        let granted = 7 * held.len() as u64;
                        held.into_iter().for_each(|each| each.settle(&ask(4, 3), at(0.0)));
                        granted
                    })
                })
                .collect();
            threads.into_iter().map(|thread| thread.join().expect("no panic")).collect()
        });
        let sum: u64 = granted.iter().sum();
        assert!((98..=105).contains(&sum), "{sum}");
    }
}

#[test]
fn saved_counts_go_on_and_a_broken_file_is_refused() {
    let mut first = budgets(&[window(1, Unit::TotalTokens, 100, Period::Day)]);
    reserve(&mut first, ask(40, 20), 0.0).expect("room").settle(&ask(40, 20), at(0.0));
    let saved = first.save(at(60.0));
    let mut workers = workers();
    for worker in [&mut workers[0], &mut budgets(&[])] {
        worker.set([(ACCOUNT, vec![window(1, Unit::TotalTokens, 100, Period::Day)])]);
        worker.restore(&saved, at(60.0)).expect("a whole file");
        assert_eq!(used(worker, 60.0), [60]);
        assert_eq!(worker.save(at(60.0)).len(), saved.len());
    }
    workers[1].set([(ACCOUNT, vec![window(1, Unit::TotalTokens, 100, Period::Day)])]);
    assert_eq!(used(&mut workers[1], 60.0), [60]);
    for broken in [&saved[..saved.len() - 8], &saved[..20], b"", &[0; 24]] {
        assert!(
            Budgets::new(None)
                .restore(broken, at(60.0))
                .is_err_and(|error| error.to_string().contains("budgets"))
        );
    }
}
