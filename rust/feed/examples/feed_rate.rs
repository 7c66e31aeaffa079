//! Cost of events without the network: batches as vLLM sends them, decoded, hashed and applied on
//! one thread.
//!
//! `cargo run --release -p lmetric-feed --example feed_rate -- [instances] [rounds]` (defaults: 256
//! and 6). Each batch stores 32 blocks of 16 tokens in one event and removes 32 other blocks in one
//! event each. The caches are full, with 2,048 blocks per instance. Seconds are the thread's CPU
//! time (Linux), so other load on the machine counts little.
use lmetric_core::Registry;
use lmetric_core::feed::KvFeed;
use lmetric_core::fleet::Role;
use lmetric_core::kv::keys::Keys;
use lmetric_core::router::{IndexFeed, Router, RouterConfig, SharedRouter};
use lmetric_feed::apply::Applier;
use rmp::encode as pack;
use std::sync::Arc;

const BLOCKS: u64 = 32;
const BLOCK: u64 = 16;
const CHAINS: u64 = 128;

fn hash(instance: u64, chain: u64, block: u64) -> u64 {
    (instance << 40 | chain << 16 | (block + 1)).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

/// Builds a batch that removes the chain stored half a round before, last block first, and stores
/// this chain.
fn batch(instance: u64, chain: u64) -> Vec<u8> {
    let mut out = Vec::new();
    pack::write_array_len(&mut out, 3).unwrap();
    pack::write_f64(&mut out, 1.8e9).unwrap();
    pack::write_array_len(&mut out, BLOCKS as u32 + 1).unwrap();
    let text = |out: &mut Vec<u8>, text: &str| pack::write_str(out, text).unwrap();
    for block in (0..BLOCKS).rev() {
        pack::write_map_len(&mut out, 4).unwrap();
        text(&mut out, "type");
        text(&mut out, "BlockRemoved");
        text(&mut out, "block_hashes");
        pack::write_array_len(&mut out, 1).unwrap();
        pack::write_u64(&mut out, hash(instance, (chain + CHAINS / 2) % CHAINS, block)).unwrap();
        text(&mut out, "medium");
        text(&mut out, "GPU");
        text(&mut out, "group_idx");
        pack::write_uint(&mut out, 0).unwrap();
    }
    pack::write_map_len(&mut out, 11).unwrap();
    text(&mut out, "type");
    text(&mut out, "BlockStored");
    text(&mut out, "block_hashes");
    pack::write_array_len(&mut out, BLOCKS as u32).unwrap();
    for block in 0..BLOCKS {
        pack::write_u64(&mut out, hash(instance, chain, block)).unwrap();
    }
    text(&mut out, "token_ids");
    pack::write_array_len(&mut out, (BLOCKS * BLOCK) as u32).unwrap();
    for token in 0..BLOCKS * BLOCK {
        let id = (instance * CHAINS + chain).wrapping_mul(0x2545_f491_4f6c_dd1d).wrapping_add(token * 7919);
        pack::write_uint(&mut out, id % 150_000).unwrap();
    }
    text(&mut out, "block_size");
    pack::write_uint(&mut out, BLOCK).unwrap();
    for absent in ["parent_block_hash", "lora_id", "lora_name"] {
        text(&mut out, absent);
        pack::write_nil(&mut out).unwrap();
    }
    text(&mut out, "medium");
    text(&mut out, "GPU");
    text(&mut out, "extra_keys");
    pack::write_array_len(&mut out, BLOCKS as u32).unwrap();
    (0..BLOCKS).for_each(|_| pack::write_nil(&mut out).unwrap());
    text(&mut out, "group_idx");
    pack::write_uint(&mut out, 0).unwrap();
    text(&mut out, "kv_cache_spec_kind");
    text(&mut out, "full_attention");
    pack::write_nil(&mut out).unwrap();
    out
}

/// Returns the CPU seconds of this thread so far.
fn ran() -> f64 {
    let told = std::fs::read_to_string("/proc/thread-self/schedstat").expect("Linux");
    told.split(' ').next().and_then(|n| n.parse::<f64>().ok()).expect("nanoseconds") / 1e9
}

fn main() {
    let numbers: Vec<u64> = std::env::args().skip(1).map(|a| a.parse().expect("a number")).collect();
    let (instances, rounds) = (*numbers.first().unwrap_or(&256), *numbers.get(1).unwrap_or(&6));
    let config =
        RouterConfig { index_feed: IndexFeed::Exact, index_bytes: 1 << 30, ..RouterConfig::default() };
    let policy = Registry::CORE.policy("lmetric", &[]).expect("a registered policy");
    let shared = SharedRouter::new(Router::new(policy, config).expect("a router"));
    let keys = Keys::new(&[Some("model".into())], BLOCK as usize, 256).expect("a key scheme");
    let feed = Arc::new(KvFeed::new(shared.clone(), keys, 1 << 30, true));
    let mut appliers: Vec<Applier> = (0..instances)
        .map(|i| {
            let name = format!("engine-{i}");
            shared.lock().add_instance(&name, Role::Both, None).expect("an instance");
            Applier::new(feed.clone(), feed.source(&name, 0).expect("the instance"))
        })
        .collect();
    let batches: Vec<Vec<Vec<u8>>> =
        (0..instances).map(|i| (0..CHAINS).map(|chain| batch(i, chain)).collect()).collect();
    for round in 0..rounds {
        let began = ran();
        for chain in 0..CHAINS as usize {
            for (applier, batches) in appliers.iter_mut().zip(&batches) {
                applier.apply(&batches[chain]);
            }
        }
        let (seconds, blocks) = (ran() - began, (instances * CHAINS * BLOCKS) as f64);
        let pairs = shared.lock().caches().read().gpu().pairs();
        println!(
            "round {round}: {blocks} blocks stored and as many removed, {pairs} pairs: {:.0} stored a second, {:.0} ns each with the removal of another",
            blocks / seconds,
            seconds / blocks * 1e9
        );
    }
}
