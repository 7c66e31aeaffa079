//! Gamma, estimated from the tail of observed end-to-end times (UniBoost, section 3.4, Eq. 9).
//!
//! If the fraction of requests that take longer than t falls as `exp(-gamma t)` between the 95th
//! and the 99th percentile, then `gamma = ln(0.05 / 0.01) / (t99 - t95) = ln 5 / (t99 - t95)`. (The
//! appendix has `(log 99 - log 95)` there, 39 times smaller: erratum 7.)
//!
//! The paper leaves window, smoothing and bounds open. Ours:
//!
//! - The window is the last 1,024 end-to-end times.
//! - The first estimate needs 256 ended requests: with fewer, only two or three lie beyond the 99th
//!   percentile.
//! - A new estimate follows every 64 requests, with a weight of one fifth. So gamma follows a
//!   workload shift within about 300 requests once the window contains it.
//! - Gamma stays between 0.001 and 10 1/s (tails of 27 min and of 0.16 s).
use super::bad;
use crate::error::CoreError;
use crate::ids::Seconds;
use serde::Deserialize;

/// Default number of end-to-end times before the first estimate.
pub const MIN_REQUESTS: u32 = 256;

/// Settings for learning gamma.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
#[serde(default)]
pub struct Adaptive {
    /// Window: number of latest end-to-end times, 100 to 65,536.
    pub window: u32,
    /// End-to-end times before the first estimate, 100 to the window; `None`: [`MIN_REQUESTS`], or
    /// the window if it is smaller.
    pub min_requests: Option<u32>,
    /// Ended requests between two estimates; 1 or more.
    pub every: u32,
    /// beta: weight of a new estimate; above 0, at most 1.
    pub smoothing: f64,
    /// Minimum gamma, 1/s.
    pub min_gamma: f64,
    /// Maximum gamma, 1/s.
    pub max_gamma: f64,
}

impl Default for Adaptive {
    fn default() -> Adaptive {
        Adaptive {
            window: 1024,
            min_requests: None,
            every: 64,
            smoothing: 0.2,
            min_gamma: 1e-3,
            max_gamma: 10.0,
        }
    }
}

impl Adaptive {
    /// # Errors
    /// `BadValue` for a setting out of its range.
    pub fn check(&self) -> Result<(), CoreError> {
        let (least, most) = (self.min_gamma, self.max_gamma);
        if !(100..=65_536).contains(&self.window) {
            return bad("gamma's window", self.window.to_string(), "100 to 65536 requests");
        }
        if !(100..=self.window).contains(&self.min_requests()) {
            return bad(
                "gamma's min_requests",
                self.min_requests().to_string(),
                "100 requests up to the window",
            );
        }
        if self.every == 0 {
            return bad("gamma's every", "0".into(), "1 request or more");
        }
        if !(self.smoothing > 0.0 && self.smoothing <= 1.0) {
            return bad("gamma's smoothing", self.smoothing.to_string(), "more than 0, at most 1");
        }
        if !(least >= 1e-6 && least <= most && most <= 1e6) {
            return bad("gamma's bounds", format!("{least} to {most}"), "1e-6 to 1e6 1/s, the least first");
        }
        Ok(())
    }

    fn min_requests(&self) -> u32 {
        self.min_requests.unwrap_or(MIN_REQUESTS.min(self.window))
    }
}

/// Learned rate of the tail of end-to-end times.
///
/// Memory is bounded by the window. Each estimate selects two quantiles, which takes a few
/// microseconds every 64th request.
#[derive(Clone, Debug)]
pub struct TailRate {
    settings: Adaptive,
    gamma: f64,
    latest: Vec<f32>,
    ended: u64,
    estimates: u64,
    scratch: Vec<f32>,
}

impl TailRate {
    /// Starts with `gamma`, 1/s.
    ///
    /// # Errors
    /// `BadValue` for a setting out of its range.
    pub fn new(gamma: f64, settings: Adaptive) -> Result<TailRate, CoreError> {
        settings.check()?;
        super::Settings { gamma, adaptive: Some(settings), memguard: None }.check()?;
        Ok(TailRate {
            settings,
            gamma,
            latest: Vec::with_capacity(settings.window as usize),
            ended: 0,
            estimates: 0,
            scratch: Vec::with_capacity(settings.window as usize),
        })
    }

    /// Returns gamma, 1/s.
    pub fn gamma(&self) -> f64 {
        self.gamma
    }

    /// Returns the number of estimates; 0: gamma is still the initial value.
    pub fn estimates(&self) -> u64 {
        self.estimates
    }

    /// Records that a request ended `seconds` after its arrival. Ignores invalid times. Returns
    /// whether gamma changed.
    pub fn ended(&mut self, seconds: Seconds) -> bool {
        if !(0.0..1e9).contains(&seconds) {
            return false;
        }
        let window = self.settings.window as usize;
        if self.latest.len() < window {
            self.latest.push(seconds as f32);
        } else {
            self.latest[(self.ended % window as u64) as usize] = seconds as f32;
        }
        self.ended += 1;
        let due = self.ended.is_multiple_of(u64::from(self.settings.every));
        due && self.latest.len() >= self.settings.min_requests() as usize && self.estimate()
    }

