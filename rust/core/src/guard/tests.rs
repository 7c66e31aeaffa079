use super::testing::prompt;
use super::*;
use std::collections::HashMap;

/// A small fleet that routes by LMETRIC, with an index and a guard. The index shows a prompt
/// `index_lag_seconds` after its placement: 0 as the approximate feed does, more as KV events do.
struct Fleet {
    guard: Guard,
    held: HashMap<u64, SlotSet>,
    running: Vec<Vec<f64>>,
    now: f64,
    service_seconds: f64,
    index_lag_seconds: f64,
    late: Vec<(f64, usize, Vec<u64>)>,
    events: Vec<GuardEvent>,
    routed: Vec<usize>,
}

/// Removes the excluded instances from `eligible`, as the router does.
fn restrict(guard: &Guard, chain: &[u64], eligible: &mut [bool]) -> Restriction {
    guard.excluded(chain).map_or(Restriction::Free, |slots| slots.exclude_from(eligible))
}

impl Fleet {
    fn new(instances: usize, config: GuardConfig) -> Fleet {
        Fleet {
            guard: Guard::new(config).unwrap(),
            held: HashMap::new(),
            running: vec![Vec::new(); instances],
            now: 0.0,
            service_seconds: 2.0,
            index_lag_seconds: 0.0,
            late: Vec::new(),
            events: Vec::new(),
            routed: Vec::new(),
        }
    }

    fn store(&mut self, slot: usize, chain: &[u64]) {
        for hash in chain {
            self.held.entry(*hash).or_default().insert(Slot(slot as u32));
        }
    }

    fn hit(&self, slot: usize, chain: &[u64]) -> usize {
        let holds = |hash| self.held.get(hash).is_some_and(|s: &SlotSet| s.contains(Slot(slot as u32)));
        chain.iter().take_while(|hash| holds(hash)).count()
    }

    /// Lets the index show the prompts whose time has come.
    fn show(&mut self) {
        let now = self.now;
        for (_, slot, chain) in self.late.extract_if(.., |(at, ..)| *at <= now).collect::<Vec<_>>() {
            self.store(slot, &chain);
        }
    }

    fn route(&mut self, chain: &[u64]) -> (usize, Restriction) {
        let n = self.running.len();
        self.show();
        for slot in &mut self.running {
            slot.retain(|ends| *ends > self.now);
        }
        let hits: Vec<usize> = (0..n).map(|i| self.hit(i, chain)).collect();
        let mut eligible = vec![true; n];
        let restriction = restrict(&self.guard, chain, &mut eligible);
        let mut scores = Scores::default();
        scores.reset(n);
        for i in (0..n).filter(|i| eligible[*i]) {
            scores.score[i] = (chain.len() - hits[i]).max(1) as f64 * (self.running[i].len() + 1) as f64;
        }
        let key = |i: &usize| (scores.score[*i], (*i + self.routed.len()) % n);
        let best =
            (0..n).filter(|i| eligible[*i]).min_by(|a, b| key(a).partial_cmp(&key(b)).unwrap()).unwrap();
        let matched = *hits.iter().max().unwrap() as u32;
        self.guard.observe(self.now, chain, matched, &scores, &eligible, Slot(best as u32));
        self.late.push((self.now + self.index_lag_seconds, best, chain.to_vec()));
        self.show();
        self.running[best].push(self.now + self.service_seconds);
        self.routed.push(best);
        (best, restriction)
    }

    fn tick(&mut self) -> Vec<GuardEvent> {
        self.show();
        let held = &self.held;
        let lookup = |hash: u64, out: &mut Vec<Slot>| {
            out.extend(held.get(&hash).into_iter().flat_map(SlotSet::iter));
        };
        let events = self.guard.tick(self.now, self.running.len(), lookup);
        self.events.extend(&events);
        events
    }
}

fn suspicions(events: &[GuardEvent]) -> usize {
    events.iter().filter(|e| e.phase == Phase::Suspected && !e.released).count()
}

