//! The programs of a pool, as one process follows them, or all workers of a server together.
//!
//! With several workers, each has a copy of [`Programs`]. Each change of programs is an event in
//! the log of the board ([`crate::board::log`]). Each worker applies all events in the order of the
//! log, also its own, and takes the verdict on its own request when it applies the arrival. So all
//! copies are equal, and every rule holds over all workers as it does in one process.
//!
//! A worker that starts later, or has missed events, asks in the log for a copy. Another worker
//! answers with its programs as of this place, and the asking one applies what follows. Until then,
//! its requests belong to no program. The worker with the lowest number publishes the instances'
//! capacities and what other routers need there, and is right if two copies differ: the other
//! worker asks for a copy.
//!
//! Instances have other slots in each worker, so events name them by a hash, and the copies number
//! them in the order of the log.
use super::exchange::PeerPrograms;
use super::gaps::Finish;
use super::ledger::InstanceLedger;
use super::programs::Programs;
use super::published::Published;
use super::settings::ProgramConfig;
use super::types::{Arrival, ProgramNote, TurnId, Verdict, Work};
use crate::board::Board;
use crate::board::log::{ALL, LEFT, MOST_WORDS, Read, Record};
use crate::codec::Reader;
use crate::error::CoreError;
use crate::fleet::{Fleet, Member};
use crate::ids::{Seconds, Slot};
use hashbrown::HashMap;
use serde::{Deserialize, Serialize};
use slotmap::KeyData;
use std::collections::BTreeSet;
use std::sync::Arc;
use xxhash_rust::xxh3::xxh3_64;

// Kinds of records.
const ARRIVED: u8 = 1;
const PLACED: u8 = 2;
const ENDED: u8 = 3;
const TICK: u8 = 4;
const INSTANCE: u8 = 5;
const INSTANCE_GONE: u8 = 6;
const ASKED: u8 = 7;
const COPY: u8 = 8;
const TOO_MANY: u8 = 9;
const FINISHED: u8 = 10;
const PEERS: u8 = 11;
const PEER: u8 = 12;
const PEER_GONE: u8 = 13;

/// Words before the chain of an arrival.
const ARRIVAL_WORDS: usize = 5;
/// Words before the homes of a peer's programs.
const PEER_WORDS: usize = 4;
/// Words before the bytes of a copy.
const COPY_WORDS: usize = 3;
/// Most programs that a worker which starts later gets; those with the longest gaps end.
const MOST_COPIED: usize = 4096;
/// Time after which a worker asks another one for a copy.
const ASK_SECONDS: Seconds = 1.0;
/// Time for which a worker that got a copy learns what the caches hold: until then, the capacities
/// of the copy stay. Measurements of full caches take a window of a minute.
const LEARNING_SECONDS: Seconds = 120.0;
/// Time between two events about other routers, as between two of their messages.
const PEERS_SECONDS: Seconds = 0.1;
/// Time between two ticks of all workers together, without and with held programs.
const TICK_SECONDS: Seconds = 0.25;
const HELD_TICK_SECONDS: Seconds = 0.05;

/// Programs, alone or together with other workers.
#[derive(Clone, Debug)]
pub struct Followed {
    programs: Programs,
    /// The state of them that peer routers know.
    published: Published,
    shared: Option<Box<Shared>>,
    /// Number of [`Followed::begins`] at the last message of another router.
    applied: Option<u64>,
}

/// The part that this worker shares with the others.
#[derive(Clone, Debug)]
struct Shared {
    board: Arc<Board>,
    group: u64,
    /// Place in the log up to which this worker has read.
    at: u64,
    /// Whether it has the present state, and otherwise what it waits for.
    waits: Option<Asked>,
    /// Whether the programs were replaced by a copy since the last round.
    copied: bool,
    /// How often this worker's programs began anew or were replaced by a copy.
    begun: u64,
    /// Time of the last copy; `None`: this worker began without one.
    copied_at: Option<Seconds>,
    /// Tokens of other routers' requests outside programs on each own slot, the slots that changed
    /// since the last event about them, and the time of this event.
    peers: Vec<f64>,
    changed_peers: BTreeSet<usize>,
    peers_at: Seconds,
    common: Common,
    /// Own slots: their keys (0: no instance), and the slot of each key.
    keys: Vec<u64>,
    slots: HashMap<u64, u32>,
    words: Vec<u64>,
}

/// A request for a copy.
#[derive(Clone, Copy, Debug)]
struct Asked {
    /// Number of requests so far, and the time of the last one.
    times: u64,
    at: Seconds,
    /// Place behind the first one.
    from: u64,
}

