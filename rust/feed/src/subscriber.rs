//! The feed's thread. It has one socket per engine, or one socket that several engines connect to.
//! It reads the sockets in turn, a few dozen messages at a time. libzmq reconnects, and its monitor
//! reports new connections.
//!
//! The thread waits on the sockets' file descriptors. Asking hundreds of sockets in turn, as
//! `zmq_poll` does, costs more than handling their messages. A descriptor signals once. So the
//! thread reads a socket until it is empty, or reads it again without waiting. A turn of the loop
//! visits only sockets with a signal, with messages left, or with something due.
//!
//! Engines are not trusted with each other's events. A source has [`crate::source::TURN_STEPS`] per
//! turn. A source that exceeds a limit is ignored for a while, and its socket is closed.
use crate::apply::Applier;
use crate::heartbeat::Heartbeat;
use crate::peers::{self, Change, Peers};
use crate::source::{Blocks, Kind, Line, MAX_MESSAGE_BYTES, RUN, Source, prepare, receive};
use crate::status::Status;
use crate::stream::{Counts, Standing};
use lmetric_core::CoreError;
use lmetric_core::router::feed::KvFeed;
use mio::unix::SourceFd;
use mio::{Events, Interest, Poll, Registry, Token};
use parking_lot::Mutex;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap, HashMap, VecDeque};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};
use std::thread::JoinHandle;
use std::time::Duration;
use zmq::{Context, DONTWAIT, PAIR, SUB, Socket};

/// Maximum number of links in one context: the context's sockets and the work of its one I/O thread
/// are limited.
const LINKS_PER_CONTEXT: usize = 128;
/// Token that the wake-up socket signals.
const WAKE: usize = 0;
/// Interval of the checks for replaced instances, in seconds.
const HOUSEKEEPING_SECONDS: f64 = 1.0;
/// Time after the end of a connection in which libzmq begins to connect again. It does not after a
/// violation of the protocol, such as a message that is too large.
const RETRY_SECONDS: f64 = 1.0;
/// Maximum number of monitor events read before the socket's messages have their turn.
const MONITOR_RUN: usize = 256;

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
    Close,
}

/// Subscriptions to engines' events, and the thread that applies them. Dropping the feed closes it.
pub struct EventFeed {
    door: Mutex<Option<Door>>,
    shown: Shown,
    heartbeat: Heartbeat,
}

struct Door {
    commands: Sender<Command>,
    wake: Socket,
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
        let context = Context::new();
        let pair = || {
            let (inside, outside) = (context.socket(PAIR)?, context.socket(PAIR)?);
            inside.bind("inproc://wake")?;
            outside.connect("inproc://wake")?;
            Ok((inside, outside))
        };
        let (inside, wake) = pair().map_err(|error: zmq::Error| refused(&error))?;
        let poll = Poll::new().and_then(|poll| {
            watch(poll.registry(), &inside, WAKE)?;
            Ok((poll.registry().try_clone()?, poll))
        });
        let (registry, poll) = poll.map_err(|error| refused(&error))?;
        let (commands, received) = channel();
        let shown = Shown::default();
        let heartbeat = Heartbeat::start();
        let worker = Worker {
            heartbeat: heartbeat.clone(),
            epoch: feed.epoch(),
            feed,
            clock: Box::new(clock),
            context,
            poll,
            registry,
            made: 0,
            ids: WAKE,
            links: HashMap::new(),
            links_of: HashMap::new(),
            link_of: HashMap::new(),
            pending: BTreeSet::new(),
            due: Deadlines::default(),
            turn: 0,
            wake: inside,
            commands: received,
            shown: shown.clone(),
            looked_at: 0.0,
        };
        let watched = heartbeat.clone();
        let work = move || watched.watch(|| worker.run());
        let thread = std::thread::Builder::new().name("lmetric-feed".into()).spawn(work);
        let thread = thread.map_err(|error| refused(&error))?;
        Ok(EventFeed { door: Mutex::new(Some(Door { commands, wake, thread })), shown, heartbeat })
    }

    /// Subscribes to a rank of an instance.
    ///
    /// # Errors
    /// `UnknownName` for the instance. `BadValue` for an invalid address or topic, an existing
    /// subscription, a closed feed, or a stopped thread.
    pub fn subscribe(&self, instance: &str, subscription: Subscription) -> Result<(), CoreError> {
        let (reply, answer) = sync_channel(1);
        self.send(Command::Subscribe(instance.to_string(), subscription, reply))?;
        answer.recv().unwrap_or_else(|_| Err(self.gone()))
    }

    /// Unsubscribes from an instance and forgets the blocks learned from its events. Returns
    /// whether there was a subscription.
    ///
    /// # Errors
    /// `BadValue` if the feed is closed or its thread has stopped.
    pub fn unsubscribe(&self, instance: &str) -> Result<bool, CoreError> {
        let (reply, answer) = sync_channel(1);
        self.send(Command::Unsubscribe(instance.to_string(), reply))?;
        answer.recv().map_err(|_| self.gone())
    }

    /// Returns the status of an instance's sources, by rank, load reports last. If the thread
    /// stopped or hangs, each source is incomplete and disconnected.
    pub fn status(&self, instance: &str) -> Vec<Status> {
        let sources = self.shown.lock().get(instance).cloned().unwrap_or_default();
        let mut all: Vec<Status> = sources.iter().map(|status| status.lock().clone()).collect();
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
        self.heartbeat.problem()
    }

    /// Returns the names of the instances with a subscription.
    pub fn instances(&self) -> Vec<String> {
        self.shown.lock().keys().cloned().collect()
    }

    /// Ends the thread and closes all sockets. The index keeps its blocks.
    pub fn close(&self) {
        let Some(door) = self.door.lock().take() else { return };
        // If the thread has already ended, the sends fail, which is fine.
        let _ = door.commands.send(Command::Close);
        let _ = door.wake.send(&b""[..], DONTWAIT);
        let _ = door.thread.join();
        self.shown.lock().clear();
    }

    fn send(&self, command: Command) -> Result<(), CoreError> {
        let door = self.door.lock();
        let door = door.as_ref().ok_or_else(closed)?;
        door.commands.send(command).map_err(|_| self.gone())?;
        // A full pipe wakes the thread as well.
        let _ = door.wake.send(&b""[..], DONTWAIT);
        Ok(())
    }
}

