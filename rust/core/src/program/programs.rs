//! The programs and their turns: a state machine, and the only writer of the ledgers.
use super::entry::Program;
use super::gaps::{Finish, GapClass, Gaps};
use super::ledger::{Charge, InstanceLedger};
use super::lineage::{Lineage, Mark};
use super::queue::Queue;
use super::rules::Terms;
use super::sets::Sets;
use super::settings::{ProgramConfig, ProgramMode};
use super::types::{Arrival, Home, PeerRouter, ProgramId, ProgramNote, Root, State, TurnId, Verdict, Work};
use super::waste::{Measured, Waste};
use crate::error::CoreError;
use crate::ids::{Seconds, Slot};
use crate::levels::Key;
use hashbrown::HashMap;
use serde::{Deserialize, Serialize};
use slotmap::{SecondaryMap, SlotMap};
#[cfg(test)]
use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::hash::{Hash, Hasher};
use std::ops::Bound;
use xxhash_rust::xxh3::Xxh3;

/// Maximum number of programs; the program with the longest gap is dropped first.
pub(super) const MAX_PROGRAMS: usize = 1 << 16;
/// Most programs counted again per tick: some 0.5 ms. If more have a place, each is counted again
/// every few ticks.
const COUNTED_PER_TICK: usize = 4096;
/// Most changes of forks that wait for a tick.
const MAX_FORK_NOTES: usize = 4096;
/// Least probability that counts for the tokens of a program that its children continue: while they
/// live, it waits for them.
const PARENT_RETURNS: f64 = 0.9;
/// Gap after which a program is dropped. Until then, a program that counts as ended keeps its place
/// in the order of birth.
const KEEP_SECONDS: Seconds = 3600.0;
/// Contexts from this length on are long (a class of gaps).
pub(super) const LONG_TOKENS: f64 = 8192.0;

/// Keys in use, apart from their values: a copy of them makes the same next keys.
pub(super) type Ids<K> = SlotMap<K, bool>;

/// A request.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(super) struct Turn {
    /// Its program; `None`: outside programs.
    pub program: Option<ProgramId>,
    pub slot: Option<Home>,
    /// Prompt tokens; outside programs: those that no program has.
    pub tokens: f64,
    pub arrived: Seconds,
    pub running: bool,
    /// Whether it had to wait.
    pub held: bool,
    /// The instance that it may run on, once it may run.
    pub assigned: Option<Home>,
    /// Whether its program ends with it.
    pub last: bool,
    /// Leading prompt tokens that some program had before.
    pub known_tokens: f64,
    /// The worker that has the request.
    pub worker: u8,
}

/// Numbers since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Counters {
    /// Programs found by their first request, and those that continue the context of another.
    pub new_programs: u64,
    /// Programs that continue the context of another.
    pub forks: u64,
    /// Turns of known programs.
    pub continuations: u64,
    /// Requests outside programs.
    pub chats: u64,
    /// Requests of new programs that did not fit into a table full of running and held ones.
    pub untracked: u64,
    /// Programs that did not return.
    pub forgotten: u64,
    /// Programs that lost their place in a cache.
    pub paused: u64,
    /// Requests held (`observe`: requests that `admit` would have held).
    pub held: u64,
    /// Requests refused.
    pub refused: u64,
    /// Held requests admitted.
    pub admitted: u64,
    /// Sum of their holds in seconds.
    pub held_seconds: f64,
}

