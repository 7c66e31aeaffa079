//! Times the stages of a decision in process: hash, match, score, commit, and all of them together.
use crate::errors::Result;
use lmetric_core::CoreError;
use lmetric_core::fleet::Role;
use lmetric_core::indicators::Indicator;
use lmetric_core::kv::hash::{self, Domain};
use lmetric_core::plan::{Event, Failure};
use lmetric_core::policy::Policy;
use lmetric_core::request::Request;
use lmetric_core::router::{FetchConfig, IndexFeed, Router, RouterConfig};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyString};
use std::time::Instant;

/// Adds its functions to the module.
pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(bench_decision, module)?)
}

const STAGES: [&str; 5] = ["hash", "match", "score", "commit", "total"];

/// Median and 99th percentile of a stage, in seconds.
struct Timing {
    p50: f64,
    p99: f64,
}

/// A prompt for the index: all instances hold the first tenth, one instance holds up to nine
/// tenths, and no instance holds the rest.
fn prompt(tokens: usize, which: usize, iteration: usize) -> Vec<u32> {
    let word = |part: usize, i: usize| ((part * 2_654_435_761 + i * 40_503) % 150_000) as u32;
    (0..tokens)
        .map(|i| match i * 10 / tokens.max(1) {
            0 => word(1, i),
            1..=8 => word(1000 + which, i),
            _ => word(1_000_000 + which * 1000 + iteration, i),
        })
        .collect()
}

fn measure(
    policy: Box<dyn Policy>,
    instances: usize,
    prompt_tokens: usize,
    iterations: usize,
    block_size: usize,
    stored_pairs: usize,
    feed: IndexFeed,
) -> std::result::Result<[Timing; 5], CoreError> {
    // For policies that read prefix fetches, their cost is timed too.
    let fetches = policy.reads().contains(Indicator::FetchTokens);
    let config = RouterConfig {
        index_feed: feed,
        index_bytes: 1 << 30,
        fetch: fetches.then(FetchConfig::default),
        ..RouterConfig::default()
    };
    let mut router = Router::new(policy, config)?;
    for i in 0..instances {
        router.add_instance(&format!("engine-{i}"), Role::Both, None)?;
        // Load reports and a spread of running requests, so that every policy has the values it
        // reads.
        let report = lmetric_core::router::ledger::Report {
            at: 0.0,
            waiting: Some((i % 3) as f64),
            running: Some((i % 17) as f64),
            kv_usage: Some((i % 10) as f64 / 10.0),
            ..lmetric_core::router::ledger::Report::default()
        };
        router.engine_report(&format!("engine-{i}"), report)?;
    }
    let domain = Domain::new(&[Some("bench")], block_size);
    let mut chain = Vec::new();
    // Distinct prompts, so that the processor's caches see a server's access pattern.
    let blocks_each = (prompt_tokens / block_size).max(1);
    let distinct = (stored_pairs / blocks_each).clamp(1, 2000);
    let mut store = |router: &mut Router, tokens: &[u32], instance: usize| {
        chain.clear();
        hash::hash_tokens(domain, block_size, tokens, &mut chain);
        router.caches().write().gpu_mut().stored(lmetric_core::Slot(instance as u32), None, &chain);
    };
    for i in 0..instances {
        let shared = prompt(prompt_tokens, i, 0);
        store(&mut router, &shared[..prompt_tokens / 10], i);
    }
    for which in 0..distinct {
        let tokens = prompt(prompt_tokens, which, 0);
        store(&mut router, &tokens[..prompt_tokens * 9 / 10], which % instances);
    }
    let mut samples: [Vec<f64>; 5] = Default::default();
    let mut now = 1.0;
    let mut chain = Vec::new();
    for iteration in 0..iterations {
        let tokens = prompt(prompt_tokens, (iteration * 7919) % distinct, iteration + 1);
        now += 1e-3;
        let start = Instant::now();
        chain.clear();
        hash::hash_tokens(domain, block_size, &tokens, &mut chain);
        let hashed = Instant::now();
        let request = Request {
            chain: &chain,
            prompt_tokens: tokens.len() as u32,
            tokens_per_block: block_size as f64,
            expected_output_tokens: Some(256),
            session: Some(iteration as u64),
            ..Request::default()
        };
        router.match_prefix(&request);
        let matched = Instant::now();
        let chosen = router.score(&request, now)?;
        let scored = Instant::now();
        let decision = router.commit(&request, None, chosen, now)?;
        let committed = Instant::now();
        let ends =
            [hashed - start, matched - hashed, scored - matched, committed - scored, committed - start];
        for (samples, elapsed) in samples.iter_mut().zip(ends) {
            samples.push(elapsed.as_secs_f64());
        }
        router.advance(decision.ticket, Event::Failed(Failure::Cancelled), now)?;
    }
    Ok(samples.map(|mut s| {
        s.sort_by(f64::total_cmp);
        Timing { p50: s[s.len() / 2], p99: s[(s.len() * 99 / 100).min(s.len() - 1)] }
    }))
}