#[test]
fn a_hot_spot_is_suspected_filtered_spread_and_released() {
    let mut fleet = Fleet::new(8, GuardConfig { release_factor: 0.8, ..GuardConfig::default() });
    let hot = prompt(7, 0, 64);
    fleet.store(3, &hot);
    // Every second request is hot: x = 1/2, so |M| / |not M| must reach 1, with four holders of
    // eight.
    for i in 0..40 {
        fleet.now += 0.05;
        fleet.route(if i % 2 == 0 { hot.clone() } else { prompt(1000 + i, 0, 64) }.as_slice());
    }
    assert!(
        (0..40).step_by(2).all(|i| fleet.routed[i] == 3),
        "a hit that is 64 times cheaper draws all requests: {:?}",
        fleet.routed
    );

    let events = fleet.tick();
    assert_eq!(events.len(), 1, "nested classes with the same holders are one alarm: {events:?}");
    let alarm = GuardEvent { share: 0.5, ..events[0] };
    assert!((events[0].share - 0.5).abs() < 0.05, "{events:?}");
    let expected = (hot[0], 1, Phase::Suspected, false, 1, 8);
    assert_eq!(
        (alarm.class, alarm.depth, alarm.phase, alarm.released, alarm.holders, alarm.instances),
        expected
    );

    // Phase 2 needs more than 2|M| = 2 consecutive requests: the third raises it, the fourth is
    // filtered.
    let mut outcomes = Vec::new();
    for i in 0..6 {
        fleet.now += 0.05;
        outcomes.push(fleet.route(&hot));
        fleet.route(&prompt(2000 + i, 0, 64));
    }
    assert_eq!(outcomes[..3], [(3, Restriction::Free); 3]);
    assert_eq!(outcomes[3].1, Restriction::Filtered(1));
    assert_eq!(outcomes[4].1, Restriction::Filtered(2), "the new holder is one of M at once");
    assert!(outcomes[3..].iter().all(|(slot, _)| *slot != 3));
    for i in 0..10 {
        fleet.now += 0.05;
        fleet.route(&hot);
        fleet.route(&prompt(3000 + i, 0, 64));
    }
    let events = fleet.tick();
    assert_eq!(
        events.iter().map(|e| (e.phase, e.released)).collect::<Vec<_>>(),
        [(Phase::Filtering, false), (Phase::Filtering, true)]
    );
    // x is a little above 1/2 (19 of 37 since phase 2 began to count). Hysteresis requires 5
    // holders, not 4.
    assert_eq!(events[1].holders, 5);
    assert_eq!(fleet.route(&hot).1, Restriction::Free);
    assert!(fleet.guard.alarms().is_empty());

    // After the prefix has spread, the same demand raises no alarm.
    let seen = fleet.events.len();
    for i in 0..400 {
        fleet.now += 0.05;
        fleet.route(&hot);
        fleet.route(&prompt(4000 + i, 0, 64));
        fleet.tick();
    }
    assert_eq!(fleet.events.len(), seen, "{:?}", &fleet.events[seen..]);
}

/// The index shows a new holder only after its prefill. The guard counts it as a holder until then,
/// at most for a window.
#[test]
fn an_instance_that_still_computes_a_spread_prefix_is_a_holder() {
    let mut fleet = Fleet::new(8, GuardConfig::default());
    fleet.index_lag_seconds = 4.5;
    let hot = prompt(7, 0, 64);
    fleet.store(3, &hot);
    let mut filtered = Vec::new();
    for i in 0..200 {
        fleet.now += 0.05;
        if let (slot, Restriction::Filtered(_)) = fleet.route(&hot) {
            filtered.push(slot);
        }
        fleet.route(&prompt(1000 + i, 0, 1));
        if i % 20 == 0 {
            fleet.tick();
        }
    }
    filtered.sort_unstable();
    assert_eq!(filtered, [0, 1, 2, 4, 5, 6, 7], "each other instance computes the prefix once");
    assert_eq!(suspicions(&fleet.events), 1, "{:?}", fleet.events);

    // An engine that never computes the prefix is no holder once the window is over.
    let mut fleet = Fleet::new(2, GuardConfig::default());
    fleet.index_lag_seconds = f64::INFINITY;
    fleet.store(0, &hot);
    for i in 0..800 {
        fleet.now += 0.05;
        fleet.route(&hot);
        if i % 20 == 0 {
            fleet.tick();
        }
    }
    assert!(suspicions(&fleet.events) >= 2, "{:?}", fleet.events);
    fleet.guard.set_on(false);
    assert!(fleet.guard.new_holders.is_empty());
}