/// All programs of a pool.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Programs {
    #[serde(skip)]
    pub(super) config: ProgramConfig,
    /// Constants of the rules in `config`.
    #[serde(skip)]
    pub(super) terms: Terms,
    pub(super) ids: Ids<ProgramId>,
    pub(super) programs: SecondaryMap<ProgramId, Program>,
    pub(super) turn_ids: Ids<TurnId>,
    pub(super) turns: SecondaryMap<TurnId, Turn>,
    pub(super) lineage: Lineage,
    pub(super) sessions: HashMap<u64, ProgramId>,
    pub(super) gaps: Gaps,
    pub(super) instances: Vec<InstanceLedger>,
    pub(super) queue: Queue,
    pub(super) counters: Counters,
    pub(super) sets: Sets,
    pub(super) waste: Waste,
    /// Whether `auto` holds programs now.
    pub(super) engaged: bool,
    /// Mean context of all programs in tokens.
    mean_tokens: f64,
    /// Programs whose place among their parent's children is checked at the next tick; of removed
    /// programs, their parent and its entry.
    forks: Vec<ProgramId>,
    gone_forks: Vec<(ProgramId, (u64, ProgramId))>,
    /// The last program counted again, while a tick does not count all.
    counted: Option<ProgramId>,
    /// Programs and turns that loops went through.
    #[cfg(test)]
    #[serde(skip)]
    pub walked: Cell<usize>,
    pub(super) births: u64,
    /// Programs by the numbers that all routers use for them.
    pub(super) by_key: HashMap<u64, ProgramId>,
    /// Peer routers, by the hashes of their names.
    pub(super) peers: BTreeMap<u64, PeerRouter>,
    /// Programs of peers whose state or home is not what their routers published.
    pub(super) forecast: BTreeSet<ProgramId>,
    /// This router's measurements since its start.
    pub(super) measured: Measured,
    /// Keys of programs that have changed since they were published; `None`: nothing was published.
    #[serde(skip)]
    pub(super) changed: Option<BTreeSet<u64>>,
    /// Tokens per block of the latest prompts.
    tokens_per_block: f64,
}

/// How an arriving request relates to the known programs.
enum Identity {
    /// The next turn of a program (or the same turn again).
    Continues(ProgramId),
    /// A new program that shares a prefix with others.
    New { base: Option<Root>, parent: Option<ProgramId> },
}

impl Programs {
    /// Creates an empty set.
    ///
    /// # Errors
    /// `BadValue` for a setting out of its range.
    pub fn new(config: ProgramConfig) -> Result<Programs, CoreError> {
        let config = config.checked()?;
        Ok(Programs {
            terms: config.terms(),
            config,
            ids: SlotMap::with_key(),
            programs: SecondaryMap::new(),
            turn_ids: SlotMap::with_key(),
            turns: SecondaryMap::new(),
            lineage: Lineage::default(),
            sessions: HashMap::new(),
            gaps: Gaps::default(),
            instances: Vec::new(),
            queue: Queue::default(),
            counters: Counters::default(),
            sets: Sets::default(),
            waste: Waste::default(),
            engaged: false,
            mean_tokens: 0.0,
            forks: Vec::new(),
            gone_forks: Vec::new(),
            counted: None,
            #[cfg(test)]
            walked: Cell::default(),
            births: 0,
            by_key: HashMap::new(),
            peers: BTreeMap::new(),
            forecast: BTreeSet::new(),
            measured: Measured::default(),
            changed: None,
            tokens_per_block: 0.0,
        })
    }

    /// Returns the settings.
    pub fn config(&self) -> &ProgramConfig {
        &self.config
    }

    /// Replaces the settings.
    ///
    /// # Errors
    /// `BadValue` for a setting out of its range; nothing changes then.
    pub fn set_config(&mut self, config: ProgramConfig) -> Result<(), CoreError> {
        let config = config.checked()?;
        if config.others_seconds != self.config.others_seconds {
            // Their buckets have another length.
            self.instances.iter_mut().for_each(InstanceLedger::forget_recent);
        }
        self.config = config;
        self.terms = self.config.terms();
        Ok(())
    }

    /// Becomes empty. Keys of programs and turns are not used again.
    pub(super) fn begin_anew(&mut self) {
        let new = Programs::new(self.config.clone()).expect("settings that were checked before");
        let mut old = std::mem::replace(self, new);
        old.ids.clear();
        old.turn_ids.clear();
        (self.ids, self.turn_ids) = (old.ids, old.turn_ids);
    }

    /// Returns the tokens per block of the latest prompt.
    pub fn tokens_per_block(&self) -> f64 {
        self.tokens_per_block
    }

    /// Returns the numbers since the start.
    pub fn counters(&self) -> Counters {
        self.counters
    }

    /// Returns the ledger of each instance.
    pub fn instances(&self) -> &[InstanceLedger] {
        &self.instances
    }

    /// Returns the gap statistics.
    pub fn gaps(&self) -> &Gaps {
        &self.gaps
    }

    /// Yields the live programs.
    pub fn iter(&self) -> impl Iterator<Item = (ProgramId, &Program)> {
        self.programs.iter()
    }

