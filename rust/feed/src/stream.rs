//! One engine's stream of numbered batches: in order, each batch once, and known to be complete or
//! incomplete. This module does no I/O.
//!
//! Publishers number their batches from 0 and start over when they restart. Batches that no
//! subscriber receives are lost, unless the publisher can replay them. So a batch out of order is
//! held while the stream requests the batches before it. Each request starts one batch earlier than
//! needed. If that batch comes back unchanged, the same process answers. Otherwise, another process
//! answers, and its cache is empty. If the past is not available, the stream forgets everything.
//! After that, its knowledge is incomplete until the engine restarts or clears its cache. Silence
//! means nothing: engines publish only when they run a step.
use std::collections::VecDeque;
use xxhash_rust::xxh3::xxh3_64;

/// Timeout for an answer to begin or continue, in seconds. Engines answer between their steps.
const PATIENCE_SECONDS: f64 = 2.0;
/// Longest time of one attempt at a replay, in seconds. Engines keep 10,000 batches, which take
/// some seconds: an answer without an end brings no knowledge of the present.
const REPLAY_SECONDS: f64 = 60.0;
/// Attempts at a replay before the stream gives up.
const ATTEMPTS: u32 = 3;
/// Delay before the next request after the stream gave up, in seconds. An engine may be busy for
/// long while it starts, and drop what it cannot send at once.
const AGAIN_SECONDS: f64 = 30.0;
/// Time that a subscription may take to reach the publisher, in seconds. Batches published before
/// that, and after the first answer, reach no subscriber.
const SUBSCRIBED_SECONDS: f64 = 1.0;
/// Maximum number of batches, and of their bytes, held while a replay runs.
const HELD_BATCHES: usize = 8192;
pub(crate) const HELD_BYTES: usize = 8 << 20;

/// Receiver of a stream's batches and requests.
pub trait Sink {
    /// Applies a batch. Returns true if the batch cleared the whole cache.
    fn apply(&mut self, batch: &[u8]) -> bool;
    /// Forgets all applied batches.
    fn clear(&mut self);
    /// Notes that another process publishes now.
    fn note_restart(&mut self) {}
    /// Requests all batches from this number on, and cancels the previous request.
    fn ask(&mut self, from: u64);
    /// Returns whether the source has spent its turn. Held batches then wait for the next turn.
    fn is_spent(&self) -> bool {
        false
    }
}

/// Counts since the subscription.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Batches applied.
    pub batches: u64,
    /// Applied batches that came from a replay.
    pub replayed: u64,
    /// Gaps found in the batch numbers.
    pub gaps: u64,
    /// Times that everything was forgotten because batches were lost for good.
    pub resyncs: u64,
    /// Restarts of the engine.
    pub restarts: u64,
    /// Replays that were not answered.
    pub unanswered: u64,
}

/// How much of the engine's cache is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Standing {
    /// No connection, or the first replay is still running.
    Connecting,
    /// The whole cache is known.
    Live,
    /// Only blocks stored since some time are known.
    Incomplete,
}

impl Standing {
    /// Returns the standing of a source of load reports. Each report is complete by itself.
    pub fn of_load(connected: bool) -> Standing {
        if connected { Standing::Live } else { Standing::Connecting }
    }

    /// Returns the name of the standing.
    pub fn name(self) -> &'static str {
        match self {
            Standing::Connecting => "connecting",
            Standing::Live => "live",
            Standing::Incomplete => "incomplete",
        }
    }
}

/// A replay request in progress.
#[derive(Clone, Copy, Debug)]
struct Replay {
    from: u64,
    /// The replay starts at batch 0 and replaces partial knowledge.
    anew: bool,
    /// The request only checks for missed batches. Without an answer, the known blocks stay.
    check: bool,
    /// No batch of the answer has arrived.
    first: bool,
    /// A batch was missing in the answer: publishers drop messages that they cannot send at once.
    hole: bool,
    progressed: bool,
    deadline: f64,
    /// When the replay is over, even if batches still arrive.
    until: f64,
}

