//! Bounds of work and of holds: security F3 and F7, defects 2, 6, 7 and 8 of the core review.
use super::programs::MAX_PROGRAMS;
use super::tests::{arrival, chain, finish, programs, run};
use super::{
    Arrival, Finish, PeerProgram, PeerPrograms, ProgramConfig, ProgramMode, Programs, Prompt, State, TurnId,
    Verdict,
};
use crate::ids::{Seconds, Slot};
use std::collections::{BTreeMap, BTreeSet};

/// Returns programs with `count` programs between two turns that came once, one each millisecond.
fn full(mode: ProgramMode, count: usize) -> (Programs, Seconds) {
    let mut programs = programs(mode, &[1e12, 1e12]);
    let mut now = 0.0;
    for name in 0..count as u64 {
        now += 1e-3;
        let turn = run(&mut programs, &chain(&[(name + 10, 16)]), now);
        finish(&mut programs, turn, now);
    }
    (programs, now)
}

/// Security F3: a new program in a full table goes through no other program, and a tick through a
/// bounded number.
#[test]
fn a_full_table_costs_a_decision_and_a_tick_no_more_than_a_small_one() {
    let (mut programs, mut now) = full(ProgramMode::Observe, MAX_PROGRAMS);
    assert_eq!(programs.iter().count(), MAX_PROGRAMS);
    programs.walked.set(0);
    for name in 0..1000 {
        now += 1e-3;
        let turn = run(&mut programs, &chain(&[(name + 1_000_000, 16)]), now);
        finish(&mut programs, turn, now);
    }
    assert_eq!((programs.walked.get(), programs.iter().count()), (0, MAX_PROGRAMS));
    programs.check_sets();
    for _ in 0..20 {
        now += 0.5;
        programs.walked.set(0);
        programs.tick(now);
        assert!(programs.walked.get() <= 4096, "{}", programs.walked.get());
    }
    // Each program is counted again within 16 ticks: the ledgers follow the probabilities.
    let expected: f64 = programs.instances().iter().map(|ledger| ledger.expected_tokens()).sum();
    let gaps: f64 = programs
        .iter()
        .map(|(_, program)| {
            program.own_tokens() * programs.gaps().returns(program.class(), now - program.since)
        })
        .sum();
    assert!((expected / gaps - 1.0).abs() < 0.2, "{expected} of {gaps}");
}

/// Security F3: programs that are only observed and came once go first; those that return stay.
#[test]
fn programs_that_came_once_make_room_in_a_full_table() {
    for mode in [ProgramMode::Observe, ProgramMode::Admit] {
        let mut programs = programs(mode, &[1e12]);
        let turn = run(&mut programs, &chain(&[(1, 20)]), 0.0);
        finish(&mut programs, turn, 0.0);
        let turn = run(&mut programs, &chain(&[(1, 25)]), 1.0);
        finish(&mut programs, turn, 1.0);
        for name in 1..MAX_PROGRAMS as u64 {
            let turn = run(&mut programs, &chain(&[(name + 10, 16)]), 2.0);
            finish(&mut programs, turn, 2.0);
        }
        // The first one has the longest gap, but it has returned before.
        run(&mut programs, &chain(&[(5, 16)]), 400.0);
        let known = programs.iter().any(|(_, program)| program.tokens == 25.0 * 64.0 + 10.0);
        assert_eq!((known, programs.iter().count()), (mode == ProgramMode::Observe, MAX_PROGRAMS));
    }
}