    /// Returns the program of a request, if the request belongs to one.
    #[cfg(test)]
    pub(super) fn program_of(&self, turn: TurnId) -> Option<&Program> {
        self.programs.get(self.turns.get(turn)?.program?)
    }

    /// Returns what a decision record shows of a request's program.
    pub fn note(&self, turn: TurnId, now: Seconds) -> Option<ProgramNote> {
        let at = self.turns.get(turn)?;
        let id = at.program?;
        let held_seconds = if at.held { (now - at.arrived).max(0.0) } else { 0.0 };
        let context_tokens = self.programs.get(id)?.tokens;
        Some(ProgramNote { program: id.number(), context_tokens, held_seconds })
    }

    /// Returns the instance on which a request may run.
    pub fn assigned(&self, turn: TurnId) -> Option<Slot> {
        self.instance_of(self.turns.get(turn)?.assigned?)
    }

    /// Returns the number of programs in each state, in the order of [`State::NAMES`].
    pub fn states(&self) -> [usize; 4] {
        self.sets.counts
    }

    /// Sets the capacity of an instance and whether it takes new requests. Programs of an
    /// instance that does not are paused at the next [`Programs::tick`].
    pub fn set_instance(&mut self, id: Slot, capacity_tokens: Option<f64>, available: bool) {
        if self.instances.len() <= id.index() {
            self.instances.resize_with(id.index() + 1, InstanceLedger::default);
        }
        let ledger = &mut self.instances[id.index()];
        (ledger.capacity_tokens, ledger.available) = (capacity_tokens, available);
    }

    /// Forgets what counts on an instance that was removed. Programs lose their place there.
    pub fn instance_removed(&mut self, id: Slot) {
        if let Some(ledger) = self.instances.get_mut(id.index()) {
            *ledger = ledger.of_next_instance();
        }
    }

    /// Returns an instance as a home.
    pub(super) fn as_home(&self, instance: Slot) -> Home {
        Home { instance, generation: self.instances[instance.index()].generation }
    }

    /// Returns the instance of a home, unless it was removed.
    pub(super) fn instance_of(&self, home: Home) -> Option<Slot> {
        let ledger = &self.instances[home.instance.index()];
        (ledger.generation == home.generation).then_some(home.instance)
    }

    /// Returns a program's home, unless it was removed.
    pub(super) fn home_of(&self, program: &Program) -> Option<Slot> {
        self.instance_of(program.home?)
    }

    /// Sets a program's home.
    pub(super) fn set_home(&mut self, id: ProgramId, instance: Slot) {
        let home = self.as_home(instance);
        self.programs[id].home = Some(home);
    }

    /// Records an arriving request and decides what to do with it.
    pub fn arrive(&mut self, arrival: &Arrival<'_>, now: Seconds) -> (TurnId, Verdict) {
        self.tokens_per_block = arrival.tokens_per_block;
        let known = self.lineage.look_up(arrival.chain);
        let tokens = |mark: Mark| f64::from(mark.blocks) * arrival.tokens_per_block;
        let shared_tokens = known.shared.map_or(0.0, tokens);
        let turn = Turn {
            program: None,
            slot: None,
            tokens: f64::from(arrival.prompt_tokens),
            arrived: now,
            running: false,
            held: false,
            assigned: None,
            last: arrival.last,
            known_tokens: known.mark.map_or(0.0, |(mark, _)| tokens(mark)).max(shared_tokens),
            worker: arrival.worker,
        };
        let identity = self.identify(arrival, known, shared_tokens);
        let program = match identity {
            Identity::Continues(id) => {
                self.counters.continuations += 1;
                self.record_return(id, now);
                self.take_turn(id);
                Some(id)
            }
            Identity::New { base, parent } => {
                if self.starts_program(arrival, base, parent) {
                    let id = self.create(arrival, base, parent, now);
                    if id.is_none() {
                        self.counters.untracked += 1;
                        if self.holds() {
                            let turn = self.add_turn(turn);
                            let key = Key { level: arrival.level, tenant: arrival.tenant };
                            return (turn, self.refuse(turn, self.queue.expected_seconds(key, now), now));
                        }
                    }
                    id
                } else {
                    None
                }
            }
        };
        let Some(id) = program else {
            self.counters.chats += 1;
            let tokens = (turn.tokens - shared_tokens).max(0.0);
            return (self.add_turn(Turn { tokens, ..turn }), Verdict::Free);
        };
        let turn = self.add_turn(Turn { program: Some(id), ..turn });
        let program = &mut self.programs[id];
        program.turns.insert(turn);
        if program.state != State::Held {
            program.level = arrival.level; // a held program keeps its place
        }
        let tokens = match program.state {
            // A second request of a running program may be shorter than the first.
            State::Running | State::Held => program.tokens.max(f64::from(arrival.prompt_tokens)),
            _ => f64::from(arrival.prompt_tokens),
        };
        self.lineage.register(id, arrival.chain);
        self.set_tokens(id, tokens);
        let verdict = self.admit(id, turn, arrival.sheddable, now);
        let assigned = if let Verdict::Run(instance) = verdict { Some(self.as_home(instance)) } else { None };
        if let Some(turn) = self.turns.get_mut(turn) {
            (turn.held, turn.assigned) = (matches!(verdict, Verdict::Held(_)), assigned);
        }
        (turn, verdict)
    }

