//! One source as the thread keeps it: its stream, what applies it, and the line on which it asks for the past.
use crate::apply::Applier;
use crate::event::{moment_of, read_load};
use crate::status::Status;
use crate::stream::{Sink, Stream};
use crate::subscriber::watch;
use lmetric_core::router::feed::KvFeed;
use lmetric_core::router::ledger::Report;
use mio::Registry;
use parking_lot::Mutex;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};
use zmq::{Context, DEALER, DONTWAIT, Message, Socket};

/// Messages taken from one socket before others have their turn.
pub const RUN: usize = 64;
/// Messages that wait in a socket before libzmq leaves them to the publisher's own queue.
const WAITING_MESSAGES: i32 = 4096;
/// Larger messages end the connection.
const MOST_BYTES: i64 = 64 << 20;
/// A peer that gives no sign of life for so long is gone; libzmq answers for an idle engine.
const HEARTBEAT_MILLISECONDS: i32 = 5000;
/// Frames of a message beyond these are dropped.
const MOST_FRAMES: usize = 4;

/// What a subscription is to.
pub enum Kind {
    /// Events of a cache.
    Blocks(Box<Blocks>),
    /// Load reports.
    Load,
}

/// The stream of events of one rank.
pub struct Blocks {
    /// Its order.
    pub stream: Stream,
    /// The answer may go on without a signal.
    more: bool,
    /// In which what was applied is known.
    epoch: u64,
    hands: Hands,
}

/// What a stream acts through.
struct Hands {
    applier: Applier,
    line: Line,
}

/// The line on which the past is asked for.
pub struct Line {
    /// Of the socket to come.
    pub context: Context,
    /// Where to ask.
    pub endpoint: Option<String>,
    /// While a question is open.
    pub socket: Option<Socket>,
    /// Where its descriptor is watched.
    pub registry: Registry,
    /// What that signals.
    pub id: usize,
}

impl Sink for Hands {
    fn apply(&mut self, batch: &[u8]) -> bool {
        self.applier.apply(batch)
    }

    fn clear(&mut self) {
        self.applier.clear();
    }

    fn ask(&mut self, from: u64) {
        // A socket of its own for each question: what it receives answers that one.
        let line = &mut self.line;
        line.socket = None;
        let Some(endpoint) = &line.endpoint else { return };
        let asked = line.context.socket(DEALER).and_then(|socket| {
            prepare(&socket)?;
            socket.connect(endpoint)?;
            socket.send_multipart([&[][..], &from.to_be_bytes()], DONTWAIT)?;
            watch(&line.registry, &socket, line.id).map_err(|_| zmq::Error::EMFILE)?;
            Ok(socket)
        });
        match asked {
            Ok(socket) => line.socket = Some(socket),
            Err(error) => self.applier.tally_mut().last_error = Some(format!("replay: {error}")),
        }
    }
}

impl Blocks {
    /// The stream of a rank's events.
    pub fn new(applier: Applier, line: Line, epoch: u64) -> Blocks {
        Blocks {
            epoch,
            stream: Stream::new(line.endpoint.is_some()),
            more: false,
            hands: Hands { applier, line },
        }
    }

    /// Takes some of an answer.
    fn hear_replay(&mut self, now: f64) {
        self.more = false;
        for _ in 0..4 * RUN {
            let Some(frames) = self.hands.line.socket.as_ref().and_then(receive) else { return };
            // Older engines leave out the topic.
            let [.., number, batch] = &frames[..] else { continue };
            match number_of(number) {
                Some(u64::MAX) => {
                    self.hands.line.socket = None;
                    self.stream.replay_ended(now, &mut self.hands);
                }
                Some(number) => self.stream.replayed(number, batch, now, &mut self.hands),
                None => self.hands.applier.tally_mut().skip("malformed_message", 1),
            }
        }
        self.more = true;
    }
}

/// A subscription of an instance.
pub struct Source {
    /// What its replay signals.
    pub id: usize,
    /// Whose.
    pub instance: String,
    /// Its rank.
    pub rank: u32,
    /// The topic that its messages must have; empty: any.
    pub topic: Vec<u8>,
    /// What it hears.
    pub kind: Kind,
    /// What is shown of it.
    pub shown: Arc<Mutex<Status>>,
    status: Status,
}

impl Source {
    /// A source that has heard nothing yet; `status` says whose it is.
    pub fn new(id: usize, instance: String, kind: Kind, status: Status) -> Source {
        let (topic, rank) = (status.topic.clone().into_bytes(), status.rank);
        Source { id, instance, rank, topic, kind, shown: Arc::new(Mutex::new(status.clone())), status }
    }

    /// A connection came to stand. `bound`: of one of possibly many engines.
    pub fn connected(&mut self, bound: bool, now: f64) {
        self.status.connected = true;
        self.status.connections += 1;
        if let Kind::Blocks(blocks) = &mut self.kind {
            if bound && blocks.hands.line.endpoint.is_none() {
                // It may be any engine's: the numbers alone must tell.
                blocks.stream.reachable();
            } else {
                blocks.stream.connected(now, &mut blocks.hands);
            }
        }
    }

