//! Laws that hold for any load: no request is lost, memory is bounded and is released, the same
//! inputs give the same events.
use lmetric_core::kv::tier::Tier;
use lmetric_sim::{
    Admission, Engine, Generator, HostTier, KvEvent, Order, Preempt, Profile, Prompt, Request, Settings,
    StepEvents, TOKEN_SECONDS, TokenSlo,
};
use proptest::prelude::*;
use std::collections::{HashMap, HashSet};

#[derive(Clone, Debug)]
enum Do {
    Submit { family: u32, shared: u32, own: u32, output: u32, priority: i64, fetched: u32 },
    Abort(u64),
    Start,
    Finish,
}

fn action() -> impl Strategy<Value = Do> {
    prop_oneof![
        3 => (0u32..3, 0u32..40, 1u32..20, 1u32..30, -1i64..2, 0u32..60).prop_map(
            |(family, shared, own, output, priority, fetched)| {
                // Half of them compute their prompts, the others fetch some or all tokens.
                let fetched = if fetched < 30 { 0 } else { (fetched * 2).min(shared + own) };
                Do::Submit { family, shared, own, output, priority, fetched }
            }
        ),
        1 => (0u64..40).prop_map(Do::Abort),
        6 => Just(Do::Start),
        6 => Just(Do::Finish),
    ]
}

fn profile() -> impl Strategy<Value = Profile> {
    (1u32..6, 4u32..40, 1u32..6, 25u32..60).prop_map(|(max_sequences, batch, block_tokens, capacity)| {
        Profile {
            fixed_seconds: 0.01,
            decode_seconds_per_sequence: 1e-4,
            decode_seconds_per_context_token: 1e-6,
            prefill_seconds_per_token: 1e-4,
            prefill_seconds_per_attention_pair: 1e-7,
            max_batch_tokens: batch.max(max_sequences),
            max_sequences,
            block_tokens,
            cache_blocks: (90 + capacity).div_ceil(block_tokens),
            decode_throughput: None,
        }
    })
}

fn settings() -> impl Strategy<Value = Settings> {
    let slo = TokenSlo { think_seconds: 3.0 * TOKEN_SECONDS, ..TokenSlo::same(TOKEN_SECONDS) };
    let swap = prop::option::of((0.0f64..1e-3, 0u64..300)).prop_map(|swap| {
        swap.map_or(Preempt::Recompute, |(seconds_per_token, host_tokens)| Preempt::Swap {
            seconds_per_token,
            host_tokens,
        })
    });
    let host = prop::option::of((0.05f64..3.0, 0.0f64..1e-2, 0.0f64..1.0)).prop_map(|host| {
        host.map(|(capacity_ratio, seconds_per_token, step_ratio)| HostTier {
            capacity_ratio,
            seconds_per_token,
            step_ratio,
        })
    });
    (any::<bool>(), prop::sample::select(Order::names()), swap, host).prop_map(
        move |(reserve, order, swap, host)| {
            let order = Order::named(order, 1, slo).unwrap();
            Settings {
                admission: if reserve { Admission::Reserve } else { Admission::Vllm },
                host: host.filter(|_| !reserve && !order.preempts()),
                order,
                preempt: if reserve { Preempt::Recompute } else { swap },
                kv_events: true,
            }
        },
    )
}

/// A cache index that follows the log: copies by hash, the block before each block, and the hashes
/// in the host tier.
#[derive(Default)]
struct Follower(HashMap<u64, i64>, HashMap<u64, Option<u64>>, HashSet<u64>);

