//! Admission: the choice of programs to pause and to admit, and the queue of held programs.
//!
//! An instance whose expected tokens exceed `theta` of its capacity loses programs that are between
//! two turns, those least likely to return soon first. A program without a place is admitted if an
//! instance then stays below `resume x theta`: this hysteresis leaves room to grow. Programs are
//! admitted by birth within a tenant, and tenants by the tokens that already count for them.
use super::ledger::Root;
use super::programs::{Program, ProgramId, Programs, Released, State, TurnId, Verdict};
use crate::ids::{InstanceId, Seconds};
use hashbrown::HashMap;
use std::collections::BTreeMap;

/// Horizon of the return probability by which programs are paused.
const SOON_SECONDS: Seconds = 30.0;
/// Held programs considered per tenant and round.
const CANDIDATES: usize = 64;
/// Time constant of the rate at which tokens are admitted.
const FLOW_SECONDS: Seconds = 300.0;

/// Why a request is held.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Hold {
    /// Tokens that the program needs on an instance.
    pub needed_tokens: f64,
    /// Expected working set of the instance with the most room, over its capacity.
    pub working_set_ratio: f64,
    /// Held programs, this one included.
    pub held_programs: usize,
    /// Predicted seconds until the program is admitted.
    pub expected_seconds: Seconds,
}

/// Order of a program among the held programs of its tenant.
type Place = (u64, u64);

/// The held programs, and requests admitted but not yet taken by the caller.
#[derive(Clone, Debug, Default)]
pub(super) struct Queue {
    tenants: HashMap<u64, BTreeMap<Place, ProgramId>>,
    /// Tenant, place and needed tokens of each held program.
    places: HashMap<ProgramId, (u64, Place, f64)>,
    /// Tokens that the held programs need.
    tokens: f64,
    pub released: Vec<Released>,
    /// Admitted tokens, decayed.
    flow: f64,
    flow_at: Seconds,
}

impl Queue {
    /// Adds a held program, or gives it a new place.
    pub fn insert(&mut self, program: &Program, id: ProgramId, shortest_first: bool) {
        self.remove(id);
        let first = if shortest_first { program.tokens as u64 } else { program.born.max(0.0).to_bits() };
        let place = (first, program.order << 16 | u64::from(id_bits(id)));
        let tokens = program.own_tokens(0.0);
        self.places.insert(id, (program.tenant, place, tokens));
        self.tenants.entry(program.tenant).or_default().insert(place, id);
        self.tokens += tokens;
    }

    /// Removes a program.
    pub fn remove(&mut self, id: ProgramId) {
        let Some((tenant, place, tokens)) = self.places.remove(&id) else { return };
        self.tokens -= tokens;
        if let Some(held) = self.tenants.get_mut(&tenant) {
            held.remove(&place);
            if held.is_empty() {
                self.tenants.remove(&tenant);
            }
        }
        if self.places.is_empty() {
            self.tokens = 0.0;
        }
    }

    /// Returns the number of held programs.
    pub fn len(&self) -> usize {
        self.places.len()
    }

    fn admitted(&mut self, tokens: f64, now: Seconds) {
        self.flow = self.demand(now).1 + tokens;
        self.flow_at = self.flow_at.max(now);
    }

    /// Returns the tokens that held programs need, and those admitted recently.
    pub fn demand(&self, now: Seconds) -> (f64, f64) {
        (self.tokens, self.flow * (-(now - self.flow_at).max(0.0) / FLOW_SECONDS).exp())
    }

    /// Returns the predicted seconds until all held programs are admitted. `peers`: the demand of
    /// peer routers on the same instances.
    fn expected_seconds(&self, peers: (f64, f64), now: Seconds) -> Seconds {
        let (held, admitted) = self.demand(now);
        let rate = (admitted + peers.1) / FLOW_SECONDS;
        if rate > 0.0 { (held + peers.0) / rate } else { f64::INFINITY }
    }
}

/// Returns bits of a key that differ between programs of one birth.
fn id_bits(id: ProgramId) -> u16 {
    use slotmap::Key;
    id.data().as_ffi() as u16
}

