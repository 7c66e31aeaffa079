//! Local orders: cases by hand, laws that hold for each, and what queueing theory says of them.
use lmetric_sim::{Admission, Engine, Order, Profile, Prompt, Request, Settings, TOKEN_SECONDS, TokenSlo};
use proptest::prelude::*;

const ADMISSIONS: [Admission; 2] = [Admission::Reserve, Admission::Vllm];

#[derive(Clone, Copy, Debug)]
struct Ask {
    at: f64,
    prompt: u32,
    output: u32,
    /// Leading tokens of its prompt that equal those of all others, as far as blocks are full.
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

/// What came of each request, and of the engine.
#[derive(Debug, Default)]
struct Played {
    first_token: Vec<f64>,
    end: Vec<f64>,
    put_back: Vec<u32>,
    steps: u64,
}

impl Played {
    fn mean(times: &[f64], asks: &[Ask]) -> f64 {
        times.iter().zip(asks).map(|(end, ask)| end - ask.at).sum::<f64>() / asks.len() as f64
    }
}

/// Plays requests to their ends; checks all along that memory is bounded and that nothing is lost.
fn play(profile: &Profile, admission: Admission, order: &str, asks: &[Ask], jumps: bool) -> Played {
    play_by(profile, admission, Order::named(order, 1, TokenSlo::same(TOKEN_SECONDS)).unwrap(), asks, jumps)
}

fn play_by(profile: &Profile, admission: Admission, order: Order, asks: &[Ask], jumps: bool) -> Played {
    let reserve = admission == Admission::Reserve;
    let settings = Settings { admission, order, kv_events: false };
    let mut engine = Engine::new(profile.clone(), settings, None).unwrap();
    let nan = || vec![f64::NAN; asks.len()];
    let mut out =
        Played { first_token: nan(), end: nan(), put_back: vec![0; asks.len()], ..Played::default() };
    let (mut now, mut next) = (0.0, 0);
    loop {
        while let Some(ask) = asks.get(next).filter(|ask| ask.at <= now) {
            let blocks = u64::from(ask.shared.min(ask.prompt) / profile.block_tokens);
            let hashes: Vec<u64> = (1..=blocks).collect();
            let request = Request {
                id: next as u64,
                prompt: Prompt::Chain { hashes: &hashes, tokens: ask.prompt },
                output_tokens: ask.output,
                priority: 0,
                salt: None,
                report_cached: false,
                pulled_tokens: 0,
                think_tokens: 0,
            };
            engine.submit(&request, ask.at).unwrap();
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
            assert!(!admitted.iter().any(|admitted| admitted.id == id), "{id} is back at once");
        }
        // Reserving admission lets decodes grow past the memory, as nothing goes back for want of it; but nothing enters then.
        let load = engine.load();
        let full = load.running > 1 && !admitted.is_empty();
        assert!(load.kv_usage <= 1.0 || (reserve && !full), "{load:?}");
        let events = engine.finish_step();
        for chunk in events.prefilled.iter().filter(|chunk| chunk.done) {
            let at = &mut out.first_token[chunk.id as usize];
            *at = if at.is_nan() { now } else { *at };
        }
        for &id in &events.finished {
            assert!(out.end[id as usize].is_nan(), "{id} ended twice");
            out.end[id as usize] = now;
        }
        assert!(load.running <= engine.profile().max_sequences);
    }
    let load = engine.load();
    let outputs: u32 = asks.iter().map(|ask| ask.output).sum();
    let prompts: u32 = asks.iter().map(|ask| ask.prompt).sum();
    assert!(engine.reset_cache());
    assert_eq!((load.waiting, load.running, load.kv_usage), (0, 0, 0.0));
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

/// A long request has the only place when a short one and a shorter one come.
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
        // After two decodes, at 3.5, the second has 3.6 s of work and the third 2.64; the first, with 17 s left, would lose 1.52. What it
        // has then, 50 + 3 tokens, takes 1.53 to compute again; of that comes its fourth token, and 16 decodes are left. The vLLM engine
        // finds the 48 tokens of its full blocks again.
        let srpt = run("srpt");
        let again = if admission == Admission::Vllm { 1.05 } else { 1.53 };
        let (third, second) = (3.5 + 2.64, 3.5 + 2.64 + 3.6);
        close(&srpt.end, &[second + again + 16.0, second, third]);
        close(&srpt.first_token, &[1.5, third + 1.6, 3.5 + 1.64]);
        assert_eq!(srpt.put_back, [1, 0, 0]);
    }
}

#[test]
fn least_attained_service_by_hand() {
    let asks = [ask(0.0, 200, 400), ask(10.0, 64, 3)];
    for admission in ADMISSIONS {
        let run = play(&round(1), admission, "las", &asks, true);
        // The prompt takes four steps, 3 x 1.64 + 1.08. The first level ends with what 256 decodes take.
        let turn = 6.0 + 250.0;
        let ended = turn + 1.64 + 2.0;
        // It has 451 tokens. The vLLM engine finds 448 of them again, the reserving one takes 8 steps, with 0.01 a token.
        let again = if admission == Admission::Vllm { 1.03 } else { 12.51 };
        close(&run.end, &[ended + again + 400.0 - 252.0, ended]);
        assert_eq!(run.put_back, [1, 0]);
    }
}

