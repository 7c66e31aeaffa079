//! Admission: the choice of programs to pause and to admit.
//!
//! An instance whose expected tokens exceed `theta` of its capacity loses programs that are between
//! two turns, those least likely to return soon first. A program without a place is admitted if an
//! instance then stays below `resume x theta`: this hysteresis leaves room to grow. Programs are
//! admitted by birth within a tenant, and tenants by the tokens that already count for them.
//!
//! Two rules bound a hold while others keep the caches full. A program held for [`FAIR_SECONDS`]
//! takes the place of programs between two turns whose tenant keeps at least as many tokens for its
//! weight as its own tenant then has. A program held for the longest hold is refused; if it has run
//! before, it keeps its birth, so it is among the first when it returns. It does not take the place
//! of a program of its own tenant: that program would return soon, compute its context again, and
//! wait in turn.
use super::ledger::InstanceLedger;
use super::programs::Programs;
use super::types::{Hold, ProgramId, Root, SOON_SECONDS, State, TurnId, Verdict};
use crate::ids::{Seconds, Slot};
use crate::levels::{Key, Line, Ranks};
use hashbrown::HashMap;

/// Held turns of one program. A client that sends more is refused.
const MAX_HELD_TURNS: usize = 64;
/// Held programs considered per tenant and round.
const CANDIDATES: usize = 64;
/// Hold after which a program may take the place of other tenants' programs, the time between two
/// rounds of this, and the programs that get a place in one round.
const FAIR_SECONDS: Seconds = 2.0;
const FAIR_ROUND_SECONDS: Seconds = 0.5;
const MAX_PER_FAIR_ROUND: usize = 64;
impl Programs {
    /// Decides what to do with a turn of a program that has just arrived. A program with a place
    /// keeps it from now on: its turn may wait for room on an instance.
    pub(super) fn admit(&mut self, id: ProgramId, turn: TurnId, sheddable: bool, now: Seconds) -> Verdict {
        let program = &self.programs[id];
        let home = self.home_of(program).filter(|home| self.instances[home.index()].available);
        let place = home.filter(|_| program.state.has_place());
        let verdict = self.admit_to(place, (id, turn), sheddable, now);
        if place.is_some() && self.programs[id].state == State::Gap {
            self.set_state(id, State::Running);
            self.charge(id, now);
        }
        verdict
    }

    fn admit_to(
        &mut self,
        place: Option<Slot>,
        (id, turn): (ProgramId, TurnId),
        sheddable: bool,
        now: Seconds,
    ) -> Verdict {
        if !self.holds() {
            // Only observed: the policy places every request.
            let limited = self.instances.iter().any(|ledger| ledger.capacity_tokens.is_some());
            self.counters.held += u64::from(place.is_none() && limited && self.room_for(id, &[]).is_none());
            if place.is_none() {
                self.queue.admitted(self.programs[id].own_tokens(), now);
            }
            return Verdict::Free;
        }
        if let Some(home) = place {
            return if self.is_roomy(home) { Verdict::Free } else { Verdict::Run(home) };
        }
        if !self.programs[id].held.is_empty() {
            let hold = self.hold_of(id, now);
            if sheddable || self.programs[id].held.len() >= MAX_HELD_TURNS {
                return self.refuse(turn, hold.expected_seconds, now);
            }
            self.programs[id].held.push(turn); // waits with the other turns of its program
            self.counters.held += 1;
            return Verdict::Held(hold);
        }
        self.uncharge(id);
        let program = &mut self.programs[id];
        let is_new = !program.has_run;
        program.held.push(turn);
        self.set_state(id, State::Held);
        self.queue.insert(&self.programs[id], id, &self.config);
        self.release(now);
        if let Some(place) = self.queue.released.iter().position(|released| *released == turn) {
            self.queue.released.swap_remove(place);
            // Every instance has room: the policy chooses.
            let roomy = (0..self.instances.len()).all(|slot| self.is_roomy(Slot(slot as u32)));
            return self.assigned(turn).filter(|_| !roomy).map_or(Verdict::Free, Verdict::Run);
        }
        let hold = self.hold_of(id, now);
        let too_long = hold.expected_seconds > self.config.max_hold_seconds && !self.may_take(id);
        let is_full = self.queue.lines.is_over_share(self.programs[id].tenant, self.config.max_held);
        if sheddable || is_new && (too_long || is_full) {
            return self.refuse(turn, hold.expected_seconds, now);
        }
        self.counters.held += 1;
        Verdict::Held(hold)
    }

