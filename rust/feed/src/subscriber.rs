//! The feed's thread. It has one connection per engine, or one address that several engines connect
//! to. It reads the connections in turn, a few dozen messages at a time.
//!
//! A connection signals once that there is something to read. So the thread reads it until it is
//! empty, or reads it again without waiting. A turn of the loop visits only connections with a
//! signal, with messages left, or with something due.
//!
//! Engines are not trusted with each other's events. A source has [`crate::source::TURN_STEPS`] per
//! turn. A source that exceeds a limit is ignored for a while, and its connection is closed.
use crate::apply::Applier;
use crate::connection::{Connection, Dial, End, Endpoint, Event, Listener, Net, unix_address};
use crate::fork;
use crate::heartbeat::Heartbeat;
use crate::source::{Blocks, Kind, Line, RUN, Source};
use crate::status::Status;
use crate::stream::{Counts, Standing};
use crate::zmtp::Talk;
use lmetric_core::CoreError;
use lmetric_core::feed::KvFeed;
use mio::{Events, Poll, Token, Waker};
use parking_lot::{Mutex, MutexGuard};
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap, HashMap};
use std::io::{self, ErrorKind};
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};
use std::thread::JoinHandle;
use std::time::Duration;

/// Token of the thread's waker.
const WAKE: usize = 0;
/// Interval of the checks for replaced instances, in seconds.
const HOUSEKEEPING_SECONDS: f64 = 1.0;
/// Delay before an address is bound, or a publisher accepted, once more, in seconds.
const RETRY_SECONDS: f64 = 1.0;
/// Publishers that may be connected to an address that the router binds, beside two for each
/// source: the second is the old connection of an engine that has just restarted.
const MORE_PEERS: usize = 2;
/// Connections to such an address that may wait for the end of their handshake. As many as are
/// accepted in one turn, so that each has its chance.
const MAX_STRANGERS: usize = RUN;

/// Subscription to one rank of an instance.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Subscription {
    /// Address of the events: the engine's, or with `bind` the router's.
    pub endpoint: String,
    /// Address for replays of past batches.
    pub replay_endpoint: Option<String>,
    /// Required topic of the messages; empty accepts any topic.
    pub topic: String,
    /// Whether the engine connects to the router.
    pub bind: bool,
    /// The data-parallel rank.
    pub rank: u32,
    /// Whether the messages are load reports instead of block events.
    pub load: bool,
}

type Reply = SyncSender<Result<(), CoreError>>;
type Shown = Arc<Mutex<BTreeMap<String, Vec<Arc<Mutex<Status>>>>>>;

enum Command {
    Subscribe(String, Subscription, Reply),
    Unsubscribe(String, SyncSender<bool>),
    NewWeights(Vec<String>, SyncSender<()>),
    /// Addresses of a name, for the token of a link or a source.
    Found(usize, Vec<SocketAddr>),
    Close,
}

/// Subscriptions to engines' events, and the thread that applies them. Dropping the feed closes it.
/// In a child process, where the thread does not exist, calls fail.
pub struct EventFeed {
    /// ID of the process that has the thread.
    process: u32,
    entrance: Mutex<Option<Entrance>>,
    shown: Shown,
    heartbeat: Heartbeat,
}

struct Entrance {
    commands: Sender<Command>,
    waker: Arc<Waker>,
    thread: JoinHandle<()>,
}

