//! Loops over columns on the widest registers that the processor at hand has.

/// Runs `work`, compiled for AVX2 where the processor has it: the same operations in the same order, so the same results.
/// Only what is inlined into `work` gains, so it should be a plain loop over slices.
#[inline(always)]
pub fn wide<R>(work: impl FnOnce() -> R) -> R {
    #[cfg(target_arch = "x86_64")]
    {
        #[target_feature(enable = "avx2")]
        fn on_avx2<R>(work: impl FnOnce() -> R) -> R {
            work()
        }
        if std::arch::is_x86_feature_detected!("avx2") {
            // SAFETY: this processor has what the function asks for.
            return unsafe { on_avx2(work) };
        }
    }
    work()
}

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
