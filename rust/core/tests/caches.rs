//! The engines' caches behind a lock of their own: events beside decisions and changes of the
//! fleet.
use lmetric_core::Registry;
use lmetric_core::feed::{KvFeed, Means, Source, Stored};
use lmetric_core::fleet::Role;
use lmetric_core::ids::Slot;
use lmetric_core::kv::hash::hash_tokens;
use lmetric_core::kv::keys::Keys;
use lmetric_core::plan::{Event, Usage};
use lmetric_core::request::{Allowed, Request};
use lmetric_core::router::{IndexFeed, PrefixMatch, Router, RouterConfig, SharedRouter};
use std::sync::Barrier;

const BLOCK: u64 = 16;
const BYTES: usize = 64 << 20;
/// Threads that apply events, threads that decide, and rounds of each thread.
const FEEDS: usize = 3;
const DECIDERS: u64 = 3;
const ROUNDS: u64 = 300;
/// Blocks of a prompt: more than an event holds the caches for.
const BLOCKS: u64 = 40;

fn keys() -> Keys {
    Keys::new(&[Some("model".into())], BLOCK as usize, 256).unwrap()
}

fn tokens(prompt: u64, blocks: std::ops::Range<u64>) -> Vec<u32> {
    blocks.flat_map(|block| (0..BLOCK).map(move |at| (prompt * 7919 + block * 31 + at) as u32)).collect()
}

fn chain(prompt: u64) -> Vec<u64> {
    let mut chain = Vec::new();
    hash_tokens(keys().tokens, BLOCK as usize, &tokens(prompt, 0..BLOCKS), &mut chain);
    chain
}

fn router() -> SharedRouter {
    let config = RouterConfig { index_bytes: BYTES, ..RouterConfig::default() };
    let mut router = Router::new(Registry::CORE.policy("lmetric", &[]).unwrap(), config).unwrap();
    for instance in 0..FEEDS {
        let id = router.add_instance(&format!("exact-{instance}"), Role::Both, None).unwrap();
        router.set_index_feed(id, IndexFeed::Exact).unwrap();
    }
    for instance in 0..2 {
        router.add_instance(&format!("guessed-{instance}"), Role::Both, None).unwrap();
    }
    SharedRouter::new(router)
}

/// Returns the instances whose index entries are predictions.
fn guessed() -> Allowed {
    ["guessed-0", "guessed-1", "new"].map(Box::from).into_iter().collect()
}

fn request(chain: &[u64]) -> Request<'_> {
    let prompt_tokens = (BLOCKS * BLOCK) as u32 + 1;
    Request { chain, prompt_tokens, tokens_per_block: BLOCK as f64, ..Request::default() }
}

/// Applies the events of one round of an engine: it stores a prompt in two events, and removes the
/// end of an older one.
fn events(feed: &KvFeed, source: Source, round: u64) {
    let prompt = round % 50;
    let hash = |prompt: u64, block: u64| (prompt * 1009 + block + 1).wrapping_mul(0x2545_f491_4f6c_dd1d);
    for blocks in [0..BLOCKS / 2, BLOCKS / 2..BLOCKS] {
        let engine_hashes: Vec<u64> = blocks.clone().map(|block| hash(prompt, block)).collect();
        feed.stored(
            source,
            &Stored {
                parent: blocks.start.checked_sub(1).map(|block| hash(prompt, block)),
                engine_hashes: &engine_hashes,
                token_ids: &tokens(prompt, blocks),
                domain: keys().tokens,
                narrowing: &[],
                means: Means::Report,
            },
        );
    }
    let old = (round * 7 + u64::from(source.instance.slot().0)) % 50;
    let gone: Vec<u64> = (round % BLOCKS..BLOCKS).rev().map(|block| hash(old, block)).collect();
    feed.removed(source, &gone);
    if round % 97 == 96 {
        feed.cleared(source);
    }
}