impl EventFeed {
    /// Starts the thread. `clock` returns seconds on the router's clock.
    ///
    /// # Errors
    /// `BadValue` if the system refuses sockets or a thread.
    pub fn start(
        feed: Arc<KvFeed>,
        clock: impl Fn() -> f64 + Send + 'static,
    ) -> Result<EventFeed, CoreError> {
        let refused = |error: &dyn std::fmt::Display| {
            bad("event feed", error, "a system with sockets and threads to spare")
        };
        let poll = Poll::new().map_err(|error| refused(&error))?;
        let waker = Waker::new(poll.registry(), Token(WAKE)).map_err(|error| refused(&error))?;
        let registry = poll.registry().try_clone().map_err(|error| refused(&error))?;
        let waker = Arc::new(waker);
        let (commands, received) = channel();
        let net = {
            let (commands, waker) = (commands.clone(), waker.clone());
            Net::new(registry, move |token, addresses| {
                // The feed may be closed.
                let _ = commands.send(Command::Found(token, addresses));
                let _ = waker.wake();
            })
        };
        let shown = Shown::default();
        let heartbeat = Heartbeat::start();
        let worker = Worker {
            heartbeat: heartbeat.clone(),
            epoch: feed.epoch(),
            feed,
            clock: Box::new(clock),
            poll,
            net: Arc::new(net),
            ids: WAKE,
            links: HashMap::new(),
            links_of: HashMap::new(),
            link_of: HashMap::new(),
            pending: BTreeSet::new(),
            due: Deadlines::default(),
            turn: 0,
            commands: received,
            shown: shown.clone(),
            looked_at: 0.0,
        };
        let watched = heartbeat.clone();
        let work = move || watched.watch(|| worker.run());
        let thread = std::thread::Builder::new().name("lmetric-feed".into()).spawn(work);
        let thread = thread.map_err(|error| refused(&error))?;
        let entrance = Mutex::new(Some(Entrance { commands, waker, thread }));
        Ok(EventFeed { process: std::process::id(), entrance, shown, heartbeat })
    }

    /// Subscribes to a rank of an instance.
    ///
    /// # Errors
    /// `UnknownName` for the instance. `BadValue` for an invalid address or topic, an existing
    /// subscription, a closed feed, a stopped thread, or a feed of another process.
    pub fn subscribe(&self, instance: &str, subscription: Subscription) -> Result<(), CoreError> {
        let (reply, answer) = sync_channel(1);
        self.send(Command::Subscribe(instance.to_string(), subscription, reply))?;
        answer.recv().unwrap_or_else(|_| Err(self.gone()))
    }

    /// Unsubscribes from an instance and forgets the blocks learned from its events. Returns
    /// whether there was a subscription.
    ///
    /// # Errors
    /// `BadValue` if the feed is closed, its thread has stopped, or another process has it.
    pub fn unsubscribe(&self, instance: &str) -> Result<bool, CoreError> {
        let (reply, answer) = sync_channel(1);
        self.send(Command::Unsubscribe(instance.to_string(), reply))?;
        answer.recv().map_err(|_| self.gone())
    }

    /// Forgets the blocks of these instances, whose engines have new weights, and ignores events
    /// that were made before now ([`crate::weights`]).
    ///
    /// # Errors
    /// `BadValue` if the feed is closed, its thread has stopped, or another process has it.
    pub fn begin_new_weights(&self, instances: Vec<String>) -> Result<(), CoreError> {
        let (reply, answer) = sync_channel(1);
        self.send(Command::NewWeights(instances, reply))?;
        answer.recv().map_err(|_| self.gone())
    }

    /// Returns the status of an instance's sources, by rank, load reports last. If the thread
    /// stopped or hangs, or another process has it, each source is incomplete and disconnected.
    pub fn status(&self, instance: &str) -> Vec<Status> {
        let shown = self.lock(&self.shown);
        let sources = shown.and_then(|shown| shown.get(instance).cloned()).unwrap_or_default();
        let locked = sources.iter().filter_map(|status| self.lock(status));
        let mut all: Vec<Status> = locked.map(|status| status.clone()).collect();
        all.sort_by_key(|status| (status.load, status.rank));
        if let Some(problem) = self.problem() {
            for status in &mut all {
                (status.standing, status.connected) = (Standing::Incomplete, false);
                status.tally.last_error = Some(problem.clone());
            }
        }
        all
    }

    /// Returns the thread's problem; `None` if it works.
    pub fn problem(&self) -> Option<String> {
        if self.is_forked() {
            return Some(format!(
                "the feed's thread is in process {}, which has forked this one: start a feed after the fork",
                self.process
            ));
        }
        self.heartbeat.problem()
    }

    /// Returns the names of the instances with a subscription.
    pub fn instances(&self) -> Vec<String> {
        self.lock(&self.shown).map_or_else(Vec::new, |shown| shown.keys().cloned().collect())
    }

