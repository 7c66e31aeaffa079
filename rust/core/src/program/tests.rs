//! Programs, turns and admission.
use super::exchange::PeerPrograms;
use super::lineage::Lineage;
use super::{
    Arrival, Finish, GapClass, Gaps, Program, ProgramConfig, ProgramMode, ProgramRules, Programs, State,
    Terms, TurnId, Verdict, Work,
};
use crate::ids::{Seconds, Slot};
use proptest::prelude::*;
use std::sync::Arc;

const BLOCK: u32 = 64;

/// A chain that names blocks by a family: `parts` are (name, blocks).
pub fn chain(parts: &[(u64, u32)]) -> Vec<u64> {
    let mut hash = 0u64;
    let mut chain = Vec::new();
    for &(name, blocks) in parts {
        for i in 0..blocks {
            hash = (hash ^ (name << 32 | u64::from(i))).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29);
            chain.push(hash);
        }
    }
    chain
}

pub fn arrival(chain: &[u64]) -> Arrival<'_> {
    Arrival {
        chain,
        prompt_tokens: chain.len() as u32 * BLOCK,
        tokens_per_block: f64::from(BLOCK),
        weight: 1.0,
        ..Arrival::default()
    }
}

/// The core's rules, but programs always return to their instance.
#[derive(Debug)]
pub struct Returning;

impl ProgramRules for Returning {
    fn terms(&self) -> Terms {
        Terms { free: 0.0, ..Terms::default() }
    }
}

/// Rules that differ from the core's wherever rules can.
#[derive(Debug)]
struct Contrary;

impl ProgramRules for Contrary {
    fn terms(&self) -> Terms {
        Terms {
            shared_roots: false,
            waits_for_children: false,
            returns_home: false,
            ends_long_holds: false,
            free: 0.0,
            pause_to: Some(0.9),
            max_wait_seconds: 1e9,
        }
    }

    fn returns(&self, _: &Gaps, _: GapClass, gap: Seconds) -> f64 {
        (-gap / 30.0).exp2()
    }

    fn pause_rank(&self, _: &Gaps, program: &Program, _: Seconds) -> f64 {
        program.tokens
    }

    fn admission_rank(&self, program: &Program) -> Option<u64> {
        Some(program.tokens as u64)
    }
}

pub fn programs(mode: ProgramMode, capacities: &[f64]) -> Programs {
    let config = ProgramConfig {
        mode,
        theta: 1.0,
        growth: 0.0,
        rules: Some(Arc::new(Returning)),
        forget_seconds: 300.0,
        min_tokens: 1000,
        max_hold_seconds: 1e9,
        ..ProgramConfig::default()
    };
    let mut programs = Programs::new(config).unwrap();
    for (slot, capacity) in capacities.iter().enumerate() {
        programs.set_instance(Slot(slot as u32), Some(*capacity), true);
    }
    programs
}

/// Runs a turn to its end on the verdict's instance, or on instance 0.
pub fn run(programs: &mut Programs, chain: &[u64], at: Seconds) -> TurnId {
    let (turn, verdict) = programs.arrive(&arrival(chain), at);
    let instance = if let Verdict::Run(instance) = verdict { instance } else { Slot(0) };
    assert!(!matches!(verdict, Verdict::Held(_)), "{verdict:?}");
    programs.placed(turn, instance, at);
    turn
}

pub fn finish(programs: &mut Programs, turn: TurnId, at: Seconds) {
    programs.ended(turn, 10, Finish::ToolCalls, at);
}

#[test]
fn a_longer_prompt_is_the_next_turn_and_one_that_leaves_earlier_a_fork() {
    let mut programs = programs(ProgramMode::Observe, &[1e6]);
    let turn = run(&mut programs, &chain(&[(1, 100)]), 0.0);
    finish(&mut programs, turn, 1.0);
    let turn = run(&mut programs, &chain(&[(1, 100), (2, 20)]), 2.0);
    assert_eq!((programs.counters().new_programs, programs.counters().continuations), (1, 1));
    finish(&mut programs, turn, 3.0);
    // It leaves the program behind its first prompt, inside the second.
    let fork = run(&mut programs, &chain(&[(1, 100), (3, 30)]), 4.0);
    assert_eq!((programs.counters().forks, programs.iter().count()), (1, 2));
    let program = programs.program_of(fork).unwrap();
    assert_eq!(program.base().unwrap().tokens, f64::from(100 * BLOCK));
    assert_eq!(program.own_tokens(), f64::from(30 * BLOCK));
    // The parent's context has the fork's base, and the parent waits for the fork: both together
    // count at least 0.9 x 120 + 30 blocks.
    programs.tick(4.0);
    let expected = programs.instances()[0].expected_tokens();
    assert!(expected >= f64::from(138 * BLOCK) && expected <= f64::from(150 * BLOCK) + 10.0, "{expected}");
}

#[test]
fn a_shared_system_prompt_counts_once() {
    let mut programs = programs(ProgramMode::Observe, &[1e6]);
    for name in 10..14 {
        run(&mut programs, &chain(&[(1, 200), (name, 20)]), 0.0);
    }
    assert_eq!((programs.counters().new_programs, programs.counters().forks), (4, 0));
    // The first program counts whole; the others share a root that ends at most 6% before 200.
    let (own, roots, _) = programs.instances()[0].parts();
    assert!((188.0..=200.0).contains(&(roots / f64::from(BLOCK))), "{roots}");
    assert!(own < f64::from(BLOCK) * (220.0 + 3.0 * 32.0 + 1.0), "{own}");
}

#[test]
fn short_prompts_are_chats() {
    let mut programs = programs(ProgramMode::Admit, &[1000.0]);
    for _ in 0..5 {
        let (turn, verdict) = programs.arrive(&arrival(&chain(&[(1, 10)])), 0.0);
        assert_eq!(verdict, Verdict::Free);
        programs.placed(turn, Slot(0), 0.0);
        programs.ended(turn, 60, Finish::Stop, 1.0);
    }
    assert_eq!(programs.counters().chats, 5);
    // They count for a while: 5 x (640 + 60).
    assert_eq!(programs.instances()[0].expected_tokens(), 3500.0);
    programs.tick(40.0);
    assert_eq!(programs.instances()[0].expected_tokens(), 0.0);
}

