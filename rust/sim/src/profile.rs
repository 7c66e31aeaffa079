//! What a model on a GPU costs: the constants of the step time, and the sizes of batch and cache.
use lmetric_core::CoreError;

/// One engine's constants. The field names are those of the profile files (YAML), whose `source` and `note` say where
/// the constants come from.
///
/// A step takes `fixed + a x decode sequences + b x their context tokens + c x prefill tokens + d x attention pairs`,
/// where a prefill chunk of `g` tokens behind `n` tokens of context has `g x (n + g / 2)` pairs.
#[derive(Clone, Debug, PartialEq)]
pub struct Profile {
    /// Seconds that every step takes.
    pub fixed_seconds: f64,
    /// `a`: seconds for each sequence that decodes.
    pub decode_seconds_per_sequence: f64,
    /// `b`: seconds for each token of context (prompt and output so far) of the sequences that decode.
    pub decode_seconds_per_context_token: f64,
    /// `c`: seconds for each prompt token computed.
    pub prefill_seconds_per_token: f64,
    /// `d`: seconds for each attention pair of the prompt tokens computed.
    pub prefill_seconds_per_attention_pair: f64,
    /// Most tokens of one step, decodes counted first. At least `max_sequences`: every decode gets its token.
    pub max_batch_tokens: u32,
    /// Most sequences that run at once.
    pub max_sequences: u32,
    /// Tokens of a KV block.
    pub block_tokens: u32,
    /// Blocks that the KV memory holds.
    pub cache_blocks: u32,
}

/// What one step computes.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StepWork {
    /// Sequences that decode one token each.
    pub decode_sequences: u32,
    /// Their prompt and output tokens so far.
    pub context_tokens: u64,
    /// Prompt tokens computed.
    pub prefill_tokens: u32,
    /// `g x (n + g / 2)` summed over the prefill chunks.
    pub prefill_attention_pairs: f64,
}

impl StepWork {
    /// Adds a prefill chunk of `tokens` tokens behind `before` tokens of context.
    pub fn add_prefill(&mut self, before: u32, tokens: u32) {
        self.prefill_tokens += tokens;
        self.prefill_attention_pairs += f64::from(tokens) * (f64::from(before) + f64::from(tokens) / 2.0);
    }
}

impl Profile {
    /// Seconds that a step with this work takes.
    pub fn step_seconds(&self, work: &StepWork) -> f64 {
        self.fixed_seconds
            + self.decode_seconds_per_sequence * f64::from(work.decode_sequences)
            + self.decode_seconds_per_context_token * work.context_tokens as f64
            + self.prefill_seconds_per_token * f64::from(work.prefill_tokens)
            + self.prefill_seconds_per_attention_pair * work.prefill_attention_pairs
    }

    /// Refuses constants that no engine can have.
    pub fn check(&self) -> Result<(), CoreError> {
        let bad = |field: &str, got: String, expected: String| {
            Err(CoreError::BadValue { what: format!("profile field {field}"), got, expected })
        };
        for (field, seconds) in [
            ("fixed_seconds", self.fixed_seconds),
            ("decode_seconds_per_sequence", self.decode_seconds_per_sequence),
            ("decode_seconds_per_context_token", self.decode_seconds_per_context_token),
            ("prefill_seconds_per_token", self.prefill_seconds_per_token),
            ("prefill_seconds_per_attention_pair", self.prefill_seconds_per_attention_pair),
        ] {
            if !(seconds.is_finite() && seconds >= 0.0) {
                return bad(field, seconds.to_string(), "a finite number of seconds, 0 or more".into());
            }
        }
        if self.fixed_seconds == 0.0 {
            return bad("fixed_seconds", "0".into(), "more than 0: a step takes time".into());
        }
        for (field, count) in [
            ("max_sequences", self.max_sequences),
            ("block_tokens", self.block_tokens),
            ("cache_blocks", self.cache_blocks),
        ] {
            if count == 0 || count > 1 << 30 {
                return bad(field, count.to_string(), "1 to 2^30".into());
            }
        }
        if self.max_batch_tokens < self.max_sequences {
            let expected =
                format!("max_sequences ({}) or more: every decode gets its token", self.max_sequences);
            return bad("max_batch_tokens", self.max_batch_tokens.to_string(), expected);
        }
        Ok(())
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Round constants, so that step times can be worked out by hand.
    pub(crate) fn round() -> Profile {
        Profile {
            fixed_seconds: 1.0,
            decode_seconds_per_sequence: 0.1,
            decode_seconds_per_context_token: 0.001,
            prefill_seconds_per_token: 0.01,
            prefill_seconds_per_attention_pair: 0.0001,
            max_batch_tokens: 64,
            max_sequences: 8,
            block_tokens: 16,
            cache_blocks: 32,
        }
    }

    #[test]
    fn a_step_is_the_sum_of_its_parts() {
        let mut work = StepWork { decode_sequences: 2, context_tokens: 150, ..Default::default() };
        work.add_prefill(100, 20);
        // 1 + 2 x 0.1 + 150 x 0.001 + 20 x 0.01 + 20 x (100 + 10) x 0.0001
        assert!((round().step_seconds(&work) - (1.0 + 0.2 + 0.15 + 0.2 + 0.22)).abs() < 1e-12);
    }

    #[test]
    fn bad_constants_are_named() {
        for (profile, field) in [
            (Profile { fixed_seconds: f64::NAN, ..round() }, "fixed_seconds"),
            (Profile { fixed_seconds: 0.0, ..round() }, "fixed_seconds"),
            (Profile { prefill_seconds_per_token: -1.0, ..round() }, "prefill_seconds_per_token"),
            (Profile { block_tokens: 0, ..round() }, "block_tokens"),
            (Profile { max_batch_tokens: 7, ..round() }, "max_batch_tokens"),
        ] {
            let message = profile.check().unwrap_err().to_string();
            assert!(message.contains(field), "{message}");
        }
        assert_eq!(round().check(), Ok(()));
    }
}