    fn add_turn(&mut self, turn: Turn) -> TurnId {
        let id = self.turn_ids.insert(true);
        self.turns.insert(id, turn);
        id
    }

    /// Finds the program of a request.
    fn identify(&self, arrival: &Arrival<'_>, known: super::lineage::Known, shared_tokens: f64) -> Identity {
        let by_session = arrival.session.and_then(|session| self.sessions.get(&session)).copied();
        let shared = known.shared.map(|mark| Root { hash: mark.hash, tokens: shared_tokens });
        if let Some((mark, id)) = known.mark
            && let Some(program) = self.programs.get(id).filter(|program| program.tenant == arrival.tenant)
        {
            let at_end = self.lineage.last(id) == Some(mark);
            let again = mark.blocks as usize == arrival.chain.len();
            // A peer's message that its answer has ended may come later.
            if at_end && (again || program.state.rests() || program.peer.is_some()) {
                return Identity::Continues(id);
            }
            if by_session.is_none_or(|known| known == id) {
                let tokens = f64::from(mark.blocks) * arrival.tokens_per_block;
                return Identity::New { base: Some(Root { hash: mark.hash, tokens }), parent: Some(id) };
            }
        }
        if let Some(id) = by_session
            && let Some(program) = self.programs.get(id)
            && program.tenant == arrival.tenant
        {
            // A session with another history: the client has rewritten its context.
            if program.state.rests() {
                return Identity::Continues(id);
            }
            return Identity::New { base: shared, parent: Some(id) };
        }
        // A prompt may leave a program behind the end of one of its prompts: then it is a fork.
        // Otherwise, both only share a root such as a system prompt.
        let parent = known.sharer.filter(|id| {
            self.programs.get(*id).is_some_and(|program| {
                program.tenant == arrival.tenant && self.lineage.fork_point(*id, arrival.chain).is_some()
            })
        });
        Identity::New { base: shared, parent }
    }

    /// Ends the gap of a returning program.
    fn record_return(&mut self, id: ProgramId, now: Seconds) {
        let program = &mut self.programs[id];
        program.came_back = true;
        if program.state.rests() {
            let forgotten = std::mem::take(&mut program.forgotten);
            program.said_final = false;
            let pause = (now - program.since).max(0.0);
            self.gaps.returned(program.class, pause, forgotten);
            // Behind a longer pause, the context counts no more.
            let measured = [0.0, 0.0, 0.0, 0.0, pause.min(self.config.forget_seconds), 1.0];
            self.waste.returned(&measured, now);
            self.sum_up(&measured);
        }
    }

    /// Returns whether a request that continues no program begins one.
    fn starts_program(&self, arrival: &Arrival<'_>, base: Option<Root>, parent: Option<ProgramId>) -> bool {
        let own_tokens = f64::from(arrival.prompt_tokens) - base.map_or(0.0, |base| base.tokens);
        let long = own_tokens >= f64::from(self.config.min_tokens);
        !arrival.chain.is_empty() && (parent.is_some() || long)
    }

