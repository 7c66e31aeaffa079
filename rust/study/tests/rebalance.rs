//! Rules for studies that move running requests: cases by hand, and properties.
use lmetric_core::Slot;
use lmetric_core::estimate::Remaining;
use lmetric_core::rebalance::{InstanceLoad, Rebalancer, RunningRequest, StarSettings, Stop};
use lmetric_core::settings::SettingsReader;
use lmetric_study::rebalance::{Llumnix, LlumnixSettings, NAMES, StarCurrent, named};
use proptest::prelude::*;

fn request(id: u64, tokens: u32, remaining: f64) -> RunningRequest {
    RunningRequest { id, tokens, remaining: Remaining::exact(remaining), movable: true }
}

fn instance(id: u32, capacity_tokens: u64, requests: &[RunningRequest]) -> InstanceLoad<'_> {
    InstanceLoad {
        instance: Slot(id),
        capacity_tokens,
        other_tokens: 0,
        queued_tokens: 0,
        step_seconds: 0.02,
        accepts: true,
        requests,
    }
}

#[test]
fn llumnix_by_hand() {
    let a = [request(1, 480, 9.0), request(2, 200, 9.0), request(3, 250, 9.0)];
    let b = [request(4, 300, 9.0)];
    let (full, free) = (instance(0, 1000, &a), instance(1, 1000, &b));
    let run =
        |loads: &[InstanceLoad]| Llumnix::new(LlumnixSettings::default()).unwrap().round(loads).unwrap();
    // Freeness (1000 - 930) / 3 against 700. The shortest request moves: 270 / 2 and 500 / 2.
    let m = run(&[full, free]).moves[0];
    assert_eq!((m.request, m.source, m.target), (2, Slot(0), Slot(1)));
    assert_eq!((m.source_load, m.target_load), (70.0 / 3.0, 700.0));
    assert_eq!((m.variance_before, m.variance_after), (315f64.powi(2), 115f64.powi(2)));
    // Waiting requests count as used: without them, no instance is short of room.
    let roomy = instance(0, 1500, &a);
    assert_eq!(run(&[roomy, free]).stop, Stop::NoneOverloaded);
    assert_eq!(run(&[InstanceLoad { queued_tokens: 500, ..roomy }, free]).moves.len(), 1);
    assert_eq!(run(&[full, InstanceLoad { accepts: false, ..free }]).stop, Stop::NoneUnderloaded);
    assert_eq!(run(&[full, instance(1, 580, &b)]).stop, Stop::NoRoom);
    // The least free instance is paired with the freest, the next with the next.
    let settings = LlumnixSettings { max_moves: 9, ..LlumnixSettings::default() };
    let fuller = InstanceLoad { instance: Slot(2), other_tokens: 20, ..full };
    let loads = [full, free, fuller, instance(3, 5000, &[])];
    let round = Llumnix::new(settings).unwrap().round(&loads).unwrap();
    let pairs: Vec<_> = round.moves.iter().map(|m| (m.source.0, m.target.0)).collect();
    assert_eq!(pairs, [(2, 3), (0, 1)]);
}

#[test]
fn star_current_by_hand() {
    let run =
        |loads: &[InstanceLoad]| StarCurrent::new(StarSettings::default()).unwrap().round(loads).unwrap();
    let (a, b) =
        ([request(1, 500, 6.0), request(2, 400, 5000.0), request(3, 400, 5000.0)], [request(4, 300, 6.0)]);
    let (over, under) = (instance(0, 100_000, &a), instance(1, 100_000, &b));
    let round = run(&[over, under]);
    // 1300 and 300: moving 500 leaves 800 and 800, though this request ends soon.
    assert_eq!((round.moves[0].request, round.moves[0].variance_after), (1, 0.0));
    assert_eq!((round.moves[0].source_load, round.moves[0].mean_load), (1300.0, 800.0));
    assert_eq!(run(&[over]).stop, Stop::FewInstances);
    assert_eq!(run(&[over, InstanceLoad { instance: Slot(7), ..over }]).stop, Stop::NoneOverloaded);
    assert_eq!(run(&[over, InstanceLoad { accepts: false, ..under }]).stop, Stop::NoneUnderloaded);
    let fixed = a.map(|r| RunningRequest { movable: false, ..r });
    assert_eq!(run(&[instance(0, 100_000, &fixed), under]).stop, Stop::NoneMovable);
    assert_eq!(run(&[over, instance(1, 600, &b)]).stop, Stop::NoRoom);
    let one = [request(1, 100, 9.0)];
    assert_eq!(run(&[instance(0, 1000, &one), instance(1, 1000, &[])]).stop, Stop::NoGain);
}