    /// Ends the thread and closes all sockets. The index keeps its blocks. The feed of another
    /// process goes on there.
    pub fn close(&self) {
        let Some(entrance) = self.lock(&self.entrance).and_then(|mut entrance| entrance.take()) else {
            return;
        };
        if self.is_forked() {
            std::mem::forget(entrance); // there is no thread to join, or to read commands
            return;
        }
        // If the thread has already ended, the sends fail, which is fine.
        let _ = entrance.commands.send(Command::Close);
        let _ = entrance.waker.wake();
        let _ = entrance.thread.join();
        self.shown.lock().clear();
    }

    fn send(&self, command: Command) -> Result<(), CoreError> {
        if self.is_forked() {
            return Err(self.gone());
        }
        let entrance = self.entrance.lock();
        let entrance = entrance.as_ref().ok_or_else(closed)?;
        entrance.commands.send(command).map_err(|_| self.gone())?;
        entrance.waker.wake().map_err(|_| self.gone())
    }
}

impl EventFeed {
    /// Returns whether a fork has made this process after the feed's start.
    fn is_forked(&self) -> bool {
        self.process != std::process::id()
    }

    /// Locks a part of the feed. `None`: this process is a child, and at the fork another thread of
    /// the parent had the lock, which nobody frees here.
    fn lock<'a, T>(&self, part: &'a Mutex<T>) -> Option<MutexGuard<'a, T>> {
        if self.is_forked() { part.try_lock() } else { Some(part.lock()) }
    }

    /// Returns the error for a thread that does not answer.
    fn gone(&self) -> CoreError {
        match self.problem() {
            Some(problem) => bad("event feed", problem, "one whose thread runs"),
            None => closed(),
        }
    }
}

impl Drop for EventFeed {
    fn drop(&mut self) {
        self.close();
    }
}

fn bad(what: &str, got: impl std::fmt::Display, expected: &str) -> CoreError {
    CoreError::BadValue { what: what.into(), got: got.to_string(), expected: expected.into() }
}

fn closed() -> CoreError {
    bad("event feed", "a call after close()", "one that is open")
}

/// Source of a link's messages.
enum Door {
    /// The engine; its connection has the link's token. Closed while its source is ignored.
    Out(Dial),
    Closed,
    /// Engines that connect to the router, by their tokens.
    In(Listener, BTreeMap<usize, Connection>),
}

/// An address and the sources that receive from it.
struct Link {
    door: Door,
    endpoint: String,
    bound: bool,
    sources: BTreeMap<usize, Source>,
    /// Sources by their topics. A source without a topic receives all other messages.
    topics: HashMap<Vec<u8>, usize>,
    /// Sources with a changed status.
    changed: BTreeSet<usize>,
    /// Reason for which the sources are to be ignored for a while.
    broken: Option<String>,
}

/// Rest of the work after a visit.
#[derive(PartialEq)]
enum Left {
    Nothing,
    /// There may be more to read.
    More,
    /// The visited connection has ended.
    Gone,
}

/// Deadlines by token. Entries whose time has changed are skipped.
#[derive(Default)]
struct Deadlines {
    heap: BinaryHeap<Reverse<(Time, usize)>>,
    set: HashMap<usize, f64>,
}

#[derive(PartialEq)]
struct Time(f64);

impl Eq for Time {}

impl PartialOrd for Time {
    fn partial_cmp(&self, other: &Time) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Time {
    fn cmp(&self, other: &Time) -> std::cmp::Ordering {
        self.0.total_cmp(&other.0)
    }
}

impl Deadlines {
    /// Sets or removes the deadline of a token.
    fn set(&mut self, id: usize, at: Option<f64>) {
        let before = match at {
            Some(at) => self.set.insert(id, at),
            None => self.set.remove(&id),
        };
        if let Some(at) = at.filter(|at| before != Some(*at)) {
            self.heap.push(Reverse((Time(at), id)));
        }
    }

    /// Returns the time of the first deadline.
    fn first(&mut self) -> Option<f64> {
        while let Some(Reverse((Time(at), id))) = self.heap.peek() {
            if self.set.get(id) == Some(at) {
                return Some(*at);
            }
            self.heap.pop();
        }
        None
    }

