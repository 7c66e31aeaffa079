//! How requests are cut, by name and settings.
use crate::errors::Result;
use lmetric_core::CoreError;
use lmetric_core::error::whole;
use lmetric_core::estimate::output_length::{MARGIN_TOKENS, QUANTILE};
use lmetric_core::router::{Apart, Lengths, Libra, Mean, Split};
use lmetric_core::split::{Settings, apart};
use pyo3::prelude::*;
use pyo3::types::PyDict;

/// Libra's settings, by name.
const LIBRA: &str = "parts, probes, epsilon, least_gain, least_tokens, transfer_seconds_per_token, transfer_fixed_seconds, quantile, \
    margin_tokens or lengths_given";

/// Those of `apart`.
const APART: &str = "recent_seconds, least_gain_seconds, transfer_seconds_per_token, transfer_fixed_seconds, most_stall_seconds, \
    prior_tokens or lengths_given";

/// The split of this name with its settings.
///
/// # Errors
/// `BadValue` for a name or a setting that there is not, or a value out of range.
pub fn split_of(kind: &str, settings: Option<&Bound<'_, PyDict>>) -> Result<Split> {
    let mut given: Vec<(String, f64)> = match settings {
        Some(settings) => {
            settings.extract::<std::collections::BTreeMap<String, f64>>()?.into_iter().collect()
        }
        None => Vec::new(),
    };
    let mut take = |name: &str| {
        let place = given.iter().position(|(known, _)| known == name)?;
        Some(given.remove(place).1)
    };
    let number = |name: &str, value: Option<f64>, plain: u32| {
        value.map_or(Ok(plain), |value| whole(&format!("split: {name}"), value))
    };
    let split = match kind {
        "none" => Split::None,
        "libra" => {
            let plain = Settings::default();
            let settings = Settings {
                probes: number("probes", take("probes"), plain.probes)?,
                epsilon: take("epsilon").unwrap_or(plain.epsilon),
                // Below zero: every balance is a cut.
                least_gain: take("least_gain").map_or(plain.least_gain, |gain| (gain >= 0.0).then_some(gain)),
                least_tokens: number("least_tokens", take("least_tokens"), plain.least_tokens)?,
                transfer_seconds_per_token: take("transfer_seconds_per_token")
                    .unwrap_or(plain.transfer_seconds_per_token),
                transfer_fixed_seconds: take("transfer_fixed_seconds")
                    .unwrap_or(plain.transfer_fixed_seconds),
                cuts: plain.cuts,
            };
            let quantile = take("quantile").unwrap_or(QUANTILE);
            let margin_tokens = number("margin_tokens", take("margin_tokens"), MARGIN_TOKENS)?;
            let lengths = match take("lengths_given").unwrap_or(0.0) {
                0.0 => Lengths::Estimated { quantile, margin_tokens },
                _ => Lengths::Given,
            };
            let parts = number("parts", take("parts"), 2)?;
            Split::Libra(Libra { settings, lengths, parts })
        }
        "apart" => {
            let plain = apart::Settings::default();
            let settings = apart::Settings {
                recent_seconds: take("recent_seconds").unwrap_or(plain.recent_seconds),
                least_gain_seconds: take("least_gain_seconds").unwrap_or(plain.least_gain_seconds),
                transfer_seconds_per_token: take("transfer_seconds_per_token")
                    .unwrap_or(plain.transfer_seconds_per_token),
                transfer_fixed_seconds: take("transfer_fixed_seconds")
                    .unwrap_or(plain.transfer_fixed_seconds),
                most_stall_seconds: take("most_stall_seconds").unwrap_or(plain.most_stall_seconds),
            };
            let prior = take("prior_tokens").map(|n| whole("split: prior_tokens", n)).transpose()?;
            let lengths = match take("lengths_given").unwrap_or(0.0) {
                0.0 => prior.map_or(Mean::default(), |prior_tokens| Mean::Learned { prior_tokens }),
                _ => Mean::Given,
            };
            Split::Apart(Apart { settings, lengths })
        }
        "force" => Split::ForceAt(take("at").unwrap_or(f64::NAN)),
        other => {
            return Err(bad("split", format!("{other:?}"), "\"none\", \"libra\", \"apart\" or \"force\""));
        }
    };
    if let Some((name, _)) = given.first() {
        let known = match kind {
            "force" => "at",
            "libra" => LIBRA,
            "apart" => APART,
            _ => "nothing",
        };
        return Err(bad("split", format!("{name} with {kind:?}"), known));
    }
    split.check()?;
    Ok(split)
}

fn bad(what: &str, got: String, expected: &str) -> crate::errors::Error {
    CoreError::BadValue { what: what.into(), got, expected: expected.into() }.into()
}
