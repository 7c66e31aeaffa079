//! Comparisons for loops over columns. `multiversion` compiles these loops twice: plain and for
//! AVX2. Both versions do the same operations in the same order, so the results are equal.
use multiversion::multiversion;

/// Returns the smaller number with one instruction, without the NaN handling of `f64::min`. A NaN
/// in `b` is kept.
#[inline(always)]
pub fn lesser(a: f64, b: f64) -> f64 {
    if a < b { a } else { b }
}

/// Returns the larger number with one instruction, without the NaN handling of `f64::max`. A NaN in
/// `b` is kept.
#[inline(always)]
pub fn greater(a: f64, b: f64) -> f64 {
    if a > b { a } else { b }
}

/// Returns the largest number; 0 if there is none.
#[multiversion(targets("x86_64+avx2"))]
pub fn largest(values: &[u32]) -> u32 {
    values.iter().copied().max().unwrap_or(0)
}
