//! One source in the feed's thread: its stream, its applier, and its connection for replays.
use crate::apply::{Applier, Tally};
use crate::connection::{CHUNK_BYTES, Dial, End, Endpoint, Event, Net};
use crate::event::moment_of;
use crate::load::{Load, read_load, read_load_event};
use crate::status::Status;
use crate::stream::{HELD_BYTES, Sink, Standing, Stream};
use crate::weights::NewWeights;
use crate::zmtp::{MAX_MESSAGE_BYTES, Talk};
use lmetric_core::CoreError;
use lmetric_core::feed::{KvFeed, Source as Origin};
use lmetric_core::router::ledger::Report;
use parking_lot::Mutex;
use std::net::SocketAddr;
use std::sync::{Arc, OnceLock};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

/// Maximum number of messages read from one socket before the next socket has its turn.
pub const RUN: usize = 64;
/// Work of a source in one turn, in steps ([`crate::event::Batch::steps`]). After it, the next
/// source has its turn: about 30 ms. The last batch of a turn may take [`crate::event::MAX_STEPS`].
pub const TURN_STEPS: u64 = 1 << 15;
/// Bytes of a message that count as one step, so that reading it alone has its cost.
const BYTES_PER_STEP: usize = 1024;
/// Steps of a read from a replay's connection, so that a turn has as many as of another connection.
const READ_STEPS: u64 = TURN_STEPS / RUN as u64;
/// Bytes of a replay that wait in the feed. Publishers drop messages of a replay that they cannot
/// send at once.
const REPLAY_BYTES: usize = 8 << 20;
/// Maximum bytes of one source's messages. They wait in its connection (two, at an address that
/// engines connect to), in the connection for replays, and in the stream while a replay runs. A
/// buffer that grows takes up to twice what it holds.
pub const MAX_SOURCE_BYTES: usize =
    2 * (2 * (MAX_MESSAGE_BYTES + CHUNK_BYTES) + REPLAY_BYTES + CHUNK_BYTES) + HELD_BYTES;
/// Time for which a source is ignored after it has exceeded a limit, in seconds. Doubles each time.
const REST_SECONDS: f64 = 60.0;
const MAX_REST_SECONDS: f64 = 3600.0;
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
    /// The replay's connection may hold more messages without a new signal.
    more: bool,
    /// Epoch of the index in which the applied batches are known.
    epoch: u64,
    hands: Hands,
}

/// Applier and replay connection that a stream uses.
struct Hands {
    applier: Applier,
    line: Line,
    new_weights: NewWeights,
    /// The applier's steps at the start of the turn, and the steps of reading since then.
    began: u64,
    read: u64,
}

/// Connection for replay requests.
pub struct Line {
    /// Address for replay requests, if there is one.
    pub endpoint: Option<Endpoint>,
    /// Connection of the request in progress.
    pub dial: Option<Dial>,
    /// Services for its connection.
    pub net: Arc<Net>,
    /// Token that the socket signals.
    pub id: usize,
}

impl Sink for Hands {
    fn apply(&mut self, batch: &[u8]) -> bool {
        self.applier.apply(batch)
    }

    fn clear(&mut self) {
        self.applier.clear();
        // The stream also clears if it cannot see whether the engine restarted.
        self.applier.forget_groups();
    }

    fn note_restart(&mut self) {
        // The new process has no block of old weights, and maybe another clock.
        self.new_weights = NewWeights::default();
        self.applier.set_old_before(None);
    }

    fn ask(&mut self, from: u64) {
        // Each request has its own connection, so every message on it answers this request.
        let Line { endpoint, dial, id, .. } = &mut self.line;
        match dial {
            Some(dial) => dial.say(Talk::Ask(from)),
            None => *dial = endpoint.clone().map(|endpoint| Dial::new(endpoint, Talk::Ask(from), *id)),
        }
    }

    fn is_spent(&self) -> bool {
        self.applier.steps() - self.began + self.read >= TURN_STEPS
    }
}

impl Hands {
    fn begin_turn(&mut self) {
        (self.began, self.read) = (self.applier.steps(), 0);
    }

    /// Counts the reading of a message.
    fn spend(&mut self, frames: &[&[u8]]) {
        let bytes: usize = frames.iter().map(|frame| frame.len()).sum();
        self.read += 1 + (bytes / BYTES_PER_STEP) as u64;
    }
}

