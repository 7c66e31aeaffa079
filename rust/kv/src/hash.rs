//! Chained block hashes: the hash of a block covers all tokens before it.
//!
//! A block's *local* hash `l` is keyed by the [`Domain`] and mixed over all 64 bits. The chain is
//! `h' = 5 h + l` (mod 2^64). So the state of a chain is its last hash alone, and hashing can
//! resume anywhere ([`hash_tokens_after`]). One step has two cycles of latency (shift-and-add,
//! add), and the mixing of the next blocks runs in parallel. The index finalizes hashes itself
//! before it uses their bits. The hash is not cryptographic: a forged collision can mislead a
//! prediction of the router, but never changes an engine's answer.
use crate::lines::{self, step};
use xxhash_rust::const_xxh3::const_custom_default_secret;
use xxhash_rust::xxh3::{Xxh3, xxh3_64_with_secret, xxh3_64_with_seed};

const NARROW: u64 = 0x9e6c_63d0_676a_9a99;

/// Block size in tokens with a specialized path: one cache line of token ids.
const LINE_TOKENS: usize = lines::LINE / size_of::<u32>();

/// Domain of a hash chain. Prompts that must never match start from different seeds: another model,
/// tokenizer, adapter, salt or block size, or text instead of tokens.
///
/// The parts that all prompts of a router share key the hash of every block. A request's own parts
/// ([`Domain::with`]) change only the start of its chain. Engines report these parts only with the
/// first block, and the chain carries them on through that block's hash.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Domain {
    seed: u64,
    /// Hash of the request's own parts; 0: none.
    own: u64,
}

impl Domain {
    /// Builds the domain of these parts, in order. Absent and empty parts differ.
    pub fn new(parts: &[Option<&str>], block_size: usize) -> Domain {
        let mut hasher = Xxh3::with_seed(0x6c6d_6574_7269_6300);
        hasher.update(&(block_size as u64).to_le_bytes());
        for part in parts {
            // The length goes before the bytes, so that no two lists of parts produce the same
            // input.
            let length = part.map_or(u64::MAX, |p| p.len() as u64);
            hasher.update(&length.to_le_bytes());
            hasher.update(part.unwrap_or_default().as_bytes());
        }
        Domain { seed: hasher.digest(), own: 0 }
    }

    /// Narrows this domain by a part of the request.
    pub fn with(self, part: &[u8]) -> Domain {
        Domain { own: xxh3_64_with_seed(part, self.own ^ self.seed ^ NARROW) | 1, ..self }
    }

    /// Returns the domain of a request. Prompts and engine events both use it, so that their hashes
    /// match.
    pub fn of_request(self, adapter: Option<&str>, salt: Option<&str>) -> Domain {
        let domain = adapter.map_or(self, |a| self.with(b"adapter").with(a.as_bytes()));
        salt.map_or(domain, |s| domain.with(s.as_bytes()))
    }

    /// Returns the start of token block chains.
    pub(crate) fn token_start(self) -> u64 {
        self.kind("tokens").1
    }

    /// Returns the key and the chain start for one kind of blocks, so that equal bytes of different
    /// kinds never match.
    fn kind(self, kind: &str) -> (u64, u64) {
        let keys = mix(xxh3_64_with_seed(kind.as_bytes(), self.seed ^ NARROW));
        (keys, if self.own == 0 { keys } else { mix(keys ^ self.own) })
    }
}

/// Returns the state of a chain that continues with a block of more than tokens (an image, an
/// embedding). No other chain reaches this state, so all later hashes differ too. `part`: hash of
/// the block's other content.
pub(crate) fn narrowed(last: u64, part: u64) -> u64 {
    mix(last ^ mix(part ^ NARROW))
}

/// Appends the chained hashes of all full blocks of `tokens` to `out`. A `block_size` of 0 has no
/// full blocks.
pub fn hash_tokens(domain: Domain, block_size: usize, tokens: &[u32], out: &mut Vec<u64>) {
    hash_tokens_after(domain, block_size, None, tokens, out);
}

/// Appends the hashes of tokens that follow the block with chained hash `last` (`None`: they start
/// the prompt), like [`hash_tokens`].
pub fn hash_tokens_after(
    domain: Domain,
    block_size: usize,
    last: Option<u64>,
    tokens: &[u32],
    out: &mut Vec<u64>,
) {
    let (seed, start) = domain.kind("tokens");
    let last = last.unwrap_or(start);
    if block_size == LINE_TOKENS {
        lines::chain(last, bytes_of(tokens).as_chunks().0, &line_keys(seed), out);
    } else {
        hash_bytes(seed, last, block_size * size_of::<u32>(), bytes_of(tokens), out);
    }
}

