//! Workers of one server follow agent programs together: each has the same programs at each step.
#[path = "common/board.rs"]
mod boards;
#[path = "common/router.rs"]
mod common;

use boards::{board, memory};
use common::{STEP, chain, request};
use lmetric_core::Registry;
use lmetric_core::admission::{HeldFor, RefusedFor, Verdict};
use lmetric_core::board::Board;
use lmetric_core::board::log::MOST_WORDS;
use lmetric_core::fleet::Role;
use lmetric_core::ids::ArrivalId;
use lmetric_core::plan::{Event, Usage};
use lmetric_core::program::programs::Counters;
use lmetric_core::program::{
    Arrival, Finish, Followed, PeerProgram, PeerPrograms, ProgramConfig, ProgramMode, Prompt, State,
};
use lmetric_core::request::Request;
use lmetric_core::router::{Message, Router, RouterConfig, Share, TicketId};
use proptest::prelude::*;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

/// Blocks that an instance's cache holds.
const CACHE: u32 = 64;
const NAMES: [&str; 2] = ["x", "y"];
const SUPERVISOR: usize = 9;

type Words = Arc<Box<[AtomicU64]>>;

/// A worker: its router, and its requests.
struct Worker {
    router: Router,
    number: usize,
    /// With the name of the first instance.
    running: Vec<(u64, TicketId, String)>,
    held: Vec<(u64, usize, ArrivalId)>,
}

impl Worker {
    fn new(memory: &Words, number: usize) -> Worker {
        Worker::with_cache(memory, number, CACHE)
    }

    fn with_cache(memory: &Words, number: usize, cache_blocks: u32) -> Worker {
        Worker::of_process(board(memory, number), cache_blocks)
    }

    /// Makes the router of a process that may have had other routers before.
    fn of_process(board: Arc<Board>, cache_blocks: u32) -> Worker {
        let number = board.writer();
        let programs = ProgramConfig {
            mode: ProgramMode::Admit,
            min_tokens: 16,
            forget_seconds: 30.0,
            ..ProgramConfig::default()
        };
        let config = RouterConfig {
            drain: false,
            step_time: Some(STEP),
            programs: Some(programs),
            ..RouterConfig::default()
        };
        let mut router = Router::new(Registry::CORE.policy("lmetric", &[]).unwrap(), config).unwrap();
        // The workers' fleets have different orders.
        let mut names = NAMES;
        names.rotate_left(number % 2);
        for name in names {
            router.add_instance(name, Role::Both, Some(cache_blocks)).unwrap();
        }
        router.join(board, 1).unwrap();
        Worker { router, number, running: Vec::new(), held: Vec::new() }
    }

    /// Sends a request of a program.
    fn send(&mut self, program: u64, blocks: usize, now: f64) -> Option<Verdict> {
        let chain = chain(1000 * program, blocks);
        let asked = request(&chain);
        let (arrival, verdict) = self.router.arrive(&asked, now).unwrap().unwrap();
        match verdict {
            Verdict::Held { .. } => self.held.push((program, blocks, arrival.unwrap())),
            Verdict::Refused { .. } => {}
            Verdict::Free | Verdict::Run(_) => self.place(program, blocks, arrival, now),
        }
        Some(verdict)
    }

    fn place(&mut self, program: u64, blocks: usize, arrival: Option<ArrivalId>, now: f64) {
        let chain = chain(1000 * program, blocks);
        let made = self.router.route(&Request { arrival, ..request(&chain) }, now).unwrap();
        let name = self.router.fleet().name(made.segment.instance).to_string();
        self.running.push((program, made.ticket, name));
    }

    /// Lets the held requests run that may run now.
    fn release(&mut self, now: f64) {
        let released = self.router.release_held(now);
        let gone = released.refused.iter().map(|(id, ..)| (id, false));
        for (id, runs) in released.ready.iter().map(|(id, _)| (id, true)).chain(gone) {
            let place = self.held.iter().position(|(.., held)| held == id).expect("a held request");
            let (program, blocks, arrival) = self.held.swap_remove(place);
            if runs {
                self.place(program, blocks, Some(arrival), now);
            }
        }
    }

