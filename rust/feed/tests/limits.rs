//! A source that exceeds a limit is ignored for a while, alone (security F5).
mod publisher;

use lmetric_core::Registry;
use lmetric_core::feed::KvFeed;
use lmetric_core::fleet::Role;
use lmetric_core::kv::keys::Keys;
use lmetric_core::router::{IndexFeed, Router, RouterConfig, SharedRouter};
use lmetric_feed::event::MAX_STEPS;
use lmetric_feed::status::Status;
use lmetric_feed::zmtp::MAX_MESSAGE_BYTES;
use lmetric_feed::{EventFeed, Subscription};
use publisher::Publisher;
use rmp::encode as pack;
use std::io::{Read, Write};
use std::net::TcpListener;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

const BLOCK: usize = 16;
/// Engines that send many events at once.
const BUSY: usize = 12;
/// A failure, not a delay that a slow machine has.
const PATIENCE: Duration = Duration::from_secs(60);

struct Bed {
    feed: EventFeed,
    /// The router's clock, in milliseconds.
    clock: Arc<AtomicU64>,
    gate: Arc<Gate>,
}

/// Number of times that the thread may read the clock.
struct Gate {
    steps: Mutex<u64>,
    changed: Condvar,
}

impl Gate {
    fn allow(&self, steps: u64) {
        *self.steps.lock().unwrap() = steps;
        self.changed.notify_one();
    }

    fn pass(&self) {
        let mut steps = self.changed.wait_while(self.steps.lock().unwrap(), |steps| *steps == 0).unwrap();
        *steps -= 1;
    }
}

impl Bed {
    fn new() -> Bed {
        let config =
            RouterConfig { index_feed: IndexFeed::Exact, index_bytes: 8 << 20, ..RouterConfig::default() };
        let mut router = Router::new(Registry::CORE.policy("lmetric", &[]).unwrap(), config).unwrap();
        let busy = (0..BUSY).map(|number| format!("busy {number}"));
        for name in ["good", "bad"].map(String::from).into_iter().chain(busy) {
            router.add_instance(&name, Role::Both, None).unwrap();
        }
        let keys = Keys::new(&[], BLOCK, 256).unwrap();
        let feed = Arc::new(KvFeed::new(SharedRouter::new(router), keys, 8 << 20, true));
        let clock = Arc::new(AtomicU64::new(0));
        let gate = Arc::new(Gate { steps: Mutex::new(u64::MAX), changed: Condvar::new() });
        let (now, passed) = (clock.clone(), gate.clone());
        let read = move || {
            passed.pass();
            now.load(Ordering::Relaxed) as f64 / 1e3
        };
        let feed = EventFeed::start(feed, read).unwrap();
        Bed { feed, clock, gate }
    }

    fn pass(&self, seconds: u64) {
        self.clock.fetch_add(1000 * seconds, Ordering::Relaxed);
    }

    fn status(&self, name: &str) -> Status {
        self.feed.status(name).remove(0)
    }

    /// Waits until the thread has visited every connection that is due. Each call may be answered
    /// after one visit.
    fn settle(&self) {
        for _ in 0..10 {
            assert!(!self.feed.unsubscribe("nobody").unwrap());
        }
    }