impl Blocks {
    /// Creates the stream of a rank's events.
    pub fn new(applier: Applier, line: Line, epoch: u64) -> Blocks {
        Blocks {
            epoch,
            stream: Stream::new(line.endpoint.is_some()),
            more: false,
            hands: Hands { applier, line, new_weights: NewWeights::default(), began: 0, read: 0 },
        }
    }

    /// Handles messages of an answer until the turn is spent.
    fn hear_replay(&mut self, now: f64) {
        if let Some(dial) = &mut self.hands.line.dial {
            dial.read_ahead(REPLAY_BYTES);
        }
        self.more = true;
        while !self.hands.is_spent() {
            // The stream may replace the connection by another request's, or close it.
            let net = self.hands.line.net.clone();
            let Some(mut dial) = self.hands.line.dial.take() else { break };
            match dial.next(&net, now) {
                Event::Message => {}
                // Another process may answer a second time: the stream asks anew.
                Event::Ended(End::Lost) => break,
                Event::Ended(End::Broken(reason)) => {
                    self.hands.applier.tally_mut().last_error = Some(format!("replay: {reason}"));
                    break;
                }
                event => {
                    self.hands.line.dial = Some(dial);
                    match event {
                        Event::Idle => break,
                        // Commands without end have their cost, too.
                        Event::Busy => self.hands.read += READ_STEPS,
                        _ => self.hands.spend(&[]),
                    }
                    continue;
                }
            }
            let frames = dial.message();
            self.hands.spend(&frames);
            // Older engines leave out the topic.
            if let [.., number, batch] = &*frames {
                match number_of(number) {
                    Some(u64::MAX) => {
                        self.stream.replay_ended(now, &mut self.hands);
                        continue;
                    }
                    Some(number) => self.stream.replayed(number, batch, now, &mut self.hands),
                    None => self.hands.applier.tally_mut().skip("malformed_message", 1),
                }
            }
            self.hands.line.dial.get_or_insert(dial);
        }
        self.more = self.hands.is_spent();
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
    /// Number of the loop's turn in which it last did something.
    turn: u64,
    /// When the source counts again, after it has exceeded a limit.
    pub rest_until: Option<f64>,
    /// Times that it has exceeded a limit.
    exceeded: i32,
}

impl Source {
    /// Creates a source without messages. `status` holds its rank and topic.
    pub fn new(id: usize, instance: String, kind: Kind, status: Status) -> Source {
        let (topic, rank) = (status.topic.clone().into_bytes(), status.rank);
        let shown = Arc::new(Mutex::new(status.clone()));
        Source { id, instance, rank, topic, kind, shown, status, turn: 0, rest_until: None, exceeded: 0 }
    }

    /// Begins a turn of the loop, unless it has begun.
    fn enter(&mut self, turn: u64) {
        if let (true, Kind::Blocks(blocks)) = (self.turn != turn, &mut self.kind) {
            blocks.hands.begin_turn();
        }
        self.turn = turn;
    }

    /// Returns whether the source has spent its turn.
    pub fn is_spent(&self) -> bool {
        matches!(&self.kind, Kind::Blocks(blocks) if blocks.hands.is_spent())
    }

    /// Ignores the source for a while if a batch has exceeded a limit, or for `reason`. Returns
    /// whether it did.
    pub fn rest_if_over_limit(&mut self, reason: Option<&str>, now: f64) -> bool {
        let mut exceeded = reason.map(str::to_string);
        if let Kind::Blocks(blocks) = &mut self.kind {
            exceeded = exceeded.or_else(|| blocks.hands.applier.take_over_limit());
        }
        let Some(exceeded) = exceeded.filter(|_| self.rest_until.is_none()) else { return false };
        if let Kind::Blocks(blocks) = &mut self.kind {
            blocks.stream.disconnected();
            blocks.stream.begin_anew(now, &mut blocks.hands);
            blocks.hands.line.dial = None;
            blocks.more = false;
        }
        let seconds = (REST_SECONDS * 2f64.powi(self.exceeded.min(16))).min(MAX_REST_SECONDS);
        self.exceeded += 1;
        self.rest_until = Some(now + seconds);
        self.status.over_limit = Some(exceeded);
        true
    }

