//! Small cases worked out by hand.
use lmetric_core::kv::tier::Tier;
use lmetric_sim::{
    Admission, DecodeThroughput, Engine, Generator, KvEvent, Order, Preempt, Profile, Prompt, Request,
    Settings, TokenSlo,
};

fn round() -> Profile {
    Profile {
        fixed_seconds: 1.0,
        decode_seconds_per_sequence: 0.1,
        decode_seconds_per_context_token: 0.001,
        prefill_seconds_per_token: 0.01,
        prefill_seconds_per_attention_pair: 0.0001,
        max_batch_tokens: 64,
        max_sequences: 8,
        block_tokens: 16,
        cache_blocks: 32,
        decode_throughput: None,
    }
}

fn words() -> Generator {
    Generator::new((0..100).collect(), 1000).unwrap()
}

fn ask(id: u64, tokens: &[u32], output_tokens: u32) -> Request<'_> {
    Request::new(id, Prompt::Tokens(tokens), output_tokens)
}

fn close(a: f64, b: f64) {
    assert!((a - b).abs() < 1e-9, "{a} is not {b}");
}

/// Prompts of `n` tokens that differ in their first token.
fn prompt(first: u32, n: u32) -> Vec<u32> {
    (0..n).map(|i| if i == 0 { first } else { i }).collect()
}

#[test]
fn two_requests_share_steps() {
    let mut engine = Engine::new(round(), Settings::default(), Some(words())).unwrap();
    assert_eq!(engine.start_step(0.0), None);
    let (a, b) = (prompt(500, 100), prompt(501, 20));
    engine.submit(&ask(1, &a, 3), 0.0).unwrap();

    // 64 of A's 100 tokens: 1 + 64 x 0.01 + 64 x 32 x 0.0001
    let end = engine.start_step(0.0).unwrap();
    close(end, 1.8448);
    engine.submit(&ask(2, &b, 2), 1.0).unwrap(); // arrives while the step runs
    let events = engine.finish_step();
    assert_eq!((events.prefilled[0].tokens, events.prefilled[0].done, events.tokens.len()), (64, false, 0));

    // The other 36 behind 64, and B's 20: 1 + 56 x 0.01 + (36 x (64 + 18) + 20 x 10) x 0.0001
    let end2 = engine.start_step(end).unwrap();
    close(end2 - end, 1.0 + 0.56 + 0.3152);
    let events = engine.finish_step();
    assert_eq!(
        events.tokens.iter().map(|t| (t.id, t.from_prefill, t.last)).collect::<Vec<_>>(),
        [(1, true, false), (2, true, false)]
    );

    // Both decode, with 101 and 21 tokens of context: 1 + 2 x 0.1 + 122 x 0.001
    let end3 = engine.start_step(end2).unwrap();
    close(end3 - end2, 1.322);
    assert_eq!(engine.finish_step().finished, [2]);

    // A alone, 102 tokens: 1 + 0.1 + 0.102
    let end4 = engine.start_step(end3).unwrap();
    close(end4 - end3, 1.202);
    assert_eq!(engine.finish_step().finished, [1]);
    assert_eq!(engine.start_step(end4), None);

    let load = engine.load();
    assert_eq!((load.running, load.waiting, load.kv_usage), (0, 0, 0.0));
    let c = load.counters;
    assert_eq!((c.prompt_tokens, c.generation_tokens, c.finished, c.steps), (120, 5, 2, 4));
}

#[test]
fn a_prompt_seen_before_hits_whole_blocks_but_never_its_last_token() {
    for (tokens, hit) in [(64, 48), (65, 64), (15, 0), (17, 16)] {
        let mut engine = Engine::new(round(), Settings::default(), Some(words())).unwrap();
        let prompt = prompt(7, tokens);
        for (id, expected) in [(1, 0), (2, hit)] {
            engine.submit(&ask(id, &prompt, 1), 0.0).unwrap();
            engine.start_step(0.0).unwrap();
            assert_eq!(engine.finish_step().admitted[0].cached_tokens, expected, "{tokens} tokens");
            while engine.start_step(0.0).is_some() {
                engine.finish_step();
            }
        }
        let counters = engine.load().counters;
        assert_eq!(counters.prefix_cache_queries, u64::from(2 * tokens));
        assert_eq!(counters.prefix_cache_hits, u64::from(hit));
    }
}