    fn until(&self, name: &str, what: impl Fn(&Status) -> bool) -> Status {
        loop {
            let status = self.status(name);
            if what(&status) {
                return status;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

struct Engine {
    publisher: Publisher,
    next: u64,
}

impl Engine {
    fn new(bed: &Bed, name: &str) -> Engine {
        Engine::of_version(1, bed, name)
    }

    fn of_version(minor: u8, bed: &Bed, name: &str) -> Engine {
        let mut engine = Engine { publisher: Publisher::new(), next: 0 };
        engine.publisher.minor = minor;
        let endpoint = engine.publisher.endpoint();
        bed.feed.subscribe(name, Subscription { endpoint, ..Subscription::default() }).unwrap();
        engine.await_subscriber(bed, name);
        engine
    }

    fn await_subscriber(&mut self, bed: &Bed, name: &str) {
        self.publisher.accept();
        bed.until(name, |status| status.connected);
    }

    /// Publishes a batch that removes this many blocks.
    fn publish(&mut self, blocks: u64) {
        let mut batch = Vec::new();
        pack::write_array_len(&mut batch, 2).unwrap();
        pack::write_f64(&mut batch, 1.0).unwrap();
        pack::write_array_len(&mut batch, 1).unwrap();
        pack::write_array_len(&mut batch, 2).unwrap();
        pack::write_str(&mut batch, "BlockRemoved").unwrap();
        pack::write_array_len(&mut batch, blocks as u32).unwrap();
        (0..blocks).for_each(|block| {
            pack::write_uint(&mut batch, block % 100).unwrap();
        });
        self.send(&batch);
    }

    fn send(&mut self, batch: &[u8]) {
        let number = self.next.to_be_bytes();
        self.publisher.send(&[b"", &number, batch]);
        self.next += 1;
    }
}

#[test]
fn a_source_over_a_limit_rests_alone_and_comes_back() {
    let bed = Bed::new();
    let (mut good, mut bad) = (Engine::new(&bed, "good"), Engine::new(&bed, "bad"));
    bad.publish(5);
    assert_eq!(bed.until("bad", |s| s.tally.events == 1).standing.name(), "live");

    // Too much work. Its connection is closed, so that it costs nothing more.
    bad.publish(MAX_STEPS);
    let status = bed.until("bad", |s| s.over_limit.is_some());
    assert!(status.over_limit.unwrap().contains("more than 65536 steps"));
    assert_eq!((status.standing.name(), status.connected), ("incomplete", false));
    good.publish(5);
    let status = bed.until("good", |s| s.tally.events == 1);
    assert_eq!((status.standing.name(), status.connected, status.over_limit), ("live", true, None));

    // It counts again after a minute, and only what it sends from then on.
    bed.pass(59);
    assert!(bed.status("bad").over_limit.is_some());
    bed.pass(2);
    bad.await_subscriber(&bed, "bad");
    assert_eq!(bed.status("bad").over_limit, None);
    bad.publish(5);
    bed.until("bad", |s| s.tally.events == 2 && s.standing.name() == "incomplete");

    // A message that is too large, too.
    bad.send(&vec![0; MAX_MESSAGE_BYTES + 1]);
    let status = bed.until("bad", |s| s.over_limit.is_some());
    assert!(status.over_limit.unwrap().contains("more than 4194304 bytes"));
    assert!(!status.connected);
    // The second time, it takes two minutes.
    bed.pass(119);
    good.publish(5);
    assert!(bed.until("good", |s| s.tally.events == 2).over_limit.is_none());
    assert!(bed.status("bad").over_limit.is_some());
    bed.pass(2);
    bad.await_subscriber(&bed, "bad");
    assert_eq!(bed.status("bad").over_limit, None);
    assert_eq!(bed.status("good").connections, 1);
}

/// A sibling of security F5: libzmq bounds whole messages, so frames without end filled its memory.
#[test]
fn a_message_without_end_ends_the_connection() {
    let bed = Bed::new();
    let mut bad = Engine::new(&bed, "bad");
    let subscriber = bad.publisher.accepted();
    // Until the feed closes the connection, for what it has not read.
    while subscriber.write_all(&[1, 0].repeat(1000)).is_ok() {}
    let status = bed.until("bad", |s| s.over_limit.is_some());
    assert_eq!(status.over_limit.unwrap(), "a message of more than 16 frames");
    assert!(!status.connected);
}

/// A peer that is gone without a word, such as a machine without power, is silent.
#[test]
fn a_silent_peer_is_asked_for_a_sign_of_life() {
    let bed = Bed::new();
    let mut engine = Engine::new(&bed, "good");
    let told = |engine: &mut Engine| {
        let mut told = [0; 9];
        engine.publisher.accepted().read_exact(&mut told).unwrap();
        assert_eq!(&told, b"\x04\x07\x04PING\0\0");
    };
    for _ in 0..3 {
        bed.pass(6);
        told(&mut engine);
        engine.publisher.accepted().write_all(b"\x04\x05\x04PONG").unwrap();
        // The answer is read before this message.
        engine.publish(1);
        let next = engine.next;
        bed.until("good", |s| s.tally.events == next);
    }
    bed.pass(6);
    told(&mut engine);
    bed.pass(6);
    bed.until("good", |s| !s.connected);
    bed.pass(1);
    engine.await_subscriber(&bed, "good");
    assert_eq!(bed.status("good").connections, 2);
}

/// A publisher with heartbeats ends connections whose answer comes with its next question.
#[test]
fn heartbeats_are_answered_at_once() {
    let bed = Bed::new();
    let mut engine = Engine::new(&bed, "good");
    let peer = engine.publisher.accepted();
    peer.set_read_timeout(Some(PATIENCE)).unwrap();
    for context in [b"one", b"two"] {
        peer.write_all(b"\x04\x0a\x04PING\0\x05").unwrap();
        peer.write_all(context).unwrap();
        let mut told = [0; 10];
        peer.read_exact(&mut told).unwrap();
        assert_eq!(told, *[b"\x04\x08\x04PONG", &context[..]].concat());
    }
}

/// ZMTP 3.0 has no heartbeats: nothing answers for an idle engine.
#[test]
fn silence_of_an_older_publisher_means_nothing() {
    let bed = Bed::new();
    let mut engine = Engine::of_version(0, &bed, "good");
    for _ in 0..5 {
        bed.pass(6);
        bed.settle();
    }
    let status = bed.status("good");
    assert_eq!((status.connected, status.connections), (true, 1));
    engine.publish(1);
    bed.until("good", |s| s.tally.events == 1);
}

/// Its answer would come too late, and cost its reading.
#[test]
fn a_replay_that_was_given_up_has_no_connection() {
    let bed = Bed::new();
    let mut publisher = Publisher::new();
    let replay = TcpListener::bind("127.0.0.1:0").unwrap();
    let subscription = Subscription {
        endpoint: publisher.endpoint(),
        replay_endpoint: Some(format!("tcp://{}", replay.local_addr().unwrap())),
        ..Subscription::default()
    };
    bed.feed.subscribe("good", subscription).unwrap();
    publisher.accept();
    for _ in 0..3 {
        let (mut request, _) = replay.accept().unwrap();
        bed.pass(3);
        request.set_read_timeout(Some(PATIENCE)).unwrap();
        request.read_to_end(&mut Vec::new()).unwrap();
    }
    assert_eq!(bed.until("good", |s| s.counts.unanswered == 1).standing.name(), "incomplete");
}

/// A call does not wait for the messages of all engines.
#[test]
fn a_command_waits_for_one_engine_at_most() {
    let bed = Bed::new();
    let names: Vec<String> = (0..BUSY).map(|number| format!("busy {number}")).collect();
    let mut engines: Vec<Engine> = names.iter().map(|name| Engine::new(&bed, name)).collect();
    let served = || names.iter().filter(|name| bed.status(name).tally.events > 0).count();
    // The thread reads the clock before it visits an engine.
    let step = || {
        bed.gate.allow(1);
        std::thread::sleep(Duration::from_millis(20));
    };
    bed.gate.allow(0);
    engines.iter_mut().for_each(|engine| engine.publish(5));
    while served() < 3 {
        step();
    }
    std::thread::scope(|scope| {
        let call = scope.spawn(|| bed.feed.unsubscribe("nobody").unwrap());
        std::thread::sleep(Duration::from_millis(200));
        while !call.is_finished() && served() < BUSY {
            step();
        }
        let served = served();
        bed.gate.allow(u64::MAX);
        assert!(served < BUSY, "the call waited for all engines");
    });
}
