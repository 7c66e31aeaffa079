//! Selection by score: the best slot. Slots still equal after the tie-breaks are drawn at random.
use super::{PolicyRng, Prefer, Scores};
use crate::expr::{WORD, set_of_lowest};
use rand::RngExt;

/// Returns the best eligible slot: by `score` and `prefer`, then the tie-breaks, then a uniform
/// draw.
///
/// Slots with a NaN or infinite score are skipped; a NaN tie-break loses. `None`: no eligible slot
/// has a finite score. Scores of ineligible slots become NaN. Does not allocate once the buffers
/// have grown. `rng` is used only for ties.
///
/// # Panics
/// If there are fewer scores than slots.
pub fn best(scores: &mut Scores, eligible: &[bool], rng: &mut PolicyRng) -> Option<usize> {
    let sign = if scores.prefer == Prefer::Max { -1.0 } else { 1.0 };
    let Scores { score, then, then_count, minima, ties, scored, tied, drawn_from, .. } = scores;
    *scored = set_of_lowest(sign, &mut score[..eligible.len()], eligible, minima, ties);
    *tied = count(ties);
    *drawn_from = *tied;
    for column in &then[..*then_count] {
        if *drawn_from > 1 {
            keep_lowest(ties, column);
            *drawn_from = count(ties);
        }
    }
    // An empty set has no first member either.
    let drawn = if *drawn_from > 1 { rng.random_range(0..*drawn_from) } else { 0 };
    members(ties).nth(drawn as usize)
}

fn nan_last(value: f64) -> f64 {
    if value.is_nan() { f64::INFINITY } else { value }
}

fn count(set: &[u64]) -> u32 {
    set.iter().map(|w| w.count_ones()).sum()
}

/// Yields the members of a bit set, ascending.
fn members(set: &[u64]) -> impl Iterator<Item = usize> + '_ {
    set.iter().enumerate().flat_map(|(word, &bits)| {
        std::iter::successors((bits != 0).then_some(bits), |b| Some(b & (b - 1)).filter(|b| *b != 0))
            .map(move |b| word * WORD + b.trailing_zeros() as usize)
    })
}