    /// Adds a program; `None` if the table is full of programs with a turn.
    fn create(
        &mut self,
        arrival: &Arrival<'_>,
        base: Option<Root>,
        parent: Option<ProgramId>,
        now: Seconds,
    ) -> Option<ProgramId> {
        if self.programs.len() >= MAX_PROGRAMS {
            self.remove(self.to_drop(now)?);
        }
        self.births += 1;
        let name = (arrival.chain.last(), arrival.tenant, now.to_bits(), self.births);
        let mut hash = Xxh3::new();
        name.hash(&mut hash);
        let key = hash.finish();
        let mut order = (now, self.births);
        match parent.and_then(|id| self.programs.get(id)) {
            Some(parent) => {
                order = (parent.born, parent.order);
                self.counters.forks += 1;
            }
            None => self.counters.new_programs += 1,
        }
        let home = parent.and_then(|id| self.programs.get(id)).and_then(|parent| parent.home);
        let id = self.ids.insert(true);
        let program = Program {
            tenant: arrival.tenant,
            weight: arrival.weight.max(1e-3),
            level: arrival.level,
            session: arrival.session,
            born: order.0,
            order: order.1,
            tokens: f64::from(arrival.prompt_tokens),
            base,
            parent,
            home,
            ..Program::new((key, 1), State::Held, now)
        };
        self.programs.insert(id, program);
        self.by_key.insert(key, id);
        self.sets.tokens += f64::from(arrival.prompt_tokens);
        self.set_state(id, State::Held);
        self.join_parent(id); // its parent waits for it
        self.note_fork(id);
        if let Some(session) = arrival.session {
            self.sets.sessions.insert((session, id));
        }
        if let (Some(session), None) = (arrival.session, parent) {
            self.sessions.insert(session, id);
        }
        Some(id)
    }

    /// Drops a program.
    pub(super) fn remove(&mut self, id: ProgramId) {
        self.uncharge(id);
        self.note_change(id);
        self.set_peer(id, None);
        let Some(program) = self.programs.remove(id) else { return };
        self.ids.remove(id);
        self.by_key.remove(&program.key);
        self.unfile(id, &program);
        if let (Some(parent), Some(tokens)) = (program.parent, program.as_child) {
            self.gone_forks.push((parent, (tokens, id)));
            self.bound_fork_notes();
        }
        self.lineage.remove(id);
        if let Some(session) = program.session
            && self.sessions.get(&session) == Some(&id)
        {
            self.sessions.remove(&session);
        }
    }

    /// Adds a program to its parent's children.
    fn join_parent(&mut self, id: ProgramId) {
        let program = &self.programs[id];
        let tokens = program.base.map_or(0.0, |base| base.tokens).to_bits();
        let (parent, is_child) = (program.parent, program.as_child.is_some());
        if let Some(parent) = parent.and_then(|id| self.programs.get_mut(id)).filter(|_| !is_child) {
            parent.children.insert((tokens, id));
            self.programs[id].as_child = Some(tokens);
        }
    }

    /// Notes a program that began or ended to wait for a return, or that is new: its parent's
    /// children are as of the last tick.
    pub(super) fn note_fork(&mut self, id: ProgramId) {
        if self.programs[id].parent.is_some() {
            self.forks.push(id);
            self.bound_fork_notes();
        }
    }

    /// Updates the children of programs early if many changes wait, for a caller without ticks.
    fn bound_fork_notes(&mut self) {
        if self.forks.len() + self.gone_forks.len() >= MAX_FORK_NOTES {
            self.update_children();
        }
    }

    /// Updates the children of all programs.
    fn update_children(&mut self) {
        for (parent, entry) in std::mem::take(&mut self.gone_forks) {
            if let Some(parent) = self.programs.get_mut(parent) {
                parent.children.remove(&entry);
            }
        }
        for id in std::mem::take(&mut self.forks) {
            let Some(program) = self.programs.get_mut(id) else { continue };
            if program.state.has_place() {
                self.join_parent(id);
            } else if let Some(tokens) = program.as_child.take()
                && let Some(parent) = program.parent
                && let Some(parent) = self.programs.get_mut(parent)
            {
                parent.children.remove(&(tokens, id));
            }
        }
    }

    /// Returns the tokens that count for a program beside its shared part, with room to grow.
    pub(super) fn counted_tokens(&self, program: &Program) -> f64 {
        let tokens = if self.terms.shared_roots { program.own_tokens() } else { program.tokens };
        tokens.max(self.config.growth * self.mean_tokens)
    }

    /// Removes what counts for a program.
    pub(super) fn uncharge(&mut self, id: ProgramId) {
        self.uncharge_home(id);
        self.uncount_share(id);
    }

