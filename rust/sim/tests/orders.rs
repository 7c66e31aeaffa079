//! Local orders: cases worked out by hand, laws that hold for each order, and results of queueing
//! theory.
use lmetric_sim::{
    Admission, Engine, Order, Preempt, Profile, Prompt, Request, Settings, TOKEN_SECONDS, TokenSlo,
};
use proptest::prelude::*;

const ADMISSIONS: [Admission; 2] = [Admission::Reserve, Admission::Vllm];

#[derive(Clone, Copy, Debug)]
struct Ask {
    at: f64,
    prompt: u32,
    output: u32,
    /// Leading tokens of its prompt that equal those of all others, in full blocks.
    shared: u32,
}

const fn ask(at: f64, prompt: u32, output: u32) -> Ask {
    Ask { at, prompt, output, shared: 0 }
}

/// Round constants, so that times can be worked out by hand.
fn round(max_sequences: u32) -> Profile {
    Profile {
        fixed_seconds: 1.0,
        decode_seconds_per_sequence: 0.0,
        decode_seconds_per_context_token: 0.0,
        prefill_seconds_per_token: 0.01,
        prefill_seconds_per_attention_pair: 0.0,
        max_batch_tokens: 64,
        max_sequences,
        block_tokens: 16,
        cache_blocks: 64,
        decode_throughput: None,
    }
}

/// The outcome of each request, and of the engine.
#[derive(Debug, Default)]
struct Played {
    first_token: Vec<f64>,
    end: Vec<f64>,
    worst_gap: Vec<f64>,
    put_back: Vec<u32>,
    /// Preempted requests, in order.
    went_back: Vec<u64>,
    steps: u64,
}

impl Played {
    fn mean(times: &[f64], asks: &[Ask]) -> f64 {
        times.iter().zip(asks).map(|(end, ask)| end - ask.at).sum::<f64>() / asks.len() as f64
    }

    fn p99(times: &[f64], asks: &[Ask]) -> f64 {
        let mut taken: Vec<f64> = times.iter().zip(asks).map(|(end, ask)| end - ask.at).collect();
        taken.sort_by(f64::total_cmp);
        taken[taken.len() * 99 / 100]
    }
}

/// Plays requests to their ends. Checks at every step that memory is bounded and that no request is
/// lost.
fn play(profile: &Profile, admission: Admission, order: &str, asks: &[Ask], jumps: bool) -> Played {
    play_by(profile, admission, Order::named(order, 1, TokenSlo::same(TOKEN_SECONDS)).unwrap(), asks, jumps)
}

fn play_by(profile: &Profile, admission: Admission, order: Order, asks: &[Ask], jumps: bool) -> Played {
    play_with(profile, Settings { admission, order, ..Settings::default() }, asks, jumps)
}

fn play_with(profile: &Profile, settings: Settings, asks: &[Ask], jumps: bool) -> Played {
    let reserve = settings.admission == Admission::Reserve;
    let decodes_wait = settings.order.text().contains("decodes_wait=1");
    let mut engine = Engine::new(profile.clone(), settings, None).unwrap();
    let nan = || vec![f64::NAN; asks.len()];
    let mut out = Played { put_back: vec![0; asks.len()], ..Played::default() };
    (out.first_token, out.end, out.worst_gap) = (nan(), nan(), nan());
    let places = profile.max_sequences;
    let (mut now, mut next) = (0.0, 0);
    loop {
        while let Some(ask) = asks.get(next).filter(|ask| ask.at <= now) {
            let blocks = u64::from(ask.shared.min(ask.prompt) / profile.block_tokens);
            let hashes: Vec<u64> = (1..=blocks).collect();
            let prompt = Prompt::Chain { hashes: &hashes, tokens: ask.prompt };
            engine.submit(&Request::new(next as u64, prompt, ask.output), ask.at).unwrap();
            next += 1;
        }
        let until = asks.get(next).map_or(f64::INFINITY, |ask| ask.at);
        match if jumps { engine.start_steps(now, until) } else { engine.start_step(now) } {
            Some(end) => now = end,
            None if next < asks.len() => {
                now = asks[next].at;
                continue;
            }
            None => break,
        }
        let admitted = &engine.events().admitted;
        for &id in &engine.events().preempted {
            out.put_back[id as usize] += 1;
            out.went_back.push(id);
            assert!(!admitted.iter().any(|admitted| admitted.id == id), "{id} is readmitted at once");
        }
        // Reserving admission lets decodes grow past the memory, as no request is preempted for
        // memory; but then no request enters.
        let load = engine.load();
        let full = load.running > 1 && !admitted.is_empty();
        assert!(load.kv_usage <= 1.0 || (reserve && !full), "{load:?}");
        let decodes = engine.decode_load(0).0;
        let events = engine.finish_step();
        assert!(decodes + events.prefilled.len() as u32 <= places, "a batch of more than {places}");
        for chunk in events.prefilled.iter().filter(|chunk| chunk.done) {
            let at = &mut out.first_token[chunk.id as usize];
            *at = if at.is_nan() { now } else { *at };
        }
        for (&id, gaps) in events.finished.iter().zip(&events.gaps) {
            assert!(out.end[id as usize].is_nan(), "{id} ended twice");
            (out.end[id as usize], out.worst_gap[id as usize]) = (now, gaps.worst);
        }
        assert!(decodes_wait || load.running <= places);
    }
    let load = engine.load();
    let outputs: u32 = asks.iter().map(|ask| ask.output).sum();
    let prompts: u32 = asks.iter().map(|ask| ask.prompt).sum();
    assert!(engine.reset_cache());
    assert_eq!((load.waiting, load.running, load.kv_usage, load.host_tokens), (0, 0, 0.0, 0));
    assert_eq!(load.counters.finished, asks.len() as u64);
    assert_eq!(load.counters.generation_tokens, u64::from(outputs));
    assert_eq!(load.counters.prompt_tokens, u64::from(prompts));
    assert_eq!(load.counters.preemptions, u64::from(out.put_back.iter().sum::<u32>()));
    assert!(out.end.iter().all(|end| end.is_finite()));
    out.steps = load.counters.steps;
    out
}

