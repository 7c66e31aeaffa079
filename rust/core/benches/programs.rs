//! A decision for a new agent program beside an empty and a full table of programs, and a tick:
//! `cargo bench -p lmetric-core --bench programs`.
use criterion::{Criterion, criterion_group, criterion_main};
use lmetric_core::Registry;
use lmetric_core::fleet::Role;
use lmetric_core::kv::hash::{Domain, hash_tokens};
use lmetric_core::plan::{Event, Usage};
use lmetric_core::program::ProgramConfig;
use lmetric_core::request::Request;
use lmetric_core::router::{IndexFeed, Router, RouterConfig};

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
}

impl Bed {
    fn new(programs: u32) -> Bed {
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
        let mut bed = Bed { router, chain: Vec::new(), prompt: (0..TOKENS).collect(), sent: 0 };
        (0..programs).for_each(|_| bed.decide());
        bed
    }

    fn now(&self) -> f64 {
        f64::from(self.sent) * 2e-4
    }

    /// Hashes a new prompt, decides and ends it.
    fn decide(&mut self) {
        self.sent += 1;
        self.prompt[0] = self.sent;
        self.chain.clear();
        hash_tokens(Domain::new(&[Some("model")], 16), 16, &self.prompt, &mut self.chain);
        let request = Request { prompt_tokens: TOKENS, tokens_per_block: 16.0, ..Request::default() };
        let now = self.now();
        let decision = self.router.route_taking(&request, &mut self.chain, None, now).expect("an instance");
        self.router.advance(decision.ticket, Event::Finished(Usage::default()), now).expect("open");
    }
}

fn bench(c: &mut Criterion) {
    let mut group = c.benchmark_group("programs");
    for (name, programs) in [("empty", 0), ("full", FULL)] {
        let mut bed = Bed::new(programs);
        group.bench_function(format!("decision, {name} table"), |b| {
            b.iter(|| {
                bed.decide();
                if programs == 0 && bed.sent.is_multiple_of(1024) {
                    bed.router.set_programs(None).expect("off");
                    bed.router.set_programs(Some(ProgramConfig::default())).expect("on");
                }
            });
        });
    }
    let mut bed = Bed::new(FULL);
    group.bench_function("tick, full table", |b| {
        b.iter(|| {
            let now = bed.now();
            bed.router.release_held(now)
        });
    });
}

criterion_group!(benches, bench);
criterion_main!(benches);
