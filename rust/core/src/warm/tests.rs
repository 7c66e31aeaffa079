//! Plans against the rule that looks at every block, and the number of blocks that they compare.
use super::paths::COMPARED;
use super::*;
use crate::fleet::{self, InstanceId, Role};
use crate::ids::{Seconds, Slot};
use crate::kv::index::KvIndex;
use proptest::prelude::*;
use std::cmp::Reverse;
use std::collections::{HashMap, HashSet};

/// Returns the first instance of a slot.
pub(super) fn id_of(id: Slot) -> InstanceId {
    let mut fleet = fleet::Fleet::default();
    for slot in 0..=id.0 {
        fleet.add(&format!("e{slot}"), Role::Both).unwrap();
    }
    fleet.id_of(id)
}

const NOW: Seconds = 1e3;
const SLOTS: usize = 5;

/// A fetch as (prompt, blocks, source, target).
type Row = (u64, usize, usize, usize);

struct World {
    index: KvIndex,
    demand: Demand,
    ready: Vec<bool>,
    cache_blocks: Option<u32>,
    config: WarmConfig,
}

impl World {
    fn fleet<T>(&self, with: impl FnOnce(&Fleet<'_>) -> T) -> T {
        with(&Fleet {
            index: &self.index,
            id_of: &id_of,
            ready: &self.ready,
            cache_blocks: &|_| self.cache_blocks,
            saved_seconds: &|_, tokens| tokens - 16.5,
        })
    }

    fn join(&self, target: usize) -> Vec<Fetch> {
        self.fleet(|fleet| plan::join(&self.demand, fleet, Slot(target as u32), &self.config, NOW))
    }

    fn leave(&self, leaving: usize) -> Vec<Fetch> {
        self.fleet(|fleet| plan::leave(&self.demand, fleet, Slot(leaving as u32), &self.config, NOW))
    }

    fn others(&self, than: usize) -> Vec<usize> {
        (0..self.ready.len()).filter(|slot| self.ready[*slot] && *slot != than).collect()
    }

    fn room(&self) -> usize {
        self.cache_blocks.map_or(usize::MAX, |most| (f64::from(most) * self.config.cache_share) as usize)
    }

    fn pays(&self, blocks: usize) -> bool {
        let tokens = 16.0 * blocks as f64;
        blocks > 0 && tokens >= f64::from(self.config.min_tokens) && tokens > 16.5
    }

    /// The remembered prompts, each with its weight and the blocks of it that each instance holds.
    fn prompts(&self) -> Vec<(&[u64], f64, Vec<usize>)> {
        let hits = |chain: &[u64]| {
            let mut hits = vec![0; self.ready.len()];
            self.index.match_prefix(chain, &mut hits);
            hits.into_iter().map(|hit| hit as usize).collect()
        };
        self.demand
            .prompts(NOW)
            .map(|(prompt, weight)| (&*prompt.chain, weight, hits(&prompt.chain)))
            .collect()
    }

    /// [`plan::join`], with a look at every block.
    fn every_block_joins(&self, target: usize) -> Vec<Row> {
        let others = self.others(target);
        let (mut totals, mut prompts_of) = (vec![0.0; SLOTS], [0; SLOTS]);
        let mut behind: HashMap<u64, (f64, u32)> = HashMap::new();
        let mut held = Vec::new(); // (chain, weight, holder, blocks)
        for (chain, weight, hits) in self.prompts() {
            let holder = others.iter().copied().min_by_key(|slot| (Reverse(hits[*slot]), prompts_of[*slot]));
            let Some(holder) = holder.filter(|holder| hits[*holder] > 0) else { continue };
            prompts_of[holder] += 1;
            totals[holder] += weight;
            for hash in &chain[..hits[holder]] {
                let (all, count) = behind.entry(*hash).or_default();
                (*all, *count) = (*all + weight, *count + 1);
            }
            held.push((chain, weight, holder, hits[holder]));
        }
        let share = 1.0 / (others.len() + 1) as f64;
        let (mut shared, mut seen) = (Vec::new(), HashSet::new());
        for &(chain, _, holder, blocks) in &held {
            for depth in 1..=blocks {
                let (weight, count) = behind[&chain[depth - 1]];
                if count < 2 || f64::from(count) * share < 1.0 {
                    break;
                }
                let parts = depth == blocks || behind.get(&chain[depth]).map_or(0, |next| next.1) < count;
                if parts && seen.insert(chain[depth - 1]) {
                    shared.push((chain, weight, holder, depth));
                }
            }
        }
        shared.sort_by(|a, b| b.1.total_cmp(&a.1));
        held.sort_by(|a, b| b.1.total_cmp(&a.1));
        let (mut plan, mut planned, mut room) = (Vec::new(), HashSet::new(), self.room());
        let mut add = |&(chain, _, holder, blocks): &(&[u64], f64, usize, usize)| {
            let missing = chain[..blocks].iter().filter(|hash| !planned.contains(*hash)).count();
            if missing > room || !self.pays(missing) {
                return missing == 0;
            }
            room -= missing;
            planned.extend(chain[..blocks].iter().copied());
            plan.push((chain[chain.len() - 1], blocks, holder, target));
            true
        };
        shared.iter().for_each(|each| {
            add(each);
        });
        let mut taken = [0.0; SLOTS];
        for each in &held {
            if taken[each.2] < share * totals[each.2] && add(each) {
                taken[each.2] += each.1;
            }
        }
        plan
    }

    /// [`plan::leave`], with a look at every block.
    fn every_block_leaves(&self, leaving: usize) -> Vec<Row> {
        let others = self.others(leaving);
        let (mut loads, mut alone) = (vec![0.0; SLOTS], Vec::new());
        for (chain, weight, hits) in self.prompts() {
            let Some(best) = others.iter().copied().max_by_key(|slot| hits[*slot]) else { return Vec::new() };
            if self.pays(hits[leaving].saturating_sub(hits[best])) {
                alone.push((chain, weight, hits));
            } else {
                loads[best] += weight;
            }
        }
        alone.sort_by(|a, b| b.1.total_cmp(&a.1));
        let (mut plan, mut planned, mut room) = (Vec::new(), HashSet::new(), vec![self.room(); SLOTS]);
        for (chain, weight, hits) in &alone {
            let blocks = hits[leaving];
            let missing = |slot: usize| {
                let behind = &chain[hits[slot].min(blocks)..blocks];
                behind.iter().filter(|hash| !planned.contains(&(slot, **hash))).count()
            };
            let mean = others.iter().map(|slot| loads[*slot]).sum::<f64>() / others.len() as f64;
            let cost = |slot: usize| {
                let load = if mean > 0.0 { loads[slot] / mean } else { 0.0 };
                load + missing(slot) as f64 / blocks as f64
            };
            let able = others.iter().copied().filter(|slot| missing(*slot) <= room[*slot]);
            let Some(to) = able.min_by(|a, b| cost(*a).total_cmp(&cost(*b))) else { continue };
            let lacks = missing(to);
            loads[to] += weight;
            if self.pays(lacks) {
                room[to] -= lacks;
                planned.extend(chain[..blocks].iter().map(|hash| (to, *hash)));
                plan.push((chain[chain.len() - 1], blocks, leaving, to));
            }
        }
        plan
    }
}

fn rows(plan: &[Fetch]) -> Vec<Row> {
    let row = |fetch: &Fetch| {
        (fetch.prompt, fetch.chain.len(), fetch.source.slot().index(), fetch.target.slot().index())
    };
    plan.iter().map(row).collect()
}

/// Chained hashes of a prompt of runs: (what they contain, blocks).
fn chained(runs: &[(u8, usize)]) -> Vec<u64> {
    let blocks = runs.iter().flat_map(|(what, blocks)| std::iter::repeat_n(*what, *blocks));
    let next = |before: &mut u64, what: u8| {
        *before = (*before ^ u64::from(what)).wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        *before ^= *before >> 29;
        Some(*before)
    };
    blocks.scan(7, next).collect()
}

/// An index and a memory after these requests: (instance, prompt, blocks of it on a second
/// instance).
fn world(requests: &[(usize, Vec<u64>, usize)], slots: usize) -> World {
    let config =
        WarmConfig { min_tokens: 32, cache_share: 1.0, half_life_seconds: 300.0, ..WarmConfig::default() };
    let mut index = KvIndex::new(1 << 30);
    (0..slots as u32).for_each(|slot| assert!(index.add_instance(Slot(slot), None)));
    let mut demand = Demand::new(&config);
    for (i, (instance, chain, elsewhere)) in requests.iter().enumerate() {
        index.stored(Slot(*instance as u32), None, chain);
        let second = Slot(((instance + 1) % slots) as u32);
        index.stored(second, None, &chain[..(*elsewhere).min(chain.len())]);
        demand.note(chain, 16 * chain.len() as u32, 16.0, NOW - 0.1 * (requests.len() - i) as f64);
    }
    World { index, demand, ready: vec![true; slots], cache_blocks: None, config }
}

proptest! {
    #[test]
    fn plans_equal_those_with_a_look_at_every_block(
        requests in prop::collection::vec(
            (0..SLOTS, prop::collection::vec((0u8..3, 1usize..5), 1..5), 0usize..12),
            1..40,
        ),
        ready in prop::array::uniform5(prop::bool::weighted(0.8)),
        cache_blocks in prop::option::of(5u32..60),
        changed in 0..SLOTS,
    ) {
        let requests: Vec<_> =
            requests.iter().map(|(instance, runs, elsewhere)| (*instance, chained(runs), *elsewhere)).collect();
        let world = World { ready: ready.to_vec(), cache_blocks, ..world(&requests, SLOTS) };
        prop_assert_eq!(rows(&world.join(changed)), world.every_block_joins(changed));
        prop_assert_eq!(rows(&world.leave(changed)), world.every_block_leaves(changed));
    }

    /// A client may pass hashes that are not chained.
    #[test]
    fn any_hashes_give_a_plan(
        requests in prop::collection::vec((0..SLOTS, prop::collection::vec(0u64..4, 1..9), 0usize..9), 1..30),
        changed in 0..SLOTS,
    ) {
        let world = world(&requests, SLOTS);
        for fetch in world.join(changed).iter().chain(&world.leave(changed)) {
            prop_assert!(!fetch.chain.is_empty() && fetch.source != fetch.target);
        }
    }
}

#[test]
fn plans_consider_the_most_used_prompts() {
    let prompt = |n: u32| chained(&[((n / 256) as u8, 1), ((n % 256) as u8, 3)]);
    let oldest = (0, prompt(0), 0);
    // The oldest prompt had three requests, the others one each.
    let others = (1..5000).map(|n| (0, prompt(n), 0));
    let world =
        world(&[oldest.clone(), oldest.clone(), oldest].into_iter().chain(others).collect::<Vec<_>>(), 2);
    let plan = world.leave(0);
    let fetched: HashSet<u64> = plan.iter().map(|fetch| fetch.prompt).collect();
    assert_eq!((plan.len(), fetched.len()), (4096, 4096));
    assert!(fetched.contains(&prompt(0)[3]), "the most used ones");
    assert!((5000 - 4095..5000).all(|n| fetched.contains(&prompt(n)[3])), "the latest of equally used ones");
    let joined = World { ready: vec![true, false], ..world }.join(1);
    assert!(joined.len() > 1000 && joined.iter().all(|fetch| fetched.contains(&fetch.prompt)));
}

#[test]
fn plans_compare_far_fewer_blocks_than_prompts_have() {
    // 256 long prompts that leave a common one at different blocks, all on one of 64 instances.
    let prompt = |n: u8| chained(&[(9, 100 + 7 * usize::from(n)), (n, 2000)]);
    let requests: Vec<_> = (0..=255).map(|n| (0, prompt(n), 0)).collect();
    let world = world(&requests, 64);
    let compared = |plan: &dyn Fn() -> usize| {
        let before = COMPARED.get();
        (plan(), COMPARED.get() - before)
    };
    let (joins, for_joins) = compared(&|| world.join(63).len());
    let (leaves, for_leaves) = compared(&|| world.leave(0).len());
    assert!(joins > 3 && leaves == 256, "{joins}, {leaves}");
    // At least one pair per prompt but the first; a search for the end of what is common takes a
    // dozen.
    for pairs in [for_joins, for_leaves] {
        assert!((255..256 * 16).contains(&pairs), "{pairs} pairs");
    }
}

/// The instance that joins gets a prefix if one of all prompts behind it is expected there.
#[test]
fn prompts_that_a_plan_does_not_consider_count_as_well() {
    const PROMPTS: usize = 16_384;
    const INSTANCES: usize = 256;
    let prefix = chained(&[(200, 2)]);
    let joins = |every: usize| {
        let prompt = |n: usize| {
            let own = [((n / 256) as u8, 1), ((n % 256) as u8, 1)];
            let before: &[_] = if n.is_multiple_of(every) { &[(200, 2)] } else { &[] };
            chained(&[before, &own].concat())
        };
        let requests: Vec<_> = (0..PROMPTS).map(|n| (n % INSTANCES, prompt(n), 0)).collect();
        world(&requests, INSTANCES + 1).join(INSTANCES)
    };
    let shared = |plan: &[Fetch]| plan.iter().any(|fetch| fetch.chain == prefix);
    // 819 of all prompts, but 205 of those that the plan considers.
    assert!(shared(&joins(20)));
    // 164 of all.
    assert!(!shared(&joins(100)));
}
