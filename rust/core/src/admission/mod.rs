//! Admission: which arriving requests run now, which wait, and which are refused.
//!
//! A request may wait for two things: a place for its agent program in a cache
//! ([`crate::program`]), and room on an instance. An instance has room while a further request
//! would wait at most some seconds for the start of its prefill ([`LoadConfig::room`]). All other
//! requests wait here, in the router, and are bound to an instance as late as possible: an engine
//! serves its own queue without fairness and without deadlines.
//!
//! Higher priority levels go first ([`levels`]). Inside a level, tenants take turns by virtual
//! token counters ([`crate::priority::vtc`]): the next request is one of the tenant with the least
//! service for its weight. Within a tenant, the earliest deadline goes first. A request whose
//! deadline would pass while it waits is refused at its arrival, with a prediction of the time at
//! which it would be admitted.
//!
//! [`Admission`] is the only owner of arrivals. An arrival has these stages:
//!
//! | stage | event | next stage |
//! | --- | --- | --- |
//! | (arrives) | its program has no place | `Cache` |
//! | (arrives) | | `Room` |
//! | (arrives) | it would have to wait, and is sheddable | (refused) |
//! | `Cache` | its program gets a place, or no instance takes requests | `Room` |
//! | `Room` | an instance has room, and it is its turn | `Ready` |
//! | `Room` | its deadline passes, or a longer line loses its end | (refused) |
//! | `Ready` | the router places it | `Running` |
//! | any | its request ends, or its client leaves | (removed) |
//!
//! Without admission by load, `Room` passes at once.
mod levels;
mod limits;
mod service;
mod settings;
#[cfg(test)]
pub(crate) mod tests;
#[cfg(test)]
mod tests_levels;
mod verdict;

pub use levels::{LevelNote, LevelSnapshot};
pub use settings::{LoadConfig, TenantLimits};
pub use verdict::{Asked, Counters, Fullness, HeldFor, LoadSnapshot, RefusedFor, Released, Room, Verdict};

use crate::board::Board;
use crate::error::CoreError;
use crate::fleet::{Fleet, Member};
use crate::ids::{ArrivalId, Seconds, Slot};
use crate::levels::{Key, Lines};
use crate::priority::vtc::{self, VirtualTokens};
use crate::program::{
    self, AGING_SECONDS, Finish, Followed, ProgramConfig, ProgramMode, ProgramNote, Programs, TurnId, Work,
};
use crate::request::{Request, Tenant};
use hashbrown::{HashMap, HashSet};
use limits::{Limits, Shared};
use service::Service;
use slotmap::SlotMap;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};
use std::sync::Arc;

/// Share of the time to the deadline that a request may be expected to wait. The rest is for
/// errors of the prediction.
const WAIT_SHARE: f64 = 0.5;
/// The same for prompts so long that their prefill alone takes the time to the deadline.
const MIN_WAIT_SHARE: f64 = 0.1;
/// Most requests that one round lets run on an instance.
const MAX_PER_ROUND: f64 = 16.0;
/// Waiting requests of a tenant considered per round, if their programs' instances have no room.
const CANDIDATES: usize = 16;

#[derive(Clone, Copy, Debug, PartialEq)]
enum Stage {
    Cache,
    Room,
    Ready(Option<vtc::Place>),
    Running(Option<vtc::Place>),
}

/// A request.
#[derive(Clone, Copy, Debug)]
struct Arrival {
    turn: Option<TurnId>,
    asked: Asked,
    /// Prompt tokens to compute plus weighted answer tokens.
    work: f64,
    arrived: Seconds,
    deadline: Option<Seconds>,
    /// Start of its wait for room.
    since: Seconds,
    /// The slot that had room for it.
    slot: Option<usize>,
    /// Time since which it may run.
    began: Seconds,
    /// Levels by which its level had risen when it was its turn.
    aged_levels: u8,
    stage: Stage,
}

impl Arrival {
    /// Returns its line.
    fn key(&self) -> Key {
        Key { tenant: self.asked.tenant, level: self.asked.level }
    }

    /// Returns its place among the requests that may run, if it left the queue.
    fn place(&self) -> Option<vtc::Place> {
        let (Stage::Ready(place) | Stage::Running(place)) = self.stage else { return None };
        place
    }