/// Values that are equal in all workers, beside the programs.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
struct Common {
    /// Time of the latest event: events of several workers are not quite in the order of time.
    latest: Seconds,
    /// Keys of instances by their number in the copies; 0: none.
    keys: Vec<u64>,
    numbers: HashMap<u64, u32>,
    /// Place and time of the last tick, whether programs have changed since, and the digest then.
    ticked: (u64, Seconds),
    changed: bool,
    digest: u64,
}

impl Common {
    /// Returns the number of an instance.
    fn number(&self, key: u64) -> Option<Slot> {
        self.numbers.get(&key).map(|number| Slot(*number))
    }

    /// Returns the number of an instance, which may be new.
    fn number_of(&mut self, key: u64) -> Slot {
        let keys = &mut self.keys;
        Slot(*self.numbers.entry(key).or_insert_with(|| {
            let number = keys.iter().position(|known| *known == 0).unwrap_or(keys.len());
            if number == keys.len() {
                keys.push(0);
            }
            keys[number] = key;
            number as u32
        }))
    }
}

impl Followed {
    /// Follows no programs yet.
    ///
    /// # Errors
    /// `BadValue` for a setting out of its range.
    pub fn new(config: ProgramConfig) -> Result<Followed, CoreError> {
        Ok(Followed {
            programs: Programs::new(config)?,
            published: Published::default(),
            shared: None,
            applied: None,
        })
    }

    /// Returns the programs.
    pub fn programs(&self) -> &Programs {
        &self.programs
    }

    /// Changes the settings of programs that no other worker shares.
    ///
    /// # Errors
    /// `BadValue` for a setting out of its range.
    pub fn set_config(&mut self, config: ProgramConfig) -> Result<(), CoreError> {
        self.programs.set_config(config)
    }

    /// Shares the programs with the other workers from now on. `model`: a number that the routers
    /// of the same model share. Workers under other settings of programs have other programs.
    ///
    /// # Errors
    /// `BadValue` if the board has no room for a further model.
    pub fn join(&mut self, board: Arc<Board>, model: u64, fleet: &Fleet) -> Result<(), CoreError> {
        let terms = format!("{model} {} {:?}", env!("CARGO_PKG_VERSION"), self.programs.config());
        let group = board.group(xxh3_64(terms.as_bytes())).ok_or_else(|| CoreError::BadValue {
            what: "models whose programs the workers share".into(),
            got: "more than the shared memory has room for".into(),
            expected: "at most 1024 at a time".into(),
        })?;
        let mut shared = Box::new(Shared {
            at: board.log_end(),
            board,
            group,
            waits: Some(Asked { times: 0, at: f64::NEG_INFINITY, from: 0 }),
            copied: false,
            begun: 0,
            copied_at: None,
            peers: Vec::new(),
            changed_peers: BTreeSet::new(),
            peers_at: f64::NEG_INFINITY,
            common: Common::default(),
            keys: Vec::new(),
            slots: HashMap::new(),
            words: Vec::new(),
        });
        for slot in (0..fleet.slots()).filter(|slot| fleet.is_live(Slot(*slot as u32))) {
            shared.add(Slot(slot as u32), fleet);
        }
        shared.begin(&mut self.programs);
        self.shared = Some(shared);
        Ok(())
    }

    /// Ends the sharing: other workers no longer ask this one for a copy, and its requests end. Its
    /// programs begin anew. Returns false if nothing was shared.
    pub fn leave(&mut self) -> bool {
        let Some(shared) = self.shared.take() else { return false };
        let writer = shared.board.writer() as u64;
        shared.write(LEFT, shared.common.latest, &[&[writer]]);
        shared.board.end_group(shared.group);
        self.programs.begin_anew();
        true
    }

    /// Returns whether the programs are those of all workers.
    pub fn is_present(&self) -> bool {
        self.shared.as_ref().is_none_or(|shared| shared.waits.is_none())
    }

    /// Sets the hold after which a program's level rises by one.
    pub fn set_aging_seconds(&mut self, seconds: Seconds) {
        self.programs.set_aging_seconds(seconds);
    }

    /// Returns whether this process publishes the programs to other routers: one worker does.
    pub fn publishes(&self) -> bool {
        self.shared.as_ref().is_none_or(|shared| shared.leads())
    }

