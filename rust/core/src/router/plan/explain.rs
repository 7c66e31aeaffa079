//! Writes decision records: the best instances, with their scores and terms.
use crate::guard::slots::Restriction;
use crate::ids::{InstanceId, Seconds};
use crate::indicators::{Indicator, Scope};
use crate::policy::Prefer;
use crate::record::{BEST_KEPT, Candidate, DecisionRecord};
use crate::request::{Arm, Request};
use crate::router::context::{DecisionContext, Selection};
use crate::router::state::State;
use crate::wide::lesser;
use multiversion::multiversion;
use smallvec::SmallVec;

impl State {
    /// Writes the last choice of a first segment into its decision record. The context must be
    /// unchanged since that choice.
    pub fn explain(
        &self,
        context: &DecisionContext,
        request: &Request<'_>,
        chosen: InstanceId,
        now: Seconds,
        record: &mut DecisionRecord,
    ) {
        let Selection { scores, eligible } = &context.first;
        record.prompt_tokens = request.prompt_tokens;
        record.prefer = scores.prefer;
        record.names = self.fleet.names().clone();
        let (hit, tier) = self.reusable_tokens(request, context.blocks_on(chosen.index()));
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

        let scores = &scores.score;
        let sign = if record.prefer == Prefer::Max { -1.0 } else { 1.0 };
        let mut best = Best::default();
        let chosen_key = scores[chosen.index()] * sign;
        let (mut scored, mut equal) = (0, 0);
        for (i, scores) in scores.chunks(BLOCK).enumerate() {
            let (count, least) = count_and_least(sign, scores);
            scored += count;
            // After the first blocks, few scores are among the best.
            if least < best.worst() {
                best.offer(sign, i * BLOCK, scores);
            }
            if least <= chosen_key {
                equal += scores.iter().map(|score| u32::from(sign * score == chosen_key)).sum::<u32>();
            }
        }
        let Best { kept: mut best } = best;
        record.guard_excluded = match context.restriction {
            Restriction::Filtered(out) => out as u32,
            _ => 0,
        };
        record.balance_only = context.restriction == Restriction::BalanceOnly;
        let could = eligible.iter().filter(|e| **e).count();
        record.left_out = (could - scored) as u32;
        record.scored = scored as u32;
        record.tied = equal.saturating_sub(1);
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
        let indicators = self.indicators(context);
        // Request indicators have one value, in slot 0.
        let column = |id: Indicator| (indicators.get(id), id.decl().scope != Scope::Request);
        let columns: SmallVec<[(&[f64], bool); 8]> = selector.reads.iter().map(column).collect();
        for &(key, slot) in &best[..live.max(1)] {
            record.best.push(Candidate { slot, score: key * sign });
            let at = |per_slot: bool| if per_slot { slot as usize } else { 0 };
            // One by one: in some builds `extend` is not inlined and takes twice the instructions.
            for (column, per_slot) in &columns {
                record.terms.push(column[at(*per_slot)]);
            }
            for id in &record.declared {
                record.terms.push(indicators.declared(*id)[slot as usize]);
            }
        }
    }
}

/// Slots processed together.
const BLOCK: usize = 64;
/// Independent running minima, so that no minimum waits for another.
const LANES: usize = 8;

/// Returns the number of finite scores of a block, and the lowest `sign * score`.
#[multiversion(targets("x86_64+avx2"))]
fn count_and_least(sign: f64, scores: &[f64]) -> (usize, f64) {
    // x - x is 0 for finite numbers and NaN for all others, without a branch.
    #[allow(clippy::eq_op)]
    let finite = |x: f64| x + (x - x);
    let count = scores.iter().map(|x| u64::from(x.is_finite())).sum::<u64>();
    let mut least = [f64::INFINITY; LANES];
    let (lanes, rest) = scores.as_chunks::<LANES>();
    for scores in lanes {
        for lane in 0..LANES {
            least[lane] = lesser(sign * finite(scores[lane]), least[lane]);
        }
    }
    let least = least.into_iter().chain(rest.iter().map(|s| sign * finite(*s)));
    (count as usize, least.fold(f64::INFINITY, |least, key| lesser(key, least)))
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

    fn offer(&mut self, sign: f64, first: usize, scores: &[f64]) {
        for (i, score) in scores.iter().enumerate().filter(|(_, s)| s.is_finite()) {
            let key = sign * score;
            if key < self.worst() {
                let mut place = BEST_KEPT - 1;
                while place > 0 && key < self.kept[place - 1].0 {
                    self.kept[place] = self.kept[place - 1];
                    place -= 1;
                }
                self.kept[place] = (key, (first + i) as u32);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Registry;
    use crate::fleet::Role;
    use crate::router::{Router, RouterConfig};

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
            router.context.first.scores.score.fill(score);
            let mut record = router.requests.records.take();
            router.state.explain(&router.context, &request, InstanceId(1), 0.0, &mut record);
            assert_eq!((record.chosen, record.scored, record.left_out), (1, 0, 3));
            let best: Vec<u32> = record.best.iter().map(|candidate| candidate.slot).collect();
            assert_eq!((best, record.margin), (vec![1], None));
        }
    }
}
