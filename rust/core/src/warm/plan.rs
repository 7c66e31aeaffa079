//! Plans of fetches: the prefixes that an instance needs when it joins, and the prefixes that other
//! instances need when one leaves.
//!
//! Plans take time per prompt, not per block, and consider a limited number of prompts, because
//! fleet changes must not delay decisions.
use super::demand::{Demand, Prompt};
use super::paths::{NodeId, Paths};
use super::settings::WarmConfig;
use crate::fleet::InstanceId;
use crate::ids::{Seconds, Slot};
use crate::kv::index::KvIndex;

/// Prompts that a plan considers at most: the most used. A fleet change lasts
/// [`WarmConfig::max_seconds`], which is too short for as many fetches.
const MAX_PROMPTS: usize = 4096;

/// A planned fetch: `target` copies a prefix from `source`.
#[derive(Clone, Debug, PartialEq)]
pub struct Fetch {
    /// Last block of the remembered prompt that begins with the prefix.
    pub prompt: u64,
    /// Chained hashes of the prefix's blocks.
    pub chain: Vec<u64>,
    /// Tokens of these blocks.
    pub tokens: u32,
    /// Instance that holds them.
    pub source: InstanceId,
    /// Instance that gets them. Another one may take its slot before the fetch ends.
    pub target: InstanceId,
}

/// The instances, as plans see them.
pub struct Fleet<'a> {
    /// Blocks that each instance holds.
    pub index: &'a KvIndex,
    /// The instance of a slot.
    pub id_of: &'a dyn Fn(Slot) -> InstanceId,
    /// Whether each slot takes requests and can send and receive KV.
    pub ready: &'a [bool],
    /// Blocks in an instance's cache, if known.
    pub cache_blocks: &'a dyn Fn(Slot) -> Option<u32>,
    /// Seconds that an instance saves if it fetches this many tokens instead of computing them.
    pub saved_seconds: &'a dyn Fn(Slot, f64) -> Seconds,
}

impl Fleet<'_> {
    /// Returns the blocks that fetches may fill in an instance's cache.
    fn room(&self, id: Slot, config: &WarmConfig) -> usize {
        let share = |blocks| (f64::from(blocks) * config.cache_share) as usize;
        (self.cache_blocks)(id).map_or(usize::MAX, share)
    }

    /// Returns whether a fetch of `blocks` of a prompt is worth making.
    fn pays(&self, target: Slot, prompt: &Prompt, blocks: usize, config: &WarmConfig) -> bool {
        let tokens = blocks as f64 * prompt.tokens_per_block;
        blocks > 0 && tokens >= f64::from(config.min_tokens) && (self.saved_seconds)(target, tokens) > 0.0
    }

    fn fetch(&self, prompt: &Prompt, blocks: usize, source: usize, target: Slot) -> Fetch {
        Fetch {
            prompt: prompt.chain[prompt.chain.len() - 1],
            chain: prompt.chain[..blocks].to_vec(),
            tokens: (blocks as f64 * prompt.tokens_per_block) as u32,
            source: (self.id_of)(Slot(source as u32)),
            target: (self.id_of)(target),
        }
    }

    fn ready_slots(&self) -> impl Iterator<Item = usize> {
        (0..self.ready.len()).filter(|slot| self.ready[*slot])
    }
}

/// A remembered prompt, and where its prefix is.
struct Held<'a> {
    prompt: &'a Prompt,
    weight: f64,
    holder: usize,
    blocks: usize,
    /// Its last node.
    node: NodeId,
}

/// Returns the most used prompts with their weights, the latest first, and the number of all
/// prompts per returned prompt.
fn most_used(demand: &Demand, now: Seconds) -> (Vec<(&Prompt, f64)>, f64) {
    let mut prompts: Vec<_> = demand.prompts(now).enumerate().collect();
    let all = prompts.len();
    if prompts.len() > MAX_PROMPTS {
        // Of equal ones, the latest.
        prompts.select_nth_unstable_by(MAX_PROMPTS, |(a, (_, of_a)), (b, (_, of_b))| {
            of_b.total_cmp(of_a).then(a.cmp(b))
        });
        prompts.truncate(MAX_PROMPTS);
        prompts.sort_unstable_by_key(|(place, _)| *place);
    }
    let scale = all as f64 / prompts.len().max(1) as f64;
    (prompts.into_iter().map(|(_, prompt)| prompt).collect(), scale)
}