/// Times the stages of decisions in process, in microseconds.
///
/// For each policy, number of instances and prompt length, runs `iterations` decisions over an
/// index of about `stored_pairs` (instance, block) pairs. All instances hold a prompt's first
/// tenth, one instance holds nine tenths, and no instance holds the rest. Returns dictionaries of
/// `policy`, `instances`, `prompt_tokens`, `stage` (`hash`, `match`, `score`, `commit`, `total`),
/// `p50_us`, `p99_us`. Raises `UnknownNameError`, `BadValueError`.
#[pyfunction]
#[pyo3(signature = (*, policies, instances, prompt_tokens, iterations=1000, block_size=16, stored_pairs=200_000,
    index="approximate"))]
fn bench_decision<'py>(
    py: Python<'py>,
    policies: Vec<String>,
    instances: Vec<usize>,
    prompt_tokens: Vec<usize>,
    iterations: usize,
    block_size: usize,
    stored_pairs: usize,
    index: &str,
) -> Result<Bound<'py, PyList>> {
    let feed = if index == "exact" { IndexFeed::Exact } else { IndexFeed::Approximate };
    for (what, ok) in [
        ("iterations", iterations > 0),
        ("block_size", block_size > 0),
        ("instances", instances.iter().all(|n| (1..=lmetric_core::ids::MAX_INSTANCES).contains(n))),
        ("prompt_tokens", prompt_tokens.iter().all(|n| (1..=10_000_000).contains(n))),
    ] {
        if !ok {
            return Err(CoreError::BadValue {
                what: what.into(),
                got: "a value out of range".into(),
                expected: format!(
                    "at least 1; instances at most {}, prompts at most 10 million tokens",
                    lmetric_core::ids::MAX_INSTANCES
                ),
            }
            .into());
        }
    }
    let results = PyList::empty(py);
    for policy in &policies {
        for &n in &instances {
            for &tokens in &prompt_tokens {
                let built = crate::policies::build(
                    lmetric_study::REGISTRY,
                    Some(PyString::new(py, policy).as_any()),
                    None,
                )?;
                let timings =
                    py.detach(|| measure(built, n, tokens, iterations, block_size, stored_pairs, feed))?;
                for (stage, timing) in STAGES.iter().zip(&timings) {
                    let row = PyDict::new(py);
                    row.set_item("policy", policy)?;
                    row.set_item("instances", n)?;
                    row.set_item("prompt_tokens", tokens)?;
                    row.set_item("stage", stage)?;
                    row.set_item("p50_us", timing.p50 * 1e6)?;
                    row.set_item("p99_us", timing.p99 * 1e6)?;
                    results.append(row)?;
                }
                py.check_signals()?;
            }
        }
    }
    Ok(results)
}
