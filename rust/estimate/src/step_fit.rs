//! Online fit of the step-time model: least squares over decayed observations, with costs of at
//! least 0.
use crate::Seconds;
use crate::StepTime;
use smallvec::SmallVec;

/// Terms of the model: steps, decoding sequences, their context tokens, prefill tokens, prefill
/// attention pairs.
pub(crate) const TERMS: usize = 5;
/// The terms, summed over the steps of a time span.
pub(crate) type Work = [f64; TERMS];

/// Weight that an observation keeps when the next one arrives: about the last seventy count.
const KEEP: f64 = 0.985;
/// Weight that a prediction error keeps when the next one arrives: the last twenty count.
const KEEP_ERROR: f64 = 0.95;
/// Minimum number of observations before the model is returned.
const LEAST: f64 = 8.0;
/// Maximum influence of an observation, in multiples of the usual error.
const PULL: f64 = 3.0;
/// Minimum value of the usual error.
const MIN_ERROR: f64 = 0.05;
/// Maximum error that one prediction counts for. The first predictions, before the terms are
/// separated, can be off by a factor of a hundred. Squared, they would dominate the error for two
/// hundred observations.
const MAX_ERROR: f64 = 1.0;
/// Regularization towards the current costs, as a fraction of a term's observations. It decides
/// what the observations leave open.
const HOLD: f64 = 1e-3;
/// Minimum of a term's decayed sum of squares. Below it, the term keeps its cost until it is
/// observed again. Rounding would stop the decay of smaller sums, and their ratio would be
/// meaningless.
const MIN_SQUARE_SUM: f64 = 1e-200;
/// Costs of a typical engine (the profile `llama-3.1-8b-a100`). Only their proportions count, until
/// traffic separates the terms.
const USUAL: Work = [0.01, 2e-5, 8e-8, 6e-5, 2.2e-9];
/// Assumed tokens per step until a step was seen to hold more: vLLM's smallest default.
const USUAL_BATCH_TOKENS: f64 = 2048.0;

fn dot(a: &Work, b: &Work) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// Step seconds = costs x work, learned for one instance. Terms that its traffic does not separate
/// keep their initial proportions. So the sum is accurate only for work like the observed traffic.
/// Memory and time are constant.
#[derive(Clone, Debug)]
pub struct StepFit {
    /// Sums of products of terms, and of terms and seconds.
    products: [Work; TERMS],
    seconds: Work,
    costs: Work,
    observations: f64,
    /// Observations that contain each term.
    seen: Work,
    /// Decayed sums of squared relative errors of predictions made before the observation, and
    /// their number.
    errors: f64,
    judged: f64,
    batch_tokens: f64,
}

impl Default for StepFit {
    fn default() -> Self {
        StepFit {
            products: [[0.0; TERMS]; TERMS],
            seconds: [0.0; TERMS],
            costs: [0.0; TERMS],
            observations: 0.0,
            seen: [0.0; TERMS],
            errors: 0.0,
            judged: 0.0,
            batch_tokens: USUAL_BATCH_TOKENS,
        }
    }
}

impl StepFit {
    /// Records that the instance did `work` in `seconds`. Ignores impossible values.
    pub(crate) fn observe(&mut self, work: &Work, seconds: Seconds) {
        let sane = work.iter().all(|term| (0.0..1e15).contains(term)) && work[0] >= 1.0;
        if !(sane && (1e-9..1e9).contains(&seconds)) {
            return;
        }
        if self.observations == 0.0 {
            self.costs = USUAL.map(|cost| cost * seconds / dot(work, &USUAL));
        }
        // A prediction of 0 would have unbounded weight.
        let predicted = dot(work, &self.costs).max(seconds / 100.0);
        let mut error = seconds / predicted - 1.0;
        // For a rarely observed term, a prediction is a guess: its error does not make the
        // observation an outlier.
        if (0..TERMS).all(|i| work[i] == 0.0 || self.seen[i] > LEAST) {
            let most = PULL * self.error().max(MIN_ERROR);
            error = error.clamp(-most, most);
        }
        if self.observations > 0.0 {
            self.errors = self.errors * KEEP_ERROR + error.min(MAX_ERROR).powi(2);
            self.judged = self.judged * KEEP_ERROR + 1.0;
        }
        self.observations = self.observations * KEEP + 1.0;
        self.seen = std::array::from_fn(|i| self.seen[i] + f64::from(u8::from(work[i] > 0.0)));
        let (seconds, weight) = (predicted * (1.0 + error), 1.0 / predicted);
        for i in 0..TERMS {
            if 0.0 < self.products[i][i] && self.products[i][i] < MIN_SQUARE_SUM {
                self.forget(i);
            }
        }
        for i in 0..TERMS {
            self.seconds[i] = self.seconds[i] * KEEP + weight * work[i] * seconds;
            for j in 0..TERMS {
                self.products[i][j] = self.products[i][j] * KEEP + weight * work[i] * work[j];
            }
        }
        self.solve();
    }