    /// Removes and returns the tokens that are due.
    fn take(&mut self, now: f64) -> Vec<usize> {
        let mut due = Vec::new();
        while self.first().is_some_and(|at| at <= now)
            && let Some(Reverse((_, id))) = self.heap.pop()
        {
            self.set.remove(&id);
            due.push(id);
        }
        due
    }
}

struct Worker {
    heartbeat: Heartbeat,
    feed: Arc<KvFeed>,
    epoch: u64,
    clock: Box<dyn Fn() -> f64 + Send>,
    poll: Poll,
    net: Arc<Net>,
    /// Last token given to a link, a source or a publisher that has connected.
    ids: usize,
    links: HashMap<usize, Link>,
    /// Links of each instance.
    links_of: HashMap<String, Vec<usize>>,
    /// Link of each source, and of each publisher that has connected.
    link_of: HashMap<usize, usize>,
    /// Connections that may hold more messages without a new signal.
    pending: BTreeSet<usize>,
    due: Deadlines,
    /// Number of turns of the loop.
    turn: u64,
    commands: Receiver<Command>,
    shown: Shown,
    looked_at: f64,
}

impl Worker {
    fn run(mut self) {
        let mut events = Events::with_capacity(256);
        let mut ready = BTreeSet::new();
        loop {
            self.wait(&mut events);
            self.heartbeat.beat();
            self.turn += 1;
            ready.extend(events.iter().map(|event| event.token().0));
            {
                let _work = fork::work();
                self.keep_house();
            }
            let now = (self.clock)();
            ready.extend(&self.pending);
            ready.extend(self.due.take(now));
            // Callers and forks wait for the end of a visit, not of the whole turn.
            loop {
                let _work = fork::work();
                if self.obey(&mut ready) {
                    return;
                }
                let Some(id) = ready.pop_first() else { break };
                self.heartbeat.beat();
                self.visit(id);
            }
        }
    }

    /// Carries out the commands that have come. Returns whether the feed is closed.
    fn obey(&mut self, ready: &mut BTreeSet<usize>) -> bool {
        while let Ok(command) = self.commands.try_recv() {
            match command {
                Command::Subscribe(instance, subscription, reply) => {
                    // The caller may be gone.
                    let _ = reply.send(self.subscribe(instance, subscription));
                }
                Command::Unsubscribe(instance, reply) => {
                    let _ = reply.send(self.unsubscribe(&instance));
                }
                Command::NewWeights(instances, reply) => {
                    instances.iter().for_each(|instance| self.begin_new_weights(instance));
                    let _ = reply.send(());
                }
                Command::Found(id, addresses) => {
                    self.found(id, &addresses);
                    ready.insert(id);
                }
                Command::Close => return true,
            }
        }
        false
    }

    /// Waits until there is something to do.
    fn wait(&mut self, events: &mut Events) {
        let now = (self.clock)();
        let until = self.due.first().map_or(f64::INFINITY, |at| at).min(now + HOUSEKEEPING_SECONDS);
        let seconds = if self.pending.is_empty() { until - now } else { 0.0 };
        let timeout = Duration::from_secs_f64(seconds.clamp(0.0, HOUSEKEEPING_SECONDS));
        if self.poll.poll(events, Some(timeout)).is_err() {
            events.clear(); // an interrupted wait is a short one
        }
    }

    /// Handles what has arrived, or is due, at a link, a source, or a publisher that has connected.
    fn visit(&mut self, id: usize) {
        let now = (self.clock)();
        let link_id = *self.link_of.get(&id).unwrap_or(&id);
        let Some(link) = self.links.get_mut(&link_id) else { return };
        if let Some(source) = link.sources.get_mut(&id) {
            source.attend(self.turn, now);
            link.changed.insert(id);
        } else if let (Door::In(..), true) = (&link.door, id == link_id) {
            self.accept(id, now);
        } else {
            let left = link.hear(id, &self.net, &self.feed, self.turn, now);
            let deadline = link.deadline(id);
            match left {
                Left::More => self.pending.insert(id),
                Left::Nothing | Left::Gone => self.pending.remove(&id),
            };
            if left == Left::Gone {
                self.link_of.remove(&id);
            }
            self.due.set(id, deadline);
        }
        self.settle(link_id, now);
    }