    /// Returns whether its first token can no longer come in time. `room`: wait on an instance with
    /// room. A prompt that takes longer than the time to its deadline runs if its turn comes in the
    /// first half of this time. The hold of its program is no part of the time.
    fn is_late(&self, room: Seconds, now: Seconds) -> bool {
        let needed =
            |deadline: Seconds| (self.asked.prefill_seconds + room).min((deadline - self.since) / 2.0);
        self.deadline.is_some_and(|deadline| now + needed(deadline) > deadline)
    }
}

/// A request that may run, and the instance that has room for it; `None`: the router does not know.
type Next = (ArrivalId, Option<usize>);
/// A line that may run a request: the rank of its level, its service, its tenant, and its key.
type Turn = Reverse<(u8, u64, u64, Key)>;
type Turns = BinaryHeap<Turn>;

/// Admission by load.
#[derive(Clone, Debug, Default)]
struct Load {
    config: LoadConfig,
    limits: Limits,
    /// For each level that has had requests, the requests of this and of higher levels on engines;
    /// empty without levels.
    limits_from: BTreeMap<i8, Limits>,
    queue: Lines<ArrivalId>,
    /// Number of requests that have waited.
    serial: u64,
    service: Service,
    counters: Counters,
}

/// All requests from their arrival to their end, if programs or admission by load are on.
#[derive(Clone, Debug, Default)]
pub struct Admission {
    arrivals: SlotMap<ArrivalId, Arrival>,
    /// Requests that their programs hold.
    by_turn: HashMap<TurnId, ArrivalId>,
    programs: Option<Followed>,
    load: Option<Load>,
    /// Service of all tenants, if it orders requests here or in the engines' queues.
    shares: VirtualTokens,
    /// Whether it orders requests in the engines' queues.
    orders_engines: bool,
    released: Released,
    /// The limits' use by all workers of this server, if there are several.
    shared: Option<Shared>,
}

impl Admission {
    /// Returns whether arrivals are recorded.
    pub fn is_on(&self) -> bool {
        self.programs.is_some() || self.load.is_some()
    }

    /// Returns whether requests must arrive before they are placed.
    pub fn admits(&self) -> bool {
        self.load.is_some()
            || self.programs().is_some_and(|programs| programs.config().mode != ProgramMode::Observe)
    }

    /// Counts the requests of other workers in the limits of tenants, and follows programs together
    /// with them, from now on. `model`: a number that the routers of the same model share.
    ///
    /// # Errors
    /// `BadValue` if the board has no room for a further model.
    pub fn share(&mut self, board: Arc<Board>, model: u64, fleet: &Fleet) -> Result<(), CoreError> {
        if let Some(programs) = &mut self.programs {
            programs.join(board.clone(), model, fleet)?;
        }
        self.shared = Some(Shared { board, model });
        if let Some(load) = &mut self.load {
            load.limits = Limits::new(self.shared.clone());
        }
        Ok(())
    }

    /// Ends the sharing of programs. The requests that they held are refused: what these wait for
    /// does not come any more.
    pub fn leave(&mut self) {
        if self.programs.as_mut().is_some_and(Followed::leave) {
            for (_, id) in self.by_turn.drain() {
                self.released.refused.push((id, RefusedFor::Programs, 1.0));
                self.arrivals.remove(id);
            }
        }
    }

    /// Follows what other workers' requests did to programs.
    #[inline]
    pub fn follow(&mut self, now: Seconds) {
        if let Some(programs) = &mut self.programs {
            programs.follow(now);
        }
    }

    /// Returns the agent programs, if they are followed.
    pub fn programs(&self) -> Option<&Programs> {
        self.programs.as_ref().map(Followed::programs)
    }

    /// Returns the agent programs, as all workers follow them.
    pub fn followed(&self) -> Option<&Followed> {
        self.programs.as_ref()
    }

    /// Returns the same for changes.
    pub fn followed_mut(&mut self) -> Option<&mut Followed> {
        self.programs.as_mut()
    }

    /// Returns the settings of admission by load, if it is on.
    pub fn load_config(&self) -> Option<&LoadConfig> {
        self.load.as_ref().map(|load| &load.config)
    }

