//! Settings of prefix fetches.
use crate::error::CoreError;
use crate::ids::Seconds;
use serde::Deserialize;

/// Settings of prefix fetches.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
#[serde(default)]
pub struct FetchConfig {
    /// Seconds per fetched token until learned: KV bytes per token over the link's bytes/s.
    pub seconds_per_token: Seconds,
    /// Fixed seconds per fetch until learned.
    pub fixed_seconds: Seconds,
    /// Minimum tokens of a fetch.
    pub min_tokens: u32,
    /// Maximum number of concurrent fetches that one holder serves.
    pub max_fetches: u32,
    /// An instance fetches nothing while its reported KV cache usage is at least this fraction.
    /// Engines may keep fetched KV for a lease after the end of the request, and would fill up with
    /// unused KV. 1: no limit.
    pub max_kv_usage: f64,
}

impl Default for FetchConfig {
    /// 100 KB per token over 200 Gbit/s, and 5 ms for the request and the holder's step. Four
    /// concurrent fetches are a guess.
    fn default() -> FetchConfig {
        FetchConfig {
            seconds_per_token: 4e-6,
            fixed_seconds: 0.005,
            min_tokens: 256,
            max_fetches: 4,
            max_kv_usage: 1.0,
        }
    }
}

impl FetchConfig {
    /// Checks the settings.
    ///
    /// # Errors
    /// `BadValue` for a setting out of its range.
    pub fn check(&self) -> Result<(), CoreError> {
        let bad = |what: &str, got: String, expected: &str| {
            Err(CoreError::BadValue { what: format!("prefix_fetch: {what}"), got, expected: expected.into() })
        };
        for (what, seconds) in
            [("seconds_per_token", self.seconds_per_token), ("fixed_seconds", self.fixed_seconds)]
        {
            if !(0.0..=1e6).contains(&seconds) {
                return bad(what, seconds.to_string(), "0 to 1e6 seconds");
            }
        }
        if !(0.0..=1.0).contains(&self.max_kv_usage) {
            return bad("max_kv_usage", self.max_kv_usage.to_string(), "a fraction of the KV cache, 0 to 1");
        }
        for (what, number) in [("min_tokens", self.min_tokens), ("max_fetches", self.max_fetches)] {
            if number == 0 {
                return bad(what, "0".into(), "a whole number of at least 1");
            }
        }
        Ok(())
    }
}