    /// Follows a change of the fleet.
    pub fn member(&mut self, member: Member, fleet: &Fleet) {
        match (member, &mut self.shared) {
            (Member::Added { id, .. }, Some(shared)) => shared.add(id, fleet),
            (Member::Added { .. }, None) => {}
            (Member::Removed(id), None) => self.programs.instance_removed(id),
            (Member::Removed(id), Some(shared)) => {
                let key = std::mem::take(&mut shared.keys[id.index()]);
                shared.slots.remove(&key);
                shared.changed_peers.remove(&id.index());
                if let Some(peers) = shared.peers.get_mut(id.index()) {
                    *peers = 0.0;
                }
                if shared.leads() {
                    shared.write(INSTANCE_GONE, shared.common.latest, &[&[key]]);
                }
            }
        }
    }

    /// Applies what other workers have written.
    #[inline]
    pub fn follow(&mut self, now: Seconds) {
        if let Some(shared) = &mut self.shared {
            let end = shared.board.log_end();
            if shared.at != end || shared.waits.is_some() {
                shared.follow(&mut self.programs, end, now);
            }
        }
    }

    /// Records an arriving request and decides what to do with it. While a worker waits for a copy,
    /// its requests have no turn.
    pub fn arrive(&mut self, arrival: &Arrival<'_>, now: Seconds) -> (Option<TurnId>, Verdict) {
        let Some(shared) = &mut self.shared else {
            let (turn, verdict) = self.programs.arrive(arrival, now);
            return (Some(turn), verdict);
        };
        let (session, flags) = (arrival.session.unwrap_or(0), u64::from(arrival.session.is_some()));
        let level = u64::from(arrival.level as u8) << 8;
        let flags = flags | u64::from(arrival.last) << 1 | u64::from(arrival.sheddable) << 2;
        let flags = flags | level | u64::from(arrival.prompt_tokens) << 32;
        let (weight, tokens) = (arrival.weight.to_bits(), arrival.tokens_per_block.to_bits());
        let head: [u64; ARRIVAL_WORDS] = [arrival.tenant, weight, session, flags, tokens];
        let chain = &arrival.chain[..arrival.chain.len().min(MOST_WORDS - ARRIVAL_WORDS)];
        if shared.waits.is_some() {
            return (None, Verdict::Free);
        }
        let end = shared.write(ARRIVED, now, &[&head, chain]);
        match shared.follow(&mut self.programs, end, now) {
            Some((turn, Verdict::Run(number))) => {
                (Some(turn), shared.own_slot(number).map_or(Verdict::Free, Verdict::Run))
            }
            Some((turn, verdict)) => (Some(turn), verdict),
            None => (None, Verdict::Free),
        }
    }

    /// Records that a request runs on an instance, as [`Programs::placed`]. `work`: its prefill, if
    /// it is placed first.
    pub fn placed(&mut self, turn: TurnId, instance: Slot, work: Option<Work>, now: Seconds) {
        match &self.shared {
            None => {
                if let Some(work) = work {
                    self.programs.computes(turn, work, now);
                }
                self.programs.placed(turn, instance, now);
            }
            Some(shared) => {
                let key = shared.keys.get(instance.index()).copied().unwrap_or(0);
                let Work { new_tokens, hit_tokens, seconds, hit_seconds } = work.unwrap_or_default();
                let [new, hit, seconds, cached] =
                    [new_tokens, hit_tokens, seconds, hit_seconds].map(f64::to_bits);
                let words = [turn.number(), key, new, hit, seconds, cached];
                self.write(PLACED, now, if work.is_some() { &words } else { &words[..2] });
            }
        }
    }

    /// Records the end of a request. `output_tokens`: tokens of its answer.
    pub fn ended(&mut self, turn: TurnId, output_tokens: u32, finish: Finish, now: Seconds) {
        if self.shared.is_none() {
            return self.programs.ended(turn, output_tokens, finish, now);
        }
        self.write(ENDED, now, &[turn.number(), output_tokens.into(), finish as u64]);
    }

    /// Ends the programs of a session, as [`Programs::finish_session`]. Returns how many had not
    /// ended.
    pub fn finish_session(&mut self, session: u64, now: Seconds) -> usize {
        if self.shared.is_none() {
            return self.programs.finish_session(session, now);
        }
        let programs = self.programs.of_session(session).len();
        // While it waits for a copy, only other workers have its programs.
        if programs > 0 || !self.is_present() {
            self.write(FINISHED, now, &[session]);
        }
        programs
    }

