//! Everything that planning writes.
use super::decision::Totals;
use super::parts::Rest;
use crate::guard::Restriction;
use crate::indicators::{Columns, Indicator, IndicatorSet};
use crate::policy::{PolicyRng, Scores};
use crate::receipt::Balance;
use rand::SeedableRng;

/// What a policy made of its candidates.
#[derive(Default)]
pub(super) struct Selection {
    pub scores: Scores,
    /// Slots that may take the segment.
    pub eligible: Vec<bool>,
}

/// What one decision writes while it is planned. The router keeps one, for its buffers and its
/// random numbers; nothing else in it outlives the next plan.
pub(super) struct DecisionContext {
    /// Blocks of the prompt's chain that each slot holds.
    pub hit_blocks: Vec<u32>,
    /// The indicators that are derived for the request and the moment.
    pub derived: Columns,
    /// The declared indicators that are read, by their IDs; others are empty.
    pub declared: Vec<Vec<f64>>,
    /// The choice of a first segment, and that of the segments behind it.
    pub first: Selection,
    pub later: Selection,
    /// What the hot-spot guard took out of the choice of the first segment.
    pub restriction: Restriction,
    /// Why the request stays in one piece, if others are cut.
    pub uncut: Option<Box<str>>,
    /// Expected times of the instances, if a cut was looked for.
    pub balance: Option<Balance>,
    /// Choices in which the policy scored no candidate.
    pub unscored: u64,
    /// The source of all random choices.
    pub rng: PolicyRng,
}

impl DecisionContext {
    pub fn new(seed: u64) -> DecisionContext {
        DecisionContext {
            hit_blocks: Vec::new(),
            derived: Columns::of(IndicatorSet::DERIVED),
            declared: Vec::new(),
            first: Selection::default(),
            later: Selection::default(),
            restriction: Restriction::Free,
            uncut: None,
            balance: None,
            unscored: 0,
            rng: PolicyRng::seed_from_u64(seed),
        }
    }

    /// Makes room for `slots` slots.
    pub fn resize(&mut self, slots: usize) {
        self.hit_blocks.resize(slots, 0);
        self.derived.resize(slots);
    }

    /// Adds to the totals the choices in which a policy scored no candidate.
    pub fn count_unscored(&mut self, totals: &mut Totals) {
        totals.unscored += std::mem::take(&mut self.unscored);
    }

    /// Leaves the request in one piece, for this reason.
    pub fn leave_whole(&mut self, reason: &str) -> Rest {
        self.uncut = Some(reason.into());
        Rest::new()
    }

    /// Forgets what was derived of a slot's instance.
    pub fn clear(&mut self, slot: usize) {
        for (id, value) in [
            (Indicator::ReportAgeSeconds, f64::NAN),
            (Indicator::DecodeTokensPerSecond, f64::NAN),
            (Indicator::IndexBlocks, 0.0),
        ] {
            self.derived.get_mut(id)[slot] = value;
        }
    }
}
