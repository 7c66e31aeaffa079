//! Cases by hand, and properties against an exhaustive reference.
use super::*;
use proptest::prelude::*;

fn request(id: u64, tokens: u32, remaining: f64) -> RunningRequest {
    RunningRequest { id, tokens, remaining: Remaining::exact(remaining), movable: true }
}

fn instance(id: u32, capacity_tokens: u64, requests: &[RunningRequest]) -> InstanceLoad<'_> {
    let (instance, step_seconds) = (Slot(id), 0.02);
    InstanceLoad {
        instance,
        capacity_tokens,
        other_tokens: 0,
        queued_tokens: 0,
        step_seconds,
        accepts: true,
        requests,
    }
}

/// Four steps with equal weights, and moves that take five steps.
fn small() -> StarSettings {
    StarSettings {
        horizon_steps: 4,
        points: 4,
        weights: Weights::Uniform,
        migration_seconds: 0.1,
        migration_seconds_per_token: 0.0,
        ..StarSettings::default()
    }
}

fn star(settings: StarSettings) -> Star {
    Star::new(settings).unwrap()
}

#[test]
fn star_by_hand() {
    // Instance 0: 100 + 60 tokens with long remaining lengths; instance 1: empty. Moving 60 leaves
    // 100 and 60.
    let (a, b) = ([request(1, 100, 9.0), request(2, 60, 9.0)], []);
    let round = star(small()).round(&[instance(0, 1000, &a), instance(1, 1000, &b)]).unwrap();
    let m = round.moves[0];
    assert_eq!((round.moves.len(), round.stop), (1, Stop::MaxMoves));
    // Either move leaves the same difference, so the lower request moves.
    assert_eq!((m.request, m.source, m.target), (1, Slot(0), Slot(1)));
    // Loads of 0 at steps 0 to 4: 160, 162, ..., 168; w is the mean of the last four.
    assert_eq!((m.source_load, m.target_load, m.mean_load), (165.0, 0.0, 82.5));
    let future = (81f64.powi(2) + 82f64.powi(2) + 83f64.powi(2) + 84f64.powi(2)) / 4.0;
    assert!((m.variance_before - (80f64.powi(2) + future)).abs() < 1e-9);
    assert!((m.variance_after - (400.0 + 400.0)).abs() < 1e-9, "{m:?}");
}

#[test]
fn star_weighs_what_ends_soon_by_the_present() {
    // The larger request ends in six steps. For the present alone, it is the better request to
    // move; over 1,024 steps it is not.
    let (a, b) =
        ([request(1, 500, 6.0), request(2, 400, 5000.0), request(3, 400, 5000.0)], [request(4, 300, 6.0)]);
    let loads = [instance(0, 100_000, &a), instance(1, 100_000, &b)];
    let far = StarSettings { horizon_steps: 1024, points: 32, ..small() };
    assert_eq!(star(far).round(&loads).unwrap().moves[0].request, 2);
}

#[test]
fn star_says_why_not() {
    let (a, b) = ([request(1, 100, 9.0), request(2, 60, 9.0)], [request(3, 20, 9.0)]);
    let why = |loads: &[InstanceLoad]| {
        let round = star(small()).round(loads).unwrap();
        assert!(round.moves.is_empty());
        round.stop
    };
    let (over, under) = (instance(0, 1000, &a), instance(1, 1000, &b));
    assert_eq!(why(&[over]), Stop::FewInstances);
    assert_eq!(why(&[over, InstanceLoad { instance: Slot(7), ..over }]), Stop::NoneOverloaded);
    assert_eq!(why(&[over, InstanceLoad { accepts: false, ..under }]), Stop::NoneUnderloaded);
    // A move takes five steps: requests that end by then stay.
    let soon = a.map(|r| RunningRequest { remaining: Remaining::exact(5.0), ..r });
    assert_eq!(why(&[instance(0, 1000, &soon), under]), Stop::NoneMovable);
    let fixed = a.map(|r| RunningRequest { movable: false, ..r });
    assert_eq!(why(&[instance(0, 1000, &fixed), under]), Stop::NoneMovable);
    // 20 used + 60 + 9 to come is 89.
    assert_eq!(why(&[over, instance(1, 88, &b)]), Stop::NoRoom);
    let fits = star(small()).round(&[over, instance(1, 89, &b)]).unwrap();
    assert_eq!(fits.moves[0].request, 2);
    let one = [request(1, 100, 9.0)];
    assert_eq!(why(&[instance(0, 1000, &one), instance(1, 1000, &[])]), Stop::NoGain);
}

