//! Writes decision records: the best instances, with their scores and terms.
use crate::expr::{WORD, lowest_of_eight};
use crate::guard::slots::Restriction;
use crate::ids::{Seconds, Slot};
use crate::indicators::{Indicator, IndicatorSet, Kernels};
use crate::policy::{Prefer, Scores};
use crate::record::{BEST_KEPT, Candidate, DecisionRecord, Holder};
use crate::request::{Arm, Request};
use crate::router::caches::PrefixMatch;
use crate::router::context::{DecisionContext, Selection};
use crate::router::state::State;
use crate::wide::lesser;
use multiversion::multiversion;
use smallvec::SmallVec;

/// Indicators of policies that prefer the holders of a prefix.
const HITS: IndicatorSet = IndicatorSet::of(&[Indicator::KvHit, Indicator::HitTokens]);

/// Most slots whose terms are computed in one call: it takes as many instructions as eight calls
/// for a slot each.
const IN_ONE: usize = 2 * WORD;

impl State {
    /// Writes the last choice of a first segment into its decision record. Kernels compute the
    /// terms of the best instances again, so the prefixes in the context and the ledger must be
    /// those of that choice.
    pub fn explain(
        &self,
        context: &mut DecisionContext,
        request: &Request<'_>,
        chosen: Slot,
        now: Seconds,
        record: &mut DecisionRecord,
    ) {
        let Selection { scores, eligible, able, candidates } = &mut context.first;
        record.prompt_tokens = request.prompt_tokens;
        record.prefer = scores.prefer;
        record.names = self.fleet.names().clone();
        let matched = &context.matched;
        let (hit, tier) = self.reusable_tokens(request, matched.blocks_on(chosen.index()));
        (record.predicted_hit_tokens, record.predicted_tier_tokens) = (hit as u32, tier as u32);
        record.report_age_seconds = self.ledger.reported_at(chosen.index()).map(|at| now - at);
        record.filter_waived = scores.filter_waived;
        record.unscored = scores.unscored;
        let selector = self.first_of(request.arm);
        record.reads = selector.reads;
        record.declared = selector.declared.as_slice().into();
        record.policy = Some(selector.name.clone());
        record.arm = if self.canary.is_some() { request.arm } else { Arm::Stable };
        record.chosen = chosen.0;
        if selector.reads.intersects(HITS) {
            record.holder = self.best_holder(matched, request, eligible, chosen);
        }

        let unscored = scores.unscored;
        let Scores { score: scores, minima, scored, filtered, tied, drawn_from, scratch, .. } = scores;
        let sign = if record.prefer == Prefer::Max { -1.0 } else { 1.0 };
        let chosen_key = scores[chosen.index()] * sign;
        let mut best = best_of(sign, scores, minima).kept;
        record.guard_excluded = match context.restriction {
            Restriction::Filtered(out) => out as u32,
            _ => 0,
        };
        record.balance_only = context.restriction == Restriction::BalanceOnly;
        // An unscored choice ranks the candidates by their requests instead.
        let ranked = if unscored { 0 } else { *scored + *filtered };
        record.left_out = (*candidates - ranked) as u32;
        record.filtered = *filtered as u32;
        record.scored = *scored as u32;
        (record.tied, record.drawn_from) = (*tied, *drawn_from);
        record.margin = best
            .iter()
            .find(|(_, slot)| *slot != chosen.0 && *slot != u32::MAX)
            .map(|(key, _)| key - chosen_key);
        let live = best.iter().take_while(|(_, slot)| *slot != u32::MAX).count();
        // With many ties, the chosen instance may be missing from the best: it replaces the last
        // one.
        if !best[..live].iter().any(|(_, slot)| *slot == chosen.0) {
            best[live.max(1) - 1] = (chosen_key, chosen.0);
        }
        let best = &best[..live.max(1)];
        let kernels = self.kernels(matched, request, selector.reads, None, &[], now);
        let computed = scratch.computed();
        kernels.write_request(selector.reads, *able, computed);
        let reads = selector.reads.and(IndicatorSet::COMPUTED);
        // One chunk for a small fleet, else one call for each of the best slots.
        let in_one = eligible.len() <= IN_ONE;
        if in_one {
            kernels.fill(reads, 0..eligible.len(), 0, computed);
        } else {
            kernels.fill_each(reads, best.iter().map(|(_, slot)| *slot as usize), computed);
        }
        let kept = self.ledger.columns();
        let column = |id: Indicator| match () {
            () if IndicatorSet::OF_REQUEST.contains(id) => (computed.get(id), At::First),
            () if IndicatorSet::COMPUTED.contains(id) => {
                (computed.get(id), if in_one { At::Slot } else { At::Place })
            }
            () => (kept.get(id), At::Slot),
        };
        let columns: SmallVec<[(&[f64], At); 8]> = selector.reads.iter().map(column).collect();
        for (place, &(key, slot)) in best.iter().enumerate() {
            record.best.push(Candidate { slot, score: key * sign });
            // One by one: in some builds `extend` is not inlined and takes twice the instructions.
            for (column, at) in &columns {
                record.terms.push(match at {
                    At::First => column[0],
                    At::Slot => column[slot as usize],
                    At::Place => column[place],
                });
            }
            for id in &record.declared {
                record.terms.push(context.declared[id.index()][slot as usize]);
            }
        }
    }
}

