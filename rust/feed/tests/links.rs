//! Costs of many subscriptions (rust 7.13). The one test is alone in its process, because it counts
//! threads.
mod publisher;

use lmetric_core::Registry;
use lmetric_core::feed::KvFeed;
use lmetric_core::fleet::Role;
use lmetric_core::kv::keys::Keys;
use lmetric_core::router::{IndexFeed, Router, RouterConfig, SharedRouter};
use lmetric_feed::{EventFeed, Subscription};
use publisher::Publisher;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

/// Subscriptions to engines that send nothing.
const IDLE: usize = 96;
/// Messages of the one other engine, one by one.
const MESSAGES: u64 = 100;
/// Most readings of the clock for a message: a few turns of the loop, each with a visit or two.
const MAX_READINGS: usize = 30;

/// Returns the number of threads of this process.
fn threads() -> usize {
    std::fs::read_dir("/proc/self/task").unwrap().count()
}

/// One thread serves all links, and visits only those with something to do. It reads the clock at
/// each visit.
#[test]
fn a_message_costs_no_visit_of_idle_links() {
    let config =
        RouterConfig { index_feed: IndexFeed::Exact, index_bytes: 3 << 20, ..RouterConfig::default() };
    let mut router = Router::new(Registry::CORE.policy("lmetric", &[]).unwrap(), config).unwrap();
    let names: Vec<String> = (0..=IDLE).map(|i| format!("e{i}")).collect();
    for name in &names {
        router.add_instance(name, Role::Both, None).unwrap();
    }
    let keys = Keys::new(&[], 16, 256).unwrap();
    let feed = Arc::new(KvFeed::new(SharedRouter::new(router), keys, 3 << 20, true));
    let readings = Arc::new(AtomicUsize::new(0));
    let clock = {
        let readings = readings.clone();
        move || {
            readings.fetch_add(1, Ordering::Relaxed);
            0.0
        }
    };
    let mut engines: Vec<Publisher> = names.iter().map(|_| Publisher::new()).collect();
    let before = threads();
    let events = EventFeed::start(feed, clock).unwrap();
    for (name, engine) in names.iter().zip(&mut engines) {
        let endpoint = engine.endpoint();
        events.subscribe(name, Subscription { endpoint, ..Subscription::default() }).unwrap();
        engine.accept();
    }
    let await_all = |done: &dyn Fn(&str) -> bool| {
        while !names.iter().all(|name| done(name)) {
            std::thread::sleep(Duration::from_millis(1));
        }
    };
    await_all(&|name| events.status(name)[0].connected);
    assert_eq!(threads() - before, 1, "the thread of the feed");

    let first = readings.load(Ordering::Relaxed);
    for number in 1..=MESSAGES {
        engines[0].send(&[b"no batch"]);
        await_all(&|name| name != "e0" || events.status(name)[0].messages == number);
    }
    let readings = readings.load(Ordering::Relaxed) - first;
    assert!(readings <= MESSAGES as usize * MAX_READINGS, "{readings} readings of the clock");
}