    /// Removes what counts for a program on its home.
    fn uncharge_home(&mut self, id: ProgramId) {
        let Some(program) = self.programs.get_mut(id) else { return };
        if let (Some(charge), Some(home)) = (program.charge.take(), program.home)
            && let Some(home) = self.instance_of(home)
        {
            self.instances[home.index()].remove(charge);
        }
    }

    /// Counts a program on its home by its state.
    pub(super) fn charge(&mut self, id: ProgramId, now: Seconds) {
        self.uncharge_home(id);
        let program = &self.programs[id];
        let Some(home) = self.home_of(program) else { return self.uncount_share(id) };
        let (own, probability) = match program.state {
            State::Running => (self.counted_tokens(program), 1.0),
            State::Gap => {
                let gap = now - program.since;
                let returns = match &self.config.rules {
                    None => self.gaps.returns(program.class, gap),
                    Some(rules) => rules.returns(&self.gaps, program.class, gap),
                };
                // Its children need the part that they continue.
                let base = program.base.map_or(0.0, |base| base.tokens);
                let continued = (program.continued_tokens() - base).max(0.0);
                let is_parent = !program.children.is_empty() && self.terms.waits_for_children;
                let waits = if is_parent { (PARENT_RETURNS - returns).max(0.0) * continued } else { 0.0 };
                let probability = if is_parent { returns.max(PARENT_RETURNS) } else { returns };
                (returns * self.counted_tokens(program) + waits, probability)
            }
            State::Paused | State::Held => return self.uncount_share(id),
        };
        let (root, of_peer) = (self.root_to_count(program, home), program.peer.is_some());
        let charge = Charge { own, root, probability, of_peer };
        self.instances[home.index()].add(charge);
        self.programs[id].charge = Some(charge);
        self.count_share(id);
    }

    /// Returns the root of a program, unless its parent's context on the same instance has it.
    pub(super) fn root_to_count(&self, program: &Program, home: Slot) -> Option<Root> {
        let parent = program.parent.and_then(|id| self.programs.get(id));
        let covered =
            parent.is_some_and(|parent| self.home_of(parent) == Some(home) && parent.charge().is_some());
        program.base.filter(|_| !covered && self.terms.shared_roots)
    }

    /// Records that a request runs on an instance: after [`Verdict::Free`] by the policy's choice,
    /// else on the named instance or, after a failure, on another.
    pub fn placed(&mut self, turn: TurnId, instance: Slot, now: Seconds) {
        if self.instances.len() <= instance.index() {
            self.set_instance(instance, None, true);
        }
        let home = self.as_home(instance);
        let Some(at) = self.turns.get_mut(turn) else { return };
        let (was_running, old) = (std::mem::replace(&mut at.running, true), at.slot.replace(home));
        let (program, tokens) = (at.program, at.tokens);
        let Some(id) = program else {
            if let Some(old) = old.filter(|_| was_running).and_then(|old| self.instance_of(old)) {
                self.instances[old.index()].other_left(tokens);
            }
            self.instances[instance.index()].other_began(tokens);
            return;
        };
        self.uncharge(id);
        if self.programs.get(id).is_some_and(|program| program.peer.is_some()) {
            self.take_turn(id);
        }
        let Some(program) = self.programs.get_mut(id) else { return };
        program.held.retain(|held| *held != turn);
        program.home = Some(home);
        program.has_run = true;
        self.set_state(id, State::Running);
        self.charge(id, now);
        // A retry elsewhere gives the program a place, which its held turns share.
        self.hand_out(id, instance, now);
    }