impl State {
    /// Returns the eligible instance whose cached tokens of a prompt save most, as policies see it:
    /// among several, the chosen instance, else the least busy one.
    fn best_holder(
        &self,
        matched: &PrefixMatch,
        request: &Request<'_>,
        eligible: &[bool],
        chosen: Slot,
    ) -> Option<Holder> {
        let PrefixMatch { hit_blocks, tier_blocks, .. } = matched;
        // Less the cost of loading.
        let saved = |slot: usize| {
            let (all, tier) = self.reusable_tokens(request, matched.blocks_on(slot));
            if tier == 0.0 { all } else { all - tier * self.tier_load_ratio(slot, matched.tiers[slot]) }
        };
        let tiered = !tier_blocks.is_empty();
        let rank = |slot: usize| if tiered { saved(slot) } else { f64::from(hit_blocks[slot]) };
        let most = if tiered {
            (0..eligible.len()).filter(|slot| eligible[*slot]).map(rank).fold(0.0, f64::max)
        } else {
            f64::from(most_blocks(hit_blocks, eligible))
        };
        if most == 0.0 {
            return None;
        }
        let requests = self.ledger.columns().get(Indicator::Bs);
        let slot = if rank(chosen.index()) == most {
            chosen.index()
        } else {
            let holders = (0..eligible.len()).filter(|slot| eligible[*slot] && rank(*slot) == most);
            holders.min_by(|a, b| requests[*a].total_cmp(&requests[*b]))?
        };
        let (hit, _) = self.reusable_tokens(request, matched.blocks_on(slot));
        Some(Holder {
            slot: slot as u32,
            hit_tokens: hit as u32,
            saved_tokens: saved(slot),
            requests: requests[slot],
        })
    }
}

/// Returns the most blocks of the eligible slots; 0 without such a slot.
#[multiversion(targets("x86_64+avx2"))]
fn most_blocks(blocks: &[u32], eligible: &[bool]) -> u32 {
    let masked = blocks.iter().zip(eligible).map(|(blocks, eligible)| *blocks * u32::from(*eligible));
    masked.fold(0, u32::max)
}

/// Entry of a column that belongs to one of the best slots.
#[derive(Clone, Copy)]
enum At {
    First,
    Slot,
    Place,
}

/// The best slots, best first; ties in slot order.
struct Best {
    kept: [(f64, u32); BEST_KEPT],
}

impl Default for Best {
    fn default() -> Self {
        Best { kept: [(f64::INFINITY, u32::MAX); BEST_KEPT] }
    }
}

impl Best {
    fn worst(&self) -> f64 {
        self.kept[BEST_KEPT - 1].0
    }

    /// Keeps a slot if its key is among the lowest. Equal keys stay in the order of the calls.
    #[inline]
    fn offer(&mut self, key: f64, slot: usize) {
        if key < self.worst() {
            let mut place = BEST_KEPT - 1;
            while place > 0 && key < self.kept[place - 1].0 {
                self.kept[place] = self.kept[place - 1];
                place -= 1;
            }
            self.kept[place] = (key, slot as u32);
        }
    }

    /// Offers the finite scores of slots from `first` on, if any is among the best of eight slots.
    #[inline(always)]
    fn offer_all(&mut self, sign: f64, first: usize, scores: &[f64]) {
        let (eights, rest) = scores.as_chunks::<8>();
        for (i, eight) in eights.iter().enumerate() {
            // NaN becomes infinity, which never is.
            if lowest_of_eight(eight.map(|score| lesser(sign * score, f64::INFINITY))) < self.worst() {
                self.offer_each(sign, first + i * 8, eight);
            }
        }
        self.offer_each(sign, first + eights.len() * 8, rest);
    }

    fn offer_each(&mut self, sign: f64, first: usize, scores: &[f64]) {
        for (i, score) in scores.iter().enumerate().filter(|(_, score)| score.is_finite()) {
            self.offer(sign * score, first + i);
        }
    }
}

