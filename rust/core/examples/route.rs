//! Routing inside your own gateway: no server, no network, no clock.
//!
//! `cargo run -p lmetric-core --example route`. docs/how-to/other_routers.md explains each step.
use lmetric_core::fleet::Role;
use lmetric_core::kv::hash::{Domain, hash_tokens};
use lmetric_core::plan::{Event, Failure, Usage};
use lmetric_core::request::Request;
use lmetric_core::router::ledger::Report;
use lmetric_core::router::{Router, RouterConfig};
use lmetric_core::{CoreError, Registry};

const BLOCK_TOKENS: usize = 16; // --block-size of the engines

fn main() -> Result<(), CoreError> {
    let policy = Registry::CORE.policy("lmetric", &[])?;
    let mut router = Router::new(policy, RouterConfig::default())?;
    for name in ["gpu-0", "gpu-1", "gpu-2"] {
        router.add_instance(name, Role::Both, None)?;
    }
    // A load report, as read from an engine: gpu-2 also has requests of other clients.
    let report =
        Report { at: 0.0, waiting: Some(3.0), running: Some(12.0), kv_usage: Some(0.4), ..Report::default() };
    router.engine_report("gpu-2", report)?;

    // Four questions with one system prompt. Prompts of other models or tenants get other domains.
    let domain = Domain::new(&[Some("my-model")], BLOCK_TOKENS);
    let mut now = 0.0; // seconds of your clock, which never go back
    let mut home = None;
    for turn in 0..4_u32 {
        let tokens: Vec<u32> = (0..2000).chain((turn + 1) * 10_000..(turn + 1) * 10_000 + 300).collect();
        let mut chain = Vec::new();
        hash_tokens(domain, BLOCK_TOKENS, &tokens, &mut chain);
        let request = Request {
            chain: &chain,
            prompt_tokens: tokens.len() as u32,
            tokens_per_block: BLOCK_TOKENS as f64,
            expected_output_tokens: Some(200),
            ..Request::default()
        };
        let decision = router.route(&request, now)?;
        let instance = router.fleet().name(decision.segment.instance);
        println!(
            "turn {turn}: {instance}, {} of {} tokens cached",
            decision.predicted_hit_tokens,
            tokens.len()
        );
        assert!(turn == 0 || home == Some(decision.segment.instance), "the system prompt is cached there");
        home = Some(decision.segment.instance);
        // Send the request to `instance`, and report what happens. The ledger counts it meanwhile.
        router.advance(decision.ticket, Event::Sent, now)?;
        now += 0.2;
        router.advance(decision.ticket, Event::FirstToken, now)?;
        now += 2.0;
        router.advance(decision.ticket, Event::Tokens(199), now)?;
        router.advance(decision.ticket, Event::Finished(Usage::default()), now)?;
    }
    assert_eq!(router.in_flight(), 0);

    // An engine that refuses: the ticket moves to the next instance of its ranking.
    let decision = router.route(&Request { prompt_tokens: 2000, ..Request::default() }, now)?;
    router.advance(decision.ticket, Event::Sent, now)?;
    let next = router.advance(decision.ticket, Event::Failed(Failure::Refused), now)?;
    let next = next.expect("two further instances").instance;
    println!(
        "{} refuses; next: {}",
        router.fleet().name(decision.segment.instance),
        router.fleet().name(next)
    );
    router.advance(decision.ticket, Event::Sent, now)?;
    // The client left: the request is over, wherever it is.
    router.advance(decision.ticket, Event::GaveUp(Failure::Cancelled), now)?;
    assert_eq!(router.in_flight(), 0);
    Ok(())
}

#[test]
fn the_example_runs() -> Result<(), CoreError> {
    main()
}
