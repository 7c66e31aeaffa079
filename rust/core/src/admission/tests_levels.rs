//! Tests of priority levels and their aging.
use super::tests::{RATE, admission, arrive, asked, config, held, limited, refused, room};
use super::*;
use proptest::prelude::*;

const AGING: Seconds = 30.0;

fn leveled() -> LoadConfig {
    LoadConfig { aging_seconds: Some(AGING), ..config() }
}

/// A request of this tenant and level.
fn at(tenant: u64, level: i8) -> Asked {
    Asked { level, ..asked(tenant) }
}

fn wait_at(admission: &mut Admission, tenant: u64, level: i8, now: Seconds) -> ArrivalId {
    let (id, verdict) = arrive(admission, at(tenant, level), 1.0, now);
    assert!(matches!(verdict, Verdict::Held { .. }), "{verdict:?}");
    id.unwrap()
}

/// Lets one request run, to its end.
fn next(admission: &mut Admission, now: Seconds) -> ArrivalId {
    let ready = admission.release(&mut room(0.0), now).ready;
    assert_eq!(ready.len(), 1);
    admission.placed(ready[0].0, Slot(0), now);
    ready[0].0
}

#[test]
fn a_higher_level_goes_first_and_shares_hold_inside_it() {
    let mut admission = admission(leveled());
    let low: Vec<_> = (0..3).map(|_| wait_at(&mut admission, 1, -2, 0.0)).collect();
    let flood: Vec<_> = (0..3).map(|_| wait_at(&mut admission, 2, 5, 0.0)).collect();
    let other = wait_at(&mut admission, 3, 5, 0.0);
    let order: Vec<_> = (0..7).map(|_| next(&mut admission, 1.0)).collect();
    assert!(order[..2].contains(&other) && order[..2].contains(&flood[0]), "{order:?}");
    assert_eq!(order[2..4], flood[1..]);
    assert_eq!(order[4..], low);
}

#[test]
fn without_aging_levels_do_not_count() {
    let mut admission = admission(config());
    let first = wait_at(&mut admission, 1, -5, 0.0);
    let second = wait_at(&mut admission, 1, 5, 0.0);
    assert_eq!([next(&mut admission, 1.0), next(&mut admission, 1.0)], [first, second]);
    assert_eq!(admission.level_note(second, 1.0), None);
}

/// The higher level never lacks requests. Its tenant has had all service so far.
#[test]
fn a_level_rises_while_its_oldest_request_waits() {
    let mut admission = admission(leveled());
    let mut now = 0.0;
    let low = wait_at(&mut admission, 1, 0, now);
    let young = loop {
        wait_at(&mut admission, 2, 2, now);
        let first = next(&mut admission, now);
        if first == low {
            break wait_at(&mut admission, 1, 0, now);
        }
        assert!(now < 2.0 * AGING, "{now}");
        admission.ended(first, 0, Finish::Stop, now);
        let levels = admission.snapshot(&room(0.0), now).unwrap().levels;
        assert_eq!(levels.last().map(|low| (low.level, low.waiting)), Some((0, 1)));
        now += 1.0;
    };
    assert_eq!(now, 2.0 * AGING);
    let note = LevelNote { level: 0, aged_levels: 2, held_seconds: now };
    assert_eq!(admission.level_note(low, now), Some(note));
    // The level has fallen again.
    wait_at(&mut admission, 2, 2, now);
    for _ in 0..2 {
        let first = next(&mut admission, now);
        assert_eq!(admission.level_note(first, now).unwrap().level, 2);
    }
    assert_eq!(next(&mut admission, now), young);
}

#[test]
fn a_full_queue_loses_the_last_request_of_the_lowest_level() {
    let max =
        |max_waiting, max_waiting_per_tenant| LoadConfig { max_waiting, max_waiting_per_tenant, ..leveled() };
    // The bound of all, and the bound of one tenant that has requests of two levels.
    for (config, low, high) in [(max(4, 100), [1, 2], 3), (max(100, 4), [1, 1], 1)] {
        let mut admission = admission(config);
        let kept = wait_at(&mut admission, low[0], 1, 0.0);
        let old: Vec<_> = (0..3).map(|_| wait_at(&mut admission, low[1], 0, 0.0)).collect();
        // Equal or lower requests are refused themselves.
        for level in [0, -1] {
            assert_eq!(refused(arrive(&mut admission, at(low[1], level), 1.0, 1.0).1).0, RefusedFor::Queue);
        }
        wait_at(&mut admission, high, 2, 1.0);
        let gone = admission.release(&mut room(1.0), 1.0).refused;
        assert_eq!((gone[0].0, gone[0].1, gone.len()), (old[2], RefusedFor::Queue, 1));
        assert!((1.0..=3600.0).contains(&gone[0].2));
        // Requests that have aged up to the level of the arrival are not lost.
        let aged = 2.0 * AGING;
        let (_, verdict) = arrive(&mut admission, at(high, 2), 1.0, aged);
        assert_eq!(refused(verdict).0, RefusedFor::Queue);
        assert_eq!(admission.waiting(), 4);
        let order: Vec<_> = (0..4).map(|_| next(&mut admission, aged)).collect();
        assert!(order.contains(&kept) && order.contains(&old[0]) && order.contains(&old[1]), "{order:?}");
    }
}

