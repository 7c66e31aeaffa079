//! Memory and cost of the index by fleet size.
//!
//! `cargo run --release -p lmetric-kv --example index_fleet -- [instances] [blocks] [GiB]` (256,
//! 4,000 and 16). Each instance holds `blocks` blocks: a system prompt that all instances hold, the
//! prompts of one of 8 groups of users, and its own prompts. To count instructions, run the built
//! example under callgrind and read the inclusive costs of the four functions below.
use lmetric_kv::Slot;
use lmetric_kv::index::KvIndex;
use std::hint::black_box;
use std::time::Instant;

/// Blocks of the system prompt, and of the prompt of a group.
const SYSTEM: usize = 64;
const GROUP: usize = 192;
const GROUPS: usize = 8;
/// Blocks of an instance's own prompts.
const PROMPT: usize = 128;
/// Instances whose operations are measured, spread over the fleet, and rounds for each.
const MEASURED: usize = 64;
const ROUNDS: usize = 4;

/// Returns blocks of one prompt, with hashes that no other prompt has.
fn blocks(prompt: u64, count: usize) -> impl Iterator<Item = u64> {
    (0..count as u64).map(move |block| (prompt << 20 | block).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
}

/// Returns the blocks that an instance shares with others.
fn shared(instance: usize) -> Vec<u64> {
    blocks(0, SYSTEM).chain(blocks(1 + (instance % GROUPS) as u64, GROUP)).collect()
}

#[inline(never)]
fn match_all(index: &KvIndex, chains: &[Vec<u64>], hits: &mut [u32]) {
    for chain in chains {
        index.match_prefix(black_box(chain), hits);
        black_box(&hits);
    }
}

#[inline(never)]
fn remove_all(index: &mut KvIndex, ids: &[Slot], chains: &[Vec<u64>]) {
    for (id, chain) in ids.iter().zip(chains) {
        index.removed_all(*id, black_box(chain));
    }
}

#[inline(never)]
fn store_all(index: &mut KvIndex, ids: &[Slot], chains: &[Vec<u64>]) {
    for (id, chain) in ids.iter().zip(chains) {
        index.stored(*id, None, black_box(chain));
    }
}

#[inline(never)]
fn record_all(index: &mut KvIndex, ids: &[Slot], chains: &[Vec<u64>]) {
    for (id, chain) in ids.iter().zip(chains) {
        index.record(*id, black_box(chain));
    }
}

fn main() {
    let numbers: Vec<usize> = std::env::args().skip(1).map(|a| a.parse().expect("a number")).collect();
    let given = |n: usize, default: usize| numbers.get(n).copied().unwrap_or(default);
    let (instances, each, gib) = (given(0, 256), given(1, 4000), given(2, 16));
    let mut index = KvIndex::new(gib << 30);
    for i in 0..instances {
        assert!(index.add_instance(Slot(i as u32), None), "at most {i} instances");
    }
    let start = Instant::now();
    for i in 0..instances {
        let id = Slot(i as u32);
        let chain = shared(i);
        index.stored(id, None, &chain);
        for prompt in 0..each.saturating_sub(chain.len()).div_ceil(PROMPT) {
            let left = each - chain.len() - prompt * PROMPT;
            let behind = *chain.last().expect("shared blocks");
            let own: Vec<u64> = blocks((i * 1000 + prompt + 100) as u64, left.min(PROMPT)).collect();
            index.stored(id, Some(behind), &own);
        }
    }
    let (pairs, bytes) = (index.pairs(), index.bytes());
    println!(
        "{instances} instances: {pairs} pairs, {bytes} bytes, {:.2} a pair, {:.1} s to store",
        bytes as f64 / pairs.max(1) as f64,
        start.elapsed().as_secs_f64(),
    );
    let ids: Vec<Slot> = (0..MEASURED).map(|n| Slot((n * instances / MEASURED) as u32)).collect();
    let chains: Vec<Vec<u64>> = ids.iter().map(|id| shared(id.index())).collect();
    let backwards: Vec<Vec<u64>> = chains.iter().map(|chain| chain.iter().rev().copied().collect()).collect();
    let mut hits = vec![0; instances];
    let mut took = [0.0; 4];
    for _ in 0..ROUNDS {
        let mut timed = |at: usize, step: &mut dyn FnMut()| {
            let start = Instant::now();
            step();
            took[at] += start.elapsed().as_secs_f64();
        };
        timed(0, &mut || match_all(&index, &chains, &mut hits));
        timed(1, &mut || remove_all(&mut index, &ids, &backwards));
        timed(2, &mut || store_all(&mut index, &ids, &chains));
        timed(3, &mut || record_all(&mut index, &ids, &chains));
    }
    let calls = (ROUNDS * MEASURED) as f64;
    for (seconds, name) in took.iter().zip(["match", "remove", "store", "record"]) {
        println!("{name} {} blocks: {:.2} µs", SYSTEM + GROUP, seconds / calls * 1e6);
    }
}