    /// Drops a turn that does not run.
    pub(super) fn refuse(&mut self, turn: TurnId, seconds: Seconds, now: Seconds) -> Verdict {
        self.counters.refused += 1;
        self.ended(turn, 0, super::Finish::Unknown, now);
        Verdict::Refused { retry_after_seconds: seconds.clamp(1.0, 3600.0) }
    }

    /// Returns whether the policy may place the programs of an instance: the instance has room, and
    /// no program waits for room.
    fn is_roomy(&self, instance: Slot) -> bool {
        if self.queue.len() > 0 {
            return false;
        }
        let ledger = &self.instances[instance.index()];
        let limit = ledger.capacity_tokens.map(|capacity| self.terms.free * self.config.theta * capacity);
        limit.is_none_or(|limit| ledger.expected_tokens() < limit)
    }

    fn hold_of(&self, id: ProgramId, now: Seconds) -> Hold {
        let ratios = self.instances.iter().filter(|ledger| ledger.available);
        let ratios = ratios.filter_map(|ledger| Some(ledger.expected_tokens() / ledger.capacity_tokens?));
        Hold {
            needed_tokens: self.counted_tokens(&self.programs[id]),
            working_set_ratio: ratios.fold(f64::INFINITY, f64::min),
            held_programs: self.queue.len(),
            expected_seconds: self.queue.expected_seconds(self.programs[id].line(), now),
        }
    }

    /// Returns the instance that can take a program: its home if it fits there, else the instance
    /// with the most room.
    fn room_for(&self, id: ProgramId, reserved: &[Slot]) -> Option<Slot> {
        let room = |slot: usize| -> Option<f64> {
            let instance = Slot(slot as u32);
            // A program that fits nowhere runs alone.
            let fits = |room: &f64| *room >= 0.0 || self.instances[slot].is_empty();
            // The look-up of the root waits for memory, and most instances have no room anyway.
            self.room_beside(id, instance, |_| 0.0).filter(fits)?;
            self.room_on(id, instance).filter(fits).filter(|_| !reserved.contains(&instance))
        };
        let home = self.home_of(&self.programs[id]);
        let home = home.filter(|home| self.terms.returns_home && room(home.index()).is_some());
        home.or_else(|| {
            let rooms = (0..self.instances.len()).filter_map(|slot| Some((slot, room(slot)?)));
            rooms.max_by(|a, b| a.1.total_cmp(&b.1).then(b.0.cmp(&a.0))).map(|(slot, _)| Slot(slot as u32))
        })
    }

    /// Returns the tokens left on an instance if it takes a program, negative if it does not fit;
    /// `None` if the instance takes no requests.
    fn room_on(&self, id: ProgramId, instance: Slot) -> Option<f64> {
        let ledger = &self.instances[instance.index()];
        self.room_beside(id, instance, |root| root.tokens * (1.0 - ledger.share_of_root(root.hash)))
    }