    /// Accepts the publishers that wait at a link's address.
    fn accept(&mut self, link_id: usize, now: f64) {
        let Some(Link { door: Door::In(listener, peers), .. }) = self.links.get_mut(&link_id) else {
            return;
        };
        let mut again_at = None;
        self.pending.insert(link_id);
        for _ in 0..RUN {
            let id = self.ids + 1;
            let peer = match listener.accept(&self.net, id, now) {
                Ok(peer) => peer,
                // It has left the queue: others wait behind it.
                Err(error) if is_of_peer(&error) => continue,
                Err(error) => {
                    self.pending.remove(&link_id);
                    // Else the system lacks files.
                    again_at = (error.kind() != ErrorKind::WouldBlock).then_some(now + RETRY_SECONDS);
                    break;
                }
            };
            let mut strangers = peers.iter().filter(|(_, peer)| !peer.is_ready()).map(|(id, _)| *id);
            let first = strangers.next();
            if let Some(stranger) = first.filter(|_| strangers.count() + 1 >= MAX_STRANGERS) {
                // It takes the place of the first one.
                peers.remove(&stranger);
                self.link_of.remove(&stranger);
                self.pending.remove(&stranger);
                self.due.set(stranger, None);
            }
            self.ids = id;
            self.due.set(id, Some(peer.deadline()));
            peers.insert(id, peer);
            self.link_of.insert(id, link_id);
            self.pending.insert(id);
        }
        self.due.set(link_id, again_at);
    }

    /// Hands the answer to a look-up to the link or the source that asked.
    fn found(&mut self, id: usize, addresses: &[SocketAddr]) {
        let now = (self.clock)();
        let link_id = self.link_of.get(&id).unwrap_or(&id);
        let Some(link) = self.links.get_mut(link_id) else { return };
        if let Some(source) = link.sources.get_mut(&id) {
            source.found(addresses, now);
        } else if let Door::Out(dial) = &mut link.door {
            dial.found(addresses, &self.net, now);
        }
    }

    /// Closes or opens the connection of a link after its sources have changed, notes their
    /// deadlines, and publishes their status.
    fn settle(&mut self, id: usize, now: f64) {
        let Some(link) = self.links.get_mut(&id) else { return };
        let mut changed = std::mem::take(&mut link.changed);
        let broken = link.broken.take();
        if broken.is_some() {
            changed.extend(link.sources.keys());
        }
        let sources = changed
            .iter()
            .filter_map(|id| Some(link.sources.get_mut(id)?.rest_if_over_limit(broken.as_deref(), now)));
        // Several engines may connect to one address.
        if sources.filter(|rests| *rests).count() > 0 && !link.bound {
            link.close();
            self.pending.remove(&id);
            self.due.set(id, None);
        }
        for id in changed {
            let Some(source) = link.sources.get_mut(&id) else { continue };
            self.due.set(id, source.deadline());
            source.show();
        }
        let rests = link.sources.values().any(|source| source.rest_until.is_some());
        if matches!(link.door, Door::Closed)
            && !rests
            && let Some(endpoint) = Endpoint::parse(&link.endpoint, false)
        {
            link.door = Door::Out(Dial::new(endpoint, Talk::Subscribe, id));
            self.pending.insert(id);
        }
    }

    /// Checks whether the index forgot applied batches, and once a second whether instances were
    /// replaced.
    fn keep_house(&mut self) {
        let (epoch, now) = (self.feed.epoch(), (self.clock)());
        if epoch == self.epoch && (now - self.looked_at).abs() < HOUSEKEEPING_SECONDS {
            return;
        }
        (self.epoch, self.looked_at) = (epoch, now);
        let sources = || self.links.values().flat_map(|link| link.sources.values());
        let origins: Vec<_> = sources().filter_map(Source::origin).collect();
        let epochs = self.feed.epochs_of(&origins);
        let sources = self.links.values_mut().flat_map(|link| link.sources.values_mut());
        for (source, epoch) in sources.filter(|source| source.origin().is_some()).zip(epochs) {
            if source.renew(&self.feed, epoch, now) {
                self.due.set(source.id, source.deadline());
                source.show();
            }
        }
    }

