//! Agent programs of several routers: each counts the programs of the others in the working sets.
#[path = "common/router.rs"]
mod common;

use common::{chain, request};
use lmetric_core::admission::Verdict;
use lmetric_core::fleet::Role;
use lmetric_core::ids::ArrivalId;
use lmetric_core::plan::{Event, Usage};
use lmetric_core::program::MAX_ROOTS;
use lmetric_core::program::{PeerRoot, ProgramConfig, ProgramMode, ProgramRules, Terms};
use lmetric_core::request::Request;
use lmetric_core::router::{Published, Router, RouterConfig, Share, TicketId};
use lmetric_core::{InstanceId, Registry};
use proptest::prelude::*;
use std::collections::BTreeMap;
use std::sync::Arc;

const INSTANCES: [&str; 2] = ["x", "y"];
const ROOT_BLOCKS: usize = 200;
/// Tokens of a program of [`prompt`] behind its root.
const OWN_BLOCKS: usize = 100;

/// The core's rules, but programs always return to their instance.
#[derive(Debug)]
struct Returning;

impl ProgramRules for Returning {
    fn terms(&self) -> Terms {
        Terms { free: 0.0, ..Terms::default() }
    }
}

fn config(mode: ProgramMode) -> ProgramConfig {
    let rules: Arc<dyn ProgramRules> = Arc::new(Returning);
    let exact = ProgramConfig {
        mode,
        theta: 1.0,
        resume: 1.0,
        growth: 0.0,
        rules: Some(rules),
        ..Default::default()
    };
    ProgramConfig { min_tokens: 100, max_hold_seconds: 1e9, ..exact }
}

/// Routers before the same instances, and what their clients wait for.
struct Fleet {
    routers: Vec<Router>,
    running: Vec<Vec<TicketId>>,
    held: Vec<BTreeMap<ArrivalId, Vec<u64>>>,
    now: f64,
}

impl Fleet {
    fn new(routers: usize, instances: &[&str], cache_blocks: u32, mode: ProgramMode) -> Fleet {
        let router = || {
            let policy = Registry::CORE.policy("least_requests", &[]).unwrap();
            let mut router = Router::new(policy, RouterConfig::default()).unwrap();
            for name in instances {
                let id = router.add_instance(name, Role::Both, None).unwrap();
                router.set_cache_blocks(id, Some(cache_blocks)).unwrap();
            }
            router.set_programs(Some(config(mode))).unwrap();
            router.release_held(0.0);
            router
        };
        let routers: Vec<Router> = (0..routers).map(|_| router()).collect();
        let count = routers.len();
        Fleet { routers, running: vec![Vec::new(); count], held: vec![BTreeMap::new(); count], now: 0.0 }
    }

    /// Sends a request through a router.
    fn ask(&mut self, at: usize, chain: Vec<u64>) {
        let (arrival, verdict) = self.routers[at].arrive(&request(&chain), self.now).unwrap().unwrap();
        match (verdict, arrival) {
            (Verdict::Free | Verdict::Run(_), Some(id)) => self.place(at, id, &chain),
            (Verdict::Held { .. }, Some(id)) => drop(self.held[at].insert(id, chain)),
            (Verdict::Refused { .. }, None) => {}
            other => panic!("{other:?}"),
        }
    }

    fn place(&mut self, at: usize, arrival: ArrivalId, chain: &[u64]) {
        let request = Request { arrival: Some(arrival), ..request(chain) };
        self.running[at].push(self.routers[at].route(&request, self.now).unwrap().ticket);
    }

    /// Runs the periodic work of a router.
    fn tick(&mut self, at: usize) {
        for (id, _) in self.routers[at].release_held(self.now).ready {
            // A client may leave between the release of its request and this call.
            if let Some(chain) = self.held[at].remove(&id) {
                self.place(at, id, &chain);
            }
        }
    }

    fn end(&mut self, at: usize, which: usize) {
        if !self.running[at].is_empty() {
            let which = which % self.running[at].len();
            let ticket = self.running[at].swap_remove(which);
            self.routers[at].advance(ticket, Event::Ended(Usage::default()), self.now).unwrap();
        }
    }