    fn end(&mut self, at: usize, now: f64) {
        let (_, ticket, _) = self.running.swap_remove(at);
        let usage = Usage { output_tokens: Some(15), ..Usage::default() };
        self.router.advance(ticket, Event::Finished(usage), now).unwrap();
    }

    /// Receives the load of another router, which has a program and other requests on an instance.
    fn hear(&mut self, instance: &str, tokens: u32, now: f64) {
        let share = Share { other_tokens: f64::from(tokens / 2), ..Share::default() };
        let programs = &PeerPrograms {
            instances: vec![instance.into()],
            programs: vec![program(7, u64::from(tokens - tokens / 2))],
            ..PeerPrograms::default()
        };
        let loads = [(instance, share.into())];
        let message = Message { from: "another", version: 0, base: None, loads, programs };
        self.router.hear_message(message, now).unwrap();
    }

    /// Receives changes of another router's programs. Returns whether they change its last message.
    fn changes(&mut self, (base, version): (Option<u64>, u64), keys: &[u64], now: f64) -> bool {
        let programs = &PeerPrograms {
            instances: vec!["x".into()],
            programs: keys.iter().map(|key| program(*key, 16)).collect(),
            ..PeerPrograms::default()
        };
        let loads = [("x", Share::default().into())];
        let message = Message { from: "another", version, base, loads, programs };
        self.router.hear_message(message, now).unwrap()
    }

    /// Returns what other routers need on each instance, and its capacity.
    fn peers_and_capacity(&self) -> [(f64, Option<f64>); 2] {
        NAMES.map(|name| {
            let ledger = self.router.program_ledger(self.router.fleet().find(name).unwrap()).unwrap();
            (ledger.peer_tokens(), ledger.capacity_tokens)
        })
    }

    /// Returns the instance of a program's running request.
    fn home(&self, program: u64) -> Option<String> {
        self.running.iter().find(|(of, ..)| *of == program).map(|(.., name)| name.clone())
    }
}

/// A program of another router that runs on its first instance.
fn program(key: u64, tokens: u64) -> PeerProgram {
    PeerProgram {
        key,
        turn: 1,
        state: State::Running,
        home: Some(0),
        tenant: 0,
        weight: 1.0,
        level: 0,
        session: None,
        age_seconds: 1.0,
        rest_seconds: 1.0,
        tokens,
        base: None,
        parent: 0,
        finish: Finish::Unknown,
        flags: [false; 4],
        prompt: Prompt::default(),
    }
}

/// A worker's view of programs: counters, states, all programs, and the instances' ledgers.
type Seen = (Counters, [usize; 4], Vec<String>, Vec<(u64, u32, Option<f64>, bool)>);

fn seen(router: &mut Router, now: f64) -> Seen {
    router.publish_all(now);
    let programs = router.programs().unwrap();
    let all = programs.iter().map(|(id, each)| {
        let (home, tokens) = (each.home, each.tokens);
        format!("{id:?} {home:?} {tokens} {:?} {} {}", each.state, each.since, each.order)
    });
    let ledgers = NAMES.map(|name| {
        let id = router.fleet().find(name).unwrap();
        let ledger = router.program_ledger(id).cloned().unwrap_or_default();
        (ledger.expected_tokens().to_bits(), ledger.programs, ledger.capacity_tokens, ledger.available)
    });
    (programs.counters(), programs.states(), all.collect(), ledgers.to_vec())
}

#[derive(Clone, Copy, Debug)]
enum Step {
    /// A turn of a program, with more blocks.
    Send(u64, usize),
    End(usize),
    Leave(usize),
    Release,
    Wait,
    /// The worker is killed, and another one takes its number.
    Kill,
    /// The first instance takes no new requests, or takes them again.
    Drain(bool),
    /// A message of another router, which the workers get at different times: the tokens of its
    /// programs on an instance.
    Hear(usize, u32),
}