    fn subscribe(&mut self, instance: String, wanted: Subscription) -> Result<(), CoreError> {
        let origin = self.feed.source(&instance, wanted.rank)?;
        let what = |what: &str| format!("{what} of {instance}");
        let endpoint = read_endpoint(&what("endpoint"), &wanted.endpoint, wanted.bind)?;
        let replay = wanted.replay_endpoint.as_ref();
        let replay = replay.map(|replay| read_endpoint(&what("endpoint"), replay, false)).transpose()?;
        let same = |s: &Source| {
            s.instance == instance && s.rank == wanted.rank && matches!(s.kind, Kind::Load) == wanted.load
        };
        let own = self.links_of.get(&instance).into_iter().flatten().filter_map(|id| self.links.get(id));
        if own.flat_map(|link| link.sources.values()).any(same) {
            let got = format!("a second one of rank {}", wanted.rank);
            return Err(bad(&what("subscription"), got, "one for each rank: unsubscribe the other first"));
        }
        let shared = |link: &Link| link.bound && wanted.bind && link.endpoint == wanted.endpoint;
        let shared = self.links.iter().find(|(_, link)| shared(link)).map(|(id, _)| *id);
        let topics = shared.and_then(|id| self.links.get(&id)).map(|link| &link.topics);
        let taken = |topics: &HashMap<Vec<u8>, usize>| {
            let [own, any] = [wanted.topic.as_bytes(), b""];
            own.is_empty() || topics.contains_key(any) || topics.contains_key(own)
        };
        if topics.is_some_and(taken) {
            let expected =
                "a topic for each engine that connects to one address, none of them twice or empty";
            return Err(bad(&what("topic"), format!("{:?}", wanted.topic), expected));
        }
        let link_id = match shared {
            Some(id) => id,
            None => {
                self.ids += 1;
                let id = self.ids;
                let door = if wanted.bind {
                    let listener = Listener::bind(&endpoint, &self.net, id).map_err(|error| {
                        let got = format!("{} ({error})", wanted.endpoint);
                        bad(&what("endpoint"), got, "an address to bind, such as tcp://*:5557")
                    })?;
                    Door::In(listener, BTreeMap::new())
                } else {
                    Door::Out(Dial::new(endpoint, Talk::Subscribe, id))
                };
                let link = Link {
                    door,
                    endpoint: wanted.endpoint.clone(),
                    bound: wanted.bind,
                    sources: BTreeMap::new(),
                    topics: HashMap::new(),
                    changed: BTreeSet::new(),
                    broken: None,
                };
                self.links.insert(id, link);
                self.pending.insert(id);
                id
            }
        };
        self.ids += 1;
        let id = self.ids;
        let kind = if wanted.load {
            Kind::Load
        } else {
            let applier = Applier::new(self.feed.clone(), origin);
            let line = Line { endpoint: replay, dial: None, net: self.net.clone(), id };
            Kind::Blocks(Box::new(Blocks::new(applier, line, self.feed.epoch_of(origin))))
        };
        let status = Status {
            load: wanted.load,
            rank: wanted.rank,
            endpoint: wanted.endpoint,
            bound: wanted.bind,
            replay_endpoint: wanted.replay_endpoint,
            topic: wanted.topic,
            standing: Standing::Connecting,
            connected: false,
            connections: 0,
            messages: 0,
            last_message_at: None,
            min_delay_seconds: None,
            over_limit: None,
            last_sequence: None,
            other_topic: None,
            counts: Counts::default(),
            tally: Default::default(),
        };
        let now = (self.clock)();
        let Some(link) = self.links.get_mut(&link_id) else { return Err(closed()) };
        let mut source = Source::new(id, instance.clone(), kind, status);
        if link.is_connected() {
            source.connected(link.bound, now);
        }
        self.shown.lock().entry(instance.clone()).or_default().push(source.shown.clone());
        link.topics.insert(source.topic.clone(), id);
        link.sources.insert(id, source);
        link.changed.insert(id);
        self.link_of.insert(id, link_id);
        self.links_of.entry(instance).or_default().push(link_id);
        self.settle(link_id, now);
        Ok(())
    }

