//! Programs of peer routers: all routers of a fleet follow the same programs.
//!
//! A program belongs to the router that had its latest turn. This router publishes it: context,
//! state and home. Each peer keeps it beside its own programs. So its tokens count once in all
//! working sets, and its next turn may arrive at any router, which takes it over. The greatest
//! number of turns wins.
//!
//! Each router pauses and admits programs as a router alone would do with all of them. Its decision
//! on a peer's program is a forecast of the peer's own: no request runs by it, and the peer's next
//! message replaces it.
use super::entry::Program;
use super::exchange::{MAX_PUBLISHED, PeerProgram, PeerPrograms};
use super::gaps::GapClass;
use super::ledger::InstanceLedger;
use super::programs::{LONG_TOKENS, MAX_PROGRAMS, Programs};
use super::settings::ProgramMode;
use super::types::{Peer, ProgramId, State};
use super::waste::Measured;
use crate::ids::{Seconds, Slot};
use hashbrown::HashSet;

/// Turns of a peer's program from which they are impossible. A program that this router takes over
/// then has room for its own turns: messages have numbers below 2^63.
const MAX_TURNS: u64 = 1 << 62;

impl Programs {
    /// Sets whose a program is.
    pub(super) fn set_peer(&mut self, id: ProgramId, peer: Option<Peer>) {
        let Some(program) = self.programs.get_mut(id) else { return };
        let old = std::mem::replace(&mut program.peer, peer).map(|peer| peer.router);
        let new = peer.map(|peer| peer.router);
        if old == new {
            return;
        }
        if let Some(router) = old.and_then(|router| self.peers.get_mut(&router)) {
            router.programs.remove(&id);
        }
        if let Some(router) = new {
            self.peers.entry(router).or_default().programs.insert(id);
        }
    }

    /// Counts a further turn of a program, at this router.
    pub(super) fn take_turn(&mut self, id: ProgramId) {
        self.set_peer(id, None);
        self.programs[id].turn += 1;
        self.note_change(id);
    }

    /// Notes that a program is not as it was published.
    pub(super) fn note_change(&mut self, id: ProgramId) {
        if let (Some(changed), Some(program)) = (&mut self.changed, self.programs.get(id)) {
            changed.insert(program.key);
            if changed.len() > MAX_PROGRAMS {
                self.changed = None; // nothing is published now: later, all is
            }
        }
    }

    /// Notes a change of a program's state.
    pub(super) fn note_state(&mut self, id: ProgramId) {
        self.note_change(id);
        let program = &self.programs[id];
        if program.peer.is_some_and(|peer| peer.state != program.state) {
            self.forecast.insert(id);
        }
    }

    /// Returns the number of this router's programs in each state, in the order of
    /// [`State::NAMES`].
    pub fn own_states(&self) -> [usize; 4] {
        let mut counts = self.states();
        for id in self.peers.values().flat_map(|peer| &peer.programs) {
            counts[self.programs[*id].state as usize] -= 1;
        }
        counts
    }

    /// Returns whether this router had the latest turn of a program; `None`: it is unknown.
    pub(super) fn is_own(&self, key: u64) -> Option<bool> {
        let id = self.by_key.get(&key)?;
        Some(self.programs[*id].peer.is_none())
    }

    /// Returns a program as this router publishes it, and its home.
    pub(super) fn as_published(&self, key: u64, now: Seconds) -> Option<(PeerProgram, Option<Slot>)> {
        let id = *self.by_key.get(&key)?;
        let program = &self.programs[id];
        let round = |number: f64| f64::from(number as f32);
        let since = match program.held.first() {
            Some(turn) => self.turns[*turn].arrived,
            None => program.since,
        };
        let parent = program.parent.and_then(|parent| self.programs.get(parent));
        let row = PeerProgram {
            key,
            turn: program.turn,
            // A request may wait for another reason than room in a cache.
            state: match program.state {
                State::Held if self.queue.lines.line_of(id).is_none() => State::Paused,
                state => state,
            },
            home: None,
            tenant: program.tenant,
            weight: round(program.weight),
            level: program.level,
            session: program.session,
            age_seconds: round((now - program.born).max(0.0)),
            rest_seconds: round((now - since).max(0.0)),
            tokens: program.tokens as u64,
            base: program.base,
            parent: parent.map_or(0, |parent| parent.key),
            finish: program.class.finish,
            flags: [program.said_final, program.came_back, program.forgotten, program.has_run],
            prompt: self.lineage.prompt(id),
        };
        Some((row, self.home_of(program)))
    }