fn close(got: &[f64], expected: &[f64]) {
    assert_eq!(got.len(), expected.len());
    for (a, b) in got.iter().zip(expected) {
        assert!((a - b).abs() < 1e-9, "{got:?} instead of {expected:?}");
    }
}

/// A long request has the only slot when a short one and a shorter one arrive.
const THREE: [Ask; 3] = [ask(0.0, 50, 20), ask(3.0, 60, 3), ask(3.1, 64, 2)];

#[test]
fn who_gets_the_only_place_by_hand() {
    for admission in ADMISSIONS {
        let run = |order| play(&round(1), admission, order, &THREE, true);
        // 1.5 for the prompt, then 19 decodes. Then 1.6 + 2, and 1.64 + 1.
        let fcfs = run("fcfs");
        close(&fcfs.end, &[20.5, 24.1, 26.74]);
        close(&run("priority").end, &fcfs.end);
        // The shorter answer first.
        let sjf = run("sjf");
        close(&sjf.end, &[20.5, 26.74, 23.14]);
        // The shorter prompt first.
        close(&run("spf").end, &fcfs.end);
        assert_eq!((sjf.put_back, fcfs.put_back), (vec![0; 3], vec![0; 3]));
        // This is after two decodes, at 3.5. The second has 3.6 s of work and the third 2.64. The
        // first, with 17 s left, would lose 1.52. Its tokens by then, 50 + 3, take 1.53 to compute
        // again; that makes its fourth token, and 16 decodes are left. The vLLM engine finds the 48
        // tokens of its full blocks again.
        let srpt = run("srpt");
        let again = if admission == Admission::Vllm { 1.05 } else { 1.53 };
        let (third, second) = (3.5 + 2.64, 3.5 + 2.64 + 3.6);
        close(&srpt.end, &[second + again + 16.0, second, third]);
        close(&srpt.first_token, &[1.5, third + 1.6, 3.5 + 1.64]);
        assert_eq!(srpt.put_back, [1, 0, 0]);
    }
}

#[test]
fn swapping_by_hand() {
    // The case of srpt, in five blocks: the third's take all that the cache kept of the first.
    let profile = Profile { cache_blocks: 5, ..round(1) };
    let order = Order::named("srpt", 1, TokenSlo::same(TOKEN_SECONDS)).unwrap();
    let run = |host_tokens| {
        let preempt = Preempt::Swap { seconds_per_token: 0.01, host_tokens };
        let settings = Settings { preempt, order: order.clone(), ..Settings::default() };
        play_with(&profile, settings, &THREE, true)
    };
    // At 3.5 the first has the KV of 52 tokens: 0.52 s out, in the step with the third's prompt.
    // Back in they take 0.52 s, in the step that makes its fourth token.
    let (swapped, third) = (run(52), 3.5 + 0.52 + 2.64);
    close(&swapped.end, &[third + 3.6 + 0.52 + 1.0 + 16.0, third + 3.6, third]);
    assert_eq!(swapped.put_back, [1, 0, 0]);
    // The host has no room for them: they are computed again.
    let (computed, third) = (run(51), 3.5 + 2.64);
    close(&computed.end, &[third + 3.6 + 1.53 + 16.0, third + 3.6, third]);
    // A copy that takes longer than the gain: no request is preempted.
    let preempt = Preempt::Swap { seconds_per_token: 0.2, host_tokens: 1000 };
    let dear = play_with(&profile, Settings { preempt, order, ..Settings::default() }, &THREE, true);
    assert_eq!(dear.put_back, [0; 3]);
}

#[test]
fn swapping_needs_blocks_and_a_time() {
    for (admission, seconds_per_token, what) in [
        (Admission::Reserve, 1e-6, "preempt"),
        (Admission::Vllm, -1.0, "seconds to swap"),
        (Admission::Vllm, f64::NAN, "seconds to swap"),
    ] {
        let preempt = Preempt::Swap { seconds_per_token, host_tokens: 10 };
        let settings = Settings { admission, preempt, ..Settings::default() };
        let message = Engine::new(round(1), settings, None).unwrap_err().to_string();
        assert!(message.contains(what), "{message}");
    }
}