    /// Runs periodic work ([`Programs::tick`]). All workers together do it as often as one alone.
    pub fn tick(&mut self, now: Seconds) {
        self.follow(now);
        let Some(shared) = &mut self.shared else { return self.programs.tick(now) };
        if shared.waits.is_some() {
            return;
        }
        if shared.leads() {
            shared.forget_instances(now);
            shared.write_peers(now);
        }
        let Common { ticked: (at, time), changed, digest, .. } = shared.common;
        let held = self.programs.states()[super::State::Held as usize] > 0;
        let after = if held && changed {
            0.0
        } else if held {
            HELD_TICK_SECONDS
        } else {
            TICK_SECONDS
        };
        if now - time >= after {
            self.write(TICK, now, &[at, digest]);
        }
    }

    /// Takes this worker's requests that were held and may run now.
    pub fn released(&mut self) -> Vec<TurnId> {
        self.programs.released()
    }

    /// Takes the held requests that were refused, with the seconds after which their clients may
    /// try again. They have ended.
    pub fn refused(&mut self) -> Vec<(TurnId, Seconds)> {
        self.programs.refused()
    }

    /// Takes whether the programs were replaced by a copy, so that requests may be gone.
    pub fn take_copied(&mut self) -> bool {
        self.shared.as_mut().is_some_and(|shared| std::mem::take(&mut shared.copied))
    }

    /// Returns whether a request is known.
    pub fn knows(&self, turn: TurnId) -> bool {
        self.programs.turns.contains_key(turn)
    }

    /// Returns the instance on which a request may run.
    pub fn assigned(&self, turn: TurnId) -> Option<Slot> {
        let number = self.programs.assigned(turn)?;
        self.shared.as_ref().map_or(Some(number), |shared| shared.own_slot(number))
    }

    /// Returns what a decision record shows of a request's program.
    pub fn note(&self, turn: TurnId, now: Seconds) -> Option<ProgramNote> {
        self.programs.note(turn, now)
    }

    /// Returns the ledger of an instance.
    pub fn ledger(&self, id: Slot) -> Option<&InstanceLedger> {
        let number = self.shared.as_ref().map_or(Some(id), |shared| shared.number(id))?;
        self.programs.instances().get(number.index())
    }

    /// Returns whether some of `slots` instances have no ledger yet.
    pub fn lacks_instances(&self, slots: usize) -> bool {
        match &self.shared {
            None => self.programs.instances().len() < slots,
            Some(shared) => shared.waits.is_none() && shared.common.numbers.len() < shared.slots.len(),
        }
    }

    /// Sets the tokens of all other routers' requests outside programs on an instance.
    pub fn set_others_of_peers(&mut self, id: Slot, tokens: f64) {
        let Some(shared) = &mut self.shared else { return self.programs.set_others_of_peers(id, tokens) };
        if shared.peers.len() <= id.index() {
            shared.peers.resize(id.index() + 1, 0.0);
        }
        if shared.peers[id.index()] != tokens {
            shared.peers[id.index()] = tokens;
            shared.changed_peers.insert(id.index());
        }
    }

    /// Returns the tokens of these routers' requests outside programs on an instance, for others.
    pub fn others_on(&self, id: Slot) -> f64 {
        self.ledger(id).filter(|_| self.publishes()).map_or(0.0, |ledger| ledger.parts().2)
    }

    /// Enters the programs as a version for other routers. `oldest`: oldest version that a message
    /// can still change.
    pub fn enter(&mut self, version: u64, oldest: u64) {
        let on = self.publishes();
        self.published.enter(&mut self.programs, version, oldest, on);
    }

    /// Returns the number of programs that changed since a version of [`Followed::enter`]; `None`:
    /// all.
    pub fn count_since(&self, base: Option<u64>) -> usize {
        self.published.count_since(base)
    }

    /// Returns the programs that changed since a version of [`Followed::enter`]; `None`: all. If
    /// they need more than `bytes`, the latest changes.
    pub fn since(&self, base: Option<u64>, bytes: usize, fleet: &Fleet, now: Seconds) -> PeerPrograms {
        self.published.since(&self.programs, base, bytes, now, |number| {
            let id = self.shared.as_ref().map_or(Some(number), |shared| shared.own_slot(number))?;
            fleet.is_live(id).then(|| (&**fleet.name(id)).into())
        })
    }

    /// Returns a number that changes if the programs begin anew or become a copy; `None`: this
    /// worker applies no messages of other routers.
    fn begins(&self) -> Option<u64> {
        self.shared.as_ref().map_or(Some(0), |shared| shared.leads().then_some(shared.begun))
    }

    /// Returns whether programs of other routers may be missing, because this worker did not apply
    /// an earlier message or began anew since. Each router's next message must have all programs.
    pub fn lacks_peers(&mut self) -> bool {
        let begins = self.begins();
        std::mem::replace(&mut self.applied, begins) != begins && begins.is_some()
    }

