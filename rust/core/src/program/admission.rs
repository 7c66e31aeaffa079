//! Admission: the choice of programs to pause and to admit, and the queue of held programs.
//!
//! An instance whose expected tokens exceed `theta` of its capacity loses programs that are between
//! two turns, those least likely to return soon first. A program without a place is admitted if an
//! instance then stays below `resume x theta`: this hysteresis leaves room to grow. Programs are
//! admitted by birth within a tenant, and tenants by the tokens that already count for them.
use super::ledger::{InstanceLedger, Root};
use super::programs::{Program, ProgramId, Programs, Released, State, TurnId, Verdict};
use super::settings::ProgramConfig;
use super::thunder::Thunder;
use crate::ids::{InstanceId, Seconds};
use hashbrown::HashMap;
use std::collections::BTreeSet;

/// Horizon of the return probability by which programs are paused.
const SOON_SECONDS: Seconds = 30.0;
/// Held turns of one program. A client that sends more is refused.
const MOST_HELD_TURNS: usize = 64;
/// Held programs considered per tenant and round.
const CANDIDATES: usize = 64;
/// Time constant of the rate at which tokens are admitted, and the shortest time that it covers.
const FLOW_SECONDS: Seconds = 300.0;
const LEAST_FLOW_SECONDS: Seconds = 60.0;

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

/// Place of a program among the held programs of its tenant: what the order counts, then its birth.
type Place = (u64, u64, ProgramId);

/// The held programs of a tenant, and the tokens that they need.
#[derive(Clone, Debug, Default)]
struct Waiting {
    places: BTreeSet<Place>,
    tokens: f64,
}

/// The held programs, and requests admitted but not yet taken by the caller.
#[derive(Clone, Debug, Default)]
pub(super) struct Queue {
    tenants: HashMap<u64, Waiting>,
    /// Tenant, place and needed tokens of each held program.
    places: HashMap<ProgramId, (u64, Place, f64)>,
    pub released: Vec<Released>,
    /// Admitted tokens, decayed.
    flow: f64,
    flow_at: Seconds,
    /// Time of the first admission.
    flow_began: Option<Seconds>,
}

impl Queue {
    /// Adds a held program, or gives it a new place.
    pub fn insert(&mut self, program: &Program, id: ProgramId, config: &ProgramConfig) {
        self.remove(id);
        let first = match (&config.thunder, config.shortest_first) {
            (Some(_), _) => Thunder::place(program),
            (None, true) => program.tokens as u64,
            (None, false) => program.born.max(0.0).to_bits(),
        };
        let place = (first, program.order, id);
        let tokens = program.own_tokens();
        self.places.insert(id, (program.tenant, place, tokens));
        let waiting = self.tenants.entry(program.tenant).or_default();
        waiting.places.insert(place);
        waiting.tokens += tokens;
    }

    /// Removes a program.
    pub fn remove(&mut self, id: ProgramId) {
        let Some((tenant, place, tokens)) = self.places.remove(&id) else { return };
        if let Some(waiting) = self.tenants.get_mut(&tenant) {
            waiting.places.remove(&place);
            waiting.tokens -= tokens;
            if waiting.places.is_empty() {
                self.tenants.remove(&tenant);
            }
        }
    }

    /// Returns the number of held programs.
    pub fn len(&self) -> usize {
        self.places.len()
    }

    fn admitted(&mut self, tokens: f64, now: Seconds) {
        self.flow = self.demand(now).1 + tokens;
        self.flow_at = self.flow_at.max(now);
        self.flow_began.get_or_insert(now);
    }

    /// Returns the tokens that held programs need, and those admitted recently.
    pub fn demand(&self, now: Seconds) -> (f64, f64) {
        let tokens = self.tenants.values().map(|waiting| waiting.tokens).sum();
        (tokens, self.flow * (-(now - self.flow_at).max(0.0) / FLOW_SECONDS).exp())
    }

    /// Returns the predicted seconds until all held programs of a tenant are admitted. Tenants take
    /// turns, so at most as many tokens of each other tenant are admitted before. `peers`: the
    /// demand of peer routers on the same instances.
    fn expected_seconds(&self, tenant: u64, peers: (f64, f64), now: Seconds) -> Seconds {
        let age = self.flow_began.map_or(0.0, |began| now - began).max(LEAST_FLOW_SECONDS);
        let admitted = self.demand(now).1 + peers.1;
        let rate = admitted / (FLOW_SECONDS * (1.0 - (-age / FLOW_SECONDS).exp()));
        let own = self.tenants.get(&tenant).map_or(0.0, |waiting| waiting.tokens);
        let tokens: f64 = self.tenants.values().map(|waiting| waiting.tokens.min(own)).sum();
        // Peers share by tenants, too: they admit at most as many tokens before.
        if rate > 0.0 { (tokens + peers.0.min(own)) / rate } else { f64::INFINITY }
    }

