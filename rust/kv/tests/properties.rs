//! Compares the index with a naive model: a count of physical copies of each block per instance,
//! and depths by linear scan.
use lmetric_kv::Slot;
use lmetric_kv::hash::{Domain, chain};
use lmetric_kv::index::copy::{CopyStatus, PartCopy};
use lmetric_kv::index::{Copies, KvIndex};
use proptest::prelude::*;
use std::collections::{HashMap, HashSet};

/// Returns widely spaced slots, more than a node keeps in a list.
fn instance(i: usize) -> Slot {
    Slot((i * 37) as u32)
}

const INSTANCES: usize = 20;
const SLOTS: usize = INSTANCES * 37;

fn chain_of(symbols: &[u64]) -> Vec<u64> {
    let mut out = Vec::new();
    chain(Domain::new(&[], 16), symbols, &mut out);
    out
}

struct Model {
    /// Distance of the slots.
    spread: usize,
    copies: Vec<HashMap<u64, u32>>,
    /// Instances and blocks whose only copy is expected.
    expected: HashSet<(usize, u64)>,
    /// Observed parent of each block.
    parents: HashMap<u64, Option<u64>>,
}

impl Model {
    fn new(spread: usize) -> Model {
        let copies = vec![HashMap::new(); INSTANCES];
        Model { spread, copies, expected: HashSet::new(), parents: HashMap::new() }
    }

    /// Returns the part of the index with the instance.
    fn part(&self, i: usize) -> usize {
        i * self.spread / 4096
    }

    /// Returns blocks with a holder in a part of the index, and all their ancestors.
    fn known(&self, part: usize) -> HashSet<u64> {
        let mut known = HashSet::new();
        let copies = self.copies.iter().enumerate().filter(|(i, _)| self.part(*i) == part);
        for hash in copies.flat_map(|(_, copies)| copies.keys()) {
            let mut at = Some(*hash);
            while let Some(hash) = at.filter(|h| known.insert(*h)) {
                at = self.parents[&hash];
            }
        }
        known
    }

    fn store(&mut self, i: usize, chain: &[u64], from: usize, copies: Copies) -> usize {
        if from > 0 && !self.known(self.part(i)).contains(&chain[from - 1]) {
            return 0;
        }
        for at in from..chain.len() {
            self.parents.insert(chain[at], at.checked_sub(1).map(|p| chain[p]));
            let count = self.copies[i].entry(chain[at]).or_default();
            let reported = matches!(copies, Copies::Add | Copies::Reset);
            let taken_over = reported && self.expected.remove(&(i, chain[at]));
            if copies == Copies::Expect && *count == 0 {
                self.expected.insert((i, chain[at]));
            }
            *count = match copies {
                Copies::Add => *count + u32::from(!taken_over),
                Copies::Reset => 1,
                Copies::Keep | Copies::Expect => (*count).max(1),
            };
        }
        chain.len() - from
    }

    fn remove(&mut self, i: usize, hash: u64) -> bool {
        let Some(count) = self.copies[i].get_mut(&hash) else { return false };
        *count -= 1;
        if *count == 0 {
            self.copies[i].remove(&hash);
            self.expected.remove(&(i, hash));
        }
        true
    }

    fn depth(&self, i: usize, chain: &[u64]) -> u32 {
        chain.iter().take_while(|h| self.copies[i].contains_key(h)).count() as u32
    }
}

fn check(index: &KvIndex, model: &Model, query: &[u64]) -> Result<(), TestCaseError> {
    let spread = model.spread;
    let mut hits = vec![77; INSTANCES * spread];
    index.match_prefix(query, &mut hits);
    let expected: Vec<u32> =
        (0..hits.len()).map(|s| if s % spread == 0 { model.depth(s / spread, query) } else { 0 }).collect();
    prop_assert_eq!(&hits, &expected);
    // A window that ends within a group of slots.
    let mut few = vec![77; 70];
    index.match_prefix(query, &mut few);
    prop_assert_eq!(&few[..], &expected[..70]);
    for at in [0, query.len() / 2, query.len() - 1] {
        let mut holders = Vec::new();
        index.holders(query[at], &mut holders);
        let expected: Vec<_> = (0..INSTANCES)
            .filter(|i| model.depth(*i, query) as usize > at)
            .map(|i| Slot((i * spread) as u32))
            .collect();
        prop_assert_eq!(holders, expected);
    }
    Ok(())
}

