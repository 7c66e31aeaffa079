//! Rules for moving running requests, by name and settings.
use crate::errors::Result;
use crate::forecast::PythonForecast;
use crate::settings;
use lmetric_core::rebalance::RebalanceConfig;
use lmetric_core::rebalance::{Curve, Forecast};
use lmetric_core::{CoreError, Maturity};
use lmetric_study::{forecast, rebalance};
use pyo3::prelude::*;
use pyo3::types::PyDict;

/// Rule for moving running requests, and its forecast if that is a Python predictor.
pub type Configured = (RebalanceConfig, Option<PythonForecast>);

/// Returns the rule with this name and these settings; `None` for `"none"`. `offers`: the least
/// mature rules and forecasts that are accepted. If `simulated`, each round asks a Python
/// predictor. Otherwise, the caller that begins the round asks it: see [`PythonForecast::refresh`].
///
/// # Errors
/// `UnknownName` for a rule, `BadValue` for an unknown setting or a value out of range, `Immature`
/// for a rule or a forecast that is not offered.
pub fn rebalance_of(
    offers: Maturity,
    name: &str,
    settings: Option<&Bound<'_, PyDict>>,
    simulated: bool,
) -> Result<Option<Configured>> {
    let mut reader = settings::reader(&format!("rebalance {name}"), settings)?;
    if name == "none" {
        reader.finish()?;
        return Ok(None);
    }
    let offered = |kind: &str, name: &str, for_studies: bool| match offers < Maturity::Study && for_studies {
        false => Ok(()),
        true => Err(CoreError::Immature { kind: kind.into(), name: name.into(), maturity: Maturity::Study }),
    };
    // The forecast may be a Python object, which no struct of the core holds.
    reader.skip("forecast");
    let seed: u32 = reader.one("forecast_seed")?.unwrap_or(0);
    let mut config = rebalance::named(name, &mut reader)?;
    offered("rebalance", name, rebalance::NAMES.contains(&name))?;
    reader.finish()?;
    let mut predictor = None;
    if let Some(wanted) = settings.map(|given| given.get_item("forecast")).transpose()?.flatten() {
        match wanted.extract::<String>() {
            Ok(name) if name == "curve" => config.forecast = Box::new(Curve),
            Ok(name) => {
                config.forecast = forecast::named(&name, seed.into())?;
                offered("forecast of lengths", &name, true)?;
            }
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
