//! Tail-aware priorities that need no prediction: UniBoost ("Beyond Prediction", section 3).
//!
//! A request's priority is its *boosted arrival*: its arrival time minus a boost. The less work a
//! request is known to have, the larger its boost (Eq. 2). The request with the least boosted
//! arrival goes first. The boost falls with the work observed so far, so a request that turns out
//! long loses it. It never falls below 0, so no request is overtaken by all later arrivals. Gamma
//! sets the strength: a large gamma boosts nothing (first come, first served). With a small gamma,
//! the least work goes first whatever its arrival (least attained service).
//!
//! **Units** (errata 7 and 8). Gamma is in 1/s and the paper's work is in tokens, but their product
//! must be dimensionless. Here, work is converted to engine seconds by the seconds per token,
//! measured over all tokens of the engine's batches. Work counts all tokens, prompt and answer
//! alike, also during decode. If it counted only the answer's tokens, as in the paper's SIGNAL, the
//! boost would jump up at the prompt's end. Cached prompt tokens are no work (A.5).
//!
//! - [`boost_seconds`], [`Work`]: the boost and its input.
//! - [`memguard`]: priorities that change only when the work doubles, so that memory is not moved
//!   repeatedly (section 3.3).
//! - [`gamma`]: the tail's rate, learned from requests as they end (section 3.4).
//! - [`engine`]: what an engine's scheduler keeps of all these.
//! - [`vtc`]: fairness between tenants.
pub mod engine;
pub mod gamma;
pub mod memguard;
pub mod vtc;

pub use engine::EngineBoost;
pub use gamma::{Adaptive, TailRate};
pub use memguard::MemGuard;

use crate::error::CoreError;
use crate::ids::Seconds;
use crate::settings::SettingsReader;

/// Default gamma until the tail is known, 1/s: for answers of about ten seconds, with a 99th
/// percentile 16 s above the 95th.
pub const INITIAL_GAMMA: f64 = 0.1;
/// Maximum boost: no request waits for a year.
const MAX_SECONDS: Seconds = 3e7;

/// Returns Eq. (2), `ln(1 / (1 - exp(-gamma w))) / gamma` in seconds, at most a year. `work` is in
/// seconds and gamma in 1/s, both above 0.
pub fn boost_seconds(work: Seconds, gamma: f64) -> Seconds {
    (-(-(-gamma * work).exp_m1()).ln() / gamma).clamp(0.0, MAX_SECONDS)
}

/// Priority of a request in its engine's queue.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Priority {
    /// Lower goes first.
    pub value: i64,
    /// Boost in seconds, below 0 if the request is held back; 0 if another rule sets the order.
    pub boost_seconds: Seconds,
}

/// Known work of a request, in tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Work {
    /// Prompt tokens.
    pub prompt_tokens: u32,
    /// Leading prompt tokens that need not be computed.
    pub hit_tokens: u32,
    /// Tokens computed for the request so far, prompt and answer, each counted once.
    pub attained_tokens: u32,
}

impl Work {
    /// Returns `max(w, prompt - hit)` (A.5), at least 1, because the prompt's last token is always
    /// computed.
    pub fn tokens(&self) -> u32 {
        self.attained_tokens.max(self.prompt_tokens.saturating_sub(self.hit_tokens)).max(1)
    }
}

/// Boost settings.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Settings {
    /// Gamma in 1/s, 1e-6 to 1e6: fixed, or the initial value if it is learned.
    pub gamma: f64,
    /// Settings for learning gamma; `None`: gamma is fixed.
    pub adaptive: Option<Adaptive>,
    /// When priorities change; `None`: with every token, and any request may preempt any other.
    pub memguard: Option<MemGuard>,
}

impl Default for Settings {
    fn default() -> Settings {
        Settings {
            gamma: INITIAL_GAMMA,
            adaptive: Some(Adaptive::default()),
            memguard: Some(MemGuard::default()),
        }
    }
}

impl Settings {
    /// Reads gamma and the settings of the enabled parts.
    ///
    /// # Errors
    /// `BadValue` for a value of the wrong type. [`Settings::check`] returns it for a value out of
    /// its range.
    pub fn read(self, reader: &mut SettingsReader) -> Result<Settings, CoreError> {
        Ok(Settings {
            gamma: reader.one("gamma")?.unwrap_or(self.gamma),
            adaptive: self.adaptive.map(|_| reader.read()).transpose()?,
            memguard: self.memguard.map(|_| reader.read()).transpose()?,
        })
    }

    /// # Errors
    /// `BadValue` for a setting out of its range.
    pub fn check(&self) -> Result<(), CoreError> {
        if !(1e-6..=1e6).contains(&self.gamma) {
            return bad("gamma", self.gamma.to_string(), "1e-6 to 1e6, 1/s");
        }
        self.adaptive.map_or(Ok(()), |adaptive| adaptive.check())?;
        self.memguard.map_or(Ok(()), |guard| guard.check())
    }

    /// Returns the number of tokens that determine the request's priority.
    pub fn weighed_tokens(&self, work: &Work) -> u32 {
        self.memguard.map_or(work.tokens(), |guard| guard.bin(work.tokens()))
    }

    /// Returns a request's boosted arrival, in seconds on the clock of `arrival`: lower goes first.
    /// `token_seconds`: engine seconds per token.
    pub fn boosted_arrival(
        &self,
        arrival: Seconds,
        work: &Work,
        gamma: f64,
        token_seconds: Seconds,
    ) -> Seconds {
        arrival - boost_seconds(f64::from(self.weighed_tokens(work)) * token_seconds, gamma)
    }
}