    /// Records the end of a request. `output_tokens`: tokens of its answer.
    pub fn ended(&mut self, turn: TurnId, output_tokens: u32, finish: Finish, now: Seconds) {
        let Some(at) = self.turns.remove(turn) else { return };
        self.turn_ids.remove(turn);
        let output_tokens = f64::from(output_tokens);
        let Some(id) = at.program else {
            if let Some(slot) = at.slot.filter(|_| at.running).and_then(|slot| self.instance_of(slot)) {
                let window = self.config.others_seconds;
                self.instances[slot.index()].other_ended(at.tokens, output_tokens, now, window);
            }
            return;
        };
        let Some(program) = self.programs.get_mut(id) else { return };
        program.turns.remove(&turn);
        program.held.retain(|held| *held != turn);
        if program.peer.is_some() {
            return; // a later turn is elsewhere
        }
        let tokens = program.tokens.max(at.tokens + output_tokens);
        if at.running && output_tokens <= 0.0 && at.slot == program.home {
            self.follow_other_turn(id);
        }
        self.set_tokens(id, tokens);
        let program = &mut self.programs[id];
        if !program.held.is_empty() {
            return; // the program keeps its place in the queue
        }
        self.queue.remove(id);
        if !program.turns.is_empty() {
            // The others run, or were admitted and are about to.
            self.set_state(id, State::Running);
            self.charge(id, now);
            return;
        }
        if !program.has_run {
            self.remove(id);
            return;
        }
        let finish = if self.config.finish_reason { finish } else { Finish::Unknown };
        program.class = GapClass { long: program.tokens >= LONG_TOKENS, finish };
        program.since = now;
        program.said_final = at.running && at.last;
        let stays = at.running && !at.last || program.state.has_place() && !at.running;
        self.set_state(id, if stays { State::Gap } else { State::Paused });
        self.charge(id, now);
    }

    /// Moves a program to an instance on which a turn of it still runs. A turn at its home has
    /// ended without a token: a second attempt that loses leaves nothing behind.
    fn follow_other_turn(&mut self, id: ProgramId) {
        let program = &self.programs[id];
        let mut other = None;
        for slot in program.turns.iter().filter_map(|turn| self.turns[*turn].slot) {
            if Some(slot) == program.home {
                return;
            }
            other = Some(slot).filter(|slot| self.instance_of(*slot).is_some()).or(other);
        }
        if other.is_some() {
            self.uncharge(id);
            self.programs[id].home = other;
        }
    }

    /// Returns the programs of a session whose client has not said that they ended.
    pub fn of_session(&self, session: u64) -> Vec<ProgramId> {
        let goes_on = |id: &ProgramId| {
            self.note_walk(1);
            let program = &self.programs[*id];
            let mut turns = program.turns.iter().inspect(|_| self.note_walk(1));
            if program.state.rests() {
                !program.said_final
            } else {
                turns.any(|turn| !self.turns[*turn].last)
            }
        };
        self.sets.of_session(session).filter(goes_on).collect()
    }

    /// Ends the programs of a session. Those between two requests lose their place at once, the
    /// others when their requests end. Returns how many had not ended.
    pub fn finish_session(&mut self, session: u64, now: Seconds) -> usize {
        let programs = self.of_session(session);
        for id in &programs {
            if self.programs[*id].state.rests() {
                self.take_turn(*id);
                self.programs[*id].said_final = true;
                self.set_state(*id, State::Paused);
                self.charge(*id, now);
            }
            self.note_walk(self.programs[*id].turns.len());
            for turn in &self.programs[*id].turns {
                self.turns[*turn].last = true;
            }
        }
        programs.len()
    }

    /// Runs periodic work, about twice a second: forgets ended programs, counts again, pauses and
    /// admits programs. [`Programs::released`] then has the admitted requests.
    pub fn tick(&mut self, now: Seconds) {
        self.gaps.decay(now);
        for id in self.overdue(self.config.forget_seconds, now) {
            self.note_walk(1);
            if self.programs[id].peer.is_some() {
                continue; // its router forgets it
            }
            self.programs[id].forgotten = true;
            self.uncharge(id);
            self.set_state(id, State::Paused);
            self.gaps.ended(self.programs[id].class);
            self.counters.forgotten += 1;
        }
        for id in self.resting_for(self.config.forget_seconds.max(KEEP_SECONDS), now) {
            self.note_walk(1);
            self.remove(id);
        }
        self.recount(now);
        self.engage(now);
        self.balance(now);
    }