impl Follower {
    fn follow(&mut self, engine: &mut Engine) {
        let log = engine.kv_log();
        for event in &log.events {
            match event {
                KvEvent::Stored { tier: Tier::Gpu, parent, hashes, .. } => {
                    let mut before = *parent;
                    for &hash in &log.hashes[hashes.clone()] {
                        *self.0.entry(hash).or_default() += 1;
                        self.1.insert(hash, before.replace(hash));
                    }
                }
                KvEvent::Stored { hashes, .. } => {
                    assert!(log.hashes[hashes.clone()].iter().all(|&hash| self.2.insert(hash)));
                }
                KvEvent::Removed { tier: Tier::Cpu, hashes } => {
                    assert!(log.hashes[hashes.clone()].iter().all(|hash| self.2.remove(hash)));
                }
                KvEvent::Removed { hashes, .. } => {
                    log.hashes[hashes.clone()].iter().for_each(|&hash| *self.0.entry(hash).or_default() -= 1);
                }
                KvEvent::Cleared => self.0.clear(),
            }
        }
        log.clear();
    }
}

/// Plays actions, then steps until no request is left; checks the laws after each step.
fn play(profile: &Profile, settings: Settings, actions: &[Do]) -> Result<Vec<StepEvents>, TestCaseError> {
    let generator = Generator::new((0..50).collect(), 1000).unwrap();
    let mut engine = Engine::new(profile.clone(), settings.clone(), Some(generator)).unwrap();
    let (mut now, mut id, mut all, mut follower) = (0.0, 0, Vec::new(), Follower::default());
    let mut expected: HashMap<u64, u32> = HashMap::new();
    let mut made: HashMap<u64, u32> = HashMap::new();
    let mut running = false;
    let rest = std::iter::repeat_n(&[Do::Start, Do::Finish], 20_000).flatten();
    for (i, action) in actions.iter().chain(rest).enumerate() {
        match *action {
            Do::Submit { family, shared, own, output, priority, fetched } => {
                let common = (0..shared).map(|i| 100 + family * 50 + i);
                let prompt: Vec<u32> =
                    common.chain((0..own).map(|i| 500 + (id as u32 * 7 + i) % 400)).collect();
                let request = Request {
                    id,
                    prompt: Prompt::Tokens(&prompt),
                    output_tokens: output,
                    priority,
                    salt: None,
                    report_cached: false,
                    fetched_tokens: fetched,
                    think_tokens: own % (output + 1),
                };
                engine.submit(&request, now).unwrap();
                expected.insert(id, output);
                id += 1;
            }
            Do::Abort(id) => {
                prop_assert_eq!(engine.abort(id), expected.remove(&id).is_some());
            }
            Do::Start => match engine.start_step(now) {
                Some(end) => {
                    prop_assert!(end > now || running);
                    (now, running) = (end, true);
                }
                None => match engine.next_load() {
                    Some(end) => now = end.max(now),
                    None if i >= actions.len() => break,
                    None => {}
                },
            },
            Do::Finish => {
                let events = engine.finish_step().clone();
                prop_assert_eq!(events.steps > 0, running);
                running = false;
                let computed: u32 = events.prefilled.iter().map(|p| p.tokens).sum();
                for admitted in &events.admitted {
                    prop_assert!(admitted.loaded_tokens <= admitted.cached_tokens);
                    let swaps = settings.preempt != Preempt::Recompute;
                    prop_assert!(admitted.first_time || admitted.fetched_tokens == 0 || swaps);
                }
                let decoded = events.tokens.iter().filter(|t| !t.from_prefill).count() as u32;
                prop_assert!(computed + decoded <= profile.max_batch_tokens);
                for token in &events.tokens {
                    *made.entry(token.id).or_default() += 1;
                    prop_assert_eq!(token.last, made[&token.id] == expected[&token.id]);
                    prop_assert_eq!(token.last, events.finished.contains(&token.id));
                }
                events.finished.iter().for_each(|id| assert!(expected.remove(id).is_some()));
                follower.follow(&mut engine);
                prop_assert!(follower.0.values().all(|&copies| copies >= 0));
                prop_assert!(follower.0.values().sum::<i64>() <= i64::from(profile.cache_blocks));
                let ratio = settings.host.map_or(0.0, |host| host.capacity_ratio);
                prop_assert!(
                    follower.2.len() as f64 <= (ratio * f64::from(profile.cache_blocks)).round().max(1.0)
                );
                all.push(events);
            }
        }
        let load = engine.load();
        let c = load.counters;
        let most = if let Preempt::Swap { host_tokens, .. } = settings.preempt { host_tokens } else { 0 };
        prop_assert!(load.host_tokens <= most && c.swapped_in_tokens <= c.swapped_out_tokens);
        prop_assert_eq!(c.submitted, c.finished + c.aborted + u64::from(load.running + load.waiting));
        prop_assert!(load.running <= profile.max_sequences);
        prop_assert!(settings.admission == Admission::Reserve || (0.0..=1.0).contains(&load.kv_usage));
        prop_assert_eq!(load.running + load.waiting, expected.len() as u32);
    }
    let load = engine.load();
    prop_assert_eq!((load.running, load.waiting, load.kv_usage, load.context_tokens), (0, 0, 0.0, 0));
    prop_assert_eq!(load.host_tokens, 0);
    // A follower of the log knows exactly which blocks can be found.
    for (&hash, &copies) in &follower.0 {
        // A block is there only behind all blocks before it.
        let mut chain = vec![hash];
        while let Some(&Some(before)) = follower.1.get(&chain[0]) {
            chain.insert(0, before);
        }
        let tokens = chain.len() as u32 * profile.block_tokens;
        prop_assert_eq!(engine.hit_tokens(&chain, tokens + 1) == tokens, copies > 0);
    }
    prop_assert!(engine.reset_cache());
    Ok(all)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn nothing_is_lost_and_memory_comes_back(
        profile in profile(), settings in settings(), actions in prop::collection::vec(action(), 0..120),
    ) {
        let first = play(&profile, settings.clone(), &actions)?;
        prop_assert_eq!(first, play(&profile, settings, &actions)?);
    }

    /// The simulator's jumps over equal steps change only the rounding of times.
    #[test]
    fn jumps_equal_steps(
        profile in profile(), settings in settings(),
        requests in prop::collection::vec((0.0f64..0.3, 1u32..60, 1u32..30), 1..20),
    ) {
        let mut engines = [0, 1].map(|_| Engine::new(profile.clone(), settings.clone(), None).unwrap());
        let mut arrivals: Vec<_> = requests;
        arrivals.sort_by(|a, b| a.0.total_cmp(&b.0));
        let mut results = [vec![], vec![]];
        let mut all_steps = [0u64; 2];
        for (jumps, engine) in engines.iter_mut().enumerate() {
            let (mut now, mut next) = (0.0, 0);
            loop {
                while next < arrivals.len() && arrivals[next].0 <= now {
                    let (at, tokens, output_tokens) = arrivals[next];
                    let hashes: Vec<u64> = (0..u64::from(tokens.div_ceil(profile.block_tokens))).collect();
                    let prompt = Prompt::Chain { hashes: &hashes, tokens };
                    let fetched_tokens = if next % 2 == 0 { tokens } else { 0 };
                    let request = Request { id: next as u64, prompt, output_tokens, priority: 0, salt: None, report_cached: false, fetched_tokens, think_tokens: output_tokens / 2 };
                    engine.submit(&request, at).unwrap();
                    next += 1;
                }
                let until = arrivals.get(next).map_or(f64::INFINITY, |a| a.0);
                let end = if jumps == 1 { engine.start_steps(now, until) } else { engine.start_step(now) };
                match end {
                    Some(end) => {
                        now = end;
                        let events = engine.finish_step();
                        results[jumps].extend(events.finished.iter().map(|&id| (id, events.end)));
                    }
                    None => {
                        now = engine.next_load().unwrap_or(f64::INFINITY).min(until);
                        if now.is_infinite() {
                            break;
                        }
                    }
                }
            }
            all_steps[jumps] = engine.load().counters.steps;
        }
        prop_assert_eq!(all_steps[0], all_steps[1]);
        prop_assert_eq!(results[0].len(), arrivals.len());
        for (a, b) in results[0].iter().zip(&results[1]) {
            prop_assert_eq!(a.0, b.0);
            prop_assert!((a.1 - b.1).abs() < 1e-9, "{:?} {:?}", a, b);
        }
    }
}