/// Decides a request of a round, reports that it was sent, and ends it. Returns the name
/// of its instance.
fn decide(shared: &SharedRouter, found: &mut PrefixMatch, prompt: u64, allowed: Option<&Allowed>) -> String {
    let mut blocks = chain(prompt);
    shared.caches().read().match_ahead(&request(&blocks), found);
    let asked = Request { instances: allowed, ..request(&[]) };
    let (decision, name) = {
        let mut router = shared.lock_next();
        let decision = router.route_matched(&asked, &mut blocks, found, None, 1.0).unwrap();
        (decision, router.fleet().name(decision.segment.instance).to_string())
    };
    let ticket = shared.ticket(&decision);
    ticket.advance(Event::Sent, 1.0).unwrap();
    ticket.advance(Event::FirstToken, 1.0).unwrap();
    ticket.advance(Event::Finished(Usage::default()), 1.0).unwrap();
    name
}

/// Returns the number of a prompt's leading blocks on a named instance.
fn held(shared: &SharedRouter, name: &str, prompt: u64) -> u32 {
    let (id, slots) = {
        let router = shared.lock();
        (router.fleet().find(name).unwrap(), router.fleet().slots())
    };
    let mut hits = vec![0; slots];
    shared.caches().read().gpu().match_prefix(&chain(prompt), &mut hits);
    hits[id.index()]
}

/// Threads apply events, decide, and change the fleet. In the end the index holds what the same
/// events and predictions leave one after the other.
#[test]
fn events_decisions_and_fleet_changes_run_beside_each_other() {
    let shared = router();
    let feed = KvFeed::new(shared.clone(), keys(), BYTES * 2, true);
    let start = Barrier::new(FEEDS + DECIDERS as usize + 1);
    let guessed = guessed();
    let sent: Vec<(String, u64)> = std::thread::scope(|scope| {
        for instance in 0..FEEDS {
            let (feed, start) = (&feed, &start);
            scope.spawn(move || {
                let source = feed.source(&format!("exact-{instance}"), 0).unwrap();
                start.wait();
                (0..ROUNDS).for_each(|round| events(feed, source, round));
            });
        }
        let deciders: Vec<_> = (0..DECIDERS)
            .map(|decider| {
                let (shared, start, guessed) = (&shared, &start, &guessed);
                scope.spawn(move || {
                    let (mut found, mut sent) = (PrefixMatch::default(), Vec::new());
                    start.wait();
                    for round in 0..ROUNDS {
                        let prompt = 60 + decider * ROUNDS + round;
                        sent.push((decide(shared, &mut found, prompt, Some(guessed)), prompt));
                        decide(shared, &mut found, round % 60, None);
                    }
                    sent
                })
            })
            .collect();
        let (feed, shared, start) = (&feed, &shared, &start);
        scope.spawn(move || {
            start.wait();
            for round in 0..ROUNDS {
                let name = format!("other-{}", round % 3);
                if shared.lock().fleet().get(&name).is_some() {
                    feed.remove_instance(&name).unwrap();
                }
                shared.lock().add_instance(&name, Role::Both, None).unwrap();
                if round % 2 == 0 {
                    feed.set_index_feed(&name, IndexFeed::Exact).unwrap();
                    events(feed, feed.source(&name, 0).unwrap(), round);
                }
                feed.forget(&name).unwrap();
            }
            (0..3).for_each(|number| feed.remove_instance(&format!("other-{number}")).unwrap());
        });
        deciders.into_iter().flat_map(|decider| decider.join().unwrap()).collect()
    });
    assert!(shared.check().is_ok());
    // Prompts that no engine has reported in time are no longer expected.
    let exact: Allowed = [Box::from("exact-0")].into_iter().collect();
    let request = Request { instances: Some(&exact), ..Request::default() };
    let decision = shared.lock().route(&request, 10.0).unwrap();
    shared.ticket(&decision).advance(Event::FirstToken, 10.0).unwrap();
    let alone = router();
    let alone_feed = KvFeed::new(alone.clone(), keys(), BYTES * 2, true);
    for instance in 0..FEEDS {
        let name = format!("exact-{instance}");
        let source = alone_feed.source(&name, 0).unwrap();
        (0..ROUNDS).for_each(|round| events(&alone_feed, source, round));
        for prompt in 0..50 {
            let expected = held(&alone, &name, prompt);
            assert_eq!(held(&shared, &name, prompt), expected, "prompt {prompt} on {name}");
        }
        let blocks = |of: &SharedRouter| of.caches().read().gpu().blocks(source.instance.slot());
        assert_eq!(blocks(&shared), blocks(&alone), "{name}");
    }
    for (name, prompt) in sent {
        assert_eq!(held(&shared, &name, prompt), BLOCKS as u32, "{name} was sent {prompt}");
    }
    let slots = shared.lock().fleet().slots();
    for slot in FEEDS + 2..slots {
        let blocks = shared.caches().read().gpu().blocks(Slot(slot as u32));
        assert_eq!(blocks, 0, "slot {slot} is free");
    }
}

