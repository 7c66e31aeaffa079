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
        let _ = (parts, block_size);
        todo!()
    }

    /// This domain narrowed by a request's own part (cache salt, adapter).
    pub fn with(self, part: &str) -> Domain {
        let _ = part;
        todo!()
    }
}

/// Appends the chained hashes of all full blocks of `tokens` to `out`.
pub fn hash_tokens(domain: Domain, block_size: usize, tokens: &[u32], out: &mut Vec<u64>) {
    let _ = (domain, block_size, tokens, out);
    todo!()
}

/// Appends the chained hashes of all full blocks of `block_bytes` bytes of `text` to `out`.
pub fn hash_text(domain: Domain, block_bytes: usize, text: &[u8], out: &mut Vec<u64>) {
    let _ = (domain, block_bytes, text, out);
    todo!()
}

/// Appends the chained hashes over `local` block hashes (e.g. a trace's `hash_ids`) to `out`.
pub fn chain(domain: Domain, local: &[u64], out: &mut Vec<u64>) {
    let _ = (domain, local, out);
    todo!()
}
