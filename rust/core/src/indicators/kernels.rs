//! Kernels: indicators that depend on the request or on the time, computed for a chunk of slots at
//! a time, where an expression needs them.
use super::columns::Columns;
use super::table::IndicatorSet;
use std::ops::Range;

/// Computes the indicators of [`IndicatorSet::COMPUTED`] for one request at one time.
pub trait Kernels {
    /// Writes the indicators `reads` of `slots` to their columns, from entry `to` on. Columns of
    /// other indicators may change, too.
    fn fill(&self, reads: IndicatorSet, slots: Range<usize>, to: usize, out: &mut Columns);
}