#[derive(Clone, Debug)]
enum Step {
    Store {
        i: usize,
        path: Vec<u64>,
        from: usize,
        reset: bool,
    },
    Record {
        i: usize,
        path: Vec<u64>,
    },
    /// Expects a path, or drops what is expected of its last blocks.
    Expect {
        i: usize,
        path: Vec<u64>,
        most: usize,
        drop: bool,
    },
    /// Removes a block that the instance holds, or a block of any path.
    Remove {
        i: usize,
        pick: usize,
        path: Vec<u64>,
    },
    Clear {
        i: usize,
        forget: bool,
    },
}

/// Few symbols give much sharing; a tail of one symbol gives long runs.
fn paths(longest: usize) -> impl Strategy<Value = Vec<u64>> {
    (prop::collection::vec(0u64..2, 1..6), 0..longest).prop_map(|(mut path, tail)| {
        path.extend(std::iter::repeat_n(2, tail));
        path
    })
}

fn steps(longest: usize) -> impl Strategy<Value = Vec<Step>> {
    let i = 0..INSTANCES;
    let step = prop_oneof![
        6 => (i.clone(), paths(longest), 0usize..longest, prop::bool::weighted(0.25))
            .prop_map(|(i, path, from, reset)| Step::Store { i, from: from % path.len(), path, reset }),
        4 => (i.clone(), paths(longest)).prop_map(|(i, path)| Step::Record { i, path }),
        4 => (i.clone(), paths(longest), 0usize..longest, any::<bool>())
            .prop_map(|(i, path, most, drop)| Step::Expect { i, path, most, drop }),
        12 => (i.clone(), any::<usize>(), paths(longest)).prop_map(|(i, pick, path)| Step::Remove { i, pick, path }),
        1 => (i, any::<bool>()).prop_map(|(i, forget)| Step::Clear { i, forget }),
    ];
    prop::collection::vec(step, 1..120)
}