/// A prefix match of a fleet that has changed since is made again.
#[test]
fn a_match_of_another_fleet_does_not_count() {
    let shared = router();
    let mut found = PrefixMatch::default();
    let (blocks, guessed) = (chain(1), guessed());
    let route = |found: &mut PrefixMatch, between: &dyn Fn(&mut Router)| {
        shared.caches().read().match_ahead(&request(&blocks), found);
        let mut router = shared.lock();
        between(&mut router);
        let asked = Request { instances: Some(&guessed), ..request(&[]) };
        let decision = router.route_matched(&asked, &mut blocks.clone(), found, None, 1.0).unwrap();
        router.advance(decision.ticket, Event::Sent, 1.0).unwrap();
        router.advance(decision.ticket, Event::Finished(Usage::default()), 1.0).unwrap();
        (router.fleet().name(decision.segment.instance).to_string(), decision.predicted_hit_tokens)
    };
    let (first, hit) = route(&mut found, &|_| {});
    assert_eq!(hit, 0);
    assert_eq!(route(&mut found, &|_| {}), (first.clone(), (BLOCKS * BLOCK) as u32));
    let leave = |router: &mut Router| router.remove_instance(&first).unwrap();
    let (second, hit) = route(&mut found, &leave);
    assert!(second != first && hit == 0, "{second} {hit}");
    let join = |router: &mut Router| _ = router.add_instance("new", Role::Both, None).unwrap();
    assert_eq!(route(&mut found, &join), (second, (BLOCKS * BLOCK) as u32));
}

/// Predictions count before the next match and before the next event, and each once.
#[test]
fn predictions_are_entered_in_their_order() {
    let shared = router();
    let feed = KvFeed::new(shared.clone(), keys(), BYTES * 2, true);
    let mut router = shared.lock();
    let (blocks, guessed) = (chain(1), guessed());
    let asked = Request { instances: Some(&guessed), ..request(&blocks) };
    let decision = router.route(&asked, 1.0).unwrap();
    let name = router.fleet().name(decision.segment.instance).to_string();
    router.advance(decision.ticket, Event::Sent, 1.0).unwrap();
    assert_eq!(router.caches().read().gpu().pairs(), BLOCKS as usize, "queued, but read");
    drop(router);
    feed.forget(&name).unwrap();
    assert_eq!(held(&shared, &name, 1), 0, "an event after the prediction removes its blocks");
}