    /// Counts the programs with a place again: all, or the next ones if there are many.
    fn recount(&mut self, now: Seconds) {
        let programs = self.programs.len();
        self.mean_tokens = if programs > 0 { self.sets.tokens / programs as f64 } else { 0.0 };
        self.update_children();
        let all = self.sets.placed.len() <= COUNTED_PER_TICK;
        for ledger in &mut self.instances {
            if all {
                ledger.clear_programs(); // rounding errors do not add up
            }
            ledger.advance(now, self.config.others_seconds);
        }
        let mut ids: Vec<ProgramId> = if all {
            self.sets.placed.iter().copied().collect()
        } else {
            let (from, to) = (self.counted.map_or(Bound::Unbounded, Bound::Excluded), Bound::Unbounded);
            self.sets.placed.range((from, to)).take(COUNTED_PER_TICK).copied().collect()
        };
        self.counted = ids.last().copied().filter(|_| ids.len() == COUNTED_PER_TICK);
        self.note_walk(ids.len());
        // Parents first: a child's root does not count beside its parent.
        ids.sort_by_key(|id| self.programs[*id].parent.is_some());
        for id in ids {
            if all {
                self.programs[id].charge = None;
            }
            let program = &self.programs[id];
            let home = self.home_of(program);
            let lost = home.is_none_or(|home| !self.instances[home.index()].available);
            if lost && program.state == State::Gap {
                self.uncharge(id);
                self.set_state(id, State::Paused);
            }
            self.charge(id, now);
        }
    }

    /// Notes that a loop goes through programs or turns.
    #[inline]
    fn note_walk(&self, _many: usize) {
        #[cfg(test)]
        self.walked.set(self.walked.get() + _many);
    }

    /// Returns whether a program may be held.
    pub fn holds(&self) -> bool {
        match self.config.mode {
            ProgramMode::Observe => false,
            ProgramMode::Auto => self.engaged,
            ProgramMode::Admit => true,
        }
    }

    /// Returns the prefill work that computed contexts again, per work that was new, by
    /// [`Programs::computes`].
    pub fn recompute_ratio(&self) -> f64 {
        self.waste.ratio()
    }

    /// Records the prefill of a placed request.
    pub fn computes(&mut self, turn: TurnId, work: Work, now: Seconds) {
        let Some(at) = self.turns.get(turn) else { return };
        let new_tokens = work.new_tokens.max(1.0);
        let again = ((at.known_tokens - work.hit_tokens).max(0.0) / new_tokens).min(1.0);
        let known_share = (at.known_tokens / work.hit_tokens.max(1.0)).min(1.0);
        let known_seconds = work.seconds * again + work.hit_seconds * known_share;
        let measured = [work.seconds, work.seconds * again, known_seconds, new_tokens * again, 0.0, 0.0];
        self.waste.computed(&measured, now);
        self.sum_up(&measured);
    }

    /// Adds to this router's measurements since its start.
    fn sum_up(&mut self, measured: &Measured) {
        self.measured.iter_mut().zip(measured).for_each(|(sum, amount)| *sum += amount);
    }

    /// Begins to hold programs in `auto` when recomputation is most of the work, programs run side
    /// by side and holds pay, and ends when all have a place and room.
    fn engage(&mut self, now: Seconds) {
        let instances = self.instances.iter().filter(|ledger| ledger.available).count();
        let running = self.sets.counts[State::Running as usize];
        let is_large = running > instances && self.waste.is_large(instances, now);
        if is_large && self.holds_pay(instances, now) {
            self.engaged = true;
        } else if self.queue.len() == 0 && !self.is_crowded() {
            self.engaged = false;
        }
    }

    /// Returns whether holds pay. Instances of unknown capacity count as the mean of the others: an
    /// engine's is unknown until it is read.
    fn holds_pay(&self, instances: usize, now: Seconds) -> bool {
        let (mut known, mut capacity_tokens, mut expected_tokens) = (0u32, 0.0, 0.0);
        for ledger in self.instances.iter().filter(|ledger| ledger.available) {
            let Some(tokens) = ledger.capacity_tokens else { continue };
            known += 1;
            capacity_tokens += self.config.theta * tokens;
            expected_tokens += ledger.expected_tokens();
        }
        let scale = instances as f64 / f64::from(known.max(1));
        self.waste.holds_pay(instances, capacity_tokens * scale, expected_tokens * scale, now)
    }

    /// Takes the requests that were held and may run now.
    pub fn released(&mut self) -> Vec<TurnId> {
        std::mem::take(&mut self.queue.released)
    }

    /// Takes the held requests that were refused, with the seconds after which their clients may
    /// try again. They have ended.
    pub fn refused(&mut self) -> Vec<(TurnId, Seconds)> {
        std::mem::take(&mut self.queue.refused)
    }
}
