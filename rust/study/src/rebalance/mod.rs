//! Rules for studies that move running requests.
mod llumnix;
mod star_current;

pub use llumnix::{Llumnix, LlumnixSettings};
pub use star_current::StarCurrent;

use crate::forecast::Given;
use lmetric_core::CoreError;
use lmetric_core::expr::nearest;
use lmetric_core::rebalance::RebalanceConfig;
use lmetric_core::settings::SettingsReader;

/// The rules of this crate. `star_oracle` is the core's `star` with known lengths.
pub const NAMES: [&str; 3] = ["star_current", "star_oracle", "llumnix"];

/// Returns the settings of this rule: one of [`NAMES`], or the core's `star`.
///
/// # Errors
/// `UnknownName` for another rule; `BadValue` for a setting of the wrong type or out of its range.
pub fn named(name: &str, settings: &mut SettingsReader) -> Result<RebalanceConfig, CoreError> {
    Ok(match name {
        "star_current" => {
            let config: RebalanceConfig = settings.read()?;
            RebalanceConfig { rule: Box::new(StarCurrent::new(settings.read()?)?), ..config }
        }
        "star_oracle" => {
            RebalanceConfig { forecast: Box::new(Given), ..RebalanceConfig::named("star", settings)? }
        }
        "llumnix" => {
            let config: RebalanceConfig = settings.read()?;
            RebalanceConfig { rule: Box::new(Llumnix::new(settings.read()?)?), ..config }
        }
        "star" => RebalanceConfig::named(name, settings)?,
        _ => {
            let nearest = nearest(name, NAMES.into_iter().chain(["star"]));
            return Err(CoreError::UnknownName { kind: "rebalancer".into(), name: name.into(), nearest });
        }
    })
}
