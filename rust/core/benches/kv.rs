//! Index and hash with warm caches: `cargo bench -p lmetric-core --bench kv`. For percentiles, run
//! `cargo run --release --example index_latency`.
use criterion::{Criterion, criterion_group, criterion_main};
use lmetric_core::InstanceId;
use lmetric_core::Registry;
use lmetric_core::fleet::Role;
use lmetric_core::kv::hash::{chain, hash_text, hash_tokens};
use lmetric_core::kv::index::KvIndex;
use lmetric_core::kv::keys::Keys;
use lmetric_core::router::feed::{KvFeed, Means, Stored};
use lmetric_core::router::{IndexFeed, Router, RouterConfig, SharedRouter};
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

fn feeds(c: &mut Criterion) {
    let mut index = filled(1 << 29);
    let known = chained(&prompt(7, 1985));
    c.bench_function("record a known chain of 1985 blocks", |b| {
        b.iter(|| index.record_hit(InstanceId(7), black_box(&known), 1985));
    });
    let mut index = KvIndex::new(1 << 26);
    index.add_instance(InstanceId(0), Some(65_536));
    let mut p = 0;
    c.bench_function("record 256 new blocks, evict 256", |b| {
        b.iter_batched(
            || {
                p += 1;
                chained(&prompt(p, 288))
            },
            |new| index.record(InstanceId(0), &new),
            criterion::BatchSize::SmallInput,
        );
    });
    let config =
        RouterConfig { index_feed: IndexFeed::Exact, index_bytes: 1 << 27, ..RouterConfig::default() };
    let policy = Registry::CORE.policy("lmetric", &[]).expect("a registered policy");
    let mut router = Router::new(policy, config).expect("a router");
    router.add_instance("engine", Role::Both, None).expect("an instance");
    let keys = Keys::new(&[Some("model".into())], 16, 256).expect("a key scheme");
    let feed = KvFeed::new(SharedRouter::new(router), keys, 1 << 27, true);
    let source = feed.source("engine", 0).expect("the instance");
    let tokens: Vec<u32> = (0..256).collect();
    let mut n = 0;
    c.bench_function("exact feed: store 16 blocks, remove 16", |b| {
        b.iter(|| {
            n += 1u64;
            let mut engine = [0u64; 16];
            engine
                .iter_mut()
                .enumerate()
                .for_each(|(i, e)| *e = (n * 16 + i as u64).wrapping_mul(0x2545_f491_4f6c_dd1d));
            feed.stored(
                source,
                &Stored {
                    parent: None,
                    engine_hashes: &engine,
                    token_ids: &tokens,
                    domain: keys.tokens.of_request(None, Some(if n % 2 == 0 { "a" } else { "b" })),
                    narrowing: &[],
                    means: Means::NewCopy,
                },
            );
            engine.reverse();
            feed.removed(source, &engine)
        });
    });
}

criterion_group!(benches, hash, match_prefix, feeds);
criterion_main!(benches);