    /// Returns whether a tenant has more than its share of a full queue.
    fn is_full(&self, tenant: u64, most: usize) -> bool {
        let own = self.tenants.get(&tenant).map_or(0, |waiting| waiting.places.len());
        self.len() > most && own > most / self.tenants.len().max(1)
    }
}

impl Programs {
    /// Decides what to do with a turn of a program that has just arrived.
    pub(super) fn admit(&mut self, id: ProgramId, turn: TurnId, now: Seconds) -> Verdict {
        let program = &self.programs[id];
        let home = program.home.filter(|home| self.instances[home.index()].available);
        let place = home.filter(|_| program.state.has_place());
        if !self.holds() {
            // Only observed: the policy places every request.
            let limited = self.instances.iter().any(|ledger| ledger.capacity_tokens.is_some());
            self.counters.held += u64::from(place.is_none() && limited && self.room_for(id, &[]).is_none());
            return Verdict::Free;
        }
        if let Some(home) = place {
            return if self.is_roomy(home) { Verdict::Free } else { Verdict::Run(home) };
        }
        if !self.programs[id].held.is_empty() {
            let hold = self.hold_of(id, now);
            if self.programs[id].held.len() >= MOST_HELD_TURNS {
                return self.refuse(turn, hold.expected_seconds, now);
            }
            self.programs[id].held.push(turn); // waits with the other turns of its program
            self.counters.held += 1;
            return Verdict::Held(hold);
        }
        self.uncharge(id);
        let program = &mut self.programs[id];
        let is_new = !program.has_run;
        program.state = State::Held;
        program.held.push(turn);
        self.queue.insert(&self.programs[id], id, &self.config);
        self.release(now);
        if let Some(place) = self.queue.released.iter().position(|released| released.turn == turn) {
            let instance = self.queue.released.swap_remove(place).instance;
            // Every instance has room: the policy chooses.
            let roomy = (0..self.instances.len()).all(|slot| self.is_roomy(InstanceId(slot as u32)));
            return if roomy { Verdict::Free } else { Verdict::Run(instance) };
        }
        let hold = self.hold_of(id, now);
        let too_long = hold.expected_seconds > self.config.most_hold_seconds;
        let is_full = self.queue.is_full(self.programs[id].tenant, self.config.most_held);
        if is_new && (too_long || is_full) {
            return self.refuse(turn, hold.expected_seconds, now);
        }
        self.counters.held += 1;
        Verdict::Held(hold)
    }

