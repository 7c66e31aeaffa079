//! Distribution of answer lengths: the probability that an answer is longer than a number of
//! tokens, learned online (SIBYL section 4.2, Eqs. 3 and 4).
//!
//! Two corrections to the paper. Eq. (4) updates only the boundaries that the finished answer has
//! passed, where the indicator is always 1, so S would stay 1 forever. Here every boundary is
//! updated. And S is P(L > l), so the indicator is `L > l`; the printed `>=` is off by one.
use multiversion::multiversion;

/// Default tokens between two boundaries of the curve. The curve is linear between boundaries.
pub const BUCKET_TOKENS: f64 = 64.0;
/// Longest answers: longer answers count as this long.
const LONGEST_TOKENS: f64 = 32_768.0;
/// Default number of buckets.
pub(crate) const BUCKETS: usize = 512;
/// Weight that the curve keeps at each finished answer after the first thousand; before, all
/// answers weigh the same.
pub const ALPHA: f64 = 0.999;
/// Weight that the counts of the product-limit curve keep. It is higher, because few answers reach
/// a long tail.
const KEEP: f64 = 0.9999;
/// Minimum of the curve. It avoids division by 0, and probabilities below one in ten thousand
/// cannot be measured.
pub const FLOOR: f64 = 1e-4;

/// Number of prior requests.
const PRIOR: f64 = 2.0;
/// Mean length of the prior requests in tokens.
pub(crate) const PRIOR_TOKENS: f64 = 2000.0;

/// Returns the number of buckets of `bucket_tokens` tokens up to the longest answers.
pub(crate) fn buckets_of(bucket_tokens: f64) -> usize {
    (LONGEST_TOKENS / bucket_tokens).ceil() as usize
}

/// Settings of the curve.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CurveSettings {
    /// Weight that the curve keeps at each finished answer (Eq. 4), 0 to 1.
    pub alpha: f64,
    /// Tokens between two boundaries.
    pub bucket_tokens: f64,
}

impl Default for CurveSettings {
    fn default() -> CurveSettings {
        CurveSettings { alpha: ALPHA, bucket_tokens: BUCKET_TOKENS }
    }
}

/// S(l) = P(L > l): non-increasing, S(0) = 1. Before the first answer, S is 1 everywhere.
#[derive(Clone, Debug)]
pub struct Survival {
    settings: CurveSettings,
    seen: u64,
    /// Answers that reached each bucket, that ended in it, and that ended in it at their limits,
    /// decayed over time. `weight` is the weight of a new answer.
    entries: Vec<f64>,
    exits: Vec<f64>,
    cuts: Vec<f64>,
    weight: f64,
    /// S at `i * bucket_tokens`.
    curve: Vec<f64>,
    /// The curve, at least [`FLOOR`], and 1 over its value in the middle of each bucket.
    floored: Vec<f64>,
    inverse: Vec<f64>,
}

impl Default for Survival {
    fn default() -> Survival {
        Survival::new(CurveSettings::default())
    }
}

impl Survival {
    /// Creates a curve without observations.
    pub fn new(settings: CurveSettings) -> Survival {
        let buckets = buckets_of(settings.bucket_tokens);
        Survival {
            settings,
            seen: 0,
            entries: vec![0.0; buckets],
            exits: vec![0.0; buckets],
            cuts: vec![0.0; buckets],
            weight: 1.0,
            curve: vec![1.0; buckets + 1],
            floored: vec![1.0; buckets + 1],
            inverse: vec![1.0; buckets],
        }
    }

    /// Returns the settings.
    pub(crate) fn settings(&self) -> CurveSettings {
        self.settings
    }

    /// Returns the tokens between two boundaries.
    pub fn bucket_tokens(&self) -> f64 {
        self.settings.bucket_tokens
    }

    /// Returns the number of buckets: one less than boundaries.
    pub fn buckets(&self) -> usize {
        self.inverse.len()
    }

