//! The feed's thread. It has one socket per engine, or one socket that several engines connect to.
//! It reads the sockets in turn, a few dozen messages at a time. libzmq reconnects, and its monitor
//! reports new connections.
//!
//! The thread waits on the sockets' file descriptors. Asking hundreds of sockets in turn, as
//! `zmq_poll` does, costs more than handling their messages. A descriptor signals once. So the
//! thread reads a socket until it is empty, or reads it again without waiting.
use crate::apply::Applier;
use crate::heartbeat::Heartbeat;
use crate::source::{Blocks, Kind, Line, RUN, Source, prepare, receive};
use crate::status::Status;
use crate::stream::{Counts, Standing};
use lmetric_core::CoreError;
use lmetric_core::router::feed::KvFeed;
use mio::unix::SourceFd;
use mio::{Events, Interest, Poll, Registry, Token};
use parking_lot::Mutex;
use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};
use std::thread::JoinHandle;
use std::time::Duration;
use zmq::{Context, DONTWAIT, Message, PAIR, SUB, Socket, SocketEvent};

/// Maximum number of links in one context: the context's sockets and the work of its one I/O thread
/// are limited.
const LINKS_PER_CONTEXT: usize = 128;
/// Token that the wake-up socket signals.
const WAKE: usize = 0;
/// Interval of the checks for replaced instances, in seconds.
const HOUSEKEEPING_SECONDS: f64 = 1.0;

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
            links: Vec::new(),
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
        if let Some(problem) = self.heartbeat.problem() {
            for status in &mut all {
                (status.standing, status.connected) = (Standing::Incomplete, false);
                status.tally.last_error = Some(problem.clone());
            }
        }
        all
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

/// A socket and the sources that receive from it.
struct Link {
    socket: Socket,
    monitor: Socket,
    endpoint: String,
    bound: bool,
    /// Token that both sockets' descriptors signal.
    id: usize,
    /// The socket may hold more messages without a new signal.
    pending: bool,
    connections: i64,
    sources: Vec<Source>,
}

struct Worker {
    heartbeat: Heartbeat,
    feed: Arc<KvFeed>,
    epoch: u64,
    clock: Box<dyn Fn() -> f64 + Send>,
    context: Context,
    poll: Poll,
    registry: Registry,
    /// Number of links made so far.
    made: usize,
    /// Last token given to a socket.
    ids: usize,
    links: Vec<Link>,
    wake: Socket,
    commands: Receiver<Command>,
    shown: Shown,
    looked_at: f64,
}

impl Worker {
    fn run(mut self) {
        let (mut events, mut signalled) = (Events::with_capacity(256), HashSet::new());
        loop {
            self.wait(&mut events);
            self.heartbeat.beat();
            signalled.clear();
            signalled.extend(events.iter().map(|event| event.token().0));
            while signalled.contains(&WAKE) && self.wake.recv_msg(DONTWAIT).is_ok() {}
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
            for link in &mut self.links {
                if link.pending || signalled.contains(&link.id) {
                    link.hear(&self.feed, now);
                }
                for source in &mut link.sources {
                    if signalled.contains(&source.id) || source.deadline().is_some_and(|at| now >= at) {
                        source.attend(now);
                        source.show();
                    }
                }
            }
        }
    }

