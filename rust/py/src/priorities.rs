//! What requests are ordered by, by name and settings.
use crate::errors::Result;
use lmetric_core::CoreError;
use lmetric_core::priority::Settings;
use lmetric_core::router::Priorities;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use std::collections::BTreeMap;

/// Settings of the router's UniBoost beside those of [`Settings`].
const OWN: [&str; 3] = ["adaptive", "most_boost_seconds", "clock_offset_seconds"];
/// And one of those that would mean nothing: the router puts no running request back.
const NO_MEANING: &str = "hysteresis_seconds";

/// What is meant by a name with its settings; `none`: nothing.
///
/// # Errors
/// `BadValue` for a name or a setting that there is not, or a value out of range.
pub fn priorities_of(kind: &str, settings: Option<&Bound<'_, PyDict>>) -> Result<Option<Priorities>> {
    let mut given: BTreeMap<String, f64> = settings.map(|s| s.extract()).transpose()?.unwrap_or_default();
    let mut take = |name: &str| given.remove(name);
    let (priorities, known) = match kind {
        "none" => (None, vec!["nothing"]),
        "vtc" => (Some(Priorities::Vtc), vec!["nothing"]),
        "uniboost" => {
            let mut settings = Settings::default();
            match take("adaptive") {
                None | Some(1.0) => {}
                Some(0.0) => settings.adaptive = None,
                Some(other) => return Err(bad("priority: adaptive", other.to_string(), "0 or 1")),
            }
            let mut names: Vec<_> = settings.names().into_iter().filter(|&name| name != NO_MEANING).collect();
            for name in &names {
                if let Some(value) = take(name) {
                    settings.set(name, value)?;
                }
            }
            names.extend(OWN);
            let most_seconds = take("most_boost_seconds").unwrap_or(Priorities::MOST_SECONDS);
            let clock_offset_seconds = take("clock_offset_seconds").unwrap_or(0.0);
            (Some(Priorities::UniBoost { settings, most_seconds, clock_offset_seconds }), names)
        }
        other => return Err(bad("priority", format!("{other:?}"), "\"none\", \"uniboost\" or \"vtc\"")),
    };
    if let Some(name) = given.keys().next() {
        let fixed =
            matches!(priorities, Some(Priorities::UniBoost { settings, .. }) if settings.adaptive.is_none());
        let kind = format!("{kind:?}{}", if fixed { " and adaptive 0" } else { "" });
        return Err(bad("priority", format!("{name} with {kind}"), &known.join(", ")));
    }
    priorities.map_or(Ok(()), |of| of.check())?;
    Ok(priorities)
}

fn bad(what: &str, got: String, expected: &str) -> crate::errors::Error {
    CoreError::BadValue { what: what.into(), got, expected: expected.into() }.into()
}