fn run(spread: usize, all: Vec<Step>, queries: Vec<Vec<u64>>) -> Result<(), TestCaseError> {
    let instance = |i| Slot((i * spread) as u32);
    let mut index = KvIndex::new(1 << 26);
    let mut model = Model::new(spread);
    (0..INSTANCES).for_each(|i| assert!(index.add_instance(instance(i), None)));
    for step in all {
        match step {
            Step::Store { i, path, from, reset } => {
                let copies = if reset { Copies::Reset } else { Copies::Add };
                let chain = chain_of(&path);
                let parent = from.checked_sub(1).map(|p| chain[p]);
                let placed = index.store(instance(i), parent, &chain[from..], copies);
                prop_assert_eq!(placed, model.store(i, &chain, from, copies));
            }
            Step::Record { i, path } => {
                index.record(instance(i), &chain_of(&path));
                model.store(i, &chain_of(&path), 0, Copies::Keep);
            }
            Step::Expect { i, path, most, drop: false } => {
                let chain = chain_of(&path);
                let held = model.depth(i, &chain) as usize;
                let end = chain.len().min(held + most);
                prop_assert_eq!(
                    index.expect_some(instance(i), &chain, [0, held as u32][most % 2], most),
                    held..end
                );
                model.store(i, &chain[..end], held, Copies::Expect);
            }
            Step::Expect { i, path, most, drop: true } => {
                let chain = chain_of(&path);
                index.drop_expected(instance(i), &chain[chain.len().saturating_sub(most)..]);
                for hash in &chain[chain.len().saturating_sub(most)..] {
                    if model.expected.contains(&(i, *hash)) {
                        model.remove(i, *hash);
                    }
                }
            }
            Step::Remove { i, pick, path } => {
                let mut held: Vec<u64> = model.copies[i].keys().copied().collect();
                held.sort_unstable();
                let other = *chain_of(&path).last().unwrap();
                let hash = if held.is_empty() || pick % 8 == 0 { other } else { held[pick % held.len()] };
                prop_assert_eq!(index.removed(instance(i), hash), model.remove(i, hash));
            }
            Step::Clear { i, forget } => {
                if forget {
                    index.remove_instance(instance(i));
                    index.add_instance(instance(i), None);
                } else {
                    index.cleared(instance(i));
                }
                model.copies[i].clear();
                model.expected.retain(|(of, _)| *of != i);
            }
        }
        for query in &queries {
            check(&index, &model, &chain_of(query))?;
        }
        for i in 0..INSTANCES {
            prop_assert_eq!(index.blocks(instance(i)) as usize, model.copies[i].len());
        }
        let known: usize = (0..4).map(|part| model.known(part).len()).sum();
        prop_assert_eq!(index.nodes(), known);
    }
    (0..INSTANCES).for_each(|i| index.remove_instance(instance(i)));
    prop_assert_eq!((index.nodes(), index.pairs()), (0, 0));
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 30, failure_persistence: None, ..ProptestConfig::default() })]

    /// 20 instances in all four parts of the index.
    #[test]
    fn parts_equal_the_naive_model(all in steps(60), queries in prop::collection::vec(paths(60), 1..3)) {
        run(800, all, queries)?;
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn short_chains_equal_the_naive_model(all in steps(6), queries in prop::collection::vec(paths(6), 1..5)) {
        run(37, all, queries)?;
    }

    #[test]
    fn long_chains_equal_the_naive_model(all in steps(300), queries in prop::collection::vec(paths(300), 1..3)) {
        run(37, all, queries)?;
    }

    /// Approximate feed with capacities: bounded and prefix-closed, and the last recorded chain is
    /// present.
    #[test]
    fn records_stay_within_capacity_and_prefix_closed(
        capacities in prop::collection::vec(1u32..60, 3),
        prompts in prop::collection::vec((0usize..3, paths(30), any::<bool>()), 1..150),
        most in 1usize..9,
    ) {
        let (mut index, mut pieces) = (KvIndex::new(1 << 26), KvIndex::new(1 << 26));
        for (i, capacity) in capacities.iter().enumerate() {
            index.add_instance(instance(i), Some(*capacity));
            pieces.add_instance(instance(i), Some(*capacity));
        }
        let mut seen: HashSet<u64> = HashSet::new();
        let mut recent: Vec<Vec<u64>> = Vec::new();
        for (i, path, hinted) in prompts {
            let chain = chain_of(&path);
            let mut hits = vec![0; SLOTS];
            index.match_prefix(&chain, &mut hits);
            if hinted {
                index.record_hit(instance(i), &chain, hits[instance(i).index()]);
            } else {
                index.touch(instance(i), &chain, hits[instance(i).index()]);
                pieces.touch(instance(i), &chain, hits[instance(i).index()]);
                index.record(instance(i), &chain);
            }
            // A wrong hit costs a search.
            let mut at = if hinted { hits[instance(i).index()] } else { 0 };
            let mut calls = 1;
            while let Some(next) = pieces.record_some(instance(i), &chain, at, most) {
                (at, calls) = (next, calls + 1);
            }
            prop_assert!(calls <= 2 * chain.len().div_ceil(most).max(1), "{} calls", calls);
            index.match_prefix(&chain, &mut hits);
            prop_assert_eq!(hits[instance(i).index()] as usize, chain.len().min(capacities[i] as usize));
            seen.extend(&chain);
            recent.push(chain);
            for (i, capacity) in capacities.iter().enumerate() {
                prop_assert!(index.blocks(instance(i)) <= *capacity);
                let held = seen.iter().filter(|h| index.holds(instance(i), **h)).count();
                prop_assert_eq!(held, index.blocks(instance(i)) as usize);
                let equal = |h| pieces.holds(instance(i), h) == index.holds(instance(i), h);
                prop_assert!(seen.iter().all(|h| equal(*h)), "in pieces, other blocks were evicted");
            }
            for chain in recent.iter().rev().take(20) {
                index.match_prefix(chain, &mut hits);
                for i in 0..capacities.len() {
                    let linear = chain.iter().take_while(|h| index.holds(instance(i), **h)).count();
                    prop_assert_eq!(hits[instance(i).index()] as usize, linear);
                    let held = chain.iter().filter(|h| index.holds(instance(i), **h)).count();
                    prop_assert_eq!(linear, held, "an inner block was evicted before a leaf");
                }
            }
        }
    }
}

