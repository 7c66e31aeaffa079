//! Kernels by chunks compared with whole columns: the same scores, choices and records.
use crate::Registry;
use crate::expr::nan_unless;
use crate::fleet::Role;
use crate::indicators::{Indicator, IndicatorSet, Snapshot};
use crate::kv::hash::{Domain, hash_tokens};
use crate::plan::{Event, Failure};
use crate::policy::{ExpressionPolicy, ExpressionSource, Policy, PolicyRng, Prefer, Scores, best};
use crate::request::{Request, Tenant};
use crate::router::ledger::Report;
use crate::router::{FetchConfig, Router, RouterConfig};
use crate::{Slot, error::CoreError};
use proptest::prelude::*;
use rand::{Rng, RngExt, SeedableRng};

const BLOCK: usize = 16;

/// Filter, score, and tie-breaks.
type Texts = (&'static str, &'static str, &'static [(&'static str, Prefer)]);

/// Expressions over each kind of indicator: pairs, reductions, groups, filters, absent values.
const EXPRESSIONS: &[Texts] = &[
    ("", "p_token * (bs + 1)", &[]),
    ("", "p_seconds + norm(p_token) + std(kv_hit)", &[("bs", Prefer::Min), ("hit_tokens", Prefer::Max)]),
    ("bs - min(bs) <= 2", "1 - kv_hit", &[("queued_prefill_tokens", Prefer::Max)]),
    ("p_token < mean(p_token)", "new_tokens - tier_hit_tokens", &[("cache_free_tokens", Prefer::Max)]),
    ("hit_tokens > prompt_tokens", "predicted_ttft_seconds", &[]),
    ("", "group_sum(p_token) + group_mean(report_age_seconds)", &[("index_blocks", Prefer::Min)]),
    ("", "step_seconds + predicted_tpot_seconds + kv_usage", &[]),
    ("lora_loaded > 0 | tenant == \"acme\"", "window_prefill_tokens + 3 * window_output_tokens", &[]),
    ("", "fetch_tokens - fetch_cost_tokens + log(hit_tokens) + lora_bs - tenant_bs", &[]),
    ("", "where(instances > 3, 1 / bs, p_token) + recompute_ratio", &[("p_token", Prefer::Min)]),
    ("", "decode_tokens_per_second + handoff_running_tokens", &[]),
];

/// The policies of the registry, and the expressions.
fn policies() -> Vec<Box<dyn Policy>> {
    let registered = Registry::CORE.policies().map(|spec| Registry::CORE.policy(&spec.name, &[]).unwrap());
    let text = |text: &str| text.to_string();
    let made = EXPRESSIONS.iter().map(|(filter, score, then)| {
        let source = ExpressionSource {
            filter: (!filter.is_empty()).then(|| text(filter)),
            score: text(score),
            prefer: if score.contains("log") { Prefer::Max } else { Prefer::Min },
            then: then.iter().map(|(each, prefer)| (text(each), *prefer)).collect(),
        };
        Box::new(ExpressionPolicy::custom(None, source, &[]).unwrap()) as Box<dyn Policy>
    });
    registered.chain(made).collect()
}

fn chain(prompt: u32, tokens: usize) -> Vec<u64> {
    let tokens: Vec<u32> = (0..tokens as u32).map(|i| if i < 64 { i } else { prompt << 16 | i }).collect();
    let mut chain = Vec::new();
    hash_tokens(Domain::new(&[Some("m")], BLOCK), BLOCK, &tokens, &mut chain);
    chain
}

