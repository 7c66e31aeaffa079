//! Agent programs of several routers: each counts the programs of the others in the working sets.
#[path = "common/router.rs"]
mod common;

use common::{chain, request};
use lmetric_core::Registry;
use lmetric_core::admission::Verdict;
use lmetric_core::fleet::Role;
use lmetric_core::ids::ArrivalId;
use lmetric_core::plan::{Event, Usage};
use lmetric_core::program::{
    Finish, GapClass, Gaps, PeerProgram, PeerPrograms, Program, ProgramConfig, ProgramMode, ProgramRules,
    Prompt, State, Terms,
};
use lmetric_core::request::Request;
use lmetric_core::router::{Load, LoadMessage, Message, Published, Router, RouterConfig, TicketId};
use proptest::prelude::*;
use std::collections::BTreeMap;
use std::sync::Arc;

const INSTANCES: [&str; 2] = ["x", "y"];
const ROOT_BLOCKS: usize = 200;
/// Tokens of a program of [`prompt`] behind its root.
const OWN_BLOCKS: usize = 100;

/// The core's rules, but programs always return to their instance, and the probability of their
/// return is known: routers learn different ones.
#[derive(Debug)]
struct Returning;

impl ProgramRules for Returning {
    fn terms(&self) -> Terms {
        Terms { free: 0.0, ..Terms::default() }
    }

    fn returns(&self, _: &Gaps, _: GapClass, gap: f64) -> f64 {
        (-gap / 30.0).exp2()
    }