/// Attack 52 of security F7: one tenant's programs return every 2 s and fill the caches. `victims`
/// new programs of tenant `tenant` arrive at 60 s. Returns the time at which each got a place
/// (infinite: none) or was refused (negative), after its arrival.
fn attack(
    mut programs: Programs,
    tenant: u64,
    victims: u64,
    tokens_each: u32,
    until: Seconds,
) -> Vec<Seconds> {
    let size = |tokens: u32| tokens / 64;
    let mut now: Seconds = 0.0;
    let mut next: BTreeMap<u64, Seconds> = (0..60).map(|name| (name, name as f64 / 30.0)).collect();
    // Ends of turns, and the owners of held turns: programs of tenant 1, or victims from 100 on.
    let mut ends: Vec<(Seconds, TurnId, u64)> = Vec::new();
    let mut held: Vec<(TurnId, u64)> = Vec::new();
    let mut placed: BTreeMap<u64, Seconds> = BTreeMap::new();
    let mut lengths = [size(3500); 60];
    let ticks = ((60.0 + until) / 0.05) as u64;
    for tick in 0..ticks {
        now = tick as f64 * 0.05;
        let mut start = Vec::new();
        ends.retain(|&(at, turn, name)| {
            let over = at <= now;
            if over {
                programs.ended(turn, 8, Finish::Stop, now);
                if name < 60 {
                    next.insert(name, now + 2.0 - 0.2);
                }
            }
            !over
        });
        let mut due: Vec<(u64, u64, u32)> = Vec::new();
        next.retain(|name, at| {
            let now_due = *at <= now;
            if now_due {
                due.push((*name, 1, lengths[*name as usize]));
            }
            !now_due
        });
        if tick == 1200 {
            due.extend((0..victims).map(|name| (100 + name, tenant, size(tokens_each))));
        }
        for (name, tenant, blocks) in due {
            let chain = chain(&[(name + 10, blocks)]);
            let (turn, verdict) = programs.arrive(&Arrival { tenant, ..arrival(&chain) }, now);
            match verdict {
                Verdict::Free => start.push((turn, Slot(0), name)),
                Verdict::Run(instance) => start.push((turn, instance, name)),
                Verdict::Held(_) => held.push((turn, name)),
                Verdict::Refused { .. } if name < 60 => _ = next.insert(name, now + 2.0),
                Verdict::Refused { .. } => _ = placed.insert(name, -1.0),
            }
        }
        programs.tick(now);
        for released in programs.released() {
            let place = held.iter().position(|(turn, _)| *turn == released).unwrap();
            let instance = programs.assigned(released).unwrap();
            start.push((released, instance, held.swap_remove(place).1));
        }
        for (turn, _) in programs.refused() {
            let place = held.iter().position(|(held, _)| *held == turn).unwrap();
            let name = held.swap_remove(place).1;
            if name < 60 {
                next.insert(name, now + 2.0);
            } else {
                placed.insert(name, 60.0 - now);
            }
        }
        for (turn, instance, name) in start {
            programs.placed(turn, instance, now);
            ends.push((now + 0.2, turn, name));
            if name >= 100 {
                placed.entry(name).or_insert(now - 60.0);
            } else {
                lengths[name as usize] = size(3500);
            }
        }
        programs.check_sets();
    }
    assert!(now > 60.0);
    (100..100 + victims).map(|name| placed.get(&name).copied().unwrap_or(f64::INFINITY)).collect()
}

fn two_engines(max_hold_seconds: Seconds) -> Programs {
    let config = ProgramConfig { mode: ProgramMode::Admit, max_hold_seconds, ..ProgramConfig::default() };
    let mut programs = Programs::new(config).unwrap();
    (0..2).for_each(|slot| programs.set_instance(Slot(slot), Some(64_000.0), true));
    programs
}

#[test]
fn a_tenant_that_returns_often_does_not_keep_another_out() {
    let waits = attack(two_engines(300.0), 2, 6, 3000, 20.0);
    assert!(waits.iter().all(|wait| (0.0..=10.0).contains(wait)), "{waits:?}");
    // Also if its programs are much longer than those that must go.
    let waits = attack(two_engines(300.0), 2, 1, 40_000, 30.0);
    assert!(waits.iter().all(|wait| (0.0..=10.0).contains(wait)), "{waits:?}");
}

#[test]
fn a_tenant_takes_the_place_of_others_up_to_an_equal_share() {
    // Half of 108,800 tokens are 17 or 18 programs of 3,008 tokens. The others wait for room.
    let waits = attack(two_engines(300.0), 2, 30, 3000, 4.0);
    let placed = waits.iter().filter(|wait| (0.0..=3.0).contains(*wait)).count();
    assert!((15..=19).contains(&placed), "{placed} of 30: {waits:?}");
}

#[test]
fn without_tenants_a_hold_ends_in_a_place_or_a_refusal() {
    let waits = attack(two_engines(15.0), 1, 6, 3000, 20.0);
    assert!(waits.iter().all(|wait| wait.abs() <= 16.0), "{waits:?}");
    // Programs of the same tenant keep their places, so these are refused.
    assert!(waits.iter().all(|wait| *wait < 0.0), "{waits:?}");
}

