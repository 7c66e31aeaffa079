//! The queue of held programs, and the rate at which they are admitted.
use super::entry::Program;
use super::sets::order_of;
use super::settings::ProgramConfig;
use super::types::{Home, ProgramId, Released, TurnId};
use crate::estimate::Decayed;
use crate::ids::Seconds;
use crate::levels::{Key, Lines, Place};
use hashbrown::HashMap;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;

/// Time constant of the rate at which tokens are admitted, and the shortest time that it covers.
const FLOW_SECONDS: Seconds = 300.0;
const MIN_FLOW_SECONDS: Seconds = 60.0;

/// The held programs, and requests admitted but not yet taken by the caller.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) struct Queue {
    /// With the tokens that programs need as work. All tenants have the weight 1 here.
    pub lines: Lines<ProgramId>,
    /// Line and place of each held program.
    pub places: HashMap<ProgramId, (Key, Place<ProgramId>)>,
    #[serde(skip)]
    pub released: Vec<Released>,
    #[serde(skip)]
    pub refused: Vec<(TurnId, Seconds)>,
    /// A held program, and the instance that gets no other program until it is admitted.
    pub kept: Option<(ProgramId, Home)>,
    /// The program held longest, if longer than `backfill_seconds` at the last tick: an instance
    /// gets no other program until it is admitted.
    pub overdue: Option<ProgramId>,
    /// Time of the last round that made room.
    pub made_room_at: Option<Seconds>,
    /// Admitted tokens.
    flow: Decayed,
    /// Time of the first admission.
    flow_began: Option<Seconds>,
}

impl Queue {
    /// Adds a held program, or gives it a new place.
    pub fn insert(&mut self, program: &Program, id: ProgramId, config: &ProgramConfig) {
        self.remove(id);
        let first = config.rules.as_ref().and_then(|rules| rules.admission_rank(program));
        let first = first.unwrap_or_else(|| match config.shortest_first {
            true => program.tokens as u64,
            false => order_of(program.born),
        });
        let place = (first, program.order, id);
        let key = program.line();
        self.places.insert(id, (key, place));
        self.lines.insert((key, 1.0), place, program.own_tokens(), None);
    }

    /// Removes a program.
    pub fn remove(&mut self, id: ProgramId) {
        let Some((key, place)) = self.places.remove(&id) else { return };
        self.kept = self.kept.filter(|(kept, _)| *kept != id);
        self.overdue = self.overdue.filter(|overdue| *overdue != id);
        self.lines.remove(key, place);
    }

    /// Returns the number of held programs.
    pub fn len(&self) -> usize {
        self.lines.len()
    }

    pub fn admitted(&mut self, tokens: f64, now: Seconds) {
        self.flow.add(tokens, now, FLOW_SECONDS);
        self.flow_began.get_or_insert(now);
    }

    /// Returns the predicted seconds until all held programs of a line are admitted.
    pub fn expected_seconds(&self, key: Key, now: Seconds) -> Seconds {
        let age = self.flow_began.map_or(0.0, |began| now - began).max(MIN_FLOW_SECONDS);
        let rate = self.flow.now(now, FLOW_SECONDS) / (FLOW_SECONDS * (1.0 - (-age / FLOW_SECONDS).exp()));
        let own = self.lines.get(key).map_or((0.0, 0), |line| (line.work(), line.len()));
        let (tokens, programs) = self.lines.until(key, own, |_| true);
        // If none were admitted lately, one in each `FLOW_SECONDS` is assumed.
        (tokens / rate).min(programs as f64 * FLOW_SECONDS)
    }

    /// Returns whether a tenant has more than its share of a full queue.
    pub fn is_full(&self, tenant: u64, most: usize) -> bool {
        if self.len() <= most {
            return false;
        }
        let tenants: BTreeSet<u64> = self.lines.iter().map(|(key, _)| key.tenant).collect();
        self.lines.count(|key| key.tenant == tenant) > most / tenants.len().max(1)
    }
}
