//! The queue of held programs, and the rate at which they are admitted.
use super::entry::Program;
use super::settings::ProgramConfig;
use super::types::{ProgramId, Released, TurnId};
use crate::estimate::Decayed;
use crate::ids::{InstanceId, Seconds};
use hashbrown::HashMap;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

/// Time constant of the rate at which tokens are admitted, and the shortest time that it covers.
const FLOW_SECONDS: Seconds = 300.0;
const MIN_FLOW_SECONDS: Seconds = 60.0;

/// Place of a program among the held programs of its tenant: what the order counts, then its birth.
pub(super) type Place = (u64, u64, ProgramId);

/// The level and the tenant of held programs.
pub(super) type Line = (i8, u64);

/// The held programs of a line, and the tokens that they need.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) struct Waiting {
    pub places: BTreeSet<Place>,
    pub tokens: f64,
}

/// The held programs, and requests admitted but not yet taken by the caller.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) struct Queue {
    /// In an order that all workers share, because the order of a sum changes its rounding.
    pub lines: BTreeMap<Line, Waiting>,
    /// Line, place and needed tokens of each held program.
    pub places: HashMap<ProgramId, (Line, Place, f64)>,
    #[serde(skip)]
    pub released: Vec<Released>,
    #[serde(skip)]
    pub refused: Vec<(TurnId, Seconds)>,
    /// A held program, and the instance that gets no other program until it is admitted.
    pub kept: Option<(ProgramId, InstanceId)>,
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
            false => program.born.max(0.0).to_bits(),
        });
        let place = (first, program.order, id);
        let tokens = program.own_tokens();
        let line = (program.level, program.tenant);
        self.places.insert(id, (line, place, tokens));
        let waiting = self.lines.entry(line).or_default();
        waiting.places.insert(place);
        waiting.tokens += tokens;
    }

    /// Removes a program.
    pub fn remove(&mut self, id: ProgramId) {
        let Some((line, place, tokens)) = self.places.remove(&id) else { return };
        self.kept = self.kept.filter(|(kept, _)| *kept != id);
        self.overdue = self.overdue.filter(|overdue| *overdue != id);
        if let Some(waiting) = self.lines.get_mut(&line) {
            waiting.places.remove(&place);
            waiting.tokens -= tokens;
            if waiting.places.is_empty() {
                self.lines.remove(&line);
            }
        }
    }

    /// Returns the number of held programs.
    pub fn len(&self) -> usize {
        self.places.len()
    }

    pub fn admitted(&mut self, tokens: f64, now: Seconds) {
        self.flow.add(tokens, now, FLOW_SECONDS);
        self.flow_began.get_or_insert(now);
    }

    /// Returns the tokens that held programs need, and those admitted recently.
    pub fn demand(&self, now: Seconds) -> (f64, f64) {
        let tokens = self.lines.values().map(|waiting| waiting.tokens).sum();
        (tokens, self.flow.now(now, FLOW_SECONDS))
    }

    /// Returns the predicted seconds until all held programs of a line are admitted. Higher levels
    /// go first. Tenants of a level take turns, so at most as many tokens of each other tenant are
    /// admitted before. `peers`: the demand of peer routers on the same instances.
    pub fn expected_seconds(&self, line: Line, peers: (f64, f64), now: Seconds) -> Seconds {
        let age = self.flow_began.map_or(0.0, |began| now - began).max(MIN_FLOW_SECONDS);
        let admitted = self.demand(now).1 + peers.1;
        let rate = admitted / (FLOW_SECONDS * (1.0 - (-age / FLOW_SECONDS).exp()));
        let (own, number) =
            self.lines.get(&line).map_or((0.0, 0), |waiting| (waiting.tokens, waiting.places.len()));
        let (mut tokens, mut programs) = (0.0, 0);
        for ((level, _), waiting) in self.lines.range((line.0, 0)..) {
            let (most, most_programs) =
                if *level > line.0 { (f64::INFINITY, usize::MAX) } else { (own, number) };
            tokens += waiting.tokens.min(most);
            programs += waiting.places.len().min(most_programs);
        }
        // Peers share by tenants, too: they admit at most as many tokens before. If none were
        // admitted lately, one in each `FLOW_SECONDS` is assumed.
        ((tokens + peers.0.min(own)) / rate).min(programs as f64 * FLOW_SECONDS)
    }

    /// Returns whether a tenant has more than its share of a full queue.
    pub fn is_full(&self, tenant: u64, most: usize) -> bool {
        if self.len() <= most {
            return false;
        }
        let tenants: BTreeSet<u64> = self.lines.keys().map(|(_, tenant)| *tenant).collect();
        let own = self.lines.iter().filter(|((_, each), _)| *each == tenant);
        own.map(|(_, waiting)| waiting.places.len()).sum::<usize>() > most / tenants.len().max(1)
    }
}
