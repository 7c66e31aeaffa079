//! Programs of peer routers: their tokens count in the working set of each instance.
//!
//! Each router publishes what its own programs and its requests outside programs need on an
//! instance: the tokens, and the roots that its programs share. Several routers may have programs
//! with the same root. The instance needs one copy of it, so roots are merged by their hash.
use super::ledger::{InstanceLedger, SharedRoot};
use super::programs::Programs;
use super::types::{MAX_ROOTS, PeerPrograms, PeerRoot, Root};
use crate::ids::{InstanceId, Seconds};

impl InstanceLedger {
    /// Returns what this router's programs and requests need here.
    fn published(&self) -> PeerPrograms {
        let own = self.roots.iter().filter(|(_, root)| root.programs > 0);
        let mut roots: Vec<PeerRoot> = own
            .map(|(&hash, root)| PeerRoot {
                root: Root { hash, tokens: root.tokens },
                probability: root.probability.clamp(0.0, 1.0),
            })
            .collect();
        let expected = |root: &PeerRoot| root.root.tokens * root.probability;
        roots.sort_by(|a, b| expected(b).total_cmp(&expected(a)).then(a.root.hash.cmp(&b.root.hash)));
        let rest: f64 = roots.iter().skip(MAX_ROOTS).map(expected).sum();
        roots.truncate(MAX_ROOTS);
        let (own, _, others) = self.parts();
        let (tokens, programs) = (own + others + rest, f64::from(self.programs));
        PeerPrograms { tokens, programs, roots, ..PeerPrograms::default() }
    }

    /// Replaces what the programs of all peers need here.
    fn set_peers(&mut self, mut peers: PeerPrograms) {
        let roots = std::mem::take(&mut peers.roots);
        self.peers = peers;
        self.roots.values_mut().for_each(|root| root.peers = 0.0);
        for PeerRoot { root, probability } in roots {
            let new = SharedRoot { tokens: root.tokens, ..SharedRoot::default() };
            self.roots.entry(root.hash).or_insert(new).peers += probability;
        }
        self.roots.retain(|_, root| root.is_needed());
        self.count_roots();
    }

    /// Returns the tokens that peers' programs and requests add to the working set.
    pub fn peer_tokens(&self) -> f64 {
        let alone = |root: &SharedRoot| root.tokens * root.probability.min(1.0);
        let added: f64 = self.roots.values().map(|root| root.expected_tokens() - alone(root)).sum();
        self.peers.tokens + added
    }

    /// Returns whether no program of any router counts here.
    pub fn is_empty(&self) -> bool {
        self.programs == 0 && self.peers.programs <= 0.0
    }

    /// Returns this router's part of the working set, 0 to 1. Each router pauses its part of the
    /// programs that are too many, so that together they pause no more than one router would.
    pub(super) fn own_part(&self) -> f64 {
        let (peers, all) = (self.peer_tokens(), self.expected_tokens());
        if peers > 0.0 && all > 0.0 { ((all - peers) / all).max(0.0) } else { 1.0 }
    }
}

impl Programs {
    /// Returns the tokens that held programs need, and those admitted recently, each divided by the
    /// available instances: what every instance publishes of them.
    pub fn demand_per_instance(&self, now: Seconds) -> (f64, f64) {
        let (held, admitted) = self.queue.demand(now);
        let live = self.instances.iter().filter(|ledger| ledger.available).count().max(1);
        // Less than a token is nothing: an idle router has nothing to publish.
        let part = |tokens: f64| if tokens < 1.0 { 0.0 } else { tokens / live as f64 };
        (part(held), part(admitted))
    }

    /// Returns what this router's programs and requests need on an instance, for its peers.
    /// `demand`: of [`Programs::demand_per_instance`].
    pub fn published(&self, id: InstanceId, demand: (f64, f64)) -> PeerPrograms {
        let Some(ledger) = self.instances.get(id.index()) else { return PeerPrograms::default() };
        PeerPrograms { held_tokens: demand.0, admitted_tokens: demand.1, ..ledger.published() }
    }

    /// Returns the tokens that peers hold, and those that they admitted recently.
    pub(super) fn peer_demand(&self) -> (f64, f64) {
        let peers = self.instances.iter().map(|ledger| &ledger.peers);
        peers.fold((0.0, 0.0), |sum, peers| (sum.0 + peers.held_tokens, sum.1 + peers.admitted_tokens))
    }

    /// Replaces what the programs of all peers need on an instance. Its capacity may be unknown
    /// until [`Programs::set_instance`].
    pub fn set_peers(&mut self, id: InstanceId, peers: PeerPrograms) {
        if self.instances.len() <= id.index() {
            self.instances.resize_with(id.index() + 1, InstanceLedger::default);
        }
        self.instances[id.index()].set_peers(peers);
    }
}