impl Programs {
    /// Decides what to do with a turn of a program that has just arrived.
    pub(super) fn admit(&mut self, id: ProgramId, turn: TurnId, now: Seconds) -> Verdict {
        let program = &self.programs[id];
        let home = program.home.filter(|home| self.instances[home.index()].available);
        let has_place = matches!(program.state, State::Running | State::Gap);
        if let (true, Some(home)) = (has_place, home) {
            return if self.is_roomy(home) { Verdict::Free } else { Verdict::Run(home) };
        }
        if !self.holds() {
            if self.instances.iter().any(|ledger| ledger.capacity_tokens.is_some())
                && self.room_for(id).is_none()
            {
                self.counters.held += 1;
            }
            return Verdict::Free;
        }
        if let Some(program) = self.programs.get_mut(id).filter(|program| !program.held.is_empty()) {
            program.held.push(turn); // waits with the other turns of its program
            self.counters.held += 1;
            return Verdict::Held(self.hold_of(id, now));
        }
        self.uncharge(id);
        let program = &mut self.programs[id];
        let is_new = program.home.is_none() || program.parent().is_some() && program.since == now;
        program.state = State::Held;
        program.held.push(turn);
        self.queue.insert(&self.programs[id], id, self.config.shortest_first);
        self.release(now);
        if let Some(place) = self.queue.released.iter().position(|released| released.turn == turn) {
            let instance = self.queue.released.swap_remove(place).instance;
            // Every instance has room: the policy chooses.
            let roomy = (0..self.instances.len()).all(|slot| self.is_roomy(InstanceId(slot as u32)));
            return if roomy { Verdict::Free } else { Verdict::Run(instance) };
        }
        let hold = self.hold_of(id, now);
        let too_long = hold.expected_seconds > self.config.most_hold_seconds;
        if is_new && (too_long || self.queue.len() > self.config.most_held) {
            self.counters.refused += 1;
            self.ended(turn, 0, super::Finish::Unknown, now);
            return Verdict::Refused { retry_after_seconds: hold.expected_seconds.clamp(1.0, 3600.0) };
        }
        self.counters.held += 1;
        Verdict::Held(hold)
    }

    /// Returns whether an instance has so much room that programs may be placed by other criteria.
    fn is_roomy(&self, instance: InstanceId) -> bool {
        let ledger = &self.instances[instance.index()];
        let limit = ledger.capacity_tokens.map(|capacity| self.config.free * self.config.theta * capacity);
        limit.is_none_or(|limit| ledger.expected_tokens() < limit)
    }

    fn hold_of(&self, id: ProgramId, now: Seconds) -> Hold {
        let ratios = self.instances.iter().filter(|ledger| ledger.available);
        let ratios = ratios.filter_map(|ledger| Some(ledger.expected_tokens() / ledger.capacity_tokens?));
        Hold {
            needed_tokens: self.programs[id].own_tokens(self.least_tokens()),
            working_set_ratio: ratios.fold(f64::INFINITY, f64::min),
            held_programs: self.queue.len(),
            expected_seconds: self.queue.expected_seconds(self.peer_demand(), now),
        }
    }

    /// Returns the instance that can take a program: its home if it fits there, else the instance
    /// with the most room.
    fn room_for(&self, id: ProgramId) -> Option<InstanceId> {
        let program = &self.programs[id];
        let own = program.own_tokens(self.least_tokens());
        let parent = program.parent().and_then(|parent| self.programs.get(parent));
        let follows = parent.and_then(|parent| parent.home);
        let room = |slot: usize| -> Option<f64> {
            let (ledger, instance) = (&self.instances[slot], InstanceId(slot as u32));
            if !ledger.available {
                return None;
            }
            let Some(capacity) = ledger.capacity_tokens else {
                return Some(1e15 - ledger.expected_tokens());
            };
            let missing = |root: Root| root.tokens * (1.0 - ledger.share_of_root(root.hash));
            let need = own + self.root_to_count(program, instance).map_or(0.0, missing);
            // A fork lives on what its parent has in the cache, and its parent waits for it.
            let resume = if follows == Some(instance) { 1.0 } else { self.config.resume };
            let limit = resume * self.config.theta * capacity;
            let room = limit - ledger.expected_tokens() - need;
            // A program that fits nowhere runs alone.
            (room >= 0.0 || ledger.is_empty()).then_some(room)
        };
        let home = program.home.filter(|home| room(home.index()).is_some());
        home.or_else(|| {
            let rooms = (0..self.instances.len()).filter_map(|slot| Some((slot, room(slot)?)));
            rooms
                .max_by(|a, b| a.1.total_cmp(&b.1).then(b.0.cmp(&a.0)))
                .map(|(slot, _)| InstanceId(slot as u32))
        })
    }