#[test]
fn requests_that_score_lower_elsewhere_start_the_count_again() {
    let mut guard = Guard::new(GuardConfig::default()).unwrap();
    let chain = prompt(1, 0, 4);
    let holders = |_: u64, out: &mut Vec<Slot>| out.push(Slot(0));
    let mut scores = Scores::default();
    scores.reset(4);
    let eligible = [true; 4];
    let mut observe = |guard: &mut Guard, on_m: f64, elsewhere: f64, prefer: Prefer| {
        scores.score.copy_from_slice(&[on_m, elsewhere, f64::NAN, elsewhere]);
        scores.prefer = prefer;
        guard.observe(0.0, &chain, 4, &scores, &eligible, Slot(0));
        guard.excluded(&chain).is_some()
    };
    (0..16).for_each(|_| assert!(!observe(&mut guard, 1.0, 2.0, Prefer::Min)));
    assert_eq!(suspicions(&guard.tick(0.0, 4, holders)), 1);
    let (low, equal) = ((1.0, 2.0), (2.0, 2.0));
    for (on_m, elsewhere) in [low, low, equal, low, low, (3.0, 2.0), low, low] {
        assert!(!observe(&mut guard, on_m, elsewhere, Prefer::Min), "2 in a row are not more than 2|M|");
    }
    assert!(!observe(&mut guard, 1.0, 2.0, Prefer::Max), "with Prefer::Max, a lower score on M is worse");
    assert!(!observe(&mut guard, 9.0, 2.0, Prefer::Max) && !observe(&mut guard, 9.0, 2.0, Prefer::Max));
    assert!(observe(&mut guard, 9.0, 2.0, Prefer::Max));
    assert!(guard.excluded(&prompt(2, 0, 4)).is_none(), "other classes are free");
    assert!(guard.excluded(&[]).is_none());
}

/// Every fifth request is hot: a quarter of the others. Two of eight instances hold its prefix, so
/// counted in requests Equation 2 holds. But it is most of the tokens.
#[test]
fn shares_are_of_prompt_tokens_not_of_requests() {
    let alarms = |others: usize| {
        let mut guard = Guard::new(GuardConfig::default()).unwrap();
        let (hot, mut scores) = (prompt(1, 0, 63), Scores::default());
        scores.reset(8);
        for i in 0..100 {
            let chain = if i % 5 == 0 { hot.clone() } else { prompt(100 + i, 0, others) };
            guard.observe(0.0, &chain, if i % 5 == 0 { 63 } else { 0 }, &scores, &[true; 8], Slot(0));
        }
        guard.tick(0.0, 8, |_, out| out.extend([0, 1].map(Slot)));
        guard.alarms().iter().map(|alarm| (alarm.depth, alarm.share)).collect::<Vec<_>>()
    };
    assert_eq!(alarms(63), [], "prompts of equal length: 20 of 100");
    assert_eq!(alarms(3), [(1, 0.8)], "20 prompts of 64 blocks, 80 of 4");
}