    fn leave(&mut self, at: usize) {
        if let Some((id, _)) = self.held[at].pop_first() {
            self.routers[at].drop_arrival(id, self.now);
        }
    }

    /// Each router sends its load to all others.
    fn exchange(&mut self) {
        for from in 0..self.routers.len() {
            let told = self.routers[from].share(self.now);
            for (to, router) in self.routers.iter_mut().enumerate().filter(|(to, _)| *to != from) {
                let told = told.iter().map(|(name, load)| (&**name, load.clone()));
                router
                    .hear(&from.to_string(), told, self.now)
                    .unwrap_or_else(|error| panic!("{to}: {error}"));
            }
        }
    }

    fn expected(&self, at: usize, instance: usize) -> f64 {
        let programs = self.routers[at].programs().unwrap();
        programs.instances().get(instance).map_or(0.0, |ledger| ledger.expected_tokens())
    }

    /// The working set of an instance, from what each of these routers needs there by itself.
    fn union(&self, routers: &[usize], instance: usize) -> f64 {
        let (mut tokens, mut roots) = (0.0, BTreeMap::<u64, (f64, f64)>::new());
        for at in routers {
            let programs = self.routers[*at].programs().unwrap();
            let demand = programs.demand_per_instance(self.now);
            let needed = programs.published(InstanceId(instance as u32), demand);
            tokens += needed.tokens;
            for PeerRoot { root, probability } in needed.roots {
                let entry = roots.entry(root.hash).or_insert((root.tokens, 0.0));
                assert_eq!(entry.0, root.tokens, "one root, one length");
                entry.1 += probability;
            }
        }
        tokens + roots.values().map(|(tokens, probability)| tokens * probability.min(1.0)).sum::<f64>()
    }
}

/// A prompt of a program: a system prompt that many programs share, and its own context.
fn prompt(root: u64, program: u64, turn: usize) -> Vec<u64> {
    let mut blocks = chain(1 + root * 1_000_000, ROOT_BLOCKS);
    // A hash names a block behind all blocks before it, so no two places in prompts share one.
    blocks.extend(chain(10_000_000 + program * 100_000 + root * 1_000, OWN_BLOCKS + 10 * turn));
    blocks
}

#[derive(Clone, Debug)]
enum Step {
    Turn { at: usize, root: u64, program: u64, turn: usize },
    Chat { at: usize, name: u64 },
    End { at: usize, which: usize },
    Leave { at: usize },
    Tick { at: usize, seconds: f64 },
    Exchange,
}

fn steps(routers: usize) -> impl Strategy<Value = Vec<Step>> {
    let at = 0..routers;
    let turn = (at.clone(), 0..2u64, 0..8u64, 0..4usize);
    let turn = turn.prop_map(|(at, root, program, turn)| Step::Turn { at, root, program, turn });
    prop::collection::vec(
        prop_oneof![
            4 => turn,
            1 => (at.clone(), 0..50u64).prop_map(|(at, name)| Step::Chat { at, name }),
            3 => (at.clone(), 0..9usize).prop_map(|(at, which)| Step::End { at, which }),
            1 => at.clone().prop_map(|at| Step::Leave { at }),
            3 => (at, 0.0..40.0).prop_map(|(at, seconds)| Step::Tick { at, seconds }),
            2 => Just(Step::Exchange),
        ],
        1..60,
    )
}

impl Fleet {
    fn step(&mut self, step: Step) {
        match step {
            Step::Turn { at, root, program, turn } => self.ask(at, prompt(root, program, turn)),
            Step::Chat { at, name } => self.ask(at, chain(99_000_000 + name * 1000, 5)),
            Step::End { at, which } => self.end(at, which),
            Step::Leave { at } => self.leave(at),
            Step::Tick { at, seconds } => {
                self.now += seconds;
                self.tick(at);
            }
            Step::Exchange => self.exchange(),
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { max_shrink_iters: 2000, ..ProptestConfig::default() })]

