use super::*;
use crate::program::tests::Returning;
use proptest::prelude::*;
use std::sync::Arc;

pub(super) const RATE: f64 = 1000.0;

pub(super) fn config() -> LoadConfig {
    LoadConfig { room_seconds: Some(0.1), ..LoadConfig::default() }
}

pub(super) fn limited(tenant: u64, limits: TenantLimits) -> LoadConfig {
    LoadConfig { tenants: [(tenant, limits)].into_iter().collect(), ..config() }
}

pub(super) fn admission(config: LoadConfig) -> Admission {
    let mut admission = Admission::default();
    admission.set_load(Some(config), 0.0).unwrap();
    admission
}

/// One instance with this wait.
pub(super) fn room(wait: f64) -> Room {
    Room { served: wait < f64::INFINITY, waits: vec![wait], used: vec![(0.0, 0.0)], prior_rate: RATE }
}

/// A prompt of 1,000 tokens, which takes a second.
pub(super) fn asked(tenant: u64) -> Asked {
    Asked {
        tenant,
        weight: 1.0,
        new_tokens: 1000.0,
        prefill_seconds: 1.0,
        answer_tokens: 0.0,
        ttft_seconds: None,
        level: 0,
        sheddable: false,
    }
}

pub(super) fn arrive(
    admission: &mut Admission,
    asked: Asked,
    wait: f64,
    now: f64,
) -> (Option<ArrivalId>, Verdict) {
    admission.arrive(&program::Arrival::default(), asked, &mut room(wait), now)
}

pub(super) fn held(admission: &mut Admission, tenant: u64, now: f64) -> ArrivalId {
    let (id, verdict) = arrive(admission, asked(tenant), 1.0, now);
    assert!(matches!(verdict, Verdict::Held { by: HeldFor::Room, .. }), "{verdict:?}");
    id.unwrap()
}

