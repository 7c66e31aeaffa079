//! Read-only view of the indicators that a policy decides from.
use super::columns::Indicators;
use super::declared::DeclaredId;
use super::table::Indicator;

/// Indicators at one moment, for one request. Each slice has one entry per slot.
#[derive(Clone, Copy, Debug)]
pub struct Snapshot<'a> {
    /// Indicator values. Only the indicators in the policy's `reads` are filled in.
    pub columns: Indicators<'a>,
    /// Eligibility of each slot: live, healthy, of a fitting role, not excluded by the guard.
    pub eligible: &'a [bool],
    /// Number of `true` in `eligible`.
    pub eligible_count: usize,
    /// A stable hash of each instance's name, for consistent hashing.
    pub name_hashes: &'a [u64],
    /// Number of decisions that this router made before.
    pub ordinal: u64,
    /// Hash of the request's session key, if it has one.
    pub session: Option<u64>,
}

impl<'a> Snapshot<'a> {
    /// Number of slots, eligible or not.
    #[inline]
    pub fn slots(&self) -> usize {
        self.eligible.len()
    }

    /// Returns the column of a per-instance or per-pair indicator. A policy that reads columns of
    /// [`super::IndicatorSet::COMPUTED`] must not say otherwise in
    /// [`crate::policy::Policy::by_chunks`].
    #[inline]
    pub fn column(&self, id: Indicator) -> &'a [f64] {
        &self.columns.get(id)[..self.eligible.len()]
    }

    /// Returns the column of a declared indicator.
    #[inline]
    pub fn declared(&self, id: DeclaredId) -> &'a [f64] {
        &self.columns.declared(id)[..self.eligible.len()]
    }

    /// Returns the value of a per-request indicator (NaN if absent).
    #[inline]
    pub fn request(&self, id: Indicator) -> f64 {
        self.columns.get(id)[0]
    }

    /// Returns the eligible slots, in order.
    pub fn eligible_slots(&self) -> impl Iterator<Item = usize> + 'a {
        let eligible = self.eligible;
        (0..eligible.len()).filter(move |&i| eligible[i])
    }
}