#[test]
fn a_program_waits_until_another_is_gone_and_older_ones_go_first() {
    // Two programs of 6,400 tokens fit below resume x capacity = 13,600, three do not.
    let mut programs = programs(ProgramMode::Admit, &[16_000.0]);
    let a = run(&mut programs, &chain(&[(1, 100)]), 0.0);
    let b = run(&mut programs, &chain(&[(2, 100)]), 1.0);
    let (c, verdict) = programs.arrive(&arrival(&chain(&[(3, 100)])), 2.0);
    assert!(matches!(verdict, Verdict::Held(hold) if hold.held_programs == 1), "{verdict:?}");
    let (d, verdict) = programs.arrive(&arrival(&chain(&[(4, 100)])), 3.0);
    assert!(matches!(verdict, Verdict::Held(hold) if hold.held_programs == 2), "{verdict:?}");
    finish(&mut programs, a, 4.0);
    programs.tick(5.0);
    assert!(programs.released().is_empty(), "a may return");
    // After 300 s, a counts as ended, and b, which still runs, leaves room for one more.
    programs.tick(305.0);
    let released = programs.released();
    assert_eq!((released, programs.counters().held_seconds), (vec![c], 303.0));
    programs.placed(c, Slot(0), 305.0);
    finish(&mut programs, b, 306.0);
    finish(&mut programs, c, 306.0);
    programs.tick(700.0);
    assert_eq!(programs.released(), [d]);
    assert_eq!(programs.counters().admitted, 2);
}

#[test]
fn a_mode_that_holds_nothing_releases_what_was_held() {
    for mode in [ProgramMode::Observe, ProgramMode::Auto] {
        let mut programs = programs(ProgramMode::Admit, &[16_000.0]);
        run(&mut programs, &chain(&[(1, 100)]), 0.0);
        run(&mut programs, &chain(&[(2, 100)]), 0.0);
        let (held, verdict) = programs.arrive(&arrival(&chain(&[(3, 200)])), 1.0);
        assert!(matches!(verdict, Verdict::Held(_)), "{verdict:?}");
        let config = ProgramConfig { mode, ..programs.config().clone() };
        programs.set_config(config).unwrap();
        programs.tick(2.0);
        assert_eq!(programs.released(), [held]);
        assert_eq!(programs.states()[State::Held as usize], 0);
    }
}

#[test]
fn another_time_for_recent_requests_forgets_them() {
    let mut programs = programs(ProgramMode::Admit, &[1000.0]);
    let (turn, _) = programs.arrive(&arrival(&chain(&[(1, 10)])), 3600.0);
    programs.placed(turn, Slot(0), 3600.0);
    programs.ended(turn, 60, Finish::Stop, 3600.0);
    programs.set_config(ProgramConfig { others_seconds: 60.0, ..programs.config().clone() }).unwrap();
    let (turn, _) = programs.arrive(&arrival(&chain(&[(1, 10)])), 3601.0);
    programs.placed(turn, Slot(0), 3601.0);
    programs.ended(turn, 60, Finish::Stop, 3601.0);
    assert_eq!(programs.instances()[0].expected_tokens(), 700.0);
    programs.tick(3700.0);
    assert_eq!(programs.instances()[0].expected_tokens(), 0.0);
}

#[test]
fn a_crowded_instance_pauses_the_program_that_returns_last() {
    let mut programs = programs(ProgramMode::Admit, &[20_000.0]);
    let a = run(&mut programs, &chain(&[(1, 100)]), 0.0);
    let b = run(&mut programs, &chain(&[(2, 100)]), 0.0);
    finish(&mut programs, a, 1.0);
    finish(&mut programs, b, 100.0);
    // The next turn of b is long: together they exceed the cache, and a has been away for long.
    let b = run(&mut programs, &chain(&[(2, 100), (5, 205)]), 101.0);
    programs.tick(101.5);
    assert_eq!(programs.states(), [1, 0, 1, 0]);
    // When a returns, it waits for b.
    let (a, verdict) = programs.arrive(&arrival(&chain(&[(1, 110)])), 102.0);
    assert!(matches!(verdict, Verdict::Held(_)), "{verdict:?}");
    finish(&mut programs, b, 103.0);
    programs.tick(104.0);
    assert!(programs.released().is_empty());
    programs.tick(404.0);
    assert_eq!(programs.released().len(), 1);
    programs.ended(a, 0, Finish::Unknown, 405.0); // its client has left before it was sent
    assert_eq!(programs.states(), [0, 1, 1, 0]);
}

#[test]
fn a_program_larger_than_every_cache_runs_alone() {
    let mut programs = programs(ProgramMode::Admit, &[1000.0, 1000.0]);
    run(&mut programs, &chain(&[(1, 100)]), 0.0);
    run(&mut programs, &chain(&[(2, 100)]), 0.0);
    let (_, verdict) = programs.arrive(&arrival(&chain(&[(3, 100)])), 0.0);
    assert!(matches!(verdict, Verdict::Held(_)));
}

#[test]
fn held_requests_of_clients_that_leave_are_dropped() {
    let mut programs = programs(ProgramMode::Admit, &[10_000.0]);
    run(&mut programs, &chain(&[(1, 100)]), 0.0);
    let (held, verdict) = programs.arrive(&arrival(&chain(&[(2, 100)])), 0.0);
    assert!(matches!(verdict, Verdict::Held(_)));
    // The client sends the same request again while the first is held.
    let (again, verdict) = programs.arrive(&arrival(&chain(&[(2, 100)])), 1.0);
    assert!(matches!(verdict, Verdict::Held(hold) if hold.held_programs == 1), "{verdict:?}");
    programs.ended(held, 0, Finish::Unknown, 2.0);
    assert_eq!(programs.states(), [1, 0, 0, 1]);
    programs.ended(again, 0, Finish::Unknown, 3.0);
    assert_eq!((programs.states(), programs.iter().count()), ([1, 0, 0, 0], 1));
}

