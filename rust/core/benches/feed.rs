//! The feed of a router with warm caches: `cargo bench -p lmetric-core --bench feed`.
use criterion::{Criterion, criterion_group, criterion_main};
use lmetric_core::Registry;
use lmetric_core::feed::{KvFeed, Means, Stored};
use lmetric_core::fleet::Role;
use lmetric_core::kv::keys::Keys;
use lmetric_core::router::{IndexFeed, Router, RouterConfig, SharedRouter};

fn feed(c: &mut Criterion) {
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

criterion_group!(benches, feed);
criterion_main!(benches);