    /// Waits until there is something to do.
    fn wait(&mut self, events: &mut Events) {
        let now = (self.clock)();
        let mut until = now + HOUSEKEEPING_SECONDS;
        for link in &self.links {
            let deadlines = link.sources.iter().filter_map(Source::deadline);
            until = deadlines.fold(if link.pending { now } else { until }, f64::min);
        }
        let seconds = (until - now).clamp(0.0, HOUSEKEEPING_SECONDS);
        if self.poll.poll(events, Some(Duration::from_secs_f64(seconds))).is_err() {
            events.clear(); // an interrupted wait is a short one
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
        for source in self.links.iter_mut().flat_map(|link| &mut link.sources) {
            source.renew(&self.feed, now);
            source.show();
        }
    }

    fn subscribe(&mut self, instance: String, wanted: Subscription) -> Result<(), CoreError> {
        let origin = self.feed.source(&instance, wanted.rank)?;
        let what = |what: &str| format!("{what} of {instance}");
        for endpoint in [Some(&wanted.endpoint), wanted.replay_endpoint.as_ref()].into_iter().flatten() {
            check_endpoint(&what("endpoint"), endpoint, wanted.bind && *endpoint == wanted.endpoint)?;
        }
        let same = |s: &&Source| {
            s.instance == instance && s.rank == wanted.rank && matches!(s.kind, Kind::Load) == wanted.load
        };
        if self.links.iter().flat_map(|l| &l.sources).find(same).is_some() {
            let got = format!("a second one of rank {}", wanted.rank);
            return Err(bad(&what("subscription"), got, "one for each rank: unsubscribe the other first"));
        }
        let shared = self.links.iter().position(|l| l.bound && wanted.bind && l.endpoint == wanted.endpoint);
        let topics = shared.map_or(&[][..], |at| &self.links[at].sources);
        let taken =
            |s: &Source| wanted.topic.is_empty() || s.topic.is_empty() || s.topic == wanted.topic.as_bytes();
        if topics.iter().any(taken) {
            let expected =
                "a topic for each engine that connects to one address, none of them twice or empty";
            return Err(bad(&what("topic"), format!("{:?}", wanted.topic), expected));
        }
        let link = match shared {
            Some(at) => &mut self.links[at],
            None => {
                let link = self.open(&wanted).map_err(|error| {
                    let doing = if wanted.bind { "bind" } else { "connect to" };
                    let got = format!("{} ({error})", wanted.endpoint);
                    bad(
                        &what("endpoint"),
                        got,
                        &format!("an address to {doing}, such as tcp://10.0.0.7:5557"),
                    )
                })?;
                self.links.push(link);
                self.links.last_mut().expect("just added")
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
            last_sequence: None,
            other_topic: None,
            counts: Counts::default(),
            tally: Default::default(),
        };
        let mut source = Source::new(id, instance.clone(), kind, status);
        if link.connections > 0 {
            source.connected(link.bound, (self.clock)());
        }
        self.shown.lock().entry(instance).or_default().push(source.shown.clone());
        link.sources.push(source);
        Ok(())
    }

    fn open(&mut self, wanted: &Subscription) -> zmq::Result<Link> {
        if self.made > 0 && self.made.is_multiple_of(LINKS_PER_CONTEXT) {
            self.context = Context::new();
        }
        let (socket, monitor) = (self.context.socket(SUB)?, self.context.socket(PAIR)?);
        prepare(&socket)?;
        // Subscribe to all topics, so that messages with another topic are reported, not lost
        // silently.
        socket.set_subscribe(b"")?;
        let said_at = format!("inproc://monitor-{}", self.made);
        let events = SocketEvent::HANDSHAKE_SUCCEEDED.to_raw() | SocketEvent::DISCONNECTED.to_raw();
        socket.monitor(&said_at, events.into())?;
        monitor.set_linger(0)?;
        monitor.connect(&said_at)?;
        match wanted.bind {
            true => socket.bind(&wanted.endpoint)?,
            false => socket.connect(&wanted.endpoint)?,
        }
        self.made += 1;
        let (endpoint, bound) = (wanted.endpoint.clone(), wanted.bind);
        self.ids += 1;
        for socket in [&socket, &monitor] {
            watch(&self.registry, socket, self.ids).map_err(|_| zmq::Error::EMFILE)?;
        }
        Ok(Link {
            socket,
            monitor,
            endpoint,
            bound,
            id: self.ids,
            pending: true,
            connections: 0,
            sources: Vec::new(),
        })
    }

    fn unsubscribe(&mut self, instance: &str) -> bool {
        let sources = || self.links.iter().flat_map(|l| &l.sources);
        let of_blocks = sources().any(|s| s.instance == instance && matches!(s.kind, Kind::Blocks(_)));
        for link in &mut self.links {
            link.sources.retain(|s| s.instance != instance);
        }
        self.links.retain(|link| !link.sources.is_empty());
        if of_blocks {
            // The index has already forgotten an instance that is gone.
            let _ = self.feed.forget(instance);
        }
        self.shown.lock().remove(instance).is_some()
    }
}

impl Link {
    /// Reads up to `RUN` messages and passes each message to its source.
    fn hear(&mut self, feed: &KvFeed, now: f64) {
        let mut messages = Vec::new();
        while messages.len() < RUN
            && let Some(frames) = receive(&self.socket)
        {
            messages.push(frames);
        }
        self.pending = messages.len() == RUN;
        // Read messages before monitor events: the monitor reports a connection before its messages
        // come.
        while let Some(frames) = receive(&self.monitor) {
            let event = frames.first().and_then(|f| f.first_chunk::<2>()).map(|f| u16::from_ne_bytes(*f));
            let stands = event == Some(SocketEvent::HANDSHAKE_SUCCEEDED.to_raw());
            self.connections += if stands { 1 } else { -1 };
            for source in &mut self.sources {
                if stands {
                    source.connected(self.bound, now);
                } else if self.connections <= 0 {
                    source.disconnected();
                }
            }
        }
        for frames in &messages {
            self.hand_on(frames, feed, now);
        }
        self.sources.iter_mut().for_each(Source::show);
    }

    fn hand_on(&mut self, frames: &[Message], feed: &KvFeed, now: f64) {
        let topic = frames.first().map_or(&[][..], |f| f);
        match self.sources.iter_mut().find(|s| s.topic.is_empty() || s.topic == topic) {
            Some(source) => source.hear(frames, feed, now),
            None => self.sources.iter_mut().for_each(|s| s.hear_other(topic)),
        }
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
