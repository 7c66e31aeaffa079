//! Cost of the guard per decision: `cargo bench -p lmetric-core --bench guard`.
use criterion::{Criterion, criterion_group, criterion_main};
use lmetric_core::Slot;
use lmetric_core::guard::{Guard, GuardConfig, Phase};
use lmetric_core::policy::Scores;
use std::hint::black_box;

const INSTANCES: usize = 256;

/// Returns a prompt of `shared` blocks common to all prompts, followed by its own blocks.
fn prompt(id: u64, shared: usize, blocks: usize) -> Vec<u64> {
    let block =
        |i: usize| (i as u64 + 1 + if i < shared { 0 } else { id << 20 }).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    (0..blocks).map(block).collect()
}

fn guard(c: &mut Criterion) {
    let mut scores = Scores::default();
    scores.reset(INSTANCES);
    scores.score.iter_mut().enumerate().for_each(|(i, s)| *s = 1.0 + i as f64);
    let mut eligible = vec![true; INSTANCES];
    let mut decide = |guard: &mut Guard, now: f64, chain: &[u64]| {
        black_box(guard.excluded(chain).map(|slots| slots.exclude_from(&mut eligible)));
        guard.observe(now, chain, chain.len() as u32, &scores, &eligible, Slot(0));
    };

    let mut group = c.benchmark_group("guard_per_decision");
    for blocks in [64, 2048] {
        let prompts: Vec<_> = (0..1000).map(|id| prompt(id, 1, blocks)).collect();
        let (mut quiet, mut i) = (Guard::new(GuardConfig::default()).expect("defaults"), 0usize);
        group.bench_function(format!("{blocks} blocks matched, nothing alarmed"), |b| {
            b.iter(|| {
                i += 1;
                decide(&mut quiet, i as f64 * 1e-3, &prompts[i % prompts.len()]);
            });
        });
    }
    let chain = prompt(1, 64, 64);
    let mut hot = Guard::new(GuardConfig { phase2_factor: 1e9, ..GuardConfig::default() }).expect("defaults");
    (0..100).for_each(|_| decide(&mut hot, 0.0, &chain));
    hot.tick(0.0, INSTANCES, |_, out| out.push(Slot(0)));
    assert_eq!(hot.alarms()[0].phase, Phase::Suspected);
    group.bench_function("a request of a suspected class, 256 instances", |b| {
        b.iter(|| decide(&mut hot, 0.0, &chain))
    });
    group.bench_function("a tick, 64 classes", |b| {
        b.iter(|| black_box(hot.tick(0.0, INSTANCES, |_, out| out.push(Slot(0)))));
    });
}

criterion_group!(benches, guard);
criterion_main!(benches);
