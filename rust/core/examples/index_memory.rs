//! Memory of the index under many distinct prompts: it rises to its bound and stays there.
//!
//! `cargo run --release -p lmetric-core --example index_memory -- [prompts] [index MiB] [feed MiB]` (10,000,000, 64 and 48). 64
//! instances; each prompt has 24 blocks of 16 tokens, of which it shares the first 8 with a tenth of the others. "exact" also
//! keeps the map from engine hashes, and every eighth block is removed again by its engine.
use lmetric_core::InstanceId;
use lmetric_core::kv::feeds::ExactFeed;
use lmetric_core::kv::hash::{Domain, hash_tokens};
use lmetric_core::kv::index::KvIndex;
use std::time::Instant;

const INSTANCES: u64 = 64;
const BLOCKS: u64 = 24;
const SHARED: u64 = 8;
const BLOCK: usize = 16;

/// The prompt's tokens: 16 to a block, from a number of the block.
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
    let (prompts, index_bytes, feed_bytes) = (given(0, 10_000_000), given(1, 64) << 20, given(2, 48) << 20);
    for exact in [false, true] {
        let mut index = KvIndex::new(index_bytes as usize);
        let mut feed = ExactFeed::new(feed_bytes as usize);
        (0..INSTANCES as u32).for_each(|i| assert!(index.add_instance(InstanceId(i), None)));
        println!(
            "\n{} feed, index at most {} MiB",
            if exact { "exact" } else { "approximate" },
            index_bytes >> 20
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
            let instance =
                InstanceId((n.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32) as u32 % INSTANCES as u32);
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
                let domain = Domain::new(&[Some("model")], BLOCK);
                feed.reported(&mut index, instance, None, &engine, &tokens, BLOCK, domain);
                feed.removed(&mut index, instance, &engine[BLOCKS as usize - 2..]);
            } else {
                chain.clear();
                hash_tokens(Domain::new(&[Some("model")], BLOCK), BLOCK, &tokens, &mut chain);
                index.record(instance, &chain);
            }
            if n + 1 == next || n + 1 == prompts {
                next = if next.to_string().starts_with('1') { next * 3 } else { next / 3 * 10 };
                let (pairs, entries) = (index.pairs(), feed.entries());
                let per = |bytes: usize, n: usize| if n == 0 { 0.0 } else { bytes as f64 / n as f64 };
                println!(
                    "{:>11}{:>11}{:>13}{:>8.1}{:>13}{:>8.1}{:>13}{:>13}{:>9.1}",
                    n + 1,
                    pairs,
                    index.bytes(),
                    per(index.bytes(), pairs),
                    feed.bytes(),
                    per(feed.bytes(), entries),
                    resident_bytes(),
                    index.evicted_blocks(),
                    start.elapsed().as_secs_f64(),
                );
            }
        }
    }
}