#[test]
fn generated_tokens_are_cached_too_and_the_next_turn_hits_them() {
    let mut engine = Engine::new(round(), Settings::default(), Some(words())).unwrap();
    let mut turn = prompt(7, 20);
    engine.submit(&ask(1, &turn, 30), 0.0).unwrap();
    while engine.start_step(0.0).is_some() {
        turn.extend(engine.finish_step().tokens.iter().map(|token| token.token));
    }
    // 20 + 30 tokens, the last one not computed: 49, so three full blocks.
    turn.extend(prompt(9, 10));
    engine.submit(&ask(2, &turn, 1), 0.0).unwrap();
    engine.start_step(0.0).unwrap();
    assert_eq!(engine.finish_step().admitted[0].cached_tokens, 48);
}

#[test]
fn a_decode_takes_a_block_when_it_crosses_an_edge_and_the_full_one_is_stored_then() {
    let settings = Settings { kv_events: true, ..Settings::default() };
    let mut engine = Engine::new(round(), settings, Some(words())).unwrap();
    engine.submit(&ask(1, &prompt(7, 30), 6), 0.0).unwrap();
    let mut seen = vec![];
    while engine.start_step(0.0).is_some() {
        let blocks = engine.load().kv_usage * 32.0;
        engine.finish_step();
        seen.push((blocks, engine.kv_log().hashes.len()));
    }
    // The prefill computes positions 0 to 29, each further step the next one: position 32 opens the
    // third block.
    assert_eq!(seen, [(2.0, 1), (2.0, 1), (2.0, 1), (3.0, 2), (3.0, 2), (3.0, 2)]);
}

#[test]
fn salts_share_nothing() {
    let mut engine = Engine::new(round(), Settings::default(), Some(words())).unwrap();
    let prompt = prompt(7, 33);
    for (id, salt, hit) in [(1, None, 0), (2, Some("a"), 0), (3, Some("a"), 32), (4, Some("b"), 0)] {
        engine.submit(&Request { salt, ..ask(id, &prompt, 1) }, 0.0).unwrap();
        engine.start_step(0.0).unwrap();
        assert_eq!(engine.finish_step().admitted[0].cached_tokens, hit, "request {id}");
    }
}

#[test]
fn the_cache_log_names_parents_tokens_and_removals() {
    let profile = Profile { cache_blocks: 4, ..round() };
    let settings = Settings { kv_events: true, ..Settings::default() };
    let mut engine = Engine::new(profile, settings, Some(words())).unwrap();
    let first = prompt(7, 34);
    engine.submit(&ask(1, &first, 1), 0.0).unwrap();
    engine.start_step(0.0).unwrap();
    engine.finish_step();
    let log = engine.kv_log();
    let [KvEvent::Stored { tier: Tier::Gpu, parent: None, hashes, tokens, salt: None }] = &log.events[..]
    else {
        panic!("{log:?}")
    };
    assert_eq!((hashes.len(), &log.tokens[tokens.clone()]), (2, &first[..32]));
    let stored = log.hashes[hashes.clone()].to_vec();
    log.clear();

    // Three of four blocks: the empty blocks are evicted first (an unused block, then a block of
    // two tokens), then the tail.
    let second = prompt(8, 40);
    engine.submit(&ask(2, &second, 1), 0.0).unwrap();
    engine.start_step(0.0).unwrap();
    engine.finish_step();
    let log = engine.kv_log();
    let KvEvent::Removed { hashes, .. } = &log.events[0] else { panic!("{:?}", log.events[0]) };
    assert_eq!(log.hashes[hashes.clone()], stored[1..2]);
    assert!(matches!(log.events[1], KvEvent::Stored { parent: None, .. }));
    log.clear();

    // The next turn of the second request: behind its two blocks, so the event names the parent.
    let third = prompt(8, 50);
    engine.submit(&ask(3, &third, 1), 0.0).unwrap();
    engine.start_step(0.0).unwrap();
    assert_eq!(engine.finish_step().admitted[0].cached_tokens, 32);
    let log = engine.kv_log();
    let Some(KvEvent::Stored { parent: Some(_), hashes, tokens, .. }) = log.events.last() else {
        panic!("{log:?}")
    };
    assert_eq!((hashes.len(), &log.tokens[tokens.clone()]), (1, &third[32..48]));
    log.clear();

    // Reuse is reported only if requested: all three full blocks except the block of the last
    // token.
    for (id, report_cached, told) in [(4, false, 0), (5, true, 1)] {
        engine.submit(&Request { report_cached, ..ask(id, &third, 1) }, 0.0).unwrap();
        engine.start_step(0.0).unwrap();
        assert_eq!(engine.finish_step().admitted[0].cached_tokens, 48);
        let log = engine.kv_log();
        assert_eq!(log.events.len(), told, "request {id}");
        if let [KvEvent::Stored { parent: None, tokens, .. }] = &log.events[..] {
            assert_eq!(&log.tokens[tokens.clone()], &third[..48]);
        }
        log.clear();
    }
    assert!(engine.reset_cache());
    assert_eq!(engine.kv_log().events, [KvEvent::Cleared]);
}

