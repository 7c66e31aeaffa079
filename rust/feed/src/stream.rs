//! One engine's stream of numbered batches: in order, each once, and known to be whole or known not to be. No I/O.
//!
//! Publishers number their batches from 0 and start over when they restart; what nobody heard is lost, unless it can be played
//! again. So a batch out of turn is held until those before it were asked for. Each question starts one batch earlier than
//! needed: if that one comes back as it was, it is the same process that answers; if not, it is another, and its cache is empty. Where the past
//! cannot be had, all that is known is forgotten, and what follows is known to be incomplete until a restart or a cleared cache.
//! Silence means nothing: engines publish only when they run a step.
use std::collections::VecDeque;
use xxhash_rust::xxh3::xxh3_64;

/// How long an answer may take to begin or to go on, in seconds: engines answer between their steps.
const PATIENCE_SECONDS: f64 = 2.0;
/// How often a question is asked again.
const ATTEMPTS: u32 = 3;
/// When it is asked again, after nobody answered: an engine may be busy for long while it starts.
const AGAIN_SECONDS: f64 = 30.0;
/// How long a subscription may take to reach the publisher: what is published before it does, and after the first answer, is
/// heard by nobody.
const SUBSCRIBED_SECONDS: f64 = 1.0;
/// What is held at most while a replay runs.
const HELD_BATCHES: usize = 8192;
const HELD_BYTES: usize = 64 << 20;

/// What a stream has done to those who follow it.
pub trait Sink {
    /// Applies a batch; true: it cleared the whole cache.
    fn apply(&mut self, batch: &[u8]) -> bool;
    /// Forgets all.
    fn clear(&mut self);
    /// Asks for all batches from this number on, and for those asked for before no more.
    fn ask(&mut self, from: u64);
}

/// Counts since the subscription.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Batches applied.
    pub batches: u64,
    /// Of those, batches that were played again.
    pub replayed: u64,
    /// Gaps found in the numbers.
    pub gaps: u64,
    /// Times that all was forgotten because batches were lost for good.
    pub resyncs: u64,
    /// Restarts of the engine.
    pub restarts: u64,
    /// Replays that were not answered.
    pub unanswered: u64,
}

/// How much of the engine's cache is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Standing {
    /// No connection, or the first replay is on its way.
    Connecting,
    /// All of it.
    Live,
    /// What was stored since some moment.
    Incomplete,
}

impl Standing {
    /// That of load reports, each of which is whole.
    pub fn of_load(connected: bool) -> Standing {
        if connected { Standing::Live } else { Standing::Connecting }
    }

    /// In a word.
    pub fn name(self) -> &'static str {
        match self {
            Standing::Connecting => "connecting",
            Standing::Live => "live",
            Standing::Incomplete => "incomplete",
        }
    }
}

/// A question that is open.
#[derive(Clone, Copy, Debug)]
struct Replay {
    from: u64,
    /// From the start, in the place of what is known in part.
    anew: bool,
    /// Whether something was missed is all that it asks: without an answer, what is known stays.
    check: bool,
    /// Nothing has come yet.
    first: bool,
    /// A batch was missing in the answer: publishers drop what they cannot send at once.
    hole: bool,
    progressed: bool,
    deadline: f64,
}

/// See the module.
#[derive(Debug)]
pub struct Stream {
    can_replay: bool,
    connected: bool,
    /// The number of the next batch, once there was one.
    next: Option<u64>,
    /// Fingerprint of the batch before it.
    last: u64,
    /// Number of the last batch on this connection.
    heard: Option<u64>,
    complete: bool,
    replay: Option<Replay>,
    attempts: u32,
    /// When to ask for all anew, where nobody answered.
    again_at: Option<f64>,
    /// When to ask whether something was missed, where nothing was heard on this connection.
    check_at: Option<f64>,
    held: VecDeque<(u64, Vec<u8>)>,
    held_bytes: usize,
    counts: Counts,
}