    /// Removes a term from the sums at its present cost. The sums of other terms lose its part.
    fn forget(&mut self, term: usize) {
        for other in 0..TERMS {
            self.seconds[other] -= self.products[other][term] * self.costs[term];
            (self.products[other][term], self.products[term][other]) = (0.0, 0.0);
        }
        self.seconds[term] = 0.0;
    }

    /// Records that `tokens` prefill tokens were computed in `steps` steps: a lower bound on the
    /// tokens per step.
    pub(crate) fn saw_chunks(&mut self, tokens: f64, steps: f64) {
        // The first step of a time span may already be filled by the same prefill.
        self.batch_tokens = self.batch_tokens.max((tokens / (steps + 1.0)).min(1e9));
    }

    /// Returns the number of steps of a prefill of `tokens` tokens alone.
    pub(crate) fn steps(&self, tokens: f64) -> f64 {
        (tokens / self.batch_tokens).ceil().max(1.0)
    }

    /// Returns the seconds of a decode step under the current costs; 0 before the first
    /// observation.
    pub fn decode_seconds(&self, sequences: f64, context: f64) -> Seconds {
        self.costs[0] + self.costs[1] * sequences + self.costs[2] * context
    }

    /// Fits the costs to the observations. While a cost is negative, the term with the lowest cost
    /// is removed.
    fn solve(&mut self) {
        // The system is scaled so that each observed term has diagonal 1. A term that is not
        // observed keeps its cost, and its row is not read.
        let scale: Work = std::array::from_fn(|i| self.products[i][i].sqrt());
        let system = System {
            rows: std::array::from_fn(|i| {
                std::array::from_fn(|j| match i == j {
                    true => 1.0 + HOLD,
                    false => self.products[i][j] / (scale[i] * scale[j]),
                })
            }),
            right: std::array::from_fn(|i| self.seconds[i] / scale[i] + HOLD * self.costs[i] * scale[i]),
        };
        let mut free: SmallVec<[usize; TERMS]> = (0..TERMS).filter(|i| scale[*i] > 0.0).collect();
        loop {
            let solved = system.solve(&free);
            let lowest = (0..free.len()).min_by(|i, j| solved[*i].total_cmp(&solved[*j]));
            match lowest {
                Some(i) if solved[i] < 0.0 => self.costs[free.remove(i)] = 0.0,
                _ => {
                    free.iter().zip(solved).for_each(|(&i, solved)| self.costs[i] = solved / scale[i]);
                    return;
                }
            }
        }
    }

    fn error(&self) -> f64 {
        (self.errors / self.judged).sqrt()
    }

    /// Returns the root mean square relative error, each error at most 1, of the predictions before
    /// each of about the last 20 observations; `None` before enough observations.
    pub fn relative_error(&self) -> Option<f64> {
        (self.judged >= LEAST).then(|| self.error())
    }

    /// Returns the model; `None` before enough observations.
    pub fn step_time(&self) -> Option<StepTime> {
        (self.judged >= LEAST).then(|| StepTime {
            fixed_seconds: self.costs[0],
            decode_seconds_per_sequence: self.costs[1],
            decode_seconds_per_context_token: self.costs[2],
            prefill_seconds_per_token: self.costs[3],
            prefill_seconds_per_attention_pair: self.costs[4],
            max_batch_tokens: self.batch_tokens,
            max_sequences: f64::INFINITY,
        })
    }

    /// Returns whether the observations include prefills.
    pub fn knows_prefill(&self) -> bool {
        self.seen[3] > 0.0
    }
}

/// Linear equations with a dominant diagonal that need no pivoting: a regularized Gram matrix with
/// unit diagonal.
struct System {
    rows: [Work; TERMS],
    right: Work,
}

impl System {
    /// Returns the solution for the terms `free` alone, in their order.
    fn solve(&self, free: &[usize]) -> Work {
        // One function per number of terms, so that its loops are unrolled even if the compiler
        // does not inline.
        match *free {
            [] => [0.0; TERMS],
            [a] => self.eliminate([a]),
            [a, b] => self.eliminate([a, b]),
            [a, b, c] => self.eliminate([a, b, c]),
            [a, b, c, d] => self.eliminate([a, b, c, d]),
            [a, b, c, d, e] => self.eliminate([a, b, c, d, e]),
            _ => unreachable!("there are {TERMS} terms, not {}", free.len()),
        }
    }