/// Reason to apply held batches.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Release {
    /// A replay has ended. `hole`, `progressed`: as in [`Replay`].
    Answered { hole: bool, progressed: bool },
    /// A replay was not answered, and what is known before the held batches stays.
    Unanswered,
    /// The missing batches are lost for good.
    GivenUp,
}

/// State of one engine's stream.
#[derive(Debug)]
pub struct Stream {
    can_replay: bool,
    connected: bool,
    /// Number of the next batch, if known.
    next: Option<u64>,
    /// Hash of the last applied batch.
    last: u64,
    /// Number of the last live batch on this connection.
    heard: Option<u64>,
    complete: bool,
    replay: Option<Replay>,
    attempts: u32,
    /// When to request everything again, if no answer came or its batches got lost.
    again_at: Option<f64>,
    /// When to check for missed batches, if no batch arrived on this connection.
    check_at: Option<f64>,
    held: VecDeque<(u64, Vec<u8>)>,
    held_bytes: usize,
    /// Held batches are applied, over several turns if necessary.
    release: Option<Release>,
    counts: Counts,
}

impl Stream {
    /// Creates a stream without batches. `can_replay`: past batches can be requested.
    pub fn new(can_replay: bool) -> Stream {
        Stream {
            can_replay,
            connected: false,
            next: None,
            last: 0,
            heard: None,
            complete: false,
            replay: None,
            attempts: 0,
            again_at: None,
            check_at: None,
            held: VecDeque::new(),
            held_bytes: 0,
            release: None,
            counts: Counts::default(),
        }
    }

    /// Returns the counts since the subscription.
    pub fn counts(&self) -> Counts {
        self.counts
    }

    /// Returns the number of the last applied batch.
    pub fn last_sequence(&self) -> Option<u64> {
        self.next?.checked_sub(1)
    }

    /// Returns how much of the engine's cache is known.
    pub fn standing(&self) -> Standing {
        if !self.connected || self.next.is_none() && self.replay.is_some() {
            Standing::Connecting
        } else if self.complete {
            Standing::Live
        } else {
            Standing::Incomplete
        }
    }

    /// Returns whether a replay request is in progress.
    pub fn is_asking(&self) -> bool {
        self.replay.is_some()
    }

    /// Returns when [`Stream::tick`] has something to do; 0: at once.
    pub fn deadline(&self) -> Option<f64> {
        if self.release.is_some() {
            return Some(0.0);
        }
        let check_at = self.check_at.filter(|_| self.next.is_some());
        self.replay.map(|r| r.deadline).or(self.again_at.into_iter().chain(check_at).reduce(f64::min))
    }

    /// Handles a new connection. Earlier batches may be another process's.
    pub fn connected(&mut self, now: f64, sink: &mut impl Sink) {
        self.connected = true;
        self.heard = None;
        self.let_go();
        if self.can_replay {
            self.attempts = 0;
            self.check_at = Some(now + SUBSCRIBED_SECONDS);
            self.ask(now, sink);
        } else if self.next.is_some() {
            // This may be another process, and batches may have been missed.
            self.lose(None, sink);
        }
    }

    /// Handles a new connection of an unknown engine.
    pub fn reachable(&mut self) {
        self.connected = true;
    }

    /// Handles the loss of the connection.
    pub fn disconnected(&mut self) {
        self.connected = false;
        self.check_at = None;
    }

    /// Starts again after the index forgot the applied batches.
    pub fn begin_anew(&mut self, now: f64, sink: &mut impl Sink) {
        (self.next, self.complete, self.replay) = (None, false, None);
        self.let_go();
        sink.clear();
        if self.can_replay && self.connected {
            self.attempts = 0;
            self.ask(now, sink);
        }
    }

    /// Handles new weights: the blocks of the applied batches count no more, so those of the next
    /// batches are all that count.
    pub fn begin_empty(&mut self) {
        if self.next.is_some() && self.replay.is_none() {
            (self.complete, self.again_at) = (true, None);
        }
    }