fn bad<T>(what: &str, got: String, expected: &str) -> Result<T, CoreError> {
    Err(CoreError::BadValue { what: format!("priority: {what}"), got, expected: expected.into() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn close(a: f64, b: f64) {
        assert!((a - b).abs() <= 1e-9 * b.abs().max(1.0), "{a} is not {b}");
    }

    #[test]
    fn boosts_by_hand() {
        // 1 - e^-ln 2 = 1/2: ln 2 seconds at gamma 1.
        close(boost_seconds(2f64.ln(), 1.0), 2f64.ln());
        close(boost_seconds(20.0 * 2f64.ln(), 0.05), 20.0 * 2f64.ln());
        // Little work: approximately -ln(gamma w) / gamma.
        close(boost_seconds(1e-9, 1.0), -(1e-9f64).ln());
        close(boost_seconds(1000.0, 1.0), 0.0);
        assert_eq!(boost_seconds(0.0, 0.1), MAX_SECONDS);
    }

    #[test]
    fn erratum_7_tokens_taken_for_seconds_boost_nobody() {
        // The paper's figures: t99 - t95 = 10 s, and 256 tokens.
        let gamma = 5f64.ln() / 10.0;
        assert!(boost_seconds(256.0, gamma) < 1e-17);
        // At 0.1 ms per token, they are 25.6 ms of work and get a boost of 34 s.
        close(boost_seconds(0.0256, gamma), -(-(-gamma * 0.0256).exp_m1()).ln() / gamma);
        assert!((33.0..35.0).contains(&boost_seconds(0.0256, gamma)));
    }

    #[test]
    fn work_is_what_is_known_of_it() {
        let fresh = Work { prompt_tokens: 1000, hit_tokens: 0, attained_tokens: 0 };
        assert_eq!(fresh.tokens(), 1000);
        assert_eq!(Work { hit_tokens: 900, ..fresh }.tokens(), 100);
        assert_eq!(Work { hit_tokens: 1000, ..fresh }.tokens(), 1);
        // Erratum 8: nothing jumps at the prompt's end.
        for attained in 990..1010 {
            let work = Work { attained_tokens: attained, ..fresh };
            assert_eq!(work.tokens(), attained.max(1000));
        }
    }

    #[test]
    fn the_ends_of_gamma_are_fcfs_and_least_attained_service() {
        let settings = Settings { memguard: None, ..Settings::default() };
        let at = |arrival, tokens, gamma| {
            let work = Work { prompt_tokens: tokens, ..Work::default() };
            settings.boosted_arrival(arrival, &work, gamma, 1e-3)
        };
        // Figure 3: a large early request, and a small one 8 s later.
        assert!(at(0.0, 10_000, 100.0) < at(8.0, 10, 100.0), "gamma 100 goes by arrival");
        assert!(at(0.0, 10_000, 0.01) > at(8.0, 10, 0.01), "gamma 0.01 goes by work");
        // In between, short requests overtake, but not requests that have waited long.
        assert!(at(0.0, 10_000, 0.1) > at(8.0, 10, 0.1));
        assert!(at(0.0, 10_000, 0.1) < at(100.0, 10, 0.1));
    }

    proptest! {
        #[test]
        fn boosts_fall_with_work_and_gamma(
            work in 1e-6f64..1e4, more in 1.0f64..100.0, gamma in 1e-3f64..1e3,
        ) {
            let boost = boost_seconds(work, gamma);
            prop_assert!(boost.is_finite() && boost >= 0.0);
            prop_assert!(boost_seconds(work * more, gamma) <= boost);
            prop_assert!(boost_seconds(work, gamma * more) <= boost);
        }
    }

    #[test]
    fn settings_out_of_range_are_named() {
        for gamma in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            let message = Settings { gamma, ..Settings::default() }.check().unwrap_err().to_string();
            assert!(message.contains("priority: gamma"), "{message}");
        }
        assert_eq!(Settings::default().check(), Ok(()));
    }

    #[test]
    fn every_setting_is_read_by_its_name() {
        let names = ["gamma", "window", "min_requests", "every", "smoothing", "min_gamma", "max_gamma"];
        let names = names.into_iter().chain(["bin_tokens", "hysteresis_seconds"]);
        // Each value differs from the default and from the others.
        let given: Vec<_> =
            names.zip(100..).map(|(name, value)| (name.into(), Ok(f64::from(value)))).collect();
        let read = |settings: Settings| {
            let mut reader = SettingsReader::new("priority", given.clone());
            (settings.read(&mut reader).unwrap(), reader.finish())
        };
        let (min_requests, min_gamma, max_gamma) = (Some(102), 105.0, 106.0);
        let adaptive =
            Adaptive { window: 101, min_requests, every: 103, smoothing: 104.0, min_gamma, max_gamma };
        let guard = MemGuard { bin_tokens: 107, hysteresis_seconds: 108.0 };
        let all = Settings { gamma: 100.0, adaptive: Some(adaptive), memguard: Some(guard) };
        assert_eq!(read(Settings::default()), (all, Ok(())));
        // A fixed gamma has no window.
        let (fixed, finished) = read(Settings { adaptive: None, ..Settings::default() });
        assert_eq!(fixed, Settings { adaptive: None, ..all });
        let told = finished.unwrap_err().to_string();
        assert_eq!(
            told,
            "priority: setting \"every\" is not valid; expected gamma, bin_tokens, hysteresis_seconds"
        );
    }
}
