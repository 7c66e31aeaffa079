//! Status of a feed whose thread has stopped.
use lmetric_core::Registry;
use lmetric_core::feed::KvFeed;
use lmetric_core::fleet::Role;
use lmetric_core::kv::keys::Keys;
use lmetric_core::router::{IndexFeed, Router, RouterConfig, SharedRouter};
use lmetric_feed::stream::Standing;
use lmetric_feed::{EventFeed, Subscription};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Rust section 6: a panicked thread is not mistaken for idle engines.
#[test]
fn a_panic_of_the_thread_is_seen() {
    let config =
        RouterConfig { index_feed: IndexFeed::Exact, index_bytes: 3 << 20, ..RouterConfig::default() };
    let mut router = Router::new(Registry::CORE.policy("lmetric", &[]).unwrap(), config).unwrap();
    router.add_instance("e", Role::Both, None).unwrap();
    let keys = Keys::new(&[], 16, 256).unwrap();
    let feed = Arc::new(KvFeed::new(SharedRouter::new(router), keys, 3 << 20, true));
    let fails = Arc::new(AtomicBool::new(false));
    let clock = {
        let fails = fails.clone();
        move || {
            assert!(!fails.load(Ordering::Relaxed), "the test has it fail");
            0.0
        }
    };
    let events = EventFeed::start(feed, clock).unwrap();
    let of_rank =
        |rank| Subscription { endpoint: "tcp://127.0.0.1:9".into(), rank, ..Subscription::default() };
    events.subscribe("e", of_rank(0)).unwrap();
    assert_eq!(events.status("e")[0].standing, Standing::Connecting);

    fails.store(true, Ordering::Relaxed);
    let until = Instant::now() + Duration::from_secs(60);
    while events.status("e")[0].tally.last_error.is_none() && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(5)); // the thread beats once a second
    }
    let status = &events.status("e")[0];
    assert_eq!((status.standing, status.connected), (Standing::Incomplete, false));
    assert!(status.tally.last_error.as_ref().is_some_and(|why| why.contains("internal error")));
    let refused = events.subscribe("e", of_rank(1)).unwrap_err().to_string();
    assert!(refused.contains("internal error"), "{refused}");
    events.close();
    assert!(events.subscribe("e", of_rank(1)).unwrap_err().to_string().contains("close()"));
}