    fn begin_new_weights(&mut self, instance: &str) {
        let ids = self.links_of.get(instance).cloned().unwrap_or_default();
        let feed = self.feed.clone();
        let mut each_source = |change: &dyn Fn(&mut Source)| {
            for id in &ids {
                let sources = self.links.get_mut(id).into_iter().flat_map(|link| link.sources.values_mut());
                sources.filter(|source| source.instance == instance).for_each(change);
            }
        };
        each_source(&Source::begin_new_weights);
        // The index has already forgotten an instance that is gone.
        let _ = feed.forget(instance);
        each_source(&|source| {
            source.keep_up(&feed);
            source.show();
        });
    }

    fn unsubscribe(&mut self, instance: &str) -> bool {
        let mut of_blocks = false;
        for id in self.links_of.remove(instance).unwrap_or_default() {
            let Some(link) = self.links.get_mut(&id) else { continue };
            link.sources.retain(|id, source| {
                if source.instance == instance {
                    of_blocks |= matches!(source.kind, Kind::Blocks(_));
                    link.topics.remove(&source.topic);
                    self.link_of.remove(id);
                    self.due.set(*id, None);
                }
                source.instance != instance
            });
            if link.sources.is_empty()
                && let Some(link) = self.links.remove(&id)
            {
                for id in [id].into_iter().chain(link.peers()) {
                    self.link_of.remove(&id);
                    self.pending.remove(&id);
                    self.due.set(id, None);
                }
            }
        }
        if of_blocks {
            // The index has already forgotten an instance that is gone.
            let _ = self.feed.forget(instance);
        }
        self.shown.lock().remove(instance).is_some()
    }
}

impl Link {
    /// Reads the messages of a connection and passes each to its source, until a source has spent
    /// its turn.
    fn hear(&mut self, id: usize, net: &Net, feed: &KvFeed, turn: u64, now: f64) -> Left {
        let mut other = (Vec::new(), 0);
        let left = self.hear_some(id, net, feed, turn, now, &mut other);
        if other.1 > 0 {
            self.sources.values_mut().for_each(|source| source.hear_other(&other.0, other.1));
            self.changed.extend(self.sources.keys());
        }
        left
    }

    /// Counts messages of unknown topics in `other`, with the last one's topic.
    fn hear_some(
        &mut self,
        id: usize,
        net: &Net,
        feed: &KvFeed,
        turn: u64,
        now: f64,
        other: &mut (Vec<u8>, usize),
    ) -> Left {
        for _ in 0..RUN {
            let event = match &mut self.door {
                Door::Out(dial) => dial.next(net, now),
                Door::In(_, peers) => peers.get_mut(&id).map_or(Event::Idle, |peer| peer.next(now)),
                Door::Closed => Event::Idle,
            };
            match event {
                Event::Idle => return Left::Nothing,
                Event::Busy => {}
                Event::Ready => {
                    let most = 2 * self.sources.len() + MORE_PEERS;
                    if let Door::In(_, peers) = &mut self.door
                        && peers.values().filter(|peer| peer.is_ready()).count() > most
                    {
                        peers.remove(&id);
                        return Left::Gone;
                    }
                    self.sources.values_mut().for_each(|source| source.connected(self.bound, now));
                    self.changed.extend(self.sources.keys());
                }
                Event::Message => {
                    let frames = match &self.door {
                        Door::Out(dial) => dial.message(),
                        Door::In(_, peers) => peers.get(&id).map(Connection::message).unwrap_or_default(),
                        Door::Closed => return Left::Nothing,
                    };
                    let topic = frames.first().map_or(&[][..], |frame| frame);
                    let source = self.topics.get(topic).or_else(|| self.topics.get(&[][..]));
                    let Some(source) = source.and_then(|source| self.sources.get_mut(source)) else {
                        *other = (topic[..topic.len().min(128)].to_vec(), other.1 + 1);
                        continue;
                    };
                    source.hear(&frames, feed, turn, now);
                    self.changed.insert(source.id);
                    if source.is_spent() {
                        return Left::More;
                    }
                }
                Event::Ended(end) => return self.ended(id, end),
            }
        }
        Left::More
    }