fn steps() -> impl Strategy<Value = Vec<(usize, Step)>> {
    let step = prop_oneof![
        8 => (0..12_u64, 0..12_usize).prop_map(|(program, more)| Step::Send(program, more)),
        6 => (0..8_usize).prop_map(Step::End),
        1 => (0..8_usize).prop_map(Step::Leave),
        3 => Just(Step::Release),
        2 => Just(Step::Wait),
        1 => Just(Step::Kill),
        1 => any::<bool>().prop_map(Step::Drain),
        2 => (0..2_usize, 0..400_u32).prop_map(|(instance, tokens)| Step::Hear(instance, tokens)),
    ];
    prop::collection::vec((0..3_usize, step), 1..150)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    /// At each step, all workers know the same programs, also those that started later.
    #[test]
    fn all_workers_have_the_same_programs(steps in steps()) {
        let memory = memory();
        let supervisor = board(&memory, SUPERVISOR);
        let mut workers: Vec<Worker> = (0..3).map(|number| Worker::new(&memory, number)).collect();
        let mut sizes = [8_usize; 12];
        let mut now = 0.0;
        for (worker, step) in steps {
            now += 0.01;
            let of = &mut workers[worker];
            match step {
                Step::Send(program, more) => {
                    let size = &mut sizes[program as usize];
                    *size = if *size > 50 { 8 } else { *size + more };
                    of.send(program, *size, now);
                }
                Step::End(at) if at < of.running.len() => of.end(at, now),
                Step::Leave(at) if at < of.held.len() => {
                    let (.., arrival) = of.held.swap_remove(at);
                    of.router.drop_arrival(arrival, now);
                }
                Step::Release => of.release(now),
                Step::Wait => now += 20.0,
                Step::Kill => {
                    let number = of.number;
                    let old = std::mem::replace(of, Worker::new(&memory, 8));
                    std::mem::forget(old.router);
                    supervisor.clear(number).unwrap();
                    *of = Worker::new(&memory, number);
                }
                Step::Drain(drain) => {
                    for each in &mut workers {
                        let id = each.router.fleet().find(NAMES[0]).unwrap();
                        each.router.fleet_mut().set_draining(id, drain).unwrap();
                    }
                }
                Step::Hear(instance, tokens) => of.hear(NAMES[instance], tokens, now),
                _ => {}
            }
            // A worker that has just started asks another one, which answers when it reads the log.
            for _ in 0..2 {
                workers.iter_mut().for_each(|each| _ = each.router.publish_all(now));
            }
            let all: Vec<Seen> = workers.iter_mut().map(|each| seen(&mut each.router, now)).collect();
            prop_assert!(workers.iter().all(|each| each.router.has_programs_of_workers()));
            prop_assert_eq!(&all[0], &all[1]);
            prop_assert_eq!(&all[0], &all[2]);
        }
        // All end, and no message comes for two seconds: nothing counts as running or held.
        let last = now;
        for _ in 0..20_000 {
            now += 0.3;
            for each in &mut workers {
                while !each.running.is_empty() {
                    each.end(0, now);
                }
                each.router.forget_silent(2.0, now);
                each.release(now);
            }
            let is_over = |each: &Worker| each.running.is_empty() && each.held.is_empty();
            if now - last > 2.5 && workers.iter().all(is_over) {
                break;
            }
        }
        for each in &mut workers {
            prop_assert!(each.held.is_empty());
            let states = seen(&mut each.router, now).1;
            prop_assert_eq!((states[State::Running as usize], states[State::Held as usize]), (0, 0));
            prop_assert_eq!(each.router.waiting(), 0);
        }
    }
}

fn workers() -> (Words, Worker, Worker) {
    let memory = memory();
    let (one, two) = (Worker::new(&memory, 0), Worker::new(&memory, 1));
    (memory, one, two)
}