fn by_weight(held: &mut [Held<'_>]) {
    held.sort_by(|a, b| b.weight.total_cmp(&a.weight));
}

/// Plans the fetches of an instance that joins.
///
/// It will take an equal share of the requests. First come the prefixes that many prompts share,
/// such as system prompts: the most used first, as long as at least one of their prompts is
/// expected at the instance. Then it takes over conversations, the most used first, until it has
/// its share of those that each other instance holds. It never fetches more than
/// [`WarmConfig::cache_share`] of its cache.
///
/// Of many prompts, only the most used count for these shares. The number of prompts behind a
/// prefix is estimated from them.
pub fn join(
    demand: &Demand,
    fleet: &Fleet<'_>,
    target: Slot,
    config: &WarmConfig,
    now: Seconds,
) -> Vec<Fetch> {
    let slots = fleet.ready.len();
    let mut hits = vec![0; slots.max(target.index() + 1)];
    let (mut held, mut totals, mut prompts_of) = (Vec::new(), vec![0.0; slots], vec![0u32; slots]);
    let mut paths = Paths::default();
    let (prompts, scale) = most_used(demand, now);
    for (prompt, weight) in prompts {
        fleet.index.match_prefix(&prompt.chain, &mut hits);
        let others = fleet.ready_slots().filter(|slot| *slot != target.index());
        // Among equal holders, the one with the fewest prompts so far.
        let holder = others.min_by_key(|slot| (std::cmp::Reverse(hits[*slot]), prompts_of[*slot]));
        let Some(holder) = holder.filter(|holder| hits[*holder] > 0) else { continue };
        let blocks = hits[holder] as usize;
        prompts_of[holder] += 1;
        totals[holder] += weight;
        let node = paths.enter(&prompt.chain[..blocks], weight);
        held.push(Held { prompt, weight, holder, blocks, node });
    }
    let share = 1.0 / (fleet.ready_slots().filter(|slot| *slot != target.index()).count() + 1) as f64;
    let (mut shared, mut path) = (Vec::new(), Vec::new());
    let mut seen = vec![false; paths.len()];
    for Held { prompt, holder, node, .. } in &held {
        path.clear();
        path.extend(paths.back(*node));
        for &node in path.iter().rev() {
            let (weight, count) = paths.chains(node);
            if count < 2 || f64::from(count) * scale * share < 1.0 {
                break; // prompts only part along a chain
            }
            if !std::mem::replace(&mut seen[node], true) {
                shared.push(Held { prompt, weight, holder: *holder, blocks: paths.depth(node), node });
            }
        }
    }
    by_weight(&mut shared);
    by_weight(&mut held);
    let mut plan = Vec::new();
    let mut planned = vec![false; paths.len()];
    let mut room = fleet.room(target, config);
    let mut add = |each: &Held<'_>| {
        let before = paths.back(each.node).find(|node| planned[*node]);
        let missing = each.blocks - before.map_or(0, |node| paths.depth(node));
        if missing > room || !fleet.pays(target, each.prompt, missing, config) {
            return missing == 0;
        }
        room -= missing;
        for node in paths.back(each.node).take_while(|node| Some(*node) != before) {
            planned[node] = true;
        }
        plan.push(fleet.fetch(each.prompt, each.blocks, each.holder, target));
        true
    };
    shared.iter().for_each(|each| {
        add(each);
    });
    let mut taken = vec![0.0; slots];
    for each in &held {
        if taken[each.holder] < share * totals[each.holder] && add(each) {
            taken[each.holder] += each.weight;
        }
    }
    plan
}

