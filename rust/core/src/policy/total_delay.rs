//! The tokens of delay that a placement causes: to the request, to the requests on its instance,
//! and to those of programs whose contexts it evicts (docs/explanation/default_policy.md).
//!
//! LMETRIC multiplies the queue by the batch size, although the requests there wait for the queue
//! wherever this request goes. So a burst in front of an instance that holds a long prompt costs
//! more than computing the prompt again elsewhere, and that evicts the next prompt. Here a queue
//! delays this request, and later ones by what it exceeds the mean queue, at least by half of it.
//! They count by the share of prefill work that is new: while contexts are computed again, a
//! request that leaves its context costs more than a queue.
use super::*;
use crate::expr::{CHUNK, Sums, chunks};
use crate::indicators::{Columns, Indicator, IndicatorSet};
use crate::wide::greater;
use multiversion::multiversion;
use std::ops::Range;

pub static SPEC: PolicySpec = PolicySpec::new(
    "total_delay",
    "queued_prefill_tokens + mean(bs) / (1 + recompute_ratio) * maximum(queued_prefill_tokens / 2, queued_prefill_tokens - mean(queued_prefill_tokens)) + new_tokens * (bs + 1 + recompute_ratio * (mean(bs) + 1)), lowest",
    "this project: the sum of delays, in tokens",
    &[],
)
.stable()
.guarded();

pub fn build(_: &Knobs) -> Result<Box<dyn Policy>, CoreError> {
    Ok(Box::new(TotalDelay))
}

/// The formula in two loops over the slots: the means of the queues come first. It takes less time
/// than the expression, which has a loop for each operation. A test compares both, bit by bit.
///
/// The queues stay in the column of scores, and new tokens in a chunk: with a column for each,
/// 16,384 slots exceed the L2 cache.
struct TotalDelay;

impl Policy for TotalDelay {
    fn spec(&self) -> &PolicySpec {
        &SPEC
    }

    fn reads(&self) -> IndicatorSet {
        IndicatorSet::of(&[
            Indicator::Bs,
            Indicator::QueuedPrefillTokens,
            Indicator::NewTokens,
            Indicator::RecomputeRatio,
        ])
    }

    fn by_chunks(&self) -> bool {
        true
    }

    fn score(
        &self,
        snapshot: &Snapshot<'_>,
        _rng: &mut PolicyRng,
        scores: &mut Scores,
    ) -> Result<(), CoreError> {
        let slots = snapshot.slots();
        let (score, columns) = (&mut scores.score, scores.scratch.computed());
        let (bs, eligible) = (snapshot.column(Indicator::Bs), snapshot.eligible);
        let mut sums = Sums::default();
        for part in chunks(slots, CHUNK) {
            let queued = computed(snapshot, Indicator::QueuedPrefillTokens, part.clone(), columns);
            sums.add([queued, &bs[part.clone()]], &eligible[part.clone()]);
            score[part].copy_from_slice(queued);
        }
        let [mean_queued, mean_bs] = sums.means([score, bs], eligible);
        let recomputed = snapshot.request(Indicator::RecomputeRatio);
        let later = mean_bs / (1.0 + recomputed);
        let left = recomputed * (mean_bs + 1.0);
        for part in chunks(slots, CHUNK) {
            let new = computed(snapshot, Indicator::NewTokens, part.clone(), columns);
            delays([&bs[part.clone()], new], mean_queued, later, left, &mut score[part]);
        }
        Ok(())
    }
}

/// Returns an indicator of a chunk of slots, from kernels or from its column.
fn computed<'a>(
    snapshot: &'a Snapshot<'_>,
    id: Indicator,
    slots: Range<usize>,
    columns: &'a mut Columns,
) -> &'a [f64] {
    let Some(kernels) = snapshot.columns.kernels() else { return &snapshot.column(id)[slots] };
    let len = slots.len();
    kernels.fill(IndicatorSet::of(&[id]), slots, 0, columns);
    &columns.get(id)[..len]
}

