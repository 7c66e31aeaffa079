//! Tests of rows that count no longer.
use super::rows::Own;
use super::save::SAVED_ROWS;
use super::*;
use crate::board::tests::{SLEPT, board, memory};
use crate::board::{BUDGETS_AT, BudgetRow};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

const ACCOUNT: u64 = 7;
const LATER: f64 = 1e6;

fn at(seconds: f64) -> Now {
    Now { steady: seconds, unix: seconds }
}

/// Windows for each API key, each of one of these periods.
fn windows(periods: &[Period]) -> Vec<Window> {
    let window = |(number, period): (u64, &Period)| Window {
        key: number << 4,
        name: "window".into(),
        unit: Unit::OutputTokens,
        limit: 100,
        period: *period,
        zone: None,
        cached_weight: 1.0,
        per_model: false,
        per_key: true,
        slo_class: None,
        shadow: false,
    };
    (1..).zip(periods).map(window).collect()
}

/// Budgets with a window of a second for each API key.
fn budgets() -> Budgets {
    let mut budgets = Budgets::new(None);
    budgets.set([(ACCOUNT, windows(&[Period::Second]))]);
    budgets
}

fn reserve(budgets: &mut Budgets, key: u64, output_tokens: u64, now: f64) -> Reservation {
    let asked = Amounts { requests: 1, output_tokens, ..Amounts::default() };
    let made = budgets.reserve(ACCOUNT, Scope { key, ..Scope::default() }, asked, at(now));
    made.expect("room").expect("windows")
}

fn used(budgets: &mut Budgets, key: u64, now: f64) -> u64 {
    reserve(budgets, key, 0, now).states().map(|state| state.used).sum()
}

#[test]
fn a_file_has_only_what_still_counts() {
    let mut budgets = budgets();
    let empty = Budgets::new(None).save(at(LATER));
    (1..=100).for_each(|key| reserve(&mut budgets, key, 1, 0.0).keep());
    assert!(budgets.save(at(0.5)).len() > 100 * 8);
    assert_eq!(budgets.save(at(LATER)).len(), empty.len());
}

#[test]
fn rows_that_count_no_longer_are_dropped() {
    let mut budgets = budgets();
    (1..=100).for_each(|key| reserve(&mut budgets, key, 1, 0.0).keep());
    assert_eq!(budgets.rows.iter().count(), 100);
    // Each new row drops one old row more than it adds.
    (101..=150).for_each(|key| reserve(&mut budgets, key, 1, LATER).keep());
    assert_eq!(budgets.rows.iter().count(), 50);
    assert!((101..=150).all(|key| used(&mut budgets, key, LATER) == 1));
    // Rows that count stay, however many there are.
    (151..=1000).for_each(|key| reserve(&mut budgets, key, 1, LATER).keep());
    assert!((101..=1000).all(|key| used(&mut budgets, key, LATER) == 1));
    for period in 1..=100 {
        let now = LATER + 10.0 * period as f64;
        (1..=10).for_each(|key| reserve(&mut budgets, 1000 * period + key, 1, now).keep());
    }
    assert!(budgets.rows.iter().count() <= 20, "{}", budgets.rows.iter().count());
}

#[test]
fn a_row_with_an_open_reservation_stays() {
    let mut budgets = budgets();
    let open = reserve(&mut budgets, 1, 1, 0.0);
    (2..=50).for_each(|key| reserve(&mut budgets, key, 1, LATER).keep());
    open.settle(&Amounts { requests: 1, output_tokens: 5, ..Amounts::default() }, at(LATER));
    assert_eq!(used(&mut budgets, 1, LATER), 4);
}