/// Eviction removes the least recently used chain from its end; a touch counts as use.
#[test]
fn eviction_takes_the_least_recently_used_chain_from_its_end() {
    let mut index = KvIndex::new(1 << 24);
    let a = instance(0);
    index.add_instance(a, Some(30));
    let prompts: Vec<Vec<u64>> = (0..4).map(|p| chain_of(&[p; 10])).collect();
    prompts[..3].iter().for_each(|p| index.record(a, p));
    index.touch(a, &prompts[0], 10);
    index.record(a, &prompts[3][..4]);
    let depth = |index: &KvIndex, p: usize| {
        let mut hits = [0];
        index.match_prefix(&prompts[p], &mut hits);
        hits[0]
    };
    assert_eq!([0, 1, 2, 3].map(|p| depth(&index, p)), [10, 6, 10, 4]);
    index.record(a, &prompts[3]);
    assert_eq!([0, 1, 2, 3].map(|p| depth(&index, p)), [10, 0, 10, 10]);
    assert_eq!(index.evicted_blocks(), 10);
}

/// A prefix used by itself outlives an older, longer chain with the same prefix.
#[test]
fn a_touched_prefix_outlives_what_stands_behind_it() {
    let mut index = KvIndex::new(1 << 24);
    let a = instance(0);
    index.add_instance(a, Some(20));
    let (long, other, third) = (chain_of(&[1; 10]), chain_of(&[2; 10]), chain_of(&[3; 8]));
    index.record(a, &long);
    index.record(a, &other);
    index.touch(a, &long, 4);
    index.record(a, &third);
    let mut hits = [0];
    index.match_prefix(&long, &mut hits);
    assert_eq!(hits, [4]);
    index.match_prefix(&other, &mut hits);
    assert_eq!(hits, [8]);
}

/// The byte bound holds after every call, in both feeds, with shared prefixes, holes and long
/// queues.
#[test]
fn bytes_never_pass_the_bound() {
    let bound = 2 << 20;
    let mut index = KvIndex::new(bound);
    (0..INSTANCES).for_each(|i| assert!(index.add_instance(instance(i), None)));
    let mut hits = vec![0; SLOTS];
    for prompt in 0..20_000u64 {
        let i = (prompt * 7 % INSTANCES as u64) as usize;
        let symbols: Vec<u64> = (0..20).map(|b| if b < 8 { b } else { prompt / 3 * 100 + b }).collect();
        let chain = chain_of(&symbols);
        match prompt % 3 {
            0 => index.record(instance(i), &chain),
            1 => {
                assert_eq!(index.stored(instance(i), None, &chain), 20);
                index.removed(instance(i), chain[12]);
            }
            _ => (0..INSTANCES).for_each(|i| index.record(instance(i), &chain[..9])),
        }
        assert!(index.bytes() <= bound, "{} after {prompt}", index.bytes());
        if prompt % 3 == 0 {
            index.match_prefix(&chain, &mut hits);
            assert_eq!(hits[instance(i).index()], 20);
        }
    }
    assert!(index.evicted_blocks() > 100_000);
    assert!(index.pairs() > 20_000, "{}", index.pairs());
    (0..INSTANCES).for_each(|i| index.remove_instance(instance(i)));
    assert_eq!((index.nodes(), index.pairs()), (0, 0));
}

#[test]
fn slots_out_of_range_and_unopened_are_left_alone() {
    let mut index = KvIndex::new(1 << 22);
    assert!(!index.add_instance(Slot(16_384), None));
    assert!(index.add_instance(Slot(16_383), None));
    let chain = chain_of(&[1, 2, 3]);
    index.record(Slot(16_384), &chain);
    assert_eq!(index.stored(Slot(3), None, &chain), 0);
    index.record(Slot(16_383), &chain);
    let mut hits = vec![9; 16_384];
    index.match_prefix(&chain, &mut hits);
    assert_eq!(hits[16_383], 3);
    assert_eq!(hits.iter().sum::<u32>(), 3);
    index.match_prefix(&[], &mut hits);
    assert_eq!(hits.iter().sum::<u32>(), 0);
}

/// Begins a copy of the part that has too much.
fn begun(index: &mut KvIndex, bound: usize) -> PartCopy {
    let mut copy = index.copy_within(bound).unwrap();
    assert!(index.begin_copy(&mut copy));
    copy
}

