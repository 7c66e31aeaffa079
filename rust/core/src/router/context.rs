//! Buffers that planning writes.
use super::caches::PrefixMatch;
use super::decision::Totals;
use super::parts::Rest;
use crate::fleet::Member;
use crate::guard::slots::{Restriction, SlotSet};
use crate::ids::{ArrivalId, Seconds};
use crate::indicators::{Columns, Indicator, IndicatorSet};
use crate::policy::{PolicyRng, Scores};
use crate::record::Balance;
use rand::SeedableRng;

/// Scores of one choice and its candidates.
#[derive(Default)]
pub(super) struct Selection {
    pub scores: Scores,
    /// Slots that can take the segment.
    pub eligible: Vec<bool>,
    /// Number of slots that could take it before the hot-spot guard, and number after it.
    pub able: usize,
    pub candidates: usize,
}

/// Results of an arrival for the decision that follows it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Arrived {
    pub id: ArrivalId,
    /// Calls of the router until then, and the time.
    pub calls: u64,
    pub at: Seconds,
    /// Number of blocks in the prompt's chain, and the last of them.
    pub chain: (usize, Option<u64>),
}

/// Data that one decision writes while it is planned. The router keeps one context for its buffers
/// and its random number generator; all other contents are valid only until the next plan.
pub(super) struct DecisionContext {
    /// Prefixes of the prompt on each slot.
    pub matched: PrefixMatch,
    /// Derived indicators of the request, and columns of those with a value per slot for policies
    /// that read whole columns.
    pub derived: Columns,
    /// Declared indicators that are read, by ID; others are empty.
    pub declared: Vec<Vec<f64>>,
    /// Choices of the first segment's instance and of the follow-up segments' instances.
    pub first: Selection,
    pub later: Selection,
    /// Slots with room for a request; empty: all have. Ignored if no slot of the choice has room.
    pub roomy: Vec<bool>,
    /// The request that arrived last: its decision may follow at once.
    pub arrived: Option<Arrived>,
    /// Whether the prefixes of the request to decide are matched already.
    pub is_matched: bool,
    /// Slots that had room for that request.
    pub arrived_roomy: Vec<bool>,
    /// Slots that the choice of a first segment must avoid, if it can.
    pub excluded: Option<SlotSet>,
    /// Effect of these slots on the last choice of a first segment.
    pub restriction: Restriction,
    /// Why the request is not split, if requests are split.
    pub split_reason: Option<Box<str>>,
    /// Expected times of the instances, if a cut was considered.
    pub balance: Option<Balance>,
    /// Choices in which the policy scored no candidate.
    pub unscored: u64,
    /// The source of all random choices.
    pub rng: PolicyRng,
}

impl DecisionContext {
    pub fn new(seed: u64) -> DecisionContext {
        DecisionContext {
            matched: PrefixMatch::default(),
            derived: Columns::of(IndicatorSet::DERIVED),
            declared: Vec::new(),
            first: Selection::default(),
            later: Selection::default(),
            roomy: Vec::new(),
            arrived: None,
            is_matched: false,
            arrived_roomy: Vec::new(),
            excluded: None,
            restriction: Restriction::Free,
            split_reason: None,
            balance: None,
            unscored: 0,
            rng: PolicyRng::seed_from_u64(seed),
        }
    }

    /// Makes room for `slots` slots.
    pub fn resize(&mut self, slots: usize) {
        self.matched.hit_blocks.resize(slots, 0);
        self.derived.resize(slots);
    }

    /// Makes room for an instance that was added, and clears its derived indicators.
    pub fn member(&mut self, member: Member, slots: usize) {
        let Member::Added { id, .. } = member else { return };
        self.resize(slots);
        for (indicator, value) in [
            (Indicator::ReportAgeSeconds, f64::NAN),
            (Indicator::DecodeTokensPerSecond, f64::NAN),
            (Indicator::IndexBlocks, 0.0),
        ] {
            self.derived.get_mut(indicator)[id.index()] = value;
        }
    }

    /// Takes the prefixes that were found before the decision, unless its arrival has found them.
    pub fn take_match(&mut self, found: &mut PrefixMatch) {
        if !std::mem::replace(&mut self.is_matched, true) {
            self.arrived = None;
            std::mem::swap(&mut self.matched, found);
        }
    }

    /// Moves the count of choices without a scored candidate into the totals.
    pub fn count_unscored(&mut self, totals: &mut Totals) {
        totals.unscored += std::mem::take(&mut self.unscored);
    }

    /// Leaves the request unsplit, for this reason.
    pub fn leave_whole(&mut self, reason: &str) -> Rest {
        self.split_reason = Some(reason.into());
        Rest::new()
    }
}