#[test]
fn counts_that_routers_exchange_are_dropped_too() {
    let (mut first, mut second) = (budgets(), budgets());
    first.share(1);
    second.share(2);
    let mut base = None;
    for (keys, now) in [(1..=2000, 0.0), (2001..=4000, LATER)] {
        keys.for_each(|key| reserve(&mut first, key, 1, now).keep());
        let version = first.enter();
        assert_eq!(first.exchange.as_ref().unwrap().published.len(), 2000);
        assert!(second.merge(&first.encode(base, at(now)), at(now)).unwrap().0);
        assert_eq!(second.exchange.as_ref().unwrap().others.len(), 2000);
        base = Some(version);
    }
    assert_eq!(used(&mut second, 3000, LATER), 1);
}

/// So a message costs little while most windows are idle.
#[test]
fn only_rows_that_changed_are_read_for_a_message() {
    let board = Arc::new(board(&memory(), 0));
    for mut budgets in [Budgets::new(None), Budgets::new(Some(board))] {
        budgets.set([(ACCOUNT, windows(&[Period::Second]))]);
        budgets.share(1);
        (1..=3).for_each(|key| reserve(&mut budgets, key << 4, 1, 0.0).keep());
        let first = budgets.enter();
        let rows_after = |budgets: &mut Budgets, base: u64| {
            budgets.enter();
            budgets.exchange.as_ref().expect("shared").own(Some(base), at(0.0)).rows.len()
        };
        assert_eq!(rows_after(&mut budgets, first), 0);
        // A change that is not counted stays unread.
        let scope = Scope { key: 2 << 4, ..Scope::default() };
        let key = windows(&[Period::Second])[0].key_in(scope);
        let row = budgets.rows.entry(key, at(0.0)).row.clone();
        ROLLING.add(row.words(), 0, 1);
        assert_eq!(rows_after(&mut budgets, first), 0);
        row.change(|words| ROLLING.add(words, 0, 1));
        let second = budgets.enter();
        assert_eq!(rows_after(&mut budgets, first), 1);
        assert_eq!(rows_after(&mut budgets, second), 0);
    }
}

/// A reservation is settled in one thread, while another thread moves its row.
#[test]
fn no_change_is_lost_while_a_row_moves_to_the_board() {
    let board = Arc::new(board(&memory(), 0));
    for key in 1..=200 {
        let own = Arc::new(Own::new());
        let row = Row::Own(own.clone());
        let to = Arc::new(BudgetRow::hold(&board, key << 4, 1, |_, _| true).expect("room"));
        let (ready, moved) = (AtomicBool::new(false), AtomicBool::new(false));
        let changes = std::thread::scope(|scope| {
            let changes = scope.spawn(|| {
                let mut changes = 0;
                while changes < 100 || !moved.load(Ordering::Acquire) {
                    row.change(|words| ROLLING.add(words, 60, 1));
                    changes += 1;
                    ready.store(changes >= 50, Ordering::Release);
                }
                changes
            });
            while !ready.load(Ordering::Acquire) {
                std::hint::spin_loop();
            }
            own.move_to(to.clone());
            moved.store(true, Ordering::Release);
            changes.join().expect("no panic")
        });
        assert_eq!(ROLLING.used(ROLLING.of(to.words()), 60), changes, "row {key}");
    }
}

#[test]
fn requests_wait_once_for_a_worker_that_stops_with_the_lock() {
    let memory = memory();
    let board = Arc::new(board(&memory, 0));
    let lock = &memory[BUDGETS_AT];
    let mut budgets = Budgets::new(Some(board));
    budgets.set([(ACCOUNT, windows(&[Period::Second, Period::Hour, Period::Day]))]);
    for first in [10, 20, 30] {
        lock.store(2, Ordering::Release);
        let mut waits = Vec::new();
        for key in first..first + 10 {
            SLEPT.set(Duration::ZERO);
            reserve(&mut budgets, key << 4, 1, 0.0).keep();
            waits.push(SLEPT.get());
        }
        assert!(waits[0] > Duration::ZERO && waits[0] <= Duration::from_millis(20), "{waits:?}");
        assert_eq!(waits[1..], [Duration::ZERO; 9], "they wait without a sleep");
        assert!(!budgets.tidy(at(0.0)) && budgets.lock_lost());
        lock.store(0, Ordering::Release);
        budgets.tidy(at(0.0)); // of at most 90 rows, 64
        assert!(budgets.tidy(at(0.0)) && !budgets.lock_lost(), "the counts move to the board");
    }
}