fn read(workers: [&mut Worker; 2], now: f64) {
    for _ in 0..2 {
        _ = (workers[0].router.publish_all(now), workers[1].router.publish_all(now));
    }
}

#[test]
fn a_program_returns_home_on_whichever_worker_its_next_turn_arrives() {
    let (memory, mut one, mut two) = workers();
    read([&mut one, &mut two], 0.0);
    // Two programs fill half of each cache; a third is held for its tokens on any worker.
    one.send(1, 30, 0.0);
    two.send(2, 30, 0.1);
    let homes = [one.home(1).unwrap(), two.home(2).unwrap()];
    assert_ne!(homes[0], homes[1]);
    for worker in [&mut one, &mut two] {
        let verdict = worker.send(3 + worker.number as u64, 40, 0.2).unwrap();
        assert!(matches!(verdict, Verdict::Held { by: HeldFor::Program(_), .. }), "{verdict:?}");
    }
    one.end(0, 1.0);
    two.end(0, 1.0);
    assert_eq!(two.send(1, 34, 2.0), Some(Verdict::Run(two.router.fleet().find(&homes[0]).unwrap())));
    assert_eq!(one.send(2, 34, 2.0), Some(Verdict::Run(one.router.fleet().find(&homes[1]).unwrap())));
    two.end(0, 3.0);
    one.end(0, 3.0);
    // The worker of the last turn is killed; the next one goes home all the same.
    std::mem::forget(two.router);
    board(&memory, SUPERVISOR).clear(1).unwrap();
    let mut two = Worker::new(&memory, 1);
    assert!(!two.router.has_programs_of_workers());
    assert_eq!(two.send(9, 30, 3.5), Some(Verdict::Free), "its requests belong to no program yet");
    two.end(0, 3.6);
    read([&mut two, &mut one], 4.0);
    two.router.publish_all(4.0);
    assert!(two.router.has_programs_of_workers());
    assert_eq!(two.send(1, 38, 5.0), Some(Verdict::Run(two.router.fleet().find(&homes[0]).unwrap())));
}

#[test]
fn a_hold_ends_whichever_worker_has_the_request_that_ends() {
    let (_, mut one, mut two) = workers();
    read([&mut one, &mut two], 0.0);
    for program in 0..2 {
        one.send(program, 50, 0.0);
    }
    let verdict = two.send(7, 50, 0.1).unwrap();
    assert!(matches!(verdict, Verdict::Held { .. }), "{verdict:?}");
    two.release(1.0);
    assert_eq!(two.held.len(), 1);
    one.end(0, 2.0);
    // Its program rests, and its place is free once it no longer is expected to return.
    one.release(400.0);
    two.release(400.0);
    assert_eq!((two.held.len(), two.running.len()), (0, 1));
}

#[test]
fn a_worker_that_has_missed_events_gets_a_copy_and_keeps_its_held_request() {
    let (memory, mut one, mut two) = workers();
    read([&mut one, &mut two], 0.0);
    for program in 0..2 {
        one.send(program, 50, 0.0);
    }
    assert!(matches!(two.send(7, 50, 0.1), Some(Verdict::Held { .. })));
    assert!(matches!(two.send(8, 50, 0.1), Some(Verdict::Held { .. })));
    // Events of another model fill the ring; meanwhile, a place is free for one of both.
    let other = board(&memory, 3);
    for _ in 0..5 {
        other.append(99, 7, 0.0, &[&vec![0; MOST_WORDS]]);
        one.router.publish_all(0.2);
    }
    one.end(0, 1.0);
    one.release(40.0);
    two.release(40.1);
    assert!(!two.router.has_programs_of_workers());
    assert_eq!((two.held.len(), two.send(9, 50, 40.1)), (2, Some(Verdict::Free)));
    one.router.publish_all(40.2);
    two.release(40.3);
    assert_eq!((two.held.len(), two.running.len()), (1, 2));
    assert_eq!(seen(&mut one.router, 40.4), seen(&mut two.router, 40.4));
    // Without another worker, it begins anew: nothing counts that it does not know.
    (0..5).for_each(|_| _ = other.append(99, 7, 0.0, &[&vec![0; MOST_WORDS]]));
    drop(one.router);
    let released = two.router.release_held(41.0);
    assert_eq!((released.ready.len(), released.refused.len()), (0, 1));
    assert!(two.router.has_programs_of_workers());
    // The ends of old requests end no new one.
    two.send(5, 20, 41.5);
    two.end(0, 42.0);
    two.end(1, 42.0);
    assert_eq!(two.router.programs().unwrap().states()[State::Running as usize], 1);
}