/// Turns the queue of each slot into the delay by it. `later`: later requests that wait, `left`:
/// requests that evicted contexts delay.
#[multiversion(targets("x86_64+avx2"))]
fn delays([bs, new]: [&[f64]; 2], mean_queued: f64, later: f64, left: f64, queues: &mut [f64]) {
    // Equal lengths: the loop needs no check for each slot.
    let (bs, new) = (&bs[..queues.len()], &new[..queues.len()]);
    for (i, out) in queues.iter_mut().enumerate() {
        let queued = *out;
        let longer = greater(queued * 0.5, queued - mean_queued);
        *out = queued + later * longer + new[i] * (bs[i] + 1.0 + left);
    }
}

#[cfg(test)]
mod tests {
    use super::SPEC;
    use crate::indicators::Indicator::*;
    use crate::policy::fleet::{Fleet, policy};
    use crate::policy::{ExpressionPolicy, ExpressionSource};
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn the_loop_gives_the_scores_of_the_formula(
            slots in prop::collection::vec((0.0f64..9e4, 0u32..200, 0.0f64..9e4, 0u8..12), 1..600),
            recomputed in prop_oneof![Just(0.0), 0.0f64..20.0],
        ) {
            let mut fleet = Fleet::new(slots.len()).request(RecomputeRatio, recomputed);
            for (slot, (queued, bs, new, kind)) in slots.iter().enumerate() {
                // Some are not eligible, a few have no value, and idle ones have no queue.
                fleet.eligible[slot] = *kind > 2;
                let queued = match kind {
                    1 | 3 if slot % 8 == 0 => f64::NAN,
                    4 | 5 => 0.0,
                    _ => *queued,
                };
                fleet.columns.get_mut(QueuedPrefillTokens)[slot] = queued;
                fleet.columns.get_mut(Bs)[slot] = f64::from(*bs);
                fleet.columns.get_mut(NewTokens)[slot] = *new;
            }
            let score = SPEC.formula.strip_suffix(", lowest").unwrap().to_string();
            let source = ExpressionSource { score, ..ExpressionSource::default() };
            let formula = ExpressionPolicy::custom(None, source, &[]).unwrap();
            let bits = |score: f64| if score.is_nan() { f64::NAN.to_bits() } else { score.to_bits() };
            let (fast, plain) = (fleet.score(&*policy("total_delay", &[])), fleet.score(&formula));
            prop_assert!(fast.iter().zip(&plain).all(|(a, b)| bits(*a) == bits(*b)), "{fast:?} {plain:?}");
        }
    }

    fn fleet() -> Fleet {
        Fleet::new(3)
            .set(Bs, &[0.0, 8.0, 1.0])
            .set(QueuedPrefillTokens, &[0.0, 20_000.0, 700.0])
            .prompt(142_000.0, &[2_000.0, 140_000.0, 0.0])
    }

    #[test]
    fn adds_the_own_delay_and_that_of_the_others() {
        // The mean batch is 3, and the mean queue 6,900 tokens: the long queue exceeds it by
        // 13,100, and of the short one, half counts for each later request.
        let scores = fleet().score(&*policy("total_delay", &[]));
        let home = 20_000.0 + 3.0 * 13_100.0 + 2_000.0 * 9.0;
        assert_eq!(scores, [140_000.0, home, 700.0 + 3.0 * 350.0 + 142_000.0 * 2.0]);
        assert_eq!(fleet().best(&*policy("total_delay", &[])), Some(1), "home, in spite of the burst");
        assert_eq!(fleet().best(&*policy("lmetric", &[])), Some(0), "LMETRIC computes 140,000 tokens again");
    }

    #[test]
    fn recomputation_makes_new_tokens_dearer_than_queues() {
        // A token is computed again per new token, and delays a mean batch. So half of the work is
        // new, and of the delay of later requests half counts.
        let scores = fleet().request(RecomputeRatio, 1.0).score(&*policy("total_delay", &[]));
        let new = [140_000.0, 2_000.0, 142_000.0];
        let later = [0.0, 3.0 * 13_100.0, 3.0 * 350.0];
        let before = fleet().score(&*policy("total_delay", &[]));
        let expected: Vec<f64> =
            (0..3).map(|slot| before[slot] - later[slot] / 2.0 + 4.0 * new[slot]).collect();
        assert_eq!(scores, expected);
    }
}