/// Builds a rule by name and settings, and returns its name or the error.
fn read(name: &str, settings: &[(&str, f64)]) -> Result<&'static str, String> {
    let given = settings.iter().map(|(name, value)| (name.to_string(), Ok(*value)));
    let mut reader = SettingsReader::new("rebalance", given);
    let config = named(name, &mut reader).map_err(|error| error.to_string())?;
    reader.finish().map_err(|error| error.to_string())?;
    config.build().map(|built| built.rule.name()).map_err(|error| error.to_string())
}

#[test]
fn names_and_settings_are_checked() {
    assert_eq!(NAMES.map(|name| read(name, &[]).unwrap()), ["star_current", "star", "llumnix"]);
    assert_eq!(read("star", &[("caution", 1.0)]).unwrap(), "star");
    let told = read("stars", &[]).unwrap_err();
    assert_eq!(told, "unknown rebalancer \"stars\"; did you mean \"star\"?");
    for (name, setting, value) in [
        ("llumnix", "target_above_steps", 1.0),
        ("llumnix", "max_moves", 0.0),
        ("llumnix", "threshold", 0.5),
        ("star_current", "threshold", 2.0),
        ("star_current", "max_moves", 0.0),
        ("star_oracle", "half_life_steps", 0.5),
        ("star_oracle", "period_seconds", 0.0),
    ] {
        let told = read(name, &[(setting, value)]).unwrap_err();
        assert!(told.contains(setting), "{told}");
    }
}

type Fleet = Vec<(u64, u64, bool, Vec<RunningRequest>)>;

fn fleets() -> impl Strategy<Value = Fleet> {
    let instance = (
        500u64..9000,
        0u64..400,
        prop::bool::weighted(0.9),
        prop::collection::vec((1u32..900, 0u32..120, any::<bool>()), 0..7),
    );
    prop::collection::vec(instance, 2..14).prop_map(|fleet| {
        let mut id = 0;
        let mut number = |(tokens, remaining, movable): (u32, u32, bool)| {
            id += 1;
            RunningRequest {
                movable: movable || id % 3 > 0,
                ..request(id * 7919 % 1009, tokens, remaining.into())
            }
        };
        fleet.into_iter().map(|(c, o, a, r)| (c, o, a, r.into_iter().map(&mut number).collect())).collect()
    })
}

fn loads(fleet: &Fleet) -> Vec<InstanceLoad<'_>> {
    let each = fleet.iter().enumerate().map(|(i, (capacity, other, accepts, requests))| InstanceLoad {
        other_tokens: *other,
        accepts: *accepts,
        ..instance(10 * i as u32, *capacity, requests)
    });
    each.collect()
}

/// Returns the variance of current tokens after a move of a request from one place to another.
fn variance(loads: &[InstanceLoad], moved: Option<(u32, usize, usize)>) -> f64 {
    let tokens = |(i, load): (usize, &InstanceLoad)| {
        let (gone, come) = moved.map_or((0, 0), |(tokens, from, to)| {
            (if from == i { tokens } else { 0 }, if to == i { tokens } else { 0 })
        });
        load.tokens() as f64 - f64::from(gone) + f64::from(come)
    };
    let each: Vec<f64> = loads.iter().enumerate().map(tokens).collect();
    let mean = each.iter().sum::<f64>() / each.len() as f64;
    each.iter().map(|tokens| (tokens - mean).powi(2)).sum::<f64>() / each.len() as f64
}

