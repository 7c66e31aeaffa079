//! External load from engines' reports. A report can be older than the router's state and still
//! show ended requests.
use lmetric_core::Registry;
use lmetric_core::fleet::Role;
use lmetric_core::indicators::Indicator;
use lmetric_core::plan::{Event, Usage};
use lmetric_core::request::Request;
use lmetric_core::router::ledger::Report;
use lmetric_core::router::{Router, RouterConfig, TicketId};
use proptest::prelude::*;

const NAME: &str = "engine";

/// A router with one engine that also serves external requests.
struct World {
    router: Router,
    open: Vec<TicketId>,
    /// Number of own requests at each moment since the last new report.
    history: Vec<f64>,
    /// The last reported numbers.
    page: (f64, f64),
    samples: f64,
}

impl World {
    fn new() -> World {
        let config = RouterConfig { drain: false, ..RouterConfig::default() };
        let mut router = Router::new(Registry::CORE.policy("least_requests", &[]).unwrap(), config).unwrap();
        router.add_instance(NAME, Role::Both, None).unwrap();
        World { router, open: Vec::new(), history: vec![0.0], page: (0.0, 0.0), samples: 0.0 }
    }

    fn place(&mut self) {
        let request = Request { prompt_tokens: 16, tokens_per_block: 16.0, ..Request::default() };
        self.open.push(self.router.route(&request, 0.0).unwrap().ticket);
        self.history.push(self.open.len() as f64);
    }

    fn finish(&mut self) {
        if let Some(ticket) = self.open.pop() {
            self.router.advance(ticket, Event::Finished(Usage::default()), 0.0).unwrap();
            self.history.push(self.open.len() as f64);
        }
    }

    /// Sends a report sampled at this moment of the history.
    fn report(&mut self, moment: usize, foreign: f64) {
        self.samples += 1.0;
        self.page = (self.history[moment] + foreign, self.samples / 1e6);
        self.report_again();
        self.history = vec![self.open.len() as f64];
    }

    /// Sends the last report again.
    fn report_again(&mut self) {
        let (running, kv_usage) = self.page;
        let report = Report {
            at: 0.0,
            waiting: Some(0.0),
            running: Some(running),
            kv_usage: Some(kv_usage),
            ..Report::default()
        };
        self.router.engine_report(NAME, report).unwrap();
    }

    /// Returns the external requests that the router counts.
    fn foreign(&self) -> f64 {
        let slot = self.router.fleet().find(NAME).unwrap().index();
        self.router.columns().get(Indicator::Bs)[slot] - self.open.len() as f64
    }
}

#[test]
fn what_a_late_report_still_shows_is_not_somebody_elses() {
    let mut world = World::new();
    (0..5).for_each(|_| world.place());
    world.report(5, 0.0);
    (0..5).for_each(|_| world.finish());
    // Sampled while three of the five requests still ran.
    world.report(2, 0.0);
    assert_eq!(world.foreign(), 0.0);
    // A cached report repeats long after all requests have ended.
    (0..4).for_each(|_| world.place());
    world.report(4, 0.0);
    (0..4).for_each(|_| world.finish());
    for _ in 0..3 {
        world.report_again();
        assert_eq!(world.foreign(), 0.0);
    }
}

#[test]
fn others_that_come_are_seen_and_stay_while_ours_come_and_go() {
    let mut world = World::new();
    world.report(0, 3.0);
    assert_eq!(world.foreign(), 3.0);
    (0..4).for_each(|_| world.place());
    (0..4).for_each(|_| world.finish());
    world.report(4, 3.0);
    assert_eq!(world.foreign(), 3.0, "own requests do not change the external load");
    world.report(0, 0.0);
    assert_eq!(world.foreign(), 0.0, "the external requests ended");
}

proptest! {
    /// With a constant number of external requests, the router never counts more, for any sample
    /// times and repetitions. It counts exactly this number after a report from a period without
    /// own changes.
    #[test]
    fn others_are_never_overcounted(
        foreign in 0..4u8,
        ops in prop::collection::vec((0..5u8, any::<prop::sample::Index>()), 1..80),
    ) {
        let foreign = f64::from(foreign);
        let mut world = World::new();
        for (op, moment) in ops {
            match op {
                0 | 1 => world.place(),
                2 => world.finish(),
                3 => {
                    let still = world.history.len() == 1;
                    world.report(moment.index(world.history.len()), foreign);
                    prop_assert!(!still || world.foreign() == foreign);
                }
                _ if world.samples > 0.0 => world.report_again(),
                _ => {}
            }
            prop_assert!((0.0..=foreign).contains(&world.foreign()), "{} of {foreign}", world.foreign());
        }
    }
}