    /// Drops an arriving turn.
    fn refuse(&mut self, turn: TurnId, seconds: Seconds, now: Seconds) -> Verdict {
        self.counters.refused += 1;
        self.ended(turn, 0, super::Finish::Unknown, now);
        Verdict::Refused { retry_after_seconds: seconds.clamp(1.0, 3600.0) }
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
            needed_tokens: self.counted_tokens(&self.programs[id]),
            working_set_ratio: ratios.fold(f64::INFINITY, f64::min),
            held_programs: self.queue.len(),
            expected_seconds: self.queue.expected_seconds(self.programs[id].tenant, self.peer_demand(), now),
        }
    }

    /// Returns the instance that can take a program: its home if it fits there, else the instance
    /// with the most room.
    fn room_for(&self, id: ProgramId, reserved: &[InstanceId]) -> Option<InstanceId> {
        let program = &self.programs[id];
        let own = self.counted_tokens(program);
        let parent = program.parent().and_then(|parent| self.programs.get(parent));
        let follows = parent.and_then(|parent| parent.home);
        let room = |slot: usize| -> Option<f64> {
            let (ledger, instance) = (&self.instances[slot], InstanceId(slot as u32));
            if !ledger.available || reserved.contains(&instance) {
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
        let stays = self.config.thunder.is_none();
        let home = program.home.filter(|home| stays && room(home.index()).is_some());
        home.or_else(|| {
            let rooms = (0..self.instances.len()).filter_map(|slot| Some((slot, room(slot)?)));
            rooms
                .max_by(|a, b| a.1.total_cmp(&b.1).then(b.0.cmp(&a.0)))
                .map(|(slot, _)| InstanceId(slot as u32))
        })
    }

    /// Returns whether some instance could take a program beside others, if these needed less.
    fn fits_beside_others(&self, id: ProgramId) -> bool {
        let program = &self.programs[id];
        let need = self.counted_tokens(program) + program.base().map_or(0.0, |root| root.tokens);
        let most = self.config.resume * self.config.theta;
        let available = self.instances.iter().filter(|ledger| ledger.available);
        available.filter_map(|ledger| ledger.capacity_tokens).any(|capacity| need <= most * capacity)
    }

    /// Returns the available instance with the most room, full or not, apart from `reserved`.
    fn emptiest(&self, reserved: &[InstanceId]) -> Option<InstanceId> {
        let free = |slot: usize| !reserved.contains(&InstanceId(slot as u32));
        let available = self.instances.iter().enumerate();
        let available = available.filter(|(slot, ledger)| ledger.available && free(*slot));
        let room = |ledger: &InstanceLedger| {
            ledger.capacity_tokens.unwrap_or(f64::INFINITY) - ledger.expected_tokens()
        };
        let emptiest = available.max_by(|a, b| room(a.1).total_cmp(&room(b.1)).then(b.0.cmp(&a.0)));
        emptiest.map(|(slot, _)| InstanceId(slot as u32))
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
        let thunder = self.config.thunder;
        let limit = match thunder {
            Some(thunder) => limit * thunder.pause_to,
            None => limit + excess * (1.0 - ledger.own_part()),
        };
        let rests = |program: &Program| {
            program.state == State::Gap
                && program.children == 0
                && program.home.is_some_and(|home| home.index() == slot)
        };
        let mut resting: Vec<(f64, ProgramId)> = self
            .programs
            .iter()
            .filter(|(_, p)| rests(p))
            .map(|(id, p)| match thunder {
                Some(_) => (p.tokens, id),
                None => {
                    let error = self.config.gap_error;
                    let (gap, soon) = ((now - p.since) / error, SOON_SECONDS / error);
                    (self.gaps.returns_within(p.class(), gap, soon), id)
                }
            })
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
            self.uncharge(id);
            let program = &mut self.programs[id];
            program.state = State::Running;
            program.home = Some(instance);
            self.queue.admitted(program.own_tokens(), now);
            self.charge(id, now);
            self.hand_out(id, instance, now);
        }
    }

    /// Releases all held turns of a program to an instance.
    pub(super) fn hand_out(&mut self, id: ProgramId, instance: InstanceId, now: Seconds) {
        self.queue.remove(id);
        for turn in std::mem::take(&mut self.programs[id].held) {
            self.turns[turn].assigned = Some(instance);
            let held_seconds = now - self.turns[turn].arrived;
            if held_seconds > 0.0 {
                self.counters.admitted += 1;
                self.counters.held_seconds += held_seconds;
            }
            self.queue.released.push(Released { turn, instance, held_seconds });
        }
    }

    /// Returns the held program to admit next, if one fits.
    fn next_to_admit(&self, now: Seconds) -> Option<(ProgramId, InstanceId)> {
        let mut reserved = Vec::new();
        for tenant in self.tenants_by_share() {
            for &(_, _, id) in self.queue.tenants[&tenant].places.iter().take(CANDIDATES) {
                if let Some(instance) = self.room_for(id, &reserved) {
                    return Some((id, instance));
                }
                let since = self.programs[id].held.first().map_or(now, |turn| self.turns[*turn].arrived);
                if self.config.thunder.is_some_and(|thunder| now - since > thunder.most_wait_seconds)
                    && let Some(instance) = self.emptiest(&[])
                {
                    return Some((id, instance));
                }
                if now - since > self.config.backfill_seconds {
                    if self.fits_beside_others(id) {
                        return None;
                    }
                    // It can only run alone: one instance gets no further programs until then.
                    reserved.extend(self.emptiest(&reserved));
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
            for program in self.programs.values().filter(|program| program.charge().is_some()) {
                *shares.entry(program.tenant).or_default() += program.own_tokens() / program.weight;
            }
            let share = |tenant: &u64| shares.get(tenant).copied().unwrap_or(0.0);
            tenants.sort_by(|a, b| share(a).total_cmp(&share(b)).then(a.cmp(b)));
        }
        tenants
    }
}
