//! What requests are ordered by, by name and settings.
use crate::errors::Result;
use lmetric_core::CoreError;
use lmetric_core::priority::Settings;
use lmetric_core::router::Priorities;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use std::collections::BTreeMap;

/// UniBoost's settings, by name.
const UNIBOOST: &str = "gamma, adaptive, window, smoothing, least_gamma, most_gamma, bin_tokens, most_boost_seconds or clock_offset_seconds";

/// What is meant by a name with its settings; `none`: nothing.
///
/// # Errors
/// `BadValue` for a name or a setting that there is not, or a value out of range.
pub fn priorities_of(kind: &str, settings: Option<&Bound<'_, PyDict>>) -> Result<Option<Priorities>> {
    let mut given: BTreeMap<String, f64> = settings.map(|s| s.extract()).transpose()?.unwrap_or_default();
    let mut take = |name: &str| given.remove(name);
    let (priorities, known) = match kind {
        "none" => (None, "nothing"),
        "vtc" => (Some(Priorities::Vtc), "nothing"),
        "uniboost" => {
            let mut settings = Settings::default();
            settings.gamma = take("gamma").unwrap_or(settings.gamma);
            if let Some(adaptive) = &mut settings.adaptive {
                if let Some(window) = take("window") {
                    adaptive.window = window as u32;
                    adaptive.least = adaptive.least.min(adaptive.window);
                }
                adaptive.smoothing = take("smoothing").unwrap_or(adaptive.smoothing);
                adaptive.bounds.0 = take("least_gamma").unwrap_or(adaptive.bounds.0);
                adaptive.bounds.1 = take("most_gamma").unwrap_or(adaptive.bounds.1);
            }
            if let (Some(guard), Some(tokens)) = (&mut settings.memguard, take("bin_tokens")) {
                guard.bin_tokens = tokens as u32;
            }
            if take("adaptive") == Some(0.0) {
                settings.adaptive = None;
            }
            let most_seconds = take("most_boost_seconds").unwrap_or(Priorities::MOST_SECONDS);
            let clock_offset_seconds = take("clock_offset_seconds").unwrap_or(0.0);
            (Some(Priorities::UniBoost { settings, most_seconds, clock_offset_seconds }), UNIBOOST)
        }
        other => return Err(bad("priority", format!("{other:?}"), "\"none\", \"uniboost\" or \"vtc\"")),
    };
    if let Some(name) = given.keys().next() {
        return Err(bad("priority", format!("{name} with {kind:?}"), known));
    }
    priorities.map_or(Ok(()), |of| of.check())?;
    Ok(priorities)
}

fn bad(what: &str, got: String, expected: &str) -> crate::errors::Error {
    CoreError::BadValue { what: what.into(), got, expected: expected.into() }.into()
}
