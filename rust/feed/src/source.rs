//! One source in the feed's thread: its stream, its applier, and its connection for replays.
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

/// Maximum number of messages read from one socket before the next socket has its turn.
pub const RUN: usize = 64;
/// Receive queue of a socket, in messages. Beyond it, libzmq leaves messages in the publisher's
/// queue.
const WAITING_MESSAGES: i32 = 4096;
/// Maximum size of a message in bytes. A larger message ends the connection.
const MOST_BYTES: i64 = 64 << 20;
/// A peer without a sign of life for this long is gone; libzmq answers for an idle engine.
const HEARTBEAT_MILLISECONDS: i32 = 5000;
/// Maximum number of frames kept of a message; further frames are dropped.
const MOST_FRAMES: usize = 4;

/// Kind of a subscription.
pub enum Kind {
    /// Cache events.
    Blocks(Box<Blocks>),
    /// Load reports.
    Load,
}

/// Stream of one rank's cache events.
pub struct Blocks {
    /// Stream that orders the batches.
    pub stream: Stream,
    /// The replay socket may hold more messages without a new signal.
    more: bool,
    /// Epoch of the index in which the applied batches are known.
    epoch: u64,
    hands: Hands,
}

/// Applier and replay connection that a stream uses.
struct Hands {
    applier: Applier,
    line: Line,
}

/// Connection for replay requests.
pub struct Line {
    /// ZMQ context of the sockets.
    pub context: Context,
    /// Address for replay requests, if there is one.
    pub endpoint: Option<String>,
    /// Socket of the request in progress.
    pub socket: Option<Socket>,
    /// Registry that watches the socket's descriptor.
    pub registry: Registry,
    /// Token that the descriptor signals.
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
        // Each request has its own socket, so every message on the socket answers this request.
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
    /// Creates the stream of a rank's events.
    pub fn new(applier: Applier, line: Line, epoch: u64) -> Blocks {
        Blocks {
            epoch,
            stream: Stream::new(line.endpoint.is_some()),
            more: false,
            hands: Hands { applier, line },
        }
    }

    /// Reads a limited number of messages of an answer.
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

/// A subscription to an instance.
pub struct Source {
    /// Token that the replay socket signals.
    pub id: usize,
    /// Name of the instance.
    pub instance: String,
    /// Data-parallel rank.
    pub rank: u32,
    /// Required topic of the messages; empty accepts any topic.
    pub topic: Vec<u8>,
    /// Cache events or load reports.
    pub kind: Kind,
    /// Status that other threads read.
    pub shown: Arc<Mutex<Status>>,
    status: Status,
}

impl Source {
    /// Creates a source without messages. `status` holds its rank and topic.
    pub fn new(id: usize, instance: String, kind: Kind, status: Status) -> Source {
        let (topic, rank) = (status.topic.clone().into_bytes(), status.rank);
        Source { id, instance, rank, topic, kind, shown: Arc::new(Mutex::new(status.clone())), status }
    }

    /// Handles a new connection. `bound`: any of several engines may have connected.
    pub fn connected(&mut self, bound: bool, now: f64) {
        self.status.connected = true;
        self.status.connections += 1;
        if let Kind::Blocks(blocks) = &mut self.kind {
            if bound && blocks.hands.line.endpoint.is_none() {
                // The connection may be any engine's, so only the batch numbers can show a restart.
                blocks.stream.reachable();
            } else {
                blocks.stream.connected(now, &mut blocks.hands);
            }
        }
    }

    /// Handles the loss of the connection.
    pub fn disconnected(&mut self) {
        self.status.connected = false;
        if let Kind::Blocks(blocks) = &mut self.kind {
            blocks.stream.disconnected();
        }
    }

    /// Handles a message: topic, number, payload.
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

    /// Handles a message of another topic.
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

    /// Reads replay messages and checks deadlines.
    pub fn attend(&mut self, now: f64) {
        if let Kind::Blocks(blocks) = &mut self.kind {
            blocks.hear_replay(now);
            blocks.stream.tick(now, &mut blocks.hands);
        }
    }

    /// Starts again if the router forgot the applied batches or another instance took the name.
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

    /// Returns when [`Source::attend`] has something to do without a signal.
    pub fn deadline(&self) -> Option<f64> {
        match &self.kind {
            Kind::Blocks(blocks) if blocks.more => Some(0.0),
            Kind::Blocks(blocks) => blocks.stream.deadline(),
            Kind::Load => None,
        }
    }

    /// Publishes the status for other threads.
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

/// Sets the options that all sockets share.
pub fn prepare(socket: &Socket) -> zmq::Result<()> {
    socket.set_linger(0)?;
    socket.set_rcvhwm(WAITING_MESSAGES)?;
    socket.set_maxmsgsize(MOST_BYTES)?;
    socket.set_reconnect_ivl(100)?;
    socket.set_reconnect_ivl_max(2000)?;
    socket.set_heartbeat_ivl(HEARTBEAT_MILLISECONDS)?;
    socket.set_ipv6(true)
}

/// Returns the first few frames of the next message, if there is one.
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

/// Returns the seconds from `moment` on the engine's clock to now on this machine's clock.
fn delay_since(moment: f64) -> Option<f64> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).ok()?.as_secs_f64();
    moment.is_finite().then_some(now - moment)
}

/// Decodes a batch number from 8 big-endian bytes.
fn number_of(frame: &[u8]) -> Option<u64> {
    Some(u64::from_be_bytes(frame.try_into().ok()?))
}
