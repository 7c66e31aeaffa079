//! Values that an engine learns from its own requests: time per token, end-to-end times, lengths of
//! answers.
//!
//! They are updated at every [`EVERY`]th request that ends, and the queue is ranked again then.
//! Between two updates, ranks do not change by themselves, so a scheduler may do this work beside
//! its steps.
use crate::profile::{Profile, StepWork};
use lmetric_core::CoreError;
use lmetric_core::estimate::survival::Survival;
use lmetric_core::ids::Seconds;
use lmetric_core::priority::{Settings, TailRate};

/// Requests that end between two updates.
const EVERY: u64 = 16;
/// Weight of the measurements since the last update; the first update takes them in full.
const SMOOTHING: f64 = 0.2;

/// Values that a local order needs.
#[derive(Clone, Copy, Debug)]
pub(super) enum Learns {
    Nothing,
    /// Lengths of answers, and the time per token.
    Lengths,
    /// `Lengths`, and gamma from the tail of end-to-end times if the settings adapt it.
    Tail(Settings),
}

/// Learned values as of the last update.
#[derive(Clone, Debug)]
pub(super) struct Learned {
    /// Gamma in 1/s: see [`lmetric_core::priority`].
    pub gamma: f64,
    /// Seconds of the engine's steps per token computed in them, prompt and answer alike. Before
    /// the first update: from a step with the whole token budget of prompt tokens.
    pub token_seconds: Seconds,
    /// Lengths of answers; empty until the first update.
    pub lengths: Survival,
    tail: Option<TailRate>,
    observed: Survival,
    asked: bool,
    seconds: Seconds,
    tokens: u64,
    ended: u64,
}

impl Learned {
    /// Makes the values of an engine that has seen no request.
    ///
    /// # Errors
    /// `BadValue` for a setting of the order that is out of range.
    pub fn new(learns: Learns, profile: &Profile) -> Result<Learned, CoreError> {
        let boost = if let Learns::Tail(settings) = learns { Some(settings) } else { None };
        let mut full = StepWork::default();
        full.add_prefill(0, profile.max_batch_tokens);
        Ok(Learned {
            gamma: boost.map_or(1.0, |settings| settings.gamma),
            token_seconds: profile.step_seconds(&full) / f64::from(profile.max_batch_tokens),
            tail: match boost.and_then(|settings| Some((settings.gamma, settings.adaptive?))) {
                Some((gamma, adaptive)) => Some(TailRate::new(gamma, adaptive)?),
                None => None,
            },
            lengths: Survival::default(),
            observed: Survival::default(),
            asked: !matches!(learns, Learns::Nothing),
            seconds: 0.0,
            tokens: 0,
            ended: 0,
        })
    }

    /// Records steps that took `seconds` and computed `tokens` tokens.
    pub fn steps(&mut self, seconds: Seconds, tokens: u64) {
        if seconds.is_finite() {
            self.seconds += seconds;
            self.tokens += tokens;
        }
    }

    /// Records a request that ended `seconds` after it arrived, with `output_tokens` tokens of
    /// answer.
    pub fn ended(&mut self, seconds: Seconds, output_tokens: u32) {
        self.ended += 1;
        if !self.asked {
            return;
        }
        self.observed.observe(output_tokens);
        if let Some(tail) = &mut self.tail {
            tail.ended(seconds);
        }
    }

    /// Updates the values if an update is due. `before`: requests that had ended before the step.
    /// Returns whether ranks may have changed.
    pub fn look(&mut self, before: u64) -> bool {
        if !self.asked || self.ended / EVERY == before / EVERY {
            return false;
        }
        if self.tokens > 0 {
            let measured = self.seconds / self.tokens as f64;
            let share = if before < EVERY { 1.0 } else { SMOOTHING };
            self.token_seconds += share * (measured - self.token_seconds);
            (self.seconds, self.tokens) = (0.0, 0);
        }
        self.lengths.clone_from(&self.observed);
        if let Some(tail) = &self.tail {
            self.gamma = tail.gamma();
        }
        true
    }

    /// Returns the number of requests that have ended.
    pub fn seen(&self) -> u64 {
        self.ended
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::engine::order::Order;
    use crate::gaps::TokenSlo;
    use crate::profile::tests::round;
    use std::sync::LazyLock;

    /// The values of an engine that has learned nothing yet: gamma 0.1, 0.1 s per token.
    pub(in crate::engine) static NOTHING: LazyLock<Learned> =
        LazyLock::new(|| Learned { token_seconds: 0.1, ..learned("uniboost") });

    fn learned(order: &str) -> Learned {
        let order = Order::named(order, 0, TokenSlo::same(0.1)).unwrap();
        Learned::new(order.rules().learns(), &round()).unwrap()
    }

    #[test]
    fn what_a_token_takes_is_measured_every_sixteenth_request() {
        let mut learned = learned("distboost");
        // 64 tokens: 1 + 0.64 + 64 x 32 x 0.0001 s.
        assert!((learned.token_seconds - 1.8448 / 64.0).abs() < 1e-12);
        let mut ends = |seconds, tokens, requests: u64| {
            learned.steps(seconds, tokens);
            let before = learned.seen();
            (0..requests).for_each(|_| learned.ended(1.0, 7));
            (learned.look(before), learned.token_seconds)
        };
        assert!(!ends(3.0, 100, 15).0);
        let (changed, first) = ends(1.0, 100, 2);
        assert!(changed && (first - 0.02).abs() < 1e-12);
        assert!(!ends(8.0, 100, 14).0);
        let (changed, second) = ends(2.0, 100, 1);
        assert!(changed && (second - (0.02 + 0.2 * (0.05 - 0.02))).abs() < 1e-12);
    }

    #[test]
    fn gamma_is_learned_only_where_the_order_asks() {
        for (name, adapts) in [("uniboost", true), ("uniboost_memguard", false), ("fcfs", false)] {
            let mut learned = learned(name);
            let before = learned.gamma;
            (0..256).for_each(|i| learned.ended(f64::from(i), 7));
            assert_eq!(learned.look(0), name != "fcfs");
            assert_eq!(learned.gamma != before, adapts, "{name}");
            assert_eq!(learned.lengths.seen(), if name == "fcfs" { 0 } else { 256 });
        }
        assert_eq!(NOTHING.gamma, Settings::default().gamma);
    }
}
