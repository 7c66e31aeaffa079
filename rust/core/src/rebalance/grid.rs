//! Future points at which loads are compared, their weights, and the load of a set of requests at
//! each point (STAR section 5.2).
//!
//! A request with N tokens and R remaining tokens holds N + t tokens at step t < R, and none from
//! then on. So the load at a point is a sum of tokens and a count of requests, over the requests
//! still running. An instance's summary takes O(requests + points).
use super::RunningRequest;

/// Points t_0 = 0 < t_1 < ... < t_P = H in steps, with weights.
#[derive(Clone, Debug)]
pub struct Grid {
    /// Steps from now, the present first.
    pub times: Vec<f64>,
    /// Weight of the variance at each point (Eq. 4): 1 for the present, beta for the others.
    pub variance_weights: Vec<f64>,
    /// Weight of the load at each point in w_i (Algorithm 1, line 13): 0 for the present, beta for
    /// the others; they sum to 1.
    pub load_weights: Vec<f64>,
    /// Prefix sums over the first m points of the variance weights times 1, t and t squared, by m.
    moments: Vec<[f64; 3]>,
}

impl Grid {
    /// Returns `points` evenly spaced points over `horizon` steps (at least as many steps as
    /// points). `beta(t)` is the weight of step t, in any scale. A point represents the steps since
    /// the previous point. With as many points as steps, this is the paper's sum, step by step.
    pub fn future(horizon: u32, points: u32, beta: impl Fn(f64) -> f64) -> Grid {
        let at = |i: u32| (u64::from(i) * u64::from(horizon)).div_ceil(u64::from(points)) as u32;
        let times = (0..=points).map(|i| f64::from(at(i))).collect();
        let raw: Vec<f64> =
            (1..=points).map(|i| (at(i - 1) + 1..=at(i)).map(|t| beta(f64::from(t))).sum()).collect();
        let total: f64 = raw.iter().sum();
        let with = |first: f64| std::iter::once(first).chain(raw.iter().map(|b| b / total)).collect();
        Grid::of(times, with(1.0), with(0.0))
    }

    fn of(times: Vec<f64>, variance_weights: Vec<f64>, load_weights: Vec<f64>) -> Grid {
        let mut moments = vec![[0.0; 3]];
        for (t, w) in times.iter().zip(&variance_weights) {
            let [a, b, c] = moments[moments.len() - 1];
            moments.push([a + w, b + w * t, c + w * t * t]);
        }
        Grid { times, variance_weights, load_weights, moments }
    }

    /// Returns the number of points, including the present.
    #[inline]
    pub fn len(&self) -> usize {
        self.times.len()
    }

    /// Returns false: the present is always a point.
    pub fn is_empty(&self) -> bool {
        false
    }

    /// Returns the number of leading points at which a request with `remaining` tokens still runs:
    /// at least 1, the present.
    #[inline]
    pub fn lasts(&self, remaining: f64) -> usize {
        1 + self.times[1..].partition_point(|t| *t < remaining)
    }

    /// Writes the load at each point, in tokens, into `row`: `constant` tokens plus the requests.
    /// Each request comes with the number of points at which it runs.
    pub fn load<'a>(
        &self,
        constant: u64,
        requests: impl Iterator<Item = (&'a RunningRequest, usize)>,
        row: &mut [f64],
    ) {
        row.fill(0.0);
        let mut counts = [0.0; 64];
        let mut many;
        let counts = if self.len() <= 64 {
            &mut counts[..self.len()]
        } else {
            many = vec![0.0; self.len()];
            &mut many[..]
        };
        for (request, lasts) in requests {
            row[lasts - 1] += f64::from(request.tokens);
            counts[lasts - 1] += 1.0;
        }
        // Integers below 2^53: sums are exact in any order.
        let (mut tokens, mut count) = (constant as f64, 0.0);
        for k in (0..self.len()).rev() {
            tokens += row[k];
            count += counts[k];
            row[k] = tokens + count * self.times[k];
        }
    }

    /// Returns the sum over the first `lasts` points of weight x load squared, for a request that
    /// has `tokens` now.
    #[inline]
    pub fn square(&self, tokens: f64, lasts: usize) -> f64 {
        let [a, b, c] = self.moments[lasts];
        tokens * (tokens * a + 2.0 * b) + c
    }

    /// Returns the weighted sum of the variances over instances, in tokens squared (Eq. 4). `loads`
    /// has one row per instance.
    pub fn variance(&self, loads: &[f64]) -> f64 {
        let n = (loads.len() / self.len()) as f64;
        let at = |k: usize| loads.iter().skip(k).step_by(self.len());
        let variance = |k: usize| {
            let mean = at(k).sum::<f64>() / n;
            at(k).map(|l| (l - mean) * (l - mean)).sum::<f64>() / n
        };
        self.variance_weights.iter().enumerate().map(|(k, w)| w * variance(k)).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::estimate::Remaining;

    fn request(tokens: u32, remaining: f64) -> RunningRequest {
        RunningRequest { id: 0, tokens, remaining: Remaining::exact(remaining), movable: true }
    }

    #[test]
    fn points_stand_for_the_steps_before_them() {
        let grid = Grid::future(6, 3, |t| t);
        assert_eq!(grid.times, [0.0, 2.0, 4.0, 6.0]);
        let beta = [0.0, 3.0 / 21.0, 7.0 / 21.0, 11.0 / 21.0];
        assert_eq!(grid.load_weights, beta);
        assert_eq!(grid.variance_weights, [1.0, beta[1], beta[2], beta[3]]);
        assert_eq!(Grid::future(5, 2, |_| 1.0).times, [0.0, 3.0, 5.0]);
    }

    #[test]
    fn loads_grow_and_end() {
        let grid = Grid::future(4, 4, |_| 1.0);
        let requests = [request(10, 2.0), request(100, 0.0), request(1000, 9.0)];
        assert_eq!(requests.map(|r| grid.lasts(r.remaining.tokens)), [2, 1, 5]);
        let mut row = [0.0; 5];
        grid.load(5, requests.iter().map(|r| (r, grid.lasts(r.remaining.tokens))), &mut row);
        assert_eq!(row, [1115.0, 1017.0, 1007.0, 1008.0, 1009.0]);
        // 1 x 10^2 now, and a quarter of 11^2 one step later.
        assert_eq!(grid.square(10.0, 2), 100.0 + 121.0 / 4.0);
    }

    #[test]
    fn the_variance_is_the_present_one_and_the_weighted_future() {
        let grid = Grid::future(2, 2, |_| 1.0);
        // Variances 25, 4 and 0.
        assert_eq!(grid.variance(&[0.0, 1.0, 3.0, 10.0, 5.0, 3.0]), 25.0 + 2.0);
    }
}