    /// Handles a batch as it is published.
    pub fn live(&mut self, number: u64, batch: &[u8], now: f64, sink: &mut impl Sink) {
        self.connected = true;
        if number == u64::MAX {
            return; // the number that ends replays
        }
        if self.heard.is_some_and(|heard| number <= heard) {
            self.restarted(sink);
            if self.can_replay && number > 0 {
                self.ask(now, sink);
            }
        }
        (self.heard, self.check_at) = (Some(number), None);
        if self.replay.is_some() || self.release.is_some() {
            return self.hold(number, batch);
        }
        match self.next {
            None => self.begin(number, batch, sink),
            Some(next) if number == next => self.take(number, batch, sink),
            Some(next) if number < next => {} // a replay already brought it
            Some(_) => {
                self.counts.gaps += 1;
                if self.can_replay {
                    self.hold(number, batch);
                    self.attempts = 0;
                    self.ask(now, sink);
                } else {
                    self.lose(Some(number), sink);
                    self.take(number, batch, sink);
                }
            }
        }
    }

    /// Handles a batch of a replay.
    pub fn replayed(&mut self, number: u64, batch: &[u8], now: f64, sink: &mut impl Sink) {
        let Some(replay) = &mut self.replay else { return };
        let first = std::mem::replace(&mut replay.first, false);
        // Batches that are known already are no progress.
        if first || self.next.is_none_or(|next| number >= next) {
            replay.deadline = (now + PATIENCE_SECONDS).min(replay.until);
        }
        if first && replay.anew {
            self.next = None;
            sink.clear();
        }
        match self.next.filter(|next| *next > 0) {
            Some(next) if first && number == next - 1 => {
                if xxh3_64(batch) != self.last {
                    self.restarted(sink);
                    self.ask(now, sink);
                }
                return;
            }
            Some(next) if first && number >= next => self.lose(Some(number), sink),
            Some(next) if number < next => return,
            Some(next) if number > next => {
                replay.hole = true;
                return;
            }
            Some(_) => {}
            None if first => self.complete = number == 0,
            None => {}
        }
        if let Some(replay) = &mut self.replay {
            replay.progressed = true;
        }
        self.counts.replayed += 1;
        self.take(number, batch, sink);
    }

    /// Handles the end of a replay.
    pub fn replay_ended(&mut self, now: f64, sink: &mut impl Sink) {
        let Some(replay) = self.replay.take() else { return };
        self.again_at = self.again_at.filter(|_| replay.from > 0);
        if replay.first && !replay.anew {
            if self.next.is_some_and(|next| next > 0) {
                // The answer lacks even the last applied batch: its publisher is another process,
                // or keeps nothing.
                self.restarted(sink);
                return self.ask(now, sink);
            }
            if self.next.is_none() {
                (self.next, self.complete) = (Some(0), true); // nothing was published so far
            }
        }
        if replay.progressed {
            self.attempts = 0;
        }
        let Replay { hole, progressed, .. } = replay;
        self.release(Release::Answered { hole, progressed }, now, sink);
    }

    /// Applies held batches until the turn is spent, then those of the next turn.
    fn release(&mut self, release: Release, now: f64, sink: &mut impl Sink) {
        self.release = Some(release);
        if release == Release::GivenUp {
            self.apply_all(sink);
        } else {
            self.catch_up(sink);
        }
        let next = self.next;
        let ready = |(number, _): &(u64, Vec<u8>)| {
            release == Release::GivenUp || next.is_some_and(|next| *number <= next)
        };
        if self.held.front().is_some_and(ready) {
            return;
        }
        self.release = None;
        match release {
            Release::Answered { hole, progressed } if hole || !self.held.is_empty() => {
                self.attempts += 1;
                if self.attempts <= ATTEMPTS && (progressed || hole) {
                    self.ask(now, sink);
                } else {
                    self.give_up(now, sink);
                }
            }
            Release::Unanswered if !self.held.is_empty() => self.give_up(now, sink),
            Release::Answered { .. } | Release::Unanswered | Release::GivenUp => {}
        }
    }