impl Stream {
    /// A stream that nothing was heard of. `can_replay`: past batches can be asked for.
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
            counts: Counts::default(),
        }
    }

    /// Counts since the subscription.
    pub fn counts(&self) -> Counts {
        self.counts
    }

    /// Number of the last batch applied.
    pub fn last_sequence(&self) -> Option<u64> {
        self.next?.checked_sub(1)
    }

    /// How much is known.
    pub fn standing(&self) -> Standing {
        if !self.connected || self.next.is_none() && self.replay.is_some() {
            Standing::Connecting
        } else if self.complete {
            Standing::Live
        } else {
            Standing::Incomplete
        }
    }

    /// When [`Stream::tick`] has something to do.
    pub fn deadline(&self) -> Option<f64> {
        let check_at = self.check_at.filter(|_| self.next.is_some());
        self.replay.map(|r| r.deadline).or(self.again_at.into_iter().chain(check_at).reduce(f64::min))
    }

    /// A connection stands. What was said on one before may be of another process.
    pub fn connected(&mut self, now: f64, sink: &mut impl Sink) {
        self.connected = true;
        self.heard = None;
        self.let_go();
        if self.can_replay {
            self.attempts = 0;
            self.check_at = Some(now + SUBSCRIBED_SECONDS);
            self.ask(now, sink);
        } else if self.next.is_some() {
            // Nobody can say whether it is the same process, nor what went by meanwhile.
            self.lose(None, sink);
        }
    }

    /// Some connection stands; whose is not known.
    pub fn reachable(&mut self) {
        self.connected = true;
    }

    /// The connection is gone.
    pub fn disconnected(&mut self) {
        self.connected = false;
        self.check_at = None;
    }

    /// What was applied was forgotten by others: all is to be told anew.
    pub fn begin_anew(&mut self, now: f64, sink: &mut impl Sink) {
        (self.next, self.complete, self.replay) = (None, false, None);
        self.let_go();
        sink.clear();
        if self.can_replay && self.connected {
            self.attempts = 0;
            self.ask(now, sink);
        }
    }

    /// A batch came as it was published.
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
        if self.replay.is_some() {
            return self.hold(number, batch);
        }
        match self.next {
            None => self.begin(number, batch, sink),
            Some(next) if number == next => self.take(number, batch, sink),
            Some(next) if number < next => {} // played again before it came by itself
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

    /// A batch came that was asked for.
    pub fn replayed(&mut self, number: u64, batch: &[u8], now: f64, sink: &mut impl Sink) {
        let Some(replay) = &mut self.replay else { return };
        replay.deadline = now + PATIENCE_SECONDS;
        let first = std::mem::replace(&mut replay.first, false);
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

    /// All that was asked for has come.
    pub fn replay_ended(&mut self, now: f64, sink: &mut impl Sink) {
        let Some(replay) = self.replay.take() else { return };
        self.again_at = self.again_at.filter(|_| replay.from > 0);
        if replay.first && !replay.anew {
            if self.next.is_some_and(|next| next > 0) {
                // Not even the batch that was applied last: its publisher is another one, or keeps nothing.
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
        self.catch_up(sink);
        if replay.hole || !self.held.is_empty() {
            self.attempts += 1;
            if self.attempts <= ATTEMPTS && (replay.progressed || replay.hole) {
                return self.ask(now, sink);
            }
            self.give_up(sink);
        }
    }

    /// Time has passed: an answer may be overdue.
    pub fn tick(&mut self, now: f64, sink: &mut impl Sink) {
        if self.deadline().is_none_or(|at| now < at) {
            return;
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
        self.catch_up(sink);
        if replay.check && self.held.is_empty() {
            return;
        }
        self.again_at = Some(now + AGAIN_SECONDS);
        if !(replay.anew && self.held.is_empty()) {
            self.give_up(sink);
        }
    }

    fn ask(&mut self, now: f64, sink: &mut impl Sink) {
        self.ask_for(self.next.unwrap_or(0).saturating_sub(1), false, now, sink);
    }

    fn ask_for(&mut self, from: u64, anew: bool, now: f64, sink: &mut impl Sink) {
        let deadline = now + PATIENCE_SECONDS;
        self.replay =
            Some(Replay { from, anew, check: false, first: true, hole: false, progressed: false, deadline });
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
        self.held_bytes = 0;
    }

    /// Applies what is held as far as it follows.
    fn catch_up(&mut self, sink: &mut impl Sink) {
        while let Some((number, _)) = self.held.front()
            && self.next.is_some_and(|next| *number <= next)
        {
            let Some((number, batch)) = self.held.pop_front() else { return };
            self.held_bytes -= batch.len();
            if self.next == Some(number) {
                self.take(number, &batch, sink);
            }
        }
    }

    /// The batches that are missing will not come.
    fn give_up(&mut self, sink: &mut impl Sink) {
        if self.next.is_some() {
            self.lose(None, sink);
        }
        while let Some((number, batch)) = self.held.pop_front() {
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

    /// The first batch that is known of.
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

    /// Batches are lost for good.
    fn lose(&mut self, next: Option<u64>, sink: &mut impl Sink) {
        self.counts.resyncs += 1;
        (self.next, self.complete) = (next, false);
        sink.clear();
    }

    /// Another process publishes by now.
    fn restarted(&mut self, sink: &mut impl Sink) {
        self.counts.restarts += 1;
        (self.next, self.complete, self.replay, self.attempts) = (None, false, None, 0);
        self.let_go();
        sink.clear();
    }
}