    /// Sets the tokens of all peers' requests outside programs on an instance. Its capacity may be
    /// unknown until [`Programs::set_instance`].
    pub fn set_others_of_peers(&mut self, id: Slot, tokens: f64) {
        if self.instances.len() <= id.index() {
            self.instances.resize_with(id.index() + 1, InstanceLedger::default);
        }
        self.instances[id.index()].set_others_of_peers(tokens);
    }

    /// Applies the programs of a peer router. `homes`: the instances that it names. `whole`: all
    /// its programs are in the message.
    pub fn hear(
        &mut self,
        router: u64,
        told: &PeerPrograms,
        homes: &[Option<Slot>],
        whole: bool,
        now: Seconds,
    ) {
        let peer = self.peers.entry(router).or_default();
        let old = std::mem::replace(&mut peer.measured, told.measured);
        let new: Measured = std::array::from_fn(|each| told.measured[each] - old[each]);
        // The first message has work of another time, and 0 stands for no programs.
        if old[0] > 0.0 && new.iter().all(|amount| *amount >= 0.0) {
            if new[0] > 0.0 {
                self.waste.computed(&new, now);
            }
            self.waste.returned(&new, now);
        }
        let is_from =
            |program: Option<&Program>| program?.peer.filter(|peer| peer.router == router).map(|_| ());
        for id in std::mem::take(&mut self.forecast) {
            match self.programs.get(id).map(|program| program.peer) {
                Some(Some(peer)) if peer.router == router => self.as_peer_published(id, now),
                Some(Some(_)) => _ = self.forecast.insert(id),
                _ => {}
            }
        }
        let mut gone: Vec<ProgramId> =
            told.gone.iter().filter_map(|key| self.by_key.get(key)).copied().collect();
        gone.retain(|id| is_from(self.programs.get(*id)).is_some());
        if whole {
            let named: HashSet<u64> = told.programs.iter().map(|program| program.key).collect();
            let all = self.peers[&router].programs.iter();
            gone.extend(all.filter(|id| !named.contains(&self.programs[**id].key)));
        }
        for id in gone {
            self.drop_of_peer(id, now);
        }
        for program in &told.programs {
            let home = program.home.and_then(|place| *homes.get(place)?);
            self.hear_program(router, program, home, now);
        }
    }

    /// Drops the programs of a peer router that is gone.
    pub fn forget_peer(&mut self, router: u64, now: Seconds) {
        let Some(peer) = self.peers.get(&router) else { return };
        for id in peer.programs.clone() {
            self.drop_of_peer(id, now);
        }
        self.peers.remove(&router);
    }

    /// Drops a program of a peer, or owns it if one of its turns is here.
    fn drop_of_peer(&mut self, id: ProgramId, now: Seconds) {
        let Some(program) = self.programs.get(id) else { return };
        self.queue.remove(id);
        if program.turns.is_empty() {
            return self.remove(id);
        }
        let is_held = !program.held.is_empty();
        let home = program.turns.iter().find_map(|turn| self.turns[*turn].slot).or(program.home);
        self.take_turn(id);
        self.uncharge(id);
        self.programs[id].home = home; // its turn here may run elsewhere than the peer's
        if is_held {
            self.queue.insert(&self.programs[id], id, &self.config);
        }
        self.set_state(id, if is_held { State::Held } else { State::Running });
        self.charge(id, now);
    }