/// A fleet with requests in flight, reports, caches of all instances, and instances that accept no
/// requests.
fn fleet(policy: Box<dyn Policy>, slots: usize, rng: &mut PolicyRng) -> Result<Router, CoreError> {
    let fetch = rng.random_bool(0.5).then(FetchConfig::default);
    let mut router =
        Router::new(policy, RouterConfig { fetch, seed: rng.next_u64(), ..RouterConfig::default() })?;
    for slot in 0..slots {
        let blocks = rng.random_bool(0.7).then_some(1000);
        let role = if rng.random_bool(0.1) { Role::Decode } else { Role::Both };
        router.add_instance(&format!("e{slot}"), role, blocks)?;
        if rng.random_bool(0.7) {
            let mut some = |most: u32| rng.random_bool(0.8).then(|| f64::from(rng.random_range(0..most)));
            let report = Report {
                at: 0.0,
                waiting: some(3),
                running: some(9),
                kv_usage: some(2),
                ..Report::default()
            };
            router.engine_report(&format!("e{slot}"), report)?;
        }
        if rng.random_bool(0.6) {
            let held = chain(rng.random_range(0..6), 400);
            let blocks = rng.random_range(0..held.len());
            router.caches().write().gpu_mut().stored(Slot(slot as u32), None, &held[..blocks]);
        }
    }
    let mut now = 0.0;
    for step in 0..slots.min(40) {
        now += 0.01;
        let chain = chain(rng.random_range(0..6), 400);
        let Ok(decision) = router.route(&request(&chain, rng), now) else { continue };
        if step % 3 > 0 {
            router.advance(decision.ticket, Event::FirstToken, now + 0.05)?;
        }
        if step % 5 == 0 {
            router.advance(decision.ticket, Event::Failed(Failure::Cancelled), now + 0.06)?;
        }
    }
    for slot in 0..slots {
        if rng.random_bool(0.15) {
            router.fleet_mut().set_healthy(Slot(slot as u32), false)?;
        }
    }
    Ok(router)
}

fn request<'a>(chain: &'a [u64], rng: &mut PolicyRng) -> Request<'a> {
    Request {
        chain,
        prompt_tokens: 401 + rng.random_range(0..40),
        tokens_per_block: BLOCK as f64,
        expected_output_tokens: rng.random_bool(0.5).then_some(50),
        session: rng.random_bool(0.5).then(|| rng.next_u64()),
        tenant: Tenant { id: rng.random_range(0..3), ..Tenant::default() },
        lora: rng.random_bool(0.5).then(|| rng.random_range(1..3)),
        ..Request::default()
    }
}

/// The evaluator before kernels: scores from whole columns, cleared before and masked after, and
/// the lowest by a plain loop. Returns the scores.
fn by_columns(
    router: &mut Router,
    request: &Request<'_>,
    now: f64,
) -> Result<(Scores, Option<Vec<usize>>), CoreError> {
    let Router { state, context, .. } = router;
    let reads = state.first.reads;
    let eligible = context.first.eligible.clone();
    state.derive(context, request, reads, context.first.able, None, now);
    let (mut scores, mut rng) = (Scores::default(), context.rng.clone());
    scores.reset(eligible.len());
    let snapshot = Snapshot {
        columns: state.indicators(context),
        eligible: &eligible,
        eligible_count: context.first.candidates,
        name_hashes: state.fleet.name_hashes(),
        ordinal: state.first.made,
        session: request.session,
    };
    assert!(snapshot.columns.kernels().is_none());
    state.first.policy.score(&snapshot, &mut rng, &mut scores)?;
    context.rng = rng;
    let masked = scores.score.iter_mut().zip(&eligible);
    masked.for_each(|(score, eligible)| *score = nan_unless(*eligible, *score));
    let sign = if scores.prefer == Prefer::Min { 1.0 } else { -1.0 };
    let key = |slot: usize| {
        let then = scores.then[..scores.then_count].iter();
        let then = then.map(|column| if column[slot].is_nan() { f64::INFINITY } else { column[slot] });
        std::iter::once(sign * scores.score[slot]).chain(then).collect::<Vec<_>>()
    };
    let finite: Vec<usize> = (0..eligible.len()).filter(|slot| scores.score[*slot].is_finite()).collect();
    let lowest = finite.iter().map(|slot| key(*slot)).min_by(|a, b| a.partial_cmp(b).unwrap());
    let tied = lowest.map(|lowest| finite.into_iter().filter(|slot| key(*slot) == lowest).collect());
    Ok((scores, tied))
}

