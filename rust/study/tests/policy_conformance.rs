//! Requirements on every registered policy, whatever its formula.
#[path = "../../core/tests/common/fleet.rs"]
mod fleet;

use fleet::{Fleet, policy};
use lmetric_core::indicators::{INDICATORS, Indicator, Owner, Scope};
use lmetric_core::policy::{KnobKind, Knobs, Policy, PolicyRng, PolicySpec, Prefer, Scores};
use lmetric_study::REGISTRY;
use rand::{RngExt, SeedableRng, seq::SliceRandom};
use std::collections::BTreeSet;

/// Policies that ignore load, or invert it.
const BLIND_TO_LOAD: [&str; 3] = ["round_robin", "random", "always_worst"];

/// Indicators that may be absent.
const MAY_BE_ABSENT: [Indicator; 11] = [
    Indicator::KvUsage,
    Indicator::ReportedWaiting,
    Indicator::ReportedRunning,
    Indicator::ReportAgeSeconds,
    Indicator::PrefillTokensPerSecond,
    Indicator::PredictedTtftSeconds,
    Indicator::CacheFreeTokens,
    Indicator::PrefillRelativeError,
    Indicator::StepSeconds,
    Indicator::StepRelativeError,
    Indicator::PredictedTpotSeconds,
];

fn every(check: impl Fn(&'static PolicySpec, &dyn Policy)) {
    for spec in REGISTRY.policies() {
        check(spec, &*policy(&spec.name, &[]));
    }
}

/// Returns a fleet of whole numbers, small ones (so that instances tie) or large ones, with no
/// value absent.
fn arbitrary(slots: usize, seed: u64) -> Fleet {
    let mut rng = PolicyRng::seed_from_u64(seed);
    let scale = [4, 100, 100_000][rng.random_range(0..3)];
    let mut fleet = Fleet::new(slots);
    for decl in INDICATORS.iter().filter(|d| d.scope != Scope::Request) {
        for value in fleet.columns.get_mut(decl.id) {
            *value = match decl.id {
                Indicator::KvUsage => f64::from(rng.random_range(0..=4)) / 4.0,
                Indicator::PredictedTtftSeconds => f64::from(rng.random_range(1..=scale)) / 64.0,
                _ => f64::from(rng.random_range(0..=scale)),
            };
        }
    }
    for i in 0..slots {
        let bs = fleet.columns.get(Indicator::QBs)[i] + fleet.columns.get(Indicator::RBs)[i];
        fleet.columns.get_mut(Indicator::Bs)[i] = bs;
    }
    let prompt = f64::from(16 * rng.random_range(1..=scale));
    let hits: Vec<f64> = (0..slots).map(|_| prompt * f64::from(rng.random_range(0..=8)) / 8.0).collect();
    fleet.ordinal = rng.random();
    fleet.session = if rng.random() { Some(rng.random()) } else { None };
    fleet.seed = seed;
    fleet.prompt(prompt, &hits).request(Indicator::ExpectedOutputTokens, f64::from(scale))
}

fn fleets() -> impl Iterator<Item = Fleet> {
    (0..60).map(|seed| arbitrary([1, 2, 3, 7, 16, 64][seed as usize % 6], seed))
}

/// Returns the score and tie-breaks of a slot.
fn of(scores: &Scores, slot: usize) -> Vec<f64> {
    [scores.score[slot]].into_iter().chain(scores.then[..scores.then_count].iter().map(|c| c[slot])).collect()
}

fn same(a: &[f64], b: &[f64]) -> bool {
    a.len() == b.len()
        && a.iter()
            .zip(b)
            .all(|(a, b)| (a.is_nan() && b.is_nan()) || (a - b).abs() <= 1e-12 * a.abs().max(1.0))
}

fn all_same(a: &Scores, b: &Scores, slots: usize) -> bool {
    a.prefer == b.prefer && (0..slots).all(|slot| same(&of(a, slot), &of(b, slot)))
}

/// Returns the slots whose scores and tie-breaks equal the best.
fn tie_set(fleet: &Fleet, scores: &Scores) -> BTreeSet<usize> {
    let sign = if scores.prefer == Prefer::Min { 1.0 } else { -1.0 };
    let key = |slot: usize| {
        let mut key = of(scores, slot);
        key[0] *= sign;
        key
    };
    let eligible = || (0..fleet.slots()).filter(|i| fleet.eligible[*i] && scores.score[*i].is_finite());
    let best =
        eligible().min_by(|a, b| key(*a).partial_cmp(&key(*b)).expect("no NaN")).expect("an eligible slot");
    eligible().filter(|slot| key(*slot) == key(best)).collect()
}

#[test]
fn declarations_are_complete_and_carried_by_the_policy() {
    every(|spec, policy| {
        assert_eq!(policy.spec().name, spec.name);
        for text in [&spec.formula, &spec.source] {
            assert!(
                !text.is_empty() && !text.contains('\n') && !text.contains("  "),
                "{}: {text:?}",
                spec.name
            );
        }
        for knob in spec.knobs {
            let default = [(knob.name.to_string(), knob.default)];
            assert!(
                Knobs::resolve("policy", spec.knobs, &default).is_ok(),
                "{}: default of {}",
                spec.name,
                knob.name
            );
            assert!(!knob.about.is_empty());
        }
    });
}

#[test]
fn every_eligible_instance_gets_a_finite_score() {
    every(|spec, policy| {
        for fleet in fleets().chain([arbitrary(1000, 1), arbitrary(1000, 2)]) {
            let scores = fleet.scores(policy);
            assert!(scores.score.iter().all(|s| s.is_finite()), "{}: {:?}", spec.name, scores.score);
            let order = fleet.order(policy);
            assert_eq!(
                order.iter().collect::<BTreeSet<_>>().len(),
                fleet.slots(),
                "{}: a ranking of all",
                spec.name
            );
        }
    });
}

#[test]
fn ineligible_instances_are_neither_chosen_nor_heard() {
    every(|spec, policy| {
        for mut fleet in fleets().filter(|f| f.slots() > 1) {
            let mut rng = PolicyRng::seed_from_u64(fleet.seed);
            fleet.eligible.iter_mut().for_each(|e| *e = rng.random());
            let before = fleet.scores(policy);
            let chosen = fleet.best(policy);
            assert!(chosen.map_or(!fleet.eligible.contains(&true), |i| fleet.eligible[i]), "{}", spec.name);
            for decl in INDICATORS.iter().filter(|d| d.scope != Scope::Request) {
                for (value, eligible) in fleet.columns.get_mut(decl.id).iter_mut().zip(&fleet.eligible) {
                    *value = if *eligible { *value } else { [0.0, 1e12, f64::NAN][rng.random_range(0..3)] };
                }
            }
            let after = fleet.scores(policy);
            for slot in (0..fleet.slots()).filter(|i| fleet.eligible[*i]) {
                assert!(same(&of(&before, slot), &of(&after, slot)), "{} slot {slot}", spec.name);
            }
        }
    });
}

#[test]
fn the_same_seed_gives_the_same_scores_in_fresh_and_used_buffers() {
    every(|spec, policy| {
        let mut used = Scores::default();
        for fleet in fleets() {
            let fresh = fleet.scores(policy);
            used.reset(fleet.slots());
            fleet.rescore(policy, &mut PolicyRng::seed_from_u64(fleet.seed), &mut used);
            assert!(all_same(&fresh, &used, fleet.slots()), "{}", spec.name);
        }
    });
}

#[test]
fn only_those_declared_random_use_the_seed() {
    every(|spec, policy| {
        let seed_matters = fleets().any(|mut fleet| {
            let first = fleet.scores(policy);
            fleet.seed += 1000;
            !all_same(&first, &fleet.scores(policy), fleet.slots())
        });
        assert!(spec.random || !seed_matters, "{} draws, and is not declared random", spec.name);
    });
}

#[test]
fn relabelling_the_instances_permutes_scores_and_tie_sets() {
    every(|spec, policy| {
        if !spec.symmetric || spec.random {
            return;
        }
        for fleet in fleets().filter(|f| f.slots() > 1) {
            let mut to: Vec<usize> = (0..fleet.slots()).collect();
            to.shuffle(&mut PolicyRng::seed_from_u64(fleet.seed));
            let mut relabelled = fleet.clone();
            for decl in INDICATORS.iter().filter(|d| d.scope != Scope::Request) {
                for (slot, &to) in to.iter().enumerate() {
                    relabelled.columns.get_mut(decl.id)[to] = fleet.columns.get(decl.id)[slot];
                }
            }
            let (before, after) = (fleet.scores(policy), relabelled.scores(policy));
            for (slot, &to) in to.iter().enumerate() {
                assert!(same(&of(&before, slot), &of(&after, to)), "{}: slot {slot} -> {to}", spec.name);
            }
            let moved: BTreeSet<usize> = tie_set(&fleet, &before).into_iter().map(|slot| to[slot]).collect();
            assert_eq!(moved, tie_set(&relabelled, &after), "{}", spec.name);
        }
    });
}

#[test]
fn asymmetry_is_declared_only_where_there_is_some() {
    let equal = Fleet::new(4).prompt(64.0, &[0.0; 4]);
    every(|spec, policy| {
        if !spec.symmetric {
            let differs = [None, Some(7)].into_iter().any(|session| {
                let scores = Fleet { session, ..equal.clone() }.score(policy);
                scores.iter().any(|s| *s != scores[0])
            });
            assert!(differs, "{}: equal instances score equally", spec.name);
        }
    });
}

#[test]
fn an_absent_indicator_leaves_out_no_more_than_its_instance() {
    for decl in INDICATORS.iter().filter(|d| d.owner == Owner::Engine) {
        assert!(MAY_BE_ABSENT.contains(&decl.id), "{}", decl.name);
    }
    every(|spec, policy| {
        for mut fleet in fleets().filter(|f| f.slots() > 2) {
            for id in MAY_BE_ABSENT {
                fleet.columns.get_mut(id)[..2].fill(f64::NAN);
            }
            let scores = fleet.scores(policy);
            let known = &scores.score[2..];
            assert!(known.iter().all(|s| s.is_finite()), "{}: {known:?}", spec.name);
            assert!(scores.score[..2].iter().all(|s| s.is_finite() || s.is_nan()), "{}", spec.name);
            assert!(fleet.best(policy).is_some());
            MAY_BE_ABSENT.iter().for_each(|id| fleet.columns.get_mut(*id).fill(f64::NAN));
            let nobody = fleet.scores(policy).score.iter().all(|s| s.is_nan());
            assert_eq!(nobody, fleet.best(policy).is_none(), "{}", spec.name);
            assert_eq!(
                nobody,
                policy.reads().contains(Indicator::KvUsage),
                "{}: only kv_usage has no stand-in",
                spec.name
            );
        }
    });
}

#[test]
fn a_full_hit_does_not_hide_the_load() {
    // sglang's port scores by misses alone: a full hit scores 0 however long its queue.
    for load in [1.0, 40.0, 1000.0] {
        let busy = |share: f64| [load * share, 0.0];
        let fleet = [
            (Indicator::Bs, 1.0),
            (Indicator::QBs, 0.5),
            (Indicator::RBs, 0.5),
            (Indicator::DecodeBs, 0.5),
            (Indicator::BoundBs, 0.5),
            (Indicator::QueuedPrefillTokens, 500.0),
            (Indicator::Tokens, 1000.0),
            (Indicator::DecodeTokens, 500.0),
            (Indicator::BoundTokens, 500.0),
            (Indicator::RemainingTokens, 100.0),
            (Indicator::WindowPrefillTokens, 1000.0),
            (Indicator::WindowOutputTokens, 100.0),
            (Indicator::KvUsage, 1e-3),
            (Indicator::PredictedTtftSeconds, 0.05),
            (Indicator::HandoffRunningTokens, 500.0),
            (Indicator::HandoffArrivedTokens, 300.0),
            (Indicator::HandoffComingTokens, 200.0),
            (Indicator::DecodePressure, 1.0),
        ]
        .into_iter()
        .fold(Fleet::new(2), |fleet, (id, share)| fleet.set(id, &busy(share)))
        .prompt(1024.0, &[1024.0, 1024.0]);
        every(|spec, policy| {
            if !BLIND_TO_LOAD.contains(&&*spec.name) {
                assert_eq!(fleet.order(policy), [1, 0], "{} under load {load}", spec.name);
            }
        });
    }
}

#[test]
fn extreme_values_give_finite_scores() {
    every(|spec, policy| {
        for seed in 0..200 {
            let mut rng = PolicyRng::seed_from_u64(seed);
            let mut fleet = Fleet::new(rng.random_range(1..6));
            for decl in INDICATORS {
                let count = if decl.scope == Scope::Request { 1 } else { fleet.slots() };
                fleet.columns.get_mut(decl.id)[..count].fill_with(|| [0.0, 1.0, 1e9][rng.random_range(0..3)]);
            }
            // p_token is at least 1 by its definition.
            fleet.columns.get_mut(Indicator::PToken).iter_mut().for_each(|p| *p = p.max(1.0));
            let score = fleet.score(policy);
            assert!(score.iter().all(|s| s.is_finite()), "{}: {score:?}", spec.name);
        }
    });
}

#[test]
fn both_ends_of_every_knob_build_and_score() {
    for spec in REGISTRY.policies() {
        for knob in spec.knobs {
            let (min, max) = match knob.kind {
                KnobKind::Float { min, max } => (min, max),
                KnobKind::Int { min, max } => (min as f64, max as f64),
                KnobKind::Bool => (0.0, 1.0),
            };
            assert!(min < max);
            for end in [min, max] {
                let built = policy(&spec.name, &[(knob.name, end)]);
                for fleet in fleets() {
                    let score = fleet.score(&*built);
                    assert!(
                        score.iter().all(|s| s.is_finite()),
                        "{} {} = {end}: {score:?}",
                        spec.name,
                        knob.name
                    );
                }
            }
            let beyond = [(knob.name.to_string(), max * 2.0 + 1.0)];
            assert!(REGISTRY.policy(&spec.name, &beyond).is_err(), "{} {}", spec.name, knob.name);
        }
    }
}

/// Parameters of the learned length curve: they change indicators, not the score of given
/// indicators.
const OF_THE_CURVE: [&str; 2] = ["alpha", "bucket_tokens"];

#[test]
fn knobs_matter() {
    for spec in REGISTRY.policies() {
        for knob in spec.knobs.iter().filter(|knob| !OF_THE_CURVE.contains(&knob.name)) {
            let ends = match knob.kind {
                KnobKind::Float { min, max } => [min, max],
                KnobKind::Int { min, max } => [min as f64, max as f64],
                KnobKind::Bool => [0.0, 1.0],
            };
            let [low, high] = ends.map(|end| policy(&spec.name, &[(knob.name, end)]));
            let differ = |f: Fleet| !all_same(&f.scores(&*low), &f.scores(&*high), f.slots());
            assert!((0..600).any(|seed| differ(arbitrary(3, seed))), "{} {}", spec.name, knob.name);
        }
    }
}

#[test]
fn knobs_of_the_length_curve_reach_it() {
    let curve = policy("sibyl", &[("alpha", 0.5), ("bucket_tokens", 32.0)]).length_curve();
    assert_eq!((curve.alpha, curve.bucket_tokens), (0.5, 32.0));
}

#[test]
fn a_policy_reads_what_it_declares_and_nothing_else() {
    every(|spec, policy| {
        let reads = policy.reads();
        for mut fleet in fleets() {
            let before = fleet.scores(policy);
            for decl in INDICATORS.iter().filter(|d| !reads.contains(d.id)) {
                fleet.columns.get_mut(decl.id).fill(f64::NAN);
            }
            assert!(all_same(&before, &fleet.scores(policy), fleet.slots()), "{}", spec.name);
        }
        for id in reads.iter() {
            let matters = (0..3000).any(|seed| {
                let mut fleet = arbitrary(3, seed);
                if seed % 4 == 0 {
                    MAY_BE_ABSENT
                        .iter()
                        .filter(|a| **a != id)
                        .for_each(|a| fleet.columns.get_mut(*a).fill(f64::NAN));
                }
                let before = fleet.scores(policy);
                fleet.columns.get_mut(id)[0] += 16.0;
                !all_same(&before, &fleet.scores(policy), 3)
            });
            assert!(matters, "{} declares {} and does not read it", spec.name, id.decl().name);
        }
    });
}
