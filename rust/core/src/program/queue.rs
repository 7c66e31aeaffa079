//! The queue of held programs, and the rate at which they are admitted.
use super::entry::Program;
use super::sets::order_of;
use super::settings::ProgramConfig;
use super::types::{Home, ProgramId, TurnId};
use crate::estimate::Decayed;
use crate::ids::Seconds;
use crate::levels::{Key, Lines};
use serde::{Deserialize, Serialize};

/// Time constant of the rate at which tokens are admitted, and the shortest time that it covers.
const FLOW_SECONDS: Seconds = 300.0;
const MIN_FLOW_SECONDS: Seconds = 60.0;

/// The held programs, and requests admitted but not yet taken by the caller.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) struct Queue {
    /// With the tokens that programs need as work. All tenants have the weight 1 here.
    pub lines: Lines<ProgramId>,
    #[serde(skip)]
    pub released: Vec<TurnId>,
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
        self.lines.insert(id, (program.line(), 1.0), (first, program.order), program.own_tokens(), None);
    }

    /// Removes a program.
    pub fn remove(&mut self, id: ProgramId) {
        self.lines.remove(id);
        self.kept = self.kept.filter(|(kept, _)| *kept != id);
        self.overdue = self.overdue.filter(|overdue| *overdue != id);
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
        let (tokens, programs) = self.lines.until(key, self.lines.first(key, None), |_| true);
        // If none were admitted lately, one in each `FLOW_SECONDS` is assumed.
        (tokens / rate).min(programs as f64 * FLOW_SECONDS)
    }
}
