//! Chained hashes of blocks of 16 tokens: a block is one cache line.
//!
//! A line's hash is the sum over GF(2) of four keyed, folded 64x64-bit products (the inner step of
//! xxh3 and wyhash). Processors with AVX2 compute four lines in vector registers while their other
//! units compute two more. That takes three quarters of the time of six plain lines, and gives the
//! same hashes.
use crate::table::prefetch;

/// Bytes of a block.
pub(crate) const LINE: usize = 64;

/// Prefetch distance for token ids, in bytes: recently written data has often left the nearest
/// cache.
const AHEAD: usize = 16 * LINE;

/// The next hash of a chain, from the one before and the local hash of a block.
#[inline(always)]
pub(crate) fn step(h: u64, local: u64) -> u64 {
    h.wrapping_mul(5).wrapping_add(local)
}

/// Appends the hashes of a chain that continues with these lines after the hash `last`.
pub(crate) fn chain(last: u64, lines: &[[u8; LINE]], keys: &[u64; 8], out: &mut Vec<u64>) {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("bmi2") {
        // SAFETY: the processor has both features.
        unsafe { wide::chain(last, lines, keys, out) };
        return;
    }
    plain(last, lines, keys, out);
}

fn plain(mut last: u64, lines: &[[u8; LINE]], keys: &[u64; 8], out: &mut Vec<u64>) {
    out.extend(lines.iter().map(|line| {
        prefetch(line.as_ptr().wrapping_add(AHEAD));
        last = step(last, line_hash(line, keys));
        last
    }));
}

#[inline(always)]
fn line_hash(line: &[u8; LINE], keys: &[u64; 8]) -> u64 {
    let words = line.as_chunks::<8>().0;
    let (mut low, mut high) = (0u64, 0u64);
    for i in (0..8).step_by(2) {
        let a = u64::from_le_bytes(words[i]) ^ keys[i];
        let b = u64::from_le_bytes(words[i + 1]) ^ keys[i + 1];
        let product = u128::from(a) * u128::from(b);
        low ^= product as u64;
        high ^= (product >> 64) as u64;
    }
    low ^ high
}

#[cfg(target_arch = "x86_64")]
mod wide {
    use super::{AHEAD, LINE, line_hash, plain, prefetch, step};
    use std::arch::x86_64::*;
    use std::hint::black_box;

    /// Lines in vector registers, and all lines of a round. Other divisions take longer.
    const VECTORS: usize = 4;
    const ROUND: usize = VECTORS + 2;

    #[target_feature(enable = "avx2,bmi2")]
    pub(super) fn chain(mut last: u64, lines: &[[u8; LINE]], keys: &[u64; 8], out: &mut Vec<u64>) {
        let (rounds, rest) = lines.as_chunks::<ROUND>();
        let (first, second) = keys.split_at(4);
        let (first, second) = (vector(first), vector(second));
        // The compiler must not know this number: it would replace the products by scalar ones.
        let low_half = _mm256_set1_epi64x(black_box(0xffff_ffff));
        out.reserve(lines.len());
        for round in rounds {
            round.iter().for_each(|line| prefetch(line.as_ptr().wrapping_add(AHEAD)));
            let [a, b, c, d, e, f] = round;
            let of = |line| products(line, first, second, low_half);
            let folded = [of(a), of(b), of(c), of(d)];
            let [a, b, c, d] = sums(folded);
            let mut hashes = [a, b, c, d, line_hash(e, keys), line_hash(f, keys)];
            for hashed in &mut hashes {
                last = step(last, *hashed);
                *hashed = last;
            }
            out.extend_from_slice(&hashes);
        }
        plain(last, rest, keys, out);
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    fn vector<T>(of: &[T]) -> __m256i {
        assert_eq!(size_of_val(of), size_of::<__m256i>());
        // SAFETY: these bytes are there, and the load needs no alignment.
        unsafe { _mm256_loadu_si256(of.as_ptr().cast()) }
    }

    /// Returns the four products of a line, each folded to 64 bits.
    #[inline]
    #[target_feature(enable = "avx2")]
    fn products(line: &[u8; LINE], first: __m256i, second: __m256i, low_half: __m256i) -> __m256i {
        let (front, back) = line.split_at(LINE / 2);
        let (first, second) =
            (_mm256_xor_si256(vector(front), first), _mm256_xor_si256(vector(back), second));
        let (a, b) = (_mm256_unpacklo_epi64(first, second), _mm256_unpackhi_epi64(first, second));
        // Four products of halves, as on paper.
        let (a_high, b_high) = (_mm256_srli_epi64::<32>(a), _mm256_srli_epi64::<32>(b));
        let (low, high) = (_mm256_mul_epu32(a, b), _mm256_mul_epu32(a_high, b_high));
        let (one, other) = (_mm256_mul_epu32(a, b_high), _mm256_mul_epu32(a_high, b));
        let carried = _mm256_add_epi64(_mm256_srli_epi64::<32>(low), _mm256_and_si256(one, low_half));
        let middle = _mm256_add_epi64(carried, other);
        let carried = _mm256_add_epi64(_mm256_srli_epi64::<32>(one), _mm256_srli_epi64::<32>(middle));
        let high = _mm256_add_epi64(high, carried);
        let low = _mm256_blend_epi32::<0b1010_1010>(low, _mm256_slli_epi64::<32>(middle));
        _mm256_xor_si256(low, high)
    }

    /// Returns the sum over GF(2) of the four words of each vector.
    #[inline]
    #[target_feature(enable = "avx2")]
    fn sums(of: [__m256i; VECTORS]) -> [u64; VECTORS] {
        let pairs = |a, b| _mm256_xor_si256(_mm256_unpacklo_epi64(a, b), _mm256_unpackhi_epi64(a, b));
        let (a, b) = (pairs(of[0], of[1]), pairs(of[2], of[3]));
        let low = _mm256_permute2x128_si256::<0x20>(a, b);
        let high = _mm256_permute2x128_si256::<0x31>(a, b);
        // SAFETY: both have 32 bytes, and any bytes are valid numbers.
        unsafe { std::mem::transmute(_mm256_xor_si256(low, high)) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Extreme words carry in all places of a product.
        #[test]
        fn vector_registers_give_the_same_hashes(
            words in prop::collection::vec(prop_oneof![Just(0), Just(u64::MAX), Just(u64::MAX << 32), any::<u64>()], 0..200),
            keys in prop::array::uniform8(prop_oneof![Just(0), Just(u64::MAX), any::<u64>()]),
            last: u64,
        ) {
            let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
            let lines = bytes.as_chunks().0;
            let mut hashes = [vec![1], vec![1]];
            chain(last, lines, &keys, &mut hashes[0]);
            plain(last, lines, &keys, &mut hashes[1]);
            prop_assert_eq!(&hashes[0], &hashes[1]);
        }
    }
}