    /// Lets the source count again.
    fn end_rest(&mut self) {
        (self.rest_until, self.status.over_limit) = (None, None);
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

    /// Handles the end of one of several publishers that broke a rule.
    pub fn broken(&mut self, reason: &str) {
        self.tally_mut().last_error = Some(format!("a publisher was disconnected: {reason}"));
    }

    /// Handles the end of a connection that never spoke the protocol.
    pub fn refused(&mut self, reason: &str) {
        let refused = format!("{reason}: is this the engine's port for KV events?");
        self.tally_mut().last_error = Some(refused);
    }

    /// Handles a message: topic, number, payload.
    pub fn hear(&mut self, frames: &[&[u8]], feed: &KvFeed, turn: u64, now: f64) {
        self.enter(turn);
        if let Kind::Blocks(blocks) = &mut self.kind {
            blocks.hands.spend(frames);
        }
        if self.rest_until.is_some() {
            return;
        }
        self.status.connected = true;
        self.status.messages += 1;
        self.status.last_message_at = Some(now);
        let [_, number, payload] = frames else { return self.skip("malformed_message") };
        let Some(number) = number_of(number) else { return self.skip("malformed_message") };
        match &mut self.kind {
            Kind::Blocks(blocks) => {
                if let Some(delay) = moment_of(payload).and_then(delay_since) {
                    let least = &mut self.status.min_delay_seconds;
                    *least = Some(least.map_or(delay, |known| known.min(delay)));
                    blocks.hands.new_weights.note_delay(delay, now);
                    blocks.hands.applier.set_old_before(blocks.hands.new_weights.old_before());
                }
                blocks.stream.live(number, payload, now, &mut blocks.hands);
                // A load is complete by itself, so gaps and replays do not matter, and only live
                // batches count. The load of one of several ranks is not the instance's.
                match read_load_event(payload) {
                    Ok(Some(load)) if self.rank == 0 => self.report(load, feed, now),
                    Ok(_) => {}
                    Err(error) => self.fail("malformed_load", &error),
                }
            }
            Kind::Load => match read_load(payload) {
                Ok(load) => {
                    self.status.last_sequence = Some(number);
                    self.report(load, feed, now);
                }
                Err(error) => self.fail("malformed_message", &error),
            },
        }
    }

    /// Passes a load to the router.
    fn report(&mut self, load: Load, feed: &KvFeed, now: f64) {
        let Load { running, waiting, kv_usage, prefill_tokens } = load;
        let (waiting, running) = (Some(waiting), Some(running));
        let report = Report { at: now, waiting, running, kv_usage, prefill_tokens };
        if let Err(error) = feed.report_load(&self.instance, report) {
            let reason = match error {
                CoreError::UnknownName { .. } => "instance_gone",
                CoreError::Broken => "router_broken",
                _ => "malformed_message",
            };
            self.fail(reason, &error);
        }
    }

    fn fail(&mut self, reason: &'static str, error: &dyn std::fmt::Display) {
        let tally = self.tally_mut();
        tally.last_error = Some(error.to_string());
        tally.skip(reason, 1);
    }

    /// Handles messages of another topic.
    pub fn hear_other(&mut self, topic: &[u8], messages: usize) {
        self.status.other_topic = Some(String::from_utf8_lossy(topic).into_owned());
        self.tally_mut().skip("other_topic", messages);
    }

    fn skip(&mut self, reason: &'static str) {
        self.tally_mut().skip(reason, 1);
    }

    fn tally_mut(&mut self) -> &mut Tally {
        match &mut self.kind {
            Kind::Blocks(blocks) => blocks.hands.applier.tally_mut(),
            Kind::Load => &mut self.status.tally,
        }
    }

    /// Handles the answer to a look-up of the replay address.
    pub fn found(&mut self, addresses: &[SocketAddr], now: f64) {
        if let Kind::Blocks(blocks) = &mut self.kind {
            let Line { dial, net, .. } = &mut blocks.hands.line;
            if let Some(dial) = dial {
                dial.found(addresses, net, now);
            }
        }
    }

    /// Reads replay messages, and handles what is due.
    pub fn attend(&mut self, turn: u64, now: f64) {
        self.enter(turn);
        if self.rest_until.is_some_and(|until| now >= until) {
            self.end_rest();
        }
        if let (Kind::Blocks(blocks), None) = (&mut self.kind, self.rest_until) {
            blocks.hear_replay(now);
            blocks.stream.tick(now, &mut blocks.hands);
            if !blocks.stream.is_asking() {
                // An answer comes too late.
                blocks.hands.line.dial = None;
            }
        }
    }

    /// Returns the source of its events in the router.
    pub fn origin(&self) -> Option<Origin> {
        match &self.kind {
            Kind::Blocks(blocks) => Some(blocks.hands.applier.source()),
            Kind::Load => None,
        }
    }

    /// Starts again if the router forgot the applied batches or another instance took the name.
    /// `epoch`: of the source's instance; `None`: it is gone. Returns whether it did.
    pub fn renew(&mut self, feed: &KvFeed, epoch: Option<u64>, now: f64) -> bool {
        let Kind::Blocks(blocks) = &mut self.kind else { return false };
        let epoch = epoch.or_else(|| {
            let source = feed.source(&self.instance, self.rank).ok()?;
            blocks.hands.applier.set_source(source);
            blocks.epoch = u64::MAX; // no epoch of that instance
            feed.epochs_of(&[source])[0]
        });
        let Some(epoch) = epoch.filter(|epoch| blocks.epoch != *epoch) else { return false };
        blocks.epoch = epoch;
        blocks.stream.begin_anew(now, &mut blocks.hands);
        true
    }

    /// Forgets the applied batches, and ignores those that the engine has made before now.
    pub fn begin_new_weights(&mut self) {
        if let Kind::Blocks(blocks) = &mut self.kind {
            let Hands { applier, new_weights, .. } = &mut blocks.hands;
            new_weights.announce(unix_now());
            applier.set_old_before(new_weights.old_before());
            applier.clear();
            blocks.stream.begin_empty();
        }
    }

    /// Continues after the index was emptied in agreement with the applied batches.
    pub fn keep_up(&mut self, feed: &KvFeed) {
        if let Kind::Blocks(blocks) = &mut self.kind {
            blocks.epoch = feed.epoch_of(blocks.hands.applier.source());
        }
    }

    /// Returns when [`Source::attend`] has something to do without a signal.
    pub fn deadline(&self) -> Option<f64> {
        match &self.kind {
            _ if self.rest_until.is_some() => self.rest_until,
            Kind::Blocks(blocks) if blocks.more => Some(0.0),
            Kind::Blocks(blocks) => {
                let of_line = blocks.hands.line.dial.as_ref().and_then(Dial::deadline);
                blocks.stream.deadline().into_iter().chain(of_line).reduce(f64::min)
            }
            Kind::Load => None,
        }
    }

    /// Publishes the status for other threads.
    pub fn show(&mut self) {
        if let Kind::Blocks(blocks) = &self.kind {
            let resting = self.rest_until.is_some();
            self.status.standing = if resting { Standing::Incomplete } else { blocks.stream.standing() };
            self.status.counts = blocks.stream.counts();
            self.status.last_sequence = blocks.stream.last_sequence();
            self.status.tally.clone_from(blocks.hands.applier.tally());
        } else {
            self.status.standing = Standing::of_load(self.status.connected);
        }
        self.shown.lock().clone_from(&self.status);
    }
}

/// Returns the seconds from `moment` on the engine's clock to now on this machine's clock.
fn delay_since(moment: f64) -> Option<f64> {
    moment.is_finite().then_some(unix_now() - moment)
}

/// Returns the seconds since 1970 by this machine's clock at the first call, and steady since then.
/// If the clock is set back after an announcement of new weights, later batches are still later.
fn unix_now() -> f64 {
    static START: OnceLock<(f64, Instant)> = OnceLock::new();
    let (start, since) = START.get_or_init(|| {
        let start = SystemTime::now().duration_since(UNIX_EPOCH);
        (start.map_or(0.0, |start| start.as_secs_f64()), Instant::now())
    });
    start + since.elapsed().as_secs_f64()
}

/// Decodes a batch number from 8 big-endian bytes.
fn number_of(frame: &[u8]) -> Option<u64> {
    Some(u64::from_be_bytes(frame.try_into().ok()?))
}