#[test]
fn caution_adds_deviations_to_the_memory_check() {
    let a = [request(1, 100, 9.0), request(2, 60, 9.0)]
        .map(|r| RunningRequest { remaining: Remaining { tokens: 9.0, deviation: 10.0 }, ..r });
    let loads = [instance(0, 1000, &a), instance(1, 118, &[])];
    assert_eq!(star(small()).round(&loads).unwrap().moves[0].request, 1);
    let cautious = StarSettings { caution: 1.0, ..small() };
    assert_eq!(star(cautious).round(&loads).unwrap().moves[0].request, 2);
}

#[test]
fn bad_input_is_named() {
    let good = [request(1, 100, 9.0)];
    let mut rule = star(StarSettings::default());
    assert_eq!(rule.name(), "star");
    let mut error = |load: InstanceLoad| rule.round(&[load, instance(9, 10, &[])]).unwrap_err().to_string();
    let load = instance(3, 1000, &good);
    assert_eq!(
        error(InstanceLoad { capacity_tokens: 0, ..load }),
        "capacity_tokens of instance 3: 0 is not valid; expected at least 1 token"
    );
    assert!(
        error(InstanceLoad { step_seconds: f64::NAN, ..load }).starts_with("step_seconds of instance 3: NaN")
    );
    assert!(error(InstanceLoad { instance: Slot(9), ..load }).starts_with("instances of a round: 9"));
    for wrong in [-1.0, f64::NAN, f64::INFINITY] {
        let requests = [request(5, 1, wrong)];
        let text = error(instance(3, 1000, &requests));
        assert!(text.starts_with("remaining tokens of request 5 on instance 3: "), "{text}");
    }
    let error = |s: StarSettings| Star::new(s).err().unwrap().to_string();
    assert_eq!(
        error(StarSettings { points: 5, ..small() }),
        "rebalancing setting points: 5 is not valid; expected a number from 1 to 4"
    );
    assert!(error(StarSettings { threshold: f64::NAN, ..small() }).contains("threshold: NaN"));
    assert!(error(StarSettings { max_moves: 0, ..small() }).contains("max_moves: 0"));
    assert!(error(StarSettings { migration_seconds: -1.0, ..small() }).contains("migration_seconds: -1"));
    let weights = Weights::Geometric { half_life_steps: 0.0 };
    assert!(error(StarSettings { weights, ..small() }).contains("half_life_steps: 0"));
}

type Fleet = Vec<(u64, u64, bool, Vec<RunningRequest>)>;

fn fleets() -> impl Strategy<Value = Fleet> {
    let one = (1u32..900, 0u32..120, any::<bool>(), 0u32..50);
    let instance = (500u64..9000, 0u64..400, prop::bool::weighted(0.9), prop::collection::vec(one, 0..7));
    prop::collection::vec(instance, 2..14).prop_map(|fleet| {
        let mut id = 0;
        let mut number = |(tokens, remaining, movable, deviation): (u32, u32, bool, u32)| {
            id += 1;
            let remaining = Remaining { tokens: remaining.into(), deviation: deviation.into() };
            RunningRequest { id: id * 7919 % 1009, tokens, remaining, movable: movable || id % 3 > 0 }
        };
        fleet.into_iter().map(|(c, o, a, r)| (c, o, a, r.into_iter().map(&mut number).collect())).collect()
    })
}

fn loads(fleet: &Fleet) -> Vec<InstanceLoad<'_>> {
    fleet
        .iter()
        .enumerate()
        .map(|(i, (capacity, other, accepts, requests))| InstanceLoad {
            other_tokens: *other,
            accepts: *accepts,
            ..instance(10 * i as u32, *capacity, requests)
        })
        .collect()
}

/// Load of an instance at step t, computed request by request.
fn load_at(load: &InstanceLoad, without: Option<u64>, with: Option<&RunningRequest>, t: f64) -> f64 {
    let here = load.requests.iter().filter(|r| Some(r.id) != without).chain(with);
    here.filter(|r| t == 0.0 || t < r.remaining.tokens).map(|r| f64::from(r.tokens) + t).sum::<f64>()
        + load.other_tokens as f64
}