#[test]
fn want_of_blocks_puts_the_latest_back_and_its_text_stays() {
    let alone = |prompt: &[u32], n| {
        let mut engine = Engine::new(round(), Settings::default(), Some(words())).unwrap();
        engine.submit(&ask(1, prompt, n), 0.0).unwrap();
        let mut text = Vec::new();
        while engine.start_step(0.0).is_some() {
            text.extend(engine.finish_step().tokens.iter().map(|t| t.token));
        }
        text
    };
    // 4 blocks: both fit with 2 blocks each, until the first needs its third one.
    let mut engine =
        Engine::new(Profile { cache_blocks: 4, ..round() }, Settings::default(), Some(words())).unwrap();
    let (a, b) = (prompt(7, 30), prompt(8, 30));
    engine.submit(&ask(1, &a, 20), 0.0).unwrap();
    engine.submit(&ask(2, &b, 20), 0.0).unwrap();
    let (mut texts, mut preempted, mut finished) = ([vec![], vec![]], vec![], vec![]);
    while engine.start_step(0.0).is_some() {
        let events = engine.finish_step();
        preempted.extend(events.preempted.clone());
        finished.extend(events.finished.clone());
        events.tokens.iter().for_each(|t| texts[t.id as usize - 1].push(t.token));
    }
    assert_eq!((preempted, finished), (vec![2], vec![1, 2]));
    assert_eq!(texts, [alone(&a, 20), alone(&b, 20)]);
    let counters = engine.load().counters;
    assert_eq!((counters.preemptions, counters.prompt_tokens, counters.generation_tokens), (1, 60, 40));
}

#[test]
fn a_request_put_back_finds_its_answer_again_with_tokens_or_without() {
    let (a, b) = (prompt(7, 30), prompt(8, 30));
    let prompts = [Prompt::Tokens(&a), Prompt::Tokens(&b)];
    let chains = [&[1], &[2]].map(|hashes| Prompt::Chain { hashes, tokens: 30 });
    for (generator, prompts) in [(Some(words()), prompts), (None, chains)] {
        // 5 blocks: both need their third at once, and the first gets it.
        let profile = Profile { cache_blocks: 5, ..round() };
        let mut engine = Engine::new(profile, Settings::default(), generator).unwrap();
        for (id, prompt) in [1, 2].into_iter().zip(prompts) {
            engine.submit(&Request { prompt, ..ask(id, &[], 15) }, 0.0).unwrap();
        }
        let mut hits = vec![];
        while engine.start_step(0.0).is_some() {
            hits.extend(engine.finish_step().admitted.iter().map(|a| (a.id, a.cached_tokens)));
        }
        // Its two full blocks: 30 tokens of the prompt and 2 of the answer.
        assert_eq!(hits, [(1, 0), (2, 0), (2, 32)]);
    }
}