#[test]
fn a_turn_that_leaves_does_not_take_the_other_held_turns_along() {
    let mut programs = programs(ProgramMode::Admit, &[10_000.0, 10_000.0]);
    let running = run(&mut programs, &chain(&[(1, 100)]), 0.0);
    run(&mut programs, &chain(&[(2, 100)]), 0.0);
    // Its instance goes while a turn runs; two further turns of it find no room elsewhere.
    let home = programs.program_of(running).unwrap().home.unwrap().instance;
    programs.set_instance(home, Some(10_000.0), false);
    let (first, _) = programs.arrive(&arrival(&chain(&[(1, 100)])), 1.0);
    let (second, verdict) = programs.arrive(&arrival(&chain(&[(1, 100)])), 1.0);
    assert!(matches!(verdict, Verdict::Held(hold) if hold.held_programs == 1), "{verdict:?}");
    programs.ended(first, 0, Finish::Unknown, 2.0);
    assert_eq!(programs.states(), [1, 0, 0, 1]);
    programs.ended(second, 0, Finish::Unknown, 3.0);
    assert_eq!((programs.states(), programs.queue.len()), ([2, 0, 0, 0], 0));
    finish(&mut programs, running, 4.0);
    assert_eq!(programs.states(), [1, 1, 0, 0]);
}

#[test]
fn observed_programs_never_change_a_placement() {
    let mut programs = programs(ProgramMode::Observe, &[10_000.0]);
    for round in 0..3 {
        for name in 0..4 {
            let (turn, verdict) = programs.arrive(&arrival(&chain(&[(name, 100 + round)])), f64::from(round));
            assert_eq!((verdict, programs.assigned(turn)), (Verdict::Free, None));
            programs.placed(turn, Slot(0), f64::from(round));
            finish(&mut programs, turn, f64::from(round) + 0.5);
        }
        programs.tick(f64::from(round) + 0.5);
    }
    // `admit` would have held three of the four programs.
    assert_eq!((programs.counters().held, programs.counters().paused), (3, 0));
}

#[test]
fn tenants_share_the_cache_whatever_they_ask_for() {
    let mut programs = programs(ProgramMode::Admit, &[16_000.0]);
    let arrive = |programs: &mut Programs, tenant: u64, name: u64, at: Seconds| {
        let chain = chain(&[(name, 100)]);
        programs.arrive(&Arrival { tenant, ..arrival(&chain) }, at)
    };
    let mut running = Vec::new();
    for name in 0..20 {
        let (turn, verdict) = arrive(&mut programs, 1, 100 + name, 0.0);
        if let Verdict::Run(instance) = verdict {
            programs.placed(turn, instance, 0.0);
            running.push(turn);
        }
    }
    assert_eq!(running.len(), 2);
    let (other, verdict) = arrive(&mut programs, 2, 200, 1.0);
    assert!(matches!(verdict, Verdict::Held(_)));
    // 18 older programs of tenant 1 wait, but tenant 2 has nothing in the cache.
    finish(&mut programs, running[0], 2.0);
    programs.tick(303.0);
    assert_eq!(programs.released()[0], other);
}

#[test]
fn a_flood_of_new_programs_is_refused_with_a_time() {
    let mut programs = programs(ProgramMode::Admit, &[16_000.0]);
    programs.config.max_hold_seconds = 600.0;
    let mut refused = 0;
    for name in 0..50 {
        match programs.arrive(&arrival(&chain(&[(name, 100)])), 1.0) {
            (turn, Verdict::Run(instance)) => programs.placed(turn, instance, 1.0),
            (_, Verdict::Refused { retry_after_seconds }) => {
                assert!((600.0..=3600.0).contains(&retry_after_seconds));
                refused += 1;
            }
            (_, verdict) => assert!(matches!(verdict, Verdict::Held(_)), "{verdict:?}"),
        }
    }
    // Two run, so in 600 s about 22 more of their size are expected to be admitted. The others are
    // refused and leave nothing behind.
    assert_eq!((refused, programs.iter().count()), (26, 24));
    // Tenants take turns, so the flood does not count for another one.
    let chain = chain(&[(60, 100)]);
    let (_, verdict) = programs.arrive(&Arrival { tenant: 9, ..arrival(&chain) }, 1.0);
    assert!(matches!(verdict, Verdict::Held(hold) if hold.expected_seconds < 60.0), "{verdict:?}");
}

#[test]
fn a_roomy_instance_leaves_the_choice_to_the_policy() {
    let mut programs = programs(ProgramMode::Admit, &[100_000.0]);
    programs.terms.free = 0.1;
    let a = run(&mut programs, &chain(&[(1, 100)]), 0.0);
    finish(&mut programs, a, 1.0);
    let (turn, verdict) = programs.arrive(&arrival(&chain(&[(1, 110)])), 2.0);
    assert_eq!(verdict, Verdict::Free);
    programs.placed(turn, Slot(0), 2.0);
    // A second program makes it less roomy.
    let (_, verdict) = programs.arrive(&arrival(&chain(&[(2, 100)])), 3.0);
    assert_eq!(verdict, Verdict::Run(Slot(0)));
}

#[test]
fn a_program_that_returns_late_keeps_its_birth() {
    let mut programs = programs(ProgramMode::Admit, &[16_000.0]);
    let a = run(&mut programs, &chain(&[(1, 100)]), 0.0);
    finish(&mut programs, a, 1.0);
    programs.tick(400.0);
    assert_eq!((programs.states(), programs.counters().forgotten), ([0, 0, 1, 0], 1));
    run(&mut programs, &chain(&[(1, 110)]), 500.0);
    assert_eq!((programs.iter().count(), programs.iter().next().unwrap().1.born), (1, 0.0));
    assert_eq!(programs.counters().continuations, 1);
}

