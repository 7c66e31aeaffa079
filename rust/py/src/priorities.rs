//! Priority orders of requests, by name and settings.
use crate::errors::Result;
use crate::settings;
use lmetric_core::CoreError;
use lmetric_core::priority::{Adaptive, MemGuard, Settings};
use lmetric_core::router::Priorities;
use pyo3::prelude::*;
use pyo3::types::PyDict;

/// Returns the order with this name and these settings; `None` for `"none"`.
///
/// # Errors
/// `BadValue` for an unknown name or setting, or a value out of range.
pub fn priorities_of(kind: &str, settings: Option<&Bound<'_, PyDict>>) -> Result<Option<Priorities>> {
    let mut reader = settings::reader(&format!("priority {kind}"), settings)?;
    let priorities = match kind {
        "none" => None,
        "vtc" => Some(Priorities::Vtc),
        "uniboost" => {
            let adaptive = reader.one("adaptive")?.unwrap_or(true).then(Adaptive::default);
            let learned = Settings { adaptive, memguard: None, ..Settings::default() }.read(&mut reader)?;
            // No hysteresis: routers do not put running requests back into the queue.
            let mut memguard = MemGuard::default();
            memguard.bin_tokens = reader.one("bin_tokens")?.unwrap_or(memguard.bin_tokens);
            let max_seconds = reader.one("max_boost_seconds")?.unwrap_or(Priorities::MAX_SECONDS);
            let clock_offset_seconds = reader.one("clock_offset_seconds")?.unwrap_or(0.0);
            let settings = Settings { memguard: Some(memguard), ..learned };
            Some(Priorities::UniBoost { settings, max_seconds, clock_offset_seconds })
        }
        other => {
            let expected = "\"none\", \"uniboost\" or \"vtc\"".into();
            let (what, got) = ("priority".into(), format!("{other:?}"));
            return Err(CoreError::BadValue { what, got, expected }.into());
        }
    };
    reader.finish()?;
    priorities.map_or(Ok(()), |of| of.check())?;
    Ok(priorities)
}