    /// Applies the programs of another router. `whole`: all its programs are in the message.
    pub fn hear(&mut self, router: &str, told: &PeerPrograms, whole: bool, fleet: &Fleet, now: Seconds) {
        let router = xxh3_64(router.as_bytes());
        let ids = told.instances.iter().map(|name| fleet.get(name));
        let Some(shared) = &self.shared else {
            let homes: Vec<Option<Slot>> = ids.collect();
            return self.programs.hear(router, told, &homes, whole, now);
        };
        if !shared.leads() {
            return; // the worker that leads writes it to the log
        }
        let key = |id: Option<Slot>| shared.keys.get(id?.index()).copied();
        let homes: Vec<u64> = ids.map(|id| key(id).unwrap_or(0)).collect();
        let mut bytes = Vec::new();
        told.encode(&mut bytes);
        let head: [u64; PEER_WORDS] = [router, whole.into(), homes.len() as u64, bytes.len() as u64];
        let words = [&head[..], &homes, &words_of(bytes)].concat();
        if words.len() <= MOST_WORDS {
            self.write(PEER, now, &words);
        }
    }

    /// Drops the programs of all other routers but those with a message in the last `seconds`.
    pub fn keep_peers<'a>(&mut self, names: impl Iterator<Item = &'a str>, seconds: Seconds, now: Seconds) {
        // A worker with a new copy has not had time for a message of each router.
        let is_new = |shared: &Shared| shared.copied_at.is_some_and(|at| now - at < seconds);
        if self.shared.as_ref().is_some_and(|shared| !shared.leads() || is_new(shared)) {
            return;
        }
        let kept: Vec<u64> = names.map(|name| xxh3_64(name.as_bytes())).collect();
        let peers = self.programs.peers.keys().copied();
        let gone: Vec<u64> = peers.filter(|router| !kept.contains(router)).collect();
        for router in gone {
            match &self.shared {
                None => self.programs.forget_peer(router, now),
                Some(_) => self.write(PEER_GONE, now, &[router]),
            }
        }
    }

    /// Ends this worker's requests that are unknown to it: a copy may have requests whose arrival
    /// this worker never applied.
    pub fn end_unknown(&mut self, is_known: impl Fn(TurnId) -> bool, now: Seconds) {
        let Some(shared) = self.shared.as_ref().filter(|shared| shared.waits.is_none()) else { return };
        let own = self.programs.turns_of(shared.board.writer() as u8);
        for turn in own.into_iter().filter(|turn| !is_known(*turn)) {
            self.write(ENDED, now, &[turn.number(), 0, Finish::Unknown as u64]);
        }
    }

    /// Sets the capacity of an instance and whether it takes new requests.
    pub fn set_instance(&mut self, id: Slot, capacity: Option<f64>, available: bool, now: Seconds) {
        let Some(shared) = &self.shared else {
            return self.programs.set_instance(id, capacity, available);
        };
        let key = shared.keys.get(id.index()).copied().unwrap_or(0);
        if key == 0 || shared.waits.is_some() {
            return;
        }
        let ledger = self.ledger(id);
        let is_learning = shared.copied_at.is_some_and(|at| now - at < LEARNING_SECONDS);
        let copied = ledger.and_then(|ledger| ledger.capacity_tokens).filter(|_| is_learning);
        let capacity = copied.or(capacity);
        let is_new = ledger.is_none_or(|ledger| ledger.capacity_tokens.is_none() && capacity.is_some());
        let is_other =
            ledger.is_none_or(|ledger| (ledger.capacity_tokens, ledger.available) != (capacity, available));
        // Before the first request, the tokens of a block are unknown.
        let is_guess = self.programs.tokens_per_block() <= 0.0;
        if is_new || (is_other && (is_guess || shared.leads())) {
            let flags = u64::from(capacity.is_some()) | u64::from(available) << 1;
            self.write(INSTANCE, now, &[key, capacity.unwrap_or(0.0).to_bits(), flags]);
        }
    }

    /// Writes an event of this worker, and applies all events up to it.
    fn write(&mut self, kind: u8, now: Seconds, words: &[u64]) {
        if let Some(shared) = &mut self.shared {
            let end = shared.write(kind, now, &[words]);
            shared.follow(&mut self.programs, end, now);
        }
    }
}

impl Shared {
    /// Adds an own instance.
    fn add(&mut self, id: Slot, fleet: &Fleet) {
        let key = fleet.name_hashes()[id.index()].max(1);
        self.keys.resize(fleet.slots().max(self.keys.len()), 0);
        self.keys[id.index()] = key;
        self.slots.insert(key, id.0);
    }