    /// Records an answer that ended after `tokens` tokens, by itself or at its limit.
    pub fn observe(&mut self, tokens: u32, at_limit: bool) {
        self.seen += 1;
        let keep = self.settings.alpha.min(1.0 - 1.0 / self.seen as f64);
        let buckets = self.buckets();
        let passed = f64::from(tokens.max(1)) / self.bucket_tokens();
        let passed = passed.ceil().min(buckets as f64 + 1.0) as usize;
        let (longer, shorter) = self.curve.split_at_mut(passed);
        longer.iter_mut().for_each(|s| *s = *s * keep + (1.0 - keep));
        shorter.iter_mut().for_each(|s| *s *= keep);
        refine(&self.curve, &mut self.floored, &mut self.inverse);
        self.weight /= KEEP;
        let last = (passed - 1).min(buckets - 1);
        self.exits[last] += self.weight;
        if at_limit {
            self.cuts[last] += self.weight;
        }
        if self.weight > 1e100 {
            let scale = 1.0 / self.weight;
            let all = self.exits.iter_mut().chain(&mut self.cuts).chain(&mut self.entries);
            all.for_each(|e| *e *= scale);
            self.weight = 1.0;
        }
    }

    /// Records that a running answer grew from `before` to `after` tokens (from 0: it began).
    pub fn passed(&mut self, before: f64, after: f64) {
        let (width, buckets) = (self.bucket_tokens(), self.buckets() as f64);
        let bucket = |tokens: f64| (tokens / width).ceil().min(buckets) as usize;
        for entries in &mut self.entries[bucket(before)..bucket(after)] {
            *entries += self.weight;
        }
    }

    /// Returns the curve by the product-limit estimator (Kaplan and Meier): in each bucket, the
    /// fraction that ended among the answers that reached it, including running answers. A mean
    /// over ended answers alone sees short answers first, so it is too short for the duration of an
    /// answer.
    pub fn product_limit(&self) -> Survival {
        self.estimated(|bucket| self.exits[bucket])
    }

    /// Returns the curve of answers without limits, by the same estimator: an answer that ended at
    /// its limit would have been longer. If all answers ended at their limits, they count as ended.
    pub fn unlimited(&self) -> Survival {
        match self.exits == self.cuts {
            true => self.product_limit(),
            false => self.estimated(|bucket| self.exits[bucket] - self.cuts[bucket]),
        }
    }

    /// Returns the curve by the product-limit estimator. `exits`: the answers that ended in a
    /// bucket.
    fn estimated(&self, exits: impl Fn(usize) -> f64) -> Survival {
        let mut limit = Survival { seen: self.seen, ..Survival::new(self.settings) };
        let mut s = 1.0;
        for (i, came) in self.entries.iter().enumerate() {
            let ended = exits(i) / self.weight + PRIOR * self.bucket_tokens() / PRIOR_TOKENS;
            s *= 1.0 - (ended / (came / self.weight + PRIOR)).min(1.0);
            limit.curve[i + 1] = s;
        }
        refine(&limit.curve, &mut limit.floored, &mut limit.inverse);
        limit
    }

    /// Returns the number of answers observed.
    pub fn seen(&self) -> u64 {
        self.seen
    }

    /// Returns S at `tokens`, at least [`FLOOR`].
    pub fn at(&self, tokens: f64) -> f64 {
        let buckets = self.buckets();
        let place = (tokens / self.bucket_tokens()).clamp(0.0, buckets as f64);
        let bucket = (place as usize).min(buckets - 1);
        let part = place - bucket as f64;
        self.floored[bucket] * (1.0 - part) + self.floored[bucket + 1] * part
    }

    /// Returns S at the boundaries `0, bucket_tokens, ...`, at least [`FLOOR`].
    pub fn boundaries(&self) -> &[f64] {
        &self.floored
    }

    /// Returns 1 / S in the middle of each bucket.
    pub(crate) fn inverse_middles(&self) -> &[f64] {
        &self.inverse
    }
}