#[test]
fn an_instance_that_is_gone_pauses_its_programs() {
    let mut programs = programs(ProgramMode::Admit, &[20_000.0, 20_000.0]);
    let a = run(&mut programs, &chain(&[(1, 100)]), 0.0);
    finish(&mut programs, a, 1.0);
    let home = programs.iter().next().unwrap().1.home.unwrap().instance;
    programs.set_instance(home, Some(20_000.0), false);
    programs.tick(2.0);
    assert_eq!(programs.states(), [0, 0, 1, 0]);
    let (_, verdict) = programs.arrive(&arrival(&chain(&[(1, 110)])), 3.0);
    assert_eq!(verdict, Verdict::Run(Slot(1 - home.0)));
}

#[test]
fn a_session_names_its_program_when_its_history_was_rewritten() {
    let mut programs = programs(ProgramMode::Observe, &[1e6]);
    let first = chain(&[(1, 100)]);
    let (turn, _) = programs.arrive(&Arrival { session: Some(9), ..arrival(&first) }, 0.0);
    programs.placed(turn, Slot(0), 0.0);
    finish(&mut programs, turn, 1.0);
    let other = chain(&[(2, 50)]);
    programs.arrive(&Arrival { session: Some(9), ..arrival(&other) }, 2.0);
    assert_eq!((programs.iter().count(), programs.counters().continuations), (1, 1));
    // Another tenant's session of that name is another program.
    let third = chain(&[(3, 50)]);
    programs.arrive(&Arrival { session: Some(9), tenant: 5, ..arrival(&third) }, 3.0);
    assert_eq!(programs.iter().count(), 2);
}

#[test]
fn a_program_whose_client_says_that_it_ended_frees_its_place_at_once() {
    let mut programs = programs(ProgramMode::Admit, &[10_000.0]);
    let (a, verdict) = programs.arrive(&Arrival { last: true, ..arrival(&chain(&[(1, 100)])) }, 0.0);
    assert_eq!(verdict, Verdict::Run(Slot(0)));
    programs.placed(a, Slot(0), 0.0);
    let (b, verdict) = programs.arrive(&arrival(&chain(&[(2, 100)])), 1.0);
    assert!(matches!(verdict, Verdict::Held(_)), "{verdict:?}");
    finish(&mut programs, a, 2.0);
    programs.tick(2.5);
    assert_eq!(programs.released(), [b]);
    // It did not count as a program that stayed away, and a fork of it is still found.
    assert_eq!((programs.states(), programs.counters().forgotten), ([1, 0, 1, 0], 0));
    programs.arrive(&arrival(&chain(&[(1, 50), (3, 60)])), 3.0);
    assert_eq!(programs.counters().new_programs, 3);
    programs.arrive(&arrival(&chain(&[(1, 100), (3, 60)])), 4.0);
    assert_eq!(programs.counters().continuations, 1);
}

#[test]
fn a_session_that_its_client_ends_frees_the_places_of_its_programs() {
    let mut programs = programs(ProgramMode::Admit, &[10_000.0]);
    let (first, second) = (chain(&[(1, 100)]), chain(&[(2, 100)]));
    let (a, _) = programs.arrive(&Arrival { session: Some(1), ..arrival(&first) }, 0.0);
    programs.placed(a, Slot(0), 0.0);
    let (b, verdict) = programs.arrive(&Arrival { session: Some(2), ..arrival(&second) }, 1.0);
    assert!(matches!(verdict, Verdict::Held(_)), "{verdict:?}");
    assert!(programs.of_session(3).is_empty());
    programs.finish_session(3, 1.0); // unknown
    // A running program ends with its request.
    assert_eq!(programs.of_session(1).len(), 1);
    programs.finish_session(1, 1.0);
    assert!(programs.of_session(1).is_empty());
    finish(&mut programs, a, 2.0);
    programs.tick(2.5);
    assert_eq!(programs.released(), [b]);
    // A program between two requests ends at once, and comes back if a request continues it.
    programs.placed(b, Slot(0), 3.0);
    finish(&mut programs, b, 4.0);
    programs.tick(4.5);
    assert_eq!(programs.states()[State::Gap as usize], 1);
    programs.finish_session(2, 5.0);
    assert_eq!(programs.states()[State::Gap as usize], 0);
    assert!(programs.of_session(2).is_empty());
    assert!(programs.instances()[0].expected_tokens() < 1.0);
    let (_, verdict) = programs.arrive(&arrival(&chain(&[(2, 110)])), 6.0);
    assert_eq!(verdict, Verdict::Run(Slot(0)));
    assert_eq!(programs.of_session(2).len(), 1);
    programs.check_sets();
}

/// Two instances with a program each, and a held program that can only run alone.
fn beside_a_large_program(shortest_first: bool) -> (Programs, TurnId) {
    let mut programs = programs(ProgramMode::Admit, &[16_000.0, 16_000.0]);
    (programs.config.shortest_first, programs.config.backfill_seconds) = (shortest_first, 120.0);
    for name in [1, 2] {
        let (turn, verdict) = programs.arrive(&arrival(&chain(&[(name, 20)])), 0.0);
        let Verdict::Run(instance) = verdict else { panic!("{verdict:?}") };
        programs.placed(turn, instance, 0.0);
    }
    let (alone, verdict) = programs.arrive(&arrival(&chain(&[(3, 230)])), 0.0);
    assert!(matches!(verdict, Verdict::Held(_)), "{verdict:?}");
    programs.tick(130.0);
    (programs, alone)
}

#[test]
fn a_program_that_can_only_run_alone_reserves_one_instance_and_holds_nobody_else() {
    for shortest_first in [true, false] {
        // Beyond the time for backfill, the other instance still takes programs.
        let (mut programs, _) = beside_a_large_program(shortest_first);
        let (_, verdict) = programs.arrive(&arrival(&chain(&[(4, 20)])), 131.0);
        assert_eq!(verdict, Verdict::Run(Slot(1)));
    }
}