/// Keeps the members of `ties` with the lowest value in `column`.
fn keep_lowest(ties: &mut [u64], column: &[f64]) {
    let lowest = members(ties).map(|i| nan_last(column[i])).fold(f64::INFINITY, f64::min);
    for (word, bits) in ties.iter_mut().enumerate() {
        let mut left = *bits;
        while left != 0 {
            let bit = left.trailing_zeros() as usize;
            left &= left - 1;
            if nan_last(column[word * WORD + bit]) > lowest {
                *bits &= !(1 << bit);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::fleet::ranking;
    use rand::SeedableRng;

    fn scores(score: &[f64], prefer: Prefer, then: &[&[f64]]) -> Scores {
        let then: Vec<Vec<f64>> = then.iter().map(|c| c.to_vec()).collect();
        Scores { score: score.to_vec(), prefer, then_count: then.len(), then, ..Scores::default() }
    }

    fn rng() -> PolicyRng {
        PolicyRng::seed_from_u64(7)
    }

    #[test]
    fn takes_the_lowest_or_the_highest_eligible() {
        let (values, all) = ([3.0, 1.0, 2.0, 9.0], [true; 4]);
        assert_eq!(best(&mut scores(&values, Prefer::Min, &[]), &all, &mut rng()), Some(1));
        assert_eq!(best(&mut scores(&values, Prefer::Max, &[]), &all, &mut rng()), Some(3));
        let eligible = [true, false, true, false];
        assert_eq!(best(&mut scores(&values, Prefer::Min, &[]), &eligible, &mut rng()), Some(2));
        assert_eq!(best(&mut scores(&values, Prefer::Max, &[]), &eligible, &mut rng()), Some(0));
        assert_eq!(ranking(&scores(&values, Prefer::Min, &[]), &all, &mut rng()), [1, 2, 0, 3]);
        assert_eq!(ranking(&scores(&values, Prefer::Max, &[]), &eligible, &mut rng()), [0, 2]);
    }

    #[test]
    fn nan_and_infinite_scores_are_skipped() {
        let values = [f64::NAN, f64::NEG_INFINITY, f64::INFINITY, 5.0, 4.0];
        for (prefer, first, order) in [(Prefer::Min, 4, [4, 3]), (Prefer::Max, 3, [3, 4])] {
            let mut scores = scores(&values, prefer, &[]);
            assert_eq!(best(&mut scores, &[true; 5], &mut rng()), Some(first));
            assert_eq!(ranking(&scores, &[true; 5], &mut rng()), order);
        }
        assert_eq!(best(&mut scores(&values[..3], Prefer::Min, &[]), &[true; 3], &mut rng()), None);
        assert_eq!(best(&mut scores(&[1.0], Prefer::Min, &[]), &[false], &mut rng()), None);
        assert_eq!(best(&mut scores(&[], Prefer::Min, &[]), &[], &mut rng()), None);
        assert!(ranking(&scores(&values[..3], Prefer::Min, &[]), &[true; 3], &mut rng()).is_empty());
    }

    #[test]
    fn ties_go_to_the_tie_breaks_in_order_and_nan_loses() {
        let mut tied =
            scores(&[1.0; 5], Prefer::Max, &[&[2.0, 1.0, 1.0, 1.0, f64::NAN], &[0.0, 7.0, 6.0, 6.5, 0.0]]);
        assert_eq!(best(&mut tied, &[true; 5], &mut rng()), Some(2));
        assert_eq!((tied.tied, tied.drawn_from), (5, 1));
        assert_eq!(ranking(&tied, &[true; 5], &mut rng()), [2, 3, 1, 0, 4]);
        let mut absent = scores(&[1.0; 2], Prefer::Min, &[&[f64::NAN; 2], &[3.0, 2.0]]);
        assert_eq!(best(&mut absent, &[true; 2], &mut rng()), Some(1));
    }

    #[test]
    fn equal_slots_are_drawn_uniformly() {
        // 150 slots, so that ties span words. Every third slot is tied for the best score.
        let values: Vec<f64> = (0..150).map(|i| f64::from(u8::from(i % 3 != 0))).collect();
        let (mut scores, eligible, mut rng) = (scores(&values, Prefer::Min, &[]), vec![true; 150], rng());
        let (mut by_best, mut by_ranking) = ([0u32; 150], [0u32; 150]);
        for _ in 0..20_000 {
            by_best[best(&mut scores, &eligible, &mut rng).unwrap()] += 1;
        }
        for _ in 0..5_000 {
            by_ranking[ranking(&scores, &eligible, &mut rng)[0] as usize] += 1;
        }
        for (counts, mean) in [(by_best, 400.0), (by_ranking, 100.0)] {
            let chi2: f64 = counts.iter().step_by(3).map(|&c| (f64::from(c) - mean).powi(2) / mean).sum();
            assert!(chi2 < 85.4, "chi-squared of 49 degrees of freedom, p < 0.001: {chi2}");
            assert!(counts.iter().enumerate().all(|(i, &c)| i % 3 == 0 || c == 0));
        }
    }

    #[test]
    fn same_seed_same_choice_and_the_best_is_one_of_the_firsts() {
        use proptest::prelude::*;
        let value =
            prop_oneof![4 => (0..4i32).prop_map(f64::from), 1 => Just(f64::NAN), 1 => Just(f64::INFINITY)];
        let slot = (value.clone(), value, proptest::bool::ANY);
        proptest!(|(slots in proptest::collection::vec(slot, 0..300), max: bool, seed: u64)| {
            let column = |f: fn(&(f64, f64, bool)) -> f64| slots.iter().map(f).collect::<Vec<_>>();
            let prefer = if max { Prefer::Max } else { Prefer::Min };
            let mut scores = scores(&column(|s| s.0), prefer, &[&column(|s| s.1)]);
            let eligible: Vec<bool> = slots.iter().map(|s| s.2).collect();
            let chosen = best(&mut scores, &eligible, &mut PolicyRng::seed_from_u64(seed));
            prop_assert_eq!(chosen, best(&mut scores, &eligible, &mut PolicyRng::seed_from_u64(seed)));
            let order = ranking(&scores, &eligible, &mut PolicyRng::seed_from_u64(seed));
            prop_assert_eq!(order.is_empty(), chosen.is_none());
            if let (Some(chosen), Some(&first)) = (chosen, order.first()) {
                let first = first as usize;
                prop_assert!(eligible[chosen]);
                prop_assert_eq!(scores.score[chosen], scores.score[first]);
                prop_assert_eq!(nan_last(scores.then[0][chosen]), nan_last(scores.then[0][first]));
            }
        });
    }
}