    /// Handles overdue answers and due checks.
    pub fn tick(&mut self, now: f64, sink: &mut impl Sink) {
        if self.deadline().is_none_or(|at| now < at) {
            return;
        }
        if let Some(release) = self.release {
            return self.release(release, now, sink);
        }
        let Some(replay) = self.replay else {
            self.attempts = 0;
            if self.check_at.take_if(|at| now >= *at).is_some() {
                self.ask(now, sink);
                self.replay.iter_mut().for_each(|replay| replay.check = true);
                return;
            }
            self.again_at = None;
            if !self.complete {
                self.ask_for(0, true, now, sink);
            }
            return;
        };
        self.attempts += 1;
        if self.attempts < ATTEMPTS {
            let anew = replay.anew && replay.first;
            if anew {
                self.ask_for(0, true, now, sink);
            } else {
                self.ask(now, sink);
            }
            return self.replay.iter_mut().for_each(|again| again.check = replay.check);
        }
        self.counts.unanswered += 1;
        self.replay = None;
        if replay.anew {
            self.again_at = Some(now + AGAIN_SECONDS);
        }
        if replay.check || replay.anew {
            self.release(Release::Unanswered, now, sink);
        } else {
            self.give_up(now, sink);
        }
    }

    fn ask(&mut self, now: f64, sink: &mut impl Sink) {
        self.ask_for(self.next.unwrap_or(0).saturating_sub(1), false, now, sink);
    }

    fn ask_for(&mut self, from: u64, anew: bool, now: f64, sink: &mut impl Sink) {
        let deadline = now + PATIENCE_SECONDS;
        let until = now + REPLAY_SECONDS;
        let (check, first, hole, progressed) = (false, true, false, false);
        self.replay = Some(Replay { from, anew, check, first, hole, progressed, deadline, until });
        sink.ask(from);
    }

    fn hold(&mut self, number: u64, batch: &[u8]) {
        if self.held.len() < HELD_BATCHES && self.held_bytes + batch.len() <= HELD_BYTES {
            self.held_bytes += batch.len();
            self.held.push_back((number, batch.to_vec()));
        }
    }

    fn let_go(&mut self) {
        self.held.clear();
        (self.held_bytes, self.release) = (0, None);
    }

    /// Applies the held batches up to the first missing one.
    fn catch_up(&mut self, sink: &mut impl Sink) {
        while !sink.is_spent()
            && let Some((number, _)) = self.held.front()
            && self.next.is_some_and(|next| *number <= next)
        {
            let Some((number, batch)) = self.held.pop_front() else { return };
            self.held_bytes -= batch.len();
            if self.next == Some(number) {
                self.take(number, &batch, sink);
            }
        }
    }

    /// Gives up the missing batches and applies the held batches. Asks for all of them later.
    fn give_up(&mut self, now: f64, sink: &mut impl Sink) {
        self.again_at = Some(now + AGAIN_SECONDS);
        if self.next.is_some() {
            self.lose(None, sink);
        }
        self.release(Release::GivenUp, now, sink);
    }

    fn apply_all(&mut self, sink: &mut impl Sink) {
        while !sink.is_spent()
            && let Some((number, batch)) = self.held.pop_front()
        {
            self.held_bytes -= batch.len();
            match self.next {
                None => self.begin(number, &batch, sink),
                Some(next) if number > next => {
                    self.lose(Some(number), sink);
                    self.take(number, &batch, sink);
                }
                Some(next) if number == next => self.take(number, &batch, sink),
                Some(_) => {}
            }
        }
    }

    /// Applies the first known batch.
    fn begin(&mut self, number: u64, batch: &[u8], sink: &mut impl Sink) {
        self.complete = number == 0;
        self.take(number, batch, sink);
    }

    fn take(&mut self, number: u64, batch: &[u8], sink: &mut impl Sink) {
        self.last = xxh3_64(batch);
        self.next = Some(number + 1);
        self.counts.batches += 1;
        self.complete |= sink.apply(batch);
    }

    /// Forgets everything, because batches are lost for good.
    fn lose(&mut self, next: Option<u64>, sink: &mut impl Sink) {
        self.counts.resyncs += 1;
        (self.next, self.complete) = (next, false);
        sink.clear();
    }

    /// Forgets everything, because another process publishes now.
    fn restarted(&mut self, sink: &mut impl Sink) {
        self.counts.restarts += 1;
        sink.note_restart();
        (self.next, self.complete, self.replay, self.attempts) = (None, false, None, 0);
        self.let_go();
        sink.clear();
    }
}