    /// Handles the end of a connection.
    fn ended(&mut self, id: usize, end: End) -> Left {
        if let Door::In(_, peers) = &mut self.door {
            peers.remove(&id);
        }
        let is_connected = self.is_connected();
        for source in self.sources.values_mut() {
            if let (End::Broken(reason), true) = (&end, self.bound) {
                source.broken(reason);
                self.changed.insert(source.id);
            }
            match &end {
                End::Lost | End::Broken(_) if !is_connected => source.disconnected(),
                End::Refused(reason) if !self.bound => source.refused(reason),
                _ => continue,
            }
            self.changed.insert(source.id);
        }
        match (end, self.bound) {
            (_, true) => return Left::Gone,
            (End::Broken(reason), false) => self.broken = Some(reason),
            _ => {}
        }
        Left::Nothing
    }

    /// Returns when a connection has something to do without a signal.
    fn deadline(&self, id: usize) -> Option<f64> {
        match &self.door {
            Door::Out(dial) => dial.deadline(),
            Door::In(_, peers) => Some(peers.get(&id)?.deadline()),
            Door::Closed => None,
        }
    }

    /// Returns whether a publisher is connected.
    fn is_connected(&self) -> bool {
        match &self.door {
            Door::Out(dial) => dial.is_ready(),
            Door::In(_, peers) => peers.values().any(Connection::is_ready),
            Door::Closed => false,
        }
    }

    /// Returns the tokens of the publishers that have connected.
    fn peers(&self) -> Vec<usize> {
        match &self.door {
            Door::In(_, peers) => peers.keys().copied().collect(),
            Door::Out(_) | Door::Closed => Vec::new(),
        }
    }

    /// Closes the connection.
    fn close(&mut self) {
        self.door = Door::Closed;
        self.sources.values_mut().for_each(Source::disconnected);
    }
}

/// Returns whether an error of `accept` is one of the accepted connection.
fn is_of_peer(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::ConnectionAborted | ErrorKind::Interrupted)
}

/// Reads an address.
fn read_endpoint(what: &str, endpoint: &str, bind: bool) -> Result<Endpoint, CoreError> {
    let expected = if bind {
        "an address to bind, such as tcp://*:5557 or ipc:///run/kv"
    } else {
        "an engine's address, such as tcp://10.0.0.7:5557 or ipc:///run/kv (no wildcard: that is what the engine binds)"
    };
    let wild = !bind && ["://*", "://0.0.0.0:", "://[::]:"].iter().any(|w| endpoint.contains(w));
    let is_possible = |endpoint: &Endpoint| match endpoint {
        Endpoint::Tcp(..) => true,
        Endpoint::Ipc(path) => unix_address(path).is_ok(), // not too long
    };
    let read = Endpoint::parse(endpoint, bind).filter(|_| !wild && !endpoint.contains('\0'));
    let read = read.filter(is_possible);
    read.ok_or_else(|| bad(what, format!("{endpoint:?}"), expected))
}

/// Returns the address of a data-parallel rank, given the engine's address. vLLM and SGLang add the
/// rank to the port.
///
/// # Errors
/// `BadValue` if the address has no port to add the rank to, or the sum is no port.
pub fn rank_endpoint(endpoint: &str, rank: u32) -> Result<String, CoreError> {
    if rank == 0 {
        return Ok(endpoint.to_string());
    }
    let parts = endpoint.strip_prefix("tcp://").and_then(|rest| rest.rsplit_once(':'));
    let port = parts
        .and_then(|(host, port)| Some((host, port.parse::<u16>().ok()?.checked_add(rank.try_into().ok()?)?)));
    let (host, port) = port.ok_or_else(|| {
        bad(
            "endpoint",
            format!("{endpoint:?} of rank {rank}"),
            "tcp://HOST:PORT, to whose port the rank is added",
        )
    })?;
    Ok(format!("tcp://{host}:{port}"))
}