/// Saves in steps, with `between` after the first step.
fn saved(budgets: &mut Budgets, now: f64, between: impl FnOnce(&mut Budgets)) -> Vec<u8> {
    let mut saving = budgets.begin_save(at(now));
    saving.read_board();
    let has_more = budgets.save_rows(&mut saving);
    between(budgets);
    if has_more {
        while budgets.save_rows(&mut saving) {}
    }
    saving.finish()
}

/// With other routers, a save enters all rows, and the first one makes room for them.
#[test]
fn a_save_in_steps_enters_few_rows_at_a_time() {
    let board = Arc::new(board(&memory(), 0));
    for mut first in [Budgets::new(None), Budgets::new(Some(board))] {
        first.set([(ACCOUNT, windows(&[Period::Day]))]);
        first.share(1);
        let keys = 1..=5 * SAVED_ROWS as u64;
        keys.clone().for_each(|key| reserve(&mut first, key << 4, 1, 0.0).keep());
        let exchange = |budgets: &Budgets| {
            let exchange = budgets.exchange.as_ref().expect("shared");
            (exchange.published.len(), exchange.version)
        };
        let (mut saving, mut entered) = (first.begin_save(at(0.5)), 0);
        assert_eq!(exchange(&first).0, 0);
        let mut told = vec![];
        while first.save_rows(&mut saving) {
            let (rows, version) = exchange(&first);
            assert!(rows - entered <= 2 * SAVED_ROWS, "{entered} to {rows}");
            entered = rows;
            told.push((version, first.encode(told.last().map(|(base, _)| *base), at(0.5))));
        }
        assert_eq!(entered, 5 * SAVED_ROWS);
        let mut saved = Budgets::new(None);
        let mut second = Budgets::new(None);
        second.share(2);
        saved.restore(&saving.finish(), at(0.5)).expect("a whole save");
        // Messages between the steps have each row once they all have come.
        told.iter().for_each(|(_, message)| assert!(second.merge(message, at(0.5)).expect("counts").0));
        for each in [&mut saved, &mut second] {
            each.set([(ACCOUNT, windows(&[Period::Day]))]);
            assert!(keys.clone().all(|key| used(each, key << 4, 0.5) == 1));
        }
    }
}

#[test]
fn a_save_in_steps_has_each_row_once() {
    let memory = memory();
    let mut budgets = Budgets::new(Some(Arc::new(board(&memory, 0))));
    budgets.set([(ACCOUNT, windows(&[Period::Day]))]);
    let keys = 1..=2_000;
    (1..=100).for_each(|key| reserve(&mut budgets, key << 4, 1, 0.0).keep());
    memory[BUDGETS_AT].store(2, Ordering::Release); // the lock: the board gets no further row
    keys.clone().for_each(|key| reserve(&mut budgets, key << 4, 1, 0.0).keep());
    let bytes = saved(&mut budgets, 0.5, |budgets| {
        memory[BUDGETS_AT].store(0, Ordering::Release);
        while !budgets.tidy(at(0.5)) {} // all rows move to the board
    });
    let mut again = Budgets::new(None);
    again.set([(ACCOUNT, windows(&[Period::Day]))]);
    again.restore(&bytes, at(0.5)).expect("a whole save");
    let expected = |key: u64| 1 + u64::from(key <= 100);
    assert!(keys.clone().all(|key| used(&mut again, key << 4, 0.5) == expected(key)));
    assert!(budgets.save(at(0.5)) == saved(&mut budgets, 0.5, |_| ()));
}