#[test]
fn least_attained_service_by_hand() {
    let asks = [ask(0.0, 200, 400), ask(10.0, 64, 3)];
    for admission in ADMISSIONS {
        let run = play(&round(1), admission, "las", &asks, true);
        // The prompt takes four steps, 3 x 1.64 + 1.08. The first level ends at the time of 256
        // decodes.
        let turn = 6.0 + 250.0;
        let ended = turn + 1.64 + 2.0;
        // It has 451 tokens. The vLLM engine finds 448 of them again; the reserving engine takes 8
        // steps, with 0.01 per token.
        let again = if admission == Admission::Vllm { 1.03 } else { 12.51 };
        close(&run.end, &[ended + again + 400.0 - 252.0, ended]);
        assert_eq!(run.put_back, [1, 0]);
    }
}

#[test]
fn prompts_share_the_budget_by_rank() {
    // Both have slots. Orders that preempt let the second's prompt go before the rest of the
    // first's, which keeps its tokens.
    let asks = [ask(0.0, 400, 2), ask(0.5, 40, 2)];
    for order in ["fcfs", "spf"] {
        let run = play(&round(2), Admission::Reserve, order, &asks, true);
        close(&run.first_token, &[6.0 * 1.64 + 1.56; 2]);
    }
    let run = play(&round(2), Admission::Reserve, "srpt", &asks, true);
    // 64; 24 beside 40; 63 beside its decode; three times 64; 57.
    close(&run.first_token, &[5.0 * 1.64 + 1.63 + 1.57, 2.0 * 1.64]);
    assert_eq!(run.put_back, [0, 0]);
}

#[test]
fn requests_go_back_for_memory_only_where_that_is_enough() {
    // A prompt of 65 tokens takes more than 256 decodes do: its request is past the first level.
    let slow = |cache_blocks, max_batch_tokens| Profile {
        prefill_seconds_per_token: 5.0,
        cache_blocks,
        max_batch_tokens,
        ..round(3)
    };
    let long = |at| Ask { shared: 64, ..ask(at, 65, 10) };
    // The second finds four of the first's five blocks, so preempting the first frees one.
    let two_and = |prompt| [long(0.0), long(326.5), ask(331.0, prompt, 2)];
    for (cache_blocks, max_batch_tokens, prompt, put_back) in [
        // Six blocks in use; three are needed.
        (7, 66, 33, 0),
        (8, 66, 33, 1),
        // One is free. A budget of 16 tokens, but of 17 if a decode is preempted, and these need
        // two blocks.
        (6, 18, 40, 0),
        (7, 18, 40, 1),
    ] {
        let profile = slow(cache_blocks, max_batch_tokens);
        let run = play(&profile, Admission::Vllm, "las", &two_and(prompt), true);
        assert_eq!(run.put_back[0], put_back, "{cache_blocks} blocks, {run:?}");
    }
    // Preemption frees nine blocks, and three are needed.
    let run = play(&slow(10, 66), Admission::Vllm, "las", &[ask(0.0, 129, 10), ask(648.5, 33, 2)], true);
    assert_eq!(run.put_back, [1, 0], "{run:?}");
}

/// Returns every order, and the orders that can rank decodes with that setting.
fn orders() -> Vec<String> {
    let ranked = Order::specs().filter(|spec| spec.settings.contains(&"decodes_wait"));
    let ranked: Vec<String> = ranked.map(|spec| format!("{}(decodes_wait=1)", spec.name)).collect();
    assert_eq!(ranked.len(), 3);
    Order::names().into_iter().map(String::from).chain(ranked).collect()
}

#[test]
fn decodes_wait_for_tokens_of_the_budget_by_hand() {
    // 1.64 s for the first prompt's 64 tokens, twice. At 3.28 its work is 3.3 s and the work of the
    // second, of 64 tokens, 1.6 s.
    let asks = [ask(0.0, 128, 4), ask(3.0, 64, 3)];
    for admission in ADMISSIONS {
        let run = |order| play(&round(4), admission, order, &asks, true);
        // The first gets a token in every step, and the second 63 of the next one's.
        let beside = run("uniboost_base");
        close(&beside.first_token, &[3.28, 3.28 + 1.63 + 1.01]);
        close(&beside.end, &[3.28 + 1.63 + 1.01 + 1.0, 3.28 + 1.63 + 1.01 + 2.0]);
        // The second takes all 64 tokens, and the first waits.
        let behind = run("uniboost_base(decodes_wait=1)");
        close(&behind.first_token, &[3.28, 3.28 + 1.64]);
        close(&behind.end, &[3.28 + 1.64 + 3.0, 3.28 + 1.64 + 2.0]);
        close(&behind.worst_gap, &[1.64 + 1.0, 1.0]);
        assert_eq!(behind.put_back, [0, 0]);
    }
}

#[test]
fn decodes_wait_for_places_of_the_batch_by_hand() {
    // One slot. When the second arrives, with half the work, the first has two tokens. It pauses
    // with its memory, and makes its other 18 later.
    let asks = [ask(0.0, 64, 20), ask(2.0, 32, 3)];
    for admission in ADMISSIONS {
        let run = play(&round(1), admission, "uniboost_base(decodes_wait=1)", &asks, true);
        close(&run.first_token, &[1.64, 2.64 + 1.32]);
        close(&run.end, &[2.64 + 3.32 + 18.0, 2.64 + 3.32]);
        close(&run.worst_gap, &[3.32 + 1.0, 1.0]);
        assert_eq!(run.put_back, [0, 0]);
        // Else it must leave the batch, and its tokens are computed again.
        let left = play(&round(1), admission, "uniboost_base", &asks, true);
        assert_eq!(left.put_back, [1, 0]);
        assert!(left.end[0] > run.end[0], "{left:?}");
        // Within its bin of 256 tokens its priority stays, and it came first.
        let binned = play(&round(1), admission, "uniboost(decodes_wait=1)", &asks, true);
        close(&binned.end, &[1.64 + 19.0, 1.64 + 19.0 + 3.32]);
    }
}