    /// Returns the room on an instance if the program needs `missing` tokens of its root.
    fn room_beside(&self, id: ProgramId, instance: Slot, missing: impl Fn(Root) -> f64) -> Option<f64> {
        let (program, ledger) = (&self.programs[id], &self.instances[instance.index()]);
        if !ledger.available {
            return None;
        }
        let Some(capacity) = ledger.capacity_tokens else {
            return Some(1e15 - ledger.expected_tokens());
        };
        let need = self.counted_tokens(program) + self.root_to_count(program, instance).map_or(0.0, missing);
        let parent = program.parent().and_then(|parent| self.programs.get(parent));
        // A fork lives on what its parent has in the cache, and its parent waits for it.
        let follows = parent.and_then(|parent| self.home_of(parent)) == Some(instance);
        let resume = if follows { 1.0 } else { self.config.resume };
        Some(resume * self.config.theta * capacity - ledger.expected_tokens() - need)
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
    fn emptiest(&self, reserved: &[Slot]) -> Option<Slot> {
        let free = |slot: usize| !reserved.contains(&Slot(slot as u32));
        let available = self.instances.iter().enumerate();
        let available = available.filter(|(slot, ledger)| ledger.available && free(*slot));
        let room = |ledger: &InstanceLedger| {
            ledger.capacity_tokens.unwrap_or(f64::INFINITY) - ledger.expected_tokens()
        };
        let emptiest = available.max_by(|a, b| room(a.1).total_cmp(&room(b.1)).then(b.0.cmp(&a.0)));
        emptiest.map(|(slot, _)| Slot(slot as u32))
    }

    /// Pauses programs of crowded instances and admits held ones.
    pub(super) fn balance(&mut self, now: Seconds) {
        if !self.holds() {
            self.release_all(now);
            return;
        }
        let crowded: Vec<usize> = (0..self.instances.len())
            .filter(|slot| self.excess(*slot).is_some_and(|excess| excess > 0.0))
            .collect();
        if !crowded.is_empty() {
            let mut resting = self.resting_on(&crowded, now);
            for (slot, resting) in crowded.iter().zip(&mut resting) {
                self.pause_on(*slot, resting);
            }
        }
        if self.config.shortest_first {
            let held = self.queue.lines.waiting().map(|(id, _)| id);
            let held = held.filter(|id| !self.is_left_held(*id, now));
            let held = held.map(|id| (self.held_since(id, now), id));
            let first = held.min_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
            let first = first.filter(|(since, _)| now - since > self.config.backfill_seconds);
            self.queue.overdue = first.map(|(_, id)| id);
        }
        self.release(now);
        self.end_long_holds(now);
    }

    /// Returns whether the programs of some instance have no room to grow.
    pub(super) fn is_crowded(&self) -> bool {
        let most = self.config.resume * self.config.theta;
        let mut ledgers = self.instances.iter();
        ledgers.any(|ledger| ledger.capacity_tokens.is_some_and(|all| ledger.expected_tokens() > most * all))
    }

    /// Returns the expected tokens above the limit of an instance.
    fn excess(&self, slot: usize) -> Option<f64> {
        let ledger = &self.instances[slot];
        Some(ledger.expected_tokens() - self.config.theta * ledger.capacity_tokens?)
    }

    /// Returns the programs on some instances that may be paused: those between two turns without
    /// children. Those least likely to return soon are first.
    fn resting_on(&self, slots: &[usize], now: Seconds) -> Vec<Vec<ProgramId>> {
        let mut place = vec![None; self.instances.len()];
        slots.iter().enumerate().for_each(|(i, slot)| place[*slot] = Some(i));
        let mut resting: Vec<Vec<(f64, ProgramId)>> = vec![Vec::new(); slots.len()];
        for id in &self.sets.placed {
            let program = &self.programs[*id];
            if program.state != State::Gap || !program.children.is_empty() {
                continue;
            }
            let Some(i) = self.home_of(program).and_then(|home| place[home.index()]) else { continue };
            let gap = now - program.since;
            let key = match &self.config.rules {
                None => self.gaps.returns_within(program.class(), gap, SOON_SECONDS),
                Some(rules) => rules.pause_rank(&self.gaps, program, gap),
            };
            resting[i].push((key, *id));
        }
        let sorted = |mut resting: Vec<(f64, ProgramId)>| {
            resting.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
            resting.into_iter().map(|(_, id)| id).collect()
        };
        resting.into_iter().map(sorted).collect()
    }

    /// Pauses programs of an instance while it is crowded.
    fn pause_on(&mut self, slot: usize, resting: &mut [ProgramId]) {
        let capacity = self.instances[slot].capacity_tokens;
        let Some(limit) = capacity.map(|capacity| self.config.theta * capacity) else { return };
        let limit = limit * self.terms.pause_to.unwrap_or(1.0);
        for id in resting {
            let ledger = &self.instances[slot];
            if ledger.expected_tokens() <= limit || ledger.programs <= 1 {
                break;
            }
            self.pause(*id);
        }
    }

    /// Takes the place of a program.
    fn pause(&mut self, id: ProgramId) {
        self.uncharge(id);
        self.set_state(id, State::Paused);
        self.counters.paused += u64::from(self.programs[id].peer.is_none());
    }

    /// Returns the start of a held program's hold.
    fn held_since(&self, id: ProgramId, now: Seconds) -> Seconds {
        let program = &self.programs[id];
        let of_peer = program.peer.map_or(now, |_| program.since);
        program.held.first().map_or(of_peer, |turn| self.turns[*turn].arrived)
    }

    /// Returns whether a program's own router holds it for long after the forecast that it is
    /// admitted. It gets no place here until its router admits it: the room would stay unused.
    fn is_left_held(&self, id: ProgramId, now: Seconds) -> bool {
        let forecast_at = self.programs[id].peer.and_then(|peer| peer.forecast_at);
        forecast_at.is_some_and(|at| now - at > FAIR_SECONDS)
    }

    /// Returns whether a tenant keeps more tokens for its weight than a held program's tenant will
    /// have with this program.
    fn may_take(&self, id: ProgramId) -> bool {
        let program = &self.programs[id];
        let after = self.sets.share(program.tenant) + program.own_tokens() / program.weight;
        self.terms.ends_long_holds && self.sets.greatest_share_of_others(program.tenant) > after
    }

    /// Gives programs that are held for long the places of other tenants' programs, or refuses
    /// them.
    fn end_long_holds(&mut self, now: Seconds) {
        let next = self.queue.made_room_at.map_or(now, |at| at + FAIR_ROUND_SECONDS);
        if self.queue.len() == 0 || !self.terms.ends_long_holds || now < next {
            return;
        }
        self.queue.made_room_at = Some(now);
        let slots: Vec<usize> = (0..self.instances.len()).collect();
        let mut resting = None;
        let mut places = MAX_PER_FAIR_ROUND;
        for line in self.lines_by_turn(&self.ranks(now)) {
            let held: Vec<ProgramId> = self.queue.lines.get(line).into_iter().flat_map(Line::iter).collect();
            // Within a line, a program that does not get a place holds back those behind it.
            let mut blocked = false;
            for id in held {
                if self.is_left_held(id, now) {
                    continue;
                }
                let hold = now - self.held_since(id, now);
                let is_over = hold > self.config.max_hold_seconds;
                let takes =
                    hold > FAIR_SECONDS && !blocked && self.may_take(id) && self.fits_beside_others(id);
                if takes {
                    if places == 0 {
                        return; // the others in the next round
                    }
                    let resting = resting.get_or_insert_with(|| self.resting_on(&slots, now));
                    if self.take_place(id, resting, now) {
                        places -= 1;
                        continue;
                    }
                    blocked = true;
                }
                if is_over {
                    let seconds = self.queue.expected_seconds(line, now).clamp(1.0, 3600.0);
                    for turn in self.programs[id].held.clone() {
                        self.refuse(turn, seconds, now);
                        self.queue.refused.push((turn, seconds));
                    }
                }
            }
        }
    }

    /// Pauses programs of other tenants in `resting` and gives their place to a held program.
    /// Returns whether it got a place.
    fn take_place(&mut self, id: ProgramId, resting: &[Vec<ProgramId>], now: Seconds) -> bool {
        let choice = (0..self.instances.len()).filter_map(|slot| {
            let room = self.room_on(id, Slot(slot as u32))?;
            let (pausable, freed) = self.pausable(id, &resting[slot], -room);
            Some((slot, pausable, room + freed))
        });
        // If no instance has room even then: the instance that lacks the fewest tokens.
        let best = choice.max_by(|a, b| {
            let key = |left: f64| left.min(0.0);
            key(a.2).total_cmp(&key(b.2)).then(b.1.len().cmp(&a.1.len())).then(b.0.cmp(&a.0))
        });
        let Some((slot, pausable, left)) = best else { return false };
        let instance = Slot(slot as u32);
        if left < 0.0 && (pausable.is_empty() || self.kept().is_some_and(|kept| kept.0 != id)) {
            return false;
        }
        pausable.into_iter().for_each(|paused| self.pause(paused));
        if self.room_on(id, instance).is_some_and(|room| room >= 0.0) {
            self.give_place(id, instance, now);
            return true;
        }
        // Programs with a turn leave one after the other; no other program takes their place.
        self.queue.kept = Some((id, self.as_home(instance)));
        false
    }

    /// Returns the held program that an instance is kept for, and the instance, unless it was
    /// removed.
    pub(super) fn kept(&self) -> Option<(ProgramId, Slot)> {
        let (id, home) = self.queue.kept?;
        Some((id, self.instance_of(home)?))
    }

    /// Returns the programs to pause so that a held program gets `needed` tokens, and the tokens
    /// that this frees.
    fn pausable(&self, id: ProgramId, resting: &[ProgramId], needed: f64) -> (Vec<ProgramId>, f64) {
        let program = &self.programs[id];
        let after = self.sets.share(program.tenant) + program.own_tokens() / program.weight;
        let mut shares: HashMap<u64, f64> = HashMap::new();
        let (mut pausable, mut freed) = (Vec::new(), 0.0);
        for &other in resting {
            if freed >= needed {
                break;
            }
            let Some(other_program) = self.programs.get(other) else { continue };
            let Some(charge) = other_program.charge().filter(|_| other_program.state == State::Gap) else {
                continue;
            };
            let tenant = other_program.tenant;
            if tenant == program.tenant {
                continue;
            }
            let share = shares.entry(tenant).or_insert_with(|| self.sets.share(tenant));
            let left = *share - other_program.own_tokens() / other_program.weight;
            if left >= after {
                *share = left;
                freed += charge.own;
                pausable.push(other);
            }
        }
        (pausable, freed)
    }

    /// Admits a held program to an instance.
    fn give_place(&mut self, id: ProgramId, instance: Slot, now: Seconds) {
        self.uncharge(id);
        self.set_home(id, instance);
        self.set_state(id, State::Running);
        if self.programs[id].peer.is_none() {
            self.queue.admitted(self.programs[id].own_tokens(), now);
        }
        if let Some(peer) = &mut self.programs[id].peer {
            peer.forecast_at.get_or_insert(now);
        }
        self.charge(id, now);
        self.hand_out(id, instance, now);
    }

    /// Admits held programs while there is room.
    fn release(&mut self, now: Seconds) {
        let ranks = self.ranks(now);
        while let Some((id, instance)) = self.next_to_admit(&ranks, now) {
            self.give_place(id, instance, now);
        }
    }

    /// Admits all held programs, after a change of settings: programs are held no longer.
    fn release_all(&mut self, now: Seconds) {
        let mut held: Vec<ProgramId> = self.queue.lines.waiting().map(|(id, _)| id).collect();
        held.sort();
        for id in held {
            let home = self.home_of(&self.programs[id]);
            let home = home.filter(|home| self.instances[home.index()].available);
            let Some(instance) = home.or_else(|| self.emptiest(&[])) else { return };
            self.give_place(id, instance, now);
        }
    }

    /// Releases all held turns of a program to an instance.
    pub(super) fn hand_out(&mut self, id: ProgramId, instance: Slot, now: Seconds) {
        self.queue.remove(id);
        let home = self.as_home(instance);
        for turn in std::mem::take(&mut self.programs[id].held) {
            self.turns[turn].assigned = Some(home);
            let held_seconds = now - self.turns[turn].arrived;
            if held_seconds > 0.0 {
                self.counters.admitted += 1;
                self.counters.held_seconds += held_seconds;
            }
            self.queue.released.push(turn);
        }
    }

    /// Returns the held program to admit next, if one fits.
    fn next_to_admit(&self, ranks: &Ranks, now: Seconds) -> Option<(ProgramId, Slot)> {
        let kept = self.kept();
        let mut reserved: Vec<Slot> = kept.iter().map(|(_, instance)| *instance).collect();
        for line in self.lines_by_turn(ranks) {
            if let Some(id) = self.queue.overdue.filter(|id| self.queue.lines.line_of(*id) == Some(line)) {
                if let Some(instance) = self.room_for(id, &reserved) {
                    return Some((id, instance));
                }
                reserved.extend(self.emptiest(&reserved));
            }
            let held = self.queue.lines.get(line).into_iter().flat_map(Line::iter);
            for id in held.filter(|id| !self.is_left_held(*id, now)).take(CANDIDATES) {
                let is_kept = kept.is_some_and(|(kept, _)| kept == id);
                if let Some(instance) = self.room_for(id, if is_kept { &[] } else { &reserved }) {
                    return Some((id, instance));
                }
                let since = self.held_since(id, now);
                if now - since > self.terms.max_wait_seconds
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

    /// Returns the order of the levels of held programs. One level needs none.
    fn ranks(&self, now: Seconds) -> Ranks {
        let mut levels = self.queue.lines.iter().map(|(key, _)| key.level);
        let first = levels.next();
        if levels.next_back().or(first) == first {
            return Ranks::default();
        }
        let waits = self.queue.lines.waiting();
        let waits = waits.map(|(id, key)| (key.level, now - self.held_since(id, now)));
        Ranks::new(waits, self.config.aging_seconds)
    }

    /// Returns the lines of held programs: those of higher levels first, then those of the tenants
    /// with the fewest counted tokens for their weight.
    fn lines_by_turn(&self, ranks: &Ranks) -> Vec<Key> {
        let mut lines: Vec<Key> = self.queue.lines.iter().map(|(key, _)| key).collect();
        let share = |key: &Key| self.sets.share(key.tenant);
        lines.sort_by(|a, b| {
            let by_level = ranks.of(a.level).cmp(&ranks.of(b.level));
            let by_share = by_level.then(share(a).total_cmp(&share(b)));
            by_share.then(a.tenant.cmp(&b.tenant)).then(b.level.cmp(&a.level))
        });
        lines
    }

    /// Sets the hold after which a program's level rises by one.
    pub(super) fn set_aging_seconds(&mut self, seconds: Seconds) {
        self.config.aging_seconds = seconds;
    }
}