#[test]
fn what_other_routers_need_counts_in_all_workers() {
    let (memory, mut one, mut two) = workers();
    read([&mut one, &mut two], 0.0);
    one.send(1, 10, 0.0);
    // The workers have the instances in different orders, and get the message at different times.
    one.hear("y", 320, 1.0);
    two.release(1.1);
    one.release(1.2);
    two.hear("y", 320, 1.3);
    two.release(1.6);
    one.release(1.7);
    for worker in [&mut one, &mut two] {
        worker.router.publish_all(2.0);
        assert!(worker.router.has_programs_of_workers());
        assert_eq!(worker.peers_and_capacity().map(|(peers, _)| peers), [0.0, 320.0]);
    }
    // The needs of the workers' programs are published under the right name.
    let home = one.home(1).unwrap();
    let [own, others] = [&mut one, &mut two].map(|worker| {
        worker.router.enter_load(1, 0, 2.0).unwrap();
        worker.router.load_since(None, 2.0).programs
    });
    assert_eq!((own.instances, others.programs), (vec![home.into()], Vec::new()));
    // The next worker that leads has what changed before. A message replaces all of its router.
    one.hear("x", 64, 3.0);
    two.hear("x", 64, 3.0);
    std::mem::forget(one.router);
    board(&memory, SUPERVISOR).clear(0).unwrap();
    two.release(4.0);
    assert_eq!(two.peers_and_capacity().map(|(peers, _)| peers), [64.0, 0.0]);
}

#[test]
fn a_worker_that_starts_anew_drops_no_program_of_a_router_before_its_message_is_due() {
    let (memory, mut one, mut two) = workers();
    read([&mut one, &mut two], 0.0);
    one.hear("x", 64, 1.0);
    two.hear("x", 64, 1.0);
    read([&mut one, &mut two], 1.0);
    std::mem::forget(one.router);
    board(&memory, SUPERVISOR).clear(0).unwrap();
    let mut one = Worker::new(&memory, 0);
    for _ in 0..2 {
        read([&mut one, &mut two], 2.0);
    }
    assert!(one.router.has_programs_of_workers());
    let count = |worker: &Worker| worker.router.programs().unwrap().iter().count();
    for now in [2.0, 3.9] {
        one.router.forget_silent(2.0, now);
        read([&mut one, &mut two], now);
        assert_eq!([&one, &two].map(count), [1; 2]);
    }
    // No message has come since.
    one.router.forget_silent(2.0, 4.1);
    read([&mut one, &mut two], 4.1);
    assert_eq!([&one, &two].map(count), [0; 2]);
}

#[test]
fn a_worker_that_begins_to_lead_asks_other_routers_for_all_programs() {
    let (memory, mut one, mut two) = workers();
    read([&mut one, &mut two], 0.0);
    let count = |worker: &Worker| worker.router.programs().unwrap().iter().count();
    for worker in [&mut one, &mut two] {
        assert!(worker.changes((None, 1), &[7], 1.0));
        assert!(worker.changes((Some(1), 2), &[8], 1.1));
    }
    read([&mut one, &mut two], 1.2);
    assert_eq!([&one, &two].map(count), [2; 2]);
    // The worker that leads is killed, and has not read this message.
    assert!(two.changes((Some(2), 3), &[9], 1.3));
    std::mem::forget(one.router);
    board(&memory, SUPERVISOR).clear(0).unwrap();
    assert!(!two.changes((Some(3), 4), &[10], 1.4));
    assert!(two.changes((None, 5), &[7, 8, 9, 10], 1.5));
    assert!(two.changes((Some(5), 6), &[11], 1.6));
    two.router.publish_all(1.7);
    assert_eq!(count(&two), 5);
}