#[test]
fn paused_decodes_go_back_first_for_memory() {
    // Blocks of 16. The first has 66 tokens in five of seven blocks and pauses; the second needs
    // three.
    let profile = Profile { cache_blocks: 7, ..round(1) };
    let asks = [ask(0.0, 64, 20), ask(2.0, 33, 3)];
    let order = Order::named("uniboost_base(decodes_wait=1)", 0, TokenSlo::same(TOKEN_SECONDS)).unwrap();
    for (preempt, again) in [(Preempt::Recompute, 1.0 + 0.02), (FREE, 1.0)] {
        let settings = Settings { order: order.clone(), preempt, ..Settings::default() };
        let run = play_with(&profile, settings, &asks, true);
        assert_eq!(run.put_back, [1, 0], "{run:?}");
        close(&run.end, &[2.64 + 3.33 + again + 17.0, 2.64 + 3.33]);
    }
}

fn profile() -> impl Strategy<Value = Profile> {
    (1u32..6, 16u32..200, 1u32..20, 0u32..1500).prop_map(|(max_sequences, batch, block_tokens, spare)| {
        Profile {
            fixed_seconds: 0.01,
            decode_seconds_per_sequence: 1e-4,
            decode_seconds_per_context_token: 1e-6,
            prefill_seconds_per_token: 1e-4,
            prefill_seconds_per_attention_pair: 1e-7,
            max_batch_tokens: batch.max(max_sequences),
            max_sequences,
            block_tokens,
            cache_blocks: (1800 + spare).div_ceil(block_tokens),
            decode_throughput: None,
        }
    })
}

/// Lengths over three decades, so that some pass several levels of attained service.
fn asks() -> impl Strategy<Value = Vec<Ask>> {
    let tokens = || (0.0f64..2.95).prop_map(|log10| 10f64.powf(log10) as u32);
    let drawn = (0.0f64..20.0, tokens(), tokens(), 0u32..400);
    let ask = drawn.prop_map(|(at, prompt, output, shared)| Ask { shared, ..ask(at, prompt, output) });
    prop::collection::vec(ask, 1..40).prop_map(|mut asks| {
        asks.sort_by(|a, b| a.at.total_cmp(&b.at));
        asks
    })
}

#[test]
fn a_token_slo_shares_a_prompt_out_over_steps() {
    // The first has its token after 1 + 0.1 s. Then 20 tokens of the second's prompt go with each
    // of its decodes: 5 steps of 1.2 s, and none of its tokens is late. In order of arrival 63 and
    // 37 tokens did, in steps of 1.63 and 1.37 s.
    let asks = [ask(0.0, 10, 20), ask(0.5, 100, 4)];
    for admission in ADMISSIONS {
        let slo = Order::named("slo", 0, TokenSlo::same(1.2)).unwrap();
        let kept = play_by(&round(8), admission, slo, &asks, true);
        close(&[kept.first_token[0]], &[1.1]);
        close(&[kept.first_token[1]], &[7.1]);
        close(&[kept.end[0]], &[21.1]);
        let fcfs = play(&round(8), admission, "fcfs", &asks, true);
        close(&[fcfs.first_token[1]], &[4.1]);
        // With an SLO that no step misses, the result is the same.
        let loose =
            play_by(&round(8), admission, Order::named("slo", 0, TokenSlo::same(9.0)).unwrap(), &asks, true);
        assert_eq!((loose.first_token, loose.end), (fcfs.first_token, fcfs.end));
        // With an SLO that the decodes alone miss, no prompt waits forever: 16 tokens per step, and
        // 4 in the seventh.
        let tight =
            play_by(&round(8), admission, Order::named("slo", 0, TokenSlo::same(0.5)).unwrap(), &asks, true);
        close(&[tight.first_token[1]], &[1.1 + 6.0 * 1.16 + 1.04]);
    }
}