/// Appends the chained hashes of all full blocks of `block_bytes` bytes of `text` to `out`. 0 has
/// no full blocks.
pub fn hash_text(domain: Domain, block_bytes: usize, text: &[u8], out: &mut Vec<u64>) {
    let (seed, start) = domain.kind("text");
    hash_bytes(seed, start, block_bytes, text, out);
}

/// Appends the chained hashes over `local` block hashes (e.g. a trace's `hash_ids`) to `out`. Local
/// hashes may be small numbers: each is mixed first.
pub fn chain(domain: Domain, local: &[u64], out: &mut Vec<u64>) {
    let (seed, mut h) = domain.kind("local");
    let keys = [mix(seed ^ 1), mix(seed ^ 2)];
    out.extend(local.iter().map(|l| {
        h = step(h, mix_local(*l, keys));
        h
    }));
}

/// Spreads an id over all bits: a folded product of two keyed copies of it. The chain is linear in
/// the result, so the nonlinear fold is what distinguishes swapped and shifted ids.
#[inline(always)]
fn mix_local(local: u64, keys: [u64; 2]) -> u64 {
    let product = u128::from(local ^ keys[0]) * u128::from(local.rotate_left(32) ^ keys[1]);
    product as u64 ^ (product >> 64) as u64
}

/// A bijection in which every output bit depends on every input bit (the finalizer of splitmix64).
fn mix(x: u64) -> u64 {
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

fn hash_bytes(seed: u64, mut h: u64, block_bytes: usize, bytes: &[u8], out: &mut Vec<u64>) {
    if block_bytes == 0 {
        return;
    }
    let secret = const_custom_default_secret(seed);
    out.extend(bytes.chunks_exact(block_bytes).map(|block| {
        h = step(h, xxh3_64_with_secret(block, &secret));
        h
    }));
}

fn line_keys(seed: u64) -> [u64; 8] {
    std::array::from_fn(|i| mix(seed.wrapping_add(0x9e37_79b9_7f4a_7c15u64.wrapping_mul(i as u64 + 1))))
}

fn bytes_of(tokens: &[u32]) -> &[u8] {
    // SAFETY: the same memory. A u32 has no padding, any byte is a valid u8, and u8 needs no
    // alignment.
    unsafe { std::slice::from_raw_parts(tokens.as_ptr().cast(), size_of_val(tokens)) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    fn domain() -> Domain {
        Domain::new(&[Some("model"), None], 16)
    }

    fn tokens(domain: Domain, block_size: usize, tokens: &[u32]) -> Vec<u64> {
        let mut out = Vec::new();
        hash_tokens(domain, block_size, tokens, &mut out);
        out
    }

    #[test]
    fn only_full_blocks_count_and_each_covers_all_before() {
        let prompt: Vec<u32> = (0..100).collect();
        for block_size in [1, 7, 16, 64] {
            let all = tokens(domain(), block_size, &prompt);
            assert_eq!(all.len(), 100 / block_size);
            for at in 0..all.len() * block_size {
                let mut other = prompt.clone();
                other[at] ^= 1 << (at % 32);
                let changed = tokens(domain(), block_size, &other);
                let block = at / block_size;
                assert_eq!(all[..block], changed[..block]);
                assert!(all[block..].iter().zip(&changed[block..]).all(|(a, b)| a != b));
            }
        }
        assert!(tokens(domain(), 0, &prompt).is_empty());
    }

    #[test]
    fn parts_absence_order_and_block_size_separate_domains() {
        let domains = [
            Domain::new(&[Some("a"), Some("b")], 16),
            Domain::new(&[Some("b"), Some("a")], 16),
            Domain::new(&[Some("ab"), Some("")], 16),
            Domain::new(&[Some(""), Some("ab")], 16),
            Domain::new(&[Some("ab"), None], 16),
            Domain::new(&[Some("ab")], 16),
            Domain::new(&[None], 16),
            Domain::new(&[Some("")], 16),
            Domain::new(&[], 16),
            Domain::new(&[Some("a"), Some("b")], 32),
            domain().with(b"x"),
            domain().with(b""),
            domain().with(b"x").with(b"y"),
            domain().with(b"xy"),
            domain(),
            domain().of_request(Some("x"), None),
            domain().of_request(None, Some("adapter")),
            domain().of_request(Some("x"), Some("y")),
            domain().of_request(Some("y"), Some("x")),
            domain().of_request(Some(""), None),
        ];
        let starts: HashSet<u64> = domains.iter().map(|d| d.token_start()).collect();
        assert_eq!(starts.len(), domains.len());
        assert_eq!(domain().of_request(None, Some("x")), domain().with(b"x"));
        assert_eq!(domain().of_request(None, None), domain());
    }

    /// Blocks after the first one do not need the salt.
    #[test]
    fn a_chain_goes_on_without_the_requests_own_parts() {
        let prompt: Vec<u32> = (0..96).collect();
        let salted = domain().of_request(Some("adapter"), Some("salt"));
        for block_size in [16, 8] {
            let whole = tokens(salted, block_size, &prompt);
            let mut parts = whole[..2].to_vec();
            hash_tokens_after(domain(), block_size, Some(whole[1]), &prompt[2 * block_size..], &mut parts);
            assert_eq!(parts, whole);
        }
        let first = tokens(domain(), 16, &prompt[..16]);
        let states = [first[0], narrowed(first[0], 1), narrowed(first[0], 2), narrowed(first[0], 0)];
        assert_eq!(HashSet::from(states).len(), 4);
    }

    #[test]
    fn text_tokens_locals_and_salts_never_share() {
        let words: Vec<u32> = (0..64).map(|i| u32::from_le_bytes([b'a' + i as u8 % 26; 4])).collect();
        let text = bytes_of(&words);
        let locals: Vec<u64> = text.as_chunks().0.iter().map(|w| u64::from_le_bytes(*w)).collect();
        let mut all = tokens(domain(), 16, &words);
        hash_text(domain(), 64, text, &mut all);
        chain(domain(), &locals, &mut all);
        all.extend(tokens(domain().with(b"tenant a"), 16, &words));
        all.extend(tokens(domain().with(b"tenant b"), 16, &words));
        assert_eq!(all.iter().collect::<HashSet<_>>().len(), 4 + 4 + 32 + 4 + 4);
    }

    #[test]
    fn resuming_equals_one_pass() {
        let prompt: Vec<u32> = (0..960).map(|i| i * 7919).collect();
        for cut in [0, 1, 17, 59] {
            let mut parts = tokens(domain(), 16, &prompt[..cut * 16]);
            let last = parts.last().copied();
            hash_tokens_after(domain(), 16, last, &prompt[cut * 16..], &mut parts);
            assert_eq!(parts, tokens(domain(), 16, &prompt));
        }
    }

    /// Small, multiple and large ids, in every order: neither swaps nor small linear relations
    /// between neighbors collide.
    #[test]
    fn structured_ids_do_not_collide() {
        for (scale, offset) in [(1, 0), (512, 0), (1 << 32, 7), (1 << 57, 0), (0x0101_0101, u64::MAX - 9)] {
            let mut seen = HashSet::new();
            let mut out = Vec::new();
            for n in 0..64 * 64 * 64u64 {
                out.clear();
                let id = |n: u64| offset.wrapping_add(n % 64 * scale);
                chain(domain(), &[id(n), id(n / 64), id(n / 4096)], &mut out);
                assert!(seen.insert(out[2]), "{n} at scale {scale}");
            }
        }
    }

    /// Each bit of a token flips each bit of the block's hash about half the time, also in the
    /// specialized path for one line.
    #[test]
    fn every_input_bit_reaches_about_half_of_the_output() {
        for block_size in [16, 32] {
            let mut flips = [0u32; 64];
            let mut trials = 0;
            for sample in 0..20u32 {
                let prompt: Vec<u32> =
                    (0..block_size).map(|i| (i * 40503 + sample * 977) % 128_000).collect();
                let base = tokens(domain(), block_size as usize, &prompt)[0];
                for bit in 0..block_size * 17 {
                    let mut other = prompt.clone();
                    other[(bit / 17) as usize] ^= 1 << (bit % 17);
                    let changed = base ^ tokens(domain(), block_size as usize, &other)[0];
                    (0..64).for_each(|b| flips[b] += (changed >> b) as u32 & 1);
                    trials += 1;
                }
            }
            for (bit, flips) in flips.iter().enumerate() {
                let share = f64::from(*flips) / f64::from(trials);
                assert!((0.4..0.6).contains(&share), "block {block_size}, output bit {bit}: {share}");
            }
        }
    }
}