#[test]
fn reserving_admission_lets_in_what_fits_and_one_always() {
    let settings = Settings { admission: Admission::Reserve, ..Settings::default() };
    let profile = Profile { cache_blocks: 4, ..round() }; // 64 tokens
    let mut engine = Engine::new(profile, settings, None).unwrap();
    let chain = |id, hashes, tokens, output| Request::new(id, Prompt::Chain { hashes, tokens }, output);
    engine.submit(&chain(1, &[1, 2], 20, 5), 0.0).unwrap();
    engine.submit(&chain(2, &[1, 3, 4], 44, 5), 0.0).unwrap(); // 20 + 44 = 64: just fits
    engine.submit(&chain(3, &[], 200, 2), 0.0).unwrap(); // more than all memory: waits until it is alone
    let end = engine.start_step(0.0).unwrap();
    let events = engine.finish_step();
    assert_eq!(events.admitted.iter().map(|a| (a.id, a.cached_tokens)).collect::<Vec<_>>(), [(1, 0), (2, 0)]);
    assert_eq!(engine.load().waiting, 1);
    // All of 20 + 44 prompt tokens in one step of 64; then both decode, four steps at once.
    let jump = engine.start_steps(end, f64::INFINITY).unwrap();
    // Step i has 21 + 45 + 2 i tokens of context, i = 0 to 3.
    close(jump - end, 4.0 * (1.0 + 0.2 + 0.066) + 0.001 * 2.0 * 6.0);
    let events = engine.finish_step();
    assert_eq!((events.steps, &events.finished[..]), (4, &[1, 2][..]));
    assert_eq!(engine.load().counters.generation_tokens, 10);
    engine.start_step(jump).unwrap();
    assert_eq!(engine.finish_step().admitted[0].id, 3);

    // Five blocks went into a cache of four. Of [1, 2] (with a partial block), [1, 3, 4]: the first
    // block of a chain is the newest.
    assert_eq!([engine.hit_tokens(&[1, 2], 20), engine.hit_tokens(&[1, 3, 4], 44)], [19, 43]);
    assert_eq!(engine.hit_tokens(&[1, 3, 5], 60), 32);
}

#[test]
fn priority_reorders_the_queue_only_when_asked_to() {
    for (order, expected) in [("fcfs", [1, 2, 3]), ("priority", [1, 3, 2])] {
        let order = Order::named(order, 0, TokenSlo::same(0.1)).unwrap();
        let profile = Profile { max_sequences: 1, ..round() };
        let mut engine =
            Engine::new(profile, Settings { order, ..Settings::default() }, Some(words())).unwrap();
        let prompt = prompt(7, 5);
        for (id, priority, at) in [(1, 0, 0.0), (2, 0, 0.1), (3, -1, 0.2)] {
            engine.submit(&Request { priority, ..ask(id, &prompt, 2) }, at).unwrap();
        }
        let (mut now, mut finished) = (0.0, vec![]);
        while let Some(end) = engine.start_step(now) {
            finished.extend(engine.finish_step().finished.clone());
            now = end;
        }
        assert_eq!(finished, expected);
    }
}

#[test]
fn a_step_does_not_see_what_comes_after_its_start() {
    let mut engine = Engine::new(round(), Settings::default(), Some(words())).unwrap();
    let prompt = prompt(7, 5);
    engine.submit(&ask(1, &prompt, 1), 2.0).unwrap();
    assert_eq!(engine.start_step(1.0), None);
    assert!(engine.start_step(2.0).is_some());
}

#[test]
fn an_abort_while_a_step_runs_leaves_the_others_alone() {
    let mut engine = Engine::new(round(), Settings::default(), Some(words())).unwrap();
    let (a, b) = (prompt(7, 40), prompt(8, 24));
    engine.submit(&ask(1, &a, 4), 0.0).unwrap();
    engine.submit(&ask(2, &b, 4), 0.0).unwrap();
    engine.start_step(0.0).unwrap();
    assert!(engine.abort(1) && !engine.abort(1) && !engine.abort(9));
    engine.submit(&ask(3, &a, 4), 0.0).unwrap(); // takes the slot of the aborted one
    let events = engine.finish_step();
    assert_eq!(events.tokens.iter().map(|t| t.id).collect::<Vec<_>>(), [2]);
    engine.start_step(1.0).unwrap();
    // The aborted prompt was in the batch to the end of its step, so its blocks are there.
    assert_eq!(engine.finish_step().admitted[0].cached_tokens, 32);
}