    fn estimate(&mut self) -> bool {
        self.scratch.clear();
        self.scratch.extend_from_slice(&self.latest);
        let n = self.scratch.len();
        // t_p = inf {t: at most a fraction 1 - p takes longer}: the ceil(p n)th shortest.
        let place = |share: f64| (share * n as f64).ceil() as usize - 1;
        let (below, &mut t99, _) = self.scratch.select_nth_unstable_by(place(0.99), f32::total_cmp);
        let t95 = *below.select_nth_unstable_by(place(0.95), f32::total_cmp).1;
        let (least, most) = (self.settings.min_gamma, self.settings.max_gamma);
        // A tail of length 0 is infinitely steep, so the maximum applies.
        let estimate = (5f64.ln() / f64::from(t99 - t95)).clamp(least, most);
        let before = self.gamma;
        self.gamma = (before + self.settings.smoothing * (estimate - before)).clamp(least, most);
        self.estimates += 1;
        self.gamma != before
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::{RngExt, SeedableRng};

    /// End-to-end times with P(time > t) = e^-(rate t).
    fn exponential(rate: f64, seed: u64) -> impl Iterator<Item = f64> {
        let mut rng = rand_pcg::Pcg64::seed_from_u64(seed);
        std::iter::repeat_with(move || -(1.0 - rng.random::<f64>()).ln() / rate)
    }

    #[test]
    fn equation_9_by_hand() {
        let settings = Adaptive { window: 100, every: 100, smoothing: 1.0, ..Adaptive::default() };
        let mut tail = TailRate::new(0.5, settings).unwrap();
        // 0.1, 0.2, ... 10 s: the 95th percentile is 9.5 s, the 99th is 9.9 s.
        let changed: Vec<bool> = (1..=100).map(|i| tail.ended(f64::from(i) / 10.0)).collect();
        assert_eq!(changed.iter().position(|&changed| changed), Some(99));
        assert!((tail.gamma() - 5f64.ln() / 0.4).abs() < 1e-4, "{}", tail.gamma());
        // Smoothed: one fifth of the way.
        let mut slow = TailRate::new(0.5, Adaptive { smoothing: 0.2, ..settings }).unwrap();
        (1..=100).for_each(|i| {
            slow.ended(f64::from(i) / 10.0);
        });
        assert!((slow.gamma() - (0.8 * 0.5 + 0.2 * 5f64.ln() / 0.4)).abs() < 1e-4);
    }

    #[test]
    fn the_rate_of_an_exponential_tail_is_found_and_a_shift_is_followed() {
        let mut tail = TailRate::new(1.0, Adaptive::default()).unwrap();
        exponential(0.05, 1).take(6000).for_each(|seconds| {
            tail.ended(seconds);
        });
        assert!((0.035..0.07).contains(&tail.gamma()), "{}", tail.gamma());
        let mut after = 0;
        for seconds in exponential(0.5, 2) {
            tail.ended(seconds);
            after += 1;
            if (0.35..0.7).contains(&tail.gamma()) {
                break;
            }
        }
        // The window must first drop the long times: at most one in a hundred may be left.
        assert!((900..2600).contains(&after), "{after}");
    }

    #[test]
    fn too_few_requests_say_nothing() {
        let mut tail = TailRate::new(0.3, Adaptive::default()).unwrap();
        exponential(5.0, 3).take(255).for_each(|seconds| assert!(!tail.ended(seconds)));
        assert_eq!((tail.gamma(), tail.estimates()), (0.3, 0));
        assert!(tail.ended(1.0));
        assert_eq!(tail.estimates(), 1);
    }

    #[test]
    fn equal_times_end_at_the_bound_and_what_is_no_time_is_left_out() {
        let mut tail = TailRate::new(0.1, Adaptive { smoothing: 1.0, ..Adaptive::default() }).unwrap();
        (0..2000).for_each(|_| {
            tail.ended(3.0);
        });
        assert_eq!(tail.gamma(), 10.0);
        for seconds in [f64::NAN, -1.0, f64::INFINITY] {
            assert!(!tail.ended(seconds));
        }
        assert_eq!(tail.ended, 2000);
        // The sequence is longer than the window, but memory stays bounded.
        assert_eq!(tail.latest.len(), 1024);
    }

    #[test]
    fn settings_out_of_range_are_named() {
        let fine = Adaptive::default();
        for (settings, what) in [
            (Adaptive { window: 50, ..fine }, "window"),
            (Adaptive { min_requests: Some(2000), ..fine }, "min_requests"),
            (Adaptive { min_requests: Some(99), ..fine }, "min_requests"),
            (Adaptive { every: 0, ..fine }, "every"),
            (Adaptive { smoothing: 0.0, ..fine }, "smoothing"),
            (Adaptive { min_gamma: 1.0, max_gamma: 0.5, ..fine }, "bounds"),
            (Adaptive { min_gamma: f64::NAN, ..fine }, "bounds"),
        ] {
            let message = TailRate::new(0.1, settings).unwrap_err().to_string();
            assert!(message.contains(what), "{message}");
        }
        assert!(TailRate::new(f64::NAN, fine).unwrap_err().to_string().contains("gamma"));
    }
}
