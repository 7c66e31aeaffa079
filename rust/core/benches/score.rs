//! Scoring and selection over instances, including clearing the scores:
//! `cargo bench -p lmetric-core --bench score`.
use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use lmetric_core::indicators::{Columns, Indicator, Snapshot};
use lmetric_core::policy::{ExpressionPolicy, ExpressionSource, Policy, PolicyRng, Scores, best};
use rand::SeedableRng;
use std::hint::black_box;

fn bench(c: &mut Criterion) {
    let mut group = c.benchmark_group("score+best");
    for slots in [64, 1024] {
        let mut columns = Columns::default();
        columns.resize(slots);
        for (id, step) in [(Indicator::PToken, 7919), (Indicator::Bs, 31), (Indicator::KvHit, 1)] {
            let values = columns.get_mut(id).iter_mut().enumerate();
            values.for_each(|(i, x)| *x = ((i + 1) * step % 4093) as f64);
        }
        let eligible: Vec<bool> = (0..slots).map(|i| i % 97 != 5).collect();
        for (name, filter, score) in [
            ("lmetric", None, "p_token * (bs + 1)"),
            ("linear", None, "0.7 * (1 - kv_hit) + 0.3 * norm(bs)"),
            ("filter", Some("bs - min(bs) <= 8"), "1 - kv_hit"),
        ] {
            let source = ExpressionSource {
                filter: filter.map(str::to_string),
                score: score.into(),
                ..Default::default()
            };
            let policy = ExpressionPolicy::custom(Some(name), source, &[]).expect("a valid policy");
            let snapshot = Snapshot {
                columns: (&columns).into(),
                eligible: &eligible,
                eligible_count: eligible.iter().filter(|e| **e).count(),
                name_hashes: &[],
                ordinal: 0,
                session: None,
            };
            let (mut scores, mut rng) = (Scores::default(), PolicyRng::seed_from_u64(0));
            group.bench_function(BenchmarkId::new(name, slots), |b| {
                b.iter(|| {
                    scores.reset(slots);
                    policy.score(black_box(&snapshot), &mut rng, &mut scores).expect("scores");
                    best(&mut scores, &eligible, &mut rng)
                });
            });
            group.bench_function(BenchmarkId::new(format!("{name}/score"), slots), |b| {
                b.iter(|| {
                    scores.reset(slots);
                    policy.score(black_box(&snapshot), &mut rng, &mut scores).expect("scores");
                });
            });
        }
    }
}

criterion_group!(benches, bench);
criterion_main!(benches);