    /// The connection is gone.
    pub fn disconnected(&mut self) {
        self.status.connected = false;
        if let Kind::Blocks(blocks) = &mut self.kind {
            blocks.stream.disconnected();
        }
    }

    /// Takes a message: topic, number, payload.
    pub fn hear(&mut self, frames: &[Message], feed: &KvFeed, now: f64) {
        self.status.connected = true;
        self.status.messages += 1;
        self.status.last_message_at = Some(now);
        let [_, number, payload] = frames else { return self.skip("malformed_message") };
        let Some(number) = number_of(number) else { return self.skip("malformed_message") };
        match &mut self.kind {
            Kind::Blocks(blocks) => {
                if let Some(delay) = moment_of(payload).and_then(delay_since) {
                    let least = &mut self.status.least_delay_seconds;
                    *least = Some(least.map_or(delay, |known| known.min(delay)));
                }
                blocks.stream.live(number, payload, now, &mut blocks.hands);
            }
            Kind::Load => match read_load(payload) {
                Ok(load) => {
                    let report = Report {
                        at: now,
                        waiting: Some(load.waiting),
                        running: Some(load.running),
                        kv_usage: load.kv_usage,
                    };
                    self.status.last_sequence = Some(number);
                    if feed.router().lock_behind().engine_report(&self.instance, report).is_err() {
                        self.skip("instance_gone");
                    }
                }
                Err(error) => {
                    self.status.tally.last_error = Some(error.to_string());
                    self.skip("malformed_message");
                }
            },
        }
    }

    /// A message of another topic came.
    pub fn hear_other(&mut self, topic: &[u8]) {
        self.status.other_topic = Some(String::from_utf8_lossy(&topic[..topic.len().min(128)]).into_owned());
        self.skip("other_topic");
    }

    fn skip(&mut self, reason: &'static str) {
        match &mut self.kind {
            Kind::Blocks(blocks) => blocks.hands.applier.tally_mut().skip(reason, 1),
            Kind::Load => self.status.tally.skip(reason, 1),
        }
    }

    /// Takes of what was asked for, and looks at the time.
    pub fn attend(&mut self, now: f64) {
        if let Kind::Blocks(blocks) = &mut self.kind {
            blocks.hear_replay(now);
            blocks.stream.tick(now, &mut blocks.hands);
        }
    }

    /// Looks whether what was applied was forgotten by the router, or the instance is another one by now.
    pub fn renew(&mut self, feed: &KvFeed, now: f64) {
        let Kind::Blocks(blocks) = &mut self.kind else { return };
        if !feed.is_current(blocks.hands.applier.source()) {
            let Ok(source) = feed.source(&self.instance, self.rank) else { return };
            blocks.hands.applier.set_source(source);
            blocks.epoch = u64::MAX; // no epoch of that instance
        }
        let epoch = feed.epoch_of(blocks.hands.applier.source());
        if blocks.epoch != epoch {
            blocks.epoch = epoch;
            blocks.stream.begin_anew(now, &mut blocks.hands);
        }
    }

    /// When [`Source::attend`] has something to do of itself.
    pub fn deadline(&self) -> Option<f64> {
        match &self.kind {
            Kind::Blocks(blocks) if blocks.more => Some(0.0),
            Kind::Blocks(blocks) => blocks.stream.deadline(),
            Kind::Load => None,
        }
    }

    /// Shows what it has come to.
    pub fn show(&mut self) {
        if let Kind::Blocks(blocks) = &self.kind {
            self.status.standing = blocks.stream.standing();
            self.status.counts = blocks.stream.counts();
            self.status.last_sequence = blocks.stream.last_sequence();
            self.status.tally.clone_from(blocks.hands.applier.tally());
        } else {
            self.status.standing = crate::stream::Standing::of_load(self.status.connected);
        }
        self.shown.lock().clone_from(&self.status);
    }
}

/// Sets what all sockets have in common.
pub fn prepare(socket: &Socket) -> zmq::Result<()> {
    socket.set_linger(0)?;
    socket.set_rcvhwm(WAITING_MESSAGES)?;
    socket.set_maxmsgsize(MOST_BYTES)?;
    socket.set_reconnect_ivl(100)?;
    socket.set_reconnect_ivl_max(2000)?;
    socket.set_heartbeat_ivl(HEARTBEAT_MILLISECONDS)?;
    socket.set_ipv6(true)
}

/// The next message, if there is one: its first few frames.
pub fn receive(socket: &Socket) -> Option<Vec<Message>> {
    let mut frames = Vec::with_capacity(3);
    loop {
        let frame = socket.recv_msg(DONTWAIT).ok()?;
        let more = frame.get_more();
        if frames.len() < MOST_FRAMES {
            frames.push(frame);
        }
        if !more {
            return Some(frames);
        }
    }
}

/// Seconds from a moment on the engine's clock to now on this machine's.
fn delay_since(moment: f64) -> Option<f64> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).ok()?.as_secs_f64();
    moment.is_finite().then_some(now - moment)
}

/// A batch's number.
fn number_of(frame: &[u8]) -> Option<u64> {
    Some(u64::from_be_bytes(frame.try_into().ok()?))
}
