//! What an engine learns of its own requests: what a token takes it, how long requests take from end to end, how long answers are.
//!
//! It is taken over with every [`EVERY`]th request that ends, and what waits is ranked anew then: between two of these ranks do not move by themselves, so that a
//! scheduler may do it beside its steps.
use crate::profile::{Profile, StepWork};
use lmetric_core::CoreError;
use lmetric_core::estimate::survival::Survival;
use lmetric_core::ids::Seconds;
use lmetric_core::priority::{Settings, TailRate};

/// Requests that end between two looks.
const EVERY: u64 = 16;
/// The share of what was measured since the last look that is taken over; of the first, all.
const SMOOTHING: f64 = 0.2;

/// What a local order needs to be learned.
#[derive(Clone, Copy, Debug)]
pub(super) enum Learns {
    Nothing,
    /// The lengths of answers, and what a token takes.
    Lengths,
    /// The same, and gamma from the tail of end-to-end times if the settings adapt it.
    Tail(Settings),
}

/// What was learned, as it was when it was last taken over.
#[derive(Clone, Debug)]
pub(super) struct Learned {
    /// 1/s: see [`lmetric_core::priority`].
    pub gamma: f64,
    /// Seconds of the engine's steps for each token computed in them, prompt and answer alike. Until the first look: a step of the whole token budget of
    /// prompt tokens.
    pub token_seconds: Seconds,
    /// How long answers are; nothing was seen until the first look.
    pub lengths: Survival,
    tail: Option<TailRate>,
    observed: Survival,
    asked: bool,
    seconds: Seconds,
    tokens: u64,
    ended: u64,
}

impl Learned {
    /// # Errors
    /// `BadValue` for an order's setting out of its range.
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

    /// Steps took `seconds`, and `tokens` were computed in them.
    pub fn steps(&mut self, seconds: Seconds, tokens: u64) {
        if seconds.is_finite() {
            self.seconds += seconds;
            self.tokens += tokens;
        }
    }

    /// A request ended, `seconds` after it arrived, with an answer of so many tokens.
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

    /// Takes over what was learned where it is time to, `before` requests having ended before the step. Whether ranks may be others now.
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

    /// Requests that have ended.
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

    /// Of an engine that has learned nothing yet: gamma 0.1, 0.1 s a token.
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
