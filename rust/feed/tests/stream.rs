//! Tests the stream against a model of an engine and of message loss.
use lmetric_core::Registry;
use lmetric_core::feed::KvFeed;
use lmetric_core::fleet::Role;
use lmetric_core::kv::hash::hash_tokens;
use lmetric_core::kv::keys::Keys;
use lmetric_core::router::{IndexFeed, Router, RouterConfig, SharedRouter};
use lmetric_feed::apply::Applier;
use lmetric_feed::stream::{Sink, Standing, Stream};
use proptest::prelude::*;
use rmp::encode as pack;
use std::collections::BTreeMap;
use std::sync::Arc;

const BLOCK: u64 = 4;
const PROMPTS: u64 = 3;

/// An engine's process: its cache, and the published batches that it keeps.
struct Engine {
    /// Physical copies by (prompt, block).
    cache: BTreeMap<(u64, u64), u32>,
    past: Vec<(u64, Vec<u8>)>,
    next: u64,
    keep: usize,
    /// Unique to each process and moment.
    moment: u64,
}

impl Engine {
    fn new(keep: usize, moment: u64) -> Engine {
        Engine { cache: BTreeMap::new(), past: Vec::new(), next: 0, keep, moment }
    }

    /// Blocks of the prompt that a request would hit.
    fn depth(&self, prompt: u64) -> u64 {
        (0..).take_while(|block| self.cache.contains_key(&(prompt, *block))).count() as u64
    }

    /// Runs one step: evicts, stores, or both, depending on `kind`. Returns the batch.
    fn step(&mut self, kind: u8, prompt: u64, block: u64, length: u64) -> (u64, Vec<u8>) {
        let mut events: Vec<Vec<u8>> = Vec::new();
        let behind = |engine: &Engine| engine.cache.range((prompt, 1)..(prompt + 1, 0)).next().is_some();
        match kind {
            0..=4 => {
                // Blocks after the hit are stored. Known blocks behind a hole get second copies.
                let from = self.depth(prompt);
                if from > 0 || !behind(self) {
                    (from..from + length).for_each(|b| *self.cache.entry((prompt, b)).or_default() += 1);
                    events.push(stored(prompt, from, length));
                }
            }
            5 => {
                // If a prompt is a whole number of blocks, its last block is computed again.
                let depth = self.depth(prompt);
                if depth > 1 {
                    *self.cache.entry((prompt, depth - 1)).or_default() += 1;
                    events.push(stored(prompt, depth - 1, 1));
                }
            }
            6 => {
                // A full report.
                let depth = self.depth(prompt);
                if depth > 0 {
                    events.push(stored(prompt, 0, depth));
                }
            }
            7..=9 => {
                let gone = (prompt, block);
                if self.cache.contains_key(&gone) && (block > 0 || !behind(self)) {
                    let copies = self.cache[&gone] - 1;
                    self.cache.insert(gone, copies);
                    self.cache.retain(|_, copies| *copies > 0);
                    events.push(removed(prompt, block));
                }
            }
            10 => {
                self.cache.clear();
                events.push(cleared());
            }
            _ => {}
        }
        self.moment += 1;
        let mut batch = Vec::new();
        pack::write_array_len(&mut batch, 3).unwrap();
        pack::write_f64(&mut batch, self.moment as f64).unwrap();
        pack::write_array_len(&mut batch, events.len() as u32).unwrap();
        events.iter().for_each(|event| batch.extend_from_slice(event));
        pack::write_nil(&mut batch).unwrap();
        self.past.push((self.next, batch.clone()));
        let over = self.past.len().saturating_sub(self.keep);
        self.past.drain(..over);
        self.next += 1;
        (self.next - 1, batch)
    }
}

fn hash(prompt: u64, block: u64) -> u64 {
    (prompt * 1000 + block + 1).wrapping_mul(0x2545_f491_4f6c_dd1d)
}

fn tokens(prompt: u64, from: u64, blocks: u64) -> Vec<u32> {
    (from * BLOCK..(from + blocks) * BLOCK).map(|t| (prompt * 10_000 + t) as u32).collect()
}

fn stored(prompt: u64, from: u64, blocks: u64) -> Vec<u8> {
    let mut out = Vec::new();
    pack::write_map_len(&mut out, 5).unwrap();
    pack::write_str(&mut out, "type").unwrap();
    pack::write_str(&mut out, "BlockStored").unwrap();
    pack::write_str(&mut out, "block_hashes").unwrap();
    pack::write_array_len(&mut out, blocks as u32).unwrap();
    for block in from..from + blocks {
        pack::write_uint(&mut out, hash(prompt, block)).unwrap();
    }
    pack::write_str(&mut out, "parent_block_hash").unwrap();
    match from.checked_sub(1) {
        Some(parent) => drop(pack::write_uint(&mut out, hash(prompt, parent)).unwrap()),
        None => pack::write_nil(&mut out).unwrap(),
    }
    pack::write_str(&mut out, "token_ids").unwrap();
    let tokens = tokens(prompt, from, blocks);
    pack::write_array_len(&mut out, tokens.len() as u32).unwrap();
    for token in tokens {
        pack::write_uint(&mut out, token.into()).unwrap();
    }
    pack::write_str(&mut out, "block_size").unwrap();
    pack::write_uint(&mut out, BLOCK).unwrap();
    out
}

