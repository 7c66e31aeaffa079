//! Comparisons for loops over columns, which `multiversion` compiles twice: plain, and for AVX2 where the processor has it.
//! Both do the same operations in the same order, so results are the same.

/// The lesser, without the care for NaN that keeps `f64::min` from being one instruction. NaN in `b` is kept.
#[inline(always)]
pub fn lesser(a: f64, b: f64) -> f64 {
    if a < b { a } else { b }
}

/// The greater, as [`lesser`].
#[inline(always)]
pub fn greater(a: f64, b: f64) -> f64 {
    if a > b { a } else { b }
}
