//! When prefixes are fetched from other instances.
use crate::error::CoreError;
use crate::ids::Seconds;
use serde::Deserialize;

/// When prefixes are pulled.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
#[serde(default)]
pub struct PullConfig {
    /// What a pulled token takes until it was learned: its KV bytes over the link's bytes a second.
    pub seconds_per_token: Seconds,
    /// What a pull takes besides, until it was learned.
    pub fixed_seconds: Seconds,
    /// No pull of fewer tokens.
    pub least_tokens: u32,
    /// Most pulls that one holder serves at once.
    pub most_pulls: u32,
    /// An instance pulls nothing while it reports that this share of its KV cache, or more, is in
    /// use: engines may hold what they have pulled for a lease behind the request's end, and would
    /// be full of what nobody needs. 1: it pulls until it is full.
    pub most_kv_usage: f64,
}

impl Default for PullConfig {
    /// 100 KB a token over 200 Gbit/s, and 5 ms for the request and the holder's step; four at once
    /// are a guess.
    fn default() -> PullConfig {
        PullConfig {
            seconds_per_token: 4e-6,
            fixed_seconds: 0.005,
            least_tokens: 256,
            most_pulls: 4,
            most_kv_usage: 1.0,
        }
    }
}

impl PullConfig {
    /// # Errors
    /// `BadValue` for a setting out of its range.
    pub fn check(&self) -> Result<(), CoreError> {
        let bad = |what: &str, got: String, expected: &str| {
            Err(CoreError::BadValue { what: format!("pull: {what}"), got, expected: expected.into() })
        };
        for (what, seconds) in
            [("seconds_per_token", self.seconds_per_token), ("fixed_seconds", self.fixed_seconds)]
        {
            if !(0.0..=1e6).contains(&seconds) {
                return bad(what, seconds.to_string(), "0 to 1e6 seconds");
            }
        }
        if !(0.0..=1.0).contains(&self.most_kv_usage) {
            return bad("most_kv_usage", self.most_kv_usage.to_string(), "a share of the KV cache, 0 to 1");
        }
        for (what, number) in [("least_tokens", self.least_tokens), ("most_pulls", self.most_pulls)] {
            if number == 0 {
                return bad(what, "0".into(), "a whole number of at least 1");
            }
        }
        Ok(())
    }
}