#[test]
fn what_cannot_be_is_refused_with_reasons() {
    let mut engine = Engine::new(round(), Settings::default(), Some(words())).unwrap();
    let p = prompt(7, 20);
    engine.submit(&ask(1, &p, 1), 0.0).unwrap();
    let long = vec![1; 512];
    let hashes = Request { prompt: Prompt::Chain { hashes: &[1], tokens: 16 }, ..ask(2, &p, 1) };
    for (request, reason) in [
        (ask(2, &[], 1), "at least one"),
        (ask(2, &p, 0), "at least 1"),
        (ask(1, &p, 1), "not in the engine already"),
        (ask(2, &long, 2), "at most 512"),
        (ask(2, &[1000], 1), "0 to 999"),
        (hashes, "token ids"),
    ] {
        let message = engine.submit(&request, 0.0).unwrap_err().to_string();
        assert!(message.contains(reason), "{message}");
    }
    engine.submit(&ask(2, &long, 1), 0.0).unwrap(); // the last token needs no block
    assert_eq!(engine.load().counters.submitted, 2);
}

fn chain(id: u64, hashes: &[u64], tokens: u32, output_tokens: u32) -> Request<'_> {
    Request { prompt: Prompt::Chain { hashes, tokens }, ..ask(id, &[], output_tokens) }
}

#[test]
fn a_fetched_prompt_computes_its_last_token_as_a_decode_does() {
    for admission in [Admission::Vllm, Admission::Reserve] {
        let settings = Settings { admission, kv_events: true, ..Settings::default() };
        let mut engine = Engine::new(round(), settings, None).unwrap();
        engine
            .submit(&Request { fetched_tokens: 100, ..chain(1, &[1, 2, 3, 4, 5, 6], 100, 3) }, 0.0)
            .unwrap();
        // Three tokens at 100, 101 and 102 tokens of context: 1 + 0.1 + 0.1, and so on. There is no
        // prefill.
        let end = engine.start_step(0.0).unwrap();
        close(end, 1.2);
        assert_eq!(
            engine.load().kv_usage * 32.0,
            if admission == Admission::Vllm { 7.0 } else { 100.0 / 16.0 }
        );
        let events = engine.finish_step();
        let admitted = events.admitted[0];
        assert_eq!((admitted.cached_tokens, admitted.fetched_tokens, admitted.first_time), (0, 99, true));
        assert_eq!((events.prefilled[0].tokens, events.prefilled[0].done), (1, true));
        let last = engine.start_steps(end, f64::INFINITY).unwrap();
        close(last - end, 1.201 + 1.202);
        assert_eq!(engine.finish_step().finished, [1]);
        // Fetched blocks can be found: the next request fetches only the tokens behind them.
        assert_eq!(engine.hit_tokens(&[1, 2, 3, 4, 5, 6], 100), 96);
        let next = chain(2, &[1, 2, 3, 4, 5, 6, 7, 8], 128, 1);
        engine.submit(&Request { fetched_tokens: 128, ..next }, last).unwrap();
        engine.start_step(last).unwrap();
        let admitted = engine.finish_step().admitted[0];
        assert_eq!((admitted.cached_tokens, admitted.fetched_tokens), (96, 31));
        let c = engine.load().counters;
        assert_eq!((c.prefix_cache_hits, c.fetched_prompt_tokens, c.prompt_tokens), (96, 130, 228));
    }
}

#[test]
fn a_part_that_is_fetched_is_not_computed_and_the_rest_is() {
    let mut engine = Engine::new(round(), Settings::default(), None).unwrap();
    engine.submit(&Request { fetched_tokens: 40, ..chain(1, &[], 60, 1) }, 0.0).unwrap();
    // 20 tokens behind 40: 1 + 20 x 0.01 + 20 x (40 + 10) x 0.0001.
    close(engine.start_step(0.0).unwrap(), 1.3);
    let error = engine.submit(&Request { fetched_tokens: 61, ..chain(2, &[], 60, 1) }, 0.0).unwrap_err();
    assert!(error.to_string().contains("fetched tokens of request 2"), "{error}");
}