impl EventFeed {
    /// Returns the error for a thread that does not answer.
    fn gone(&self) -> CoreError {
        match self.heartbeat.problem() {
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

/// A socket, and the monitor of its connections.
struct Sockets {
    socket: Socket,
    monitor: Socket,
}

/// A socket and the sources that receive from it.
struct Link {
    /// `None` while its source is ignored.
    sockets: Option<Sockets>,
    endpoint: String,
    bound: bool,
    peers: Peers,
    /// When it counts as given up by libzmq, unless libzmq connects again.
    lost_at: Option<f64>,
    sources: BTreeMap<usize, Source>,
    /// Sources by their topics. A source without a topic receives all other messages.
    topics: HashMap<Vec<u8>, usize>,
    /// Sources with a changed status.
    changed: BTreeSet<usize>,
}

/// Deadlines by token. Entries whose time has changed are skipped.
#[derive(Default)]
struct Deadlines {
    heap: BinaryHeap<Reverse<(Time, usize)>>,
    set: HashMap<usize, f64>,
}

#[derive(PartialEq, PartialOrd)]
struct Time(f64);

impl Eq for Time {}

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
    context: Context,
    poll: Poll,
    registry: Registry,
    /// Number of sockets made so far.
    made: usize,
    /// Last token given to a link or a source.
    ids: usize,
    links: HashMap<usize, Link>,
    /// Links of each instance.
    links_of: HashMap<String, Vec<usize>>,
    /// Link of each source.
    link_of: HashMap<usize, usize>,
    /// Links whose sockets may hold more messages without a new signal.
    pending: BTreeSet<usize>,
    due: Deadlines,
    /// Number of turns of the loop.
    turn: u64,
    wake: Socket,
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
            while self.wake.recv_msg(DONTWAIT).is_ok() {}
            while let Ok(command) = self.commands.try_recv() {
                match command {
                    Command::Subscribe(instance, subscription, reply) => {
                        // The caller may be gone.
                        let _ = reply.send(self.subscribe(instance, subscription));
                    }
                    Command::Unsubscribe(instance, reply) => {
                        let _ = reply.send(self.unsubscribe(&instance));
                    }
                    Command::Close => return,
                }
            }
            self.keep_house();
            let now = (self.clock)();
            ready.extend(&self.pending);
            ready.extend(self.due.take(now));
            while let Some(id) = ready.pop_first() {
                self.heartbeat.beat();
                self.visit(id);
            }
        }
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

    /// Handles what has arrived, or is due, at a link or a source.
    fn visit(&mut self, id: usize) {
        let now = (self.clock)();
        let link_id = *self.link_of.get(&id).unwrap_or(&id);
        let Some(link) = self.links.get_mut(&link_id) else { return };
        if let Some(source) = link.sources.get_mut(&id) {
            source.attend(self.turn, now);
            link.changed.insert(id);
        } else {
            let more = link.hear(&self.feed, self.turn, now);
            if more {
                self.pending.insert(id)
            } else {
                self.pending.remove(&id)
            };
        }
        self.settle(link_id, now);
    }

    /// Closes or opens the socket of a link after its sources have changed, notes its deadlines,
    /// and publishes the status of its sources.
    fn settle(&mut self, id: usize, now: f64) {
        let Some(link) = self.links.get_mut(&id) else { return };
        let given_up = link.lost_at.is_some_and(|at| now >= at).then(|| {
            link.lost_at = None;
            format!(
                "its connection ended by a message of more than {MAX_MESSAGE_BYTES} bytes, or not of ZMTP"
            )
        });
        let mut changed = std::mem::take(&mut link.changed);
        if given_up.is_some() {
            changed.extend(link.sources.keys());
        }
        let sources = changed
            .iter()
            .filter_map(|id| Some(link.sources.get_mut(id)?.rest_if_over_limit(given_up.as_deref(), now)));
        // Several engines may connect to a bound socket.
        if sources.filter(|rests| *rests).count() > 0 && !link.bound {
            link.close();
            self.pending.remove(&id);
        }
        for id in changed {
            let Some(source) = link.sources.get_mut(&id) else { continue };
            self.due.set(id, source.deadline());
            source.show();
        }
        let is_open = link.sockets.is_some();
        let rests = link.sources.values().any(|source| source.rest_until.is_some());
        self.due.set(id, link.lost_at);
        if !is_open && !rests {
            self.reopen(id, now);
        }
    }

    fn reopen(&mut self, id: usize, now: f64) {
        let Some(link) = self.links.get(&id) else { return };
        let sockets = self.open(id, &link.endpoint.clone(), link.bound);
        let Some(link) = self.links.get_mut(&id) else { return };
        match sockets {
            Ok(sockets) => {
                link.sockets = Some(sockets);
                self.pending.insert(id);
            }
            // The system lacks files: try again.
            Err(_) => {
                for source in link.sources.values_mut() {
                    source.rest_until = Some(now + RETRY_SECONDS);
                    self.due.set(source.id, source.deadline());
                }
            }
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
        for endpoint in [Some(&wanted.endpoint), wanted.replay_endpoint.as_ref()].into_iter().flatten() {
            check_endpoint(&what("endpoint"), endpoint, wanted.bind && *endpoint == wanted.endpoint)?;
        }
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
                let sockets = self.open(id, &wanted.endpoint, wanted.bind).map_err(|error| {
                    let doing = if wanted.bind { "bind" } else { "connect to" };
                    let got = format!("{} ({error})", wanted.endpoint);
                    let expected = format!("an address to {doing}, such as tcp://10.0.0.7:5557");
                    bad(&what("endpoint"), got, &expected)
                })?;
                let link = Link {
                    sockets: Some(sockets),
                    endpoint: wanted.endpoint.clone(),
                    bound: wanted.bind,
                    peers: Peers::default(),
                    lost_at: None,
                    sources: BTreeMap::new(),
                    topics: HashMap::new(),
                    changed: BTreeSet::new(),
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
            let line = Line {
                context: self.context.clone(),
                endpoint: wanted.replay_endpoint.clone(),
                socket: None,
                inbox: VecDeque::new(),
                inbox_bytes: 0,
                registry: self
                    .registry
                    .try_clone()
                    .map_err(|e| bad(&what("subscription"), e, "more files"))?,
                id,
            };
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
            least_delay_seconds: None,
            over_limit: None,
            last_sequence: None,
            other_topic: None,
            counts: Counts::default(),
            tally: Default::default(),
        };
        let now = (self.clock)();
        let Some(link) = self.links.get_mut(&link_id) else { return Err(closed()) };
        let mut source = Source::new(id, instance.clone(), kind, status);
        if link.peers.connected() > 0 {
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

    /// Opens the sockets of a link.
    fn open(&mut self, id: usize, endpoint: &str, bind: bool) -> zmq::Result<Sockets> {
        if self.made > 0 && self.made.is_multiple_of(LINKS_PER_CONTEXT) {
            self.context = Context::new();
        }
        let (socket, monitor) = (self.context.socket(SUB)?, self.context.socket(PAIR)?);
        prepare(&socket)?;
        // Subscribe to all topics, so that messages with another topic are reported, not lost
        // silently.
        socket.set_subscribe(b"")?;
        let said_at = format!("inproc://monitor-{}", self.made);
        let events = peers::EVENTS.iter().fold(0, |all, event| all | event.to_raw());
        socket.monitor(&said_at, events.into())?;
        monitor.set_linger(0)?;
        monitor.connect(&said_at)?;
        match bind {
            true => socket.bind(endpoint)?,
            false => socket.connect(endpoint)?,
        }
        self.made += 1;
        for socket in [&socket, &monitor] {
            watch(&self.registry, socket, id).map_err(|_| zmq::Error::EMFILE)?;
        }
        Ok(Sockets { socket, monitor })
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
            if link.sources.is_empty() {
                self.links.remove(&id);
                self.pending.remove(&id);
                self.due.set(id, None);
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
    /// Reads messages and passes each to its source, until a source has spent its turn. Returns
    /// whether there may be more.
    fn hear(&mut self, feed: &KvFeed, turn: u64, now: f64) -> bool {
        let mut other = (Vec::new(), 0);
        let more = self.hear_some(feed, turn, now, &mut other);
        if other.1 > 0 {
            self.sources.values_mut().for_each(|source| source.hear_other(&other.0, other.1));
            self.changed.extend(self.sources.keys());
        }
        more
    }

    /// Counts messages of unknown topics in `other`, with the last one's topic.
    fn hear_some(&mut self, feed: &KvFeed, turn: u64, now: f64, other: &mut (Vec<u8>, usize)) -> bool {
        for _ in 0..RUN {
            // Read a message before monitor events: the monitor reports a connection before its
            // messages come.
            let frames = self.sockets.as_ref().and_then(|sockets| receive(&sockets.socket));
            let more = self.watch_peers(now);
            let Some(frames) = frames else { return more };
            let topic = frames.first().map_or(&[][..], |f| f);
            let id = self.topics.get(topic).or_else(|| self.topics.get(&[][..]));
            let Some(source) = id.and_then(|id| self.sources.get_mut(id)) else {
                *other = (topic[..topic.len().min(128)].to_vec(), other.1 + 1);
                continue;
            };
            source.hear(&frames, feed, turn, now);
            self.changed.insert(source.id);
            if source.is_spent() {
                return true;
            }
        }
        true
    }

    /// Reads the monitor's events. Returns whether there may be more.
    fn watch_peers(&mut self, now: f64) -> bool {
        for _ in 0..MONITOR_RUN {
            let frames = self.sockets.as_ref().and_then(|sockets| receive(&sockets.monitor));
            let Some(frames) = frames else { return false };
            let change = frames.first().and_then(|frame| self.peers.read(frame));
            let Some(change) = change else { continue };
            let left = self.peers.connected();
            for source in self.sources.values_mut() {
                match change {
                    Change::Connected => source.connected(self.bound, now),
                    Change::Lost if left == 0 => source.disconnected(),
                    Change::Refused if !self.bound => source.refused(),
                    Change::Lost | Change::Refused | Change::Retried => continue,
                }
                self.changed.insert(source.id);
            }
            self.lost_at = match change {
                Change::Lost | Change::Refused if !self.bound => Some(now + RETRY_SECONDS),
                _ => None,
            };
        }
        true
    }

    /// Closes the sockets.
    fn close(&mut self) {
        self.sockets = None;
        (self.peers, self.lost_at) = (Peers::default(), None);
        self.sources.values_mut().for_each(Source::disconnected);
    }
}

/// Registers a socket's descriptor to signal the token `id`.
pub fn watch(registry: &Registry, socket: &Socket, id: usize) -> std::io::Result<()> {
    let descriptor = socket.get_fd().map_err(|error| std::io::Error::other(error.message()))?;
    registry.register(&mut SourceFd(&descriptor), Token(id), Interest::READABLE)
}

/// Checks that libzmq can use the address.
fn check_endpoint(what: &str, endpoint: &str, bind: bool) -> Result<(), CoreError> {
    let expected = if bind {
        "an address to bind, such as tcp://*:5557 or ipc:///run/kv"
    } else {
        "an engine's address, such as tcp://10.0.0.7:5557 or ipc:///run/kv (no wildcard: that is what the engine binds)"
    };
    let known = ["tcp://", "ipc://"].iter().any(|scheme| endpoint.starts_with(scheme));
    let wild = !bind && ["://*", "://0.0.0.0:", "://[::]:"].iter().any(|w| endpoint.contains(w));
    if known && !wild && !endpoint.contains('\0') {
        return Ok(());
    }
    Err(bad(what, format!("{endpoint:?}"), expected))
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