/// Parts added to a full index get memory by copies of the part that has it, and all bytes stay
/// within the bound.
#[test]
fn parts_share_the_bound_by_their_instances() {
    let bound = 24 << 20;
    let mut index = KvIndex::new(bound);
    let fill = |index: &mut KvIndex, instances: std::ops::Range<u32>, from: u64| {
        for prompt in from..from + 40_000 {
            let id = Slot(instances.start + prompt as u32 % instances.len() as u32);
            index.record(id, &chain_of(&[prompt; 20]));
            assert!(index.bytes() <= bound, "{} after {prompt}", index.bytes());
        }
    };
    (0..4096).for_each(|i| assert!(index.add_instance(Slot(i), None)));
    fill(&mut index, 0..4096, 0);
    assert!(index.bytes() > bound / 10 * 9 && !index.is_crowded());
    (4096..8192).for_each(|i| assert!(index.add_instance(Slot(i), None)));
    assert!(index.is_crowded());
    let mut copy = begun(&mut index, bound);
    while copy.look(&index, 100) {}
    copy.order();
    while copy.read(&index) {
        copy.store();
    }
    let evicted = index.evicted_blocks();
    assert_eq!(index.replace(&mut copy), CopyStatus::Yes);
    assert!(index.evicted_blocks() >= evicted);
    assert!(index.bytes() <= bound / 2 && !index.is_crowded());
    let last = Slot(39_999 % 4096);
    assert!(index.holds(last, chain_of(&[39_999; 20])[19]), "the recent blocks are kept");
    fill(&mut index, 4096..8192, 100_000);
    assert!(index.bytes() > bound / 10 * 9, "{}", index.bytes());
    assert!(index.holds(last, chain_of(&[39_999; 20])[19]));
}

/// Blocks that are stored while a part is copied are in the copy, too.
#[test]
fn a_copy_has_the_blocks_that_are_stored_meanwhile() {
    let mut index = KvIndex::new(8 << 20);
    (0..INSTANCES).for_each(|i| assert!(index.add_instance(instance(i), None)));
    let prompt = |n: u64| chain_of(&[n; 20]);
    let mut prompts = 0;
    while index.bytes() < 6 << 20 {
        index.stored(instance(prompts as usize % INSTANCES), None, &prompt(prompts));
        prompts += 1;
    }
    // Of instance 0, recent enough to be copied.
    let known = prompt((prompts - 1) / INSTANCES as u64 * INSTANCES as u64);
    let longer = |blocks: usize| {
        let mut symbols = vec![(prompts - 1) / INSTANCES as u64 * INSTANCES as u64; 20];
        symbols.resize(blocks, 7);
        chain_of(&symbols)
    };
    let mut copy = begun(&mut index, 4 << 20);
    let mut new = Vec::new();
    let mut store = |index: &mut KvIndex, from: u64, count: u64| {
        for n in from..from + count {
            assert_eq!(index.stored(instance(3), None, &prompt(1_000_000 + n)), 20);
            new.push(prompt(1_000_000 + n)[19]);
        }
    };
    assert!(copy.look(&index, 100));
    store(&mut index, 0, 5);
    while copy.look(&index, 100) {}
    store(&mut index, 5, 5);
    copy.order();
    index.stored(instance(0), Some(known[19]), &longer(30)[20..]); // behind known blocks
    index.stored(instance(1), None, &longer(40)); // on another instance, too
    index.stored(instance(0), None, &known[..10]); // a second copy of the first ten blocks
    for _ in 0..500 {
        assert!(copy.read(&index));
        copy.store();
    }
    store(&mut index, 10, 100);
    let mut rounds = 0;
    loop {
        while copy.read(&index) {
            copy.store();
        }
        if rounds == 0 {
            store(&mut index, 110, 100);
        }
        store(&mut index, 1000 + rounds, 1);
        rounds += 1;
        match index.replace(&mut copy) {
            CopyStatus::Yes => break,
            CopyStatus::NotYet => assert!(rounds < 5),
            CopyStatus::Failed => panic!("nothing was removed"),
        }
    }
    assert!(rounds > 1, "many blocks are not copied at once");
    assert!(index.bytes() <= 4 << 20);
    assert!(new.iter().all(|last| index.holds(instance(3), *last)));
    assert!(longer(30).iter().all(|hash| index.holds(instance(0), *hash)));
    assert!(longer(40).iter().all(|hash| index.holds(instance(1), *hash)));
    let mut hits = vec![0; SLOTS];
    index.match_prefix(&longer(50), &mut hits);
    assert_eq!((hits[0], hits[37]), (30, 40));
    // Removing one copy of each block leaves the second copies.
    let backwards: Vec<u64> = longer(30).into_iter().rev().collect();
    assert_eq!(index.removed_all(instance(0), &backwards), 30);
    index.match_prefix(&longer(50), &mut hits);
    assert_eq!(hits[0], 10);

    // A copy without the changes does not replace the part.
    let mut copy = begun(&mut index, 2 << 20);
    begun(&mut index, 2 << 20);
    assert_eq!(index.replace(&mut copy), CopyStatus::Failed, "another copy has begun");
    let mut copy = begun(&mut index, 2 << 20);
    index.removed(instance(1), longer(40)[39]);
    assert_eq!(index.replace(&mut copy), CopyStatus::Failed);
    let mut copy = index.copy_within(2 << 20).unwrap();
    index.removed(instance(1), longer(40)[38]);
    assert!(!index.begin_copy(&mut copy));
}