    fn pause_rank(&self, _: &Gaps, _: &Program, gap: f64) -> f64 {
        -gap
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
    /// Version of the routers' load.
    version: u64,
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
        Fleet {
            routers,
            running: vec![Vec::new(); count],
            held: vec![BTreeMap::new(); count],
            version: 0,
            now: 0.0,
        }
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

    /// Each router sends what changed to all others.
    fn exchange(&mut self) {
        for from in 0..self.routers.len() {
            let message = self.message(from);
            for to in (0..self.routers.len()).filter(|to| *to != from) {
                assert!(self.hear(to, from, &message), "{from} -> {to}");
            }
        }
        self.version += 1;
    }

    /// Returns the next message of a router, as it is read.
    fn message(&mut self, from: usize) -> LoadMessage {
        let base = Some(self.version).filter(|version| *version > 0);
        self.routers[from].enter_load(self.version + 1, self.version, self.now).unwrap();
        let models = vec![("m".into(), self.routers[from].load_since(base, self.now))];
        let version = self.version + 1;
        let message = LoadMessage { sender: "a".into(), version, base, models, budgets: [].into() };
        let read = LoadMessage::decode(&message.encode()).unwrap();
        assert_eq!(read, message, "messages have rounded numbers");
        read
    }

    fn hear(&mut self, to: usize, from: usize, message: &LoadMessage) -> bool {
        let Load { instances, programs } = &message.models[0].1;
        let loads = instances.iter().map(|(name, load)| (&**name, *load));
        let (from, (version, base)) = (&*from.to_string(), (message.version, message.base));
        let message = Message { from, version, base, loads, programs };
        self.routers[to].hear_message(message, self.now).unwrap()
    }

    fn expected(&self, at: usize, instance: usize) -> f64 {
        let programs = self.routers[at].programs().unwrap();
        programs.instances().get(instance).map_or(0.0, |ledger| ledger.expected_tokens())
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
    Turn { program: u64, more: usize },
    End { which: usize },
    Tick { seconds: f64 },
}

fn steps() -> impl Strategy<Value = Vec<(usize, Step)>> {
    let step = prop_oneof![
        5 => (0..8u64, 1..4usize).prop_map(|(program, more)| Step::Turn { program, more }),
        3 => (0..9usize).prop_map(|which| Step::End { which }),
        3 => (0.0..40.0).prop_map(|seconds| Step::Tick { seconds }),
    ];
    prop::collection::vec((0..3usize, step), 1..60)
}

/// The requests of a fleet that wait or run: number of the request, router and name there.
struct Played {
    fleet: Fleet,
    running: Vec<(usize, usize, TicketId)>,
    held: Vec<(usize, usize, ArrivalId, Vec<u64>)>,
    /// Turns and running requests of each program.
    programs: [(usize, usize); 8],
}

impl Played {
    fn new(routers: usize) -> Played {
        let fleet = Fleet::new(routers, &INSTANCES, 700, ProgramMode::Admit);
        Played { fleet, running: Vec::new(), held: Vec::new(), programs: [(0, 0); 8] }
    }

    fn ask(&mut self, number: usize, at: usize, chain: Vec<u64>) {
        let now = self.fleet.now;
        let (arrival, verdict) = self.fleet.routers[at].arrive(&request(&chain), now).unwrap().unwrap();
        match (verdict, arrival) {
            (Verdict::Free | Verdict::Run(_), Some(id)) => self.place(number, at, id, &chain),
            (Verdict::Held { .. }, Some(id)) => self.held.push((number, at, id, chain)),
            other => panic!("{other:?}"),
        }
    }

    fn place(&mut self, number: usize, at: usize, arrival: ArrivalId, chain: &[u64]) {
        let request = Request { arrival: Some(arrival), ..request(chain) };
        let ticket = self.fleet.routers[at].route(&request, self.fleet.now).unwrap().ticket;
        self.running.push((number, at, ticket));
    }

    fn tick(&mut self) {
        for at in 0..self.fleet.routers.len() {
            for (id, _) in self.fleet.routers[at].release_held(self.fleet.now).ready {
                let place = self.held.iter().position(|(_, of, held, _)| (*of, *held) == (at, id)).unwrap();
                let (number, at, id, chain) = self.held.swap_remove(place);
                self.place(number, at, id, &chain);
            }
            self.fleet.exchange();
        }
        self.running.sort_by_key(|(number, ..)| *number);
    }

    /// Returns whether the step was possible.
    fn step(&mut self, number: usize, at: usize, step: &Step) -> bool {
        self.fleet.now += 0.01;
        match *step {
            Step::Turn { program, more } => {
                // A program sends its next request after its answer.
                let (turns, last) = &mut self.programs[program as usize];
                let open = self.running.iter().map(|(each, ..)| *each);
                if open.chain(self.held.iter().map(|(each, ..)| *each)).any(|each| each + 1 == *last) {
                    return false;
                }
                (*turns, *last) = (*turns + more, number + 1);
                let chain = prompt(program % 2, program, *turns);
                self.ask(number, at, chain);
            }
            Step::End { which } if !self.running.is_empty() => {
                let (_, at, ticket) = self.running.remove(which % self.running.len());
                self.fleet.routers[at]
                    .advance(ticket, Event::Ended(Usage::default()), self.fleet.now)
                    .unwrap();
            }
            Step::End { .. } => {}
            Step::Tick { seconds } => self.fleet.now += seconds,
        }
        self.fleet.exchange();
        self.tick();
        true
    }
}

proptest! {
    #![proptest_config(ProptestConfig { max_shrink_iters: 2000, ..ProptestConfig::default() })]

    /// Routers that exchange their programs after each step know the same programs, each once, and
    /// the same working sets. Nothing is left of a router whose messages end, apart from the
    /// programs that had a later turn elsewhere.
    #[test]
    fn routers_agree_on_their_programs(steps in steps()) {
        let mut played = Played::new(3);
        let mut last = BTreeMap::new();
        for (number, (at, step)) in steps.iter().enumerate() {
            if played.step(number, *at, step) && let Step::Turn { program, .. } = step {
                last.insert(*program, *at);
            }
            for at in 0..3 {
                prop_assert_eq!(played.fleet.routers[at].programs().unwrap().iter().count(), last.len());
                for instance in 0..INSTANCES.len() {
                    let [seen, first] = [at, 0].map(|at| played.fleet.expected(at, instance));
                    prop_assert!((seen - first).abs() < 1e-3 * first.max(1.0), "{} {} {}", at, seen, first);
                }
            }
        }
        played.fleet.now += 3.0;
        let message = played.fleet.message(2);
        prop_assert!(played.fleet.hear(0, 2, &message));
        prop_assert_eq!(played.fleet.routers[0].forget_silent(2.0, played.fleet.now).len(), 1);
        let left = last.values().filter(|at| **at != 1).count();
        prop_assert_eq!(played.fleet.routers[0].programs().unwrap().iter().count(), left);
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
            for at in 0..3 {
                fleet.tick(at);
                fleet.exchange();
            }
            let running: usize = fleet.running.iter().map(Vec::len).sum();
            prop_assert!(running <= capacity, "{running} run, {capacity} fit");
            let waiting = (0..3).any(|at| !fleet.held[at].is_empty());
            prop_assert!(!waiting || running > 0 || fleet.expected(0, 0) > 0.0);
        }
    }
}

#[test]
fn a_root_of_two_routers_counts_once() {
    let [mut both, mut one] = [2, 1].map(|routers| Fleet::new(routers, &["x"], 100_000, ProgramMode::Admit));
    for number in 0..4 {
        both.ask(number % 2, prompt(0, number as u64, 0));
        both.exchange();
        one.ask(0, prompt(0, number as u64, 0));
    }
    assert_eq!((both.expected(0, 0), both.expected(1, 0)), (one.expected(0, 0), one.expected(0, 0)));
}

#[test]
fn a_program_whose_next_turn_is_at_another_router_counts_once() {
    let mut fleet = Fleet::new(2, &["x"], 100_000, ProgramMode::Admit);
    for turn in 0..6 {
        let at = turn % 2;
        fleet.ask(at, prompt(0, 1, turn));
        fleet.exchange();
        // Its answer ends, and the other router knows that later than the next request.
        fleet.end(at, 0);
        if turn % 3 > 0 {
            fleet.exchange();
        }
    }
    fleet.exchange();
    for at in 0..2 {
        let programs = fleet.routers[at].programs().unwrap();
        let tokens = (ROOT_BLOCKS + OWN_BLOCKS + 50) as f64 * 16.0;
        assert!((fleet.expected(at, 0) - tokens).abs() < 2.0, "{}", fleet.expected(at, 0));
        let counters = programs.counters();
        assert_eq!((programs.iter().count(), counters.forks, counters.continuations), (1, 0, [2, 3][at]));
    }
    // The router that has it now dies: nothing is left of it.
    fleet.now = 3.0;
    assert_eq!(fleet.routers[0].forget_silent(2.0, 3.0).len(), 1);
    assert_eq!((fleet.expected(0, 0), fleet.routers[0].programs().unwrap().iter().count()), (0.0, 0));
}

/// All routers see the contexts that any of them has computed again.
#[test]
fn auto_holds_when_all_routers_together_compute_contexts_again() {
    let mut fleet = Fleet::new(4, &["x"], (2 * (ROOT_BLOCKS + OWN_BLOCKS)) as u32, ProgramMode::Auto);
    let holds = |fleet: &Fleet| fleet.routers.iter().filter(|r| r.programs().unwrap().holds()).count();
    // Each router has two turns, and none of them finds its context: no cache event came.
    for turn in 0..10 {
        for program in 0..8 {
            fleet.now += 0.1;
            let at = (program + turn) % 4;
            fleet.ask(at, prompt(program as u64, program as u64, turn));
            fleet.exchange();
        }
        for at in 0..4 {
            fleet.tick(at);
            fleet.exchange();
        }
        for at in 0..4 {
            while !fleet.running[at].is_empty() {
                fleet.end(at, 0);
            }
        }
        fleet.exchange();
    }
    assert_eq!(holds(&fleet), 4);
    let ratios = fleet.routers.iter().map(|router| router.programs().unwrap().recompute_ratio());
    let ratios: Vec<f64> = ratios.collect();
    assert!(ratios.iter().all(|ratio| (ratio - ratios[0]).abs() < 0.05 * ratios[0]), "{ratios:?}");
}

/// A program that a peer holds, of the size of a first [`prompt`].
fn held_by_peer(key: u64, age_seconds: f64) -> PeerProgram {
    PeerProgram {
        key,
        turn: 1,
        state: State::Held,
        home: None,
        tenant: 0,
        weight: 1.0,
        level: 0,
        session: None,
        age_seconds,
        rest_seconds: 1.0,
        tokens: 16 * (ROOT_BLOCKS + OWN_BLOCKS) as u64,
        base: None,
        parent: 0,
        finish: Finish::Unknown,
        flags: [false; 4],
        prompt: Prompt::default(),
    }
}

/// Gives the first router a message of a peer that is no router of the fleet.
fn hear_rows(fleet: &mut Fleet, version: u64, rows: Vec<PeerProgram>) {
    let programs = PeerPrograms { programs: rows, ..PeerPrograms::default() };
    let base = version.checked_sub(1);
    let loads = [("x", Published::default())];
    let message = Message { from: "peer", version, base, loads, programs: &programs };
    assert!(fleet.routers[0].hear_message(message, fleet.now).unwrap());
}

#[test]
fn programs_older_than_the_clock_are_admitted_by_age() {
    let mut fleet = Fleet::new(1, &["x"], (ROOT_BLOCKS + OWN_BLOCKS + 50) as u32, ProgramMode::Admit);
    let by_age = ProgramConfig { shortest_first: false, ..config(ProgramMode::Admit) };
    fleet.routers[0].set_programs(Some(by_age)).unwrap();
    fleet.now = 1.0;
    let ages = [(1, 400.0), (2, 500.0), (3, 0.5), (4, 450.0)];
    hear_rows(&mut fleet, 0, ages.map(|(key, age)| held_by_peer(key, age)).into());
    fleet.tick(0);
    let programs = fleet.routers[0].programs().unwrap().iter();
    let running: Vec<f64> =
        programs.filter(|(_, each)| each.state == State::Running).map(|(_, each)| each.born).collect();
    assert_eq!(running, [-499.0]);
}

/// A peer holds a program for long, although there is room by all that this router knows.
#[test]
fn a_program_that_its_router_does_not_admit_leaves_the_room_to_others() {
    let mut fleet = Fleet::new(1, &["x"], (ROOT_BLOCKS + OWN_BLOCKS + 50) as u32, ProgramMode::Admit);
    let row = held_by_peer(7, 500.0);
    let hear = hear_rows;
    hear(&mut fleet, 0, vec![row.clone()]);
    fleet.tick(0);
    fleet.ask(0, prompt(0, 1, 0));
    assert_eq!(fleet.held[0].len(), 1, "the forecast is that the peer's program is admitted");
    let mut version = 1;
    let mut wait = |fleet: &mut Fleet, seconds: f64, row: &PeerProgram| {
        for step in 0..(seconds * 10.0) as u64 {
            fleet.now += 0.1;
            // Some messages have the program, and say the same of it.
            let rows = if step % 3 == 0 { vec![row.clone()] } else { Vec::new() };
            hear(fleet, version, rows);
            version += 1;
            fleet.tick(0);
        }
    };
    wait(&mut fleet, 1.5, &row);
    assert_eq!(fleet.held[0].len(), 1);
    wait(&mut fleet, 1.5, &row);
    assert_eq!((fleet.held[0].len(), fleet.running[0].len()), (0, 1));
    // Its next turn gets the forecast again.
    fleet.end(0, 0);
    fleet.routers[0].release_held(fleet.now);
    let next = PeerProgram { turn: 2, ..row };
    wait(&mut fleet, 0.1, &next);
    let running = |fleet: &Fleet| fleet.routers[0].programs().unwrap().states()[State::Running as usize];
    assert_eq!(running(&fleet), 0, "the own program keeps its place for its next turn");
    fleet.now += 1e6;
    wait(&mut fleet, 0.3, &next);
    assert_eq!(running(&fleet), 1);
}

#[test]
fn a_router_that_begins_to_follow_programs_asks_its_peers_for_all() {
    let mut fleet = Fleet::new(2, &["x"], 100_000, ProgramMode::Admit);
    fleet.ask(0, prompt(0, 1, 0));
    fleet.exchange();
    let count = |fleet: &Fleet| fleet.routers[1].programs().unwrap().iter().count();
    assert_eq!(count(&fleet), 1);
    // Other settings keep the programs.
    fleet.routers[1].set_programs(Some(config(ProgramMode::Observe))).unwrap();
    fleet.exchange();
    assert_eq!(count(&fleet), 1);
    fleet.routers[1].set_programs(None).unwrap();
    fleet.exchange();
    fleet.routers[1].set_programs(Some(config(ProgramMode::Admit))).unwrap();
    let changes = fleet.message(0);
    assert!(!fleet.hear(1, 0, &changes));
    let models = vec![("m".into(), fleet.routers[0].load_since(None, fleet.now))];
    assert!(fleet.hear(1, 0, &LoadMessage { base: None, models, ..changes }));
    assert_eq!(count(&fleet), 1);
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

/// Returns the next message of a peer with these programs.
fn message_of(version: u64, programs: PeerPrograms) -> LoadMessage {
    let models = vec![("m".into(), Load { instances: Vec::new(), programs })];
    let base = Some(version - 1).filter(|version| *version > 0);
    let message = LoadMessage { sender: "b".into(), version, base, models, budgets: [].into() };
    LoadMessage::decode(&message.encode()).unwrap()
}

/// Returns a program of a peer as its message has it, without a prompt.
fn of_peer(key: u64) -> PeerProgram {
    let mut fleet = Fleet::new(1, &["x"], 1000, ProgramMode::Observe);
    fleet.ask(0, prompt(0, 0, 0));
    let row = fleet.message(0).models[0].1.programs.programs[0].clone();
    PeerProgram { key, state: State::Paused, home: None, base: None, prompt: Prompt::default(), ..row }
}

#[test]
fn prompts_of_a_peer_may_have_a_hash_at_several_places() {
    let mut fleet = Fleet::new(1, &["x"], 1000, ProgramMode::Observe);
    let row = of_peer(0);
    let hash = prompt(0, 1, 0)[3];
    for (version, places) in [(1, 2), (2, 1), (3, 1)] {
        let prompt = Prompt { blocks: 4 * places, checkpoints: vec![hash; places as usize], end: version };
        let programs = vec![PeerProgram { key: version, prompt, ..row.clone() }];
        let message = message_of(version, PeerPrograms { programs, ..PeerPrograms::default() });
        assert!(fleet.hear(0, 1, &message));
    }
    for (version, key) in [(4, 3), (5, 2), (6, 1)] {
        let message = message_of(version, PeerPrograms { gone: vec![key], ..PeerPrograms::default() });
        assert!(fleet.hear(0, 1, &message));
        fleet.ask(0, prompt(0, key, 0));
        fleet.tick(0);
    }
    assert_eq!(fleet.routers[0].programs().unwrap().iter().count(), 3);
}

/// Under `auto`, a request may wait between its arrival and its placement for another reason than
/// room in a cache.
#[test]
fn a_request_that_is_not_held_makes_no_peer_hold() {
    let mut fleet = Fleet::new(2, &["x"], 1000, ProgramMode::Auto);
    let chain = prompt(0, 1, 0);
    let (arrival, verdict) = fleet.routers[0].arrive(&request(&chain), 0.0).unwrap().unwrap();
    assert_eq!(verdict, Verdict::Free);
    fleet.exchange();
    let programs = fleet.routers[1].programs().unwrap();
    assert_eq!((programs.holds(), programs.iter().count(), programs.states()[3]), (false, 1, 0));
    fleet.place(0, arrival.unwrap(), &chain);
    fleet.exchange();
    assert_eq!(fleet.routers[1].programs().unwrap().states(), [1, 0, 0, 0]);
}

#[test]
fn an_impossible_number_of_turns_is_not_taken_over() {
    let mut fleet = Fleet::new(2, &["x"], 1000, ProgramMode::Observe);
    fleet.ask(0, prompt(0, 1, 0));
    let mut programs = fleet.message(0).models[0].1.programs.clone();
    programs.programs[0].turn = (1 << 63) - 1;
    let message = message_of(1, programs);
    assert!(fleet.hear(1, 0, &message));
    // Its next turn is here, and the next message can be read.
    fleet.ask(1, prompt(0, 1, 1));
    assert_eq!(fleet.message(1).models[0].1.programs.programs.len(), 1);
}

#[test]
fn programs_of_peers_do_not_evict_own_ones_from_a_full_table() {
    let mut fleet = Fleet::new(1, &["x"], 1000, ProgramMode::Observe);
    for program in 0..3 {
        fleet.ask(0, prompt(0, program, 0));
        fleet.end(0, 0);
    }
    fleet.now = 10.0;
    let row = PeerProgram { rest_seconds: 0.0, ..of_peer(0) };
    for peer in 1..=17 {
        let programs = (0..4096).map(|key| PeerProgram { key: peer * 4096 + key, ..row.clone() }).collect();
        let message = message_of(1, PeerPrograms { programs, ..PeerPrograms::default() });
        assert!(fleet.hear(0, peer as usize, &message));
    }
    let programs = fleet.routers[0].programs().unwrap();
    assert_eq!((programs.own_states().iter().sum::<usize>(), programs.iter().count()), (3, 1 << 16));
}

#[test]
fn a_program_of_a_peer_leaves_the_session_to_an_own_one() {
    let mut fleet = Fleet::new(2, &["x"], 1000, ProgramMode::Observe);
    let ask = |fleet: &mut Fleet, at: usize, chain: &[u64]| {
        let request = Request { session: Some(7), ..request(chain) };
        let (arrival, _) = fleet.routers[at].arrive(&request, fleet.now).unwrap().unwrap();
        fleet.place(at, arrival.unwrap(), chain);
        fleet.end(at, 0);
    };
    ask(&mut fleet, 0, &prompt(0, 1, 0));
    ask(&mut fleet, 1, &prompt(1, 2, 0));
    fleet.exchange();
    fleet.now = 3.0;
    assert_eq!(fleet.routers[0].forget_silent(2.0, 3.0).len(), 1);
    // The client has written its context anew.
    ask(&mut fleet, 0, &prompt(2, 3, 0));
    let counters = fleet.routers[0].programs().unwrap().counters();
    assert_eq!((counters.new_programs, counters.continuations), (1, 1));
}

/// A program's turns run at two routers, and the router of its latest turn is gone: the other turn
/// counts on its own instance.
#[test]
fn a_program_left_by_a_peer_counts_on_the_instance_of_its_turn_here() {
    let mut fleet = Fleet::new(2, &INSTANCES, 1000, ProgramMode::Observe);
    for at in 0..2 {
        fleet.ask(at, prompt(0, 1, at));
        fleet.exchange();
    }
    let tokens = |fleet: &Fleet| [0, 1].map(|instance| fleet.expected(0, instance) > 0.0);
    assert_eq!(tokens(&fleet), [false, true]);
    fleet.now = 3.0;
    assert_eq!(fleet.routers[0].forget_silent(2.0, 3.0).len(), 1);
    assert_eq!(tokens(&fleet), [true, false]);
}