    /// Sets how programs are followed; `None`: not at all. The programs known so far are kept if
    /// programs stay on. Without programs, the requests that they held wait only for room.
    ///
    /// # Errors
    /// `BadValue` for a setting out of its range, or if the router shares programs with others.
    pub fn set_programs(&mut self, config: Option<ProgramConfig>, now: Seconds) -> Result<(), CoreError> {
        if self.shared.is_some() {
            return Err(CoreError::BadValue {
                what: "programs".into(),
                got: "a change after join()".into(),
                expected: "a change before, because all workers must have the same".into(),
            });
        }
        match (&mut self.programs, config) {
            (Some(programs), Some(config)) => programs.set_config(config)?,
            (programs, config) => *programs = config.map(Followed::new).transpose()?,
        }
        self.age_programs();
        if self.programs.is_none() {
            self.arrivals.values_mut().for_each(|arrival| arrival.turn = None);
            for (_, id) in std::mem::take(&mut self.by_turn) {
                self.wait_for_room(id, now);
            }
        }
        Ok(())
    }

    /// Gives programs the aging of requests.
    fn age_programs(&mut self) {
        let own = self.load.as_ref().and_then(|load| load.config.aging_seconds);
        if let Some(programs) = &mut self.programs {
            programs.set_aging_seconds(own.unwrap_or(AGING_SECONDS));
        }
    }

    /// Switches admission by load on or off, or changes its settings. Requests that wait stay; when
    /// it is switched off, they may run.
    ///
    /// # Errors
    /// `BadValue` for a setting out of its range.
    pub fn set_load(&mut self, config: Option<LoadConfig>, now: Seconds) -> Result<(), CoreError> {
        let config = config.map(LoadConfig::checked).transpose()?;
        let had_levels = self.has_levels();
        match (&mut self.load, config) {
            (Some(load), Some(config)) => {
                load.config = config;
                let Load { config, limits, .. } = load;
                limits.limit(|tenant| config.max_concurrent(tenant).is_some());
            }
            (load, Some(config)) => {
                let limits = Limits::new(self.shared.clone());
                *load = Some(Load { config, limits, ..Load::default() });
            }
            (load, None) => {
                if let Some(load) = load.take() {
                    load.limits.end_all();
                }
            }
        }
        self.age_programs();
        if self.load.is_none() {
            let ids: Vec<ArrivalId> = self.arrivals.keys().collect();
            for id in ids {
                let arrival = &mut self.arrivals[id];
                arrival.place().into_iter().for_each(|place| self.shares.end(place));
                match arrival.stage {
                    Stage::Room => self.wait_for_room(id, now),
                    Stage::Ready(_) => arrival.stage = Stage::Ready(None),
                    Stage::Running(_) => arrival.stage = Stage::Running(None),
                    Stage::Cache => {}
                }
            }
            self.order_engines(self.orders_engines);
        } else if self.has_levels() != had_levels {
            self.count_levels();
        }
        Ok(())
    }

    /// Sets whether the tenants' service orders requests in the engines' queues, too.
    pub fn order_engines(&mut self, on: bool) {
        if self.load.is_none() && !(on && self.orders_engines) {
            self.shares = VirtualTokens::default();
        }
        self.orders_engines = on;
    }

    /// Returns the place of a request in the engines' queues, if service orders them: the place
    /// with which it left the queue here. Without one, it gets a place that ends with its ticket.
    /// So it does with levels, which engines' queues lack: shares of each level would give a tenant
    /// several shares there.
    pub fn engine_place(
        &mut self,
        request: &Request<'_>,
        new_tokens: u32,
        kept: &mut Option<vtc::Place>,
    ) -> Option<vtc::Place> {
        let (Tenant { id, weight, .. }, has_levels) = (request.tenant, self.has_levels());
        let known = request.arrival.filter(|_| !has_levels);
        let known = known.and_then(|id| self.arrivals.get(id)?.place());
        let number = if has_levels { levels::share_of_all(id) } else { id };
        let shares = &mut self.shares;
        let place = || known.unwrap_or_else(|| *kept.insert(shares.begin(number, new_tokens, weight)));
        self.orders_engines.then(place)
    }

