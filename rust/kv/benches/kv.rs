//! Index and hash with warm caches: `cargo bench -p lmetric-kv --bench kv`. For percentiles, run
//! `cargo run --release -p lmetric-kv --example index_latency`.
use criterion::{Criterion, criterion_group, criterion_main};
use lmetric_kv::Slot;
use lmetric_kv::hash::{chain, hash_text, hash_tokens};
use lmetric_kv::index::KvIndex;
use std::hint::black_box;

mod workload;
use workload::{INSTANCES, chained, domain, filled, prompt, queries};

fn hash(c: &mut Criterion) {
    let tokens: Vec<u32> = (0..8192).map(|i| i * 40503 % 128_000).collect();
    let text: Vec<u8> = (0..32_768u32).map(|i| (i * 31 % 251) as u8).collect();
    let mut out = Vec::with_capacity(8192);
    for block in [16, 64] {
        c.bench_function(&format!("hash 8k tokens, block {block}"), |b| {
            b.iter(|| {
                out.clear();
                hash_tokens(domain(), block, black_box(&tokens), &mut out);
                out.last().copied()
            });
        });
    }
    c.bench_function("hash 32 KB of text, block 256", |b| {
        b.iter(|| {
            out.clear();
            hash_text(domain(), 256, black_box(&text), &mut out);
            out.last().copied()
        });
    });
}

fn match_prefix(c: &mut Criterion) {
    let index = filled(1 << 29);
    let mut hits = vec![0; INSTANCES];
    for blocks in [64, 512, 2048] {
        let queries = queries(blocks);
        let mut hashes = Vec::with_capacity(2048);
        let mut next = (0..queries.len()).cycle();
        c.bench_function(&format!("chain + match, {blocks} blocks"), |b| {
            b.iter(|| {
                hashes.clear();
                chain(domain(), black_box(&queries[next.next().unwrap()]), &mut hashes);
                index.match_prefix(&hashes, &mut hits);
                hits[0]
            });
        });
    }
}

fn record(c: &mut Criterion) {
    let mut index = filled(1 << 29);
    let known = chained(&prompt(7, 1985));
    c.bench_function("record a known chain of 1985 blocks", |b| {
        b.iter(|| index.record_hit(Slot(7), black_box(&known), 1985));
    });
    let mut index = KvIndex::new(1 << 26);
    index.add_instance(Slot(0), Some(65_536));
    let mut p = 0;
    c.bench_function("record 256 new blocks, evict 256", |b| {
        b.iter_batched(
            || {
                p += 1;
                chained(&prompt(p, 288))
            },
            |new| index.record(Slot(0), &new),
            criterion::BatchSize::SmallInput,
        );
    });
}

criterion_group!(benches, hash, match_prefix, record);
criterion_main!(benches);
