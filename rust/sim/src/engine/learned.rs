//! Values that an engine learns from its own requests: time per token, end-to-end times, lengths of
//! answers.
//!
//! They are updated at every sixteenth request that ends ([`EngineBoost`]), and the queue is ranked
//! again then. Between two updates, ranks do not change by themselves, so a scheduler may do this
//! work beside its steps.
use crate::profile::{Profile, StepWork};
use lmetric_core::CoreError;
use lmetric_core::estimate::survival::Survival;
use lmetric_core::ids::Seconds;
use lmetric_core::priority::{EngineBoost, Settings};

/// Values that a local order needs.
#[derive(Clone, Copy, Debug)]
pub(super) enum Learns {
    Nothing,
    /// Lengths of answers, and the time per token.
    Lengths,
    /// `Lengths`, and gamma from the tail of end-to-end times if the settings adapt it.
    Tail(Settings, TokenTime),
}

/// The seconds that count for a token of work; the UniBoost paper names none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TokenTime {
    /// The token's share of its step: the engine's time over all tokens computed.
    Share,
    /// The whole step, which is the time between two tokens of one answer.
    Step,
}

/// Learned values as of the last update.
#[derive(Clone, Debug)]
pub(super) struct Learned {
    /// Gamma and the time per token. Before the first update, the step is one with the whole token
    /// budget of prompt tokens.
    boost: EngineBoost,
    /// Lengths of answers; empty until the first update.
    pub lengths: Survival,
    observed: Survival,
    asked: bool,
    time: TokenTime,
}

impl Learned {
    /// Makes the values of an engine that has seen no request.
    ///
    /// # Errors
    /// `BadValue` for a setting of the order that is out of range.
    pub fn new(learns: Learns, profile: &Profile) -> Result<Learned, CoreError> {
        let (settings, time) = match learns {
            Learns::Tail(settings, time) => (settings, time),
            _ => (Settings { adaptive: None, ..Settings::default() }, TokenTime::Share),
        };
        let mut full = StepWork::default();
        full.add_prefill(0, profile.max_batch_tokens);
        let tokens = if time == TokenTime::Step { 1 } else { profile.max_batch_tokens };
        let token_seconds = profile.step_seconds(&full) / f64::from(tokens);
        Ok(Learned {
            boost: EngineBoost::new(settings, token_seconds)?,
            lengths: Survival::default(),
            observed: Survival::default(),
            asked: !matches!(learns, Learns::Nothing),
            time,
        })
    }

    /// Returns gamma in 1/s: see [`lmetric_core::priority`].
    pub fn gamma(&self) -> f64 {
        self.boost.gamma()
    }

    /// Returns the seconds that count for a token.
    pub fn token_seconds(&self) -> Seconds {
        self.boost.token_seconds()
    }

    /// Records `steps` steps that took `seconds` and computed `tokens` tokens, all together.
    pub fn steps(&mut self, seconds: Seconds, tokens: u64, steps: u32) {
        self.boost.stepped(seconds, if self.time == TokenTime::Step { steps.into() } else { tokens });
    }

    /// Records a request that ended `seconds` after it arrived, with `output_tokens` tokens of
    /// answer.
    pub fn ended(&mut self, seconds: Seconds, output_tokens: u32) {
        if self.asked {
            self.boost.ended(seconds);
            self.observed.observe(output_tokens, false);
        }
    }

    /// Updates the values if an update is due. Returns whether ranks may have changed.
    pub fn look(&mut self) -> bool {
        let changed = self.boost.look();
        if changed {
            self.lengths.clone_from(&self.observed);
        }
        changed
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
    pub(in crate::engine) static NOTHING: LazyLock<Learned> = LazyLock::new(|| {
        let boost = EngineBoost::new(Settings::default(), 0.1).unwrap();
        Learned { boost, ..learned("uniboost") }
    });

    fn learned(order: &str) -> Learned {
        let order = Order::named(order, 0, TokenSlo::same(0.1)).unwrap();
        Learned::new(order.rules().learns(), &round()).unwrap()
    }

    #[test]
    fn what_a_token_takes_is_measured_every_sixteenth_request() {
        let mut learned = learned("distboost");
        // 64 tokens: 1 + 0.64 + 64 x 32 x 0.0001 s.
        assert!((learned.token_seconds() - 1.8448 / 64.0).abs() < 1e-12);
        let mut ends = |seconds, tokens, requests: u64| {
            learned.steps(seconds, tokens, 1);
            (0..requests).for_each(|_| learned.ended(1.0, 7));
            (learned.look(), learned.token_seconds())
        };
        assert!(!ends(3.0, 100, 15).0);
        let (changed, first) = ends(1.0, 100, 2);
        assert!(changed && (first - 0.02).abs() < 1e-12);
        assert!(!ends(8.0, 100, 14).0);
        let (changed, second) = ends(2.0, 100, 1);
        assert!(changed && (second - (0.02 + 0.2 * (0.05 - 0.02))).abs() < 1e-12);
    }

    #[test]
    fn a_token_may_count_as_its_whole_step() {
        let mut learned = learned("uniboost(whole_steps=1)");
        assert!((learned.token_seconds() - 1.8448).abs() < 1e-12);
        learned.steps(6.0, 100, 3);
        (0..16).for_each(|_| learned.ended(1.0, 7));
        assert!(learned.look() && (learned.token_seconds() - 2.0).abs() < 1e-12);
    }

    #[test]
    fn gamma_is_learned_only_where_the_order_asks() {
        for (name, adapts) in [("uniboost", true), ("uniboost_memguard", false), ("fcfs", false)] {
            let mut learned = learned(name);
            let before = learned.gamma();
            (0..256).for_each(|i| learned.ended(f64::from(i), 7));
            assert_eq!(learned.look(), name != "fcfs");
            assert_eq!(learned.gamma() != before, adapts, "{name}");
            assert_eq!(learned.lengths.seen(), if name == "fcfs" { 0 } else { 256 });
        }
        assert_eq!(NOTHING.gamma(), Settings::default().gamma);
    }
}