/// Defect 2: a removed instance takes its programs' places along, although its slot has a new
/// instance before the next tick.
#[test]
fn programs_of_a_removed_instance_have_no_home_on_the_next_one_of_its_slot() {
    let mut programs = programs(ProgramMode::Admit, &[20_000.0, 20_000.0]);
    let first = run(&mut programs, &chain(&[(1, 100)]), 0.0);
    finish(&mut programs, first, 1.0);
    let chat = chain(&[(9, 10)]);
    let (running, verdict) = programs.arrive(&arrival(&chat), 1.0);
    assert_eq!(verdict, Verdict::Free);
    programs.placed(running, Slot(0), 1.0);
    let home = programs.iter().next().unwrap().1.home.unwrap().instance;
    programs.instance_removed(home);
    assert_eq!(programs.instances()[home.index()].expected_tokens(), 0.0);
    programs.set_instance(home, Some(5000.0), true);
    // It goes to the instance with room, not to the small one in the old slot.
    let (turn, verdict) = programs.arrive(&arrival(&chain(&[(1, 110)])), 2.0);
    assert_eq!(verdict, Verdict::Run(Slot(1 - home.0)));
    programs.placed(turn, Slot(1 - home.0), 2.0);
    // The end of a request of the old instance changes nothing on the new one.
    programs.ended(running, 10, Finish::Stop, 3.0);
    programs.instance_removed(Slot(0));
    programs.instance_removed(Slot(1));
    programs.tick(4.0);
    finish(&mut programs, turn, 5.0);
    programs.tick(6.0);
    assert_eq!(programs.states()[State::Gap as usize], 0);
    assert!(programs.instances().iter().all(|ledger| ledger.expected_tokens() == 0.0));
    programs.check_sets();
}

/// Defect 8: a new program that finds a table full of programs with a turn is refused in `admit`
/// and counted in `observe`.
#[test]
fn a_table_full_of_running_programs_refuses_or_counts() {
    for mode in [ProgramMode::Observe, ProgramMode::Admit] {
        let mut programs = programs(mode, &[1e12]);
        for name in 0..MAX_PROGRAMS as u64 {
            run(&mut programs, &chain(&[(name + 10, 16)]), 1.0);
        }
        let (turn, verdict) = programs.arrive(&arrival(&chain(&[(1, 16)])), 2.0);
        assert_eq!(programs.counters().untracked, 1);
        match mode {
            ProgramMode::Admit => assert!(matches!(verdict, Verdict::Refused { .. }), "{verdict:?}"),
            ProgramMode::Observe | ProgramMode::Auto => {
                assert_eq!(verdict, Verdict::Free);
                programs.placed(turn, Slot(0), 2.0);
                programs.ended(turn, 1, Finish::Stop, 3.0);
            }
        }
        assert_eq!(programs.iter().count(), MAX_PROGRAMS);
    }
}

/// A client ends a session with thousands of programs and running requests.
#[test]
fn the_end_of_a_session_goes_through_its_own_programs_and_turns_once() {
    let mut programs = programs(ProgramMode::Observe, &[1e9]);
    let start = |programs: &mut Programs, session: u64, fork: u64| {
        let chain = chain(&[(session, 32), (100 + fork, 32)]);
        let (turn, _) = programs.arrive(&Arrival { session: Some(session), ..arrival(&chain) }, 1.0);
        programs.placed(turn, Slot(0), 1.0);
        turn
    };
    let turns: Vec<TurnId> = (0..4000).map(|fork| start(&mut programs, 1, fork)).collect();
    let others: Vec<TurnId> = (0..4000).map(|fork| start(&mut programs, 2, fork)).collect();
    assert_eq!((programs.iter().count(), programs.of_session(1).len()), (8000, 4000));
    for (ended, session) in [(4000, 1), (0, 1), (0, 3)] {
        programs.walked.set(0);
        assert_eq!(programs.finish_session(session, 2.0), ended);
        assert!(programs.walked.get() <= 12_000, "{}", programs.walked.get());
    }
    turns.into_iter().chain(others).for_each(|turn| finish(&mut programs, turn, 3.0));
    assert_eq!((programs.states(), programs.of_session(2).len()), ([0, 4000, 4000, 0], 4000));
    assert_eq!(programs.finish_session(2, 4.0), 4000);
    assert_eq!(programs.states(), [0, 0, 8000, 0]);
    programs.check_sets();
}