/// Reads go between the pieces of a long prediction, and make no match for a later decision.
/// Changes wait for all pieces.
#[test]
fn long_predictions_are_entered_in_pieces() {
    let (shared, guessed) = (router(), guessed());
    let feed = KvFeed::new(shared.clone(), keys(), BYTES * 2, true);
    let mut long = Vec::new();
    hash_tokens(keys().tokens, BLOCK as usize, &tokens(1, 0..5 * BLOCKS), &mut long);
    let asked = Request { prompt_tokens: 5 * (BLOCKS * BLOCK) as u32 + 1, ..request(&long) };
    let asked = Request { instances: Some(&guessed), ..asked };
    let blocks_of = |name: &str| {
        let id = shared.lock().fleet().find(name).unwrap();
        move |shared: &SharedRouter| shared.caches().read().gpu().blocks(id)
    };
    let send = |chain: &mut Vec<u64>, found: &mut PrefixMatch| {
        let mut router = shared.lock();
        let decision = router.route_matched(&asked, chain, found, None, 1.0).unwrap();
        router.advance(decision.ticket, Event::Sent, 1.0).unwrap();
        router.advance(decision.ticket, Event::Finished(Usage::default()), 1.0).unwrap();
        assert!(router.release(), "predictions are queued");
        let name = shared.lock().fleet().name(decision.segment.instance).to_string();
        (decision.predicted_hit_tokens, name)
    };
    let mut found = PrefixMatch::default();
    let (hit, name) = send(&mut long.clone(), &mut found);
    assert_eq!(hit, 0);
    let blocks = blocks_of(&name);
    assert!(!shared.caches().try_enter(), "more blocks than are entered at once");
    let part = blocks(&shared);
    assert!((1..5 * BLOCKS as u32).contains(&part), "{part} blocks");
    shared.caches().read().match_ahead(&asked, &mut found);
    assert!((0..50).any(|_| shared.caches().try_enter()));
    assert_eq!(blocks(&shared), 5 * BLOCKS as u32);
    let (hit, again) = send(&mut long.clone(), &mut found);
    assert_eq!((u64::from(hit), &again), (5 * BLOCKS * BLOCK, &name), "a match of a part does not count");
    feed.forget(&name).unwrap();
    let (_, other) = send(&mut long.clone(), &mut found);
    assert!(!shared.caches().try_enter());
    feed.forget(&other).unwrap();
    assert!(shared.caches().try_enter());
    assert_eq!(blocks_of(&other)(&shared), 0, "a change after the prediction removes all its blocks");
}

/// A read that must not wait leaves busy caches, and caches that lack predictions.
#[test]
fn a_read_without_a_wait_leaves_busy_caches() {
    let shared = router();
    let try_match = |found: &mut PrefixMatch| match shared.caches().try_read() {
        Some(caches) => {
            caches.match_ahead(&request(&chain(1)), found);
            true
        }
        None => false,
    };
    std::thread::scope(|scope| {
        let busy = shared.caches().write();
        let tried = scope.spawn(|| try_match(&mut PrefixMatch::default()));
        assert!(!tried.join().unwrap(), "another thread changes the caches");
        drop(busy);
    });
    let (blocks, guessed, mut found) = (chain(1), guessed(), PrefixMatch::default());
    let mut router = shared.lock();
    let asked = Request { instances: Some(&guessed), ..request(&blocks) };
    let decision = router.route(&asked, 1.0).unwrap();
    router.advance(decision.ticket, Event::Sent, 1.0).unwrap();
    router.advance(decision.ticket, Event::Finished(Usage::default()), 1.0).unwrap();
    assert!(!try_match(&mut found), "a prediction is queued");
    drop(router);
    assert!(try_match(&mut found));
    let mut waited = PrefixMatch::default();
    shared.caches().read().match_ahead(&request(&blocks), &mut waited);
    assert_eq!(format!("{found:?}"), format!("{waited:?}"));
    let (mut router, asked) = (shared.lock(), Request { instances: Some(&guessed), ..request(&[]) });
    let second = router.route_matched(&asked, &mut blocks.clone(), &mut found, None, 1.0).unwrap();
    assert_eq!(second.predicted_hit_tokens, (BLOCKS * BLOCK) as u32);
}