    // Indexed, because the compiler unrolls loops over constant ranges, but `skip` and `zip` only
    // sometimes.
    #[allow(clippy::needless_range_loop)]
    fn eliminate<const N: usize>(&self, free: [usize; N]) -> Work {
        let mut rows: [[f64; N]; N] = free.map(|i| free.map(|j| self.rows[i][j]));
        let mut right = free.map(|i| self.right[i]);
        for i in 0..N {
            for below in i + 1..N {
                let factor = rows[below][i] / rows[i][i];
                for j in i + 1..N {
                    rows[below][j] -= factor * rows[i][j];
                }
                right[below] -= factor * right[i];
            }
        }
        let mut solved = [0.0; TERMS];
        for i in (0..N).rev() {
            let known: f64 = (i + 1..N).map(|j| rows[i][j] * solved[j]).sum();
            solved[i] = (right[i] - known) / rows[i][i];
        }
        solved
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use rand::{RngExt, SeedableRng};

    /// Stretches of traffic; every other one contains a prefill.
    fn works(seed: u64) -> Vec<Work> {
        let mut rng = rand_pcg::Pcg64Mcg::seed_from_u64(seed);
        let mut some = |from: f64, to: f64| rng.random_range(from..to);
        let mut one = || {
            let decodes = some(1.0, 40.0) * some(1.0, 200.0);
            let (tokens, before) = (some(-1e4, 1e4).max(0.0), some(0.0, 2e4));
            [some(1.0, 40.0), decodes, decodes * some(50.0, 8000.0), tokens, tokens * (before + tokens / 2.0)]
        };
        (0..250).map(|_| one()).collect()
    }

    fn costs() -> impl Strategy<Value = Work> {
        let factor = || 0.2f64..5.0;
        [factor(), factor(), factor(), factor(), factor()]
            .prop_map(|f| std::array::from_fn(|i| USUAL[i] * f[i]))
    }

    proptest! {
        /// For any engine costs, varied traffic determines each cost, and approximately so if it
        /// contains an outlier.
        #[test]
        fn learns_the_costs(costs in costs(), seed: u64, outlier: bool) {
            let works = works(seed);
            let mut fit = StepFit::default();
            for (i, work) in works.iter().enumerate() {
                fit.observe(work, dot(work, &costs) * if outlier && i == 100 { 50.0 } else { 1.0 });
            }
            let off = |work: &Work| (dot(work, &fit.costs) / dot(work, &costs) - 1.0).abs();
            let tolerance = if outlier { 0.1 } else { 0.02 };
            for work in &works {
                prop_assert!(off(work) < tolerance, "{} of {work:?}: {:?} for {costs:?}", off(work), fit.costs);
            }
            prop_assert!(fit.relative_error().unwrap() < tolerance);
        }

        /// For any input, costs are at least 0.
        #[test]
        fn costs_are_never_negative(
            observed in prop::collection::vec((prop::array::uniform5(-1.0f64..1e9), -1.0f64..1e4), 1..100),
            odd in prop::array::uniform5(prop::num::f64::ANY), seconds in prop::num::f64::ANY,
        ) {
            let mut fit = StepFit::default();
            for (work, seconds) in &observed {
                fit.observe(work, *seconds);
            }
            fit.observe(&odd, seconds);
            prop_assert!(fit.costs.iter().all(|c| c.is_finite() && *c >= 0.0), "{:?}", fit.costs);
            prop_assert!(fit.relative_error().is_none_or(|e| e.is_finite() && e >= 0.0));
        }
    }

    #[test]
    fn one_batch_size_teaches_its_step_and_later_ones_the_parts() {
        let truth: Work = [0.01, 1e-4, 0.0, 0.0, 0.0];
        let mut fit = StepFit::default();
        let decode = |batch: f64| [8.0, 8.0 * batch, 8.0 * batch * 1000.0, 0.0, 0.0];
        assert_eq!((fit.step_time(), fit.relative_error()), (None, None));
        (0..100).for_each(|_| fit.observe(&decode(10.0), dot(&decode(10.0), &truth)));
        let step = |fit: &StepFit, batch: f64| fit.step_time().unwrap().step(batch, batch * 1000.0);
        assert!((step(&fit, 10.0) / 0.011 - 1.0).abs() < 1e-6);
        assert!(step(&fit, 100.0) < 0.03, "no sequence is taken for a whole step");
        assert!(!fit.knows_prefill());
        (0..200).for_each(|i| fit.observe(&decode(f64::from(i)), dot(&decode(f64::from(i)), &truth)));
        assert!((step(&fit, 100.0) / 0.02 - 1.0).abs() < 0.01);
    }

    #[test]
    fn an_engine_that_changes_is_learned_anew() {
        let mut fit = StepFit::default();
        let work: Work = [8.0, 80.0, 80_000.0, 500.0, 125_000.0];
        (0..300).for_each(|_| fit.observe(&work, 0.2));
        (0..300).for_each(|_| fit.observe(&work, 0.6));
        assert!((dot(&work, &fit.costs) / 0.6 - 1.0).abs() < 0.1, "{}", dot(&work, &fit.costs));
        assert!(fit.relative_error().unwrap() < 0.1);
    }

    #[test]
    fn one_prediction_that_was_wild_is_not_heard_of_for_long() {
        // Two long prefills come first and take all the observed time, so the following decodes are
        // predicted to take almost no time.
        let costs: Work = [0.048, 4e-6, 1.6e-8, 2.8e-4, 4.4e-10];
        let (mut fit, mut worst) = (StepFit::default(), 0.0f64);
        for (i, work) in works(18_069_448_246_200_261_675).iter().enumerate() {
            let off = dot(work, &costs) / dot(work, &fit.costs) - 1.0;
            if (1..5).contains(&i) {
                worst = worst.max(off);
            } else if i > 0 {
                assert!(off.abs() < 0.05, "{off} at {i}: all costs are known, and the outlier is clipped");
            }
            // Two predictions with the maximum error: the root of 2 x 0.95^75 / 20 is 0.046.
            assert!(i < 80 || fit.relative_error().unwrap() < 0.05, "{:?} at {i}", fit.relative_error());
            fit.observe(work, dot(work, &costs) * if i == 100 { 50.0 } else { 1.0 });
        }
        assert!(worst > 100.0, "{worst}");
    }

    #[test]
    fn prefills_that_come_late_are_no_outliers() {
        // Prefill tokens take 18 times as long as on a typical engine, with decodes that were exact
        // before.
        let costs: Work = [0.002, 4e-6, 1.6e-8, 2.2e-4, 4.4e-10];
        let mut fit = StepFit::default();
        let (decodes, prefills): (Vec<Work>, Vec<Work>) = works(7).iter().partition(|work| work[3] == 0.0);
        assert!(decodes.len() > 50 && prefills.len() > 50);
        decodes.iter().for_each(|work| fit.observe(work, dot(work, &costs)));
        prefills[..20].iter().for_each(|work| fit.observe(work, dot(work, &costs)));
        for work in &prefills {
            assert!((dot(work, &fit.costs) / dot(work, &costs) - 1.0).abs() < 0.02, "{:?}", fit.costs);
        }
    }

    /// Sums of a term that is not observed for hours reach the smallest numbers, whose decay
    /// rounding stops.
    #[test]
    fn a_term_that_traffic_lacks_for_hours_keeps_its_cost() {
        let costs: Work = [0.012, 4e-5, 1e-7, 6e-5, 2.2e-9];
        let decodes: Work = [8.0, 80.0, 80_000.0, 0.0, 0.0];
        let prefill: Work = [1.0, 0.0, 0.0, 1000.0, 500_000.0];
        for (usual, rare) in [(decodes, prefill), (prefill, decodes)] {
            let mut fit = StepFit::default();
            works(3)[..200].iter().for_each(|work| fit.observe(work, dot(work, &costs)));
            for _ in 0..60_000 {
                fit.observe(&usual, dot(&usual, &costs));
                for work in [usual, rare] {
                    assert!(
                        (dot(&work, &fit.costs) / dot(&work, &costs) - 1.0).abs() < 0.02,
                        "{:?}",
                        fit.costs
                    );
                }
            }
            assert!(fit.knows_prefill());
        }
    }

    #[test]
    fn long_prefills_show_how_many_tokens_a_step_holds() {
        let mut fit = StepFit::default();
        fit.saw_chunks(1000.0, 1.0);
        assert_eq!((fit.steps(0.0), fit.steps(4096.0)), (1.0, 2.0));
        fit.saw_chunks(8192.0 * 12.0, 12.0);
        assert_eq!(fit.steps(7000.0), 1.0);
    }
}