#[test]
fn a_program_that_waits_for_long_holds_younger_ones_back() {
    for shortest_first in [true, false] {
        let (mut programs, alone) = beside_a_large_program(shortest_first);
        programs.ended(alone, 0, Finish::Unknown, 131.0);
        for name in [5, 6] {
            let (_, verdict) = programs.arrive(&arrival(&chain(&[(name, 200)])), 132.0);
            assert!(matches!(verdict, Verdict::Held(_)), "{verdict:?}");
        }
        programs.tick(260.0);
        // One instance is kept for it. If the oldest go first, no instance takes another program.
        for (name, taken) in [(7, shortest_first), (8, false)] {
            let (turn, verdict) = programs.arrive(&arrival(&chain(&[(name, 100)])), 261.0);
            assert_eq!(matches!(verdict, Verdict::Run(_)), taken, "{verdict:?}");
            if let Verdict::Run(instance) = verdict {
                programs.placed(turn, instance, 261.0);
            }
        }
    }
}

#[test]
fn a_retry_elsewhere_releases_the_held_turns_of_its_program() {
    let mut programs = programs(ProgramMode::Admit, &[10_000.0, 10_000.0]);
    let running = run(&mut programs, &chain(&[(1, 100)]), 0.0);
    run(&mut programs, &chain(&[(2, 100)]), 0.0);
    let home = programs.program_of(running).unwrap().home.unwrap().instance;
    programs.set_instance(home, Some(10_000.0), false);
    let (held, verdict) = programs.arrive(&arrival(&chain(&[(1, 100)])), 1.0);
    assert!(matches!(verdict, Verdict::Held(_)), "{verdict:?}");
    let other = Slot(1 - home.0);
    programs.placed(running, other, 2.0);
    let released = programs.released();
    assert_eq!((released.len(), programs.assigned(released[0])), (1, Some(other)));
    assert_eq!(released[0], held);
    assert_eq!((programs.states(), programs.queue.len()), ([2, 0, 0, 0], 0));
    programs.placed(held, other, 2.0);
    finish(&mut programs, running, 3.0);
    finish(&mut programs, held, 3.0);
    assert_eq!(programs.states(), [1, 1, 0, 0]);
}

/// A second attempt of a turn, on another instance, that loses.
#[test]
fn a_program_is_where_its_turn_runs_after_another_attempt_has_ended() {
    let mut programs = programs(ProgramMode::Admit, &[10_000.0, 10_000.0]);
    let main = run(&mut programs, &chain(&[(1, 100)]), 0.0);
    let home = programs.program_of(main).unwrap().home;
    let first = home.unwrap().instance;
    let (hedge, verdict) = programs.arrive(&arrival(&chain(&[(1, 100)])), 1.0);
    assert_eq!(verdict, Verdict::Run(first));
    let other = Slot(1 - first.0);
    programs.placed(hedge, other, 1.0);
    assert!(programs.instances()[other.index()].expected_tokens() > 6000.0);
    programs.ended(hedge, 0, Finish::Unknown, 2.0);
    assert_eq!(programs.program_of(main).unwrap().home, home);
    assert!(programs.instances()[first.index()].expected_tokens() > 6000.0);
    assert_eq!(programs.instances()[other.index()].expected_tokens(), 0.0);
    finish(&mut programs, main, 3.0);
    let (next, verdict) = programs.arrive(&arrival(&chain(&[(1, 110)])), 4.0);
    assert_eq!(verdict, Verdict::Run(first));
    // If the second attempt wins, its instance has the context.
    programs.placed(next, first, 4.0);
    let (hedge, _) = programs.arrive(&arrival(&chain(&[(1, 110)])), 5.0);
    programs.placed(hedge, other, 5.0);
    programs.ended(next, 0, Finish::Unknown, 6.0);
    finish(&mut programs, hedge, 7.0);
    let (next, verdict) = programs.arrive(&arrival(&chain(&[(1, 120)])), 8.0);
    assert_eq!(verdict, Verdict::Run(other));
    // Also if the other attempt is canceled only after its end.
    programs.placed(next, first, 8.0);
    let (hedge, _) = programs.arrive(&arrival(&chain(&[(1, 120)])), 9.0);
    programs.placed(hedge, other, 9.0);
    programs.ended(hedge, 300, Finish::Stop, 10.0);
    programs.ended(next, 0, Finish::Unknown, 11.0);
    let (_, verdict) = programs.arrive(&arrival(&chain(&[(1, 130)])), 12.0);
    assert_eq!(verdict, Verdict::Run(other));
    programs.check_sets();
}

/// A caller may place a request that is held.
#[test]
fn a_program_whose_only_held_turn_is_placed_leaves_the_queue() {
    let mut programs = programs(ProgramMode::Admit, &[10_000.0]);
    let running = run(&mut programs, &chain(&[(1, 100)]), 0.0);
    let (held, verdict) = programs.arrive(&arrival(&chain(&[(2, 100)])), 1.0);
    assert!(matches!(verdict, Verdict::Held(_)), "{verdict:?}");
    programs.placed(held, Slot(0), 2.0);
    assert_eq!((programs.states(), programs.queue.len()), ([2, 0, 0, 0], 0));
    [running, held].into_iter().for_each(|turn| finish(&mut programs, turn, 3.0));
    programs.check_sets();
}

/// Its turn may run by its program, and waits for room on the instance.
#[test]
fn a_program_that_has_returned_is_not_between_two_turns() {
    for mode in [ProgramMode::Observe, ProgramMode::Admit] {
        let mut programs = programs(mode, &[10_000.0]);
        let turn = run(&mut programs, &chain(&[(1, 100)]), 0.0);
        finish(&mut programs, turn, 1.0);
        let (turn, verdict) = programs.arrive(&arrival(&chain(&[(1, 110)])), 2.0);
        assert!(matches!(verdict, Verdict::Free | Verdict::Run(_)), "{verdict:?}");
        let (other, _) = programs.arrive(&arrival(&chain(&[(2, 100)])), 5.0);
        for now in [301.0, 400.0, 4000.0] {
            programs.tick(now);
            assert_eq!((programs.states()[State::Running as usize], programs.counters().forgotten), (1, 0));
        }
        assert!(programs.released().is_empty(), "its place is not free");
        assert!(programs.instances()[0].expected_tokens() > 6000.0);
        // Its client leaves before it is sent: from then on, the program is between two turns.
        programs.ended(turn, 0, Finish::Unknown, 4001.0);
        assert_eq!(programs.states()[State::Gap as usize], 1);
        programs.ended(other, 0, Finish::Unknown, 4001.0);
        programs.tick(4302.0);
        assert_eq!(programs.counters().forgotten, 1);
        programs.check_sets();
    }
}

