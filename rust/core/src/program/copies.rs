//! Copies of programs in other workers: what makes them equal, and what shows that they are not.
use super::programs::{Ids, Programs, Turn};
use super::types::{ProgramId, TurnId};
use crate::ids::Seconds;
use serde::Serialize;
use serde::de::DeserializeOwned;
use slotmap::Key;
use std::hash::{Hash, Hasher};
use xxhash_rust::xxh3::Xxh3;

impl Programs {
    /// Drops the programs with the longest gaps until at most `most` programs are left, or
    /// no program is between two turns. Programs of peers go first: their routers have them, too.
    pub(super) fn drop_to(&mut self, most: usize, now: Seconds) {
        let of_peers = self.peers.values().flat_map(|peer| &peer.programs).copied();
        let mut of_peers: Vec<ProgramId> = of_peers.filter(|id| self.programs[*id].state.rests()).collect();
        of_peers.sort_by(|a, b| self.programs[*a].since.total_cmp(&self.programs[*b].since).then(a.cmp(b)));
        of_peers.truncate(self.programs.len().saturating_sub(most));
        of_peers.into_iter().for_each(|id| self.remove(id));
        while self.programs.len() > most
            && let Some(id) = self.to_drop(now)
        {
            self.remove(id);
        }
    }

    /// Puts the unused keys in order. A copy has them in this order, too, so that both give the
    /// same keys to the next programs and turns.
    pub(super) fn order_keys(&mut self) {
        self.ids = ordered(&self.ids);
        self.turn_ids = ordered(&self.turn_ids);
    }

    /// Becomes a copy of other programs, under the own settings.
    pub(super) fn become_copy(&mut self, other: Programs) {
        let (config, terms) = (std::mem::take(&mut self.config), self.terms);
        *self = other; // what was published may differ: all is published again
        (self.config, self.terms) = (config, terms);
    }

    /// Releases the requests of a worker that were admitted and are not placed yet.
    pub(super) fn release_again(&mut self, worker: u8) {
        let waits = |turn: &Turn| turn.worker == worker && !turn.running;
        let waiting = self.turns.iter().filter(|(_, at)| waits(at) && at.assigned.is_some());
        self.queue.released.extend(waiting.map(|(turn, _)| turn));
    }

    /// Returns the requests of a worker.
    pub(super) fn turns_of(&self, worker: u8) -> Vec<TurnId> {
        let of_worker = self.turns.iter().filter(|(_, turn)| turn.worker == worker);
        of_worker.map(|(id, _)| id).collect()
    }

    /// Returns a number that two copies share if they are equal.
    pub(super) fn digest(&self) -> u64 {
        let mut hash = Xxh3::new();
        (self.programs.len(), self.turns.len(), self.births, self.sets.counts).hash(&mut hash);
        (self.sets.tokens.to_bits(), self.queue.len()).hash(&mut hash);
        for ledger in &self.instances {
            (ledger.expected_tokens().to_bits(), ledger.programs).hash(&mut hash);
        }
        hash.finish()
    }
}

fn ordered<K: Key + Serialize + DeserializeOwned>(ids: &Ids<K>) -> Ids<K> {
    let mut bytes = Vec::new();
    ciborium::into_writer(ids, &mut bytes).expect("memory takes all");
    ciborium::from_reader(&*bytes).expect("what was just written")
}
