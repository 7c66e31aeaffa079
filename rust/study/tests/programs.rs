//! Rules of programs for studies.
use lmetric_core::Slot;
use lmetric_core::ids::Seconds;
use lmetric_core::program::{Arrival, Finish, ProgramConfig, Programs, TurnId, Verdict};
use lmetric_core::settings::SettingsReader;
use lmetric_study::program::{Thunder, named};

const BLOCK: u32 = 64;

fn arrival(chain: &[u64]) -> Arrival<'_> {
    Arrival {
        chain,
        prompt_tokens: chain.len() as u32 * BLOCK,
        tokens_per_block: f64::from(BLOCK),
        weight: 1.0,
        ..Arrival::default()
    }
}

/// A chain of blocks that no chain of another name has.
fn chain(name: u64, blocks: u64) -> Vec<u64> {
    (0..blocks).map(|i| (name << 32 | i).wrapping_mul(0x9e37_79b9_7f4a_7c15)).collect()
}

/// Begins a turn on the verdict's instance, or on instance 0.
fn run(programs: &mut Programs, chain: &[u64], at: Seconds) -> TurnId {
    let (turn, verdict) = programs.arrive(&arrival(chain), at);
    let instance = if let Verdict::Run(instance) = verdict { instance } else { Slot(0) };
    assert!(!matches!(verdict, Verdict::Held(_)), "{verdict:?}");
    programs.placed(turn, instance, at);
    turn
}

fn finish(programs: &mut Programs, turn: TurnId, at: Seconds) {
    programs.ended(turn, 10, Finish::ToolCalls, at);
}

#[test]
fn thunder_agent_pauses_and_admits_the_shortest_first_and_forgets_homes() {
    let config = ProgramConfig { min_tokens: 1000, theta: 1.0, resume: 1.0, ..ProgramConfig::default() };
    let mut programs = Programs::new(Thunder::default().rule(config).unwrap()).unwrap();
    programs.set_instance(Slot(0), Some(20_000.0), true);
    let long = run(&mut programs, &chain(1, 200), 0.0);
    let short = run(&mut programs, &chain(2, 100), 0.0);
    finish(&mut programs, long, 1.0);
    finish(&mut programs, short, 1.0);
    programs.tick(31.0);
    let half = 0.5 * (12_810.0 + 6_410.0);
    assert!((programs.instances()[0].expected_tokens() - half).abs() < 1.0);
    // A third program fits just so; then the shorter of the first two is paused.
    let third = run(&mut programs, &chain(3, 160), 31.0);
    programs.set_instance(Slot(0), Some(19_000.0), true);
    programs.tick(31.5);
    assert_eq!(programs.states(), [1, 1, 1, 0]);
    programs.set_instance(Slot(1), Some(20_000.0), true);
    finish(&mut programs, third, 32.0);
    let (_, verdict) = programs.arrive(&arrival(&chain(2, 110)), 33.0);
    assert_eq!(verdict, Verdict::Run(Slot(1)));
}

fn read(kind: &str, settings: &[(&str, f64)]) -> Result<Option<ProgramConfig>, String> {
    let given = settings.iter().map(|(name, value)| (name.to_string(), Ok(*value)));
    let mut reader = SettingsReader::new("programs", given);
    let config = named(kind, &mut reader).map_err(|error| error.to_string())?;
    reader.finish().map_err(|error| error.to_string())?;
    Ok(config)
}

#[test]
fn kinds_and_settings_are_checked() {
    let rules = |kind, settings: &[_]| read(kind, settings).unwrap().expect("a kind").rules.is_some();
    assert!(read("none", &[]).unwrap().is_none());
    assert!(!rules("auto", &[("free", 1.0), ("gap_error", 1.0), ("theta", 0.9)]));
    assert!(rules("admit", &[("free", 0.5)]) && rules("observe", &[("gap_error", 2.0)]));
    assert!(rules("thunder_agent", &[("pause_to", 0.5)]));
    for (kind, name, value) in [
        ("admit", "free", 1.5),
        ("auto", "gap_error", 0.0),
        ("thunder_agent", "pause_to", 0.0),
        ("thunder_agent", "theta", 0.0),
        ("thunder_agent", "free", 0.5),
    ] {
        assert!(read(kind, &[(name, value)]).unwrap_err().contains(name));
    }
    assert!(read("thunder", &[]).unwrap_err().contains("thunder_agent"));
}
