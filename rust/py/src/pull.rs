//! When prefixes are pulled, by settings.
use crate::errors::Result;
use lmetric_core::CoreError;
use lmetric_core::router::PullConfig;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use std::collections::BTreeMap;

/// What is meant by these settings; those not given have their defaults.
///
/// # Errors
/// `BadValue` for a setting that there is not, or a value out of range.
pub fn pull_of(settings: Option<&Bound<'_, PyDict>>) -> Result<PullConfig> {
    let mut given: BTreeMap<String, f64> = settings.map(|s| s.extract()).transpose()?.unwrap_or_default();
    let mut pull = PullConfig::default();
    for (name, place) in [
        ("seconds_per_token", &mut pull.seconds_per_token),
        ("fixed_seconds", &mut pull.fixed_seconds),
        ("most_kv_usage", &mut pull.most_kv_usage),
    ] {
        *place = given.remove(name).unwrap_or(*place);
    }
    for (name, place) in [("least_tokens", &mut pull.least_tokens), ("most_pulls", &mut pull.most_pulls)] {
        if let Some(number) = given.remove(name) {
            if number.fract() != 0.0 || !(1.0..=f64::from(u32::MAX)).contains(&number) {
                return Err(bad(name, number, "a whole number of at least 1"));
            }
            *place = number as u32;
        }
    }
    if let Some((name, value)) = given.iter().next() {
        return Err(bad(
            name,
            *value,
            "seconds_per_token, fixed_seconds, least_tokens, most_pulls or most_kv_usage",
        ));
    }
    pull.check()?;
    Ok(pull)
}

fn bad(name: &str, value: f64, expected: &str) -> crate::errors::Error {
    CoreError::BadValue { what: format!("pull: {name}"), got: value.to_string(), expected: expected.into() }
        .into()
}