    /// After an exchange, all routers know the same working sets: the union of what each needs.
    /// Without a peer's messages, its part is gone; without requests, nothing is left.
    #[test]
    fn routers_agree_on_the_union_of_their_programs(steps in steps(3), admits in any::<bool>()) {
        let mode = if admits { ProgramMode::Admit } else { ProgramMode::Observe };
        let mut fleet = Fleet::new(3, &INSTANCES, 700, mode);
        for step in steps {
            fleet.step(step);
        }
        fleet.exchange();
        for instance in 0..INSTANCES.len() {
            let union = fleet.union(&[0, 1, 2], instance);
            for at in 0..3 {
                prop_assert!((fleet.expected(at, instance) - union).abs() < 1e-6 * union.max(1.0));
            }
        }
        fleet.now += 3.0;
        let told = fleet.routers[1].share(fleet.now);
        let told = told.iter().map(|(name, load)| (&**name, load.clone()));
        fleet.routers[0].hear("1", told, fleet.now).unwrap();
        prop_assert_eq!(fleet.routers[0].forget_silent(2.0, fleet.now).len(), 1);
        for instance in 0..INSTANCES.len() {
            let union = fleet.union(&[0, 1], instance);
            prop_assert!((fleet.expected(0, instance) - union).abs() < 1e-6 * union.max(1.0));
        }
        for at in 0..3 {
            while !fleet.held[at].is_empty() {
                fleet.leave(at);
            }
            while !fleet.running[at].is_empty() {
                fleet.end(at, 0);
            }
        }
        // A program is forgotten after those that continue it.
        for _ in 0..6 {
            fleet.now += 1e6;
            (0..3).for_each(|at| fleet.tick(at));
        }
        fleet.exchange();
        for at in 0..3 {
            prop_assert!((0..INSTANCES.len()).all(|instance| fleet.expected(at, instance) == 0.0));
        }
    }

    /// Routers that exchange their load before each decision admit together what one would.
    #[test]
    fn routers_together_stay_below_the_cap(
        arrivals in prop::collection::vec((0..3usize, 0..3usize, any::<bool>()), 1..40),
        capacity in 1..6usize,
    ) {
        let size = (OWN_BLOCKS + ROOT_BLOCKS) as f64 * 16.0 + 1.0;
        let blocks = (capacity as f64 * size / 16.0).ceil() as u32;
        let mut fleet = Fleet::new(3, &["x"], blocks, ProgramMode::Admit);
        for (number, (at, other, ends)) in arrivals.into_iter().enumerate() {
            // Each has a root of its own: nothing is shared.
            fleet.ask(at, prompt(number as u64 + 7, number as u64, 0));
            fleet.exchange();
            if ends {
                fleet.end(other, number);
                fleet.exchange();
            }
            fleet.now += 0.5;
            fleet.tick(other);
            fleet.exchange();
            let running: usize = fleet.running.iter().map(Vec::len).sum();
            prop_assert!(running <= capacity, "{running} run, {capacity} fit");
            let waiting = (0..3).any(|at| !fleet.held[at].is_empty());
            let union = fleet.union(&[0, 1, 2], 0);
            prop_assert!(!waiting || running > 0 || union > 0.0);
        }
    }
}

#[test]
fn a_root_of_two_routers_counts_once() {
    let mut fleet = Fleet::new(2, &["x"], 100_000, ProgramMode::Admit);
    for at in 0..2 {
        // The second program of a router shows that the root is shared.
        fleet.ask(at, prompt(0, at as u64 * 2, 0));
        fleet.ask(at, prompt(0, at as u64 * 2 + 1, 0));
    }
    let [one, other] = [fleet.union(&[0], 0), fleet.union(&[1], 0)];
    let root = ROOT_BLOCKS as f64 * 16.0;
    fleet.exchange();
    assert!((fleet.expected(0, 0) - (one + other - root)).abs() < root * 0.07, "{one} {other}");
    assert_eq!(fleet.expected(0, 0), fleet.expected(1, 0));
}