    /// Charges a place with the tokens of an answer and ends it.
    pub fn end_place(&mut self, place: vtc::Place, made: u32) {
        self.shares.charge(place, made);
        self.shares.end(place);
    }

    /// Follows a change of the fleet.
    pub fn member(&mut self, member: Member, fleet: &Fleet) {
        if let Some(programs) = &mut self.programs {
            programs.member(member, fleet);
        }
        if let Member::Removed(id) = member {
            for arrival in self.arrivals.values_mut() {
                arrival.slot = arrival.slot.filter(|slot| *slot != id.index());
            }
        }
    }

    /// Returns the wait on an instance up to which it has room; `None`: all have.
    pub fn room_seconds(&self) -> Option<Seconds> {
        self.load.as_ref().map(|load| load.config.room()).filter(|room| *room < f64::INFINITY)
    }

    /// Returns the number of requests that wait, or whose wait has ended since the last
    /// [`Admission::release`].
    pub fn waiting(&self) -> usize {
        let Released { ready, refused } = &self.released;
        let for_room = self.load.as_ref().map_or(0, |load| load.queue.len());
        for_room + self.by_turn.len() + ready.len() + refused.len()
    }

    /// Records an arriving request and decides what to do with it. A refused request has no
    /// arrival.
    pub fn arrive(
        &mut self,
        turn: &program::Arrival<'_>,
        asked: Asked,
        room: &mut Room,
        now: Seconds,
    ) -> (Option<ArrivalId>, Verdict) {
        let (turn, verdict) = match &mut self.programs {
            Some(programs) if room.served => programs.arrive(turn, now),
            // No instance takes requests: the decision says so.
            _ => (None, program::Verdict::Free),
        };
        if let program::Verdict::Refused { retry_after_seconds } = verdict {
            return (None, Verdict::Refused { by: RefusedFor::Programs, retry_after_seconds });
        }
        let counts = self.has_levels() || self.load.is_none(); // without a queue, only programs have levels
        let asked = Asked { level: if counts { asked.level } else { 0 }, ..asked };
        let default = self.load.as_ref().and_then(|load| load.config.ttft_seconds);
        let ttft = asked.ttft_seconds.or(default);
        let arrival = Arrival {
            turn,
            asked,
            work: asked.new_tokens.max(1.0) + vtc::OUTPUT_COST * asked.answer_tokens,
            arrived: now,
            deadline: ttft.map(|seconds| now + seconds),
            since: now,
            slot: None,
            began: now,
            aged_levels: 0,
            stage: Stage::Ready(None),
        };
        let id = self.arrivals.insert(arrival);
        if let (program::Verdict::Held(hold), Some(turn)) = (verdict, turn) {
            let expected_seconds = hold.expected_seconds;
            self.arrivals[id].stage = Stage::Cache;
            self.by_turn.insert(turn, id);
            return (Some(id), Verdict::Held { by: HeldFor::Program(hold), expected_seconds });
        }
        let verdict = self.arrive_at_room(id, room, now);
        let id = if let Verdict::Refused { .. } = verdict { None } else { Some(id) };
        (id, verdict)
    }

