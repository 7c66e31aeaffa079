//! Indicator values: one dense `f64` column each.
//!
//! Inside a column absent is NaN, so that it spreads through a score by itself and the instance is left out; at the
//! public edges it is `Option`.
use super::table::{COUNT, Indicator};

/// One column of `f64` for each indicator, all of the same length (the number of slots).
#[derive(Clone, Debug)]
pub struct Columns {
    data: Vec<Vec<f64>>,
}

impl Default for Columns {
    fn default() -> Self {
        Columns { data: vec![Vec::new(); COUNT] }
    }
}

impl Columns {
    /// Grows or shrinks all columns to `slots`; new values are `0.0`.
    pub fn resize(&mut self, slots: usize) {
        for column in &mut self.data {
            column.resize(slots, 0.0);
        }
    }

    /// Number of slots.
    pub fn slots(&self) -> usize {
        self.data[0].len()
    }

    /// The column of `id`. Request-scoped indicators use slot 0 only.
    #[inline]
    pub fn get(&self, id: Indicator) -> &[f64] {
        &self.data[id as usize]
    }

    /// The column of `id`, to write.
    #[inline]
    pub fn get_mut(&mut self, id: Indicator) -> &mut [f64] {
        &mut self.data[id as usize]
    }

    /// Several columns at once, to write. They must differ.
    pub fn several_mut<const N: usize>(&mut self, ids: [Indicator; N]) -> [&mut [f64]; N] {
        let columns = self.data.get_disjoint_mut(ids.map(|id| id as usize)).expect("different indicators");
        columns.map(|column| &mut column[..])
    }
}
