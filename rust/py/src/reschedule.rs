//! How running requests are moved, by name and settings.
use crate::errors::Result;
use crate::forecast::PythonForecast;
use lmetric_core::CoreError;
use lmetric_core::error::whole;
use lmetric_core::reschedule::{Curve, Forecast, Weights};
use lmetric_core::router::{RescheduleConfig, Rule};
use lmetric_study::forecast;
use pyo3::prelude::*;
use pyo3::types::PyDict;

/// Settings of all rules, of STAR's and of Llumnix'.
const ALL: &str = "forecast, forecast_seed, repredict_tokens, period_seconds, most_moves";
const STAR: &str = "horizon_steps, points, half_life_steps, threshold, migration_seconds, migration_seconds_per_token or caution";
const LLUMNIX: &str = "source_below_steps or target_above_steps";

/// How running requests are moved, and the forecast again if it is a predictor in Python.
pub type Rebalancing = (RescheduleConfig, Option<PythonForecast>);

/// The rule of this name with its settings; `None` for `"none"`. `simulated`: a predictor in Python is
/// asked in each round; else by whoever begins the round, see [`PythonForecast::refresh`].
///
/// # Errors
/// `UnknownName` for a rule, `BadValue` for a setting that there is not, or a value out of range.
pub fn reschedule_of(
    name: &str,
    settings: Option<&Bound<'_, PyDict>>,
    simulated: bool,
) -> Result<Option<Rebalancing>> {
    let mut predictor = None;
    let given = settings.map(|settings| settings.copy()).transpose()?;
    let take = |name: &str| -> Result<Option<Bound<'_, PyAny>>> {
        let Some(given) = &given else { return Ok(None) };
        let value = given.get_item(name)?;
        if value.is_some() {
            given.del_item(name)?;
        }
        Ok(value)
    };
    let number = |name: &str, plain: f64| -> Result<f64> {
        take(name)?.map_or(Ok(plain), |value| Ok(value.extract::<f64>()?))
    };
    let count = |name: &str, plain: u32| -> Result<u32> {
        take(name)?.map_or(Ok(plain), |value| Ok(whole(&format!("reschedule: {name}"), value.extract()?)?))
    };
    let moves =
        |plain: usize| count("most_moves", u32::try_from(plain).unwrap_or(u32::MAX)).map(|n| n as usize);
    let config = if name == "none" {
        None
    } else {
        let oracle = name == "star_oracle";
        let mut config = RescheduleConfig::named(if oracle { "star" } else { name })?;
        if oracle {
            config.forecast = Box::new(forecast::Given);
        }
        let seed = count("forecast_seed", 0)?.into();
        if let Some(wanted) = take("forecast")? {
            match wanted.extract::<String>() {
                Ok(name) if name == "curve" => config.forecast = Box::new(Curve),
                Ok(name) => config.forecast = forecast::named(&name, seed)?,
                Err(_) => {
                    let made = PythonForecast::new(&wanted, simulated)?;
                    config.forecast = made.fresh();
                    predictor = Some(made);
                }
            }
        }
        config.repredict_tokens = count("repredict_tokens", config.repredict_tokens)?;
        config.period_seconds = number("period_seconds", config.period_seconds)?;
        match &mut config.rule {
            Rule::Star(star) => {
                star.most_moves = moves(star.most_moves)?;
                star.horizon_steps = count("horizon_steps", star.horizon_steps)?;
                star.points = count("points", star.points)?;
                if let Some(steps) = take("half_life_steps")? {
                    let half_life_steps: f64 = steps.extract()?;
                    star.weights = if half_life_steps == 0.0 {
                        Weights::Uniform
                    } else {
                        Weights::Geometric { half_life_steps }
                    };
                }
                star.threshold = number("threshold", star.threshold)?;
                star.migration_seconds = number("migration_seconds", star.migration_seconds)?;
                star.migration_seconds_per_token =
                    number("migration_seconds_per_token", star.migration_seconds_per_token)?;
                star.caution = number("caution", star.caution)?;
            }
            Rule::Llumnix(llumnix) => {
                llumnix.most_moves = moves(llumnix.most_moves)?;
                llumnix.source_below_steps = number("source_below_steps", llumnix.source_below_steps)?;
                llumnix.target_above_steps = number("target_above_steps", llumnix.target_above_steps)?;
            }
        }
        config.build()?;
        Some((config, predictor))
    };
    let left = given.as_ref().and_then(|given| given.keys().iter().next());
    if let Some(key) = left {
        let expected = match &config {
            None => "nothing".to_string(),
            Some((RescheduleConfig { rule: Rule::Star(_), .. }, _)) => format!("{ALL}, {STAR}"),
            Some(_) => format!("{ALL}, {LLUMNIX}"),
        };
        let got = format!("{key} with {name:?}");
        return Err(CoreError::BadValue { what: "reschedule".into(), got, expected }.into());
    }
    Ok(config)
}