fn removed(prompt: u64, block: u64) -> Vec<u8> {
    let mut out = Vec::new();
    pack::write_array_len(&mut out, 2).unwrap();
    pack::write_str(&mut out, "BlockRemoved").unwrap();
    pack::write_array_len(&mut out, 1).unwrap();
    pack::write_uint(&mut out, hash(prompt, block)).unwrap();
    out
}

fn cleared() -> Vec<u8> {
    let mut out = Vec::new();
    pack::write_array_len(&mut out, 1).unwrap();
    pack::write_str(&mut out, "AllBlocksCleared").unwrap();
    out
}

struct Hands {
    applier: Applier,
    asked: Option<u64>,
    /// Batches that a turn may apply, and how many are left in this turn.
    per_turn: usize,
    left: usize,
}

impl Sink for Hands {
    fn apply(&mut self, batch: &[u8]) -> bool {
        self.left = self.left.saturating_sub(1);
        self.applier.apply(batch)
    }

    fn clear(&mut self) {
        self.applier.clear();
    }

    fn ask(&mut self, from: u64) {
        self.asked = Some(from);
    }

    fn is_spent(&self) -> bool {
        self.left == 0
    }
}

struct Bed {
    feed: Arc<KvFeed>,
    stream: Stream,
    hands: Hands,
    now: f64,
}

impl Bed {
    fn new(can_replay: bool, per_turn: usize) -> Bed {
        let config =
            RouterConfig { index_feed: IndexFeed::Exact, index_bytes: 3 << 20, ..RouterConfig::default() };
        let mut router = Router::new(Registry::CORE.policy("lmetric", &[]).unwrap(), config).unwrap();
        router.add_instance("e", Role::Both, None).unwrap();
        let keys = Keys::new(&[], BLOCK as usize, 256).unwrap();
        let feed = Arc::new(KvFeed::new(SharedRouter::new(router), keys, 3 << 20, true));
        let applier = Applier::new(feed.clone(), feed.source("e", 0).unwrap());
        let hands = Hands { applier, asked: None, per_turn, left: per_turn };
        let mut bed = Bed { feed, stream: Stream::new(can_replay), hands, now: 0.0 };
        bed.stream.connected(0.0, &mut bed.hands);
        bed
    }

    fn hear(&mut self, (number, batch): &(u64, Vec<u8>)) {
        self.now += 0.01;
        self.hands.left = self.hands.per_turn;
        self.stream.live(*number, batch, self.now, &mut self.hands);
    }

    /// Sends the engine's answer to the request; `without` is the number of a batch dropped on the
    /// way.
    fn answer(&mut self, engine: &Engine, without: Option<u64>) {
        let Some(from) = self.hands.asked.take() else { return };
        self.hands.left = self.hands.per_turn;
        for (number, batch) in engine.past.iter().filter(|(number, _)| *number >= from) {
            if Some(*number) != without || *number == from {
                self.stream.replayed(*number, batch, self.now, &mut self.hands);
            }
            if self.hands.asked.is_some() {
                return; // a new request cancels this answer
            }
        }
        self.stream.replay_ended(self.now, &mut self.hands);
    }

    /// Takes the turns that the stream asks for.
    fn take_turns(&mut self) {
        while self.stream.deadline() == Some(0.0) {
            let before = self.stream.counts().batches;
            self.hands.left = self.hands.per_turn;
            self.stream.tick(self.now, &mut self.hands);
            assert!(self.stream.counts().batches - before <= self.hands.per_turn as u64);
        }
    }

    fn wait(&mut self) {
        self.now += 2.5;
        self.stream.tick(self.now, &mut self.hands);
    }

    fn reconnect(&mut self) {
        self.stream.disconnected();
        assert_eq!(self.stream.standing(), Standing::Connecting);
        self.stream.connected(self.now, &mut self.hands);
    }

