//! The chained hashes that name KV blocks: a block's hash covers everything before it.
use std::hash::Hasher;
use xxhash_rust::xxh3::{xxh3_64, xxh3_64_with_seed};

/// Start of every chain without a salt. Equal in every engine, so that equal prompts have equal
/// block hashes.
const ROOT: u64 = 0x6c6d_6574_7269_6331;

/// Returns the start of a request's chains. Requests with different cache salts share no block.
pub fn root(salt: Option<&str>) -> u64 {
    salt.map_or(ROOT, |salt| xxh3_64_with_seed(salt.as_bytes(), ROOT))
}

/// Returns the hash of a block behind `previous` (the hash of the block before, or a root).
pub fn block(previous: u64, tokens: &[u32], bytes: &mut Vec<u8>) -> u64 {
    bytes.clear();
    bytes.extend_from_slice(&previous.to_le_bytes());
    tokens.iter().for_each(|token| bytes.extend_from_slice(&token.to_le_bytes()));
    xxh3_64(bytes)
}

/// Returns a hash behind `previous` that no other request can have.
pub fn own(previous: u64, request: u64) -> u64 {
    xxh3_64_with_seed(&previous.to_le_bytes(), !request)
}

/// Extends `chain` to `blocks` blocks, with hashes that only this request can have. An empty chain
/// starts at the root without a salt.
pub fn extend_own(chain: &mut Vec<u64>, blocks: usize, request: u64) {
    while chain.len() < blocks {
        chain.push(own(chain.last().copied().unwrap_or(root(None)), request));
    }
}

/// Extends `chain`, which starts at `root`, by all further full blocks of `tokens`.
pub fn extend(root: u64, block_tokens: usize, tokens: &[u32], bytes: &mut Vec<u8>, chain: &mut Vec<u64>) {
    for full in tokens.chunks_exact(block_tokens).skip(chain.len()) {
        let previous = chain.last().copied().unwrap_or(root);
        chain.push(block(previous, full, bytes));
    }
}

/// Hasher of maps by the hashes of blocks.
#[derive(Clone, Copy, Debug, Default)]
pub struct ChainHasher(u64);

impl Hasher for ChainHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|&byte| self.write_u64(self.0 ^ u64::from(byte)));
    }

    fn write_u64(&mut self, hash: u64) {
        self.0 = spread(hash);
    }
}

/// Spreads a block's hash over all bits. It is a hash already, so one multiplication is enough,
/// whatever its source.
#[inline]
fn spread(hash: u64) -> u64 {
    let wide = u128::from(hash) * 0x9e37_79b9_7f4a_7c15_u128;
    wide as u64 ^ (wide >> 64) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_hash_covers_everything_before_it_and_the_salt() {
        let chain = |salt, tokens: &[u32]| {
            let mut chain = Vec::new();
            extend(root(salt), 2, tokens, &mut Vec::new(), &mut chain);
            chain
        };
        let base = chain(None, &[1, 2, 3, 4, 5]);
        assert_eq!(base.len(), 2);
        assert_eq!(base, chain(None, &[1, 2, 3, 4, 6]));
        let other = chain(None, &[9, 2, 3, 4, 5]);
        assert!(base[0] != other[0] && base[1] != other[1]);
        assert!(base[0] != chain(Some("a"), &[1, 2])[0]);
        let mut grown = base[..1].to_vec();
        extend(root(None), 2, &[1, 2, 3, 4], &mut Vec::new(), &mut grown);
        assert_eq!(grown, base);
    }
}