#[test]
fn a_session_that_moves_to_another_router_counts_twice_until_it_is_forgotten() {
    let mut fleet = Fleet::new(2, &["x"], 100_000, ProgramMode::Admit);
    fleet.ask(0, prompt(0, 1, 0));
    fleet.end(0, 0);
    fleet.exchange();
    let before = fleet.expected(1, 0);
    fleet.ask(1, prompt(0, 1, 1));
    fleet.exchange();
    let (both, moved) = (fleet.expected(1, 0), fleet.union(&[1], 0));
    assert!((both - before - moved).abs() < 1e-6 && moved > 4000.0, "{both} {before} {moved}");
    fleet.now += config(ProgramMode::Admit).forget_seconds + 1.0;
    fleet.tick(0);
    fleet.exchange();
    assert_eq!(fleet.expected(1, 0), fleet.union(&[1], 0));
}

#[test]
fn a_router_predicts_holds_by_what_all_routers_admit() {
    // One program fits, and the first router admits it.
    let blocks = (ROOT_BLOCKS + OWN_BLOCKS + 50) as u32;
    let mut fleet = Fleet::new(2, &["x"], blocks, ProgramMode::Admit);
    let limited = ProgramConfig { max_hold_seconds: 80.0, ..config(ProgramMode::Admit) };
    fleet.routers.iter_mut().for_each(|router| router.set_programs(Some(limited.clone())).unwrap());
    fleet.ask(0, prompt(0, 1, 0));
    assert_eq!(fleet.running[0].len(), 1);
    fleet.exchange();
    // Its rate lets the second router hold a program, which alone has admitted nothing. A third
    // program would wait longer than 80 s, wherever it arrives.
    fleet.ask(1, prompt(1, 2, 0));
    assert_eq!((fleet.running[1].len(), fleet.held[1].len()), (0, 1));
    fleet.exchange();
    fleet.ask(0, prompt(2, 3, 0));
    assert_eq!((fleet.held[0].len(), fleet.routers[0].programs().unwrap().counters().refused), (0, 1));
}

#[test]
fn a_measured_cache_size_ends_with_its_engine() {
    let mut fleet = Fleet::new(1, &["x"], 1000, ProgramMode::Observe);
    let router = &mut fleet.routers[0];
    let id = router.fleet().find("x").unwrap();
    let blocks: Vec<u64> = (1..=500).collect();
    let size = |router: &Router| router.measured_cache_blocks(id);
    // Its engine evicts blocks at 500 of 1,000.
    router.caches().write().gpu_mut().stored(id, None, &blocks);
    router.caches().write().gpu_mut().evicted_all(id, &blocks[499..]);
    for now in [1.0, 62.0] {
        router.release_held(now);
    }
    assert!(size(router).is_some());
    router.set_cache_blocks(id, Some(800)).unwrap();
    router.release_held(63.0);
    assert_eq!(size(router), None);
    // Blocks that are removed for another reason, such as a reset, measure nothing.
    router.caches().write().gpu_mut().removed_all(id, &blocks[300..499]);
    for now in [64.0, 190.0] {
        router.release_held(now);
    }
    assert_eq!(size(router), None);
}

#[test]
fn impossible_roots_are_refused_and_change_nothing() {
    let mut fleet = Fleet::new(1, &["x"], 1000, ProgramMode::Admit);
    let root = |tokens: f64, probability: f64| PeerRoot {
        root: lmetric_core::program::Root { hash: 7, tokens },
        probability,
    };
    let share = Share { programs: 1.0, ..Share::default() };
    for (roots, named) in [
        (vec![root(-1.0, 0.5)], "tokens of a root"),
        (vec![root(1.0, 1.5)], "probability of a root"),
        (vec![root(1.0, f64::NAN)], "probability of a root"),
        (vec![root(1.0, 1.0); MAX_ROOTS + 1], "roots on x"),
    ] {
        let told = [("x", Published { share, roots })];
        let message = fleet.routers[0].hear("a", told, 0.0).unwrap_err().to_string();
        assert!(message.contains(named), "{message}");
    }
    assert_eq!((fleet.expected(0, 0), fleet.routers[0].replicas().count()), (0.0, 0));
}