/// Plans the fetches from an instance that leaves: the prefixes that no other instance holds as
/// far, the most used first.
///
/// The successor of a prompt is the instance with the smallest sum of its relative load and the
/// fraction of the prefix that it lacks. The relative load is the weight of the prompts that it
/// holds, over the mean. Of many prompts, only the most used count.
pub fn leave(
    demand: &Demand,
    fleet: &Fleet<'_>,
    leaving: Slot,
    config: &WarmConfig,
    now: Seconds,
) -> Vec<Fetch> {
    let slots = fleet.ready.len().max(leaving.index() + 1);
    let mut hits = vec![0; slots];
    let others: Vec<usize> = fleet.ready_slots().filter(|slot| *slot != leaving.index()).collect();
    let (mut alone, mut loads, mut paths) = (Vec::new(), vec![0.0; slots], Paths::default());
    for (prompt, weight) in most_used(demand, now).0 {
        fleet.index.match_prefix(&prompt.chain, &mut hits);
        let Some(best) = others.iter().copied().max_by_key(|slot| hits[*slot]) else { return Vec::new() };
        let blocks = hits[leaving.index()] as usize;
        let missing = blocks.saturating_sub(hits[best] as usize);
        if fleet.pays(Slot(best as u32), prompt, missing, config) {
            let node = paths.enter(&prompt.chain[..blocks], weight);
            alone.push(Held { prompt, weight, holder: leaving.index(), blocks, node });
        } else {
            loads[best] += weight;
        }
    }
    by_weight(&mut alone);
    let mut plan = Vec::new();
    // The slots that a plan gives a node's blocks to.
    let mut planned: Vec<Vec<usize>> = vec![Vec::new(); paths.len()];
    let mut room: Vec<usize> = (0..slots as u32).map(|slot| fleet.room(Slot(slot), config)).collect();
    let mut missing = vec![0; slots];
    for each in &alone {
        fleet.index.match_prefix(&each.prompt.chain[..each.blocks], &mut hits);
        for &slot in &others {
            missing[slot] = each.blocks - hits[slot] as usize;
        }
        for node in paths.back(each.node) {
            for &slot in &planned[node] {
                missing[slot] = missing[slot].min(each.blocks - paths.depth(node));
            }
        }
        let mean = others.iter().map(|slot| loads[*slot]).sum::<f64>() / others.len() as f64;
        let cost = |slot: usize| {
            let load = if mean > 0.0 { loads[slot] / mean } else { 0.0 };
            load + missing[slot] as f64 / each.blocks as f64
        };
        let able = others.iter().copied().filter(|slot| missing[*slot] <= room[*slot]);
        let best = able.map(|slot| (cost(slot), slot)).min_by(|a, b| a.0.total_cmp(&b.0));
        let Some((_, to)) = best else { continue };
        let (lacks, target) = (missing[to], Slot(to as u32));
        loads[to] += each.weight;
        if fleet.pays(target, each.prompt, lacks, config) {
            room[to] -= lacks;
            for node in paths.back(each.node) {
                if planned[node].contains(&to) {
                    break;
                }
                planned[node].push(to);
            }
            plan.push(fleet.fetch(each.prompt, each.blocks, each.holder, target));
        }
    }
    plan
}

#[cfg(test)]
mod tests {
    use super::super::tests::id_of;
    use super::*;

    const NOW: Seconds = 10.0;

    fn config() -> WarmConfig {
        WarmConfig { min_tokens: 16, cache_share: 1.0, ..WarmConfig::default() }
    }

    /// An index and a memory after these (instance, chain) requests, one per second before `NOW`.
    fn world(requests: &[(u32, &[u64])]) -> (KvIndex, Demand) {
        let mut index = KvIndex::new(KvIndex::MIN_BYTES);
        (0..4).for_each(|i| assert!(index.add_instance(Slot(i), None)));
        let mut demand = Demand::new(&config());
        for (i, (instance, chain)) in requests.iter().enumerate() {
            index.stored(Slot(*instance), None, chain);
            let at = NOW - (requests.len() - i) as f64;
            demand.note(chain, 16 * chain.len() as u32, 16.0, at);
        }
        (index, demand)
    }

