//! Settings of warm fleet changes.
use crate::error::CoreError;
use crate::ids::Seconds;
use serde::Deserialize;

/// Settings of warm fleet changes.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
#[serde(default)]
pub struct WarmConfig {
    /// Longest time that an instance fetches before it takes requests, or before it may leave.
    pub max_seconds: Seconds,
    /// Largest number of concurrent fetches from one instance, and to one instance.
    pub max_fetches: u32,
    /// Fraction of the time that fetches may use a source's link. After each fetch the source
    /// rests, so that other transfers get through.
    pub link_share: f64,
    /// Largest fraction of an instance's cache that fetches fill.
    pub cache_share: f64,
    /// Shortest prefix worth a fetch, in tokens.
    pub min_tokens: u32,
    /// Seconds per fetched token, and fixed seconds per fetch, unless prefix fetches have learned
    /// them.
    pub seconds_per_token: Seconds,
    /// Fixed seconds per fetch.
    pub fixed_seconds: Seconds,
    /// Time after which a prompt counts half. Prompts older than ten times this do not count.
    pub half_life_seconds: Seconds,
    /// Largest number of block hashes of remembered prompts: 8 bytes each.
    pub max_blocks: usize,
}

impl Default for WarmConfig {
    fn default() -> WarmConfig {
        WarmConfig {
            max_seconds: 30.0,
            max_fetches: 2,
            link_share: 0.5,
            cache_share: 0.5,
            min_tokens: 256,
            seconds_per_token: 4e-6,
            fixed_seconds: 0.005,
            half_life_seconds: 120.0,
            max_blocks: 1 << 20,
        }
    }
}

impl WarmConfig {
    /// Checks the settings.
    ///
    /// # Errors
    /// `BadValue` for a setting out of its range.
    pub fn check(&self) -> Result<(), CoreError> {
        let bad = |what: &str, got: String, expected: &str| {
            Err(CoreError::BadValue { what: format!("warm changes: {what}"), got, expected: expected.into() })
        };
        for (what, seconds) in [
            ("max_seconds", self.max_seconds),
            ("seconds_per_token", self.seconds_per_token),
            ("fixed_seconds", self.fixed_seconds),
        ] {
            if !(0.0..=1e6).contains(&seconds) {
                return bad(what, seconds.to_string(), "0 to 1e6 seconds");
            }
        }
        if !(self.half_life_seconds > 0.0 && self.half_life_seconds <= 1e6) {
            return bad(
                "half_life_seconds",
                self.half_life_seconds.to_string(),
                "above 0, up to 1e6 seconds",
            );
        }
        for (what, share) in [("link_share", self.link_share), ("cache_share", self.cache_share)] {
            if !(share > 0.0 && share <= 1.0) {
                return bad(what, share.to_string(), "a fraction above 0, up to 1");
            }
        }
        if self.max_fetches == 0 {
            return bad("max_fetches", "0".into(), "1 or more");
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bad_values_are_named() {
        assert_eq!(WarmConfig::default().check(), Ok(()));
        for (config, what) in [
            (WarmConfig { max_seconds: -1.0, ..WarmConfig::default() }, "max_seconds"),
            (WarmConfig { half_life_seconds: 0.0, ..WarmConfig::default() }, "half_life_seconds"),
            (WarmConfig { link_share: 0.0, ..WarmConfig::default() }, "link_share"),
            (WarmConfig { cache_share: 1.5, ..WarmConfig::default() }, "cache_share"),
            (WarmConfig { max_fetches: 0, ..WarmConfig::default() }, "max_fetches"),
        ] {
            let message = config.check().unwrap_err().to_string();
            assert!(message.contains(what), "{message}");
        }
    }
}
