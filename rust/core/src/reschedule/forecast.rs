//! Forecasts: how many tokens running requests still have to generate (STAR, section 4).
use crate::error::CoreError;
use crate::estimate::remaining::{Remaining, RemainingCurve};
use crate::estimate::turns::Turn;
use std::fmt::Debug;

/// A running request whose remaining length is asked for, as it was at its last prediction.
#[derive(Clone, Copy, Debug)]
pub struct Running {
    /// Its ticket.
    pub ticket: u64,
    /// Number of the prediction: 0 before the first token, and 1 more after each interval.
    pub interval: u64,
    /// Output tokens that it had then.
    pub output_tokens: f64,
    /// Its prompt, tokens.
    pub prompt_tokens: f64,
    /// Output tokens that it will get in all (in simulations) or may get at most; `None`: unknown.
    pub expected_output_tokens: Option<f64>,
    /// Whether `expected_output_tokens` is a limit, and not the truth.
    pub expected_is_limit: bool,
    /// Its conversation; all 0 unless the forecast [reads turns](Forecast::reads_turns).
    pub turn: Turn,
}

impl Running {
    /// Output tokens that truly are to come, if the request says it; else 0.
    pub fn given(&self) -> f64 {
        self.expected_output_tokens.map_or(0.0, |all| (all - self.output_tokens).max(0.0))
    }
}

/// Predicts the remaining lengths of running requests.
pub trait Forecast: Debug + Send + Sync {
    /// Whether it reads the curve of answer lengths, which is then learned.
    fn reads_curve(&self) -> bool {
        false
    }

    /// Whether it reads which request continues which conversation, which is then remembered.
    fn reads_turns(&self) -> bool {
        false
    }

    /// Appends one prediction for each of `running` to `remaining`. All running requests are asked
    /// for in each round; a forecast that is slow keeps its predictions by ticket and interval.
    ///
    /// # Errors
    /// Whatever keeps it from predicting; the round then moves nothing.
    fn predict(
        &mut self,
        running: &[Running],
        curve: Option<&RemainingCurve>,
        remaining: &mut Vec<Remaining>,
    ) -> Result<(), CoreError>;

    /// The same forecast for another router, without what it keeps of requests.
    fn fresh(&self) -> Box<dyn Forecast>;
}

/// Counts answers: the mean of what answers as long as this one already still had to come, by the
/// learned curve; never more than the request allows.
#[derive(Clone, Copy, Debug, Default)]
pub struct Curve;

impl Forecast for Curve {
    fn reads_curve(&self) -> bool {
        true
    }

    fn predict(
        &mut self,
        running: &[Running],
        curve: Option<&RemainingCurve>,
        remaining: &mut Vec<Remaining>,
    ) -> Result<(), CoreError> {
        remaining.extend(running.iter().map(|request| {
            let limit = request.expected_output_tokens.filter(|_| request.expected_is_limit);
            curve.map_or(Remaining::exact(0.0), |curve| {
                curve.at(request.output_tokens, limit.unwrap_or(f64::INFINITY))
            })
        }));
        Ok(())
    }

    fn fresh(&self) -> Box<dyn Forecast> {
        Box::new(*self)
    }
}