/// Returns the least variance that one move allowed by Eq. (3) leaves.
fn exhaustive(loads: &[InstanceLoad], threshold: f64) -> Option<f64> {
    let mean = loads.iter().map(|load| load.tokens() as f64).sum::<f64>() / loads.len() as f64;
    let mut best: Option<f64> = None;
    for (from, source) in loads.iter().enumerate() {
        for (to, target) in loads.iter().enumerate() {
            let (over, under) = (source.tokens() as f64, target.tokens() as f64);
            if over <= (1.0 + threshold) * mean || under >= (1.0 - threshold) * mean || !target.accepts {
                continue;
            }
            for r in source.requests.iter().filter(|r| r.movable) {
                if target.tokens() + u64::from(r.tokens) <= target.capacity_tokens {
                    let after = variance(loads, Some((r.tokens, from, to)));
                    best = Some(best.map_or(after, |b| b.min(after)));
                }
            }
        }
    }
    best
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    #[test]
    fn star_current_finds_what_trying_everything_finds(fleet in fleets(), threshold in 0.0..0.4f64) {
        let loads = loads(&fleet);
        let mut rule = StarCurrent::new(StarSettings { threshold, ..StarSettings::default() }).unwrap();
        let round = rule.round(&loads).unwrap();
        let (before, best) = (variance(&loads, None), exhaustive(&loads, threshold));
        let slack = 1e-9 * before;
        if let Some(m) = round.moves.first() {
            prop_assert!((m.variance_before - before).abs() <= slack);
            prop_assert!((m.variance_after - best.unwrap()).abs() <= slack, "{:?} {:?}", m, best);
            let place = |id: Slot| loads.iter().position(|l| l.instance == id).unwrap();
            let (s, t) = (place(m.source), place(m.target));
            let moved = loads[s].requests.iter().find(|r| r.id == m.request).unwrap();
            prop_assert!((variance(&loads, Some((moved.tokens, s, t))) - m.variance_after).abs() <= slack);
        } else {
            prop_assert!(best.is_none_or(|b| b >= before - slack), "{:?}: {before} {best:?}", round.stop);
        }
    }

    #[test]
    fn rounds_keep_the_rules_in_any_order(fleet in fleets(), threshold in 0.0..0.4f64, turn in 0usize..14) {
        let given = loads(&fleet);
        let llumnix = LlumnixSettings { max_moves: 5, source_below_steps: 200.0, target_above_steps: 300.0 };
        let star = StarSettings { max_moves: 5, threshold, ..StarSettings::default() };
        let rules: [Box<dyn Rebalancer>; 2] =
            [Box::new(StarCurrent::new(star).unwrap()), Box::new(Llumnix::new(llumnix).unwrap())];
        for mut rule in rules {
            let round = rule.round(&given).unwrap();
            let mut turned = given.clone();
            turned.reverse();
            turned.rotate_left(turn % given.len());
            prop_assert_eq!(&round, &rule.round(&turned).unwrap());
            let mut tokens: Vec<u64> = given.iter().map(InstanceLoad::tokens).collect();
            let mut seen = std::collections::HashSet::new();
            for m in &round.moves {
                let place = |id: Slot| given.iter().position(|l| l.instance == id).unwrap();
                let (s, t) = (place(m.source), place(m.target));
                let r = given[s].requests.iter().find(|r| r.id == m.request).unwrap();
                prop_assert!(s != t && r.movable && given[t].accepts && seen.insert(m.request));
                tokens[s] -= u64::from(r.tokens);
                tokens[t] += u64::from(r.tokens);
                prop_assert!(tokens[t] <= given[t].capacity_tokens);
                prop_assert!(rule.name() == "llumnix" || m.variance_after < m.variance_before);
            }
        }
    }
}
