//! Percentiles of matching and feeding at 256 instances and about 1M (instance, block) pairs.
//!
//! `cargo run --release -p lmetric-kv --example index_latency`. "cold": 64 MB are written between
//! queries.
use lmetric_kv::Slot;
use lmetric_kv::hash::{chain, hash_tokens};
use lmetric_kv::index::KvIndex;
use std::cell::RefCell;
use std::hint::black_box;
use std::time::Instant;

#[path = "../benches/workload/mod.rs"]
mod workload;
use workload::{INSTANCES, chained, domain, filled, prompt, queries};

fn row(name: &str, mut nanoseconds: Vec<u64>) {
    nanoseconds.sort_unstable();
    let at = |share: f64| nanoseconds[((nanoseconds.len() - 1) as f64 * share) as usize] as f64 / 1e3;
    println!("{name:44} {:9.3} {:9.3} {:9.3}", at(0.0), at(0.5), at(0.99));
}

fn times(rounds: usize, mut before: impl FnMut(usize), mut call: impl FnMut(usize)) -> Vec<u64> {
    let time = |i| {
        before(i);
        let start = Instant::now();
        call(i);
        start.elapsed().as_nanos() as u64
    };
    (0..rounds).map(time).collect()
}

fn main() {
    let start = Instant::now();
    let mut index = filled(1 << 29);
    let fill = start.elapsed().as_nanos() as f64 / index.pairs() as f64;
    println!(
        "{} pairs, {} distinct blocks, {:.1} bytes a pair, filled at {fill:.0} ns a pair",
        index.pairs(),
        index.nodes(),
        index.bytes() as f64 / index.pairs() as f64,
    );
    println!("{:44} {:>9} {:>9} {:>9}", "microseconds", "min", "p50", "p99");
    let (mut hits, mut hashes) = (vec![0; INSTANCES], Vec::with_capacity(4096));
    let mut flush = vec![0u64; 8 << 20];
    for blocks in [64, 512, 2048] {
        let queries = queries(blocks);
        let chains: Vec<Vec<u64>> = queries.iter().map(|q| chained(q)).collect();
        row(
            &format!("chain {blocks} blocks"),
            times(
                5000,
                |_| {},
                |i| {
                    hashes.clear();
                    chain(domain(), &queries[i % queries.len()], &mut hashes);
                    black_box(&hashes);
                },
            ),
        );
        row(
            &format!("match {blocks} blocks"),
            times(20_000, |_| {}, |i| index.match_prefix(&chains[i % chains.len()], black_box(&mut hits))),
        );
        row(
            &format!("chain + match {blocks} blocks"),
            times(
                20_000,
                |_| {},
                |i| {
                    hashes.clear();
                    chain(domain(), &queries[i % queries.len()], &mut hashes);
                    index.match_prefix(&hashes, black_box(&mut hits));
                },
            ),
        );
        // The chain was just computed, so only the index is cold.
        let chain = RefCell::new(Vec::new());
        row(
            &format!("match {blocks} blocks, cold"),
            times(
                200,
                |i| {
                    flush.iter_mut().for_each(|x| *x += 1);
                    *chain.borrow_mut() = chained(&queries[i % queries.len()]);
                },
                |_| index.match_prefix(&chain.borrow(), black_box(&mut hits)),
            ),
        );
    }
    let tokens: Vec<u32> = (0..100_000).map(|i| i * 40503 % 128_000).collect();
    for n in [1024, 8192, 100_000] {
        row(
            &format!("hash {n} tokens, block 16"),
            times(
                2000,
                |_| {},
                |_| {
                    hashes.clear();
                    hash_tokens(domain(), 16, black_box(&tokens[..n]), &mut hashes);
                    black_box(&hashes);
                },
            ),
        );
    }
    let known: Vec<Vec<u64>> = (0..512).map(|p| chained(&prompt(p, 1985))).collect();
    let on = |i: usize| Slot((i % 512 % INSTANCES) as u32);
    row("record 1985 known blocks", times(5000, |_| {}, |i| index.record(on(i), &known[i % 512])));
    row(
        "record 1985 known blocks, hit given",
        times(
            5000,
            |_| {},
            |i| {
                index.record_hit(on(i), &known[i % 512], 1985);
            },
        ),
    );
    row("touch 1800 blocks", times(5000, |_| {}, |i| index.touch(on(i), &known[i % 512], 1800)));
    let new: Vec<Vec<u64>> = (0..512).map(|p| chained(&prompt(p + 1000, 544))).collect();
    row("record 512 new blocks", times(512, |_| {}, |i| index.record(on(i), &new[i])));
    for i in 0..INSTANCES as u32 {
        let blocks = index.blocks(Slot(i));
        index.add_instance(Slot(i), Some(blocks));
    }
    let more: Vec<Vec<u64>> = (0..512).map(|p| chained(&prompt(p + 2000, 544))).collect();
    row("record 512 new blocks, evict 512", times(512, |_| {}, |i| index.record(on(i), &more[i])));
    holes(&mut index, &known);
}

/// Measures matching while one in a hundred blocks was evicted before the blocks behind it.
fn holes(index: &mut KvIndex, known: &[Vec<u64>]) {
    let mut hits = vec![0; INSTANCES];
    let holders: Vec<Slot> = (0..INSTANCES as u32).map(Slot).collect();
    let mut gone = 0;
    for (p, chain) in known.iter().enumerate() {
        for at in (40..chain.len()).step_by(100) {
            gone += usize::from(index.removed(holders[p % INSTANCES], chain[(at + p * 7) % chain.len()]));
        }
    }
    let name = format!("match 1985 blocks, {gone} inner blocks evicted");
    row(&name, times(5000, |_| {}, |i| index.match_prefix(&known[i % known.len()], black_box(&mut hits))));
}