    /// Lets an arriving request run, or wait for room, or refuses it.
    fn arrive_at_room(&mut self, id: ArrivalId, room: &mut Room, now: Seconds) -> Verdict {
        let key = self.arrivals[id].key();
        self.wait_for_room(id, now);
        self.round(room, now);
        let Some(Arrival { stage, asked, deadline, .. }) = self.arrivals.get(id).copied() else {
            return self.refusal(id);
        };
        if let Stage::Ready(_) = stage {
            self.released.ready.retain(|(ready, _)| *ready != id);
            if let Some(load) = &mut self.load {
                load.counters.free += 1;
            }
            return self.home(id).map_or(Verdict::Free, Verdict::Run);
        }
        let (Some(load), Stage::Room) = (&mut self.load, stage) else { return Verdict::Free };
        let Asked { tenant, prefill_seconds, .. } = asked;
        let expected_seconds = load.expected_seconds(key, None, room, now);
        let limits = load.config.tenants.get(&tenant).copied().unwrap_or_default();
        let max_own = limits.max_waiting.unwrap_or(load.config.max_waiting_per_tenant);
        let own = load.queue.count(|other| other.tenant == tenant);
        let is_late = |seconds: Seconds| {
            deadline.is_some_and(|deadline| {
                let left = deadline - now;
                seconds > ((left - prefill_seconds) * WAIT_SHARE).max(left * MIN_WAIT_SHARE)
            })
        };
        // Requests of its line with a later deadline go after it.
        let late = is_late(expected_seconds) && is_late(load.expected_seconds(key, Some(id), room, now));
        // A full line loses its last request: the one with the latest deadline. One of a lower
        // level is lost first, unless it has aged up to the level of this one.
        let full = load.queue.len() > load.config.max_waiting;
        let last = || load.queue.get(key)?.iter().next_back();
        let below = |own: bool| {
            let aging = load.config.aging_seconds?;
            let below = load.queue.last_below(key, own)?;
            let Arrival { asked, since, .. } = &self.arrivals[below];
            (now - since < aging * f64::from(key.level.abs_diff(asked.level))).then_some(below)
        };
        let loses = match () {
            () if own > max_own => below(true).or_else(last),
            () if full => below(false).or_else(|| load.queue.last_of_longest(key)).or_else(last),
            () => None,
        };
        let refused = match () {
            () if late => Some(RefusedFor::Deadline),
            () if asked.sheddable || loses == Some(id) => Some(RefusedFor::Queue),
            () => None,
        };
        if let Some(by) = refused {
            let verdict = load.refuse(by, expected_seconds);
            self.remove(id, now);
            return verdict;
        }
        load.counters.held += 1;
        if let Some(last) = loses {
            self.refuse_waiting(last, RefusedFor::Queue, room, now);
        }
        let limited = limits.max_concurrent.is_some_and(|most| self.running(tenant) >= most);
        let by = if limited { HeldFor::Concurrency } else { HeldFor::Room };
        Verdict::Held { by, expected_seconds }
    }

    /// Takes the refusal of an arriving request whose deadline cannot be met.
    fn refusal(&mut self, id: ArrivalId) -> Verdict {
        let place = self.released.refused.iter().position(|(refused, ..)| *refused == id);
        let refused = place.map(|place| self.released.refused.remove(place));
        let (by, retry_after_seconds) = refused.map_or((RefusedFor::Deadline, 1.0), |(_, by, s)| (by, s));
        Verdict::Refused { by, retry_after_seconds }
    }

    fn running(&self, tenant: u64) -> u32 {
        self.load.as_ref().map_or(0, |load| load.limits.running_everywhere(tenant))
    }

    /// Lets a request wait for room. Without admission by load, it may run.
    fn wait_for_room(&mut self, id: ArrivalId, now: Seconds) {
        let Some(arrival) = self.arrivals.get_mut(id) else { return };
        let Some(load) = &mut self.load else {
            arrival.stage = Stage::Ready(None);
            self.released.ready.push((id, now - arrival.arrived));
            return;
        };
        if let (Stage::Cache, Some(deadline)) = (arrival.stage, &mut arrival.deadline) {
            *deadline += now - arrival.arrived; // the hold of its program does not count
        }
        (arrival.since, arrival.stage) = (now, Stage::Room);
        load.enqueue(arrival, id);
    }

    /// Returns the requests whose wait has ended. Call it about twice a second, after the end of
    /// each request, and more often while requests wait.
    pub fn release(&mut self, room: &mut Room, now: Seconds) -> Released {
        let mut ready = Vec::new();
        if let Some(programs) = &mut self.programs {
            programs.tick(now);
            ready.extend(programs.released().iter().filter_map(|turn| self.by_turn.remove(turn)));
            for (turn, seconds) in programs.refused() {
                let Some(id) = self.by_turn.remove(&turn) else { continue };
                self.released.refused.push((id, RefusedFor::Programs, seconds));
                self.arrivals.remove(id);
            }
            if programs.take_copied() {
                for (_, id) in self.by_turn.extract_if(|turn, _| !programs.knows(*turn)) {
                    self.released.refused.push((id, RefusedFor::Programs, 1.0));
                    self.arrivals.remove(id);
                }
                let turns: HashSet<TurnId> =
                    self.arrivals.values().filter_map(|arrival| arrival.turn).collect();
                programs.end_unknown(|turn| turns.contains(&turn), now);
            }
        }
        if !room.served {
            // Their decisions say so. Like requests that arrive now, they belong to no program.
            let mut held: Vec<_> = self.by_turn.drain().map(|(turn, id)| (id, turn)).collect();
            held.sort_unstable();
            for (id, turn) in held {
                if let Some(programs) = &mut self.programs {
                    programs.ended(turn, 0, Finish::Unknown, now);
                }
                self.arrivals[id].turn = None;
                ready.push(id);
            }
        }
        ready.into_iter().for_each(|id| self.wait_for_room(id, now));
        self.round(room, now);
        std::mem::take(&mut self.released)
    }