    /// Returns the number of an own instance in the copies.
    fn number(&self, id: Slot) -> Option<Slot> {
        self.common.number(*self.keys.get(id.index())?)
    }

    /// Returns the own slot of an instance, if this worker has it.
    fn own_slot(&self, number: Slot) -> Option<Slot> {
        let key = self.common.keys.get(number.index())?;
        self.slots.get(key).map(|slot| Slot(*slot))
    }

    /// Returns whether this worker is the one with the lowest number.
    fn leads(&self) -> bool {
        self.waits.is_none()
            && self.board.members(self.group).trailing_zeros() as usize == self.board.writer()
    }

    fn write(&self, kind: u8, now: Seconds, parts: &[&[u64]]) -> u64 {
        self.board.append(self.group, kind, now, parts)
    }

    /// Publishes which instances are gone.
    fn forget_instances(&self, now: Seconds) {
        let gone = self.common.keys.iter().filter(|key| **key != 0 && !self.slots.contains_key(*key));
        gone.for_each(|key| _ = self.write(INSTANCE_GONE, now, &[&[*key]]));
    }

    /// Publishes the needs of other routers' requests on the instances with new ones.
    fn write_peers(&mut self, now: Seconds) {
        if self.changed_peers.is_empty() || now - self.peers_at < PEERS_SECONDS {
            return;
        }
        self.peers_at = now;
        for slot in std::mem::take(&mut self.changed_peers) {
            let key = self.keys.get(slot).copied().unwrap_or(0);
            if key == 0 {
                continue;
            }
            self.write(PEERS, now, &[&[key, self.peers[slot].to_bits()]]);
        }
    }

    /// Begins without programs if no other worker has any. Returns whether it does.
    fn begin(&mut self, programs: &mut Programs) -> bool {
        let Some(end) = self.board.found(self.group) else { return false };
        programs.begin_anew();
        (self.at, self.waits, self.common, self.copied) = (end, None, Common::default(), true);
        self.copied_at = None;
        self.begun += 1;
        let needed = |(_, tokens): &(usize, &f64)| **tokens != 0.0;
        self.changed_peers = self.peers.iter().enumerate().filter(needed).map(|(slot, _)| slot).collect();
        true
    }

    /// Asks the other workers for a copy, if there are any.
    fn ask(&mut self, programs: &mut Programs, now: Seconds) {
        if self.begin(programs) {
            return;
        }
        let Some(asked) = &mut self.waits else { return };
        let end = self.board.append(self.group, ASKED, now, &[&[asked.times]]);
        if asked.times == 0 {
            (self.at, asked.from) = (end, end);
        }
        (asked.times, asked.at) = (asked.times + 1, now);
    }

    /// Gives up its copy, which has missed events or differs.
    fn give_up(&mut self) {
        self.board.leave(self.group);
        self.waits = Some(Asked { times: 0, at: f64::NEG_INFINITY, from: 0 });
    }

    /// Applies the events up to a place. Returns the result if the last one is an arrival.
    fn follow(&mut self, programs: &mut Programs, until: u64, now: Seconds) -> Option<(TurnId, Verdict)> {
        let mut last = None;
        loop {
            if self.waits.is_some_and(|asked| now - asked.at >= ASK_SECONDS) {
                self.ask(programs, now);
            }
            if self.at >= until {
                return last;
            }
            let mut words = std::mem::take(&mut self.words);
            match self.board.read_log(self.at, &mut words) {
                Read::Record(record) => {
                    self.at = record.next;
                    last = match self.waits {
                        _ if record.group != self.group && record.group != ALL => None,
                        Some(asked) => {
                            self.receive(programs, &record, &words, asked);
                            None
                        }
                        None => self.apply(programs, &record, &words),
                    };
                }
                Read::End => self.at = until,
                Read::Lost => self.give_up(),
            }
            self.words = words;
        }
    }

    /// Reads on until the copy comes.
    fn receive(&mut self, programs: &mut Programs, record: &Record, words: &[u64], asked: Asked) {
        match (record.kind, words) {
            // Too many programs: all workers have dropped some of them.
            (TOO_MANY, [to, ..]) if *to == self.board.writer() as u64 => self.ask(programs, record.now),
            (COPY, [to, place, length, rest @ ..])
                if *to == self.board.writer() as u64 && *place >= asked.from =>
            {
                let bytes = bytes_of(rest, *length as usize);
                let copy: Result<(Common, Programs), _> = ciborium::from_reader(&*bytes);
                let Ok((common, copy)) = copy else { return };
                self.common = common;
                programs.become_copy(copy);
                self.board.enter(self.group);
                (self.at, self.waits, self.copied) = (*place, None, true);
                self.copied_at = Some(record.now);
                self.begun += 1;
                programs.release_again(self.board.writer() as u8);
            }
            _ => {}
        }
    }

