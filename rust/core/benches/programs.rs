//! A decision for a new agent program with an empty and a full table of programs, and a tick:
//! `cargo bench -p lmetric-core --bench programs`.
use criterion::{Criterion, criterion_group, criterion_main};
use lmetric_core::Registry;
use lmetric_core::fleet::Role;
use lmetric_core::kv::hash::{Domain, hash_tokens};
use lmetric_core::plan::{Event, Usage};
use lmetric_core::program::ProgramConfig;
use lmetric_core::request::{Request, Tenant};
use lmetric_core::router::{IndexFeed, PrefixMatch, Router, RouterConfig};
use std::time::Instant;

/// Programs in a full table.
const FULL: u32 = 1 << 16;
/// Tokens of a prompt: those of 9 kB of text.
const TOKENS: u32 = 2250;

/// A router with 16 instances whose clients have sent prompts that came once.
struct Bed {
    router: Router,
    chain: Vec<u64>,
    prompt: Vec<u32>,
    sent: u32,
    /// Whether another tenant continues each prompt, so that two programs share its checkpoints.
    shared: bool,
}

impl Bed {
    fn new(programs: u32, shared: bool) -> Bed {
        let config = RouterConfig {
            programs: Some(ProgramConfig::default()),
            index_feed: IndexFeed::Exact,
            ..RouterConfig::default()
        };
        let policy = Registry::CORE.policy("lmetric", &[]).expect("a registered policy");
        let mut router = Router::new(policy, config).expect("good settings");
        for i in 0..16 {
            router.add_instance(&format!("engine-{i}"), Role::Both, Some(50_000)).expect("a new name");
        }
        let mut bed = Bed { router, chain: Vec::new(), prompt: (0..2 * TOKENS).collect(), sent: 0, shared };
        (0..programs).for_each(|_| bed.decide());
        bed
    }

    fn now(&self) -> f64 {
        f64::from(self.sent) * 2e-4
    }

    /// Hashes a new prompt, decides and ends it.
    fn decide(&mut self) {
        self.sent += 1;
        self.prompt[0] = if self.shared { self.sent / 2 } else { self.sent };
        self.chain.clear();
        let continues = self.shared && self.sent % 2 == 1;
        let prompt_tokens = if continues { 2 * TOKENS } else { TOKENS };
        let prompt = &self.prompt[..prompt_tokens as usize];
        hash_tokens(Domain::new(&[Some("model")], 16), 16, prompt, &mut self.chain);
        let tenant = Tenant { id: u64::from(continues), ..Tenant::NOBODY };
        let request = Request { prompt_tokens, tokens_per_block: 16.0, tenant, ..Request::default() };
        let now = self.now();
        let decision = self
            .router
            .route_matched(&request, &mut self.chain, &mut PrefixMatch::default(), None, now)
            .expect("an instance");
        self.router.advance(decision.ticket, Event::Finished(Usage::default()), now).expect("open");
    }
}

/// Seconds of a number of decisions. Clears an empty table before: it stays almost empty.
fn seconds(bed: &mut Bed, decisions: u32, programs: u32) -> f64 {
    if programs == 0 {
        bed.router.set_programs(None).expect("off");
        bed.router.set_programs(Some(ProgramConfig::default())).expect("on");
    }
    let start = Instant::now();
    (0..decisions).for_each(|_| bed.decide());
    start.elapsed().as_secs_f64() / f64::from(decisions)
}

/// Prints the median over interleaved pairs.
fn pairs(_: &mut Criterion) {
    for shared in [false, true] {
        let (mut empty, mut full) = (Bed::new(0, shared), Bed::new(FULL, shared));
        let mut pairs: Vec<(f64, f64)> =
            (0..501).map(|_| (seconds(&mut empty, 256, 0), seconds(&mut full, 256, FULL))).collect();
        pairs.sort_by(|a, b| (a.1 / a.0).total_cmp(&(b.1 / b.0)));
        let (empty, full) = pairs[pairs.len() / 2];
        let (name, ratio) =
            (if shared { "prompts that another tenant continues" } else { "new prompts" }, full / empty);
        println!("{name}: {:.2} us, full table {:.2} us, {ratio:.2}x", empty * 1e6, full * 1e6);
    }
}

fn bench(c: &mut Criterion) {
    let mut group = c.benchmark_group("programs");
    let mut bed = Bed::new(FULL, false);
    group.bench_function("tick, full table", |b| {
        b.iter(|| {
            let now = bed.now();
            bed.router.release_held(now)
        });
    });
}

criterion_group!(benches, pairs, bench);
criterion_main!(benches);