    fn planned(
        (index, demand): &(KvIndex, Demand),
        ready: [bool; 4],
        blocks: Option<u32>,
        by: impl Fn(&Demand, &Fleet<'_>) -> Vec<Fetch>,
    ) -> Vec<(u32, u32, Vec<u64>)> {
        let fleet = Fleet {
            index,
            id_of: &id_of,
            ready: &ready,
            cache_blocks: &|_| blocks,
            saved_seconds: &|_, tokens| tokens - 16.5,
        };
        let of = |fetch: Fetch| {
            assert_eq!(fetch.tokens as usize, 16 * fetch.chain.len());
            (fetch.source.slot().0, fetch.target.slot().0, fetch.chain)
        };
        by(demand, &fleet).into_iter().map(of).collect()
    }

    fn joins(world: &(KvIndex, Demand), ready: [bool; 4], blocks: Option<u32>) -> Vec<(u32, u32, Vec<u64>)> {
        planned(world, ready, blocks, |demand, fleet| join(demand, fleet, Slot(3), &config(), NOW))
    }

    fn leaves(world: &(KvIndex, Demand), ready: [bool; 4], blocks: Option<u32>) -> Vec<(u32, u32, Vec<u64>)> {
        planned(world, ready, blocks, |demand, fleet| leave(demand, fleet, Slot(0), &config(), NOW))
    }

    #[test]
    fn a_newcomer_gets_what_many_share_and_its_share_of_conversations() {
        // A system prompt of two blocks before four conversations on one instance.
        let of = |n: u64| [1, 2, 10 * n, 10 * n + 1];
        let (a, b, c, d) = (of(1), of(2), of(3), of(4));
        let world = world(&[(0, &a), (0, &b), (0, &c), (0, &d)]);
        let plan = joins(&world, [true, false, false, false], None);
        // The system prompt, then half of the conversations: the latest first.
        assert_eq!(plan, [(0, 3, vec![1, 2]), (0, 3, d.to_vec()), (0, 3, c.to_vec())]);
        // With two other instances, a third, and from each its part.
        let third = joins(&world, [true, true, false, false], None);
        assert_eq!(third.len(), 3, "the first conversation does not reach a third of the weight");
        // Six blocks: no room for a second conversation.
        assert_eq!(joins(&world, [true, false, false, false], Some(5)), plan[..2]);
        assert_eq!(joins(&world, [false; 4], None), []);
    }

    #[test]
    fn a_newcomer_asks_the_holder_of_the_longest_prefix() {
        let world = world(&[(0, &[1, 2]), (1, &[1, 2, 3, 4]), (2, &[1])]);
        let plan = joins(&world, [true, true, true, false], None);
        assert_eq!(plan.first(), Some(&(1, 3, vec![1, 2, 3, 4])));
        assert_eq!(joins(&world, [true, false, true, false], None).first(), Some(&(0, 3, vec![1, 2])));
    }

    #[test]
    fn only_prefixes_that_no_other_instance_holds_need_a_successor() {
        let (a, b, c) = ([1, 2, 3], [4, 5, 6], [7, 8, 9]);
        let mut world = world(&[(0, &a), (0, &b), (0, &c)]);
        world.0.stored(Slot(1), None, &b);
        // Instance 1 already has a conversation, so instance 2 gets the first one.
        let plan = leaves(&world, [false, true, true, false], None);
        assert_eq!(plan, [(0, 2, c.to_vec()), (0, 1, a.to_vec())]);
        // An instance that holds a part of it is preferred.
        world.0.stored(Slot(1), None, &c[..2]);
        world.0.stored(Slot(2), None, &a[..1]);
        let parts = leaves(&world, [false, true, true, false], None);
        assert!(parts.contains(&(0, 2, a.to_vec())), "{parts:?}");
        assert_eq!(leaves(&world, [true, false, false, false], None), [], "nobody to take them");
    }

    #[test]
    fn successors_are_not_filled_beyond_their_room() {
        let (a, b, c) = ([1, 2, 3], [4, 5, 6], [7, 8, 9]);
        let world = world(&[(0, &a), (0, &b), (0, &c)]);
        let plan = leaves(&world, [false, true, false, false], Some(6));
        assert_eq!(plan, [(0, 1, c.to_vec()), (0, 1, b.to_vec())]);
    }

    #[test]
    fn fetches_must_pay() {
        // One block costs more than it saves.
        let world = world(&[(0, &[1]), (0, &[2, 3])]);
        assert_eq!(leaves(&world, [false, true, true, true], None), [(0, 1, vec![2, 3])]);
    }
}