/// Programs of peers make room in a table that is copied before own ones do.
#[test]
fn programs_of_peers_are_dropped_before_own_ones() {
    let (mut programs, now) = full(ProgramMode::Admit, 3);
    let row = PeerProgram {
        key: 0,
        turn: 1,
        state: State::Paused,
        home: None,
        tenant: 0,
        weight: 1.0,
        level: 0,
        session: None,
        age_seconds: 0.0,
        rest_seconds: 0.0,
        tokens: 1000,
        base: None,
        parent: 0,
        finish: Finish::Stop,
        flags: [false; 4],
        prompt: Prompt::default(),
    };
    let rows = (1..=10).map(|key| PeerProgram { key, rest_seconds: 10.0 - key as f64, ..row.clone() });
    let message = PeerPrograms { programs: rows.collect(), ..PeerPrograms::default() };
    programs.hear(1, &message, &[], true, now + 100.0);
    for (most, own, left) in [(9, 3, 9), (3, 3, 3), (2, 2, 2)] {
        programs.drop_to(most, now + 100.0);
        assert_eq!((programs.own_states().iter().sum::<usize>(), programs.iter().count()), (own, left));
        // The oldest go first.
        let keys = programs.iter().map(|(_, program)| program.key).filter(|key| *key <= 10);
        assert!(keys.eq((1..=10).skip(10 + own - left)), "{most}");
    }
    programs.check_sets();
}

/// All peers are gone, and changes are noted for none of them.
#[test]
fn notes_of_changes_for_peers_are_bounded() {
    let mut programs = programs(ProgramMode::Observe, &[1e12]);
    programs.changed = Some(BTreeSet::new());
    for name in 0..=MAX_PROGRAMS as u64 {
        let turn = run(&mut programs, &chain(&[(name + 10, 16)]), name as f64);
        finish(&mut programs, turn, name as f64);
    }
    assert!(programs.changed.is_none());
}

/// An instance that was kept for a held program is removed, and another one gets its slot.
#[test]
fn a_new_instance_is_not_kept_for_a_program_that_waited_for_its_predecessor() {
    let mut programs = programs(ProgramMode::Admit, &[16_000.0, 16_000.0]);
    fn of(tenant: u64, chain: &[u64]) -> Arrival<'_> {
        Arrival { tenant, ..arrival(chain) }
    }
    // Tenant 1 has a running and a resting program on each instance.
    for (slot, name) in [(0, 1), (1, 2)] {
        for (name, blocks, rests) in [(name, 150, false), (name + 10, 20, true)] {
            let (turn, _) = programs.arrive(&of(1, &chain(&[(name, blocks)])), 0.0);
            programs.placed(turn, Slot(slot), 0.0);
            if rests {
                programs.ended(turn, 10, Finish::ToolCalls, 0.0);
            }
        }
    }
    // Its instance is kept for the program of tenant 2, once the resting program has left.
    let (_, verdict) = programs.arrive(&of(2, &chain(&[(3, 200)])), 0.0);
    assert!(matches!(verdict, Verdict::Held(_)), "{verdict:?}");
    programs.tick(3.0);
    let kept = programs.instances().iter().position(|ledger| ledger.programs == 1);
    let kept = Slot(kept.expect("a program was paused") as u32);
    programs.instance_removed(kept);
    programs.set_instance(kept, Some(6_000.0), true);
    let (other, verdict) = programs.arrive(&arrival(&chain(&[(4, 10)])), 3.1);
    assert_eq!(verdict, Verdict::Free); // outside programs
    programs.placed(other, kept, 3.1);
    let (_, verdict) = programs.arrive(&of(2, &chain(&[(5, 30)])), 3.2);
    assert_eq!(verdict, Verdict::Run(kept));
}

/// The worker that has the request got a copy of the programs before it took what was released.
#[test]
fn a_request_is_released_again_after_the_removal_of_its_instance() {
    let mut programs = programs(ProgramMode::Admit, &[16_000.0]);
    let running = run(&mut programs, &chain(&[(1, 100)]), 0.0);
    run(&mut programs, &chain(&[(2, 100)]), 0.0);
    let (held, verdict) = programs.arrive(&arrival(&chain(&[(3, 100)])), 1.0);
    assert!(matches!(verdict, Verdict::Held(_)), "{verdict:?}");
    finish(&mut programs, running, 2.0);
    programs.tick(303.0);
    assert_eq!((programs.released().len(), programs.assigned(held)), (1, Some(Slot(0))));
    programs.instance_removed(Slot(0));
    programs.release_again(0);
    assert_eq!((programs.released(), programs.assigned(held)), (vec![held], None));
}