    fn apply(
        &mut self,
        programs: &mut Programs,
        record: &Record,
        words: &[u64],
    ) -> Option<(TurnId, Verdict)> {
        let common = &mut self.common;
        common.latest = common.latest.max(record.now);
        let (now, worker) = (common.latest, record.writer as u8);
        let is_tick = record.kind == TICK;
        common.changed |= !is_tick;
        match (record.kind, words) {
            (ARRIVED, [tenant, weight, session, flags, tokens, chain @ ..]) => {
                let arrival = Arrival {
                    chain,
                    prompt_tokens: (flags >> 32) as u32,
                    tokens_per_block: f64::from_bits(*tokens),
                    session: (flags & 1 != 0).then_some(*session),
                    tenant: *tenant,
                    weight: f64::from_bits(*weight),
                    level: (flags >> 8) as u8 as i8,
                    last: flags & 2 != 0,
                    sheddable: flags & 4 != 0,
                    worker,
                };
                return Some(programs.arrive(&arrival, now));
            }
            (PLACED, [turn, key, work @ ..]) => {
                let turn = turn_of(*turn);
                if let [new, hit, seconds, cached] = work {
                    let [new_tokens, hit_tokens, seconds, hit_seconds] =
                        [new, hit, seconds, cached].map(|bits| f64::from_bits(*bits));
                    let work = Work { new_tokens, hit_tokens, seconds, hit_seconds };
                    programs.computes(turn, work, now);
                }
                if *key != 0 {
                    programs.placed(turn, common.number_of(*key), now);
                }
            }
            (ENDED, [turn, tokens, finish]) => {
                let finish = Finish::NAMES.iter().find(|(_, each)| *each as u64 == *finish);
                let finish = finish.map_or(Finish::Unknown, |(_, finish)| *finish);
                programs.ended(turn_of(*turn), *tokens as u32, finish, now);
            }
            (FINISHED, [session]) => _ = programs.finish_session(*session, now),
            (INSTANCE, [key, capacity, flags]) => {
                let capacity = (flags & 1 != 0).then_some(f64::from_bits(*capacity));
                programs.set_instance(common.number_of(*key), capacity, flags & 2 != 0);
            }
            (PEERS, [key, tokens]) => {
                programs.set_others_of_peers(common.number_of(*key), f64::from_bits(*tokens));
            }
            (PEER, [router, whole, homes, length, rest @ ..]) if *homes <= rest.len() as u64 => {
                let (homes, rest) = rest.split_at(*homes as usize);
                let homes: Vec<_> = homes.iter().map(|key| common.number(*key)).collect();
                let bytes = bytes_of(rest, *length as usize);
                let Ok(told) = PeerPrograms::decode(&mut Reader(&bytes)) else { return None };
                programs.hear(*router, &told, &homes, *whole != 0, now);
            }
            (PEER_GONE, [router]) => programs.forget_peer(*router, now),
            (INSTANCE_GONE, [key]) => {
                if let Some(number) = common.numbers.remove(key) {
                    common.keys[number as usize] = 0;
                    programs.instance_removed(Slot(number));
                }
            }
            (LEFT, [writer]) => {
                for turn in programs.turns_of(*writer as u8) {
                    programs.ended(turn, 0, Finish::Unknown, now);
                }
            }
            (TICK, [at, digest]) => {
                let differs = *at == common.ticked.0 && *digest != common.digest;
                if differs && record.writer < self.board.writer() {
                    self.give_up();
                    return None;
                }
                programs.tick(now);
                (common.ticked, common.changed) = ((record.at, now), false);
                common.digest = programs.digest();
            }
            (ASKED, [times]) => {
                programs.drop_to(MOST_COPIED, now);
                programs.order_keys();
                self.answer(programs, record, *times);
            }
            (TOO_MANY, [_, most]) => programs.drop_to(*most as usize, now),
            _ => {}
        }
        None
    }