fn bits(values: &[f64]) -> Vec<u64> {
    values.iter().map(|value| if value.is_nan() { f64::NAN.to_bits() } else { value.to_bits() }).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// Equal scores, choices, draws and terms, for each policy, in fleets of one and more chunks.
    #[test]
    fn kernels_by_chunks_equal_whole_columns(seed: u64, slots in prop_oneof![1..9usize, 60..70usize, 500..1100usize]) {
        for policy in policies() {
            let name = policy.spec().formula.to_string();
            let mut rng = PolicyRng::seed_from_u64(seed);
            let mut router = fleet(policy, slots, &mut rng).unwrap();
            let chain = chain(rng.random_range(0..7), 400);
            let request = request(&chain, &mut rng);
            let now = 0.7;
            router.match_prefix(&request);
            let before = router.context.rng.clone();
            let Ok(chosen) = router.score(&request, now) else { continue };
            let after = std::mem::replace(&mut router.context.rng, before);
            let unscored = router.context.first.scores.unscored;
            let mut record = router.requests.records.take();
            router.state.explain(&mut router.context, &request, chosen, now, &mut record);

            let (mut expected, tied) = by_columns(&mut router, &request, now).unwrap();
            prop_assert_eq!(tied.is_none(), unscored, "{}", &name);
            let Some(tied) = tied else { continue };
            prop_assert!(tied.contains(&chosen.index()), "{}", &name);
            let found = &router.context.first.scores;
            prop_assert_eq!(bits(&found.score), bits(&expected.score), "{}", &name);
            prop_assert_eq!((found.prefer, found.filter_waived), (expected.prefer, expected.filter_waived));
            for (a, b) in found.then[..found.then_count].iter().zip(&expected.then) {
                prop_assert_eq!(bits(a), bits(b), "{}", &name);
            }
            let eligible = router.context.first.eligible.clone();
            let again = best(&mut expected, &eligible, &mut router.context.rng);
            prop_assert_eq!(again, Some(chosen.index()), "{}", &name);
            prop_assert!(router.context.rng == after, "{}: draws", &name);

            // The record: the best slots in order, and the values of the columns.
            let sign = if record.prefer == Prefer::Min { 1.0 } else { -1.0 };
            let mut order: Vec<usize> = (0..slots).filter(|slot| expected.score[*slot].is_finite()).collect();
            prop_assert_eq!(record.scored as usize, order.len());
            let counted = record.scored + record.left_out + record.filtered;
            prop_assert_eq!(counted as usize, router.context.first.candidates);
            prop_assert_eq!(record.drawn_from as usize, tied.len());
            order.sort_by(|a, b| (sign * expected.score[*a]).partial_cmp(&(sign * expected.score[*b])).unwrap());
            let kept: Vec<usize> = record.best.iter().map(|best| best.slot as usize).collect();
            let same = kept.iter().zip(&order).take_while(|(kept, slot)| kept == slot).count();
            prop_assert!(same == kept.len() || same + 1 == kept.len() && kept[same] == chosen.index(), "{name} {kept:?} {chosen:?} {:?}", order.iter().take(10).map(|s| (*s, expected.score[*s])).collect::<Vec<_>>());
            let columns = router.state.indicators(&router.context);
            for (candidate, terms) in record.explained() {
                for (id, value) in record.reads.iter().zip(terms) {
                    let slot = if IndicatorSet::OF_REQUEST.contains(id) { 0 } else { candidate.slot as usize };
                    prop_assert_eq!(bits(&[columns.get(id)[slot]]), bits(&[*value]), "{} {:?}", &name, id);
                }
            }
        }
    }
}

/// Indicators of one slot equal those of the whole column.
#[test]
fn a_single_slot_has_the_values_of_the_column() {
    let mut rng = PolicyRng::seed_from_u64(5);
    let policy = Registry::CORE.policy("lmetric", &[]).unwrap();
    let mut router = fleet(policy, 20, &mut rng).unwrap();
    router.derive_some(IndicatorSet::ALL, 1.0);
    let one = router.columns().get(Indicator::PredictedTtftSeconds).to_vec();
    let Router { state, context, .. } = &mut router;
    let request = Request::default();
    let kernels = state.kernels(&context.matched, &request, IndicatorSet::ALL, None, &[], 1.0);
    let out = context.later.scores.scratch.computed();
    for (slot, value) in one.iter().enumerate() {
        crate::indicators::Kernels::fill(&kernels, IndicatorSet::COMPUTED, slot..slot + 1, 3, out);
        assert_eq!(out.get(Indicator::PredictedTtftSeconds)[3], *value);
    }
}