#[multiversion(targets("x86_64+avx2"))]
fn refine(curve: &[f64], floored: &mut [f64], inverse: &mut [f64]) {
    for (floored, s) in floored.iter_mut().zip(curve) {
        // One instruction, without the NaN handling of `f64::max`.
        *floored = if *s > FLOOR { *s } else { FLOOR };
    }
    for (i, inverse) in inverse.iter_mut().enumerate() {
        *inverse = 2.0 / (floored[i] + floored[i + 1]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_first_answers_count_alike() {
        let mut s = Survival::default();
        assert_eq!((s.at(0.0), s.at(1e9)), (1.0, 1.0));
        for tokens in [64, 65, 640, 6400] {
            s.observe(tokens, false);
        }
        // L > 0: all four; L > 64: three; L > 640: one; L > 6,400: none.
        assert_eq!((s.at(0.0), s.at(64.0), s.at(640.0), s.at(6400.0)), (1.0, 0.75, 0.25, FLOOR));
        assert_eq!(s.at(32.0), 0.875);
    }

    #[test]
    fn the_mean_then_moves_by_alpha() {
        let mut s = Survival::new(CurveSettings { alpha: 0.5, ..CurveSettings::default() });
        // The first answer sets S to 1 at 64, the second halves it (one half is both the mean's
        // weight and alpha), the third halves it again.
        for (tokens, expected) in [(100, 1.0), (10, 0.5), (10, 0.25), (100, 0.625)] {
            s.observe(tokens, false);
            assert_eq!(s.at(64.0), expected);
        }
    }

    #[test]
    fn answers_that_still_run_count_as_long() {
        let mut s = Survival::default();
        for _ in 0..100 {
            s.passed(0.0, 1.0);
            s.passed(1.0, 100.0);
            s.observe(100, false);
            // As many answers have reached 650 tokens and still run.
            s.passed(0.0, 650.0);
        }
        assert!(s.at(640.0) <= 2.0 * FLOOR);
        let limit = s.product_limit();
        assert!((limit.at(64.0) - 1.0).abs() < 0.01 && (limit.at(128.0) - 0.5).abs() < 0.01);
        assert!((limit.at(640.0) - 0.5).abs() < 0.02, "{}", limit.at(640.0));
        let b = limit.boundaries();
        assert!(b[0] == 1.0 && b.windows(2).all(|w| w[0] >= w[1]));
        // The prior's rate applies to lengths that no answer has reached.
        assert!(limit.at(2640.0) < 0.25 && limit.at(2640.0) > 0.1, "{}", limit.at(2640.0));
    }

    /// Half of the answers have 600 tokens, and a limit of 100 cuts the others.
    #[test]
    fn a_limit_ends_an_answer_and_not_the_curve_of_those_without() {
        let answers = |cut_at: u32, natural: bool| {
            let mut s = Survival::default();
            for i in 0..1000 {
                let tokens = if natural && i % 2 == 0 { 600 } else { cut_at };
                s.passed(0.0, f64::from(tokens));
                s.observe(tokens, tokens == cut_at);
            }
            s
        };
        let s = answers(100, true);
        assert!((s.at(128.0) - 0.5).abs() < 0.1 && (s.product_limit().at(128.0) - 0.5).abs() < 0.01);
        assert!((s.unlimited().at(512.0) - 1.0).abs() < 0.05, "{}", s.unlimited().at(512.0));
        assert!(s.unlimited().at(640.0) < 0.05);
        // Nothing is known but the limits.
        let s = answers(100, false);
        assert_eq!(s.unlimited().boundaries(), s.product_limit().boundaries());
        assert!(s.unlimited().at(128.0) < 0.01);
    }

    proptest! {
        #[test]
        fn it_never_rises_and_begins_at_one(
            lengths in prop::collection::vec(0u32..40_000, 0..200),
            alpha in prop_oneof![0.0..1.0f64, Just(0.9999)],
            bucket_tokens in 8u32..1025,
        ) {
            let bucket_tokens = f64::from(bucket_tokens);
            let mut s = Survival::new(CurveSettings { alpha, bucket_tokens });
            lengths.iter().for_each(|&l| s.observe(l, false));
            let b = s.boundaries();
            prop_assert!((b[0] - 1.0).abs() < 1e-9);
            prop_assert!(b.windows(2).all(|w| w[0] >= w[1] - 1e-12) && b.iter().all(|s| *s >= FLOOR));
            prop_assert!(s.inverse_middles().iter().all(|i| i.is_finite()));
            // The curve starts as the fraction of longer answers, at each boundary.
            if alpha > 0.995 {
                for i in [1, 7, s.buckets()] {
                    let longer = lengths.iter().filter(|&&l| f64::from(l) > i as f64 * bucket_tokens).count();
                    let share = if lengths.is_empty() { 1.0 } else { longer as f64 / lengths.len() as f64 };
                    prop_assert!((b[i] - share.max(FLOOR)).abs() < 1e-9, "{} {share}", b[i]);
                }
            }
        }
    }
}