    /// Pauses programs of crowded instances and admits held ones.
    pub(super) fn balance(&mut self, now: Seconds) {
        if !self.holds() {
            return;
        }
        for slot in 0..self.instances.len() {
            self.pause_on(slot, now);
        }
        self.release(now);
    }

    /// Pauses programs of an instance while it is crowded.
    fn pause_on(&mut self, slot: usize, now: Seconds) {
        let ledger = &self.instances[slot];
        let Some(limit) = ledger.capacity_tokens.map(|capacity| self.config.theta * capacity) else { return };
        let excess = ledger.expected_tokens() - limit;
        if excess <= 0.0 {
            return;
        }
        let limit = limit + excess * (1.0 - ledger.own_part());
        let rests = |program: &Program| {
            program.state == State::Gap
                && program.children == 0
                && program.home.is_some_and(|home| home.index() == slot)
        };
        let mut resting: Vec<(f64, ProgramId)> = self
            .programs
            .iter()
            .filter(|(_, p)| rests(p))
            .map(|(id, p)| (self.gaps.returns_within(p.class(), now - p.since, SOON_SECONDS), id))
            .collect();
        resting.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
        for (_, id) in resting {
            let ledger = &self.instances[slot];
            if ledger.expected_tokens() <= limit || ledger.programs <= 1 {
                break;
            }
            self.uncharge(id);
            self.programs[id].state = State::Paused;
            self.counters.paused += 1;
        }
    }

    /// Admits held programs while there is room.
    fn release(&mut self, now: Seconds) {
        while let Some((id, instance)) = self.next_to_admit(now) {
            self.queue.remove(id);
            let program = &mut self.programs[id];
            program.state = State::Running;
            program.home = Some(instance);
            let turns = std::mem::take(&mut program.held);
            self.queue.admitted(program.own_tokens(0.0), now);
            self.charge(id, now);
            for turn in turns {
                self.turns[turn].assigned = Some(instance);
                let held_seconds = now - self.turns[turn].arrived;
                if held_seconds > 0.0 {
                    self.counters.admitted += 1;
                    self.counters.held_seconds += held_seconds;
                }
                self.queue.released.push(Released { turn, instance, held_seconds });
            }
        }
    }

    /// Returns the held program to admit next, if one fits.
    fn next_to_admit(&self, now: Seconds) -> Option<(ProgramId, InstanceId)> {
        for tenant in self.tenants_by_share() {
            for &id in self.queue.tenants[&tenant].values().take(CANDIDATES) {
                if let Some(instance) = self.room_for(id) {
                    return Some((id, instance));
                }
                let since = self.programs[id].held.first().map_or(now, |turn| self.turns[*turn].arrived);
                if now - since > self.config.backfill_seconds {
                    return None;
                }
            }
        }
        None
    }

    /// Returns the tenants with held programs; those with the fewest counted tokens for their
    /// weight first.
    fn tenants_by_share(&self) -> Vec<u64> {
        let mut tenants: Vec<u64> = self.queue.tenants.keys().copied().collect();
        if tenants.len() > 1 {
            let mut shares: HashMap<u64, f64> = HashMap::new();
            for program in self.programs.values().filter(|program| program.has_place()) {
                *shares.entry(program.tenant).or_default() += program.own_tokens(0.0) / program.weight;
            }
            let share = |tenant: &u64| shares.get(tenant).copied().unwrap_or(0.0);
            tenants.sort_by(|a, b| share(a).total_cmp(&share(b)).then(a.cmp(b)));
        }
        tenants
    }
}