    /// Lets waiting requests run while instances have room.
    fn round(&mut self, room: &mut Room, now: Seconds) {
        self.refuse_late(room, now);
        self.count_ready(room);
        let Some(load) = &mut self.load else { return };
        load.note_stopped(now);
        let mut ranks = load.ranks(now);
        let mut turns = load.turns(&ranks, &self.shares);
        while let Some(Reverse((.., key))) = turns.pop() {
            // Only programs name the instances of their requests.
            if self.programs.is_none() && !self.has_room(Fullness::Kept, room) {
                break;
            }
            let Some((id, slot)) = self.next_of(key, room, now) else { continue };
            self.arrivals[id].aged_levels = ranks.rise(key.level);
            self.let_run(id, slot, room, now);
            let Some(load) = &self.load else { return };
            let new = load.ranks(now);
            if new != ranks {
                // A level has lost its oldest request, or the highest level has none left.
                ranks = new;
                turns = load.turns(&ranks, &self.shares);
            } else if load.queue.get(key).is_some() && load.may_run(key.tenant) {
                turns.push(load.turn(key, &ranks, &self.shares));
            }
        }
        if let Some(load) = &mut self.load {
            let waits = load.queue.iter().any(|(key, _)| load.may_run(key.tenant));
            load.service.waits(waits, now);
        }
    }

    /// Counts the requests that may run and are not placed yet in the room of their instances.
    fn count_ready(&self, room: &mut Room) {
        for (id, _) in &self.released.ready {
            if let Some(Arrival { slot: Some(slot), asked, .. }) = self.arrivals.get(*id) {
                room.take(*slot, asked.prefill_seconds);
            }
        }
    }

    /// Returns whether an instance up to this fullness has room, or the router does not know any.
    fn has_room(&self, most: Fullness, room: &Room) -> bool {
        let seconds = self.load.as_ref().map_or(f64::INFINITY, |load| load.config.room());
        seconds == f64::INFINITY || room.best(most).map_or(!room.served, |(_, wait)| wait <= seconds)
    }

    /// Returns the next request of a line with the instance that has room for it.
    fn next_of(&self, key: Key, room: &Room, now: Seconds) -> Option<Next> {
        let load = self.load.as_ref()?;
        let line = load.queue.get(key)?;
        let may_take_kept = load.may_take_kept(key, line.weight(), now);
        let fullness = if may_take_kept { Fullness::Kept } else { Fullness::Free };
        let (best, most) = (room.best(fullness), load.config.room());
        line.iter().take(CANDIDATES).find_map(|id| {
            let home = self.home(id).map(|home| home.index());
            let home = home.filter(|home| room.waits.get(*home).is_some_and(|wait| *wait < f64::INFINITY));
            match (home, best) {
                _ if most == f64::INFINITY => Some((id, None)),
                (Some(home), _) => {
                    let has_room = room.fullness(home) <= fullness && room.waits[home] <= most;
                    has_room.then_some((id, Some(home)))
                }
                (None, Some((slot, wait))) => (wait <= most).then_some((id, Some(slot))),
                // No instance takes requests: the decision says so.
                (None, None) => (!room.served).then_some((id, None)),
            }
        })
    }