#[test]
fn prompts_share_the_budget_by_rank() {
    // Both have places. Orders that preempt let the second's prompt go before the rest of the first's, which keeps what it has.
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
    // The second finds four of the first's five blocks, so that going back the first leaves one.
    let two_and = |prompt| [long(0.0), long(326.5), ask(331.0, prompt, 2)];
    for (cache_blocks, max_batch_tokens, prompt, put_back) in [
        // Six blocks in use; three are needed.
        (7, 66, 33, 0),
        (8, 66, 33, 1),
        // One is free; a budget of 16 tokens, but of 17 where a decode goes back, which need two.
        (6, 18, 40, 0),
        (7, 18, 40, 1),
    ] {
        let profile = slow(cache_blocks, max_batch_tokens);
        let run = play(&profile, Admission::Vllm, "las", &two_and(prompt), true);
        assert_eq!(run.put_back[0], put_back, "{cache_blocks} blocks, {run:?}");
    }
    // What goes back leaves nine blocks where three are needed.
    let run = play(&slow(10, 66), Admission::Vllm, "las", &[ask(0.0, 129, 10), ask(648.5, 33, 2)], true);
    assert_eq!(run.put_back, [1, 0], "{run:?}");
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
    // The first has its token after 1 + 0.1 s. Then 20 tokens of the second's prompt go with each of its decodes: 5 steps of 1.2 s, and none of them
    // is late; in order of arrival 63 and 37 tokens did, in steps of 1.63 and 1.37 s.
    let asks = [ask(0.0, 10, 20), ask(0.5, 100, 4)];
    for admission in ADMISSIONS {
        let slo = Order::named("slo", 0, TokenSlo::same(1.2)).unwrap();
        let kept = play_by(&round(8), admission, slo, &asks, true);
        close(&[kept.first_token[0]], &[1.1]);
        close(&[kept.first_token[1]], &[7.1]);
        close(&[kept.end[0]], &[21.1]);
        let fcfs = play(&round(8), admission, "fcfs", &asks, true);
        close(&[fcfs.first_token[1]], &[4.1]);
        // With an SLO that no step misses it is the same.
        let loose =
            play_by(&round(8), admission, Order::named("slo", 0, TokenSlo::same(9.0)).unwrap(), &asks, true);
        assert_eq!((loose.first_token, loose.end), (fcfs.first_token, fcfs.end));
        // One that the decodes miss alone keeps nobody waiting for ever: 16 tokens a step, and 4 in the seventh.
        let tight =
            play_by(&round(8), admission, Order::named("slo", 0, TokenSlo::same(0.5)).unwrap(), &asks, true);
        close(&[tight.first_token[1]], &[1.1 + 6.0 * 1.16 + 1.04]);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn every_request_ends_once_and_jumps_equal_steps(
        profile in profile(), asks in asks(), order in prop::sample::select(Order::NAMES.to_vec()), reserve: bool,
    ) {
        let admission = ADMISSIONS[usize::from(!reserve)];
        let jumped = play(&profile, admission, order, &asks, true);
        let stepped = play(&profile, admission, order, &asks, false);
        prop_assert_eq!(jumped.steps, stepped.steps);
        prop_assert_eq!(&jumped.put_back, &stepped.put_back);
        for (a, b) in jumped.end.iter().zip(&stepped.end) {
            prop_assert!((a - b).abs() < 1e-6, "{a} {b}");
        }
        // Where memory is reserved, only orders put requests back; and levels do so once each at most.
        let preempts = ["srpt", "srpt_noisy", "las"].contains(&order);
        for (ask, &times) in asks.iter().zip(&jumped.put_back).filter(|_| reserve) {
            // No token takes more than 1.2 times the shortest decode.
            let levels = ((ask.prompt + ask.output) * 12 / 2560).checked_ilog2().map_or(0, |doubled| doubled + 1);
            prop_assert!(times == 0 || preempts);
            prop_assert!(order != "las" || times <= levels, "{times} times in {levels} levels");
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
        // All stay within the first level, of 256 decodes. Predictions of equal lengths differ, so srpt_noisy is left out.
        for order in ["priority", "sjf", "spf", "srpt", "las"] {
            let run = play(&profile, admission, order, &asks, true);
            prop_assert_eq!(&run.end, &fcfs.end, "{}", order);
            prop_assert_eq!(&run.first_token, &fcfs.first_token, "{}", order);
        }
    }
}

/// Poisson arrivals of answers whose lengths are Pareto (alpha 1.2, at least 20 tokens, cut at 4,000).
fn heavy_tailed(requests: usize, per_second: f64, seed: u64) -> Vec<Ask> {
    let mut state = seed;
    let mut uniform = move || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        ((state >> 11) as f64 + 0.5) / (1u64 << 53) as f64
    };
    let mut at = 0.0;
    (0..requests)
        .map(|_| {
            at -= uniform().ln() / per_second;
            let output = (20.0 * uniform().powf(-1.0 / 1.2)).min(4000.0) as u32;
            ask(at, 50 + (uniform() * 400.0) as u32, output)
        })
        .collect()
}

#[test]
fn on_heavy_tails_theory_holds() {
    let profile = Profile {
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
    };
    // One place, as in theory, and a batch. Both are busy for three quarters of the time.
    for (admission, places, per_second) in
        ADMISSIONS.into_iter().flat_map(|admission| [(admission, 1, 0.75), (admission, 8, 6.0)])
    {
        for seed in 1..4 {
            let asks = heavy_tailed(2000, per_second, seed);
            let profile = Profile { max_sequences: places, ..profile.clone() };
            let [fcfs, sjf, srpt, noisy, las] = ["fcfs", "sjf", "srpt", "srpt_noisy", "las"].map(|order| {
                let run = play(&profile, admission, order, &asks, true);
                println!(
                    "{admission:?} {places} {seed} {order}: ttft {:.3} s, end to end {:.3} s, {} put back",
                    Played::mean(&run.first_token, &asks),
                    Played::mean(&run.end, &asks),
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