/// Eq. (4), computed from its definition, with `moved` = (request, from, to) applied.
fn variance(
    loads: &[InstanceLoad],
    grid: &grid::Grid,
    moved: Option<(&RunningRequest, usize, usize)>,
) -> f64 {
    let n = loads.len() as f64;
    let at = |t: f64| {
        let each: Vec<f64> = loads
            .iter()
            .enumerate()
            .map(|(i, load)| {
                let gone = moved.filter(|m| m.1 == i).map(|m| m.0.id);
                load_at(load, gone, moved.filter(|m| m.2 == i).map(|m| m.0), t)
            })
            .collect();
        let mean = each.iter().sum::<f64>() / n;
        each.iter().map(|l| (l - mean).powi(2)).sum::<f64>() / n
    };
    grid.times.iter().zip(&grid.variance_weights).map(|(t, w)| w * at(*t)).sum()
}

/// Algorithm 1 as printed, with erratum 6: every candidate, computed from its definition. Returns
/// the variance before and the minimum after a move.
fn exhaustive(loads: &[InstanceLoad], s: &StarSettings, grid: &grid::Grid) -> (f64, Option<f64>) {
    let w: Vec<f64> = loads
        .iter()
        .map(|load| {
            grid.times.iter().zip(&grid.load_weights).map(|(t, w)| w * load_at(load, None, None, *t)).sum()
        })
        .collect();
    let mean = w.iter().sum::<f64>() / w.len() as f64;
    let mut best: Option<f64> = None;
    for (from, source) in loads.iter().enumerate().filter(|(i, _)| w[*i] > (1.0 + s.threshold) * mean) {
        for (to, target) in loads.iter().enumerate() {
            let now = target.tokens() as f64;
            if !target.accepts || to == from || now >= (1.0 - s.threshold) * mean {
                continue;
            }
            for r in source.requests.iter().filter(|r| r.movable) {
                let takes = s.migration_seconds + s.migration_seconds_per_token * f64::from(r.tokens);
                let still = r.remaining.tokens + s.caution * r.remaining.deviation;
                let lasts = r.remaining.tokens > takes / source.step_seconds;
                if lasts && now + f64::from(r.tokens) + still <= target.capacity_tokens as f64 {
                    let after = variance(loads, grid, Some((r, from, to)));
                    best = Some(best.map_or(after, |b| b.min(after)));
                }
            }
        }
    }
    (variance(loads, grid, None), best)
}

fn settings() -> impl Strategy<Value = StarSettings> {
    (1u32..60, 1u32..60, any::<bool>(), 0.0..0.4f64, 0.0..0.5f64, 0.0..1.0f64).prop_map(
        |(a, b, uniform, threshold, migration_seconds, caution)| StarSettings {
            horizon_steps: a.max(b),
            points: a.min(b),
            weights: if uniform { Weights::Uniform } else { Weights::Geometric { half_life_steps: 9.0 } },
            threshold,
            migration_seconds,
            migration_seconds_per_token: 1e-4,
            caution,
            max_moves: 1,
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    #[test]
    fn star_finds_what_trying_everything_finds(fleet in fleets(), settings in settings()) {
        let loads = loads(&fleet);
        let mut star = star(settings);
        let (before, best) = exhaustive(&loads, &settings, star.grid());
        let round = star.round(&loads).unwrap();
        prop_assert_eq!(&round, &star.round(&loads).unwrap(), "a round leaves nothing behind");
        let slack = 1e-9 * before;
        if let Some(m) = round.moves.first() {
            prop_assert!(m.source != m.target && m.variance_after < m.variance_before);
            prop_assert!((m.variance_before - before).abs() <= slack);
            prop_assert!((m.variance_after - best.unwrap()).abs() <= slack, "{:?} {:?}", m, best);
            let place = |id: Slot| loads.iter().position(|l| l.instance == id).unwrap();
            let (s, t) = (place(m.source), place(m.target));
            let moved = loads[s].requests.iter().find(|r| r.id == m.request).unwrap();
            prop_assert!((variance(&loads, star.grid(), Some((moved, s, t))) - m.variance_after).abs() <= slack);
            prop_assert!(loads[t].tokens() + u64::from(moved.tokens) <= loads[t].capacity_tokens);
        } else {
            prop_assert!(best.is_none_or(|b| b >= before - slack), "{:?}: {before} {best:?}", round.stop);
        }
    }

    #[test]
    fn rounds_keep_the_rules_in_any_order(fleet in fleets(), settings in settings(), turn in 0usize..14) {
        let given = loads(&fleet);
        let mut rule = star(StarSettings { max_moves: 5, ..settings });
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
            prop_assert!(m.variance_after < m.variance_before);
        }
    }
}
