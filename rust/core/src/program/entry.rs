//! A program's entry: its context, its state, and what counts for it.
use super::gaps::GapClass;
use super::ledger::Charge;
use super::sets::Filed;
use super::types::{Home, Peer, ProgramId, Root, State, TurnId};
use crate::ids::Seconds;
use crate::levels::Key;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;

/// A program.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Program {
    /// The number that all routers use for it.
    pub(super) key: u64,
    /// Number of its turns, at all routers.
    pub(super) turn: u64,
    /// The peer router that had its latest turn; `None`: this router.
    pub(super) peer: Option<Peer>,
    /// Hash of its tenant, and the tenant's weight.
    pub tenant: u64,
    /// Share of its tenant.
    pub weight: f64,
    /// Priority level of its latest request.
    pub(super) level: i8,
    pub(super) session: Option<u64>,
    /// Arrival of the first request of its tree, and its place among programs of that time.
    pub born: Seconds,
    /// Place in the order of birth.
    pub order: u64,
    /// Tokens of its context: the latest prompt and its answer.
    pub tokens: f64,
    /// The part of the context that it shares with other programs.
    pub(super) base: Option<Root>,
    /// The program whose context it continues, while that program lives.
    pub(super) parent: Option<ProgramId>,
    /// Programs with a place that continue this program's context, as of the last tick, by the bits
    /// of the tokens that they continue.
    pub(super) children: BTreeSet<(u64, ProgramId)>,
    /// The tokens under which it is among its parent's children.
    pub(super) as_child: Option<u64>,
    /// The instance that holds its context, or held it last.
    pub home: Option<Home>,
    /// State.
    pub state: State,
    /// Start of the gap.
    pub since: Seconds,
    pub(super) class: GapClass,
    /// Whether the gap counts as an end.
    pub(super) forgotten: bool,
    /// Whether its client said that it ended. A fork of it may still come.
    pub(super) said_final: bool,
    /// Whether a request continued it.
    pub(super) came_back: bool,
    /// Whether one of its turns has run.
    pub(super) has_run: bool,
    /// Its turns: running, held, or admitted and not placed yet.
    pub(super) turns: BTreeSet<TurnId>,
    /// Its held turns, oldest first.
    pub held: Vec<TurnId>,
    /// Tokens that count on its home.
    pub(super) charge: Option<Charge>,
    /// Tokens that count for its tenant.
    pub(super) share: Option<f64>,
    /// Its place in the indexes.
    pub(super) filed: Option<Filed>,
}

impl Program {
    /// Returns a program of nobody without a context.
    pub(super) fn new((key, turn): (u64, u64), state: State, since: Seconds) -> Program {
        Program {
            key,
            turn,
            peer: None,
            tenant: 0,
            weight: 1.0,
            level: 0,
            session: None,
            born: since,
            order: 0,
            tokens: 0.0,
            base: None,
            parent: None,
            children: BTreeSet::new(),
            as_child: None,
            home: None,
            state,
            since,
            class: GapClass::default(),
            forgotten: false,
            said_final: false,
            came_back: false,
            has_run: false,
            turns: BTreeSet::new(),
            held: Vec::new(),
            charge: None,
            share: None,
            filed: None,
        }
    }

    /// Returns the line in which it waits if it is held.
    pub(super) fn line(&self) -> Key {
        Key { level: self.level, tenant: self.tenant }
    }

    /// Returns the tokens behind the part that it shares with other programs.
    pub fn own_tokens(&self) -> f64 {
        (self.tokens - self.base.map_or(0.0, |base| base.tokens)).max(0.0)
    }

    /// Returns the part of the context that it shares with other programs.
    pub fn base(&self) -> Option<Root> {
        self.base
    }

    /// Returns whether one of its turns has run.
    pub fn has_run(&self) -> bool {
        self.has_run
    }

    /// Returns the class of its gap.
    pub fn class(&self) -> GapClass {
        self.class
    }

    /// Returns what counts for it on its home, if it has a place.
    pub(super) fn charge(&self) -> Option<Charge> {
        self.charge
    }

    /// Returns the tokens of its context that its children continue.
    pub(super) fn continued_tokens(&self) -> f64 {
        self.children.last().map_or(0.0, |(tokens, _)| f64::from_bits(*tokens))
    }

    /// Returns the program whose context it continues.
    pub fn parent(&self) -> Option<ProgramId> {
        self.parent
    }
}
