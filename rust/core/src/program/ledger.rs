//! Expected tokens in the caches, by instance: programs, their shared roots, and other requests.
use super::types::Root;
use crate::ids::Seconds;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Tokens that count on one instance because of one program.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Charge {
    /// Expected tokens behind the root.
    pub own: f64,
    /// The root, if it must be counted.
    pub root: Option<Root>,
    /// Probability that the program needs its root again.
    pub probability: f64,
    /// Whether it is a program of a peer router.
    pub of_peer: bool,
}

/// Buckets of recent tokens.
const BUCKETS: usize = 16;

/// Tokens of the last seconds, in buckets of equal length.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
struct Recent {
    buckets: [f64; BUCKETS],
    newest: u64,
    /// Sum of the buckets: each decision reads it on each instance.
    sum: f64,
}

impl Recent {
    fn advance(&mut self, now: Seconds, window: Seconds) {
        let bucket = (now.max(0.0) / (window / BUCKETS as f64)) as u64;
        let steps = bucket.saturating_sub(self.newest).min(BUCKETS as u64);
        for step in 1..=steps {
            self.buckets[((self.newest + step) % BUCKETS as u64) as usize] = 0.0;
        }
        if bucket > self.newest {
            // More steps than buckets: all are zero, whichever is the newest.
            if steps == BUCKETS as u64 {
                self.buckets = [0.0; BUCKETS];
            }
            self.newest = bucket;
            self.sum = self.buckets.iter().sum();
        }
    }

    fn add(&mut self, tokens: f64, now: Seconds, window: Seconds) {
        self.advance(now, window);
        self.buckets[(self.newest % BUCKETS as u64) as usize] += tokens;
        self.sum = self.buckets.iter().sum();
    }
}

/// A root on one instance: the number of its programs, and the sum of their probabilities.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub(super) struct SharedRoot {
    pub programs: u32,
    pub tokens: f64,
    pub probability: f64,
}

impl SharedRoot {
    /// Returns the expected tokens; several programs need one copy.
    pub fn expected_tokens(&self) -> f64 {
        self.tokens * self.probability.min(1.0)
    }
}

/// One instance.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct InstanceLedger {
    /// Tokens that the instance's cache can hold, all tiers included; `None`: unknown, no limit.
    pub capacity_tokens: Option<f64>,
    /// Whether the instance takes new requests.
    pub available: bool,
    /// Number of instances that the slot had before.
    pub(super) generation: u32,
    own: f64,
    /// Number of programs that count.
    pub programs: u32,
    pub(super) roots: BTreeMap<u64, SharedRoot>,
    root_tokens: f64,
    /// Tokens of running requests outside programs, and of recent ones.
    running_others: f64,
    recent: Recent,
    /// The part of `own` that programs of peer routers need, and tokens of peers' requests outside
    /// programs.
    own_of_peers: f64,
    others_of_peers: f64,
}

impl InstanceLedger {
    /// Returns an empty ledger for the next instance of the slot.
    pub(super) fn of_next_instance(&self) -> InstanceLedger {
        InstanceLedger { generation: self.generation.wrapping_add(1), ..InstanceLedger::default() }
    }

    /// Returns the expected working set in tokens.
    pub fn expected_tokens(&self) -> f64 {
        self.own + self.root_tokens + self.running_others + self.recent.sum + self.others_of_peers
    }

    /// Returns the tokens that peer routers' programs, without their roots, and requests add.
    pub fn peer_tokens(&self) -> f64 {
        self.own_of_peers + self.others_of_peers
    }

    /// Sets the tokens of peers' requests outside programs.
    pub(super) fn set_others_of_peers(&mut self, tokens: f64) {
        self.others_of_peers = tokens;
    }

    /// Returns whether no program of any router counts here.
    pub fn is_empty(&self) -> bool {
        self.programs == 0
    }

    /// Returns the expected tokens of programs and their roots, those of peers included, and of
    /// this router's other requests.
    pub fn parts(&self) -> (f64, f64, f64) {
        (self.own, self.root_tokens, self.running_others + self.recent.sum)
    }

    /// Returns the part of a root that counts on the instance, 0 to 1.
    pub fn share_of_root(&self, hash: u64) -> f64 {
        self.roots.get(&hash).map_or(0.0, |root| root.probability.min(1.0))
    }