/// Returns the slots with the lowest `sign * score`. `minima`: the lowest of each word.
#[multiversion(targets("x86_64+avx2"))]
fn best_of(sign: f64, scores: &[f64], minima: &[f64]) -> Best {
    // The best slots are in the words with the lowest minima.
    let (mut lowest, mut best) = (Best::default(), Best::default());
    minima.iter().enumerate().for_each(|(word, least)| lowest.offer(*least, word));
    let mut words = lowest.kept.map(|(_, word)| word as usize);
    words.sort_unstable();
    for word in words {
        if minima.get(word).is_some_and(|least| *least < best.worst()) {
            let first = word * WORD;
            best.offer_all(sign, first, &scores[first..scores.len().min(first + WORD)]);
        }
    }
    best
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Registry;
    use crate::fleet::Role;
    use crate::kv::tier::Tier;
    use crate::router::{Router, RouterConfig};

    /// A match with these blocks on the GPUs and in host memory.
    fn matched(gpu: &[u32], host: &[u32]) -> PrefixMatch {
        let mut matched = PrefixMatch::default();
        matched.hit_blocks = gpu.to_vec();
        matched.tier_blocks = host.to_vec();
        matched.tiers = vec![Tier::Cpu; 4];
        matched
    }

    /// The holder: among equals the chosen instance, else the least busy one; never an ineligible
    /// one.
    #[test]
    fn the_best_holder_is_eligible_and_the_chosen_instance_comes_first() {
        let policy = Registry::CORE.policy("filter", &[]).unwrap();
        let mut router = Router::new(policy, RouterConfig::default()).unwrap();
        router.state.config.tiers.load_ratio = 0.5;
        let request = Request { prompt_tokens: 100, tokens_per_block: 16.0, ..Request::default() };
        // Instance a gets two requests, b one, and the others none.
        for (name, requests) in [("a", 2), ("b", 1), ("c", 0), ("d", 0)] {
            router.add_instance(name, Role::Both, None).unwrap();
            (0..requests).for_each(|_| {
                router.route(&request, 0.0).unwrap();
            });
        }
        let holder = |blocks: &[u32], tiers: &[u32], eligible: &[bool], chosen| {
            let matched = matched(blocks, tiers);
            let found = router.state.best_holder(&matched, &request, eligible, Slot(chosen));
            found.map(|found| (found.slot, found.hit_tokens, found.requests))
        };
        let all = [true; 4];
        assert_eq!(holder(&[0, 0, 0, 0], &[], &all, 0), None);
        assert_eq!(holder(&[3, 3, 1, 2], &[], &all, 2), Some((1, 48, 1.0)));
        assert_eq!(holder(&[3, 3, 1, 2], &[], &all, 0), Some((0, 48, 2.0)));
        assert_eq!(holder(&[3, 3, 1, 2], &[], &[false, false, true, true], 2), Some((3, 32, 0.0)));
        // A token of a lower tier saves half: c is as good as a and b with 4 of them.
        assert_eq!(holder(&[3, 3, 1, 2], &[0, 0, 4, 1], &all, 1), Some((1, 48, 1.0)));
        assert_eq!(holder(&[3, 3, 1, 2], &[0, 0, 4, 1], &all, 3), Some((2, 80, 0.0)));
        assert_eq!(holder(&[3, 3, 1, 2], &[0, 0, 3, 1], &all, 3), Some((1, 48, 1.0)));
        let without_c = [true, true, false, true];
        assert_eq!(holder(&[3, 3, 1, 2], &[0, 0, 5, 3], &without_c, 1), Some((3, 80, 0.0)));
        let matched = matched(&[0, 0, 1, 0], &[0, 0, 4, 0]);
        let found = router.state.best_holder(&matched, &request, &all, Slot(0)).unwrap();
        assert_eq!((found.slot, found.hit_tokens, found.saved_tokens), (2, 80, 48.0));
    }

    /// rust 7.17: without any finite score, the record names the chosen instance alone.
    #[test]
    fn a_record_without_finite_scores_has_the_chosen_instance() {
        let policy = Registry::CORE.policy("least_requests", &[]).unwrap();
        let mut router = Router::new(policy, RouterConfig::default()).unwrap();
        for name in ["a", "b", "c"] {
            router.add_instance(name, Role::Both, None).unwrap();
        }
        let request = Request { prompt_tokens: 10, tokens_per_block: 16.0, ..Request::default() };
        router.match_prefix(&request);
        router.score(&request, 0.0).unwrap();
        for score in [f64::NAN, f64::INFINITY] {
            let Selection { scores, eligible, .. } = &mut router.context.first;
            scores.score.fill(score);
            assert_eq!(crate::policy::best(scores, eligible, &mut router.context.rng), None);
            let mut record = router.requests.records.take();
            router.state.explain(&mut router.context, &request, Slot(1), 0.0, &mut record);
            assert_eq!((record.chosen, record.scored, record.left_out), (1, 0, 3));
            let best: Vec<u32> = record.best.iter().map(|candidate| candidate.slot).collect();
            assert_eq!((best, record.margin), (vec![1], None));
        }
    }
}