pub(super) fn refused(verdict: Verdict) -> (RefusedFor, f64) {
    match verdict {
        Verdict::Refused { by, retry_after_seconds } => (by, retry_after_seconds),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_request_waits_until_an_instance_has_room() {
    let mut admission = admission(config());
    assert_eq!(arrive(&mut admission, asked(1), 0.1, 0.0).1, Verdict::Free);
    let id = held(&mut admission, 1, 0.0);
    assert_eq!((admission.waiting(), admission.release(&mut room(0.2), 0.5)), (1, Released::default()));
    assert_eq!(admission.release(&mut room(0.05), 2.0).ready, [(id, 2.0)]);
    assert_eq!(admission.waiting(), 0);
}

#[test]
fn a_round_counts_what_it_admits() {
    let mut admission = admission(config());
    let ids: Vec<_> = (0..5).map(|_| held(&mut admission, 1, 0.0)).collect();
    // Each prompt takes a second, so each instance has room for one.
    let waits = vec![0.0, f64::INFINITY, 0.05];
    let mut two = Room { served: true, waits, used: vec![(0.0, 0.0); 3], prior_rate: RATE };
    let ready: Vec<_> = admission.release(&mut two, 1.0).ready.into_iter().map(|(id, _)| id).collect();
    assert_eq!(ready, ids[..2]);
}

#[test]
fn tenants_take_turns_by_the_service_that_they_got() {
    let mut admission = admission(config());
    let flood: Vec<_> = (0..20).map(|_| held(&mut admission, 1, 0.0)).collect();
    let next = |admission: &mut Admission| admission.release(&mut room(0.0), 1.0).ready[0].0;
    for id in &flood[..4] {
        assert_eq!(next(&mut admission), *id);
    }
    let (first, second) = (held(&mut admission, 2, 1.0), held(&mut admission, 2, 1.0));
    // The other tenant begins where the flood is, so they alternate from here on.
    let order: Vec<_> = (0..4).map(|_| next(&mut admission)).collect();
    let place = |id| order.iter().position(|each| *each == id).unwrap();
    assert!(place(first) <= 1 && place(second) <= 3, "{order:?}");
}

#[test]
fn the_last_room_is_kept_for_tenants_below_their_share() {
    let mut admission = admission(config());
    for tenant in [1, 1, 1, 3] {
        assert_eq!(arrive(&mut admission, asked(tenant), 0.0, 0.0).1, Verdict::Free);
    }
    let mut arrive_at = |tenant, used| {
        let mut room = Room { used: vec![(used, 0.0)], ..room(0.0) };
        admission.arrive(&program::Arrival::default(), asked(tenant), &mut room, 0.0).1
    };
    assert!(matches!(arrive_at(1, 0.95), Verdict::Held { .. }));
    assert_eq!(arrive_at(2, 0.95), Verdict::Free);
    assert!(matches!(arrive_at(2, 1.0), Verdict::Held { .. }));
}

#[test]
fn a_tenant_alone_uses_all_room() {
    let mut admission = admission(config());
    let mut full = Room { used: vec![(0.95, 0.025)], ..room(0.0) };
    let turn = program::Arrival::default();
    let free = Asked { prefill_seconds: 0.0, ..asked(1) };
    for _ in 0..2 {
        assert_eq!(admission.arrive(&turn, free, &mut full, 0.0).1, Verdict::Free);
    }
    // Each request took its part of the batch.
    assert!(matches!(admission.arrive(&turn, free, &mut full, 0.0).1, Verdict::Held { .. }));
}

#[test]
fn requests_that_may_run_count_until_the_caller_takes_them() {
    let mut admission = admission(config());
    for _ in 0..5 {
        held(&mut admission, 1, 0.0);
    }
    // Each arrival is a round on an instance that has room for one prompt of a second.
    for _ in 0..3 {
        arrive(&mut admission, asked(1), 0.0, 1.0);
    }
    assert_eq!(admission.release(&mut room(0.0), 1.0).ready.len(), 1);
}

#[test]
fn requests_that_never_wait_teach_no_rate() {
    let mut admission = admission(config());
    for number in 0..1000 {
        assert_eq!(arrive(&mut admission, asked(1), 0.0, f64::from(number)).1, Verdict::Free);
    }
    assert_eq!(admission.snapshot(&room(0.0), 0.0).unwrap().work_per_second, RATE);
}

#[test]
fn a_tenant_at_its_limit_is_no_overload() {
    let limits = TenantLimits { max_concurrent: Some(1), ..Default::default() };
    let mut admission = admission(limited(1, limits));
    for _ in 0..10 {
        arrive(&mut admission, asked(1), 0.0, 0.0);
    }
    admission.release(&mut room(0.0), 100.0);
    assert_eq!(admission.snapshot(&room(0.0), 0.0).unwrap().work_per_second, RATE);
    let (_, verdict) = arrive(&mut admission, asked(2), 0.2, 100.0);
    let Verdict::Held { expected_seconds, .. } = verdict else { panic!("{verdict:?}") };
    assert!(expected_seconds < 1.2, "{expected_seconds}");
}

#[test]
fn requests_that_run_beside_a_tenant_at_its_limit_teach_no_rate() {
    let limits = TenantLimits { max_concurrent: Some(1), ..Default::default() };
    let mut admission = admission(limited(1, limits));
    for _ in 0..2 {
        arrive(&mut admission, asked(1), 0.0, 0.0);
    }
    for number in 1..=1000 {
        assert_eq!(arrive(&mut admission, asked(2), 0.0, f64::from(number)).1, Verdict::Free);
    }
    assert_eq!(admission.waiting(), 1);
    assert_eq!(admission.snapshot(&room(0.0), 1000.0).unwrap().work_per_second, RATE);
}

#[test]
fn a_request_that_is_placed_while_it_waits_leaves_the_queue() {
    let mut admission = admission(config());
    let (first, second) = (held(&mut admission, 1, 0.0), held(&mut admission, 1, 0.0));
    admission.placed(first, Slot(0), 0.0);
    assert_eq!(admission.waiting(), 1);
    admission.ended(first, 5, Finish::Stop, 1.0);
    admission.ended(second, 5, Finish::Stop, 1.0);
    assert_eq!((admission.waiting(), admission.arrivals.len()), (0, 0));
}

#[test]
fn the_earliest_deadline_of_a_tenant_goes_first() {
    let mut admission = admission(config());
    let late = Asked { ttft_seconds: Some(100.0), ..asked(1) };
    let (late, _) = arrive(&mut admission, late, 1.0, 0.0);
    let soon = Asked { ttft_seconds: Some(20.0), ..asked(1) };
    let (soon, _) = arrive(&mut admission, soon, 1.0, 1.0);
    let none = held(&mut admission, 1, 0.0);
    let mut next = || admission.release(&mut room(0.0), 2.0).ready[0].0;
    assert_eq!([next(), next(), next()], [soon.unwrap(), late.unwrap(), none]);
}

#[test]
fn a_request_that_would_miss_its_deadline_is_refused_with_the_time_of_the_wait() {
    let mut admission = admission(LoadConfig { ttft_seconds: Some(9.0), ..config() });
    // Half of the 8 s that are left beside its prefill: 4 s of work may wait, at 1,000 tokens/s.
    for _ in 0..3 {
        held(&mut admission, 1, 0.0);
    }
    let (id, verdict) = arrive(&mut admission, asked(1), 0.6, 0.0);
    assert_eq!((id, refused(verdict)), (None, (RefusedFor::Deadline, 4.5)));
    // Another tenant shares: only as much work of the first goes before.
    held(&mut admission, 2, 0.0);
    assert_eq!(admission.waiting(), 4);
}

#[test]
fn a_prompt_longer_than_its_deadline_still_runs_on_an_idle_fleet() {
    let mut admission = admission(LoadConfig { ttft_seconds: Some(0.5), ..config() });
    assert_eq!(arrive(&mut admission, asked(1), 0.0, 0.0).1, Verdict::Free);
}

/// A prompt of 12 s with a deadline of 9 s, which its program held for 10 s.
#[test]
fn the_hold_of_a_program_makes_no_request_late() {
    let held = Arrival {
        turn: None,
        asked: Asked { prefill_seconds: 12.0, ..asked(1) },
        work: 0.0,
        arrived: 0.0,
        deadline: Some(19.0),
        since: 10.0,
        slot: None,
        began: 0.0,
        aged_levels: 0,
        stage: Stage::Cache,
    };
    assert!(!held.is_late(0.45, 10.0));
    assert!(!held.is_late(0.45, 14.5));
    assert!(held.is_late(0.45, 14.6));
}

#[test]
fn a_waiting_request_whose_deadline_passes_is_refused() {
    let mut admission = admission(LoadConfig { ttft_seconds: Some(9.0), ..config() });
    let id = held(&mut admission, 1, 0.0);
    assert_eq!(admission.release(&mut room(1.0), 7.9), Released::default());
    let released = admission.release(&mut room(1.0), 8.1);
    assert_eq!((released.ready.len(), released.refused.len()), (0, 1));
    assert_eq!((released.refused[0].0, released.refused[0].1), (id, RefusedFor::Deadline));
    assert_eq!(admission.waiting(), 0);
}

#[test]
fn requests_above_a_tenants_concurrency_wait_for_an_end() {
    let limits = TenantLimits { max_concurrent: Some(1), ..Default::default() };
    let mut admission = admission(limited(1, limits));
    let (running, _) = arrive(&mut admission, asked(1), 0.0, 0.0);
    let (waiting, verdict) = arrive(&mut admission, asked(1), 0.0, 0.0);
    assert!(matches!(verdict, Verdict::Held { by: HeldFor::Concurrency, .. }), "{verdict:?}");
    assert_eq!(arrive(&mut admission, asked(2), 0.0, 0.0).1, Verdict::Free);
    admission.placed(running.unwrap(), Slot(0), 0.0);
    assert_eq!(admission.release(&mut room(0.0), 1.0), Released::default());
    admission.ended(running.unwrap(), 10, Finish::Stop, 2.0);
    assert_eq!(admission.release(&mut room(0.0), 2.0).ready, [(waiting.unwrap(), 2.0)]);
}

/// Each request of a tenant at its limit takes a minute, far longer than the fleet's rate says.
#[test]
fn the_wait_for_a_tenants_limit_is_by_the_ends_of_its_requests() {
    for most in [1, 4] {
        let limits = TenantLimits { max_concurrent: Some(most), max_waiting: Some(20) };
        let mut admission = admission(limited(1, limits));
        let (mut now, mut running) = (0.0, Vec::new());
        for round in 0..3 {
            for id in running.drain(..) {
                admission.ended(id, 1000, Finish::Stop, now);
            }
            // Each round has room for one.
            let ready = (0..=most).flat_map(|_| admission.release(&mut room(0.0), now).ready);
            let ready: Vec<_> = ready.collect();
            assert_eq!(ready.len(), if round == 0 { 0 } else { most as usize });
            for (id, _) in ready {
                admission.placed(id, Slot(0), now);
                running.push(id);
            }
            loop {
                let (id, verdict) = arrive(&mut admission, asked(1), 0.0, now);
                match verdict {
                    Verdict::Free => {
                        admission.placed(id.unwrap(), Slot(0), now);
                        running.push(id.unwrap());
                    }
                    Verdict::Held { by, .. } => assert_eq!(by, HeldFor::Concurrency),
                    Verdict::Refused { by, retry_after_seconds } => {
                        assert_eq!(by, RefusedFor::Queue);
                        // 20 requests wait, and 1 or 4 of them begin each minute.
                        let wait = 1200.0 / f64::from(most);
                        let ratio = retry_after_seconds / wait;
                        assert!(
                            round == 0 || (0.8..1.25).contains(&ratio),
                            "{retry_after_seconds} of {wait}"
                        );
                        break;
                    }
                    Verdict::Run(_) => panic!("{verdict:?}"),
                }
            }
            now += 60.0;
        }
        // A deadline before the next end of its requests is refused at once. A later one is not:
        // the requests that wait have none.
        let with = |ttft: f64| Asked { ttft_seconds: Some(ttft), ..asked(1) };
        let (_, verdict) = arrive(&mut admission, with(40.0 / f64::from(most)), 0.0, now);
        assert_eq!(refused(verdict).0, RefusedFor::Deadline);
        let (_, verdict) = arrive(&mut admission, with(90.0), 0.0, now);
        assert!(matches!(verdict, Verdict::Held { by: HeldFor::Concurrency, .. }), "{verdict:?}");
        // Others do not wait for it: 3,000 tokens of work at the fleet's rate.
        let (_, verdict) = arrive(&mut admission, asked(2), 0.2, now);
        let Verdict::Held { expected_seconds, .. } = verdict else { panic!("{verdict:?}") };
        assert!(expected_seconds < 4.0, "{expected_seconds}");
    }
}

/// Within a tenant, the earliest deadline goes first.
#[test]
fn only_requests_with_earlier_deadlines_make_a_request_late() {
    let with = |ttft: f64| Asked { ttft_seconds: Some(ttft), ..asked(1) };
    // Twenty requests of a second wait for room, or for the end of a request, after ten seconds.
    for (is_limited, others, left) in [(false, 60.0, 41.0), (true, 400.0, 381.0)] {
        for (others, is_late) in [(others, true), (3600.0, false)] {
            let limits = TenantLimits { max_concurrent: Some(1), ..Default::default() };
            let mut admission = admission(if is_limited { limited(1, limits) } else { config() });
            let mut start = |now: f64| {
                let id = arrive(&mut admission, asked(1), 0.0, now).0.unwrap();
                admission.placed(id, Slot(0), now);
                if now < 10.0 {
                    admission.ended(id, 0, Finish::Stop, 10.0);
                }
            };
            start(0.0);
            start(10.0);
            for _ in 0..20 {
                let (_, verdict) = arrive(&mut admission, with(others), 1.0, 10.0);
                assert!(matches!(verdict, Verdict::Held { .. }), "{verdict:?}");
            }
            // Its deadline is a second after theirs, or long before.
            match arrive(&mut admission, with(left), 1.0, 30.0).1 {
                Verdict::Refused { by, .. } => assert!(is_late && by == RefusedFor::Deadline, "{by:?}"),
                verdict => assert!(!is_late, "{verdict:?}"),
            }
        }
    }
}

#[test]
fn a_sheddable_request_that_would_wait_costs_nobody_a_place() {
    let mut admission = admission(LoadConfig { max_waiting: 3, ..config() });
    let sheddable = Asked { sheddable: true, ..asked(2) };
    assert_eq!(arrive(&mut admission, sheddable, 0.0, 0.0).1, Verdict::Free);
    (0..3).for_each(|_| _ = held(&mut admission, 1, 0.0));
    let (id, verdict) = arrive(&mut admission, sheddable, 1.0, 0.0);
    assert_eq!((id, refused(verdict).0), (None, RefusedFor::Queue));
    assert_eq!((admission.waiting(), admission.release(&mut room(1.0), 0.0)), (3, Released::default()));
    // A request that may wait takes the place of the longest line's last one.
    held(&mut admission, 2, 0.0);
    assert_eq!(admission.release(&mut room(1.0), 0.0).refused.len(), 1);
}

#[test]
fn a_full_queue_takes_places_from_the_longest_line_only() {
    let mut admission = admission(LoadConfig { max_waiting: 4, max_waiting_per_tenant: 3, ..config() });
    let flood: Vec<_> = (0..3).map(|_| held(&mut admission, 1, 0.0)).collect();
    assert_eq!(refused(arrive(&mut admission, asked(1), 1.0, 0.0).1).0, RefusedFor::Queue);
    held(&mut admission, 2, 0.0);
    held(&mut admission, 3, 0.0);
    let released = admission.release(&mut room(1.0), 0.0);
    assert_eq!((released.refused[0].0, released.refused[0].1), (flood[2], RefusedFor::Queue));
    assert_eq!(admission.waiting(), 4);
}

/// Security F16: a full line loses its last request, so that a class with a long deadline does not
/// keep out clients who would run first.
#[test]
fn a_full_line_loses_the_request_with_the_latest_deadline() {
    let with = |ttft: f64| Asked { ttft_seconds: Some(ttft), ..asked(1) };
    for (max_waiting, max_waiting_per_tenant) in [(100, 4), (4, 100)] {
        let mut admission = admission(LoadConfig { max_waiting, max_waiting_per_tenant, ..config() });
        let batch: Vec<_> =
            (0..4).map(|_| arrive(&mut admission, with(3600.0), 1.0, 0.0).0.unwrap()).collect();
        // One more of the same class is the last itself.
        assert_eq!(refused(arrive(&mut admission, with(3600.0), 1.0, 0.0).1).0, RefusedFor::Queue);
        let (interactive, verdict) = arrive(&mut admission, with(60.0), 1.0, 0.0);
        assert!(matches!(verdict, Verdict::Held { .. }), "{verdict:?}");
        let released = admission.release(&mut room(1.0), 0.0);
        assert_eq!((released.refused[0].0, released.refused[0].1), (batch[3], RefusedFor::Queue));
        assert_eq!(admission.waiting(), 4);
        assert_eq!(admission.release(&mut room(0.0), 1.0).ready[0].0, interactive.unwrap());
    }
}

/// Defect 1 of the core review: an impossible deadline is a refusal, not a panic.
#[test]
fn a_deadline_that_has_passed_at_the_arrival_is_a_refusal() {
    let mut admission = admission(config());
    for ttft in [-1.0, -1e-3] {
        let asked = Asked { ttft_seconds: Some(ttft), ..asked(1) };
        let (id, verdict) = arrive(&mut admission, asked, 0.0, 5.0);
        assert_eq!((id, refused(verdict).0), (None, RefusedFor::Deadline));
    }
    assert_eq!((admission.waiting(), admission.arrivals.len()), (0, 0));
}

/// Defect 2 of the core review: a waiting request has no home on an instance that was removed.
#[test]
fn a_waiting_request_does_not_go_to_the_next_instance_of_a_slot() {
    let mut admission = admission(config());
    admission
        .set_programs(
            Some(ProgramConfig {
                mode: ProgramMode::Admit,
                rules: Some(Arc::new(Returning)),
                ..Default::default()
            }),
            0.0,
        )
        .unwrap();
    let chain: Vec<u64> = (1..200).collect();
    let turn = program::Arrival {
        chain: &chain,
        prompt_tokens: 3184,
        tokens_per_block: 16.0,
        weight: 1.0,
        ..Default::default()
    };
    admission.followed_mut().unwrap().set_instance(Slot(0), Some(4000.0), true, 0.0);
    let (first, verdict) = admission.arrive(&turn, asked(1), &mut room(0.0), 0.0);
    assert_eq!(verdict, Verdict::Run(Slot(0)));
    admission.placed(first.unwrap(), Slot(0), 0.0);
    let (second, verdict) = admission.arrive(&turn, asked(1), &mut room(1.0), 0.0);
    assert!(matches!(verdict, Verdict::Held { by: HeldFor::Room, .. }), "{verdict:?}");
    assert_eq!(admission.home(second.unwrap()), Some(Slot(0)));
    admission.member(Member::Removed(Slot(0)), &Fleet::default());
    assert_eq!(admission.home(second.unwrap()), None);
}

/// If no instance takes requests, held requests leave their programs, like requests that arrive
/// then.
#[test]
fn a_request_that_waits_on_after_the_hold_of_its_program_is_held_no_more() {
    let limits = TenantLimits { max_concurrent: Some(2), ..Default::default() };
    let mut admission = admission(limited(1, limits));
    let (mode, rules) = (ProgramMode::Admit, Some(Arc::new(Returning) as Arc<dyn program::ProgramRules>));
    admission.set_programs(Some(ProgramConfig { mode, rules, ..Default::default() }), 0.0).unwrap();
    let two = |wait: f64| Room { waits: vec![wait; 2], used: vec![(0.0, 0.0); 2], ..room(wait) };
    for slot in 0..2 {
        admission.followed_mut().unwrap().set_instance(Slot(slot), Some(4000.0), true, 0.0);
    }
    let arrived: Vec<_> = (1..=3)
        .map(|name| {
            let chain: Vec<u64> = (1000 * name..1000 * name + 199).collect();
            let (prompt_tokens, tokens_per_block, weight) = (3184, 16.0, 1.0);
            let turn = program::Arrival {
                chain: &chain,
                prompt_tokens,
                tokens_per_block,
                weight,
                ..Default::default()
            };
            let (id, verdict) = admission.arrive(&turn, asked(1), &mut two(0.0), 0.0);
            if let Verdict::Run(instance) = verdict {
                admission.placed(id.unwrap(), instance, 0.0);
            }
            (id.unwrap(), verdict)
        })
        .collect();
    let held = arrived[2];
    assert!(matches!(held.1, Verdict::Held { by: HeldFor::Program(_), .. }), "{:?}", held.1);
    assert_eq!(admission.programs().unwrap().states(), [2, 0, 0, 1]);
    assert_eq!(admission.release(&mut two(f64::INFINITY), 1.0), Released::default());
    assert_eq!((admission.waiting(), admission.programs().unwrap().states()), (1, [2, 0, 0, 0]));
    // The instances are back, and a place is free: it goes to no request that waits for the limit.
    admission.ended(arrived[1].0, 0, Finish::Stop, 2.0);
    assert_eq!(admission.release(&mut two(0.0), 400.0).ready, [(held.0, 400.0)]);
    assert_eq!(admission.home(held.0), None);
    admission.placed(held.0, Slot(0), 400.0);
    let counters = admission.programs().unwrap().counters();
    assert_eq!((counters.held, counters.admitted), (1, 0));
    admission.ended(held.0, 5, Finish::Stop, 401.0);
    assert_eq!(admission.programs().unwrap().states()[program::State::Held as usize], 0);
}

#[test]
fn without_instances_the_decision_says_so() {
    let mut admission = admission(config());
    assert_eq!(arrive(&mut admission, asked(1), f64::INFINITY, 0.0).1, Verdict::Free);
}

#[test]
fn waiting_requests_run_when_admission_is_switched_off() {
    let mut admission = admission(config());
    let id = held(&mut admission, 1, 0.0);
    admission.set_load(None, 1.0).unwrap();
    assert_eq!(admission.release(&mut Room::default(), 1.0).ready, [(id, 1.0)]);
    assert!(!admission.is_on());
}

#[test]
fn settings_out_of_range_are_named() {
    for (config, told) in [
        (LoadConfig { ttft_seconds: Some(0.0), ..config() }, "admission: ttft_seconds: 0"),
        (LoadConfig { room_seconds: Some(f64::NAN), ..config() }, "admission: room_seconds: NaN"),
        (
            limited(1, TenantLimits { max_concurrent: Some(0), ..Default::default() }),
            "admission: max_concurrent: 0",
        ),
    ] {
        let error = Admission::default().set_load(Some(config), 0.0).unwrap_err().to_string();
        assert!(error.starts_with(told), "{error}");
    }
}

#[derive(Clone, Debug)]
enum Step {
    Arrive { tenant: u64, ttft: Option<f64>, tokens: u16, wait: f64 },
    Release { wait: f64 },
    Place,
    End(usize),
    Leave(usize),
    Pass(f64),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let wait = prop_oneof![Just(0.0), 0.0..2.0, Just(f64::INFINITY)];
    let step = prop_oneof![
        4 => (0..4u64, prop::option::of(0.1..10.0), any::<u16>(), wait.clone())
            .prop_map(|(tenant, ttft, tokens, wait)| Step::Arrive { tenant, ttft, tokens, wait }),
        2 => wait.prop_map(|wait| Step::Release { wait }),
        2 => Just(Step::Place),
        2 => (0..100usize).prop_map(Step::End),
        1 => (0..100usize).prop_map(Step::Leave),
        1 => (0.0..3.0).prop_map(Step::Pass),
    ];
    prop::collection::vec(step, 1..200)
}

proptest! {
    /// Each request ends once, bounds hold at all times, and at the end nothing is left.
    #[test]
    fn every_request_ends_once(steps in steps()) {
        let limits = TenantLimits { max_concurrent: Some(2), ..Default::default() };
        let config = LoadConfig { max_waiting: 10, max_waiting_per_tenant: 6, ..limited(1, limits) };
        let mut admission = admission(config);
        let (mut waiting, mut ready, mut running) = (Vec::new(), Vec::new(), Vec::new());
        let (mut now, mut arrived, mut ended, mut of_tenant) = (0.0, 0, 0, HashMap::new());
        let collect = |released: Released, waiting: &mut Vec<ArrivalId>, ready: &mut Vec<ArrivalId>| {
            let before = waiting.len();
            waiting.retain(|id| released.refused.iter().all(|(gone, ..)| gone != id));
            let gone = before - waiting.len();
            for (id, _) in released.ready {
                let place = waiting.iter().position(|each| *each == id).expect("it waited");
                ready.push(waiting.swap_remove(place));
            }
            gone
        };
        for step in steps {
            match step {
                Step::Arrive { tenant, ttft, tokens, wait } => {
                    arrived += 1;
                    let prefill_seconds = f64::from(tokens) / RATE;
                    let asked = Asked { ttft_seconds: ttft, new_tokens: f64::from(tokens), prefill_seconds, ..asked(tenant) };
                    match arrive(&mut admission, asked, wait, now) {
                        (Some(id), Verdict::Free) => { of_tenant.insert(id, tenant); ready.push(id) }
                        (Some(id), Verdict::Held { .. }) => { of_tenant.insert(id, tenant); waiting.push(id) }
                        (None, Verdict::Refused { retry_after_seconds, .. }) => {
                            prop_assert!((1.0..=3600.0).contains(&retry_after_seconds));
                            ended += 1;
                        }
                        other => prop_assert!(false, "{other:?}"),
                    }
                }
                Step::Release { wait } => {
                    ended += collect(admission.release(&mut room(wait), now), &mut waiting, &mut ready);
                }
                Step::Place => if let Some(id) = ready.pop() {
                    admission.placed(id, Slot(0), now);
                    running.push(id);
                },
                Step::End(which) => if !running.is_empty() {
                    let id = running.swap_remove(which % running.len());
                    admission.ended(id, 7, Finish::Stop, now);
                    ended += 1;
                },
                Step::Leave(which) => if !waiting.is_empty() {
                    let id = waiting.swap_remove(which % waiting.len());
                    admission.remove(id, now);
                    ended += 1;
                },
                Step::Pass(seconds) => now += seconds,
            }
            let on_engines = ready.iter().chain(&running).filter(|id| of_tenant[*id] == 1).count();
            prop_assert!(on_engines <= 2);
            prop_assert!(admission.snapshot(&room(0.0), 0.0).unwrap().waiting <= 10);
        }
        ended += collect(admission.release(&mut room(1.0), now), &mut waiting, &mut ready);
        for id in waiting.into_iter().chain(ready) {
            admission.remove(id, now);
            ended += 1;
        }
        for id in running {
            admission.ended(id, 7, Finish::Stop, now);
            ended += 1;
        }
        prop_assert_eq!(arrived, ended);
        prop_assert_eq!((admission.arrivals.len(), admission.waiting()), (0, 0));
        let load = admission.load.as_ref().unwrap();
        prop_assert_eq!(admission.shares.in_flight(), 0);
        prop_assert!((0..4).all(|tenant| load.limits.running(tenant) == 0));
    }
}
