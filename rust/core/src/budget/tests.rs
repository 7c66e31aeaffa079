//! Tests of rows that count no longer.
use super::*;

const ACCOUNT: u64 = 7;
const LATER: f64 = 1e6;

fn at(seconds: f64) -> Now {
    Now { steady: seconds, unix: seconds }
}

/// Budgets with a window of a second for each API key.
fn budgets() -> Budgets {
    let window = Window {
        key: 1 << 4,
        name: "window".into(),
        unit: Unit::OutputTokens,
        limit: 100,
        period: Period::Second,
        zone: None,
        cached_weight: 1.0,
        per_model: false,
        per_key: true,
        slo_class: None,
        shadow: false,
    };
    let mut budgets = Budgets::new(None);
    budgets.set([(ACCOUNT, vec![window])]);
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
