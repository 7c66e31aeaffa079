//! How running requests are moved, by name and settings.
use crate::errors::Result;
use lmetric_core::CoreError;
use lmetric_core::error::whole;
use lmetric_core::reschedule::Weights;
use lmetric_core::router::{Forecast, RescheduleConfig, Rule};
use pyo3::prelude::*;
use pyo3::types::PyDict;

/// Settings of all rules, of STAR's and of Llumnix'.
const ALL: &str = "forecast, forecast_seed, repredict_tokens, period_seconds, most_moves";
const STAR: &str = "horizon_steps, points, half_life_steps, threshold, migration_seconds, migration_seconds_per_token or caution";
const LLUMNIX: &str = "source_below_steps or target_above_steps";

/// The rule of this name with its settings; `None` for `"none"`.
///
/// # Errors
/// `UnknownName` for a rule, `BadValue` for a setting that there is not, or a value out of range.
pub fn reschedule_of(name: &str, settings: Option<&Bound<'_, PyDict>>) -> Result<Option<RescheduleConfig>> {
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
        let mut config = RescheduleConfig::named(name)?;
        let seed = count("forecast_seed", 0)?.into();
        if let Some(forecast) = take("forecast")? {
            config.forecast = Forecast::named(&forecast.extract::<String>()?, seed)?;
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
        Some(config)
    };
    let left = given.as_ref().and_then(|given| given.keys().iter().next());
    if let Some(key) = left {
        let expected = match &config {
            None => "nothing".to_string(),
            Some(RescheduleConfig { rule: Rule::Star(_), .. }) => format!("{ALL}, {STAR}"),
            Some(_) => format!("{ALL}, {LLUMNIX}"),
        };
        let got = format!("{key} with {name:?}");
        return Err(CoreError::BadValue { what: "reschedule".into(), got, expected }.into());
    }
    Ok(config)
}