#[test]
fn a_worker_that_starts_anew_changes_no_capacity_before_it_has_seen_the_caches() {
    let (memory, mut one, mut two) = workers();
    read([&mut one, &mut two], 0.0);
    one.send(1, 10, 0.0);
    one.release(0.5);
    two.release(0.6);
    let before = two.peers_and_capacity();
    std::mem::forget(one.router);
    board(&memory, SUPERVISOR).clear(0).unwrap();
    let mut one = Worker::with_cache(&memory, 0, CACHE / 2);
    for step in 0..4 {
        let now = 1.0 + f64::from(step);
        one.release(now);
        two.release(now + 0.5);
    }
    assert!(one.router.has_programs_of_workers());
    assert_eq!(two.peers_and_capacity(), before);
    one.release(200.0);
    two.release(200.1);
    assert_eq!(two.peers_and_capacity()[0].1, before[0].1.map(|tokens| tokens / 2.0));
}

#[test]
fn a_model_that_returns_after_all_workers_removed_it_gets_its_programs_again() {
    let memory = memory();
    let boards = [0, 1].map(|number| board(&memory, number));
    let new = |number: usize| Worker::of_process(boards[number].clone(), CACHE);
    let (mut one, mut two) = (new(0), new(1));
    read([&mut one, &mut two], 0.0);
    one.send(1, 10, 0.0);
    // A model that only one worker removes: the other one ends its requests, and has a copy for it.
    one.router.leave();
    two.router.publish_all(0.1);
    assert_eq!(two.router.programs().unwrap().states()[State::Running as usize], 0);
    let mut one = new(0);
    assert!(!one.router.has_programs_of_workers());
    read([&mut one, &mut two], 0.2);
    one.router.publish_all(0.2);
    assert!(one.router.has_programs_of_workers());
    // A model that all workers remove begins anew.
    for worker in [&mut one, &mut two] {
        worker.router.leave();
    }
    let (mut one, mut two) = (new(0), new(1));
    read([&mut one, &mut two], 1.0);
    one.router.publish_all(1.0);
    two.router.publish_all(1.0);
    assert!(one.router.has_programs_of_workers() && two.router.has_programs_of_workers());
    assert!(one.send(2, 10, 1.1).is_some());
    assert_eq!(seen(&mut one.router, 1.2), seen(&mut two.router, 1.2));
}

/// The other workers answer no hold of a router that has left them.
#[test]
fn a_router_that_leaves_the_workers_refuses_what_its_programs_held() {
    let (_, mut one, mut two) = workers();
    read([&mut one, &mut two], 0.0);
    for program in 0..2 {
        one.send(program, 50, 0.0);
    }
    assert!(matches!(two.send(7, 50, 0.1), Some(Verdict::Held { .. })));
    two.router.leave();
    assert_eq!(two.router.waiting(), 1);
    let released = two.router.release_held(0.2);
    let refused = [(two.held[0].2, RefusedFor::Programs, 1.0)];
    assert_eq!((released.ready.len(), released.refused.as_slice()), (0, refused.as_slice()));
    assert_eq!(two.router.waiting(), 0);
    // Without workers, programs stay as they are.
    let mut alone =
        Router::new(Registry::CORE.policy("lmetric", &[]).unwrap(), RouterConfig::default()).unwrap();
    alone.add_instance("x", Role::Both, Some(CACHE)).unwrap();
    let programs = ProgramConfig { mode: ProgramMode::Admit, min_tokens: 16, ..ProgramConfig::default() };
    alone.set_programs(Some(programs)).unwrap();
    for program in 0..2 {
        let chain = chain(1000 * program, 50);
        let (arrival, verdict) = alone.arrive(&request(&chain), 0.0).unwrap().unwrap();
        assert_eq!(matches!(verdict, Verdict::Held { .. }), program == 1, "{verdict:?}");
        if program == 0 {
            alone.route(&Request { arrival, ..request(&chain) }, 0.0).unwrap();
        }
    }
    alone.leave();
    assert_eq!((alone.release_held(0.1).refused.len(), alone.waiting()), (0, 1));
}