#[test]
fn a_client_holds_a_bounded_number_of_turns() {
    let mut programs = programs(ProgramMode::Admit, &[10_000.0]);
    run(&mut programs, &chain(&[(1, 100)]), 0.0);
    let same = chain(&[(2, 100)]);
    let verdicts: Vec<_> = (0..100).map(|_| programs.arrive(&arrival(&same), 1.0).1).collect();
    let held = verdicts.iter().filter(|verdict| matches!(verdict, Verdict::Held(_))).count();
    assert_eq!((held, programs.counters().refused, programs.queue.len()), (64, 36, 1));
}

/// One step of a random history.
#[derive(Clone, Copy, Debug)]
enum Step {
    Arrive {
        program: u64,
        grow: u32,
        tenant: u64,
    },
    End(usize),
    Cancel(usize),
    Tick(u32),
    Fail(u32),
    /// The instance of a slot is removed, and another one gets the slot.
    Replace(u32),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        4 => (0u64..8, 0u32..60, 0u64..3).prop_map(|(program, grow, tenant)| Step::Arrive { program, grow, tenant }),
        4 => any::<usize>().prop_map(Step::End),
        1 => any::<usize>().prop_map(Step::Cancel),
        3 => (0u32..90).prop_map(Step::Tick),
        1 => (0u32..3).prop_map(Step::Fail),
        1 => (0u32..3).prop_map(Step::Replace),
    ];
    prop::collection::vec(step, 1..120)
}

proptest! {
    /// In every history, all requests end, the ledgers return to zero, and held requests are
    /// released once there is room.
    #[test]
    fn nothing_is_lost_and_all_counts_return_to_zero(
        steps in steps(),
        shortest in any::<bool>(),
        contrary in any::<bool>(),
    ) {
        let mut programs = programs(ProgramMode::Admit, &[20_000.0, 16_000.0, 9_000.0]);
        programs.config.shortest_first = shortest;
        if contrary {
            let rules: Arc<dyn ProgramRules> = Arc::new(Contrary);
            let backfill_seconds = 1e9;
            let config =
                ProgramConfig { rules: Some(rules), backfill_seconds, ..programs.config().clone() };
            programs.set_config(config).unwrap();
        }
        let (mut now, mut lengths) = (0.0, [30u32; 8]);
        let (mut held, mut running): (Vec<TurnId>, Vec<TurnId>) = Default::default();
        let take = |programs: &mut Programs, held: &mut Vec<TurnId>, running: &mut Vec<TurnId>, now| {
            for released in programs.released() {
                held.retain(|turn| *turn != released);
                programs.placed(released, programs.assigned(released).unwrap(), now);
                running.push(released);
            }
        };
        for step in steps {
            match step {
                Step::Arrive { program, grow, tenant } => {
                    lengths[program as usize] += grow;
                    let chain = chain(&[(1, 25), (program + 10, lengths[program as usize])]);
                    let last = grow % 5 == 0;
                    let (turn, verdict) = programs.arrive(&Arrival { tenant, last, ..arrival(&chain) }, now);
                    match verdict {
                        Verdict::Held(_) => held.push(turn),
                        Verdict::Refused { .. } => {}
                        Verdict::Run(instance) => { programs.placed(turn, instance, now); running.push(turn); }
                        Verdict::Free => { programs.placed(turn, Slot(0), now); running.push(turn); }
                    }
                }
                Step::End(at) if !running.is_empty() => {
                    let turn = running.swap_remove(at % running.len());
                    programs.ended(turn, 50, Finish::ToolCalls, now);
                }
                Step::Cancel(at) if !held.is_empty() => {
                    let turn = held.swap_remove(at % held.len());
                    programs.ended(turn, 0, Finish::Unknown, now);
                }
                Step::Tick(seconds) => { now += f64::from(seconds); programs.tick(now); }
                Step::Fail(slot) => {
                    let up = programs.instances()[slot as usize].available;
                    programs.set_instance(Slot(slot), Some(15_000.0), !up);
                }
                Step::Replace(slot) => {
                    let id = Slot(slot);
                    programs.instance_removed(id);
                    programs.set_instance(id, Some(15_000.0), true);
                    // Nothing that counted for the removed instance counts for the next one.
                    prop_assert_eq!(programs.instances()[id.index()].expected_tokens(), 0.0);
                    prop_assert!(programs.kept().is_none_or(|(_, kept)| kept != id));
                    prop_assert!(programs.turns.keys().all(|turn| programs.assigned(turn) != Some(id)));
                    prop_assert!(programs.iter().all(|(_, program)| programs.home_of(program) != Some(id)));
                }
                _ => {}
            }
            take(&mut programs, &mut held, &mut running, now);
            programs.check_sets();
            let states = programs.states();
            prop_assert_eq!(states[State::Held as usize], programs.queue.len());
            for ledger in programs.instances() {
                prop_assert!(ledger.expected_tokens() >= 0.0);
            }
        }
        for slot in 0..3 {
            programs.set_instance(Slot(slot), Some(15_000.0), true);
        }
        // All that waits runs in the end.
        for _ in 0..200 {
            for turn in running.drain(..) {
                programs.ended(turn, 5, Finish::Stop, now);
            }
            now += 400.0;
            programs.tick(now);
            take(&mut programs, &mut held, &mut running, now);
            if held.is_empty() && running.is_empty() {
                break;
            }
        }
        prop_assert!(held.is_empty() && running.is_empty(), "{} held", held.len());
        // Parents outlive their children by one tick.
        for tick in 1..100 {
            programs.tick(now + 1000.0 * f64::from(tick));
        }
        programs.check_sets();
        prop_assert_eq!(programs.iter().count(), 0);
        prop_assert_eq!(programs.turns.len(), 0);
        for ledger in programs.instances() {
            prop_assert_eq!(ledger.expected_tokens(), 0.0);
        }
    }

    /// The lineage finds the longest registered prompt that a prompt passes through, as a search
    /// through all of them does.
    #[test]
    fn look_ups_agree_with_a_search(
        prompts in prop::collection::vec((0u64..3, 0u32..300, 0u64..3, 1u32..200), 1..25),
        asked in (0u64..3, 0u32..300, 0u64..3, 1u32..200),
    ) {
        let chain_of = |(family, shared, member, rest): (u64, u32, u64, u32)| {
            chain(&[(family, shared), (10 + member, rest)])
        };
        let mut lineage = Lineage::default();
        let mut ids = slotmap::SlotMap::<super::ProgramId, ()>::with_key();
        let mut registered = Vec::new();
        for prompt in prompts {
            let (id, chain) = (ids.insert(()), chain_of(prompt));
            lineage.register(id, &chain);
            registered.push((id, chain));
        }
        let asked = chain_of(asked);
        let known = lineage.look_up(&asked);
        let longest = registered.iter().map(|(_, chain)| chain).filter(|chain| asked.starts_with(chain));
        let longest = longest.map(|chain| chain.len()).max().unwrap_or(0);
        let common = |chain: &Vec<u64>| chain.iter().zip(&asked).take_while(|(a, b)| a == b).count();
        let most = registered.iter().map(|(_, chain)| common(chain)).max().unwrap_or(0);
        let shared = known.shared.map_or(0, |mark| mark.blocks as usize);
        prop_assert!(shared <= most && most as f64 <= (shared as f64 * 1.06).max(shared as f64 + 4.0) + 1.0,
            "{} of {}", shared, most);
        // A mark before the last known checkpoint may be missed; the sharer's marks then have it.
        if longest >= shared.max(1) {
            prop_assert_eq!(known.mark.map(|(mark, _)| mark.blocks as usize), Some(longest));
        }
        for (id, _) in &registered {
            lineage.remove(*id);
        }
        prop_assert_eq!(lineage.registered(), 0);
    }

    /// In every history, the tree finds what a map of all checkpoints finds.
    #[test]
    fn the_tree_agrees_with_a_map_of_all_checkpoints(
        steps in prop::collection::vec((0usize..6, 0u64..2, 0u32..90, 0u64..3, 0u32..90, 0u32..5), 1..60),
    ) {
        let mut lineage = Lineage::default();
        let mut ids = slotmap::SlotMap::<super::ProgramId, ()>::with_key();
        let mut programs: [_; 6] = std::array::from_fn(|_| (ids.insert(()), Vec::new()));
        // All checkpoints: number of programs, and the latest of them.
        let mut all = std::collections::HashMap::<u64, (u32, super::ProgramId)>::new();
        for (at, family, shared, member, rest, removes) in steps {
            let chain = chain(&[(family, shared), (10 + member, rest)]);
            let places: Vec<u32> = lineage.positions(chain.len() as u32).to_vec();
            let hashes: Vec<u64> = places.iter().map(|place| chain[*place as usize - 1]).collect();
            let found = hashes.iter().zip(&places).take_while(|(hash, _)| all.contains_key(hash)).last();
            let known = lineage.look_up(&chain);
            prop_assert_eq!(known.shared.map(|mark| (mark.hash, mark.blocks)), found.map(|(h, p)| (*h, *p)));
            prop_assert_eq!(known.sharer, found.map(|(hash, _)| all[hash].1));
            let (id, path) = &mut programs[at];
            let new = if removes == 0 { Vec::new() } else { hashes };
            let keep = path.iter().zip(&new).take_while(|(old, new)| old == new).count();
            for hash in &path[keep..] {
                all.get_mut(hash).unwrap().0 -= 1;
            }
            all.retain(|_, (programs, _)| *programs > 0);
            for hash in &new[keep..] {
                let entry = all.entry(*hash).or_insert((0, *id));
                *entry = (entry.0 + 1, *id);
            }
            *path = new;
            if removes == 0 {
                lineage.remove(*id);
                ids.remove(*id);
                *id = ids.insert(());
            } else {
                lineage.register(*id, &chain);
            }
        }
        for (id, _) in &programs {
            lineage.remove(*id);
        }
        prop_assert_eq!(lineage.registered(), 0);
    }
}

