//! A source that exceeds a limit is ignored for a while, alone (security F5).
use lmetric_core::Registry;
use lmetric_core::fleet::Role;
use lmetric_core::kv::keys::Keys;
use lmetric_core::router::feed::KvFeed;
use lmetric_core::router::{IndexFeed, Router, RouterConfig, SharedRouter};
use lmetric_feed::event::MAX_STEPS;
use lmetric_feed::source::MAX_MESSAGE_BYTES;
use lmetric_feed::status::Status;
use lmetric_feed::{EventFeed, Subscription};
use rmp::encode as pack;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

const BLOCK: usize = 16;

struct Bed {
    feed: EventFeed,
    /// The router's clock, in milliseconds.
    clock: Arc<AtomicU64>,
}

impl Bed {
    fn new() -> Bed {
        let config =
            RouterConfig { index_feed: IndexFeed::Exact, index_bytes: 8 << 20, ..RouterConfig::default() };
        let mut router = Router::new(Registry::CORE.policy("lmetric", &[]).unwrap(), config).unwrap();
        for name in ["good", "bad"] {
            router.add_instance(name, Role::Both, None).unwrap();
        }
        let keys = Keys::new(&[], BLOCK, 256).unwrap();
        let feed = Arc::new(KvFeed::new(SharedRouter::new(router), keys, 8 << 20, true));
        let clock = Arc::new(AtomicU64::new(0));
        let now = clock.clone();
        let feed = EventFeed::start(feed, move || now.load(Ordering::Relaxed) as f64 / 1e3).unwrap();
        Bed { feed, clock }
    }

    fn pass(&self, seconds: u64) {
        self.clock.fetch_add(1000 * seconds, Ordering::Relaxed);
    }

    fn status(&self, name: &str) -> Status {
        self.feed.status(name).remove(0)
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
    socket: zmq::Socket,
    next: u64,
}

impl Engine {
    fn new(context: &zmq::Context, bed: &Bed, name: &str) -> Engine {
        let socket = context.socket(zmq::XPUB).unwrap();
        socket.bind("tcp://127.0.0.1:*").unwrap();
        let endpoint = socket.get_last_endpoint().unwrap().unwrap();
        bed.feed.subscribe(name, Subscription { endpoint, ..Subscription::default() }).unwrap();
        let engine = Engine { socket, next: 0 };
        engine.await_subscriber(bed, name);
        engine
    }

    fn await_subscriber(&self, bed: &Bed, name: &str) {
        loop {
            let told = self.socket.recv_bytes(0).unwrap();
            if told.first() == Some(&1) {
                break;
            }
        }
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
        self.socket.send_multipart([&b""[..], &number[..], batch], 0).unwrap();
        self.next += 1;
    }
}

#[test]
fn a_source_over_a_limit_rests_alone_and_comes_back() {
    let (bed, context) = (Bed::new(), zmq::Context::new());
    let (mut good, mut bad) = (Engine::new(&context, &bed, "good"), Engine::new(&context, &bed, "bad"));
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

    // A message that is too large ends the connection, and libzmq does not connect again.
    bad.send(&vec![0; MAX_MESSAGE_BYTES + 1]);
    bed.until("bad", |s| !s.connected);
    bed.pass(2);
    let status = bed.until("bad", |s| s.over_limit.is_some());
    assert!(status.over_limit.unwrap().contains("more than 4194304 bytes"));
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