#[test]
fn a_fetched_request_waits_for_a_place_in_the_batch_and_for_memory() {
    for profile in [Profile { max_sequences: 1, ..round() }, Profile { cache_blocks: 5, ..round() }] {
        for admission in [Admission::Vllm, Admission::Reserve] {
            let settings = Settings { admission, ..Settings::default() };
            let mut engine = Engine::new(profile.clone(), settings, None).unwrap();
            for id in [1, 2] {
                let hashes = [id * 10, id * 10 + 1, id * 10 + 2];
                engine.submit(&Request { fetched_tokens: 42, ..chain(id, &hashes, 42, 2) }, 0.0).unwrap();
            }
            let end = engine.start_step(0.0).unwrap();
            engine.finish_step();
            assert_eq!((engine.load().running, engine.load().waiting), (1, 1));
            engine.start_step(end).unwrap();
            assert_eq!(engine.finish_step().finished, [1]);
            engine.start_step(end).unwrap();
            assert_eq!(engine.finish_step().admitted[0].id, 2);
        }
    }
}

#[test]
fn what_was_fetched_is_lost_with_a_preemption() {
    // 4 blocks: both fit with 2 blocks each, until the first needs its third one.
    assert_eq!(fetched_again(Preempt::Recompute), (2, 0));
    // The host keeps 32 of its tokens. The cache had to evict the second block.
    assert_eq!(fetched_again(Preempt::Swap { seconds_per_token: 0.1, host_tokens: 40 }), (2, 32));
}

/// Returns the preemptions, and the tokens that the preempted request copies in when it returns.
fn fetched_again(preempt: Preempt) -> (u64, u32) {
    let settings = Settings { preempt, ..Settings::default() };
    let mut engine = Engine::new(Profile { cache_blocks: 4, ..round() }, settings, None).unwrap();
    for id in [1, 2] {
        engine.submit(&Request { fetched_tokens: 30, ..chain(id, &[], 30, 20) }, 0.0).unwrap();
    }
    let (mut now, mut again) = (0.0, vec![]);
    while let Some(end) = engine.start_step(now) {
        let events = engine.finish_step();
        again.extend(events.admitted.iter().filter(|a| !a.first_time).map(|a| (a.id, a.fetched_tokens)));
        now = end;
    }
    assert_eq!(engine.load().counters.finished, 2);
    assert_eq!(again.len(), 1);
    again[0]
}

#[test]
fn an_engine_past_the_end_of_its_throughput_stands_still() {
    let curve = DecodeThroughput { alpha: -1.0, beta: 3.0, gamma: 0.0, hold_peak: false };
    for (hold_peak, end) in [(false, f64::INFINITY), (true, 3.0 / 2.25)] {
        let decode_throughput = Some(DecodeThroughput { hold_peak, ..curve });
        let mut engine =
            Engine::new(Profile { decode_throughput, ..round() }, Settings::default(), None).unwrap();
        // Two of them make 2 tokens/s; three as printed none, held at the peak (1.5 of them) 2.25.
        for id in [1, 2] {
            engine.submit(&Request { fetched_tokens: 8, ..chain(id, &[], 8, 50) }, 0.0).unwrap();
        }
        let two = if hold_peak { 2.0 / 2.25 } else { 1.0 };
        close(engine.start_step(0.0).unwrap(), two);
        engine.finish_step();
        close(engine.start_steps(1.0, 1.0).unwrap() - 1.0, two);
        engine.finish_step();
        engine.submit(&Request { fetched_tokens: 8, ..chain(3, &[], 8, 50) }, 2.0).unwrap();
        let took = engine.start_steps(2.0, f64::INFINITY).unwrap() - 2.0;
        assert!(took == end || (took - end).abs() < 1e-9, "{took}");
        assert_eq!(engine.interrupt(5.0), None);
        assert_eq!(engine.progress(5.0).0, 1);
    }
}
