//! Indexes of the programs, so that no step walks through all of them.
use super::types::{ProgramId, State};
use crate::ids::Seconds;
use hashbrown::HashMap;
use serde::{Deserialize, Serialize};
use slotmap::KeyData;
use std::collections::BTreeSet;

/// Programs between two turns, by the start of their gap in the form of [`order_of`].
pub(super) type ByGap = BTreeSet<(u64, ProgramId)>;

/// Place of a program in the indexes.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Filed {
    pub state: State,
    /// While it is between two turns: its set, and the start of its gap ([`order_of`]).
    pub gap: Option<(usize, u64)>,
}

/// Tokens that count for a tenant's programs with a place.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Share {
    /// Tokens, each shared prefix left out.
    pub tokens: f64,
    /// The tenant's weight, as of its latest charge.
    pub weight: f64,
    pub programs: u32,
}

/// The indexes.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) struct Sets {
    /// Number of programs in each state, in the order of [`State::NAMES`].
    pub counts: [usize; 4],
    /// Programs with a place in a cache.
    pub placed: BTreeSet<ProgramId>,
    /// Programs between two turns, by whether they have come back before (1) and by whether their
    /// gap counts as an end (2).
    pub gaps: [ByGap; 4],
    /// Programs whose requests name a session, by its hash.
    pub sessions: BTreeSet<(u64, ProgramId)>,
    /// Sum of the contexts of all programs in tokens. Exact: contexts are whole numbers.
    pub tokens: f64,
    pub shares: HashMap<u64, Share>,
}

/// Returns a number that sorts like a time. Programs of peers may be older than this router's
/// clock, so that their times are negative.
pub(super) fn order_of(time: Seconds) -> u64 {
    let bits = time.to_bits();
    if bits & SIGN == 0 { bits | SIGN } else { !bits }
}

/// Returns the time of [`order_of`].
pub(super) fn time_of(order: u64) -> Seconds {
    f64::from_bits(if order & SIGN == 0 { !order } else { order & !SIGN })
}

/// The sign of a float.
const SIGN: u64 = 1 << 63;

pub(super) const CAME_BACK: usize = 1;
pub(super) const ENDED: usize = 2;

impl Sets {
    /// Returns the tokens of a tenant's programs with a place, divided by its weight.
    pub fn share(&self, tenant: u64) -> f64 {
        self.shares.get(&tenant).map_or(0.0, |share| share.tokens / share.weight)
    }

    /// Returns the greatest share of the other tenants.
    pub fn greatest_share_of_others(&self, tenant: u64) -> f64 {
        let others = self.shares.iter().filter(|(other, _)| **other != tenant);
        others.map(|(_, share)| share.tokens / share.weight).fold(0.0, f64::max)
    }

    /// Returns the programs of a session.
    pub fn of_session(&self, session: u64) -> impl Iterator<Item = ProgramId> + '_ {
        let first = KeyData::from_ffi(0).into();
        let programs = self.sessions.range((session, first)..);
        programs.take_while(move |(each, _)| *each == session).map(|(_, id)| *id)
    }

    /// Returns the programs of some sets whose gap is longer than `seconds`.
    pub fn resting_for(&self, sets: &[usize], seconds: Seconds, now: Seconds) -> Vec<ProgramId> {
        let is_longer = |(since, _): &&(u64, ProgramId)| now - time_of(*since) > seconds;
        let of = |set: &usize| self.gaps[*set].iter().take_while(is_longer);
        sets.iter().flat_map(of).map(|(_, id)| *id).collect()
    }
}

impl Sets {
    pub fn refile(&mut self, id: ProgramId, old: Option<Filed>, new: Option<Filed>) {
        if let Some(Filed { state, gap }) = old {
            self.counts[state as usize] -= 1;
            if let Some((set, since)) = gap {
                self.gaps[set].remove(&(since, id));
            }
        }
        if let Some(Filed { state, gap }) = new {
            self.counts[state as usize] += 1;
            if let Some((set, since)) = gap {
                self.gaps[set].insert((since, id));
            }
        }
        let placed = |filed: Option<Filed>| filed.is_some_and(|filed| filed.state.has_place());
        match (placed(old), placed(new)) {
            (true, false) => _ = self.placed.remove(&id),
            (false, true) => _ = self.placed.insert(id),
            _ => {}
        }
    }
}