    fn let_run(&mut self, id: ArrivalId, slot: Option<usize>, room: &mut Room, now: Seconds) {
        let (arrival, Some(load)) = (&mut self.arrivals[id], &mut self.load) else { return };
        let Asked { tenant, weight, new_tokens, prefill_seconds, .. } = arrival.asked;
        let key = arrival.key();
        load.queue.remove(id);
        load.service.took(arrival.work);
        let limited = load.config.max_concurrent(tenant).is_some();
        load.limits.begin(tenant, weight.max(1e-3), limited, now);
        load.begin_level(key, weight, now);
        let share = self.shares.begin(levels::share_of(key), new_tokens.max(1.0) as u32, weight.max(1e-3));
        arrival.stage = Stage::Ready(Some(share));
        (arrival.slot, arrival.began) = (slot, now);
        if let Some(slot) = slot {
            room.take(slot, prefill_seconds.max(load.config.room() / MAX_PER_ROUND));
        }
        let waited_seconds = now - arrival.since;
        if waited_seconds > 0.0 {
            load.counters.admitted += 1;
            load.counters.held_seconds += waited_seconds;
        }
        self.released.ready.push((id, now - arrival.arrived));
    }

    /// Refuses waiting requests that can no longer meet their deadline.
    fn refuse_late(&mut self, room: &Room, now: Seconds) {
        let Some(load) = &self.load else { return };
        let most = load.config.room();
        let first = load.queue.iter().filter_map(|(_, line)| line.iter().next());
        let mut found: Vec<ArrivalId> = first.filter(|id| self.arrivals[*id].is_late(most, now)).collect();
        while let Some(id) = found.pop() {
            let key = self.arrivals[id].key();
            self.refuse_waiting(id, RefusedFor::Deadline, room, now);
            let next = self.load.as_ref().and_then(|load| load.queue.get(key)?.iter().next());
            found.extend(next.filter(|id| self.arrivals[*id].is_late(most, now)));
        }
    }

    /// Refuses a waiting request.
    fn refuse_waiting(&mut self, id: ArrivalId, by: RefusedFor, room: &Room, now: Seconds) {
        let key = self.arrivals[id].key();
        if let Some(load) = &mut self.load
            && let Verdict::Refused { retry_after_seconds, .. } =
                load.refuse(by, load.expected_seconds(key, None, room, now))
        {
            self.released.refused.push((id, by, retry_after_seconds));
        }
        self.remove(id, now);
    }

    /// Returns the instance on which a request must run, if its program has a place there.
    pub fn home(&self, id: ArrivalId) -> Option<Slot> {
        self.programs.as_ref()?.assigned(self.arrivals.get(id)?.turn?)
    }

    /// Returns what a decision record shows of a request's program.
    pub fn note(&self, id: ArrivalId, now: Seconds) -> Option<ProgramNote> {
        self.programs.as_ref()?.note(self.arrivals.get(id)?.turn?, now)
    }

    /// Ends the programs of a session. Returns how many had not ended; `None`: programs are not
    /// followed.
    pub fn finish_session(&mut self, session: u64, now: Seconds) -> Option<usize> {
        self.programs.as_mut().map(|programs| programs.finish_session(session, now))
    }

    /// Returns the prefill work that computed contexts again, per work that was new; 0 without
    /// programs.
    pub fn recompute_ratio(&self) -> f64 {
        self.programs().map_or(0.0, Programs::recompute_ratio)
    }

    /// Records that a request was placed on an instance first. `work`: its prefill, which is asked
    /// only for requests of programs.
    pub fn placed_first(&mut self, id: ArrivalId, instance: Slot, work: impl FnOnce() -> Work, now: Seconds) {
        self.place(id, instance, Some(work), now);
    }

    /// Records that a request was placed on an instance again.
    pub fn placed(&mut self, id: ArrivalId, instance: Slot, now: Seconds) {
        self.place(id, instance, None::<fn() -> Work>, now);
    }

    fn place(&mut self, id: ArrivalId, instance: Slot, work: Option<impl FnOnce() -> Work>, now: Seconds) {
        self.leave_queue(id);
        let Some(arrival) = self.arrivals.get_mut(id) else { return };
        if let Stage::Ready(share) = arrival.stage {
            arrival.stage = Stage::Running(share);
        }
        if let (Some(programs), Some(turn)) = (&mut self.programs, arrival.turn) {
            programs.placed(turn, instance, work.map(|work| work()), now);
        }
    }