/// The first turn of a program.
fn arrival(chain: &[u64]) -> Arrival<'_> {
    Arrival { chain, prompt_tokens: 480, tokens_per_block: 16.0, weight: 1.0, ..Arrival::default() }
}

/// Over time, workers serve many more models than the log has groups.
#[test]
fn workers_share_the_programs_of_any_number_of_models_that_follow_each_other() {
    let memory = memory();
    let router = Worker::new(&memory, 5).router;
    let boards = [0, 1].map(|number| board(&memory, number));
    let chain = chain(1000, 30);
    let arrival = arrival(&chain);
    for model in 0..1500 {
        let [mut one, mut two] = boards.clone().map(|board| {
            let config = ProgramConfig { min_tokens: 16, ..ProgramConfig::default() };
            let mut followed = Followed::new(config).unwrap();
            followed.join(board, model, router.fleet()).unwrap();
            followed
        });
        for _ in 0..2 {
            two.follow(0.0);
            one.follow(0.0);
        }
        two.follow(0.0);
        one.arrive(&arrival, 1.0);
        two.follow(1.0);
        assert!(one.is_present() && two.is_present());
        assert_eq!((one.programs().iter().count(), two.programs().iter().count()), (1, 1), "of {model}");
        one.leave();
        two.leave();
    }
}

#[test]
fn a_request_whose_worker_misses_events_as_it_arrives_ends() {
    let memory = memory();
    let router = Worker::new(&memory, 5).router;
    let config = ProgramConfig { min_tokens: 16, ..ProgramConfig::default() };
    let [mut one, mut two] = [0, 1].map(|number| {
        let mut followed = Followed::new(config.clone()).unwrap();
        followed.join(board(&memory, number), 2, router.fleet()).unwrap();
        followed
    });
    let read = |one: &mut Followed, two: &mut Followed, now: f64| {
        for _ in 0..3 {
            two.follow(now);
            one.follow(now);
        }
    };
    read(&mut one, &mut two, 0.0);
    let other = board(&memory, 3);
    for _ in 0..5 {
        other.append(99, 7, 0.0, &[&vec![0; MOST_WORDS]]);
        one.follow(0.2);
    }
    let chain = chain(1000, 30);
    let arrival = arrival(&chain);
    assert_eq!(two.arrive(&arrival, 1.0), (None, lmetric_core::program::Verdict::Free));
    read(&mut one, &mut two, 3.0);
    assert!(two.is_present() && two.take_copied());
    assert_eq!(one.programs().iter().count(), 1);
    two.end_unknown(|_| false, 3.0);
    one.follow(3.0);
    assert_eq!((one.programs().iter().count(), two.programs().iter().count()), (0, 0));
}

#[test]
fn workers_under_other_settings_do_not_share_programs() {
    let memory = memory();
    let mut one = Worker::new(&memory, 0);
    let config = RouterConfig { programs: Some(ProgramConfig::default()), ..RouterConfig::default() };
    let mut two = Router::new(Registry::CORE.policy("lmetric", &[]).unwrap(), config).unwrap();
    two.add_instance("x", Role::Both, Some(CACHE)).unwrap();
    two.join(board(&memory, 1), 1).unwrap();
    one.send(1, 30, 0.0);
    two.publish_all(0.1);
    assert!(two.has_programs_of_workers());
    assert_eq!(two.programs().unwrap().iter().count(), 0);
    assert_eq!(one.router.programs().unwrap().iter().count(), 1);
    let refused = two.set_programs(None).unwrap_err().to_string();
    assert!(refused.contains("a change after join()"), "{refused}");
}
