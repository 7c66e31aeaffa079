//! Memory of the index under many distinct prompts: it rises to its bound and stays there.
//!
//! `cargo run --release -p lmetric-core --example index_memory -- [prompts] [MiB]` (10,000,000 and
//! 96). 64 instances; each prompt has 24 blocks of 16 tokens and shares the first 8 with a tenth of
//! the others. "exact" also keeps the map from engine hashes, and the engine removes every eighth
//! block again.
use lmetric_core::Registry;
use lmetric_core::feed::{KvFeed, Means, Source, Stored};
use lmetric_core::fleet::Role;
use lmetric_core::kv::hash::hash_tokens;
use lmetric_core::kv::keys::Keys;
use lmetric_core::router::{IndexFeed, Router, RouterConfig, SharedRouter};
use std::time::Instant;

const INSTANCES: u64 = 64;
const BLOCKS: u64 = 24;
const SHARED: u64 = 8;
const BLOCK: usize = 16;

/// Writes the prompt's tokens: 16 per block, derived from the block's number.
fn prompt(n: u64, out: &mut Vec<u32>) {
    out.clear();
    for block in 0..BLOCKS {
        let id = if block < SHARED { n % 10 * 31 + block } else { n << 8 | block };
        out.extend(
            (0..BLOCK as u64).map(|t| (id.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 44) as u32 ^ t as u32),
        );
        let at = out.len() - BLOCK;
        (out[at], out[at + 1]) = (id as u32, (id >> 32) as u32);
    }
}

fn resident_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    status.split(' ').nth(1).and_then(|pages| pages.parse::<u64>().ok()).unwrap_or(0) * 4096
}

fn main() {
    let numbers: Vec<u64> = std::env::args().skip(1).map(|a| a.parse().expect("a number")).collect();
    let given = |n: usize, default: u64| numbers.get(n).copied().unwrap_or(default);
    let (prompts, bytes) = (given(0, 10_000_000), given(1, 96) << 20);
    let keys = Keys::new(&[Some("model".into())], BLOCK, 256).expect("a key scheme");
    for exact in [false, true] {
        let index_feed = if exact { IndexFeed::Exact } else { IndexFeed::Approximate };
        // The index has the same bytes with both feeds; the names need more bytes in addition.
        let bytes = if exact { bytes } else { bytes - bytes / 3 } as usize;
        let config = RouterConfig { index_feed, index_bytes: bytes, ..RouterConfig::default() };
        let policy = Registry::CORE.policy("lmetric", &[]).expect("a registered policy");
        let shared = SharedRouter::new(Router::new(policy, config).expect("a router"));
        let feed = KvFeed::new(shared.clone(), keys, bytes, exact);
        let sources: Vec<Source> = (0..INSTANCES)
            .map(|i| {
                let name = format!("engine-{i}");
                shared.lock().add_instance(&name, Role::Both, None).expect("an instance");
                feed.source(&name, 0).expect("the instance")
            })
            .collect();
        println!(
            "\n{} feed, index at most {} MiB",
            if exact { "exact" } else { "approximate" },
            shared.lock().caches().read().gpu().byte_bound() >> 20
        );
        let names = [
            "prompts",
            "pairs",
            "index bytes",
            "a pair",
            "feed bytes",
            "a name",
            "resident",
            "evicted",
            "seconds",
        ];
        println!(
            "{:>11}{:>11}{:>13}{:>8}{:>13}{:>8}{:>13}{:>13}{:>9}",
            names[0], names[1], names[2], names[3], names[4], names[5], names[6], names[7], names[8]
        );
        let (mut tokens, mut chain) = (Vec::new(), Vec::new());
        let (start, mut next) = (Instant::now(), 1000);
        for n in 0..prompts {
            let source = sources[((n.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32) % INSTANCES) as usize];
            prompt(n, &mut tokens);
            if exact {
                let engine: [u64; BLOCKS as usize] = std::array::from_fn(|b| {
                    let id = if (b as u64) < SHARED {
                        ((n % 10) << 8) | b as u64
                    } else {
                        (n + 10) << 8 | b as u64
                    };
                    id.wrapping_mul(0x2545_f491_4f6c_dd1d)
                });
                let stored = Stored {
                    parent: None,
                    engine_hashes: &engine,
                    token_ids: &tokens,
                    domain: keys.tokens,
                    narrowing: &[],
                    means: Means::Report,
                };
                feed.stored(source, &stored);
                feed.removed(source, &engine[BLOCKS as usize - 2..]);
            } else {
                chain.clear();
                hash_tokens(keys.tokens, BLOCK, &tokens, &mut chain);
                shared.lock().caches().write().gpu_mut().record(source.instance.slot(), &chain);
            }
            if n + 1 == next || n + 1 == prompts {
                next = if next.to_string().starts_with('1') { next * 3 } else { next / 3 * 10 };
                let (entries, name_bytes) = feed.names();
                let router = shared.lock();
                let caches = router.caches().read();
                let (index, pairs) = (caches.gpu(), caches.gpu().pairs());
                let per = |bytes: usize, n: usize| if n == 0 { 0.0 } else { bytes as f64 / n as f64 };
                println!(
                    "{:>11}{:>11}{:>13}{:>8.1}{:>13}{:>8.1}{:>13}{:>13}{:>9.1}",
                    n + 1,
                    pairs,
                    index.bytes(),
                    per(index.bytes(), pairs),
                    name_bytes,
                    per(name_bytes, entries),
                    resident_bytes(),
                    index.evicted_blocks(),
                    start.elapsed().as_secs_f64(),
                );
            }
        }
    }
}