#[test]
fn waiting_for_a_limit_of_its_tenant_raises_no_level() {
    let limits = TenantLimits { max_concurrent: Some(1), ..Default::default() };
    let mut admission = admission(LoadConfig { aging_seconds: Some(AGING), ..limited(1, limits) });
    let (running, _) = arrive(&mut admission, at(1, 0), 0.0, 0.0);
    admission.placed(running.unwrap(), Slot(0), 0.0);
    let low = wait_at(&mut admission, 1, 0, 0.0);
    assert!(admission.release(&mut room(1.0), 1000.0).ready.is_empty());
    admission.ended(running.unwrap(), 0, Finish::Stop, 1000.0);
    for _ in 0..2 {
        wait_at(&mut admission, 2, 1, 1000.0);
    }
    assert_ne!(next(&mut admission, 1000.0 + 0.9 * AGING), low);
    admission.release(&mut room(1.0), 1000.0);
    assert_eq!(next(&mut admission, 1000.0 + 1.1 * AGING), low);
}

#[test]
fn the_last_room_is_kept_inside_a_level_and_for_higher_levels() {
    let mut admission = admission(leveled());
    for (tenant, level) in [(1, 1), (1, 1), (2, 0), (2, 0), (3, 0)] {
        assert_eq!(arrive(&mut admission, at(tenant, level), 0.0, 0.0).1, Verdict::Free);
    }
    let mut arrive_at = |tenant, level| {
        let mut room = Room { used: vec![(0.95, 0.0)], ..room(0.0) };
        let (id, verdict) = admission.arrive(&program::Arrival::default(), at(tenant, level), &mut room, 0.0);
        let id = id.unwrap();
        admission.remove(id, 0.0);
        verdict
    };
    // Alone in its level, although lower tenants have fewer requests.
    assert_eq!(arrive_at(1, 1), Verdict::Free);
    assert!(matches!(arrive_at(2, 0), Verdict::Held { .. }));
    assert_eq!(arrive_at(3, 0), Verdict::Free);
}

#[test]
fn predictions_count_higher_levels_whole_and_lower_levels_not() {
    let mut admission = admission(leveled());
    for (tenant, level) in [(1, 1), (1, 1), (1, 1), (2, 0)] {
        wait_at(&mut admission, tenant, level, 0.0);
    }
    let mut expected = |level| match arrive(&mut admission, at(3, level), 0.2, 0.0) {
        (Some(id), Verdict::Held { expected_seconds, .. }) => {
            admission.remove(id, 0.0);
            expected_seconds - 0.1 // the wait for room
        }
        other => panic!("{other:?}"),
    };
    // Each has 1,000 tokens, at 1,000 tokens/s.
    for (level, seconds) in [(2, 1.0), (1, 2.0), (0, 5.0), (-1, 5.0)] {
        assert!((expected(level) - seconds).abs() < 1e-9, "{level}");
    }
    assert_eq!(RATE, 1000.0);
}

#[test]
fn a_change_of_levels_holds_for_waiting_requests() {
    let mut admission = admission(config());
    let ids: Vec<_> = (0..4).map(|_| held(&mut admission, 1, 0.0)).collect();
    admission.set_load(Some(leveled()), 1.0).unwrap();
    admission.set_levels(|id| if id == ids[3] { 4 } else { 0 });
    assert_eq!(next(&mut admission, 1.0), ids[3]);
    // Its wait counts from its arrival.
    let high = wait_at(&mut admission, 2, 1, AGING - 1.0);
    admission.ended(ids[3], 0, Finish::Stop, AGING);
    assert_eq!(next(&mut admission, AGING), ids[0]);
    assert_eq!(next(&mut admission, AGING), high);
    admission.set_load(Some(config()), AGING).unwrap();
    let late = wait_at(&mut admission, 1, 9, AGING);
    assert_eq!([0; 3].map(|_| next(&mut admission, AGING)), [ids[1], ids[2], late]);
    assert_eq!(admission.snapshot(&room(0.0), AGING).unwrap().levels, []);
    for id in [ids[0], high, ids[1], ids[2], late] {
        admission.ended(id, 0, Finish::Stop, AGING);
    }
    let load = admission.load.as_ref().unwrap();
    assert!(load.limits_from.is_empty());
    assert_eq!((admission.shares.in_flight(), admission.arrivals.len()), (0, 0));
}