/// Begins a copy of the only part and copies all its chains.
fn copied(index: &mut KvIndex, bound: usize) -> PartCopy {
    let mut copy = begun(index, bound);
    while copy.look(index, 1000) {}
    copy.order();
    while copy.read(index) {
        copy.store();
    }
    copy
}

/// An index of one instance that uses more than this bound.
fn filled(bound: usize) -> KvIndex {
    let mut index = KvIndex::new(2 * bound);
    assert!(index.add_instance(instance(0), None));
    for prompt in 0.. {
        if index.bytes() > bound + bound / 2 {
            break;
        }
        index.record(instance(0), &chain_of(&[prompt; 20]));
    }
    index
}

/// The last step of a copy holds the index, so it copies few blocks, however few notes have them.
#[test]
fn a_long_prompt_is_not_copied_in_the_last_step() {
    let mut index = filled(4 << 20);
    let mut copy = copied(&mut index, 4 << 20);
    let (long, short) = (chain_of(&[1 << 40; 8192]), chain_of(&[1 << 41; 256]));
    index.record(instance(0), &long);
    assert_eq!(index.replace(&mut copy), CopyStatus::NotYet);
    while copy.read(&index) {
        copy.store();
    }
    index.record(instance(0), &short);
    assert_eq!(index.replace(&mut copy), CopyStatus::Yes);
    assert!(index.holds(instance(0), long[8191]) && index.holds(instance(0), short[255]));
}

#[test]
fn a_copy_does_not_bring_an_old_capacity_back() {
    let mut index = filled(4 << 20);
    let mut copy = copied(&mut index, 4 << 20);
    index.set_capacity(instance(0), None); // as before
    assert_eq!(index.replace(&mut copy), CopyStatus::Yes);
    let mut copy = copied(&mut index, 2 << 20);
    index.set_capacity(instance(0), Some(1000));
    while index.trim(instance(0), 100) > 0 {}
    assert_eq!(index.replace(&mut copy), CopyStatus::Failed);
    index.record(instance(0), &chain_of(&[1 << 40; 2000]));
    assert_eq!(index.blocks(instance(0)), 1000);
}

/// A copy without expected blocks: they would count as blocks that the engine has reported.
#[test]
fn a_copy_has_no_expected_blocks() {
    let mut index = filled(4 << 20);
    let (early, late) = (chain_of(&[1 << 40; 20]), chain_of(&[1 << 41; 20]));
    assert_eq!(index.expect_some(instance(0), &early, 0, 100), 0..20);
    let mut copy = copied(&mut index, 4 << 20);
    assert_eq!(index.expect_some(instance(0), &late, 0, 100), 0..20);
    assert_eq!(index.replace(&mut copy), CopyStatus::Yes);
    assert!(!index.holds(instance(0), early[0]) && !index.holds(instance(0), late[0]));
    assert_eq!(index.stored(instance(0), None, &late), 20);
    assert!(index.removed(instance(0), late[19]) && !index.holds(instance(0), late[19]));
}
