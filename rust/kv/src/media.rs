//! Images in prompts. Engines hash a block with the images that it touches: the identity of each,
//! and its offset from the block's start (vLLM's `("mm", identifier, offset)`). A block's part is
//! the hash of these pairs, and `hash::narrowed` puts it into the chain.
use crate::hash::{Domain, hash_tokens_after, narrowed};
use xxhash_rust::xxh3::Xxh3;

/// An image in a prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Item {
    /// Identity, as engines compute it (vLLM's `mm_hash`, or the client's `uuid`).
    pub identifier: String,
    /// Position of the image's first token in the prompt.
    pub offset: usize,
    /// Tokens of the image.
    pub length: usize,
}

/// Hash of the images that touch a block.
#[derive(Default)]
pub struct Part {
    hasher: Xxh3,
    some: bool,
}

impl Part {
    /// Adds an image whose first token is `offset` tokens behind the block's first token.
    pub fn image(&mut self, identifier: &str, offset: i64) {
        self.hasher.update(&(identifier.len() as u64).to_le_bytes());
        self.hasher.update(identifier.as_bytes());
        self.hasher.update(&offset.to_le_bytes());
        self.some = true;
    }

    /// Adds anything else that an engine hashes with the block.
    pub fn other(&mut self, raw: &[u8]) {
        self.hasher.update(raw);
        self.some = true;
    }

    /// Returns the hash; 0 if nothing was added.
    pub fn hash(&self) -> u64 {
        if self.some { self.hasher.digest() | 1 } else { 0 }
    }
}

/// Returns the part of each full block of a prompt of `tokens` tokens. `items` are in the order of
/// their offsets and do not overlap.
pub fn parts(items: &[Item], block_size: usize, tokens: usize) -> Vec<u64> {
    let mut parts = vec![0; tokens.checked_div(block_size).unwrap_or(0)];
    let mut first = 0;
    for (at, part) in parts.iter_mut().enumerate() {
        let (start, end) = (at * block_size, (at + 1) * block_size);
        while items.get(first).is_some_and(|item| item.offset.saturating_add(item.length) <= start) {
            first += 1;
        }
        let mut block = Part::default();
        for item in items[first..].iter().take_while(|item| item.offset < end) {
            block.image(&item.identifier, item.offset as i64 - start as i64);
        }
        *part = block.hash();
    }
    parts
}

/// Appends the chained hashes of all full blocks of `tokens`, each with its part; missing parts are
/// 0. `last`: hash of the block before (`None`: the tokens start the prompt).
pub fn hash_tokens_with(
    domain: Domain,
    block_size: usize,
    last: Option<u64>,
    tokens: &[u32],
    parts: &[u64],
    out: &mut Vec<u64>,
) {
    if block_size == 0 || parts.iter().all(|part| *part == 0) {
        return hash_tokens_after(domain, block_size, last, tokens, out);
    }
    let mut last = last.unwrap_or_else(|| domain.token_start());
    for (at, block) in tokens.chunks_exact(block_size).enumerate() {
        if let Some(part) = parts.get(at).filter(|part| **part != 0) {
            last = narrowed(last, *part);
        }
        hash_tokens_after(domain, block_size, Some(last), block, out);
        last = out.last().copied().unwrap_or(last);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn item(identifier: &str, offset: usize, length: usize) -> Item {
        Item { identifier: identifier.into(), offset, length }
    }

    fn block(images: &[(&str, i64)]) -> u64 {
        let mut part = Part::default();
        images.iter().for_each(|(identifier, offset)| part.image(identifier, *offset));
        part.hash()
    }

    /// The blocks are those of vLLM's `_gen_mm_extra_hash_keys`.
    #[test]
    fn a_block_counts_each_image_that_it_touches() {
        let items = [item("a", 6, 4), item("b", 10, 1), item("c", 12, 13), item("d", 25, 1)];
        let expected = [
            block(&[]),
            block(&[("a", 2)]),
            block(&[("a", -2), ("b", 2)]),
            block(&[("c", 0)]),
            block(&[("c", -4)]),
            block(&[("c", -8)]),
            block(&[("c", -12), ("d", 1)]),
            block(&[]),
        ];
        assert_eq!(parts(&items, 4, 33), expected);
        assert!(parts(&items, 0, 33).is_empty());
        assert_eq!(parts(&[item("a", usize::MAX, 2)], 4, 8), [0, 0]);
    }

    #[test]
    fn blocks_behind_an_image_depend_on_it() {
        let (domain, tokens) = (Domain::new(&[], 4), vec![7; 16]);
        let chain = |items: &[Item]| {
            let mut out = Vec::new();
            hash_tokens_with(domain, 4, None, &tokens, &parts(items, 4, 16), &mut out);
            out
        };
        let plain = chain(&[]);
        let (a, b, later) = (chain(&[item("a", 5, 2)]), chain(&[item("b", 5, 2)]), chain(&[item("a", 6, 2)]));
        assert_eq!((a[0], b[0]), (plain[0], plain[0]));
        for other in [&b, &later, &plain] {
            assert!(a[1..].iter().zip(&other[1..]).all(|(one, two)| one != two));
        }
    }
}
