//! Workload of the index benchmarks: 256 instances and about 1M (instance, block) pairs. All
//! prompts share their first 32 blocks. The rest of each prompt is on one instance.
use lmetric_kv::Slot;
use lmetric_kv::hash::{Domain, chain};
use lmetric_kv::index::KvIndex;

pub(crate) const INSTANCES: usize = 256;
const SHARED: u64 = 32;
const PROMPTS: u64 = 512;

pub(crate) fn domain() -> Domain {
    Domain::new(&[Some("model"), Some("tokenizer")], 16)
}

/// Returns the local block hashes of prompt `p`.
pub(crate) fn prompt(p: u64, blocks: u64) -> Vec<u64> {
    (0..blocks).map(|b| if b < SHARED { b } else { (p + 1) << 24 | b }).collect()
}

pub(crate) fn chained(local: &[u64]) -> Vec<u64> {
    let mut out = Vec::new();
    chain(domain(), local, &mut out);
    out
}

/// Returns an index filled as by a router: each prompt recorded once, turn by turn.
pub(crate) fn filled(byte_bound: usize) -> KvIndex {
    let mut index = KvIndex::new(byte_bound);
    (0..INSTANCES as u32).for_each(|i| assert!(index.add_instance(Slot(i), None)));
    for p in 0..PROMPTS {
        let chain = chained(&prompt(p, 1985));
        for end in [600, 1300, 1985] {
            index.record(Slot((p % INSTANCES as u64) as u32), &chain[..end]);
        }
    }
    index
}

/// Returns queries of `blocks` local hashes. The last tenth of each query is not in the index.
pub(crate) fn queries(blocks: u64) -> Vec<Vec<u64>> {
    let seen = blocks * 9 / 10;
    let query = |p: u64| {
        let mut local = prompt(p, seen);
        local.extend((seen..blocks).map(|b| 1 << 60 | p << 24 | b));
        local
    };
    (0..PROMPTS).map(|n| query(n * 197 % PROMPTS)).collect()
}