/// Levels in the property tests, and tenants.
const TOP: i8 = 2;
const TENANTS: u64 = 3;

/// One step: arrivals by tenant and level, then time, then the run of one request.
type Step = (Vec<(u64, i8)>, Seconds);

fn steps(levels: std::ops::RangeInclusive<i8>) -> impl Strategy<Value = Vec<Step>> {
    let arrivals = prop::collection::vec((0..TENANTS, levels), 0..4);
    prop::collection::vec((arrivals, 0.0..AGING / 3.0), 1..150)
}

/// A waiting request of the model.
#[derive(Clone, Copy, Debug)]
struct Model {
    id: ArrivalId,
    tenant: u64,
    level: i8,
    since: Seconds,
    /// Requests that ran first since it rose to the highest level, and the most that may.
    passed: Option<(usize, usize)>,
}

/// The level in effect, by the definition: levels rise with their oldest request.
fn in_effect(waiting: &[Model], level: i8, now: Seconds) -> i8 {
    let oldest = waiting.iter().filter(|each| each.level == level).map(|each| each.since).fold(now, f64::min);
    let top = waiting.iter().map(|each| each.level).max().unwrap();
    (f64::from(level) + ((now - oldest) / AGING).floor()).min(f64::from(top)) as i8
}

proptest! {
    /// A request waits at most `AGING` for each level above its own. Then at most as many requests
    /// run first as without levels. Of each tenant and level, these are as many as are before it in
    /// its own line, and one more.
    #[test]
    fn no_request_starves(steps in steps(0..=TOP)) {
        let mut admission = admission(leveled());
        let (mut now, mut waiting) = (0.0, Vec::<Model>::new());
        let lines = TENANTS as usize * (TOP as usize + 1);
        for (arrivals, seconds) in steps {
            for (tenant, level) in arrivals {
                let id = wait_at(&mut admission, tenant, level, now);
                waiting.push(Model { id, tenant, level, since: now, passed: None });
            }
            now += seconds;
            if waiting.is_empty() {
                continue;
            }
            let place = |each: &Model| waiting.iter().filter(|other| {
                (other.tenant, other.level) == (each.tenant, each.level) && other.since <= each.since
            }).count();
            let most: Vec<usize> = waiting.iter().map(|each| (place(each) + 1) * lines).collect();
            for (each, most) in waiting.iter_mut().zip(most) {
                if now - each.since >= f64::from(TOP - each.level) * AGING && each.passed.is_none() {
                    each.passed = Some((0, most));
                }
            }
            let ran = next(&mut admission, now);
            admission.ended(ran, 0, Finish::Stop, now);
            let place = waiting.iter().position(|each| each.id == ran).expect("it waited");
            // No level that waits was higher.
            let highest = waiting.iter().map(|each| in_effect(&waiting, each.level, now)).max().unwrap();
            prop_assert_eq!(in_effect(&waiting, waiting[place].level, now), highest);
            // In its line, it was first.
            let ran = waiting.remove(place);
            prop_assert!(waiting[..place].iter().all(|each| (each.tenant, each.level) != (ran.tenant, ran.level)));
            for (passed, most) in waiting.iter_mut().filter_map(|each| each.passed.as_mut()) {
                *passed += 1;
                prop_assert!(passed <= most, "{passed} requests ran first, of {most}");
            }
        }
    }

    /// With one level, requests run in the same order as without levels.
    #[test]
    fn one_level_changes_no_order(steps in steps(1..=1)) {
        let (mut with, mut without) = (admission(leveled()), admission(config()));
        let mut now = 0.0;
        for (arrivals, seconds) in steps {
            let count = arrivals.len();
            for (tenant, level) in arrivals {
                let ids = [wait_at(&mut with, tenant, level, now), wait_at(&mut without, tenant, level, now)];
                prop_assert_eq!(ids[0], ids[1]);
            }
            now += seconds;
            if count > 0 {
                let ran = [next(&mut with, now), next(&mut without, now)];
                prop_assert_eq!(ran[0], ran[1]);
                with.ended(ran[0], 3, Finish::Stop, now);
                without.ended(ran[1], 3, Finish::Stop, now);
            }
        }
    }
}