    fn held(&self, prompt: u64) -> u64 {
        let (mut chain, mut hits) = (Vec::new(), [0]);
        hash_tokens(self.feed.keys().tokens, BLOCK as usize, &tokens(prompt, 0, 40), &mut chain);
        self.feed.router().lock().caches().read().gpu().match_prefix(&chain, &mut hits);
        hits[0].into()
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    /// Batches are lost, replayed or cut off, and engines restart. Afterwards, a live stream knows
    /// the engine's cache, and an incomplete stream claims only cached blocks.
    #[test]
    fn the_index_is_the_engines_cache(
        can_replay in any::<bool>(),
        per_turn in prop_oneof![Just(1usize), Just(2), Just(1000)],
        keep in prop_oneof![Just(3usize), Just(1000)],
        steps in prop::collection::vec(
            (0u8..14, 0u8..12, 0..PROMPTS, 0u64..8, 1u64..4, 0u64..4, any::<bool>(), any::<bool>()), 1..80),
    ) {
        let mut engine = Engine::new(keep, 0);
        let mut bed = Bed::new(can_replay, per_turn);
        for (what, kind, prompt, block, length, number, lost, turns) in steps {
            if turns {
                bed.take_turns();
            }
            match what {
                0..=8 => {
                    let batch = engine.step(kind, prompt, block, length);
                    if !(lost && number == 0) {
                        bed.hear(&batch);
                    }
                }
                9..=10 => {
                    let without = lost.then(|| bed.hands.asked.unwrap_or(0) + number);
                    bed.answer(&engine, without);
                }
                11 => bed.wait(),
                12 => bed.reconnect(),
                _ => {
                    // Another process publishes some batches before the subscription reaches it.
                    engine = Engine::new(keep, engine.moment);
                    for _ in 0..number {
                        engine.step(kind, prompt, block, length);
                    }
                    bed.reconnect();
                }
            }
        }
        // Two more batches show any gap, nothing more is lost, and unanswered requests are sent
        // again.
        for _ in 0..2 {
            bed.hear(&engine.step(11, 0, 0, 0));
        }
        for _ in 0..3 {
            for _ in 0..10 {
                bed.answer(&engine, None);
                bed.take_turns();
            }
            bed.now += 15.0;
            bed.stream.tick(bed.now, &mut bed.hands);
        }
        bed.answer(&engine, None);
        bed.take_turns();
        prop_assert!(bed.hands.asked.is_none());
        prop_assert_eq!(bed.stream.last_sequence(), Some(engine.next - 1));
        let whole = bed.stream.standing() == Standing::Live;
        for prompt in 0..PROMPTS {
            let (held, depth) = (bed.held(prompt), engine.depth(prompt));
            prop_assert!(held == depth || !whole && held < depth, "{} of {} blocks", held, depth);
        }
        if can_replay && keep == 1000 {
            prop_assert!(whole, "all could be asked for");
        }
    }
}

#[test]
fn a_replay_that_nobody_answers_is_given_up() {
    let (mut engine, mut bed) = (Engine::new(1000, 0), Bed::new(true, 1000));
    assert_eq!(bed.hands.asked.take(), Some(0));
    let batches: Vec<_> = (0..3).map(|b| engine.step(0, 0, b, 1)).collect();
    batches.iter().for_each(|batch| bed.hear(batch));
    assert_eq!((bed.held(0), bed.stream.standing()), (0, Standing::Connecting));
    for _ in 0..2 {
        bed.wait();
        assert_eq!(bed.hands.asked.take(), Some(0), "asked again");
    }
    bed.wait();
    assert_eq!(bed.stream.counts().unanswered, 1);
    // The held batches start with number 0, so nothing is missing after all.
    assert_eq!((bed.held(0), bed.stream.standing()), (3, Standing::Live));
}

/// Batches that are known, or that miss others before them, arrive once a second.
#[test]
fn a_replay_without_end_is_given_up() {
    for (step, seconds) in [(0, 10), (2, 200)] {
        let (mut engine, mut bed) = (Engine::new(1000, 0), Bed::new(true, 1000));
        let (_, batch) = engine.step(0, 0, 0, 1);
        for number in 0..seconds {
            bed.stream.replayed(step * number, &batch, bed.now, &mut bed.hands);
            bed.now += 1.0;
            bed.stream.tick(bed.now, &mut bed.hands);
        }
        assert_eq!((bed.stream.counts().unanswered, bed.stream.standing()), (1, Standing::Incomplete));
        assert!(!bed.stream.is_asking());
    }
}

#[test]
fn what_waits_for_a_replay_is_bounded() {
    let (mut engine, mut bed) = (Engine::new(100_000, 0), Bed::new(true, 1000));
    for _ in 0..20_000 {
        let batch = engine.step(11, 0, 0, 0);
        bed.hear(&batch);
    }
    bed.hear(&engine.step(0, 0, 0, 2));
    bed.answer(&engine, None);
    assert_eq!((bed.held(0), bed.stream.standing()), (2, Standing::Live));
    assert_eq!(bed.stream.counts().batches, 20_001);
}

/// security F5: what a replay has held is applied over several turns, in its order, and batches
/// that come meanwhile wait behind it.
#[test]
fn held_batches_take_several_turns() {
    let (mut engine, mut bed) = (Engine::new(1000, 0), Bed::new(true, 2));
    for block in 0..5 {
        bed.hear(&engine.step(0, 0, block, 1));
    }
    let past = std::mem::take(&mut engine.past);
    bed.answer(&engine, None); // the engine has nothing to replay
    engine.past = past;
    assert_eq!((bed.held(0), bed.stream.deadline()), (2, Some(0.0)));
    bed.hear(&engine.step(0, 0, 5, 1));
    assert_eq!(bed.held(0), 2);
    bed.take_turns();
    assert_eq!((bed.held(0), bed.stream.counts().gaps), (6, 0));
}
