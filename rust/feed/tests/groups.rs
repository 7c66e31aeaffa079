//! Hybrid models: predicted hits equal those of vLLM's own KV cache manager, whose events and hits
//! `tests/real/record_groups.py` records.
use lmetric_core::Registry;
use lmetric_core::fleet::Role;
use lmetric_core::kv::hash::hash_tokens;
use lmetric_core::kv::keys::Keys;
use lmetric_core::request::Request;
use lmetric_core::router::feed::KvFeed;
use lmetric_core::router::{IndexFeed, Router, RouterConfig, SharedRouter};
use lmetric_feed::apply::Applier;
use lmetric_feed::decode::Reader;
use std::sync::Arc;

struct Bed {
    feed: Arc<KvFeed>,
    applier: Applier,
    block_size: usize,
}

impl Bed {
    fn new(block_size: usize) -> Bed {
        let bytes = 16 << 20;
        let config =
            RouterConfig { index_feed: IndexFeed::Exact, index_bytes: bytes, ..RouterConfig::default() };
        let mut router = Router::new(Registry::CORE.policy("lmetric", &[]).unwrap(), config).unwrap();
        router.add_instance("e", Role::Both, None).unwrap();
        let keys = Keys::new(&[], block_size, 256).unwrap();
        let feed = Arc::new(KvFeed::new(SharedRouter::new(router), keys, bytes, true));
        let applier = Applier::new(feed.clone(), feed.source("e", 0).unwrap());
        Bed { feed, applier, block_size }
    }

    fn hit(&self, prompt: &[u32]) -> u64 {
        let mut chain = Vec::new();
        hash_tokens(self.feed.keys().tokens, self.block_size, prompt, &mut chain);
        let request = Request {
            chain: &chain,
            prompt_tokens: prompt.len() as u32,
            tokens_per_block: self.block_size as f64,
            ..Request::default()
        };
        let mut router = self.feed.router().lock();
        let decision = router.route(&request, 0.0).unwrap();
        router.drop_ticket(decision.ticket);
        decision.predicted_hit_tokens.into()
    }
}

/// Reads an array of bytes, which `Reader` returns raw with their head.
fn binary<'a>(reader: &mut Reader<'a>) -> &'a [u8] {
    let raw = reader.raw().unwrap();
    let head = match raw[0] {
        0xc4 => 2,
        0xc5 => 3,
        0xc6 => 5,
        other => panic!("{other:#x} begins no bytes"),
    };
    &raw[head..]
}

#[test]
fn predicted_hits_of_hybrid_models_equal_vllm() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/samples/vllm-0.32.0-groups.msgpack");
    let sample = std::fs::read(std::env::var("LMETRIC_GROUPS").unwrap_or(path.into())).unwrap();
    let mut reader = Reader::new(&sample);
    for _ in 0..reader.array().unwrap() {
        assert_eq!(reader.array().unwrap(), 3);
        let (name, size) = (reader.text().unwrap(), reader.unsigned().unwrap());
        let mut bed = Bed::new(size as usize);
        let (mut total, mut cut) = (0, 0);
        for step in 0..reader.array().unwrap() {
            assert_eq!(reader.array().unwrap(), 3);
            let mut prompt = Vec::new();
            reader.tokens(&mut prompt).unwrap();
            let hit = reader.unsigned().unwrap();
            assert_eq!(bed.hit(&prompt), hit, "{name}, step {step}, {} tokens", prompt.len());
            (total, cut) = (total + hit, cut + u64::from(hit < prompt.len() as u64 / size * size));
            bed.applier.apply(binary(&mut reader));
        }
        assert!(total > 0 && cut > 0, "{name}: no hits, or nothing but full hits");
        let tally = bed.applier.tally();
        assert_eq!(
            (&tally.skipped, tally.unknown_parent, tally.unknown_removed),
            (&[].into(), 0, 0),
            "{name}"
        );
        assert!(tally.blocks_removed > 0 || tally.group_blocks > 0, "{name}: no block was evicted");
    }
}