    fn hear_program(&mut self, router: u64, told: &PeerProgram, home: Option<Slot>, now: Seconds) {
        if told.turn >= MAX_TURNS || !self.lineage.is_prompt(&told.prompt) {
            return;
        }
        let home = home.map(|home| {
            if self.instances.len() <= home.index() {
                self.set_instance(home, None, true);
            }
            self.as_home(home)
        });
        let known = self.by_key.get(&told.key).map(|id| &self.programs[*id]);
        let held = known.filter(|known| told.state == State::Held && told.turn == known.turn);
        let held = held.and_then(|held| held.peer).filter(|peer| peer.router == router);
        let forecast_at = held.and_then(|peer| peer.forecast_at);
        let peer = Peer { router, state: told.state, home, forecast_at };
        let (id, had_place) = match self.by_key.get(&told.key).copied() {
            Some(id) => {
                let program = &self.programs[id];
                let is_newer = match program.peer {
                    None => told.turn > program.turn,
                    Some(peer) => peer.router == router || told.turn >= program.turn,
                };
                if !is_newer {
                    return;
                }
                if !program.held.is_empty() && (!told.state.has_place() || home.is_none()) {
                    // The turn that waits here is the latest.
                    self.programs[id].turn = told.turn;
                    return self.take_turn(id);
                }
                (id, program.peer.map_or(program.state, |peer| peer.state).has_place())
            }
            None => match self.add_of_peer(router, told, now) {
                Some(id) => (id, told.turn > 1),
                None => return,
            },
        };
        self.lineage.register_prompt(id, &told.prompt);
        self.set_peer(id, Some(peer));
        let parent = self.by_key.get(&told.parent).copied().filter(|parent| *parent != id);
        let program = &mut self.programs[id];
        program.turn = told.turn;
        program.weight = told.weight.max(1e-3);
        program.level = told.level;
        program.base = told.base;
        program.parent = program.parent.or(parent);
        let tokens = told.tokens as f64;
        program.class = GapClass { long: tokens >= LONG_TOKENS, finish: told.finish };
        program.since = now - told.rest_seconds;
        [program.said_final, program.came_back, program.forgotten, program.has_run] = told.flags;
        self.uncharge(id);
        self.set_tokens(id, tokens);
        self.as_peer_published(id, now);
        self.note_fork(id);
        if told.state.has_place() && !had_place {
            self.queue.admitted(self.programs[id].own_tokens(), now);
        }
        if let (true, Some(home)) = (told.state.has_place(), self.home_of(&self.programs[id])) {
            self.hand_out(id, home, now);
        }
        // A peer holds: recomputation is most of the work of all routers.
        self.engaged |= told.state == State::Held && self.config.mode == ProgramMode::Auto;
    }

    /// Gives a program of a peer the state and the home that the peer published.
    fn as_peer_published(&mut self, id: ProgramId, now: Seconds) {
        let Some(peer) = self.programs[id].peer else { return };
        self.uncharge(id);
        self.queue.remove(id);
        self.programs[id].home = peer.home;
        if peer.state == State::Held {
            self.queue.insert(&self.programs[id], id, &self.config);
        }
        self.set_state(id, peer.state);
        self.charge(id, now);
    }

    /// Adds a program of a peer that is new here; `None` if there are too many.
    fn add_of_peer(&mut self, router: u64, told: &PeerProgram, now: Seconds) -> Option<ProgramId> {
        if self.peers.get(&router).is_some_and(|peer| peer.programs.len() >= MAX_PUBLISHED) {
            return None;
        }
        if self.programs.len() >= MAX_PROGRAMS {
            let oldest = self.to_drop(now)?;
            self.programs[oldest].peer?; // own programs stay
            self.remove(oldest);
        }
        self.births += 1;
        let id = self.ids.insert(true);
        let program = Program {
            tenant: told.tenant,
            level: told.level,
            session: told.session,
            born: now - told.age_seconds,
            order: self.births,
            ..Program::new((told.key, told.turn), State::Paused, now)
        };
        self.programs.insert(id, program);
        self.by_key.insert(told.key, id);
        if let Some(session) = told.session {
            self.sets.sessions.insert((session, id));
            let known = self.sessions.get(&session).and_then(|id| self.programs.get(*id));
            // An own program keeps its session: it stays when the peer is gone.
            if told.parent == 0 && known.is_none_or(|known| known.peer.is_some()) {
                self.sessions.insert(session, id);
            }
        }
        Some(id)
    }
}
