//! Chained block hashes: the hash of a block covers everything before it.

/// The domain of a hash chain. Prompts that must never match (another model, tokenizer, adapter, salt, block size, text
/// against tokens) start from different seeds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Domain {
    /// Where every chain of the domain starts.
    pub seed: u64,
}

impl Domain {
    /// The domain of these parts, in order; absent and empty parts differ.
    pub fn new(parts: &[Option<&str>], block_size: usize) -> Domain {
        let mut text = block_size.to_string();
        for part in parts {
            text.push_str(&format!("{part:?}"));
        }
        Domain { seed: xxhash_rust::xxh3::xxh3_64(text.as_bytes()) }
    }

    /// This domain narrowed by a request's own part (cache salt, adapter).
    pub fn with(self, part: &str) -> Domain {
        Domain { seed: xxhash_rust::xxh3::xxh3_64_with_seed(part.as_bytes(), self.seed) }
    }
}

/// Appends the chained hashes of all full blocks of `tokens` to `out`.
pub fn hash_tokens(domain: Domain, block_size: usize, tokens: &[u32], out: &mut Vec<u64>) {
    let mut h = domain.seed;
    for block in tokens.chunks_exact(block_size) {
        let bytes: Vec<u8> = block.iter().flat_map(|t| t.to_le_bytes()).collect();
        h = xxhash_rust::xxh3::xxh3_64_with_seed(&bytes, h);
        out.push(h);
    }
}

/// Appends the chained hashes of all full blocks of `block_bytes` bytes of `text` to `out`.
pub fn hash_text(domain: Domain, block_bytes: usize, text: &[u8], out: &mut Vec<u64>) {
    let mut h = domain.seed;
    for block in text.chunks_exact(block_bytes) {
        h = xxhash_rust::xxh3::xxh3_64_with_seed(block, h);
        out.push(h);
    }
}

/// Appends the chained hashes over `local` block hashes (e.g. a trace's `hash_ids`) to `out`.
pub fn chain(domain: Domain, local: &[u64], out: &mut Vec<u64>) {
    let mut h = domain.seed;
    for l in local {
        h = xxhash_rust::xxh3::xxh3_64_with_seed(&l.to_le_bytes(), h);
        out.push(h);
    }
}