    /// Answers a worker that asks for a copy, if it is this worker's turn.
    fn answer(&self, programs: &Programs, record: &Record, times: u64) {
        let members = self.board.members(self.group) & !(1 << record.writer);
        let own = 1_u64 << self.board.writer();
        // If one does not answer, the next one is asked.
        let place = (members & (own - 1)).count_ones();
        if members & own == 0 || u64::from(place) != times % u64::from(members.count_ones()) {
            return;
        }
        let mut bytes = Vec::new();
        if ciborium::into_writer(&(&self.common, programs), &mut bytes).is_err() {
            return;
        }
        let head = [record.writer as u64, record.next, bytes.len() as u64];
        let words = words_of(bytes);
        if COPY_WORDS + words.len() <= MOST_WORDS {
            self.write(COPY, record.now, &[&head, &words]);
        } else {
            let most = programs.iter().count() as u64 / 2;
            self.write(TOO_MANY, record.now, &[&[record.writer as u64, most]]);
        }
    }
}

fn words_of(mut bytes: Vec<u8>) -> Vec<u64> {
    bytes.resize(bytes.len().next_multiple_of(8), 0);
    let word = |bytes: &[u8]| u64::from_le_bytes(bytes.try_into().expect("eight bytes"));
    bytes.chunks_exact(8).map(word).collect()
}

fn bytes_of(words: &[u64], length: usize) -> Vec<u8> {
    let mut bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    bytes.truncate(length);
    bytes
}

fn turn_of(number: u64) -> TurnId {
    KeyData::from_ffi(number).into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::board::tests::{board, memory};
    use crate::fleet::Role;
    use crate::program::ProgramMode;

    /// A worker that has just started, or has missed events, has no programs of its own.
    #[test]
    fn a_worker_that_waits_for_a_copy_ends_the_sessions_of_all() {
        let (memory, mut fleet) = (memory(), Fleet::default());
        let id = fleet.add("x", Role::Both).unwrap();
        let start = |writer: usize| {
            let config = ProgramConfig { min_tokens: 16, ..ProgramConfig::default() };
            let mut followed = Followed::new(config).unwrap();
            followed.join(Arc::new(board(&memory, writer)), 1, &fleet).unwrap();
            followed
        };
        let mut one = start(0);
        let chain: Vec<u64> = (1..=30).collect();
        let (tokens_per_block, session) = (16.0, Some(5));
        let arrival =
            Arrival { chain: &chain, prompt_tokens: 480, tokens_per_block, session, ..Arrival::default() };
        let (turn, _) = one.arrive(&arrival, 0.0);
        one.placed(turn.unwrap(), id, None, 0.0);
        one.ended(turn.unwrap(), 10, Finish::Stop, 1.0);
        assert_eq!(one.programs().states(), [0, 1, 0, 0]);
        let mut two = start(1);
        assert_eq!((two.is_present(), two.finish_session(5, 2.0)), (false, 0));
        for _ in 0..3 {
            one.follow(2.1);
            two.follow(2.1);
        }
        assert!(two.is_present());
        assert_eq!([&one, &two].map(|each| each.programs().states()), [[0, 0, 1, 0]; 2]);
    }

    #[test]
    fn all_workers_count_a_refused_sheddable_request_alike() {
        let (memory, mut fleet) = (memory(), Fleet::default());
        let id = fleet.add("x", Role::Both).unwrap();
        let mut workers = [0, 1].map(|writer| {
            let mode = ProgramMode::Admit;
            let config = ProgramConfig { mode, min_tokens: 16, ..ProgramConfig::default() };
            let mut followed = Followed::new(config).unwrap();
            followed.join(Arc::new(board(&memory, writer)), 1, &fleet).unwrap();
            followed
        });
        for _ in 0..3 {
            workers.iter_mut().for_each(|each| each.follow(0.0));
        }
        let mut arrive = |first: u64, now: f64| {
            let chain: Vec<u64> = (first..first + 30).collect();
            let (prompt_tokens, tokens_per_block, weight) = (480, 16.0, 1.0);
            let sheddable = true;
            let arrival = Arrival {
                chain: &chain,
                prompt_tokens,
                tokens_per_block,
                weight,
                sheddable,
                ..Arrival::default()
            };
            workers[0].set_instance(id, Some(500.0), true, now);
            let (turn, verdict) = workers[0].arrive(&arrival, now);
            workers[0].placed(turn.unwrap(), id, None, now);
            workers[1].follow(now);
            let counts = workers.each_ref().map(|each| {
                let counters = each.programs().counters();
                (counters.held, counters.refused, each.programs().states())
            });
            (verdict, counts)
        };
        assert_eq!(arrive(1, 0.0).1, [(0, 0, [1, 0, 0, 0]); 2]);
        let (verdict, counts) = arrive(1000, 1.0);
        assert!(matches!(verdict, Verdict::Refused { .. }), "{verdict:?}");
        assert_eq!(counts, [(0, 1, [1, 0, 0, 0]); 2]);
    }
}