#[test]
fn a_jump_ends_where_another_becomes_the_last() {
    // Three slots. The third has the most work left when a short one arrives, and too much to lose.
    // Its context is the longest, so its decodes take longer than the first's. The first has 400
    // tokens less to lose, and becomes the last after some of them.
    let profile = Profile {
        fixed_seconds: 0.01,
        decode_seconds_per_sequence: 1e-4,
        decode_seconds_per_context_token: 1e-6,
        prefill_seconds_per_token: 1e-4,
        prefill_seconds_per_attention_pair: 1e-7,
        max_batch_tokens: 28,
        max_sequences: 3,
        block_tokens: 7,
        cache_blocks: 258,
        decode_throughput: None,
    };
    let second = Ask { shared: 21, ..ask(0.79, 878, 111) };
    let asks = [Ask { shared: 21, ..ask(0.37, 383, 734) }, ask(0.68, 107, 180), second, ask(1.43, 1, 1)];
    let [jumped, stepped] =
        [true, false].map(|jumps| play(&profile, Admission::Vllm, "srpt_noisy", &asks, jumps));
    assert_eq!(stepped.put_back, [1, 0, 0, 0]);
    close(&jumped.first_token, &stepped.first_token);
    close(&jumped.end, &stepped.end);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn every_request_ends_once_and_jumps_equal_steps(
        profile in profile(), asks in asks(), order in prop::sample::select(orders()), reserve: bool,
    ) {
        let order = order.as_str();
        let admission = ADMISSIONS[usize::from(!reserve)];
        let jumped = play(&profile, admission, order, &asks, true);
        let stepped = play(&profile, admission, order, &asks, false);
        prop_assert_eq!(jumped.steps, stepped.steps);
        prop_assert_eq!(&jumped.put_back, &stepped.put_back);
        for (a, b) in jumped.end.iter().zip(&stepped.end) {
            prop_assert!((a - b).abs() < 1e-6, "{a} {b}");
        }
        // If memory is reserved, only orders preempt requests; and levels do so at most once each.
        let guarded = ["uniboost_memguard", "uniboost", "uniboost(decodes_wait=1)"].contains(&order);
        let preempts = Order::named(order, 1, TokenSlo::same(TOKEN_SECONDS)).unwrap().preempts();
        for (ask, &times) in asks.iter().zip(&jumped.put_back).filter(|_| reserve) {
            // No token takes more than 1.2 times the shortest decode.
            let levels = ((ask.prompt + ask.output) * 12 / 2560).checked_ilog2().map_or(0, |doubled| doubled + 1);
            prop_assert!(times == 0 || preempts);
            prop_assert!(order != "las" || times <= levels, "{times} times in {levels} levels");
            let bins = 1 + ((ask.prompt + ask.output) / 256).checked_ilog2().unwrap_or(0);
            prop_assert!(!guarded || times <= bins, "{times} times in {bins} bins");
        }
    }

    #[test]
    fn equal_requests_run_as_they_come(
        profile in profile(), prompt in 1u32..120, output in 1u32..130, reserve: bool,
        mut arrivals in prop::collection::vec(0.0f64..20.0, 1..25),
    ) {
        arrivals.sort_by(f64::total_cmp);
        let asks: Vec<Ask> = arrivals.into_iter().map(|at| ask(at, prompt, output)).collect();
        let admission = ADMISSIONS[usize::from(!reserve)];
        let fcfs = play(&profile, admission, "fcfs", &asks, true);
        // All stay within the first level, of 256 decodes. Predictions of equal lengths differ, so
        // srpt_noisy is left out.
        for order in ["priority", "sjf", "spf", "srpt", "las", "distboost", "uniboost_memguard", "uniboost"] {
            let run = play(&profile, admission, order, &asks, true);
            prop_assert_eq!(&run.end, &fcfs.end, "{}", order);
            prop_assert_eq!(&run.first_token, &fcfs.first_token, "{}", order);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn where_gamma_is_large_boosts_are_nothing_and_all_run_as_they_come(
        profile in profile(), asks in asks(), reserve: bool, swap: bool,
        rung in prop::sample::select(vec!["distboost", "uniboost_base", "uniboost_memguard"]),
    ) {
        // If memory runs out, MEMGUARD weighs the cost of bringing a request back against its
        // arrival: here 0.
        let free = !reserve && (swap || rung == "uniboost_memguard");
        let preempt = if free { FREE } else { Preempt::Recompute };
        let settings = Settings { admission: ADMISSIONS[usize::from(!reserve)], preempt, ..Settings::default() };
        let fcfs = play_with(&profile, settings.clone(), &asks, true);
        let order = boost(rung, &[("gamma", 1e6)]);
        let run = play_with(&profile, Settings { order, ..settings }, &asks, true);
        prop_assert_eq!(run.put_back, fcfs.put_back);
        for (a, b) in run.end.iter().zip(&fcfs.end) {
            // Jumps end when a priority changes, which changes the rounding of times.
            prop_assert!((a - b).abs() < 1e-9, "{a} {b}");
        }
    }
}

/// A host with room for all, and copies that take no time.
const FREE: Preempt = Preempt::Swap { seconds_per_token: 0.0, host_tokens: 1_000_000 };

#[test]
fn where_memory_runs_out_the_last_goes_less_what_it_costs_to_bring_it_back() {
    // Steps of 10 ms and of 16 tokens; boosts are 0. From 0.97 s on, when 42 steps have computed
    // the third's prompt beside two decodes, all three make a token per step. After 4.49 s they
    // have 449, 420 and 931 tokens: all of the memory. Computing those again takes 29, 27 and 59
    // steps, so the arrivals less that are -0.29, 0.03 and -0.04.
    let profile = Profile {
        prefill_seconds_per_token: 0.0,
        fixed_seconds: 0.01,
        max_batch_tokens: 16,
        block_tokens: 1,
        cache_blocks: 1800,
        ..round(5)
    };
    let asks = [ask(0.0, 1, 737), ask(0.3, 1, 796), ask(0.55, 579, 467)];
    let goes = |rung: &str, preempt| {
        let order = if rung == "fcfs" { Order::default() } else { boost(rung, &[("gamma", 1e6)]) };
        let settings = Settings { admission: Admission::Vllm, order, preempt, ..Settings::default() };
        play_with(&profile, settings, &asks, true).went_back[0]
    };
    for (rung, recomputed) in [("fcfs", 2), ("uniboost_base", 2), ("uniboost_memguard", 1)] {
        assert_eq!((goes(rung, Preempt::Recompute), goes(rung, FREE)), (recomputed, 2), "{rung}");
    }
}

fn boost(name: &str, settings: &[(&str, f64)]) -> Order {
    let inner: Vec<String> = settings.iter().map(|(name, value)| format!("{name}={value}")).collect();
    Order::named(&format!("{name}({})", inner.join(",")), 0, TokenSlo::same(TOKEN_SECONDS)).unwrap()
}

#[test]
fn least_work_first_helps_where_a_long_one_blocks_and_harms_in_a_burst() {
    // Figure 3: one slot, one second per step, preemption without loss.
    let profile = Profile { prefill_seconds_per_token: 0.0, ..round(1) };
    let run = |asks: &[Ask], gamma| {
        play_by(&profile, Admission::Reserve, boost("uniboost_base", &[("gamma", gamma)]), asks, true)
    };
    // Left: A of 8 tokens, then one of 2 every second. From its third token on A is more work than
    // the waiting ones.
    let staggered = [0, 1, 2, 3, 4].map(|i| ask(f64::from(i), 2, if i == 0 { 8 } else { 2 }));
    let (first, least) = (run(&staggered, 1e6), run(&staggered, 1e-6));
    close(&first.end, &[8.0, 10.0, 12.0, 14.0, 16.0]);
    close(&least.end, &[16.0, 4.0, 6.0, 8.0, 10.0]);
    assert_eq!((first.put_back[0], least.put_back[0]), (0, 1));
    assert!(Played::mean(&least.end, &staggered) < 0.7 * Played::mean(&first.end, &staggered));
    // Right: all arrive at once, and A is hardly longer: the exchange pays, and no request gains.
    let burst = [ask(0.0, 3, 3), ask(1.0, 3, 2), ask(1.0, 3, 2), ask(1.0, 3, 2)];
    let (first, least) = (run(&burst, 1e6), run(&burst, 1e-6));
    close(&first.end, &[3.0, 5.0, 7.0, 9.0]);
    close(&least.end, &[9.0, 4.0, 6.0, 8.0]);
    assert!(Played::mean(&least.end, &burst) > Played::mean(&first.end, &burst));
    // In between: A has waited for 10 s when the last arrives, whose two tokens are worth less at
    // this gamma.
    let late = [ask(0.0, 2, 30), ask(1.0, 2, 2), ask(20.0, 2, 2)];
    let between = run(&late, 0.3);
    close(&between.end, &[32.0, 4.0, 34.0]);
}

#[test]
fn who_goes_back_is_who_is_cheap_to_bring_back() {
    // 10 ms per step. When the third arrives the first has 64 + 65 tokens and the second 16 + 65:
    // bins of 128 and 64, boosts of about 64 and 71 s. The third is ahead of both.
    let profile =
        Profile { fixed_seconds: 0.01, prefill_seconds_per_token: 0.0, max_batch_tokens: 80, ..round(2) };
    let asks = [ask(0.0, 64, 100), ask(0.0, 16, 100), ask(0.655, 16, 2)];
    let first = |name, settings: &[(&str, f64)], seconds_per_token| {
        let preempt = Preempt::Swap { seconds_per_token, host_tokens: 1000 };
        let settings = Settings { preempt, order: boost(name, settings), ..Settings::default() };
        play_with(&profile, settings, &asks, true).went_back[0]
    };
    // The first is the last in rank, by 7 s; bringing it back takes 96 tokens more.
    for (seconds_per_token, goes) in [(0.0, 0), (0.04, 0), (0.2, 1)] {
        let guarded = first("uniboost_memguard", &[("bin_tokens", 16.0)], seconds_per_token);
        assert_eq!(guarded, goes, "{seconds_per_token}");
    }
    assert_eq!(first("uniboost_base", &[], 0.2), 0, "without MEMGUARD only ranks count");
}

#[test]
fn who_has_made_most_of_its_answer_is_not_put_back_by_hand() {
    // The case of srpt: at 3.5 the first has 3 of 20 tokens, or of 5.
    let long = play(&round(1), Admission::Reserve, "trail", &THREE, true);
    assert_eq!(long.put_back, [1, 0, 0]);
    let short = [ask(0.0, 50, 5), THREE[1], THREE[2]];
    let ends = |order| play_by(&round(1), Admission::Reserve, order, &short, true);
    // 2 s of it are left, and 2.64 s of the third. With other work than that, it is safe from 3
    // tokens on.
    close(&ends(boost("trail", &[])).end[..1], &[5.5]);
    // The new request is shorter than the rest; at three tokens the first is safe, or not yet.
    let quick = [ask(0.0, 50, 5), ask(3.1, 1, 1)];
    let safe = |threshold| {
        play_by(&round(1), Admission::Reserve, boost("trail", &[("threshold", threshold)]), &quick, true)
    };
    close(&safe(0.6).end, &[5.5, 6.51]);
    close(&safe(0.61).end, &[3.5 + 1.01 + 1.53 + 1.0, 4.51]);
}

#[test]
fn who_starves_is_promoted_by_hand() {
    // One slot; short requests arrive all the time, and the second is long. It waits from 1.0 on,
    // and each short one takes two steps.
    let mut asks = vec![ask(0.0, 10, 2), ask(1.0, 10, 9)];
    asks.extend((0..12).map(|i| ask(1.0 + f64::from(i), 10, 2)));
    for (steps, before) in [(1000.0, 12), (9.0, 4)] {
        let order = boost("ltr", &[("starvation_steps", steps)]);
        for jumps in [false, true] {
            let run = play_by(&round(1), Admission::Reserve, order.clone(), &asks, jumps);
            let earlier = run.end[2..].iter().filter(|&&end| end < run.end[1]).count();
            assert_eq!(earlier, before, "{steps} {run:?}");
        }
    }
}

#[test]
fn lengths_that_were_seen_tell_who_is_about_to_end() {
    // One slot. 32 answers of 60 and of 300 tokens by turns, and then a long one, when a short one
    // arrives: at its 30th token, 100th, 280th. A request that has outlived 64 tokens is a long
    // one, and is preempted; a request with 256 is about to end, and stays.
    let mut asks: Vec<Ask> = (0..32).map(|i| ask(0.0, 10, if i % 2 == 0 { 60 } else { 300 })).collect();
    let begin = 32.0 * 190.0;
    asks.push(ask(begin, 10, 300));
    for (made, put_back, waits) in [(30.0, 1, 34.0), (100.0, 1, 0.0), (280.0, 0, 20.0)] {
        let both = [&asks[..], &[ask(begin + made, 10, 60)]].concat();
        let run = play(&round(1), Admission::Vllm, "gittins", &both, true);
        assert_eq!(run.put_back[32], put_back, "{made}");
        let taken = run.end[33] - (begin + made + 60.0);
        assert!((taken - waits).abs() < 2.0, "{made}: {taken}");
    }
}

#[test]
fn settings_are_those_of_the_order() {
    for (name, setting, value, what) in [
        ("fcfs", "gamma", 0.1, "it has no settings"),
        ("distboost", "bin_tokens", 64.0, "expected gamma"),
        ("uniboost_memguard", "window", 500.0, "gamma, bin_tokens, hysteresis_seconds"),
        ("uniboost", "bin_tokens", 0.5, "a whole number"),
        ("uniboost", "window", 500.5, "local order: window: 500.5 is not valid; expected a whole number"),
        ("uniboost", "bin_tokens", 0.0, "bin tokens"),
        ("uniboost", "gamma", f64::NAN, "gamma"),
        ("uniboost", "max_gamma", 1e-9, "bounds"),
        ("ltr", "quantum_steps", 0.5, "a whole number"),
        ("trail", "threshold", 1.5, "0 to 1"),
        ("uniboost", "decodes_wait", 0.5, "decodes_wait: 0.5 is not valid; expected 0 (false) or 1 (true)"),
    ] {
        let text = format!("{name}({setting}={value})");
        let message = Order::named(&text, 0, TokenSlo::same(TOKEN_SECONDS)).unwrap_err().to_string();
        assert!(message.contains(what), "{message}");
    }
    for text in ["uniboost(gamma)", "uniboost(gamma=fast)", "uniboost(gamma=1", "uniboost)"] {
        let message = Order::named(text, 0, TokenSlo::same(TOKEN_SECONDS)).unwrap_err().to_string();
        assert!(message.contains(text), "{message}");
    }
    let order = boost("uniboost", &[("gamma", 0.5), ("bin_tokens", 64.0), ("every", 32.0)]);
    let built = format!("{order:?}");
    for set in ["gamma: 0.5,", "bin_tokens: 64,", "every: 32,"] {
        assert!(built.contains(set), "{built}");
    }
}

/// Poisson arrivals of answers; `output` makes their lengths from a number in (0, 1).
fn arriving(requests: usize, per_second: f64, seed: u64, output: impl Fn(f64) -> f64) -> Vec<Ask> {
    let mut state = seed;
    let mut uniform = move || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        ((state >> 11) as f64 + 0.5) / (1u64 << 53) as f64
    };
    let mut at = 0.0;
    (0..requests)
        .map(|_| {
            at -= uniform().ln() / per_second;
            let output = output(uniform()).clamp(1.0, 4000.0) as u32;
            ask(at, 50 + (uniform() * 400.0) as u32, output)
        })
        .collect()
}

/// Pareto: alpha 1.2, at least 20 tokens, cut at 4,000.
fn heavy_tailed(requests: usize, per_second: f64, seed: u64) -> Vec<Ask> {
    arriving(requests, per_second, seed, |u| 20.0 * u.powf(-1.0 / 1.2))
}

#[test]
fn on_heavy_tails_theory_holds() {
    let profile = quick();
    // One slot, as in theory, and a batch. Both are busy for three quarters of the time.
    for (admission, places, per_second) in
        ADMISSIONS.into_iter().flat_map(|admission| [(admission, 1, 0.75), (admission, 8, 6.0)])
    {
        for seed in 1..4 {
            let asks = heavy_tailed(2000, per_second, seed);
            let profile = Profile { max_sequences: places, ..profile.clone() };
            let orders = ["fcfs", "sjf", "srpt", "srpt_noisy", "las"];
            let [fcfs, sjf, srpt, noisy, las] = orders.map(|order| {
                let run = play(&profile, admission, order, &asks, true);
                println!(
                    "{admission:?} {places} {seed} {order}: ttft {:.3} s, end to end {:.3} s, P99 {:.3} s, {} put back",
                    Played::mean(&run.first_token, &asks),
                    Played::mean(&run.end, &asks),
                    Played::p99(&run.end, &asks),
                    run.put_back.iter().sum::<u32>()
                );
                (Played::mean(&run.first_token, &asks), Played::mean(&run.end, &asks))
            });
            assert!(srpt.1 < fcfs.1 && noisy.1 < fcfs.1, "mean end to end: {srpt:?} {noisy:?} {fcfs:?}");
            assert!(las.0 < fcfs.0, "mean TTFT: {las:?} {fcfs:?}");
            if places == 1 {
                assert!(srpt.1 < sjf.1 && srpt.1 < noisy.1, "mean end to end: {srpt:?} {sjf:?} {noisy:?}");
                assert!(las.1 < fcfs.1, "mean end to end: {las:?} {fcfs:?}");
            }
        }
    }
}

/// A usual engine, small.
fn quick() -> Profile {
    Profile {
        fixed_seconds: 0.01,
        decode_seconds_per_sequence: 1e-4,
        decode_seconds_per_context_token: 1e-7,
        prefill_seconds_per_token: 1e-4,
        prefill_seconds_per_attention_pair: 1e-8,
        max_batch_tokens: 512,
        max_sequences: 8,
        block_tokens: 16,
        cache_blocks: 2000,
        decode_throughput: None,
    }
}

/// Four of five answers have about 60 tokens, the fifth about 1,500: a request's tokens so far soon
/// show which of the two it is.
fn mixed(requests: usize, per_second: f64, seed: u64) -> Vec<Ask> {
    arriving(
        requests,
        per_second,
        seed,
        |u| if u < 0.8 { 20.0 + 100.0 * u } else { 1000.0 + 5000.0 * (u - 0.8) },
    )
}

#[test]
fn boosts_spare_the_short_without_harming_the_tail() {
    // About 85% and 80% busy; preemption costs the time of copying a usual model's KV.
    let preempt = Preempt::Swap { seconds_per_token: 5e-6, host_tokens: 1_000_000 };
    for (places, per_second) in [(1, 0.22), (8, 1.65)] {
        for seed in 1..4 {
            let asks = mixed(4000, per_second, seed);
            let profile = Profile { max_sequences: places, ..quick() };
            let [fcfs, las, uniboost] = ["fcfs", "las", "uniboost"].map(|name| {
                let settings = Settings { preempt, order: boost(name, &[]), ..Settings::default() };
                let run = play_with(&profile, settings, &asks, true);
                let (mean, p99) = (Played::mean(&run.end, &asks), Played::p99(&run.end, &asks));
                println!("{places} {seed} {name}: end to end {mean:.2} s, P99 {p99:.2} s");
                (mean, p99)
            });
            assert!(uniboost.0 < fcfs.0, "mean");
            // One slot, as in theory: the tail is shorter, too. In a batch it is as long.
            assert!(uniboost.1 < if places == 1 { 0.99 } else { 1.05 } * fcfs.1, "P99");
            assert!(las.1 > 1.4 * fcfs.1, "P99 with the least service first");
        }
    }
}

#[test]
fn a_requests_own_slo_counts_while_it_decodes() {
    // A step takes 1 s and 0.01 s for each prompt token.
    let profile = Profile { max_batch_tokens: 4096, ..round(4) };
    let told = |own: &[(u64, f64)], decodes: u64| {
        let order = Order::named("slo", 0, TokenSlo::same(2.0)).unwrap();
        let settings = Settings { order, ..Settings::default() };
        let mut engine = Engine::new(profile.clone(), settings, None).unwrap();
        let submit = |engine: &mut Engine, id, tokens, output_tokens| {
            let prompt = Prompt::Chain { hashes: &[], tokens };
            engine.submit(&Request::new(id, prompt, output_tokens), 0.0).unwrap();
        };
        (0..decodes).for_each(|id| submit(&mut engine, id, 16, 3));
        own.iter().for_each(|&(id, seconds)| engine.set_own_slo(id, seconds).unwrap());
        let mut now = engine.start_step(0.0).unwrap();
        engine.finish_step();
        submit(&mut engine, 9, 900, 1);
        let mut prompts = Vec::new();
        for _ in 0..3 {
            now = engine.start_step(now).unwrap();
            let events = engine.finish_step();
            prompts.push(events.prefilled.iter().map(|chunk| chunk.tokens).sum::<u32>());
        }
        prompts
    };
    // 100 tokens make a step of 2 s. The third step has no decodes left: the rest of the prompt.
    assert_eq!(told(&[], 2), [100, 100, 700]);
    assert_eq!(told(&[(0, 1.5)], 2), [50, 50, 800], "the shortest counts");
    assert_eq!(told(&[(0, 5.0)], 2), [100, 100, 700]);
    assert_eq!(told(&[(0, 5.0)], 1), [400, 400, 100], "its own alone");
    assert_eq!(told(&[(0, 5.0), (0, 1.5), (1, 4.0)], 2), [50, 50, 800], "the last told counts");
    let mut engine = Engine::new(round(4), Settings::default(), None).unwrap();
    let message = engine.set_own_slo(3, 1.0).unwrap_err().to_string();
    assert!(message.contains("request with an SLO"), "{message}");
    let message = engine.set_own_slo(3, 0.0).unwrap_err().to_string();
    assert!(message.contains("seconds a token"), "{message}");
}
