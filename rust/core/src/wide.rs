//! Loops over columns on the widest registers that the processor at hand has.

/// Defines a function whose loops are compiled twice, plain and for AVX2, and that takes the latter where the processor has
/// it: the same operations in the same order, so the same results.
macro_rules! wide_fn {
    ($(#[$meta:meta])* $vis:vis fn $name:ident($($arg:ident: $type:ty),* $(,)?) $(-> $result:ty)? $body:block) => {
        $(#[$meta])*
        $vis fn $name($($arg: $type),*) $(-> $result)? {
            #[inline(always)]
            fn plain($($arg: $type),*) $(-> $result)? $body
            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx2")]
                fn on_avx2($($arg: $type),*) $(-> $result)? {
                    plain($($arg),*)
                }
                if std::arch::is_x86_feature_detected!("avx2") {
                    // SAFETY: this processor has what the function asks for.
                    return unsafe { on_avx2($($arg),*) };
                }
            }
            plain($($arg),*)
        }
    };
}
pub(crate) use wide_fn;

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