/// A program's request has one candidate, the engine of its program. It was counted as drawn
/// elsewhere, so phase 2 hardly ever began beside programs.
#[test]
fn requests_without_a_choice_leave_the_count_as_it_is() {
    let mut guard = Guard::new(GuardConfig::default()).unwrap();
    let chain = prompt(1, 0, 4);
    let mut scores = Scores::default();
    scores.reset(4);
    scores.score = vec![1.0, 2.0, 2.0, 2.0];
    let observe = |guard: &mut Guard, eligible: [bool; 4]| {
        guard.observe(0.0, &chain, 4, &scores, &eligible, Slot(0));
        guard.excluded(&chain).is_some()
    };
    (0..16).for_each(|_| assert!(!observe(&mut guard, [true; 4])));
    assert_eq!(suspicions(&guard.tick(0.0, 4, |_, out| out.push(Slot(0)))), 1);
    let (t, f) = (true, false);
    let (choice, home, away) = ([t; 4], [t, f, f, f], [f, t, f, f]);
    for eligible in [choice, home, away, choice, home] {
        assert!(!observe(&mut guard, eligible), "2 in a row are not more than 2|M|");
    }
    assert!(observe(&mut guard, choice), "the third choice of M");
}

#[test]
fn a_mooncake_like_workload_never_alarms() {
    // Every prompt shares block 0, which all instances hold. Beyond it, conversations grow turn by
    // turn.
    let mut fleet = Fleet::new(16, GuardConfig::default());
    (0..16).for_each(|slot| fleet.store(slot, &prompt(0, 1, 1)));
    let mut turn = HashMap::new();
    let mut state = 1u64;
    for _ in 0..6000 {
        fleet.now += 0.1;
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        let conversation = (state >> 33) % 300;
        let turns = turn.entry(conversation).or_insert(0usize);
        *turns += 1;
        let chain = prompt(conversation + 1, 1, 8 + 6 * *turns);
        fleet.route(&chain);
        if fleet.routed.len().is_multiple_of(10) {
            fleet.tick();
        }
    }
    assert_eq!(fleet.events, []);
    assert!(fleet.guard.heavy.requests() > 100, "it was watching");
}

#[test]
fn a_deeper_cut_with_fewer_holders_stands_for_itself() {
    // All prompts share 4 blocks, held by instances 0-3 of 8. 3 of 4 requests share 16 blocks, held
    // by instance 0 only.
    let mut guard = Guard::new(GuardConfig { min_requests: 4, ..GuardConfig::default() }).unwrap();
    let (long, short) = (prompt(1, 4, 16), prompt(2, 4, 16));
    let mut scores = Scores::default();
    scores.reset(8);
    for i in 0..40 {
        let (chain, matched) = if i % 4 == 0 { (&short, 4) } else { (&long, 16) };
        guard.observe(0.0, chain, matched, &scores, &[true; 8], Slot(0));
    }
    let holders = |hash: u64, out: &mut Vec<Slot>| {
        let depth = long.iter().position(|h| *h == hash).unwrap() + 1;
        out.extend((0..if depth <= 4 { 4 } else { 1 }).map(Slot));
    };
    guard.tick(0.0, 8, holders);
    let alarms: Vec<_> = guard.alarms().iter().map(|a| (a.depth, a.holders.len())).collect();
    assert_eq!(alarms, [(1, 4), (8, 1)], "depths 2, 4 and 16 add nothing");

    let fill = |scores: &mut Scores, on_0: f64, on_123: f64| {
        scores.score = vec![9.0; 8];
        scores.score[0] = on_0;
        scores.score[1..4].fill(on_123);
    };
    fill(&mut scores, 1.0, 20.0);
    (0..3).for_each(|_| guard.observe(0.0, &long, 16, &scores, &[true; 8], Slot(0)));
    let out = |guard: &Guard, chain: &[u64]| guard.excluded(chain).map(SlotSet::len);
    assert_eq!((out(&guard, &long), out(&guard, &short)), (Some(1), None), "only the deeper class filters");
    fill(&mut scores, f64::NAN, 1.0);
    (0..6).for_each(|_| guard.observe(0.0, &short, 4, &scores, &[true; 8], Slot(1)));
    assert_eq!(
        (out(&guard, &long), out(&guard, &short)),
        (Some(4), Some(4)),
        "then the shallower decides for both"
    );
}

