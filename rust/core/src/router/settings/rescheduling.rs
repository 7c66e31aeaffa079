//! How running requests are moved.
use crate::error::CoreError;
use crate::estimate::length_error::{Bins, LengthError, Predictor};
use crate::ids::Seconds;
use crate::reschedule::{INTERVAL_STEPS, Llumnix, LlumnixSettings, Rescheduler, Star, StarSettings};
use crate::suggest::nearest;

/// Where the remaining length of a running request comes from.
#[derive(Clone, Debug, Default)]
pub enum Forecast {
    /// The mean of what answers as long as it already is still had to come, by the learned curve;
    /// never more than the request allows.
    #[default]
    Curve,
    /// The request says it: the oracle of a simulation.
    Given,
    /// The same, known by bins only (STAR, Table 3).
    Bins(Bins),
    /// The same, with the errors of a predictor (STAR, Table 1 and Figure 7).
    Predictor(LengthError),
}

impl Forecast {
    /// By name: `curve`, `given`, `bins_2`, `bins_4`, `bins_6`, or a predictor's (`llm_native`,
    /// `pia`, `mu_serve`, `tetri_infer`), whose errors `seed` draws.
    ///
    /// # Errors
    /// `BadValue` for another name.
    pub fn named(name: &str, seed: u64) -> Result<Forecast, CoreError> {
        Ok(match name {
            "curve" => Forecast::Curve,
            "given" => Forecast::Given,
            "bins_2" => Forecast::Bins(Bins::table_3(2)?),
            "bins_4" => Forecast::Bins(Bins::table_3(4)?),
            "bins_6" => Forecast::Bins(Bins::table_3(6)?),
            other => {
                match Predictor::from_name(other) {
                    Ok(predictor) => Forecast::Predictor(LengthError::new(predictor, PERSISTENCE, seed)?),
                    Err(_) => {
                        return Err(CoreError::BadValue {
                        what: "forecast of lengths".into(),
                        got: format!("{other:?}"),
                        expected: "curve, given, bins_2, bins_4, bins_6, llm_native, pia, mu_serve or tetri_infer".into(),
                    });
                    }
                }
            }
        })
    }
}

/// Share of a predictor's error that is a request's own and stays; the paper does not say.
const PERSISTENCE: f64 = 0.5;

/// How running requests are moved.
pub struct Rescheduling {
    /// The rule.
    pub rule: Box<dyn Rescheduler>,
    /// What it believes of lengths.
    pub forecast: Forecast,
    /// Output tokens of a request after which its length is predicted anew (STAR, section 5.3: 20).
    pub repredict_tokens: u32,
    /// Whether the expected length of a request is the most that it may get; else it is what it
    /// will get, which the curve must not know.
    pub expected_is_limit: bool,
}

impl Rescheduling {
    /// Whether it needs the lengths of answers to be learned.
    pub fn learns_lengths(&self) -> bool {
        matches!(self.forecast, Forecast::Curve)
    }
}

/// The settings of [`Rescheduling`], to be told, kept and copied.
#[derive(Clone, Debug)]
pub struct RescheduleConfig {
    /// The rule with its settings.
    pub rule: Rule,
    /// See [`Rescheduling::forecast`].
    pub forecast: Forecast,
    /// See [`Rescheduling::repredict_tokens`].
    pub repredict_tokens: u32,
    /// See [`Rescheduling::expected_is_limit`].
    pub expected_is_limit: bool,
    /// Seconds between two rounds. 0.5: about [`INTERVAL_STEPS`] steps of 25 ms.
    pub period_seconds: Seconds,
}

/// A rule with its settings.
#[derive(Clone, Copy, Debug)]
pub enum Rule {
    /// STAR.
    Star(StarSettings),
    /// As Llumnix does it.
    Llumnix(LlumnixSettings),
}

impl RescheduleConfig {
    /// The names that [`RescheduleConfig::named`] takes.
    pub const NAMES: [&str; 4] = ["star", "star_current", "star_oracle", "llumnix"];

    /// By name, at its defaults: `star` predicts by the learned curve, `star_current` looks at
    /// present loads alone, `star_oracle` is told lengths.
    ///
    /// # Errors
    /// `UnknownName` with the nearest one.
    pub fn named(name: &str) -> Result<RescheduleConfig, CoreError> {
        let plain = RescheduleConfig {
            rule: Rule::Star(StarSettings::default()),
            forecast: Forecast::Curve,
            repredict_tokens: INTERVAL_STEPS,
            expected_is_limit: true,
            period_seconds: 0.5,
        };
        Ok(match name {
            "star" => plain,
            "star_current" => {
                let settings = StarSettings { prediction: false, ..StarSettings::default() };
                RescheduleConfig { rule: Rule::Star(settings), ..plain }
            }
            "star_oracle" => RescheduleConfig { forecast: Forecast::Given, ..plain },
            "llumnix" => RescheduleConfig { rule: Rule::Llumnix(LlumnixSettings::default()), ..plain },
            _ => {
                return Err(CoreError::UnknownName {
                    kind: "rescheduler".into(),
                    name: name.into(),
                    nearest: nearest(name, RescheduleConfig::NAMES),
                });
            }
        })
    }

    /// Ready to serve.
    ///
    /// # Errors
    /// `BadValue` for a setting out of its range.
    pub fn build(&self) -> Result<Rescheduling, CoreError> {
        if !(self.period_seconds >= 1e-3 && self.period_seconds <= 1e9) {
            return Err(CoreError::BadValue {
                what: "rescheduling: period_seconds".into(),
                got: self.period_seconds.to_string(),
                expected: "0.001 to 1e9 seconds".into(),
            });
        }
        let rule: Box<dyn Rescheduler> = match self.rule {
            Rule::Star(settings) => Box::new(Star::new(settings)?),
            Rule::Llumnix(settings) => Box::new(Llumnix::new(settings)?),
        };
        Ok(Rescheduling {
            rule,
            forecast: self.forecast.clone(),
            repredict_tokens: self.repredict_tokens,
            expected_is_limit: self.expected_is_limit,
        })
    }
}