    /// Adds a program.
    pub fn add(&mut self, charge: Charge) {
        self.own += charge.own;
        self.own_of_peers += if charge.of_peer { charge.own } else { 0.0 };
        self.programs += 1;
        if let Some(root) = charge.root {
            let new = SharedRoot { tokens: root.tokens, ..SharedRoot::default() };
            let entry = self.roots.entry(root.hash).or_insert(new);
            let before = entry.expected_tokens();
            entry.programs += 1;
            entry.probability += charge.probability;
            self.root_tokens += entry.expected_tokens() - before;
        }
    }

    /// Removes a program that was added with this charge.
    pub fn remove(&mut self, charge: Charge) {
        self.own = (self.own - charge.own).max(0.0);
        let of_peer = if charge.of_peer { charge.own } else { 0.0 };
        self.own_of_peers = (self.own_of_peers - of_peer).max(0.0);
        self.programs -= 1;
        if let Some(root) = charge.root
            && let Some(entry) = self.roots.get_mut(&root.hash)
        {
            let before = entry.expected_tokens();
            entry.programs -= 1;
            entry.probability -= charge.probability;
            if entry.programs == 0 {
                entry.probability = 0.0;
            }
            self.root_tokens = (self.root_tokens + entry.expected_tokens() - before).max(0.0);
            if entry.programs == 0 {
                self.roots.remove(&root.hash);
            }
        }
        if self.programs == 0 {
            (self.own, self.own_of_peers) = (0.0, 0.0);
            self.count_roots();
        }
    }

    /// Removes all programs.
    pub fn clear_programs(&mut self) {
        (self.own, self.own_of_peers, self.programs) = (0.0, 0.0, 0);
        self.roots.clear();
        self.root_tokens = 0.0;
    }

    /// Sums the tokens of all roots again, so that rounding errors do not add up.
    fn count_roots(&mut self) {
        self.root_tokens = self.roots.values().fold(0.0, |sum, root| sum + root.expected_tokens());
    }

    /// Adds a running request outside programs.
    pub fn other_began(&mut self, tokens: f64) {
        self.running_others += tokens;
    }

    /// Removes a running request outside programs that has left the instance.
    pub fn other_left(&mut self, tokens: f64) {
        self.running_others = (self.running_others - tokens).max(0.0);
    }

    /// Moves a request outside programs from the running to the recent ones. `tokens`: as at its
    /// beginning; `output_tokens`: of its answer.
    pub fn other_ended(&mut self, tokens: f64, output_tokens: f64, now: Seconds, window: Seconds) {
        self.other_left(tokens);
        if window > 0.0 {
            self.recent.add(tokens + output_tokens, now, window);
        }
    }

    /// Drops all recent tokens.
    pub fn forget_recent(&mut self) {
        self.recent = Recent::default();
    }

    /// Drops recent tokens that are older than the window.
    pub fn advance(&mut self, now: Seconds, window: Seconds) {
        if window > 0.0 {
            self.recent.advance(now, window);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_root_counts_once() {
        let root = Some(Root { hash: 7, tokens: 15_000.0 });
        let mut ledger = InstanceLedger::default();
        ledger.add(Charge { own: 100.0, root, probability: 1.0, ..Charge::default() });
        ledger.add(Charge { own: 50.0, root, probability: 0.25, ..Charge::default() });
        assert_eq!(ledger.parts(), (150.0, 15_000.0, 0.0));
        ledger.remove(Charge { own: 100.0, root, probability: 1.0, ..Charge::default() });
        assert_eq!(ledger.parts(), (50.0, 3750.0, 0.0));
        assert_eq!((ledger.share_of_root(7), ledger.share_of_root(8)), (0.25, 0.0));
        ledger.remove(Charge { own: 50.0, root, probability: 0.25, ..Charge::default() });
        assert_eq!((ledger.expected_tokens(), ledger.share_of_root(7)), (0.0, 0.0));
    }

    #[test]
    fn other_requests_count_for_a_while() {
        let mut ledger = InstanceLedger::default();
        ledger.other_began(1000.0);
        assert_eq!(ledger.expected_tokens(), 1000.0);
        ledger.other_ended(1000.0, 200.0, 10.0, 16.0);
        assert_eq!(ledger.expected_tokens(), 1200.0);
        ledger.advance(25.0, 16.0);
        assert_eq!(ledger.expected_tokens(), 1200.0);
        ledger.advance(26.5, 16.0);
        assert_eq!(ledger.expected_tokens(), 0.0);
        ledger.other_ended(0.0, 5.0, 27.0, 16.0);
        ledger.advance(1e9, 16.0);
        assert_eq!(ledger.expected_tokens(), 0.0);
    }
}
