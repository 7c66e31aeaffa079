//! Cost of loading a token from a tier below the GPU, learned from prefills that loaded tokens.
use crate::Seconds;

/// Weight that an observation keeps when the next one arrives: about the last fifty count.
const KEEP: f64 = 0.98;
/// Loads that the prior counts as, and the tokens of each.
const PRIOR_LOADS: f64 = 1.0;
const PRIOR_TOKENS: f64 = 512.0;
/// Tokens added to a prefill's length in its weight, so that short prefills do not dominate.
const MIN_TOKENS: f64 = 64.0;

/// Decayed least squares of seconds = fixed + a x computed tokens + b x loaded tokens. The ratio is
/// b / a. Prefills that load nothing teach the first two terms, so that the fixed time of a step
/// does not count as loading. Each prefill is weighted by 1 / its tokens.
#[derive(Clone, Copy, Debug, Default)]
pub struct TierLoad {
    /// Sums of products of (1, computed, loaded).
    products: [[f64; 3]; 3],
    /// Sums of products of (1, computed, loaded) with the seconds.
    targets: [f64; 3],
    observed: u64,
}

impl TierLoad {
    /// Records a prefill that ran alone: `computed` tokens, `loaded` tokens before them and the
    /// seconds until its first token.
    pub fn observe(&mut self, computed: f64, loaded: f64, seconds: Seconds) {
        if !(computed > 0.0 && loaded >= 0.0 && seconds > 0.0) {
            return;
        }
        let terms = [1.0, computed, loaded];
        let weight = 1.0 / (computed + loaded + MIN_TOKENS);
        for (row, one) in terms.iter().enumerate() {
            for (column, other) in terms.iter().enumerate() {
                let sum = &mut self.products[row][column];
                *sum = *sum * KEEP + weight * one * other;
            }
            self.targets[row] = self.targets[row] * KEEP + weight * one * seconds;
        }
        if loaded > 0.0 {
            self.observed += 1;
        }
    }

    /// Returns the seconds to load a token divided by the seconds to compute it; `prior` before the
    /// first load.
    pub fn ratio(&self, prior: f64) -> f64 {
        if self.observed > 0 { self.solved(prior) } else { prior }
    }

    /// Returns the number of loads observed.
    pub fn observed(&self) -> u64 {
        self.observed
    }

    /// Solves the least squares, with the prior as some loads whose b is `prior` x a. Without a
    /// fixed part if it would be negative.
    fn solved(&self, prior: f64) -> f64 {
        let mut products = self.products;
        let weight = PRIOR_LOADS * PRIOR_TOKENS * PRIOR_TOKENS / (PRIOR_TOKENS + MIN_TOKENS);
        let features = [0.0, -prior, 1.0];
        for (row, one) in features.iter().enumerate() {
            for (column, other) in features.iter().enumerate() {
                products[row][column] += weight * one * other;
            }
        }
        let [fixed, a, b] = solve(products, self.targets).unwrap_or([-1.0, 0.0, 0.0]);
        let (a, b) = if fixed >= 0.0 && a > 0.0 {
            (a, b)
        } else {
            let [[_, _, _], [_, aa, ab], [_, _, bb]] = products;
            let determinant = aa * bb - ab * ab;
            let [_, ta, tb] = self.targets;
            ((ta * bb - tb * ab) / determinant, (tb * aa - ta * ab) / determinant)
        };
        let ratio = b / a;
        if ratio.is_finite() && a > 0.0 { ratio.clamp(0.0, 1.0) } else { prior }
    }
}

/// Solves a system of three equations; `None` if it has no single solution.
fn solve(mut m: [[f64; 3]; 3], mut t: [f64; 3]) -> Option<[f64; 3]> {
    for at in 0..3 {
        let pivot = (at..3).max_by(|x, y| m[*x][at].abs().total_cmp(&m[*y][at].abs()))?;
        m.swap(at, pivot);
        t.swap(at, pivot);
        let (row, target) = (m[at], t[at]);
        if row[at].abs() <= 1e-12 * row.iter().fold(0.0, |most: f64, x| most.max(x.abs())) {
            return None;
        }
        for below in at + 1..3 {
            let factor = m[below][at] / row[at];
            (at..3).for_each(|column| m[below][column] -= factor * row[column]);
            t[below] -= factor * target;
        }
    }
    let mut x = [0.0; 3];
    for at in (0..3).rev() {
        let known: f64 = (at + 1..3).map(|column| m[at][column] * x[column]).sum();
        x[at] = (t[at] - known) / m[at][at];
    }
    x.iter().all(|x| x.is_finite()).then_some(x)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Prefills with a fixed time, 100 µs per computed token and `ratio` of it per loaded token.
    fn taught(ratio: f64, loads: u32) -> TierLoad {
        let mut load = TierLoad::default();
        for i in 0..200u32 {
            let computed = f64::from(8 + i * 37 % 900);
            let loaded = if i % 4 == 0 && i / 4 < loads { f64::from(200 + i * 53 % 3000) } else { 0.0 };
            let noise = 1.0 + 0.05 * f64::from(i * 29 % 11) / 5.0 - 0.05;
            let seconds = (0.02 + 1e-4 * (computed + ratio * loaded)) * noise;
            load.observe(computed, loaded, seconds);
        }
        load
    }

    #[test]
    fn the_ratio_is_learned_beside_a_fixed_time() {
        for ratio in [0.0, 0.02, 0.2, 0.7] {
            let learned = taught(ratio, 50).ratio(0.02);
            assert!((learned - ratio).abs() < 0.1 * ratio + 0.02, "{ratio}: {learned}");
        }
    }

    #[test]
    fn without_loads_the_ratio_is_the_prior() {
        let load = taught(0.5, 0);
        assert_eq!((load.ratio(0.02), load.observed()), (0.02, 0));
        assert_eq!(TierLoad::default().ratio(0.3), 0.3);
    }

    #[test]
    fn the_ratio_stays_between_0_and_1_whatever_is_observed() {
        let mut load = TierLoad::default();
        load.observe(1.0, 5000.0, 100.0);
        assert!((0.0..=1.0).contains(&load.ratio(0.02)), "{}", load.ratio(0.02));
        for (computed, loaded, seconds) in
            [(0.0, 1.0, 1.0), (1.0, 1.0, 0.0), (f64::NAN, 1.0, 1.0), (1.0, -1.0, 1.0)]
        {
            let before = load.observed();
            load.observe(computed, loaded, seconds);
            assert_eq!(load.observed(), before);
        }
        for i in 0..50 {
            load.observe(1000.0, f64::from(i), 1e-9);
        }
        assert!((0.0..=1.0).contains(&load.ratio(0.02)), "{}", load.ratio(0.02));
    }
}