#[test]
fn an_empty_rest_means_load_balance_only() {
    let mut guard = Guard::new(GuardConfig { phase2_factor: 0.0, ..GuardConfig::default() }).unwrap();
    let chain = prompt(1, 0, 2);
    let mut scores = Scores::default();
    scores.reset(4);
    scores.score = vec![1.0, 1.0, 5.0, 5.0];
    let holders = |_: u64, out: &mut Vec<Slot>| out.extend([0, 1].map(Slot));
    for _ in 0..17 {
        guard.observe(0.0, &chain, 2, &scores, &[true; 4], Slot(0));
        guard.tick(0.0, 4, holders);
    }
    let restricted =
        |guard: &Guard, mut eligible: [bool; 4]| (restrict(guard, &chain, &mut eligible), eligible);
    let (t, f) = (true, false);
    assert_eq!(restricted(&guard, [t; 4]), (Restriction::Filtered(2), [f, f, t, t]));
    assert_eq!(restricted(&guard, [t, t, f, f]), (Restriction::BalanceOnly, [t, t, f, f]));
    assert_eq!(restricted(&guard, [f, f, t, f]), (Restriction::Free, [f, f, t, f]));
    guard.instance_removed(Slot(1));
    assert_eq!(restricted(&guard, [t; 4]), (Restriction::Filtered(1), [f, t, t, t]));

    guard.set_on(false);
    assert_eq!(restricted(&guard, [t; 4]), (Restriction::Free, [t; 4]));
    let events = guard.tick(1.0, 4, |_, _| panic!("a disabled guard looks up nothing"));
    assert_eq!(events.iter().map(|e| (e.phase, e.released)).collect::<Vec<_>>(), [(Phase::Filtering, true)]);
    guard.observe(1.0, &chain, 2, &scores, &[true; 4], Slot(0));
    assert_eq!(guard.heavy.requests(), 0);
}

#[test]
fn an_alarm_ends_when_demand_or_holders_are_gone() {
    let chain = prompt(1, 0, 2);
    let one = |_: u64, out: &mut Vec<Slot>| out.push(Slot(2));
    let alarmed = || {
        let mut guard = Guard::new(GuardConfig::default()).unwrap();
        let mut scores = Scores::default();
        scores.reset(4);
        (0..20).for_each(|_| guard.observe(0.0, &chain, 2, &scores, &[true; 4], Slot(2)));
        assert_eq!(suspicions(&guard.tick(0.0, 4, one)), 1);
        assert_eq!(guard.tick(1.0, 4, one), [], "each event is returned once");
        guard
    };
    let released = |events: Vec<GuardEvent>| events.len() == 1 && events[0].released;
    assert!(released(alarmed().tick(61.0, 4, one)), "the window is empty");
    assert!(released(alarmed().tick(1.0, 4, |_, _| ())), "evicted everywhere");
    assert!(released(alarmed().tick(1.0, 1, one)), "no other instance is left");
    let all = |_: u64, out: &mut Vec<Slot>| out.extend((0..4).map(Slot));
    assert!(released(alarmed().tick(1.0, 4, all)), "all instances hold it");
}

#[test]
fn bad_settings_are_refused() {
    let refused = |config: GuardConfig| Guard::new(config).unwrap_err().to_string();
    let good = GuardConfig::default();
    assert_eq!(
        refused(GuardConfig { window_seconds: 0.0, ..good }),
        "hot-spot guard: window_seconds: 0 is not valid; expected seconds above 0"
    );
    assert!(refused(GuardConfig { classes: 0, ..good }).contains("classes"));
    assert!(refused(GuardConfig { classes: 65536, ..good }).contains("65535"));
    assert!(refused(GuardConfig { phase2_factor: f64::NAN, ..good }).contains("phase2_factor"));
    assert!(refused(GuardConfig { release_factor: 1.5, ..good }).contains("release_factor"));
}
