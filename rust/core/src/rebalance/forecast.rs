//! Forecasts of the number of tokens that running requests still have to generate (STAR, section
//! 4).
use crate::error::CoreError;
use crate::estimate::{Remaining, RemainingCurve, Turn};
use std::fmt::Debug;

/// A running request at its last prediction, for which a forecast is requested.
#[derive(Clone, Copy, Debug)]
pub struct Running {
    /// Ticket of the request.
    pub ticket: u64,
    /// Number of the prediction: 0 before the first token, plus 1 after each interval.
    pub interval: u64,
    /// Output tokens generated at that time.
    pub output_tokens: f64,
    /// Prompt tokens.
    pub prompt_tokens: f64,
    /// Total output tokens, as a known length (in simulations) or as a limit; `None`: unknown.
    pub expected_output_tokens: Option<f64>,
    /// Whether `expected_output_tokens` is a limit and not the true length.
    pub expected_is_limit: bool,
    /// Conversation of the request; all 0 unless the forecast [reads turns](Forecast::reads_turns).
    pub turn: Turn,
}

impl Running {
    /// Returns the true number of remaining output tokens, if the request states it, else 0.
    pub fn given(&self) -> f64 {
        self.expected_output_tokens.map_or(0.0, |all| (all - self.output_tokens).max(0.0))
    }
}

/// A predictor of the remaining lengths of running requests.
pub trait Forecast: Debug + Send + Sync {
    /// Returns whether the forecast reads the curve of answer lengths. If so, the router learns it.
    fn reads_curve(&self) -> bool {
        false
    }

    /// Returns whether the forecast reads conversation turns. If so, the router keeps them.
    fn reads_turns(&self) -> bool {
        false
    }

    /// Appends one prediction for each of `running` to `remaining`. Each round passes all running
    /// requests; a slow forecast can cache its predictions by ticket and interval.
    ///
    /// # Errors
    /// Any failure to predict. The round then moves nothing.
    fn predict(
        &mut self,
        running: &[Running],
        curve: Option<&RemainingCurve>,
        remaining: &mut Vec<Remaining>,
    ) -> Result<(), CoreError>;

    /// Creates the same forecast for another router, without cached predictions.
    fn fresh(&self) -> Box<dyn Forecast>;
}

/// Forecast from answer counts: the mean remaining tokens of answers at least as long as this one,
/// by the learned curve. Never more than the request allows.
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