    /// Ends a request that was placed. `made`: its answer in tokens.
    pub fn ended(&mut self, id: ArrivalId, made: u32, finish: Finish, now: Seconds) {
        self.leave_queue(id);
        let Some(arrival) = self.arrivals.remove(id) else { return };
        if let (Some(load), Stage::Ready(Some(share)) | Stage::Running(Some(share))) =
            (&mut self.load, arrival.stage)
        {
            load.limits.end(arrival.asked.tenant, now);
            if let Stage::Running(_) = arrival.stage {
                load.limits.ran(arrival.asked.tenant, now - arrival.began);
            }
            load.end_level(arrival.key(), now);
            self.end_place(share, made);
        }
        if let (Some(programs), Some(turn)) = (&mut self.programs, arrival.turn) {
            programs.ended(turn, made, finish, now);
        }
    }

    /// Removes a request that was not placed, for example because its client left.
    pub fn remove(&mut self, id: ArrivalId, now: Seconds) {
        self.released.ready.retain(|(ready, _)| *ready != id);
        if let Some(Stage::Ready(Some(place))) = self.arrivals.get(id).map(|arrival| arrival.stage) {
            self.shares.take_back(place);
        }
        self.ended(id, 0, Finish::Unknown, now);
    }

    /// Takes a request out of the queues. A caller may route a request that still waits: then it
    /// counts nowhere here.
    fn leave_queue(&mut self, id: ArrivalId) {
        let Some(arrival) = self.arrivals.get_mut(id) else { return };
        match (arrival.stage, &mut self.load) {
            (Stage::Room, Some(load)) => load.queue.remove(id),
            (Stage::Cache, _) => {
                arrival.turn.and_then(|turn| self.by_turn.remove(&turn));
            }
            _ => return,
        }
        arrival.stage = Stage::Ready(None);
    }

    /// Returns the numbers of admission by load, if it is on.
    pub fn snapshot(&self, room: &Room, now: Seconds) -> Option<LoadSnapshot> {
        let load = self.load.as_ref()?;
        let mut waiting: HashMap<u64, usize> = HashMap::new();
        load.queue.iter().for_each(|(key, line)| *waiting.entry(key.tenant).or_default() += line.len());
        let mut waiting: Vec<_> = waiting.into_iter().collect();
        waiting.sort_by_key(|(tenant, waiting)| (Reverse(*waiting), *tenant));
        let longest =
            load.queue.iter().max_by_key(|(key, line)| (line.len(), Reverse((key.tenant, key.level))));
        Some(LoadSnapshot {
            counters: load.counters,
            waiting: load.queue.len(),
            waiting_by_tenant: waiting,
            levels: load.levels(now),
            work_per_second: load.service.rate(room.prior_rate),
            expected_seconds: longest.map_or(0.0, |(key, _)| load.expected_seconds(key, None, room, now)),
        })
    }
}

impl Load {
    /// Returns whether a tenant's limit allows a further request on engines.
    fn may_run(&self, tenant: u64) -> bool {
        self.config.may_run(tenant, &self.limits)
    }

    /// Counts a refusal. `seconds`: predicted time until the request would be admitted.
    fn refuse(&mut self, by: RefusedFor, seconds: Seconds) -> Verdict {
        let place = RefusedFor::NAMES.iter().position(|(_, each)| *each == by);
        self.counters.refused[place.expect("every reason has a name")] += 1;
        Verdict::Refused { by, retry_after_seconds: seconds.clamp(1.0, 3600.0) }
    }

    /// Returns the predicted seconds until all waiting requests of a line run, or those up to
    /// `last`.
    fn expected_seconds(&self, key: Key, last: Option<ArrivalId>, room: &Room, now: Seconds) -> Seconds {
        let first = self.queue.first(key, last);
        // How long an instance stays full is unknown; the rate of service includes it.
        let best = room.best(Fullness::Free);
        let until_room = best.map_or(0.0, |(_, wait)| (wait - self.config.room()).max(0.0));
        let (work, _) = self.queue.until(key, first, |other| self.may_run(other));
        let until_turn = until_room + work / self.service.rate(room.prior_rate);
        match self.may_run(key.tenant) {
            true => until_turn,
            // The rate is that of lines that may run.
            false => {
                let above = |other: Key| other.tenant == key.tenant && other.level > key.level;
                let own = self.queue.count(above) + first.1;
                until_turn.max(self.limits.wait_seconds(key.tenant, own, now))
            }
        }
    }
}