/// Runs rounds of programs that find their contexts nowhere, one a second on an instance for two.
/// Returns whether `auto` holds programs afterwards. `hit`: share of the prompt that the cache has.
fn holds_after(programs: &mut Programs, count: u64, hit: f64) -> bool {
    holds_after_rounds(programs, count, hit, [0.5, 0.9, 1.0])
}

/// As [`holds_after`], with the seconds of a prefill, of a request and of a round.
fn holds_after_rounds(
    programs: &mut Programs,
    count: u64,
    hit: f64,
    [seconds, request_seconds, round_seconds]: [Seconds; 3],
) -> bool {
    let mut now = 0.0;
    let mut turns = Vec::new();
    for round in 0..30 {
        for name in 0..count {
            let chain = chain(&[(name + 1, 100), (100 + name, 10 * round + 1)]);
            let prompt = f64::from(arrival(&chain).prompt_tokens);
            let (turn, verdict) = programs.arrive(&arrival(&chain), now);
            if !matches!(verdict, Verdict::Free | Verdict::Run(_)) {
                return programs.holds();
            }
            let (hit_tokens, new_tokens) = (hit * prompt, (1.0 - hit) * prompt);
            let hit_seconds = seconds * hit_tokens / new_tokens;
            programs.computes(turn, Work { new_tokens, hit_tokens, seconds, hit_seconds }, now);
            programs.placed(turn, Slot(0), now);
            turns.push(turn);
        }
        programs.tick(now + request_seconds / 2.0);
        turns.drain(..).for_each(|turn| finish(programs, turn, now + request_seconds));
        now += round_seconds;
    }
    programs.holds()
}

