//! Indicator values: one dense `f64` column each.
//!
//! Inside a column, NaN means absent. NaN propagates through a score, so an instance without a
//! value is left out of the choice. Public functions use `Option` instead.
use super::declared::DeclaredId;
use super::kernels::Kernels;
use super::table::{COUNT, Indicator, IndicatorSet};
use std::fmt;
use std::ops::Range;

/// A column of `f64` per indicator, all of the same length (the number of slots).
#[derive(Clone, Debug)]
pub struct Columns {
    data: Vec<Vec<f64>>,
    of: IndicatorSet,
    slots: usize,
}

impl Default for Columns {
    /// Returns columns of all indicators, with no slots.
    fn default() -> Self {
        Columns::of(IndicatorSet::ALL)
    }
}

impl Columns {
    /// Returns columns of these indicators only, with no slots. The other columns stay empty.
    pub fn of(of: IndicatorSet) -> Columns {
        Columns { data: vec![Vec::new(); COUNT], of, slots: 0 }
    }

    /// Grows or shrinks all columns to `slots`; new values are `0.0`.
    pub fn resize(&mut self, slots: usize) {
        for id in self.of.iter() {
            self.data[id as usize].resize(slots, 0.0);
        }
        self.slots = slots;
    }

    /// Number of slots.
    pub fn slots(&self) -> usize {
        self.slots
    }

    /// Returns the column of `id`. Request-scoped indicators use slot 0 only.
    #[inline]
    pub fn get(&self, id: Indicator) -> &[f64] {
        &self.data[id as usize]
    }

    /// Returns the writable column of `id`.
    #[inline]
    pub fn get_mut(&mut self, id: Indicator) -> &mut [f64] {
        &mut self.data[id as usize]
    }

    /// Returns a part of several columns, writable. The ids must differ.
    pub fn several_mut<const N: usize>(
        &mut self,
        ids: [Indicator; N],
        part: Range<usize>,
    ) -> [&mut [f64]; N] {
        let columns = self.data.get_disjoint_mut(ids.map(|id| id as usize)).expect("different indicators");
        columns.map(|column| &mut column[part.clone()])
    }
}

/// All indicators for one decision: the columns that the ledger keeps, and the indicators derived
/// for the request and the time ([`IndicatorSet::DERIVED`]), in columns or by kernels.
#[derive(Clone, Copy)]
pub struct Indicators<'a> {
    kept: &'a Columns,
    derived: &'a Columns,
    kernels: Option<&'a dyn Kernels>,
    declared: &'a [Vec<f64>],
    groups: &'a [u32],
}

impl<'a> Indicators<'a> {
    /// Combines kept and derived columns. Both must have the same number of slots.
    pub fn new(kept: &'a Columns, derived: &'a Columns) -> Indicators<'a> {
        Indicators { kept, derived, kernels: None, declared: &[], groups: &[] }
    }

    /// Adds the columns of declared indicators, indexed by [`DeclaredId`].
    pub fn with_declared(self, declared: &'a [Vec<f64>]) -> Indicators<'a> {
        Indicators { declared, ..self }
    }

    /// Sets the kernels of the indicators of [`IndicatorSet::COMPUTED`]. Their columns are then not
    /// filled in.
    pub fn with_kernels(self, kernels: &'a dyn Kernels) -> Indicators<'a> {
        Indicators { kernels: Some(kernels), ..self }
    }

    /// Returns the kernels of the indicators of [`IndicatorSet::COMPUTED`]; `None`: they have
    /// columns.
    #[inline]
    pub fn kernels(self) -> Option<&'a dyn Kernels> {
        self.kernels
    }

    /// Returns the column of `id`. Request-scoped indicators use slot 0 only.
    #[inline]
    pub fn get(self, id: Indicator) -> &'a [f64] {
        if IndicatorSet::DERIVED.contains(id) { self.derived.get(id) } else { self.kept.get(id) }
    }

    /// Adds the group of each slot: a number below the number of slots.
    pub fn with_groups(self, groups: &'a [u32]) -> Indicators<'a> {
        Indicators { groups, ..self }
    }

    /// Returns the group of each slot. Empty: each slot is its own group.
    #[inline]
    pub fn groups(self) -> &'a [u32] {
        self.groups
    }

    /// Returns the column of a declared indicator.
    ///
    /// # Panics
    /// If the policy did not declare that it reads the indicator
    /// ([`crate::policy::Policy::declared`]).
    #[inline]
    pub fn declared(self, id: DeclaredId) -> &'a [f64] {
        &self.declared[id.index()]
    }
}

impl fmt::Debug for Indicators<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Indicators")
            .field("kept", self.kept)
            .field("derived", self.derived)
            .finish_non_exhaustive()
    }
}

impl<'a> From<&'a Columns> for Indicators<'a> {
    /// Uses one set of columns as both kept and derived.
    fn from(columns: &'a Columns) -> Indicators<'a> {
        Indicators::new(columns, columns)
    }
}
