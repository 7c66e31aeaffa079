//! Priority levels of held programs.
use super::tests::{arrival, chain, finish, programs};
use super::{AGING_SECONDS, Arrival, ProgramId, ProgramMode, Programs, TurnId, Verdict};
use crate::ids::{Seconds, Slot};
use crate::levels::Key;

/// A request of a new program of 6,400 tokens.
fn arrive(programs: &mut Programs, level: i8, tenant: u64, name: u64, at: Seconds) -> (TurnId, Verdict) {
    let chain = chain(&[(name, 100)]);
    programs.arrive(&Arrival { level, tenant, ..arrival(&chain) }, at)
}

fn hold(programs: &mut Programs, level: i8, tenant: u64, name: u64, at: Seconds) -> TurnId {
    let (turn, verdict) = arrive(programs, level, tenant, name, at);
    assert!(matches!(verdict, Verdict::Held(_)), "{verdict:?}");
    turn
}

/// Fills an instance for two programs. Returns their turns.
fn full(programs: &mut Programs) -> [TurnId; 2] {
    [1, 2].map(|name| {
        let (turn, verdict) = arrive(programs, 0, 1, name, 0.0);
        assert_eq!(verdict, Verdict::Run(Slot(0)));
        programs.placed(turn, Slot(0), 0.0);
        turn
    })
}

fn program_of(programs: &Programs, turn: TurnId) -> ProgramId {
    programs.turns[turn].program.expect("a program")
}

/// Ends a program, and returns the turn that gets its place.
fn next(programs: &mut Programs, running: TurnId, at: Seconds) -> TurnId {
    let id = program_of(programs, running);
    finish(programs, running, at);
    programs.remove(id);
    programs.tick(at);
    let released = programs.released();
    assert_eq!(released.len(), 1, "{released:?}");
    programs.placed(released[0], Slot(0), at);
    released[0]
}

#[test]
fn the_highest_level_gets_the_next_place() {
    let mut programs = programs(ProgramMode::Admit, &[16_000.0]);
    let [a, b] = full(&mut programs);
    let low = hold(&mut programs, -2, 2, 10, 1.0);
    let usual = hold(&mut programs, 0, 3, 11, 2.0);
    let high = hold(&mut programs, 5, 4, 12, 3.0);
    let c = next(&mut programs, a, 4.0);
    assert_eq!(c, high);
    assert_eq!(next(&mut programs, b, 5.0), usual);
    assert_eq!(next(&mut programs, c, 6.0), low);
}

/// Without aging, programs of a higher level that arrive again and again would starve it.
#[test]
fn a_low_program_rises_with_its_hold() {
    let mut programs = programs(ProgramMode::Admit, &[16_000.0]);
    programs.config.backfill_seconds = 1e9;
    programs.terms.ends_long_holds = false;
    let [mut running, _] = full(&mut programs);
    let low = hold(&mut programs, 0, 2, 10, 0.0);
    let rises_at = 3.0 * AGING_SECONDS;
    let mut name = 100;
    for turn in 1.. {
        let at = f64::from(turn);
        name += 1;
        hold(&mut programs, 3, 3, name, at - 0.5);
        running = next(&mut programs, running, at);
        if running == low {
            assert!((rises_at..rises_at + 3.0).contains(&at), "{at}");
            break;
        }
        assert!(at < rises_at + 3.0, "{at}");
    }
}

#[test]
fn a_lower_level_waits_for_all_that_is_above() {
    let mut programs = programs(ProgramMode::Admit, &[16_000.0]);
    full(&mut programs);
    for name in 0..10 {
        hold(&mut programs, 1, 2, 100 + name, 1.0);
    }
    let seconds = |programs: &Programs, level| programs.queue.expected_seconds(Key { level, tenant: 9 }, 2.0);
    hold(&mut programs, 0, 9, 200, 1.0);
    hold(&mut programs, 1, 9, 201, 1.0);
    hold(&mut programs, 2, 9, 202, 1.0);
    let [low, equal, high] = [0, 1, 2].map(|level| seconds(&programs, level));
    assert!(low > 3.0 * equal && equal > 1.5 * high, "{low} {equal} {high}");
}

/// Equal levels take turns by shares, as if there were none.
#[test]
fn one_level_is_no_level() {
    let orders = [0, 4].map(|level| {
        let mut programs = programs(ProgramMode::Admit, &[16_000.0]);
        let [mut running, _] = full(&mut programs);
        for name in 0..9 {
            hold(&mut programs, level, name % 3, 10 + name, 1.0 + name as f64);
        }
        (0..9)
            .map(|turn| {
                running = next(&mut programs, running, 20.0 + f64::from(turn));
                program_of(&programs, running).number()
            })
            .collect::<Vec<_>>()
    });
    assert_eq!(orders[0], orders[1]);
}