#[test]
fn auto_holds_programs_while_contexts_are_computed_again() {
    let full = || programs(ProgramMode::Auto, &[4_000.0]);
    assert!(holds_after(&mut full(), 5, 0.0), "five programs compute their contexts in each round");
    assert!(!holds_after(&mut full(), 5, 0.98), "the cache has them");
    assert!(!holds_after(&mut full(), 1, 0.0), "nobody waits for one program");
    assert!(holds_after(&mut programs(ProgramMode::Admit, &[4_000.0]), 1, 0.98));
    assert!(!holds_after(&mut programs(ProgramMode::Observe, &[4_000.0]), 5, 0.0));
}

#[test]
fn auto_holds_nothing_if_contexts_are_computed_again_while_programs_pause() {
    let holds = |times| holds_after_rounds(&mut programs(ProgramMode::Auto, &[4_000.0]), 5, 0.0, times);
    // Five programs need eight times the cache, which is computed in 0.02 to 0.06 s.
    assert!(!holds([0.1, 0.1, 1.0]), "pauses of 0.9 s");
    assert!(holds([0.1, 0.99, 1.0]), "pauses of 0.01 s");
}

#[test]
fn an_instance_of_unknown_size_begins_no_holds() {
    let mut programs = programs(ProgramMode::Auto, &[4_000.0]);
    programs.set_instance(Slot(1), None, true);
    assert!(!holds_after_rounds(&mut programs, 5, 0.0, [0.1, 0.1, 1.0]));
}

#[test]
fn auto_begins_to_hold_while_requests_wait_already() {
    let holds = |times| holds_after_rounds(&mut programs(ProgramMode::Auto, &[4_000.0]), 5, 0.0, times);
    // All contexts together are computed in 10 of 40 s: the programs return as seldom.
    assert!(holds([2.0, 39.5, 40.0]), "most of the time in requests");
    assert!(!holds([2.0, 10.0, 40.0]), "most of the time in pauses");
}

#[test]
fn a_router_measures_prefill_and_pauses() {
    let mut programs = programs(ProgramMode::Auto, &[4_000.0]);
    let mut ask = |blocks: u32, work: Work, now: Seconds| {
        let (turn, _) = programs.arrive(&arrival(&chain(&[(1, blocks)])), now);
        programs.computes(turn, work, now);
        programs.placed(turn, Slot(0), now);
        finish(&mut programs, turn, now + 1.0);
        programs.measured
    };
    let first = Work { new_tokens: 6400.0, hit_tokens: 0.0, seconds: 2.0, hit_seconds: 0.0 };
    assert_eq!(ask(100, first, 0.0), [2.0, 0.0, 0.0, 0.0, 0.0, 0.0]);
    // 6,400 tokens are known, 1,600 of them are found.
    let second = Work { new_tokens: 5120.0, hit_tokens: 1600.0, seconds: 1.6, hit_seconds: 0.3 };
    assert_eq!(ask(105, second, 11.0), [3.6, 1.5, 1.8, 4800.0, 10.0, 1.0]);
    // Behind a pause of 300 s, a context counts no more.
    let third = Work { new_tokens: 320.0, hit_tokens: 6720.0, seconds: 0.1, hit_seconds: 1.5 };
    assert_eq!(ask(110, third, 1012.0)[3..], [4800.0, 310.0, 2.0]);
}

#[test]
fn what_peers_measure_counts() {
    // A peer computes contexts of 100 tokens again in 0.8 s, after pauses of 4 or 5 s.
    let pays = |new: [f64; 6]| {
        let mut programs = programs(ProgramMode::Auto, &[1_000.0]);
        for times in 1..=2 {
            let measured = new.map(|amount| f64::from(times) * amount);
            programs.hear(7, &PeerPrograms { measured, ..PeerPrograms::default() }, &[], false, 1.0);
        }
        programs.waste.holds_pay(1, 1_000.0, 2_500.0, 1.0)
    };
    assert!(pays([0.8, 0.8, 0.8, 100.0, 4.0, 1.0]));
    assert!(!pays([0.8, 0.8, 0.8, 100.0, 5.0, 1.0]));
    assert!(pays([0.8, 0.8, 200.0, 100.0, 5.0, 1.0]), "3.3 s per second");
}

#[test]
fn a_new_program_waits_when_auto_has_just_begun_to_hold() {
    let mut programs = programs(ProgramMode::Auto, &[4_000.0]);
    assert!(holds_after(&mut programs, 5, 0.0));
    let (_, verdict) = programs.arrive(&arrival(&chain(&[(77, 100)])), 30.0);
    // The programs that ran before holds began count as admitted.
    let Verdict::Held(hold) = verdict else { panic!("{verdict:?}") };
    assert!(hold.expected_seconds < programs.config.max_hold_seconds, "{hold:?}");
}

#[test]
fn a_hold_without_admissions_is_expected_to_end() {
    let mut programs = programs(ProgramMode::Admit, &[16_000.0]);
    let mut arrive = |name: u64, at: Seconds| {
        let (turn, verdict) = programs.arrive(&arrival(&chain(&[(name, 100)])), at);
        if let Verdict::Run(instance) = verdict {
            programs.placed(turn, instance, at);
        }
        verdict
    };
    assert!(matches!((arrive(1, 0.0), arrive(2, 0.0)), (Verdict::Run(_), Verdict::Run(_))));
    // Both run for an hour. Nothing is known of the rate at which programs leave.
    let Verdict::Held(hold) = arrive(3, 3600.0) else { panic!("held, not refused") };
    assert_eq!(hold.expected_seconds, 300.0);
}

#[test]
fn auto_ends_when_all_programs_have_room() {
    let mut programs = programs(ProgramMode::Auto, &[4_000.0]);
    assert!(holds_after(&mut programs, 5, 0.0));
    // All programs leave: no work, nobody waits, nothing is crowded.
    for at in [400.0, 800.0, 4000.0, 8000.0] {
        programs.tick(at);
        for released in programs.released() {
            programs.placed(released, programs.assigned(released).unwrap(), at);
            finish(&mut programs, released, at + 1.0);
        }
    }
    assert!(!programs.holds());
    let (_, verdict) = programs.arrive(&arrival(&chain(&[(77, 100)])), 8001.0);
    assert_eq!(verdict, Verdict::Free);
}
