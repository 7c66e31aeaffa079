//! Rules for moving running requests, by name and settings.
use crate::errors::Result;
use crate::forecast::PythonForecast;
use crate::settings;
use lmetric_core::reschedule::{Curve, Forecast, StarSettings};
use lmetric_core::router::{RescheduleConfig, Rule};
use lmetric_study::forecast;
use pyo3::prelude::*;
use pyo3::types::PyDict;

/// Rule for moving running requests, and its forecast if that is a Python predictor.
pub type Rebalancing = (RescheduleConfig, Option<PythonForecast>);

/// Returns the rule with this name and these settings; `None` for `"none"`. If `simulated`, each
/// round asks a Python predictor. Otherwise, the caller that begins the round asks it: see
/// [`PythonForecast::refresh`].
///
/// # Errors
/// `UnknownName` for a rule, `BadValue` for an unknown setting or a value out of range.
pub fn reschedule_of(
    name: &str,
    settings: Option<&Bound<'_, PyDict>>,
    simulated: bool,
) -> Result<Option<Rebalancing>> {
    let mut reader = settings::reader(&format!("rebalance {name}"), settings)?;
    if name == "none" {
        reader.finish()?;
        return Ok(None);
    }
    let oracle = name == "star_oracle";
    let named = RescheduleConfig::named(if oracle { "star" } else { name })?;
    // The forecast may be a Python object, which no struct of the core holds.
    reader.skip("forecast");
    let seed: u32 = reader.one("forecast_seed")?.unwrap_or(0);
    let mut config: RescheduleConfig = reader.read()?;
    config.rule = match named.rule {
        Rule::Star(StarSettings { prediction, .. }) => {
            Rule::Star(StarSettings { prediction, ..reader.read()? })
        }
        Rule::Llumnix(_) => Rule::Llumnix(reader.read()?),
    };
    reader.finish()?;
    if oracle {
        config.forecast = Box::new(forecast::Given);
    }
    let mut predictor = None;
    if let Some(wanted) = settings.map(|given| given.get_item("forecast")).transpose()?.flatten() {
        match wanted.extract::<String>() {
            Ok(name) if name == "curve" => config.forecast = Box::new(Curve),
            Ok(name) => config.forecast = forecast::named(&name, seed.into())?,
            Err(_) => {
                let made = PythonForecast::new(&wanted, simulated)?;
                config.forecast = made.fresh();
                predictor = Some(made);
            }
        }
    }
    config.build()?;
    Ok(Some((config, predictor)))
}
